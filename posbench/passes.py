"""Forward passes that protocols share: a window that begins another is read once.

Where the first T logits do not depend on what follows, a window at the beginning of a longer one is
a slice of it. So one pass at the longest length serves `position`, `tail`, and every protocol's
whole windows there. Windows that start elsewhere restart their positions and need their own pass:
nothing is sliced that the model would not have given for the window alone.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from posbench.errors import OutOfMemoryError
from posbench.protocols import Windows
from posbench.scoring import Losses


@dataclass(frozen=True)
class Pass:
    """Losses [N, last] of windows that went through the model, and what that took."""

    losses: Losses
    tokens: int
    seconds: float
    peak_mem_mb: float


Read = Callable[[Windows], Pass]  # windows through the model, the last `scored` of each scored
_Key = tuple[int, bytes]


class Sharing:
    """Which windows are read so that all that are asked for can be taken from them."""

    def __init__(
        self, asked: Iterable[Windows], consistent: bool = True, limit: int | None = None
    ) -> None:
        widest: dict[_Key, Windows] = {}
        for each in asked:
            before = widest.setdefault(_key(each), each)
            if each.scored > before.scored:
                widest[_key(each)] = each
        starts = {key: frozenset(each.starts.tolist()) for key, each in widest.items()}
        order = sorted(widest, key=lambda key: (-key[0], -len(starts[key])))
        self._hosts: dict[_Key, list[Windows]] = {}
        self._last: dict[_Key, int] = defaultdict(int)
        for key, each in widest.items():
            self._hosts[key] = [
                widest[other]
                for other in order
                if other == key
                or (
                    starts[key] <= starts[other]
                    and (other[0] == key[0] or (consistent and other[0] > key[0]))
                    and (limit is None or other[0] <= limit)
                )
            ]
            first = self._hosts[key][0]
            self._last[_key(first)] = max(self._last[_key(first)], _positions(first, each))

    def hosts(self, windows: Windows) -> list[Windows]:
        """What `windows` can be taken from, the best first; they themselves are among them."""
        return [
            replace(host, scored=max(self._last[_key(host)], _positions(host, windows)))
            for host in self._hosts[_key(windows)]
        ]

    def read(self) -> list[Windows]:
        """All that has to be read if everything fits into memory."""
        first = {_key(hosts[0]): hosts[0] for hosts in self._hosts.values()}
        return list(first.values())


class Passes:
    """The losses of one model on windows, each pass made when it is first needed."""

    def __init__(self, sharing: Sharing, read: Read) -> None:
        self._sharing, self._read = sharing, read
        self._made: dict[_Key, Pass] = {}

    def losses(self, windows: Windows) -> tuple[Losses, Pass]:
        """Losses [N, scored] of `windows`, and the pass that they were taken from."""
        for host in self._sharing.hosts(windows):
            with contextlib.suppress(OutOfMemoryError):
                made = self._pass(host)
                return _taken(made, host, windows), made
        made = self._read(windows)  # with no more positions than are asked for
        return made.losses, made

    def _pass(self, host: Windows) -> Pass:
        made = self._made.get(_key(host))
        if made is None or made.losses.shape[1] < host.scored:
            made = self._made[_key(host)] = self._read(host)
        return made


def _key(windows: Windows) -> _Key:
    return windows.length, windows.starts.tobytes()


def _positions(host: Windows, windows: Windows) -> int:
    """How many of the last positions of `host` hold the losses of `windows`."""
    return host.length - windows.length + windows.scored


def _taken(made: Pass, host: Windows, windows: Windows) -> Losses:
    rows = slice(None)
    if len(host.starts) != len(windows.starts):
        places = {start: row for row, start in enumerate(host.starts.tolist())}
        rows = [places[start] for start in windows.starts.tolist()]  # type: ignore[assignment]
    last = made.losses.shape[1] - _positions(host, windows)
    return made.losses[rows, last : last + windows.scored]
