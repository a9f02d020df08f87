"""Stopping at a step boundary when a signal asks for it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from posbench.errors import Exit

_CODES = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}


class StopRequest:
    """While active, the first SIGINT or SIGTERM sets `code`; a second one acts at once."""

    def __init__(self) -> None:
        self.code: Exit | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Handlers can be set in the main thread only; elsewhere the caller owns signals.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _CODES}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.code = _CODES[signal.Signals(number)]
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
