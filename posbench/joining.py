"""Evaluations on disk: found, read, and joined only where they are alike. No torch here.

One evaluation may hold several training lengths, corpora and tokenizers: they are blocks, and
nothing is compared across blocks. Evaluations from several folders are joined to be compared, so
they must agree in all of these, and rows that stand in one column must have scored the same tokens.
"""

from __future__ import annotations

import glob
import json
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from posbench.discovery import find_folders, outputs
from posbench.errors import UserError
from posbench.files import UNREADABLE
from posbench.results import (
    DocumentLoss,
    Evaluation,
    HeadAttention,
    PositionCurve,
    Row,
    Status,
    cell_of,
)
from posbench.results import read_results as _read
from posbench.runs import MANIFEST

RESULTS = "results.json"
MISMATCH = "mismatch"  # in the provenance: what was joined although it differs

Joined = TypeVar("Joined", Row, DocumentLoss, PositionCurve, HeadAttention)


@dataclass(frozen=True)
class Part:
    """One evaluation and the folder it was read from."""

    folder: Path
    evaluation: Evaluation


def read_results(folder: Path) -> Evaluation:
    """The evaluation in `folder`; raises UserError if there is none, or it is not as written."""
    where = folder / RESULTS
    if not where.is_file():
        raise UserError(
            f"{folder} holds no results.json. Name a folder that `posbench eval-extrapolate` "
            "wrote, such as outputs/eval-extrapolate/NAME."
        )
    try:
        return _read(folder)
    except UNREADABLE as error:
        raise UserError(
            f"{where} was not written by posbench, was changed since, or is damaged ({error}). "
            "Evaluate again with `posbench eval-extrapolate`."
        ) from error


# ---------------------------------------------------------------- finding


def find_evaluations(paths: Sequence[str | Path]) -> tuple[list[Part], list[str]]:
    """The evaluations that `paths` name, and a sentence about the runs that have none.

    A path (or glob) is the folder of an evaluation, or a run or sweep. All runs named stand for the
    newest evaluation that holds every one of them, or, if none does, for the newest of each; rows
    of other runs are left out. Evaluations are looked for below outputs/ and below the paths.
    Raises UserError if a path leads to nothing.
    """
    folders: list[Path] = []
    for path in paths:
        matches = sorted(glob.glob(str(path)))  # noqa: PTH207, absolute patterns too
        folders += [Path(match) for match in matches] or [Path(path)]
    evaluations, runs = [], []
    for folder in dict.fromkeys(folders):
        if not folder.exists():
            raise UserError(f"{folder}: no such folder (looked in {Path.cwd()}).")
        if (folder / RESULTS).is_file():
            evaluations.append(Part(folder, read_results(folder)))
        elif folder.is_dir() and any(folder.rglob(MANIFEST)):
            runs += [run for run in find_folders(folder) if run not in runs]
        else:
            raise UserError(
                f"{folder} holds neither results.json nor a run. Name the folder of an evaluation, "
                "a run, or a sweep."
            )
    found, missing = _of_runs(runs, [outputs(), *folders])
    return [*evaluations, *found], missing


def newest_evaluation() -> Part:
    """The newest evaluation below outputs(); raises UserError if there is none.

    Also if a file that cannot be read was written last: it may be the one that is meant.
    """
    folders = [where.parent for where in outputs().rglob(RESULTS)]
    parts = list(_readable(folders))
    known = {part.folder for part in parts}
    last = max(folders, key=lambda folder: (folder / RESULTS).stat().st_mtime, default=None)
    if last is not None and last not in known:
        read_results(last)
    if not parts:
        raise UserError(
            f"no evaluation found below {outputs().resolve()}, so there is nothing to report. Make "
            "one first: posbench eval-extrapolate. Or name its folder: posbench report DIR"
        )
    return max(parts, key=_age)


