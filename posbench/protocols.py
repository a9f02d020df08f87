"""What each protocol reads and scores: windows over places, made without looking at any model.

A window reads `length` tokens from `start` on, at positions 0, 1, ..., and predicts the token after
each; the last `scored` predictions count. All of them are in one document.

Protocol v1 scores places that are chosen once for all encodings (`targets.py`). The presets cut the
same texts as published code cuts its own, averaging as it does; where that code joins documents
into one stream or puts a token before them, a preset does not. docs/protocol.md says what each
tells and what it hides, `catalog.PROTOCOL_CARDS` in a sentence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from posbench.config import Protocol
from posbench.targets import Integers, Text

STRIDE1_EVERY = 16  # `stride1` reads a whole window for each target, so it takes a sample
YARN_STRIDE = 256
LAST = 256


class Window(NamedTuple):
    """One window; `weight` is that of each of its targets in the mean."""

    start: int
    length: int
    scored: int
    weight: float = 1.0


@dataclass(frozen=True)
class Windows:
    """Windows that differ only in where they start, and so can share a batch."""

    starts: Integers  # [N]
    length: int
    scored: int
    weight: float

    def targets(self) -> Integers:
        """The split's tokens that are scored [N, scored]."""
        return self.starts[:, None] + np.arange(self.length - self.scored + 1, self.length + 1)

    def visible(self) -> Integers:
        """How many tokens each of those can see [scored]."""
        return np.arange(self.length - self.scored + 1, self.length + 1)


@dataclass(frozen=True)
class Layout:
    """All that one protocol scores at one length."""

    windows: tuple[Windows, ...]
    note: str = ""  # what a row must say of its number

    def targets(self) -> Integers:
        """The split's tokens that are scored [n], window after window."""
        return np.concatenate([each.targets().ravel() for each in self.windows])

    def visible(self) -> Integers:
        """How many tokens each target can see [n]."""
        return np.concatenate([np.tile(each.visible(), len(each.starts)) for each in self.windows])

    def weights(self) -> npt.NDArray[np.float64]:
        """The weight of each target in the mean [n]."""
        return np.concatenate([np.full(len(w.starts) * w.scored, w.weight) for w in self.windows])


@dataclass(frozen=True)
class Places:
    """The places of one split that protocols choose among."""

    anchors: list[int]  # ends of the targets of `controlled`
    size: int  # targets at each of them
    spans: list[Text]  # disjoint texts before anchors: all of them, and those cut into blocks
    cut_spans: list[Text]
    stretches: list[Text]  # for presets
    beginnings: list[Text]  # of documents
    stride: int


def layout(protocol: Protocol, places: Places, length: int) -> Layout:
    """What `protocol` scores at `length`; without windows if nothing fits."""
    windows = [window for window in _LAYOUTS[protocol](places, length) if window.scored > 0]
    return Layout(_grouped(windows), _note(protocol, places, length))


def _grouped(windows: Iterable[Window]) -> tuple[Windows, ...]:
    starts: dict[tuple[int, int, float], list[int]] = defaultdict(list)
    for start, *kind in windows:
        starts[tuple(kind)].append(start)  # type: ignore[index]
    return tuple(Windows(np.array(found, np.int64), *kind) for kind, found in starts.items())


def _note(protocol: Protocol, places: Places, length: int) -> str:
    match protocol:
        case Protocol.tail:
            return f"the last {min(places.size, length)} positions"
        case Protocol.yarn_sliding:
            stride = yarn_stride(length)
            half = "" if stride == YARN_STRIDE else ", half of the window instead of 256"
            return f"unweighted mean of window means; stride {stride}{half}"
        case Protocol.stride1:
            return f"every {STRIDE1_EVERY}th window after the first of a text, weighing as many"
        case Protocol.yarn_truncate:
            return "unweighted mean of the means of documents"
        case Protocol.hf_stride:
            return "each window weighs one label less than it has"
        case Protocol.last256 if length <= LAST:
            return f"the last {last_positions(length)} positions, half of the context, not 256"
    return ""


# ---------------------------------------------------------------- ways to cut one text


def blocks(text: Text, length: int) -> Iterator[Window]:
    """Disjoint windows; a shorter last one is scored at its own size."""
    for first in range(0, text.size, length):
        size = min(length, text.size - first)
        yield Window(text.start + first, size, size)


def sliding(text: Text, length: int, stride: int) -> Iterator[Window]:
    """Windows `stride` apart that score what is new in them; the first scores all it has."""
    done = 0
    for first in range(0, text.size, stride):
        end = min(first + length, text.size)
        yield Window(text.start + first, end - first, end - done)
        done = end
        if end == text.size:
            return


