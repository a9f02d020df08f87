"""`posbench tb-export`: TensorBoard's files again, from what runs and evaluations recorded."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from posbench import journal
from posbench.board import (
    clear,
    folder_name,
    is_ours,
    run_name,
    write_sub_runs,
    write_train_board,
)
from posbench.board.names import distinct
from posbench.board.train import Record
from posbench.discovery import holders
from posbench.errors import PosbenchError, UserError
from posbench.files import UNREADABLE, storage
from posbench.joining import RESULTS, read_results
from posbench.results import Evaluation
from posbench.runs import MANIFEST, METRICS, TENSORBOARD, Lock, PluginError, load_run, scheme_of


@dataclass
class Trained:
    """A training run: its folder, its name in a legend, its journal."""

    folder: Path
    name: str
    records: list[Record]

    def write(self, board: Path) -> None:
        """Write its curves as the one sub-run of `board`."""
        write_train_board(board / self.name, self.records)


@dataclass
class Evaluated:
    """An evaluation and its folder."""

    folder: Path
    evaluation: Evaluation

    def write(self, board: Path) -> None:
        """Write its sub-runs into `board`."""
        write_sub_runs(self.evaluation, board)


@dataclass
class Found:
    """What there is to write, and what cannot be read."""

    runs: list[Trained]
    evaluations: list[Evaluated]
    errors: list[PosbenchError]

    @property
    def all(self) -> list[Trained | Evaluated]:
        """Runs, then evaluations."""
        return [*self.runs, *self.evaluations]


def run_export(paths: list[Path], out: Path | None) -> None:
    """Write the boards of all runs and evaluations at or below `paths`.

    Each into its own folder's tb/, or all of them into `out`. A folder that cannot be read is left
    alone, and its error raised once the others are written. Raises UserError, before anything is
    changed, if there is nothing, if a run is being written, or if `out` holds anything else.
    """
    found = _find(paths)
    if not found.all and found.errors:
        raise found.errors[0]
    if not found.all:
        names = ", ".join(map(str, paths))
        raise UserError(
            f"{names}: nothing to show, no {METRICS} with a record and no {RESULTS} there."
        )
    for error in found.errors:
        print(f"warning: {error}", file=sys.stderr, flush=True)
    if out is None:
        _write_each(found)
    else:
        found.evaluations = _outermost(found.evaluations)
        _write_together(found, out)
    print(f"rebuilt      {_count(found.runs, 'run')}, {_count(found.evaluations, 'evaluation')}")
    for path in paths if out is None else [out]:
        print(f"TensorBoard  tensorboard --logdir {path}", flush=True)
    if found.errors:
        raise found.errors[0]


def _count(things: list[Trained] | list[Evaluated], word: str) -> str:
    return f"{len(things)} {word}{'' if len(things) == 1 else 's'}"


# ---------------------------------------------------------------- what there is


def _find(paths: list[Path]) -> Found:
    found = Found([], [], [])
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such folder (looked in {Path.cwd()}).")
    for folder in _folders(paths, MANIFEST):
        try:
            run = _trained(folder)
        except PosbenchError as error:
            found.errors.append(error)
        else:
            found.runs += [run] if run.records else []  # none before the first step
    for folder in _folders(paths, RESULTS):
        try:
            found.evaluations.append(Evaluated(folder, read_results(folder)))
        except PosbenchError as error:
            found.errors.append(error)
    return found


def _folders(paths: list[Path], name: str) -> list[Path]:
    """The folders with a file of this name at or below `paths`, each once."""
    found = {folder.resolve(): folder for path in paths for folder in holders(path, name)}
    return list(found.values())


def _trained(folder: Path) -> Trained:
    try:
        run = load_run(folder)
    except PluginError as error:  # curves need no code of the encoding
        run = error.run
    name = run_name(scheme_of(run.settings), run.settings.seed)
    return Trained(folder, name, journal.read(folder / METRICS))


# ---------------------------------------------------------------- where it goes


def _write_each(found: Found) -> None:
    """Every folder's own tb/; all of them are locked before the first is changed."""
    with ExitStack() as stack:
        for each in found.all:
            lock = _lock(each.folder)
            stack.callback(lock.release)
            stack.callback(lock.discard)
        for each in found.all:
            with _replacing(each.folder / TENSORBOARD) as board:
                _write(each, board)


def _lock(folder: Path) -> Lock:
    try:
        return Lock(folder)
    except UserError:
        raise UserError(
            f"{folder} is in use, so its {TENSORBOARD}/ is being written now. Wait for its end, or "
            "write elsewhere with --out DIR."
        ) from None


def _write_together(found: Found, out: Path) -> None:
    """All in one folder: runs below train/, evaluations below eval/."""
    _check_out(out)
    bases = Counter(run.name for run in found.runs)
    for run in found.runs:
        if bases[run.name] > 1:
            run.name += f"-{folder_name(run.folder.resolve().name)}"
    for run, name in zip(found.runs, distinct(run.name for run in found.runs), strict=True):
        run.name = name
    places = distinct(
        f"eval/{folder_name(each.folder.resolve().name)}" for each in found.evaluations
    )
    with _replacing(out) as board:
        for run in found.runs:
            _write(run, board / "train")
        for each, place in zip(found.evaluations, places, strict=True):
            _write(each, board / (place if len(places) > 1 else "eval"))


@contextmanager
def _replacing(board: Path) -> Iterator[Path]:
    """A new folder to write into; when all is written, it replaces what posbench wrote in `board`.

    Files of anybody else in `board` stay. Raises StorageError.
    """
    with storage(board):
        board.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=board.parent, prefix=f".{board.name}-") as name:
            yield Path(name)
            clear(board)
            for file in [path for path in Path(name).rglob("*") if is_ours(path)]:
                place = board / file.relative_to(name)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(file, place)


def _outermost(evaluations: list[Evaluated]) -> list[Evaluated]:
    """Without the jobs of a sweep whose merged evaluation is there."""
    folders = {each.folder.resolve() for each in evaluations}
    return [each for each in evaluations if not folders & set(each.folder.resolve().parents)]


def _check_out(out: Path) -> None:
    """Raise UserError unless `out` is new, empty, or an earlier export and nothing else."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is not a folder.")
    if any((out.resolve().parent / name).exists() for name in (MANIFEST, RESULTS)):
        raise UserError(f"--out {out} belongs to the run or evaluation there. Choose another.")
    files = (path for path in out.rglob("*") if not path.is_dir())
    foreign = next((path for path in files if not is_ours(path)), None)
    if foreign is not None:
        raise UserError(
            f"--out {out} holds more than an earlier export (it has {foreign.relative_to(out)}). "
            "Choose another."
        )


def _write(each: Trained | Evaluated, board: Path) -> None:
    try:
        each.write(board)
    except OSError:
        raise
    except UNREADABLE as error:
        name = METRICS if isinstance(each, Trained) else RESULTS
        raise UserError(
            f"{each.folder / name} holds what posbench did not write: {error}. Nothing was changed "
            "there."
        ) from None