def _of_runs(runs: list[Path], places: list[Path]) -> tuple[list[Part], list[str]]:
    """The newest evaluations of `runs` below `places`, and what is said of those without one."""
    digests = {run: _checkpoint(run) for run in runs}
    wanted = set(digests.values()) - {""}
    if not runs:
        return [], []
    found = {where.resolve(): where.parent for place in places for where in place.rglob(RESULTS)}
    parts = sorted(_readable(found.values()), key=_age)
    held = [_digests(part.evaluation) & wanted for part in parts]
    newest: dict[str, Path] = {}
    for part, known in zip(parts, held, strict=True):
        newest |= dict.fromkeys(known, part.folder)
    whole = [part.folder for part, known in zip(parts, held, strict=True) if known == wanted]
    if wanted and whole:
        newest = dict.fromkeys(wanted, whole[-1])
    if not newest:
        raise UserError(
            f"no run at or below {runs[0]} has been evaluated (looked below {places[0].resolve()})."
            f" Evaluate first: posbench eval-extrapolate runs={runs[0]}"
        )
    kept = [
        Part(part.folder, _only(part.evaluation, own))
        for part in parts
        if (own := {digest for digest, folder in newest.items() if folder == part.folder})
    ]
    return kept, _left_out([run for run, digest in digests.items() if digest not in newest])


def _left_out(runs: list[Path]) -> list[str]:
    if len(runs) < 2:
        return [f"{run} has not been evaluated, and is left out." for run in runs]
    names = ", ".join(run.name for run in runs)
    return [f"{len(runs)} runs have not been evaluated, and are left out: {names}."]


def _readable(folders: Iterable[Path]) -> Iterator[Part]:
    """Evaluations that nobody named: a damaged one is none of ours to complain about."""
    for folder in folders:
        with suppress(UserError):
            yield Part(folder, read_results(folder))


def _checkpoint(run: Path) -> str:
    """SHA-256 of the checkpoint a run ended with, which is what an evaluation records of it."""
    try:
        return str(json.loads((run / MANIFEST).read_text())["checkpoint"]["sha256"])
    except UNREADABLE:
        return ""


def _digests(evaluation: Evaluation) -> set[str]:
    return {str(run.get("checkpoint_sha256", "")) for run in evaluation.runs}


def _age(part: Part) -> tuple[str, int]:
    """When it was measured; of a sweep and its last job, the sweep is the newer one."""
    records = part.evaluation.provenance.get("evaluations") or [{}]
    return max(str(each.get("created", "")) for each in records), len(part.evaluation.rows)


def _only(evaluation: Evaluation, digests: set[str]) -> Evaluation:
    """What an evaluation says of the runs with these checkpoints."""
    runs = [run for run in evaluation.runs if str(run.get("checkpoint_sha256", "")) in digests]
    ids = {run["run_id"] for run in runs}
    return replace(
        evaluation,
        rows=[row for row in evaluation.rows if row.run_id in ids],
        curves=[each for each in evaluation.curves if each.run_id in ids],
        documents=[each for each in evaluation.documents if each.run_id in ids],
        attention=[each for each in evaluation.attention if each.run_id in ids],
        runs=runs,
    )


# ---------------------------------------------------------------- joining


def join(parts: Sequence[Part], *, allow_mismatch: bool = False) -> Evaluation:
    """All parts as one evaluation.

    Raises UserError, naming the first difference, if they are not alike. With `allow_mismatch`
    they are joined all the same, and the differences stand in the provenance, which reports print.
    A cell measured twice with one result counts once.
    """
    differences = [*_between_folders(parts), *unlike(parts), *measured_twice(parts)]
    if differences and not allow_mismatch:
        raise UserError(_refusal(differences))
    joined = merge(parts)
    if differences:
        joined.provenance = joined.provenance | {MISMATCH: differences}
    return joined


def merge(parts: Sequence[Part]) -> Evaluation:
    """All parts as one evaluation, unchecked; a cell that several have is the first one's."""
    joined = parts[0].evaluation
    for part in parts[1:]:
        joined = joined.merged(part.evaluation)
    return replace(
        joined,
        rows=_once(joined.rows, cell_of),
        curves=_once(joined.curves, _model_at),
        documents=_once(joined.documents, lambda each: (*_loss(each), each.document)),
        attention=_once(joined.attention, lambda each: (*_model_at(each), each.layer, each.head)),
    )


def _refusal(differences: list[str]) -> str:
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    return (
        f"these results are not alike: {differences[0]}{more}. Leave one out, evaluate the runs "
        "together (posbench eval-extrapolate runs=[A,B]), or add --allow-mismatch, which is then "
        "written on the output."
    )


