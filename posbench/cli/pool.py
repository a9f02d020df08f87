"""Processes side by side: started as slots fall free, watched, stopped together, none left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from posbench.cli.sweepview import State, SweepView
from posbench.files import storage
from posbench.progress import PROGRESS_FILE

GRACE_SECONDS = 60.0  # time for a job to save a checkpoint after it was asked to stop
POLL_SECONDS = 0.1
PARENT = "POSBENCH_PARENT"  # a job that finds its parent gone stops by itself


@dataclass(frozen=True)
class Job:
    """One process to be run; what it says goes to a file beside its folder."""

    number: int
    folder: Path
    label: str
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def log(self) -> Path:
        # Beside, not inside: a run accepts no folder that holds anything foreign.
        return self.folder.with_name(f"{self.folder.name}.log")


@dataclass(frozen=True)
class Outcome:
    """How a job ended; `code` is None for one that was never started."""

    job: Job
    code: int | None
    seconds: float = 0.0
    reason: str = ""
    stopped: bool = False  # it ended because it was asked to


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    slot: int
    progress: Path
    started: float
    told: bool = False  # to stop


class Pool:
    """Runs jobs, at most one per slot; a slot is what it adds to a job's environment."""

    def __init__(self, jobs: Sequence[Job], slots: Sequence[dict[str, str]]) -> None:
        self.waiting = list(jobs)
        self.order = {job: index for index, job in enumerate(jobs)}
        self.slots = slots
        self.free = list(range(len(slots)))
        self.running: list[_Running] = []
        self.outcomes: list[Outcome] = []
        self.stopped: signal.Signals | None = None
        self._deadline = float("inf")

    def run(self) -> list[Outcome]:
        """Run all jobs to their end, or until a signal; their outcomes in the jobs' order."""
        view = SweepView(len(self.waiting))
        with tempfile.TemporaryDirectory(prefix="posbench-") as scratch, self._signals(), view:
            try:
                while self.running or (self.waiting and not self.stopped):
                    self._start_jobs(Path(scratch), view)
                    self._stop_jobs()
                    time.sleep(POLL_SECONDS)
                    self._reap(view)
                    view.show([self._state(run) for run in self.running], len(self.outcomes))
            finally:
                self._kill()
        self.outcomes += [Outcome(job, None, reason="not started") for job in self.waiting]
        return sorted(self.outcomes, key=lambda outcome: self.order[outcome.job])

    def _start_jobs(self, scratch: Path, view: SweepView) -> None:
        while self.waiting and self.free and not self.stopped:
            job, slot = self.waiting.pop(0), self.free.pop(0)
            progress = scratch / f"{job.number}.json"
            own = {PROGRESS_FILE: str(progress), PARENT: str(os.getpid())}
            try:
                process = _start(job, {**os.environ, **self.slots[slot], **own})
            except OSError as error:
                self.free.append(slot)
                self._end(Outcome(job, 127, reason=f"could not be started: {error}"), view)
            else:
                run = _Running(job, process, slot, progress, time.monotonic())
                self.running.append(run)

    def _stop_jobs(self) -> None:
        if self.stopped is None:
            return
        for run in self.running:
            if not run.told:
                run.told = True
                _send(run, self.stopped)
        if time.monotonic() > self._deadline:
            self._kill()

    def _kill(self) -> None:
        for run in self.running:
            _send(run, signal.SIGKILL)

    def _reap(self, view: SweepView) -> None:
        for run in [run for run in self.running if run.process.poll() is not None]:
            self.running.remove(run)
            self.free.append(run.slot)
            code = run.process.returncode
            # What a job started itself must not outlive it.
            _send(run, signal.SIGKILL)
            seconds = time.monotonic() - run.started
            reason = _reason(run.job, code) if code else ""
            stopped = run.told and code != 0
            self._end(Outcome(run.job, code, seconds, reason, stopped), view)

    def _end(self, outcome: Outcome, view: SweepView) -> None:
        self.outcomes.append(outcome)
        view.ended(outcome.job.name, outcome.seconds, outcome.reason)

    def _state(self, run: _Running) -> State:
        return State.read(run.job.name, run.progress)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Note a first Ctrl-C or SIGTERM; a second one kills the jobs at once."""

        def note(number: int, _frame: FrameType | None) -> None:
            again = self.stopped is not None
            self.stopped = signal.Signals(number)
            self._deadline = 0.0 if again else time.monotonic() + GRACE_SECONDS

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _start(job: Job, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with storage(job.log):
        job.log.parent.mkdir(parents=True, exist_ok=True)
        log = job.log.open("ab")
    with log:
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the pool alone, which tells each job once
        )


def _send(run: _Running, number: signal.Signals) -> None:
    # The job leads a group of its own; the group may be gone already.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(run.process.pid, number)


def _reason(job: Job, code: int) -> str:
    """Why a job failed: the last line it wrote, and the signal if one ended it."""
    with storage(job.log), job.log.open("rb") as file:
        file.seek(max(0, job.log.stat().st_size - 4096))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    said = lines[-1].strip().removeprefix("posbench: ") if lines else "it said nothing"
    if code >= 0:
        return f"exit {code}: {said}"
    name = signal.Signals(-code).name
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}; last: {said}"


def summary_lines(sweep: Path, outcomes: Sequence[Outcome]) -> list[str]:
    """The table of a sweep that ended: one line per job, a second one for what failed."""
    done = sum(outcome.code == 0 for outcome in outcomes)
    width = max(len(outcome.job.name) for outcome in outcomes)
    lines = [f"{sweep}: {done} of {len(outcomes)} jobs done"]
    for outcome in outcomes:
        name = outcome.job.name.ljust(width)
        if outcome.code == 0:
            lines.append(f"  {name}  done    {outcome.seconds:6.0f} s")
        elif outcome.code is None:
            lines.append(f"  {name}  not started")
        elif outcome.stopped:
            lines.append(f"  {name}  stopped {outcome.seconds:6.0f} s")
        else:
            lines.append(f"  {name}  failed  {outcome.seconds:6.0f} s  {outcome.reason}")
            lines.append(f"  {' ' * width}          log: {outcome.job.log}")
    return lines
