"""Which places of a split are measured: protocol v1's choice, the same for every encoding and seed.

Choices hash the protocol's version, the document's name and the position, never a seed, so that a
comparison scores the same tokens whatever was trained, and whichever lengths are asked for.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from posbench.data import Split

PROTOCOL = "posbench-v1"
STRETCHES = 16  # how many stretches share the targets of a preset: ten give an interval
Integers = npt.NDArray[np.int64]


class Text(NamedTuple):
    """A run of tokens inside one document: the first is only read, the `size` after it scored."""

    start: int  # index into the split's tokens
    size: int


def anchors(split: Split, longest: int, size: int, most: int) -> Integers:
    """Ends of targets, spaced `size` apart, with `longest` tokens of their document before them.

    At most `most` targets, `size` up to and including each end. The protocol `controlled` scores
    these under every context length.
    """
    ranked = _ranked(split, longest, size)[: max(1, most // size)]
    return np.array(sorted(ranked), dtype=np.int64)


def targets_at(ends: Integers, size: int) -> Integers:
    """The `size` tokens up to and including each end [N, size]."""
    return ends[:, None] + np.arange(1 - size, 1)


def spans(split: Split, longest: int, size: int, most: int) -> list[Text]:
    """Texts of `longest` targets before the anchors, none of which shares a target with another.

    In the order of the anchors' hashes: the first few are as good a choice as all of them.
    """
    taken: set[int] = set()
    for end in _ranked(split, longest, size)[: max(1, most // size)]:
        # Ends lie on a grid, so those within `longest` on either side can be looked up.
        near = range(end - (longest - 1) // size * size, end + longest, size)
        if taken.isdisjoint(near):
            taken.add(end)
    ranked = [end for end in _ranked(split, longest, size) if end in taken]
    return [Text(end - longest, longest) for end in ranked]


def stretches(split: Split, longest: int, size: int, most: int) -> list[Text]:
    """Texts that presets cut in their own way: what lies before the anchors, `most` targets.

    Each has over twice `longest` targets, more where there are some to give away, or is the whole
    of a document that has fewer; none shares a target with another. Much of it is what `spans`
    reads. A quarter of `longest` more than whole windows: last windows are to be seen.
    """
    wanted = max(2 * longest, most // STRETCHES) + longest // 4
    texts: list[Text] = []
    taken: dict[int, list[int]] = {}  # starts by document
    for end in _ranked(split, longest, size):
        document = int(documents_of(split, np.array(end)))
        first, length = int(split.offsets[document]), int(split.lengths[document])
        own = min(wanted, length - 1)
        start = max(end - own, first)
        others = taken.setdefault(document, [])
        if all(abs(start - other) >= own for other in others):
            if texts and sum(text.size for text in texts) + own > most:
                break
            others.append(start)
            texts.append(Text(start, own))
    return texts


def beginnings(split: Split, longest: int, most: int) -> list[Text]:
    """The first `longest` targets of documents, `most` in all."""
    firsts = [
        (_rank("beginning", name, 0), Text(int(first), longest))
        for name, first, length in zip(split.names, split.offsets, split.lengths, strict=False)
        if length > longest
    ]
    return [text for _, text in sorted(firsts)][: max(1, most // longest)]


def documents_of(split: Split, targets: Integers) -> Integers:
    """The document that each target lies in."""
    owners: Integers = np.searchsorted(split.offsets, targets, side="right") - 1
    return owners


def digest(split: Split, targets: Integers) -> str:
    """SHA-256 of which tokens are scored: documents, positions in them, and the tokens themselves.

    However windows cut the text, and in whatever order, the same targets give the same digest.
    """
    state = hashlib.sha256(PROTOCOL.encode())
    ordered = np.sort(targets, axis=None)
    owners = documents_of(split, ordered)
    breaks = np.flatnonzero((np.diff(ordered) != 1) | (np.diff(owners) != 0)) + 1
    for run, (owner, *_) in zip(np.split(ordered, breaks), np.split(owners, breaks), strict=True):
        first = int(run[0] - split.offsets[owner])
        state.update(f"/{split.names[owner]}/{first}+{len(run)}/".encode())
        state.update(split.tokens[run].astype("<u4").tobytes())
    return state.hexdigest()


def _ranked(split: Split, longest: int, size: int) -> list[int]:
    """All ends that fit, in the order of their hashes."""
    ranked = []
    for name, first, length in zip(split.names, split.offsets, split.lengths, strict=False):
        # A target needs a token after its last input: the end is at most length - 1.
        for end in range(longest, int(length), size):
            ranked.append((_rank("anchor", name, end), int(first) + end))
    return [end for _, end in sorted(ranked)]


def _rank(kind: str, name: str, place: int) -> bytes:
    return hashlib.sha256(f"{PROTOCOL}/{kind}/{name}/{place}".encode()).digest()
