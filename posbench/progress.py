"""Progress of long work: a live bar on a terminal, plain lines elsewhere, a file for a launcher."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRESS_FILE = "POSBENCH_PROGRESS"  # a launcher names here where a job reports how far it is
PLAIN_SECONDS = 15.0
FILE_SECONDS = 0.25


class Progress:
    """How far one piece of work is. Use as a context manager; `update` as often as you like."""

    def __init__(self, title: str, total: int, unit: str = "step") -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done, self.note = 0, ""
        self._started = self._shown = time.monotonic()
        target = os.environ.get(PROGRESS_FILE)
        self._file = Path(target) if target else None
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._file is None and sys.stderr.isatty():
            self._start_bar()
        elif self._file is not None:
            self._write_file()
        return self

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} " + self.unit),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
        )
        self._bar.start()
        self._task = self._bar.add_task(self.title, total=self.total, note="")

    def update(self, done: int, note: str | None = None) -> None:
        """Report that `done` of the total are done, with a short note such as the loss."""
        self.done = done
        self.note = self.note if note is None else note
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=self.note)
        elif self._file is not None:
            if now - self._shown >= FILE_SECONDS:
                self._shown = now
                self._write_file()
        elif now - self._shown >= PLAIN_SECONDS or done == self.total:
            self._shown = now
            print(self._line(now), file=sys.stderr, flush=True)

    def _line(self, now: float) -> str:
        elapsed = now - self._started
        left = elapsed / max(1, self.done) * (self.total - self.done)
        return (
            f"{self.title}: {self.done}/{self.total} {self.unit}, {elapsed:.0f} s, "
            f"{left:.0f} s left {self.note}"
        ).rstrip()

    def _write_file(self) -> None:
        assert self._file is not None
        record = {"title": self.title, "done": self.done, "total": self.total, "note": self.note}
        # Only a view: a full disk must not stop the work.
        with contextlib.suppress(OSError):
            temporary = self._file.with_suffix(".tmp")
            temporary.write_text(json.dumps(record))
            temporary.replace(self._file)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._file is not None:
            self._write_file()
