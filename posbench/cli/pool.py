"""Processes side by side: started as slots fall free, watched, stopped together, none left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from posbench.cli.sweepview import JobProgress, SweepView
from posbench.errors import StorageError
from posbench.files import storage
from posbench.progress import PROGRESS_FILE
from posbench.runs import JOB_LOG
from posbench.sweeps import State, last_lines, state_of, traceback_in

GRACE_SECONDS = 60.0  # time for a job to save a checkpoint after it was asked to stop
POLL_SECONDS = 0.1
PARENT = "POSBENCH_PARENT"  # a job that finds its parent gone stops by itself


@dataclass(frozen=True)
class Job:
    """One process to be run; what it says goes to a log in its folder."""

    number: int
    folder: Path
    label: str
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def log(self) -> Path:
        return self.folder / JOB_LOG


@dataclass(frozen=True)
class Outcome:
    """How a job stands; `code` is None for one that was not started here, or is running."""

    job: Job
    state: State = State.waiting
    code: int | None = None
    seconds: float = 0.0
    reason: str = ""
    said: tuple[str, ...] = ()  # its traceback, or its last lines


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    slot: int
    progress: Path
    log_start: int  # bytes that earlier attempts left in its log
    started: float = field(default_factory=time.monotonic)
    asked: State | None = None  # to stop: because time is up, or because all are to stop
    deadline: float = float("inf")  # then it is killed


def _nothing(_outcome: Outcome) -> None:
    pass


def _no_doubt(_job: Job) -> bool:
    return True


class Pool:
    """Runs jobs, at most one per slot; a slot is what it adds to a job's environment."""

    def __init__(
        self,
        jobs: Sequence[Job],
        slots: Sequence[dict[str, str]],
        *,
        timeout: float | None = None,
        stop_on_failure: bool = False,
        note: Callable[[Outcome], None] = _nothing,
        has_finished: Callable[[Job], bool] = _no_doubt,
    ) -> None:
        """`timeout`: seconds that one job may take.

        `note` hears of each job that starts or ends; `has_finished` says whether one that ended
        with exit code 0 has left what it was to leave.
        """
        self.waiting = list(jobs)
        self.order = {job: index for index, job in enumerate(jobs)}
        self.slots = slots
        self.free = list(range(len(slots)))
        self.running: list[_Running] = []
        self.outcomes: list[Outcome] = []
        self.stopped: signal.Signals | None = None
        self.timeout = timeout
        self.stop_on_failure = stop_on_failure
        self.note = note
        self.has_finished = has_finished
        self._failed = self._at_once = False

    def run(self) -> list[Outcome]:
        """Run all jobs to their end, or until a signal; their outcomes in the jobs' order."""
        view = SweepView(len(self.waiting))
        with tempfile.TemporaryDirectory(prefix="posbench-") as scratch, self._signals(), view:
            try:
                while self.running or (self.waiting and not self._stopping):
                    self._start_jobs(Path(scratch), view)
                    self._stop_jobs()
                    time.sleep(POLL_SECONDS)
                    self._reap(view)
                    view.show([self._progress(run) for run in self.running], len(self.outcomes))
            finally:
                self._kill()
        self.outcomes += [Outcome(job) for job in self.waiting]
        return sorted(self.outcomes, key=lambda outcome: self.order[outcome.job])

    @property
    def _stopping(self) -> bool:
        return self.stopped is not None or (self._failed and self.stop_on_failure)

    def _start_jobs(self, scratch: Path, view: SweepView) -> None:
        while self.waiting and self.free and not self._stopping:
            job, slot = self.waiting.pop(0), self.free.pop(0)
            progress = scratch / f"{job.number}.json"
            own = {PROGRESS_FILE: str(progress), PARENT: str(os.getpid())}
            try:
                process, start = _start(job, {**os.environ, **self.slots[slot], **own})
            except (OSError, StorageError) as error:
                self.free.append(slot)
                reason = f"could not be started: {error}"
                self._end(Outcome(job, State.failed, 127, reason=reason), view)
            else:
                self.running.append(_Running(job, process, slot, progress, start))
                self.note(Outcome(job, State.running))

    def _stop_jobs(self) -> None:
        now = time.monotonic()
        for run in self.running:
            if self._stopping and run.asked is None:
                self._ask(run, State.stopped, self.stopped or signal.SIGTERM)
            elif self.timeout is not None and now - run.started > self.timeout and not run.asked:
                self._ask(run, State.timed_out, signal.SIGTERM)
            if now > run.deadline or self._at_once:
                _send(run, signal.SIGKILL)

    def _ask(self, run: _Running, why: State, number: signal.Signals) -> None:
        run.asked = why
        run.deadline = time.monotonic() + GRACE_SECONDS
        _send(run, number)

    def _kill(self) -> None:
        for run in self.running:
            _send(run, signal.SIGKILL)

    def _reap(self, view: SweepView) -> None:
        for run in [run for run in self.running if run.process.poll() is not None]:
            self.running.remove(run)
            self.free.append(run.slot)
            # What a job started itself must not outlive it.
            _send(run, signal.SIGKILL)
            self._end(self._outcome(run), view)

    def _outcome(self, run: _Running) -> Outcome:
        """How a process that is gone has ended."""
        code, seconds = run.process.returncode, time.monotonic() - run.started
        if code == 0 and self.has_finished(run.job):
            return Outcome(run.job, State.done, 0, seconds)
        said = last_lines(run.job.log, run.log_start)
        state, reason = run.asked or state_of(code), _reason(said, code)
        if code == 0 and run.asked is None:
            state, reason = State.failed, f"exit 0, but it has not finished; last: {_last(said)}"
        elif run.asked is State.timed_out:
            reason = f"timed out after {self.timeout:g} s; last: {_last(said)}"
        return Outcome(run.job, state, code, seconds, reason, tuple(traceback_in(said)))

    def _end(self, outcome: Outcome, view: SweepView) -> None:
        self.outcomes.append(outcome)
        self._failed |= outcome.state.is_failure
        view.ended(outcome.job.name, outcome.seconds, outcome.reason)
        self.note(outcome)

    def _progress(self, run: _Running) -> JobProgress:
        return JobProgress.read(run.job.name, run.progress)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Note a first Ctrl-C or SIGTERM; a second one kills the jobs at once."""

        def note(number: int, _frame: FrameType | None) -> None:
            self._at_once = self.stopped is not None
            self.stopped = signal.Signals(number)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _start(job: Job, environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """The job's process, and how long its log was before."""
    with storage(job.log):
        job.log.parent.mkdir(parents=True, exist_ok=True)
        log = job.log.open("ab")
    with log:
        start = log.tell()
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the pool alone, which tells each job once
        )
    return process, start


def _send(run: _Running, number: signal.Signals) -> None:
    # The job leads a group of its own; the group may be gone already.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(run.process.pid, number)


def _last(said: Sequence[str]) -> str:
    return said[-1].strip().removeprefix("posbench: ") if said else "it said nothing"


def _reason(said: Sequence[str], code: int) -> str:
    """Why a job failed: the last line it wrote, or the signal that ended it."""
    if code >= 0:
        return _last(said)
    name = signal.Signals(-code).name
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}; last: {_last(said)}"
