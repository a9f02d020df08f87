"""Extensions at evaluation that turn near and far keys differently: ReRoPE and Self-Extend.

A score at a distance i - j below a window is RoPE's. Farther ones are RoPE's between two other
positions, so that no distance exceeds what training saw. Rotations add up: the far score comes
from the queries and keys that RoPE has already turned, turned on by what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posbench.config.extensions import (
    LeakyReropeConfig,
    RegroupingConfig,
    ReropeConfig,
    SelfExtendConfig,
)
from posbench.errors import UnsupportedError

if TYPE_CHECKING:  # windows.py, which the contract needs, builds on this
    from posbench.encodings.base import Rescore

Turn = Callable[[Tensor, Tensor], Tensor]  # (x [..., T, D], angles in positions [T]) -> x turned


def far_positions(
    positions: Tensor, window: int, extension: RegroupingConfig
) -> tuple[Tensor, Tensor]:
    """Where queries and keys stand for each other beyond `window`, float64 [T] each.

    Their difference is the distance a far score has: the window (ReRoPE), the window and 1/step of
    the rest (Leaky ReRoPE; both Su 2023, kexue.fm/archives/9708), or floor(i/group) -
    floor(j/group) + window - floor(window/group) (Self-Extend, Jin et al. 2024, section 3.2).
    """
    places = positions.double()
    match extension:
        case ReropeConfig():
            return torch.full_like(places, window), torch.zeros_like(places)
        case LeakyReropeConfig(step=step):
            return places / step + window * (1 - 1 / step), places / step
        case SelfExtendConfig(group=group):
            groups = (positions // group).double()
            return groups + (window - window // group), groups
    raise UnsupportedError(f"no rule for far positions in extension {extension.name}")


def refuse_window(train_length: int, extension: RegroupingConfig) -> None:
    """Raise UnsupportedError where no distance within twice the training length is far."""
    window = extension.window_for(train_length)
    if window >= 2 * train_length:
        raise UnsupportedError(
            f"{extension.name} changes nothing within twice the training length of {train_length} "
            f"tokens: extension.window={window} is no shorter"
        )


def far_scores(
    positions: Tensor, window: int, moved: tuple[Tensor, Tensor], turn: Turn, scale: float
) -> Rescore:
    """The `rescore` that puts far scores in place of RoPE's beyond the window.

    `moved` are the positions [T] of queries and of keys for each other there. `turn(x, by)` rotates
    rows of x by `by` [T] positions; `scale` is the softmax scale.
    """
    for_q, for_k = moved
    places = positions.double()

    def rescore(scores: Tensor, q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
        seen = k.shape[-2]
        far_q = turn(q, (for_q - places)[rows])
        far_k = turn(k, (for_k - places)[:seen])
        near = positions[rows, None] - positions[None, :seen] < window
        return torch.where(near, scores, far_q @ far_k.transpose(-1, -2) * scale)

    return rescore


def logn(keys: Tensor, train_length: int) -> Tensor:
    """max(1, ln n / ln L) of n visible keys (Su 2021, kexue.fm/archives/8823)."""
    return (keys.log() / math.log(train_length)).clamp(min=1)
