"""Models whose loss on every target is known, and what each protocol must say of them.

The text behind an oracle never repeats a token: token t of the split is the number t. From its
inputs alone an oracle then knows where its window lies and which token comes next, so it can give
that token any loss, and a rule of (target, tokens visible, window length) is a whole model.

What must come out is written from each protocol's definition in plain loops, and shares nothing
with `protocols.py`. `posbench selftest` and the tests use the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posbench.config.encodings import NoneConfig
from posbench.data import Split
from posbench.encodings.base import Encoding, Shape
from posbench.model import LanguageModel
from posbench.targets import PROTOCOL

Rule = Callable[[Tensor, Tensor, int], Tensor]  # targets [B, T], visible [T], length -> nats

TRAIN = 8  # training length of the oracles: 4 targets per window, longest window 32
DOCUMENTS = (20, 33, 34, 70, 131, 5, 100, 32, 65, 1, 40)  # below, at and above what is needed


def make_split(lengths: Sequence[int] = DOCUMENTS, vocabulary: int | None = None) -> Split:
    """Documents of these lengths whose tokens count upwards, modulo `vocabulary` if given."""
    offsets = np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]).astype(np.int64)
    tokens = np.arange(offsets[-1])
    if vocabulary is not None:
        tokens = tokens * 7 % vocabulary
    names = [f"{index}.txt" for index in range(len(lengths))]
    return Split(tokens.astype(np.uint16), offsets, names, "toy")


class OracleEncoding(Encoding):
    """An encoding that says of itself what a test wants."""

    def __init__(self, limit: int | None = None, consistent: bool = True) -> None:
        super().__init__(NoneConfig(), Shape(1, 1, 2, 2, TRAIN))
        self.longest, self.consistent = limit, consistent

    @property
    def max_length(self) -> int | None:
        return self.longest

    @property
    def prefix_consistent(self) -> bool:
        return self.consistent


class Oracle(LanguageModel):
    """A model whose loss on the token that follows is `rule`; it keeps what it was asked.

    Its logits are float64, so the loss it is meant to have is the loss it gets to 1e-12.
    """

    def __init__(self, vocabulary: int, rule: Rule, encoding: Encoding | None = None) -> None:
        super().__init__()
        self.vocabulary, self.rule = vocabulary, rule
        self.encoding = encoding or OracleEncoding()
        self.asked: list[tuple[int, int, int]] = []  # (first token, input, length) of each target
        self.batches: list[int] = []  # rows of each forward pass
        self.tokens = 0

    def features(self, tokens: Tensor, positions: Any = None, last: int | None = None) -> Tensor:
        rows, length = tokens.shape
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(length, device=tokens.device)), (
            "a gap"
        )
        last = last or length
        self.batches.append(rows)
        self.tokens += tokens.numel()
        for window in tokens.tolist():
            self.asked += [(window[0], each, length) for each in window[-last:]]
        following = tokens[:, -last:] + 1
        visible = torch.arange(length - last + 1, length + 1, device=tokens.device)
        nats = self.rule(following, visible, length).double().expand(rows, last)
        others = torch.log(-torch.expm1(-nats)) - math.log(self.vocabulary - 1)
        logits = others.unsqueeze(-1).repeat(1, 1, self.vocabulary)
        return logits.scatter_(2, following.unsqueeze(-1), -nats.unsqueeze(-1))


def uniform(vocabulary: int) -> Rule:
    """U: every token is as likely as any other."""
    return lambda targets, visible, length: torch.full_like(
        visible, math.log(vocabulary), dtype=torch.float64
    )


def by_visible(nats: Callable[[Tensor], Tensor]) -> Rule:
    """P(f): the loss depends on nothing but how many tokens are visible (the position plus 1)."""
    return lambda targets, visible, length: nats(visible.double())


def toy(visible: Any) -> Any:
    """2 + 1 / (1 + c) nats with c tokens visible."""
    return 2 + 1 / (1 + visible)


def amnesic(reach: int) -> Rule:
    """C(f, W): a model that uses its last `reach` tokens and forgets the rest."""
    return by_visible(lambda visible: toy(visible.clamp(max=reach)))


def cliff(train_length: int) -> Rule:
    """CLIFF: 2 nats at the positions of training, 6 at all others."""
    return by_visible(lambda visible: torch.where(visible <= train_length, 2.0, 6.0))


def broken_at(position: int) -> Rule:
    """NAN@p: no loss at one position."""
    return by_visible(lambda v: torch.where(v == position + 1, math.nan, 2.0))


def traced_loss(target: Any, visible: Any, length: int) -> Any:
    """A loss from which no wrong choice of target, context or window length escapes."""
    return 1 + 0.6180339887498949 * target % 1 + 1 / (1 + visible) + length / 100


def tracer(targets: Tensor, visible: Tensor, length: int) -> Tensor:
    """COUNT: see `traced_loss`."""
    loss: Tensor = traced_loss(targets.double(), visible.double(), length)
    return loss


def traced_prefix(targets: Tensor, visible: Tensor, length: int) -> Tensor:
    """COUNT for an encoding whose first losses do not depend on the window's length."""
    return tracer(targets, visible, 0)


# ---------------------------------------------------------------- what must come out

Target = tuple[int, int, int]  # target, tokens visible, window length
OWN = ("controlled", "nonoverlap", "sliding", "position", "tail")  # of protocol v1
PRESETS = (
    "alibi_paper",
    "stride1",
    "yarn_truncate",
    "yarn_sliding",
    "hf_stride",
    "lm_eval_rolling",
    "last256",
    "llama_cpp",
)
MEANS = (*OWN, *PRESETS)