def unlike(parts: Sequence[Part]) -> list[str]:
    """One sentence for each column of a table that holds rows scored on different tokens.

    A column is a protocol and a ratio within one block; its rows must share the digest of their
    targets, and how many tokens the targets saw.
    """
    columns: dict[tuple[Any, ...], dict[tuple[Any, ...], tuple[Path, Row]]] = defaultdict(dict)
    for part in parts:
        for row in part.evaluation.rows:
            measured = row.status in (Status.ok, Status.nonfinite) and row.targets_sha256
            if not measured or row.metric not in ("ppl", "exact_match"):
                continue
            scored = (row.targets_sha256, row.min_context, _rounded(row.mean_context))
            columns[_column(row)].setdefault(scored, (part.folder, row))
    said = []
    for kinds in columns.values():
        (first, one), *others = kinds.items()
        for other, two in others:
            said.append(_difference(first, one, other, two))
    return said


def _column(row: Row) -> tuple[Any, ...]:
    return (
        row.train_length,
        row.corpus_fingerprint,
        row.tokenizer_sha256,
        row.protocol,
        row.metric,
        row.ratio,
    )


def _rounded(mean: float | None) -> float | None:
    return None if mean is None or not math.isfinite(mean) else round(mean, 6)


def _difference(
    first: tuple[Any, ...],
    one: tuple[Path, Row],
    other: tuple[Any, ...],
    two: tuple[Path, Row],
) -> str:
    names = ("targets_sha256", "min_context", "mean_context")
    name, a, b = next(
        (name, a, b) for name, a, b in zip(names, first, other, strict=True) if a != b
    )
    row = one[1]
    return (
        f"{row.protocol} at {row.ratio:g}x has {name}={_short(a)} for {row.run_id} ({one[0]}) but "
        f"{_short(b)} for {two[1].run_id} ({two[0]})"
    )


def _short(value: Any) -> str:
    return str(value)[:12] or "none"


# What all folders must agree in, and where it is read.
_ALIKE = ("corpus_fingerprint", "tokenizer_sha256", "train_length", "protocol id")


def _between_folders(parts: Sequence[Part]) -> list[str]:
    """One sentence for each property in which a folder differs from the first."""
    said = []
    for name in _ALIKE:
        values = [_values(part.evaluation, name) for part in parts]
        for part, here in zip(parts[1:], values[1:], strict=True):
            if here and values[0] and here != values[0]:
                said.append(
                    f"{name} is {_listed(values[0])} in {parts[0].folder} but {_listed(here)} in "
                    f"{part.folder}"
                )
    return said


def _values(evaluation: Evaluation, name: str) -> set[str]:
    if name == "protocol id":
        records = [run.get("protocol") for run in evaluation.runs]
        return {str(each["protocol"]) for each in records if isinstance(each, dict)}
    rows = [row for row in evaluation.rows if row.status is not Status.skipped]
    return {str(getattr(row, name)) for row in rows} - {""}


def _listed(values: set[str]) -> str:
    return ", ".join(sorted(value[:12] for value in values))


def measured_twice(parts: Sequence[Part]) -> list[str]:
    """One sentence for each run with two different numbers in one cell, from two folders."""
    seen: dict[tuple[Any, ...], tuple[Path, Row]] = {}
    said: dict[str, str] = {}
    for part in parts:
        for row in part.evaluation.rows:
            folder, before = seen.setdefault(cell_of(row), (part.folder, row))
            if folder != part.folder and _numbers(before) != _numbers(row):
                said.setdefault(
                    row.run_id,
                    f"{row.run_id} was measured twice, {row.protocol} {row.metric} at "
                    f"{row.ratio:g}x is {before.value} in {folder} but {row.value} in "
                    f"{part.folder}",
                )
    return list(said.values())


def _numbers(row: Row) -> str:
    """All but what it cost, which is never twice the same; as text, for nan is not equal to nan."""
    return repr(replace(row, seconds=None, tokens_per_s=None, peak_mem_mb=None))


def _loss(each: DocumentLoss) -> tuple[Any, ...]:
    return each.run_id, each.extension, each.variant, each.protocol, each.eval_length


def _model_at(each: PositionCurve | HeadAttention) -> tuple[Any, ...]:
    return each.run_id, each.extension, each.variant, each.eval_length


def _once(records: list[Joined], key: Callable[[Joined], Hashable]) -> list[Joined]:
    """The first record of each key."""
    kept: dict[Hashable, Joined] = {}
    for record in records:
        kept.setdefault(key(record), record)
    return list(kept.values())
