"""The runs, sweeps and evaluations below a folder: how each stands, what differs, removing them.

Nothing here loads a checkpoint or code; a link is never followed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from posbench.discovery import outputs
from posbench.errors import UserError
from posbench.files import UNREADABLE, storage
from posbench.jobs.evaluate import FILES as EVALUATION_FILES
from posbench.runs import FILES as RUN_FILES
from posbench.runs import JOB, JOB_LOG, LOCK, MANIFEST, TOKENIZER, Lock, flat, is_locked
from posbench.sweeps import MULTIRUN, RESULTS, SWEEP, State, is_sweep, load_sweep, natural

FINISHED, RUNNING, UNFINISHED = "finished", "running", "unfinished"
FAILED = {str(state) for state in State if state.is_failure}
_WRITTEN = {*RUN_FILES, *EVALUATION_FILES, SWEEP, MULTIRUN}  # all that posbench leaves


class Kind(StrEnum):
    run = "run"
    sweep = "sweep"
    evaluation = "evaluation"


@dataclass(frozen=True)
class Item:
    """One thing that posbench has written, and how it stands now."""

    path: Path
    kind: Kind
    status: str
    encoding: str
    seed: str
    size: int  # bytes
    changed: float  # seconds since 1970, of its newest file
    jobs: tuple[Item, ...] = ()

    @property
    def seconds_old(self) -> float:
        """Since anything in it was written."""
        return max(0.0, time.time() - self.changed)

    @property
    def progress(self) -> str:
        """Its status; of a sweep that is not finished also how many jobs are."""
        if self.kind is not Kind.sweep or self.status == FINISHED:
            return self.status
        done = sum(job.status == FINISHED for job in self.jobs)
        return f"{self.status} {done}/{len(self.jobs)}"

    def record(self) -> dict[str, Any]:
        """Everything of it as plain JSON values."""
        found = {
            "path": str(self.path),
            "kind": str(self.kind),
            "status": self.status,
            "encoding": self.encoding or None,
            "seed": self.seed or None,
            "bytes": self.size,
            "seconds_old": round(self.seconds_old),
        }
        return found | ({"jobs": [job.record() for job in self.jobs]} if self.jobs else {})


def items(places: Sequence[Path] = ()) -> list[Item]:
    """All at or below `places`, or the default folder; newest last. Raises UserError for none."""
    found: dict[Path, Item] = {}  # each once, though places overlap
    for place in places or [outputs()]:
        if places and not place.is_dir():
            raise UserError(f"{place} is not a folder.")
        if place.is_dir():
            found = {item.path.resolve(): item for item in _below(place)} | found
    return sorted(_outermost(found), key=lambda item: item.changed)


def _below(folder: Path) -> Iterator[Item]:
    item = item_at(folder)
    if item is not None:
        yield item
        return
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
            yield from _below(child)


def item_at(folder: Path) -> Item | None:
    """What `folder` itself is; None for anything that posbench did not write."""
    if folder.is_symlink() or not folder.is_dir():
        return None
    if is_sweep(folder):
        return _sweep(folder)
    if (folder / MANIFEST).is_file():
        return _run(folder)
    if _is_evaluation(folder):
        return Item(folder, Kind.evaluation, _live_or(folder, FINISHED), "", "", *_extent(folder))
    if (folder / JOB).is_file() or (folder / JOB_LOG).is_file():  # it failed before it began
        return Item(folder, Kind.run, _live_or(folder, _ended(folder)), "", "", *_extent(folder))
    return None


def _is_evaluation(folder: Path) -> bool:
    with contextlib.suppress(*UNREADABLE):
        record = json.loads((folder / RESULTS).read_text())
        return "provenance" in record and "rows" in record
    return False


def _sweep(folder: Path) -> Item:
    try:
        sweep = load_sweep(folder)
    except UserError:
        return Item(folder, Kind.sweep, "unreadable", "", "", *_extent(folder))
    jobs = []
    for job in sweep.jobs:
        at = item_at(folder / job.folder)
        kind = Kind.run if sweep.command == "train" else Kind.evaluation
        jobs.append(at or Item(folder / job.folder, kind, str(State.waiting), "", "", 0, 0.0))
    finished = bool(jobs) and all(job.status == FINISHED for job in jobs)
    status = _live_or(folder, FINISHED if finished else UNFINISHED)
    encodings = ", ".join(dict.fromkeys(job.encoding for job in jobs if job.encoding))
    seeds = ", ".join(sorted({job.seed for job in jobs if job.seed}, key=natural))
    extent = _extent(folder)
    return Item(folder, Kind.sweep, status, encodings, seeds, *extent, jobs=tuple(jobs))


def _run(folder: Path) -> Item:
    manifest = _read(folder / MANIFEST)
    status, encoding, seed = "unreadable", "", ""
    with contextlib.suppress(*UNREADABLE):
        encoding = manifest["run_id"].rsplit("-s", 1)[0]
        seed = str(manifest["settings"]["seed"])
        status = str(manifest["status"])
    if status == "running":  # as its last words; its lock knows
        status = _ended(folder)
    return Item(folder, Kind.run, _live_or(folder, status), encoding, seed, *_extent(folder))


def _live_or(folder: Path, status: str) -> str:
    return RUNNING if is_locked(folder) else status


def _ended(folder: Path) -> str:
    """How the sweep that ran it says it ended; unfinished if it says nothing of a failure."""
    state = str(_read(folder / JOB).get("state"))
    return state if state in FAILED else UNFINISHED


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(*UNREADABLE):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _extent(folder: Path) -> tuple[int, float]:
    """Bytes of all files below `folder`, and when the newest was written."""
    size, newest = 0, 0.0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found = Path(where, name).lstat()
                size += found.st_size
                newest = max(newest, found.st_mtime if name != LOCK else 0.0)
    return size, newest or folder.lstat().st_mtime


# ---------------------------------------------------------------- what differs


def differing(one: Path, other: Path) -> dict[str, tuple[Any, Any]]:
    """Settings, versions and data that differ: name -> (of one, of the other).

    Of two sweeps: the jobs that only one of them has. Raises UserError for unlike things.
    """
    left, right = _named(one), _named(other)
    if left.kind is not right.kind:
        raise UserError(f"{one} is a {left.kind}, {other} a {right.kind}; they cannot be compared.")
    if left.kind is Kind.sweep:
        return _differing_jobs(one, other)
    before, after = _facts(left), _facts(right)
    return {
        key: (before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    }


def _differing_jobs(one: Path, other: Path) -> dict[str, tuple[Any, Any]]:
    before, after = load_sweep(one), load_sweep(other)
    sides: dict[str, tuple[Any, Any]] = {}
    for here, there, side in (
        (before, after, ("asked for", None)),
        (after, before, (None, "asked for")),
    ):
        for job in here.jobs:
            if job.key not in there.keys:
                sides[f"job {job.label or job.folder}"] = side
    return sides


def _named(path: Path) -> Item:
    item = item_at(path)
    if item is None:
        what = "is a link; name the folder itself" if path.is_symlink() else (
            "is no run, sweep or evaluation of posbench" if path.exists() else "does not exist"
        )  # fmt: skip
        raise UserError(f"{path} {what}.")
    return item


def _facts(item: Item) -> dict[str, Any]:
    if item.kind is Kind.evaluation:
        record = _read(item.path / RESULTS).get("provenance", {})
        asked = [each.get("asked", {}) for each in record.get("evaluations", [])]
        rest = {key: value for key, value in record.items() if key != "evaluations"}
        return {key: value for each in asked for key, value in each.items()} | flat(rest)
    manifest = _read(item.path / MANIFEST)
    corpus = manifest.get("corpus", {})
    data = {f"corpus.{key}": corpus.get(key) for key in ("fingerprint", "vocabulary")}
    data["tokenizer"] = manifest.get("files", {}).get(TOKENIZER)
    versions = {key: manifest.get(key) for key in ("posbench", "python")}
    runtime = {f"runtime.{key}": value for key, value in manifest.get("runtime", {}).items()}
    return flat(manifest.get("settings", {})) | data | versions | runtime


# ---------------------------------------------------------------- removing


def chosen(
    found: Iterable[Item], unfinished: bool, failed: bool, older_than: float | None
) -> list[Item]:
    """What of `found` is unfinished, or failed, and untouched for `older_than` seconds.

    Of a sweep only such jobs, and the whole sweep if every job is one. Nothing that is running.
    """

    def fits(item: Item) -> bool:
        if item.status == RUNNING or item.seconds_old < (older_than or 0):
            return False
        if not unfinished and not failed:
            return True
        is_failed = item.status in FAILED
        return (failed and is_failed) or (unfinished and not is_failed and item.status != FINISHED)

    selected: list[Item] = []
    for item in found:
        if item.status == RUNNING:
            continue
        jobs = [job for job in item.jobs if fits(job)]
        if item.jobs and len(jobs) < len(item.jobs):
            selected += [job for job in jobs if job.path.is_dir()]
        elif fits(item) or item.jobs:
            selected.append(item)
    return selected


def named(paths: Iterable[Path]) -> list[Item]:
    """The things in the folders a person named, each once; raises UserError for anything else."""
    return _outermost({path.resolve(): _named(path) for path in paths})


def _outermost(found: dict[Path, Item]) -> list[Item]:
    """Without those that lie inside another; known by their true paths."""
    return [item for path, item in found.items() if not found.keys() & set(path.parents)]


def remove(found: Iterable[Item]) -> None:
    """Delete these folders; all or, with a UserError, none of them.

    None that is in use, and none with a file in it that posbench did not write.
    """
    found = list(found)
    for item in found:
        _refuse_foreign(item)
    locks: list[Lock] = []
    try:
        for item in found:
            locks += [_locked(path) for path in _folders(item)]
        for item in found:
            with storage(item.path):
                shutil.rmtree(item.path)
    finally:
        for lock in locks:
            lock.discard()
            lock.release()


def _folders(item: Item) -> list[Path]:
    return [item.path, *(job.path for job in item.jobs if job.path.is_dir())]


def _locked(folder: Path) -> Lock:
    try:
        return Lock(folder)
    except UserError:
        raise UserError(f"{folder} is in use by a living process; nothing was deleted.") from None


def _refuse_foreign(item: Item) -> None:
    own = {job.path.name for job in item.jobs}
    for entry in sorted(item.path.iterdir()):
        is_ours = entry.name in _WRITTEN | own or entry.name.endswith(".tmp")
        if not is_ours or (entry.is_symlink() and entry.name in own):
            raise UserError(
                f"{item.path} holds {entry.name}, which posbench did not write; nothing was "
                "deleted. Move it elsewhere first."
            )
    for job in item.jobs:
        if job.path.is_dir():
            _refuse_foreign(job)