def all_ends(split: Split, longest: int, size: int) -> list[int]:
    """Every end of `size` targets with `longest` tokens of its own document before it."""
    return [
        int(first) + end
        for first, length in zip(split.offsets, split.lengths, strict=False)
        for end in range(longest, int(length), size)
    ]


def disjoint_ends(split: Split, longest: int, size: int) -> list[int]:
    """Of those ends, in the order of their hashes, each that is `longest` from all before it."""
    ranked = []
    for name, first, length in zip(split.names, split.offsets, split.lengths, strict=False):
        for end in range(longest, int(length), size):
            rank = hashlib.sha256(f"{PROTOCOL}/anchor/{name}/{end}".encode()).hexdigest()
            ranked.append((rank, int(first), end))
    taken: list[tuple[int, int]] = []
    for _, first, end in sorted(ranked):
        if all(other != first or abs(end - place) >= longest for other, place in taken):
            taken.append((first, end))
    return [first + end for first, end in taken]


def expected_windows(
    split: Split, protocol: str, length: int, longest: int, size: int, stride: int = 2
) -> list[list[Target]]:
    """What each window of a protocol scores, by its definition, if every place is chosen."""
    if protocol == "controlled":
        return [
            [(t, length - (end - t), length) for t in range(end - size + 1, end + 1)]
            for end in all_ends(split, longest, size)
        ]
    if protocol in OWN:
        texts = [(end - longest, longest + 1) for end in disjoint_ends(split, longest, size)]
    else:
        documents = zip(split.offsets.tolist(), split.lengths.tolist(), strict=False)
        texts = [(first, count) for first, count in documents if count > longest]
    found = []
    for first, count in texts:
        for places in _cut(protocol, count, length, size, stride):
            found.append([(first + t, seen, read) for t, seen, read in places])
    return found


def _cut(protocol: str, count: int, length: int, size: int, stride: int) -> list[list[Target]]:
    """The windows of one text of `count` tokens, as each code base makes them."""
    match protocol:
        case "nonoverlap" | "alibi_paper":
            return _disjoint(count, length)
        case "sliding":
            return _strided(count, length, stride)
        case "stride1":  # a window ends at every token, of which one in sixteen is read
            every = _strided(count, length, 1)
            return [
                every[0],
                *(every[min(n + 15, len(every) - 1)] for n in range(1, len(every), 16)),
            ]
        case "position":
            return [[(t, t, length) for t in range(1, length + 1)]]
        case "tail":
            return [[(t, t, length) for t in range(length - size + 1, length + 1)]]
        case "last256":
            last = 256 if length > 256 else length // 2
            return [[(t, t, length) for t in range(length - last + 1, length + 1)]]
        case "yarn_truncate":  # the first `length` tokens of a document, the first as context only
            return [[(t, t, length - 1) for t in range(1, length)]]
        case "yarn_sliding":
            return _transformers(count, length, 256 if length > 256 else length // 2)
        case "hf_stride":
            return _transformers(count, length, length // 2)
        case "lm_eval_rolling":
            windows = []
            done = 1  # the first token stands for the prefix
            while done < count:
                end = min(done + length, count)
                start = max(0, end - 1 - length)
                windows.append([(t, t - start, end - 1 - start) for t in range(done, end)])
                done = end
            return windows
        case "llama_cpp":
            half = length // 2
            return [
                [(first + j + 1, j + 1, length - 1) for j in range(half, length - 1)]
                for first in range(0, count - length + 1, length)
            ]
    raise AssertionError(protocol)


def _disjoint(count: int, length: int) -> list[list[Target]]:
    found = []
    for first in range(0, count - 1, length):
        read = min(length, count - 1 - first)
        found.append([(first + i + 1, i + 1, read) for i in range(read)])
    return found


def _strided(count: int, length: int, stride: int) -> list[list[Target]]:
    found, done = [], 0
    for first in range(0, count, stride):
        last = min(first + length, count - 1)
        found.append([(t, t - first, last - first) for t in range(done + 1, last + 1)])
        done = last
        if last == count - 1:
            break
    return found


def _transformers(count: int, length: int, stride: int) -> list[list[Target]]:
    """Windows of `length` tokens, inputs and labels; the first label of a window is not scored."""
    found, before = [], 0
    for begin in range(0, count, stride):
        end = min(begin + length, count)
        labels = range(before, end)
        found.append([(t, t - begin, end - begin - 1) for t in labels if t > begin])
        before = end
        if end == count:
            break
    return found


def expected_targets(
    split: Split, protocol: str, length: int, longest: int, size: int, stride: int = 2
) -> list[Target]:
    """All that a protocol scores."""
    windows = expected_windows(split, protocol, length, longest, size, stride)
    return [target for window in windows for target in window]


def expected_mean(protocol: str, windows: list[list[Target]], loss: Callable[..., float]) -> float:
    """The mean loss as the protocol averages it."""
    losses = [[loss(*target) for target in window] for window in windows]
    if protocol.startswith("yarn"):
        means = [math.fsum(window) / len(window) for window in losses]
        return math.fsum(means) / len(means)
    if protocol == "stride1":  # the last window of a text stands for what is left of it
        total, weight, before = 0.0, 0, 0
        for window, targets in zip(losses, windows, strict=True):
            stands_for = 1 if targets[0][1] == 1 else targets[0][0] - before
            total += stands_for * math.fsum(window)
            weight += stands_for * len(window)
            before = targets[-1][0]
        return total / weight
    if protocol == "hf_stride":
        total, labels = 0.0, 0
        for window, targets in zip(losses, windows, strict=True):
            first = targets[0][1] == 1  # the first window of a text has a label that is not scored
            count = len(window) + first - 1
            total += math.fsum(window) / len(window) * count
            labels += count
        return total / labels
    flat = [each for window in losses for each in window]
    return math.fsum(flat) / len(flat)
