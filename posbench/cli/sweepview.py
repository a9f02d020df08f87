"""How far a sweep is: live bars on a terminal, plain lines elsewhere; at its end a table."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from posbench.progress import PLAIN_SECONDS
from posbench.runs import JOB
from posbench.sweeps import Entry, State


@dataclass(frozen=True)
class JobProgress:
    """How far one running job says it is."""

    name: str
    title: str = "starting"
    done: int = 0
    total: int = 0
    note: str = ""

    @classmethod
    def read(cls, name: str, report: Path) -> JobProgress:
        """The job's own report; nothing yet, or half a file, reads as `starting`."""
        try:
            record = json.loads(report.read_text())
            return cls(name, record["title"], record["done"], record["total"], record["note"])
        except (OSError, ValueError, KeyError):
            return cls(name)

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 0.0


class SweepView:
    """Shows the running jobs, and the sweep's time left, on stderr."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._started = self._shown = time.monotonic()
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = ("{task.description}", BarColumn(), "{task.fields[note]}")
            self._bars = Progress(
                *(
                    TextColumn(item, markup=False) if isinstance(item, str) else item
                    for item in columns
                ),
                console=Console(stderr=True),
            )
            self._bars.start()
            self._tasks["sweep"] = self._bars.add_task("sweep", total=1.0, note="")
        else:
            self._print("1 job" if self.jobs == 1 else f"{self.jobs} jobs")
        return self

    def show(self, running: Sequence[JobProgress], finished: int) -> None:
        """Show the present state; plain lines come every PLAIN_SECONDS."""
        share = (finished + sum(state.share for state in running)) / max(1, self.jobs)
        total = f"{finished}/{self.jobs} jobs ended{self._left(share)}"
        if self._bars is not None:
            self._show_bars(running, share, total)
        elif time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._shown = time.monotonic()
            parts = [f"{state.name} {state.done}/{state.total or '?'}" for state in running]
            self._print("; ".join([total, *parts]))

    def _left(self, share: float) -> str:
        if share <= 0:
            return ""
        elapsed = time.monotonic() - self._started
        seconds = elapsed * (1 - share) / share
        return f", about {seconds / 60:.0f} min left" if seconds > 90 else f", {seconds:.0f} s left"

    def _show_bars(self, running: Sequence[JobProgress], share: float, total: str) -> None:
        self._bars.update(self._tasks["sweep"], completed=share, note=total)
        names = {state.name for state in running}
        for name in [name for name in self._tasks if name != "sweep" and name not in names]:
            self._bars.remove_task(self._tasks.pop(name))
        for state in running:
            if state.name not in self._tasks:
                self._tasks[state.name] = self._bars.add_task(state.name, total=1.0, note="")
            counts = f"{state.done}/{state.total}" if state.total else ""
            note = f"{counts} {state.title} {state.note}".strip()
            self._bars.update(self._tasks[state.name], completed=state.share, note=note)

    def ended(self, name: str, seconds: float, reason: str) -> None:
        """Say that a job ended, and why if it failed."""
        self._print(f"{name}: {reason or 'done'} ({seconds:.0f} s)")

    def _print(self, text: str) -> None:
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()


def table(sweep: Path, jobs: Sequence[Entry]) -> str:
    """The table of a sweep that ended: a line for each job, with its status and the reason."""
    done = sum(job.state is State.done for job in jobs)
    rows = [("job", "status", "exit", "time", "reason"), *(_row(job) for job in jobs)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"{sweep}: {done} of {len(jobs)} jobs done"]
    for name, state, code, took, reason in rows:
        left = f"  {name:<{widths[0]}}  {state:<{widths[1]}}"
        right = f"  {code:>{widths[2]}}  {took:>{widths[3]}}  {reason}"
        lines.append((left + right).rstrip())
    if any(job.state.is_failure for job in jobs):
        lines.append(f"  how a job ended: {sweep}/JOB/{JOB}")
    return "\n".join(lines)


def _row(job: Entry) -> tuple[str, str, str, str, str]:
    code = "" if job.code is None else str(job.code)
    took = f"{job.seconds:.0f} s" if job.seconds else ""
    return job.folder, job.state, code, took, job.reason
