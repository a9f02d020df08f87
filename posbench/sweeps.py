"""Sweep folders: what was asked, how each job ended, which sweep a command goes on with. No torch.

sweep.json       the command, and for each job its folder, its key and how it ended
multirun.yaml    the settings that the jobs share, as Hydra composed them
0-rope/ ...      a folder for each job: a run or an evaluation, with
  job.log          what the job said, of every attempt
  job.json         how the last attempt ended, with its traceback or last lines
.lock            held by the process that runs the sweep
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from posbench.errors import Exit, StorageError, UserError
from posbench.files import UNREADABLE, write_json
from posbench.runs import (
    JOB,
    JOB_FILES,
    LOCK,
    MANIFEST,
    clear,
    digest,
    is_locked,
    now,
    saved_identity,
)
from posbench.version import __version__

FORMAT = 1
SWEEP, MULTIRUN = "sweep.json", "multirun.yaml"
RESULTS = "results.json"
NAME_BYTES = 100  # of a job's folder: far below what disks take, for paths go on below it
LAST_LINES = 20
LOG_BYTES = 65536  # read back from the end of a job's log


class State(StrEnum):
    """How a job of a sweep stands, in the words of its table."""

    waiting = "not started"
    running = "running"
    done = "done"
    failed = "failed"
    killed = "killed"
    timed_out = "timed out"
    diverged = "diverged"
    memory = "out of memory"
    stopped = "stopped"  # it was asked to, and can go on

    @property
    def is_failure(self) -> bool:
        """Whether the job ended, and neither well nor because it was asked to."""
        return self not in (State.waiting, State.running, State.done, State.stopped)


def state_of(code: int) -> State:
    """What an exit code means; a negative one is a signal."""
    if code < 0:
        return State.killed
    words = {0: State.done, Exit.DIVERGED: State.diverged, Exit.MEMORY: State.memory}
    return words.get(code, State.failed)


@dataclass
class Entry:
    """One job of a sweep. `key` is the hash of its settings: the same key, the same job."""

    folder: str
    key: str
    label: str
    state: State = State.waiting
    code: int | None = None
    seconds: float = 0.0
    reason: str = ""


@dataclass
class Sweep:
    """A sweep as its folder tells it."""

    folder: Path
    command: str  # train or eval-extrapolate
    words: list[str]  # typed after it
    created: str = field(default_factory=now)
    jobs: list[Entry] = field(default_factory=list)

    @property
    def keys(self) -> set[str]:
        return {job.key for job in self.jobs}

    def entry(self, key: str) -> Entry | None:
        return next((job for job in self.jobs if job.key == key), None)

    def is_done(self, job: Entry) -> bool:
        """Whether a job has finished; its own folder decides, for it may have been resumed."""
        folder = self.folder / job.folder
        if not has_finished(self.command, folder):
            return False
        if self.command != "train":
            return job.state is State.done
        with contextlib.suppress(*UNREADABLE):
            manifest = json.loads((folder / MANIFEST).read_text())
            return digest(saved_identity(manifest["settings"])) == job.key.split("-")[0]
        return False

    def save(self) -> None:
        """Write sweep.json, atomically."""
        record = {
            "format": FORMAT,
            "posbench": __version__,
            "command": self.command,
            "words": self.words,
            "created": self.created,
            "updated": now(),
            "jobs": [asdict(job) for job in self.jobs],
        }
        write_json(self.folder / SWEEP, record)


def has_finished(command: str, folder: Path) -> bool:
    """Whether the folder of a job holds what `command` leaves at its end."""
    if command != "train":
        return (folder / RESULTS).is_file()
    with contextlib.suppress(*UNREADABLE):
        return bool(json.loads((folder / MANIFEST).read_text())["status"] == "finished")
    return False


def load_sweep(folder: Path) -> Sweep:
    """The sweep in `folder`; raises UserError if its record cannot be read."""
    path = folder / SWEEP
    try:
        record = json.loads(path.read_text())
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']}, not {FORMAT}")
        jobs = [Entry(**job | {"state": State(job["state"])}) for job in record["jobs"]]
        for job in jobs:
            if not isinstance(job.key, str) or job.folder != component(job.folder):
                raise ValueError(f"{job.folder!r} is no folder of a job")
        return Sweep(folder, record["command"], record["words"], str(record["created"]), jobs)
    except UNREADABLE as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def is_sweep(folder: Path) -> bool:
    """Whether `folder` holds a sweep."""
    return (folder / SWEEP).is_file()


def find_sweeps(root: Path) -> list[Sweep]:
    """The sweeps right below `root` that can be read, newest first."""
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        if is_sweep(folder):
            with contextlib.suppress(UserError):
                found.append(load_sweep(folder))
    return sorted(found, key=lambda sweep: sweep.created, reverse=True)


def continued(root: Path, command: str, keys: Iterable[str]) -> Sweep | None:
    """The sweep below `root` that a command for these jobs goes on with; None: a new one.

    It is the newest that has an unfinished job and no job but those asked for. One with the very
    same jobs goes before one that has fewer, which the command makes wider. Raises UserError if
    the same sweep is running.
    """
    asked = set(keys)
    same, narrower = [], []
    for sweep in find_sweeps(root):
        if sweep.command != command or not sweep.keys or not sweep.keys <= asked:
            continue
        if sweep.keys < asked:
            narrower.append(sweep)
        elif not all(sweep.is_done(job) for job in sweep.jobs):
            same.append(sweep)
    if same and is_locked(same[0].folder):
        raise UserError(
            f"this sweep is running, in {same[0].folder}. Wait for it, or start another with "
            "hydra.sweep.dir=DIR."
        )
    if same:
        return same[0]
    return next((sweep for sweep in narrower if not is_locked(sweep.folder)), None)


def sweep_in(folder: Path, command: str, keys: Iterable[str], overwrite: bool) -> Sweep | None:
    """The sweep in a folder that was named, to go on with; None if the folder is free.

    Raises UserError if it holds another sweep, unless `overwrite`, or a run or an evaluation.
    """
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"cannot write {folder}: it is a file.")
    for name in (MANIFEST, RESULTS):
        if not is_sweep(folder) and (folder / name).exists():
            what = "a run" if name == MANIFEST else "an evaluation"
            raise UserError(f"{folder} holds {what}, no sweep. Choose another hydra.sweep.dir.")
    if not is_sweep(folder):
        return None
    sweep = load_sweep(folder)
    if overwrite or (sweep.command == command and sweep.keys & set(keys)):
        return sweep
    typed = " ".join(["posbench", sweep.command, *sweep.words])
    way = ", or overwrite=true to start anew in this one" if command == "train" else ""
    raise UserError(
        f"{folder} holds another sweep ({typed}), which has none of these jobs. Choose another "
        f"hydra.sweep.dir{way}."
    )


def start_anew(sweep: Sweep) -> None:
    """Forget the jobs of a sweep, and remove the runs they left."""
    busy = [job.folder for job in sweep.jobs if is_locked(sweep.folder / job.folder)]
    if busy:
        raise UserError(f"{sweep.folder / busy[0]} is in use by a living process.")
    for job in sweep.jobs:
        folder = sweep.folder / job.folder
        clear(folder)
        for name in (*JOB_FILES, LOCK):
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody's own files stay
            folder.rmdir()
    sweep.jobs.clear()


def component(name: str) -> str:
    """`name` as one part of a path: no separators, not hidden, not too long for a disk.

    Whatever has to be changed is told apart by a hash of all of it.
    """
    plain = "".join("-" if char in "/\\\0" or not char.isprintable() else char for char in name)
    plain = plain.lstrip(".") or "-"
    if plain == name and len(name.encode()) <= NAME_BYTES:
        return name
    tag = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:8]
    head = plain.encode(errors="replace")[: NAME_BYTES - len(tag) - 1]
    return f"{head.decode(errors='ignore')}-{tag}"


# ---------------------------------------------------------------- how a job ended


def ended_since(folder: Path, time: float) -> list[Entry]:
    """The jobs right below `folder` whose job.json is not older than `time`, by name."""
    found = []
    for path in folder.glob(f"*/{JOB}"):
        with contextlib.suppress(*UNREADABLE):
            if path.stat().st_mtime >= time:
                record = json.loads(path.read_text())
                values = {item.name: record[item.name] for item in fields(Entry)}
                found.append(Entry(**values | {"state": State(record["state"])}))
    return sorted(found, key=lambda entry: natural(entry.folder))


def natural(name: str) -> tuple[int, str]:
    """Sort key that puts job 2 before job 10."""
    number = name.split("-")[0]
    return (int(number) if number.isdecimal() else 0, name)


def last_lines(log: Path, start: int = 0) -> list[str]:
    """The end of what was written to `log` after `start` bytes; empty lines left out."""
    try:
        with log.open("rb") as file:
            size = log.stat().st_size
            file.seek(max(start, size - LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def traceback_in(lines: Sequence[str]) -> list[str]:
    """The first traceback and all after it, for causes come first; without one, the last lines."""
    starts = [n for n, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    return list(lines[starts[0] :] if starts else lines[-LAST_LINES:])


def write_job(folder: Path, entry: Entry, command: Sequence[str], said: Sequence[str]) -> None:
    """Write job.json: how a job ended, and what it said at its end if that was not well."""
    record: dict[str, Any] = asdict(entry) | {"ended": now(), "command": list(command)}
    record["traceback"] = [] if entry.state is State.done else list(said)
    write_json(folder / JOB, record)