def one_by_one(text: Text, length: int) -> Iterator[Window]:
    """Windows one token apart: the first scores all it has, each other one its last target.

    Of those only every STRIDE1_EVERY-th is read, and weighs as much as all that it stands for.
    """
    done = min(length, text.size)
    yield Window(text.start, done, done)
    while done < text.size:
        some = min(STRIDE1_EVERY, text.size - done)
        done += some
        yield Window(text.start + done - length, length, 1, float(some))


def rolling(text: Text, length: int) -> Iterator[Window]:
    """Disjoint targets, but the last window reaches back to its full length: lm-eval's."""
    for first in range(0, text.size, length):
        new = min(length, text.size - first)
        read = min(length, first + new)
        yield Window(text.start + first + new - read, read, new)


def beginning(text: Text, length: int, scored: int) -> Iterator[Window]:
    """One window at the start of the text, if that is long enough."""
    if text.size >= length:
        yield Window(text.start, length, scored)


def window_means(windows: Iterable[Window]) -> Iterator[Window]:
    """The same windows, each with the same weight whatever it scores: YaRN's average."""
    for each in windows:
        yield each._replace(weight=1 / each.scored)


def one_label_less(windows: Iterable[Window]) -> Iterator[Window]:
    """Windows weighed by their labels less one, as the documentation of transformers does.

    It takes one label off each window for the shift; only in the first is there one too many.
    """
    for number, each in enumerate(windows):
        labels = each.scored + (number == 0)
        yield each._replace(weight=(labels - 1) / each.scored)


def second_halves(text: Text, length: int) -> Iterator[Window]:
    """Whole chunks of `length` tokens, of which those after the middle are scored: llama.cpp's."""
    for first in range(0, text.size + 2 - length, length):
        yield Window(text.start + first, length - 1, length - 1 - length // 2)


def yarn_stride(length: int) -> int:
    """256, or half of a window that is not longer."""
    return YARN_STRIDE if length > YARN_STRIDE else max(1, length // 2)


def last_positions(length: int) -> int:
    """256, or half of a window that is not longer."""
    return LAST if length > LAST else max(1, length // 2)


# ---------------------------------------------------------------- protocols

Cut = Callable[[Places, int], Iterator[Window]]


def _controlled(places: Places, length: int) -> Iterator[Window]:
    for end in places.anchors:
        yield Window(end - length, length, places.size)


def _each(texts: Callable[[Places], list[Text]], cut: Callable[..., Iterator[Window]]) -> Cut:
    """The layout that cuts each of `texts` by `cut(text, length, places)`."""

    def windows(places: Places, length: int) -> Iterator[Window]:
        for text in texts(places):
            yield from cut(text, length, places)

    return windows


def _all(places: Places) -> list[Text]:
    return places.spans


def _cut(places: Places) -> list[Text]:
    return places.cut_spans


def _long(places: Places) -> list[Text]:
    return places.stretches


def _first(places: Places) -> list[Text]:
    return places.beginnings


# A published window of `n` tokens holds inputs and targets: it reads n - 1 and predicts n - 1.
_LAYOUTS: dict[Protocol, Cut] = {
    Protocol.controlled: _controlled,
    Protocol.nonoverlap: _each(_cut, lambda text, n, _: blocks(text, n)),
    Protocol.sliding: _each(_cut, lambda text, n, at: sliding(text, n, min(at.stride, n))),
    Protocol.position: _each(_all, lambda text, n, _: beginning(text, n, n)),
    Protocol.tail: _each(_all, lambda text, n, at: beginning(text, n, min(at.size, n))),
    Protocol.alibi_paper: _each(_long, lambda text, n, _: blocks(text, n)),
    Protocol.stride1: _each(_long, lambda text, n, _: one_by_one(text, n)),
    Protocol.yarn_truncate: _each(
        _first, lambda text, n, _: window_means(beginning(text, n - 1, n - 1))
    ),
    Protocol.yarn_sliding: _each(
        _long, lambda text, n, _: window_means(sliding(text, n - 1, yarn_stride(n)))
    ),
    Protocol.hf_stride: _each(
        _long, lambda text, n, _: one_label_less(sliding(text, n - 1, max(1, n // 2)))
    ),
    Protocol.lm_eval_rolling: _each(_long, lambda text, n, _: rolling(text, n)),
    Protocol.last256: _each(_long, lambda text, n, _: beginning(text, n, last_positions(n))),
    Protocol.llama_cpp: _each(_long, lambda text, n, _: second_halves(text, n)),
}

BY_WINDOWS = tuple(_LAYOUTS)  # the protocols that are a mean loss over windows
PRESETS = BY_WINDOWS[BY_WINDOWS.index(Protocol.alibi_paper) :]
