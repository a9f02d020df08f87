"""Which tokens are scored: protocol v1's choice of targets, the same for every encoding and seed.

Choices hash the protocol's version, the document's name and the position, never a seed, so that a
comparison scores the same tokens whatever was trained, and whichever lengths are asked for.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from posbench.data import Split

PROTOCOL = "posbench-v1"
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Targets:
    """Places in one split. Each place owns `size` targets, the tokens before and at `ends`.

    `ends` [N] index the split's tokens; `documents` [N] say which document each lies in.
    """

    ends: Integers
    documents: Integers
    size: int
    sha256: str

    def __len__(self) -> int:
        return len(self.ends)

    def indices(self) -> Integers:
        """The split's tokens that are targets [N, size]."""
        return self.ends[:, None] + np.arange(1 - self.size, 1)


def anchors(split: Split, longest: int, size: int, most: int) -> Targets:
    """Places whose last `size` targets have `longest` tokens of their own document before the end.

    Spaced `size` apart so that no target is shared; at most `most` targets. The protocol
    `controlled` scores these under every context length.
    """
    return _choose(split, longest, size, max(1, most // size), f"{PROTOCOL}/anchor")


def spans(split: Split, longest: int, most: int) -> Targets:
    """Disjoint spans of `longest` targets inside one document each, at most `most` tokens in all.

    `nonoverlap` and `position` read these from their start.
    """
    return _choose(split, longest, longest, max(1, most // longest), f"{PROTOCOL}/span")


def prefixes(split: Split, places: Targets, size: int) -> Targets:
    """The first `size` targets of each of `places`."""
    ends = places.ends - places.size + size
    return Targets(ends, places.documents, size, _digest(split, ends, places.documents, size))


def _choose(split: Split, longest: int, size: int, count: int, label: str) -> Targets:
    ends: list[int] = []
    documents: list[int] = []
    ranks: list[bytes] = []
    for index, (name, length) in enumerate(zip(split.names, split.lengths, strict=True)):
        first = int(split.offsets[index])
        # A target needs a token after its last input: the end is at most length - 1.
        for end in range(longest, int(length), size):
            ends.append(first + end)
            documents.append(index)
            ranks.append(hashlib.sha256(f"{label}/{name}/{end}".encode()).digest())
    chosen = sorted(sorted(range(len(ends)), key=ranks.__getitem__)[:count])
    picked = np.array([ends[i] for i in chosen], dtype=np.int64)
    owners = np.array([documents[i] for i in chosen], dtype=np.int64)
    return Targets(picked, owners, size, _digest(split, picked, owners, size))


def _digest(split: Split, ends: Integers, owners: Integers, size: int) -> str:
    """SHA-256 over the documents' names, the positions in them, and the target tokens."""
    digest = hashlib.sha256(f"{PROTOCOL}/{size}".encode())
    for end, owner in zip(ends, owners, strict=True):
        place = int(end - split.offsets[owner])
        digest.update(f"{split.names[owner]}/{place}".encode())
        digest.update(split.tokens[end - size + 1 : end + 1].astype("<u4").tobytes())
    return digest.hexdigest()
