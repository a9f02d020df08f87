"""Extensions at evaluation that hide far keys but the first ones: LM-Infinite and StreamingLLM.

A query sees the keys at the first positions, the sinks, and those at a distance i - j below the
window, its own included. Sinks farther than the window are scored as if they were nearer. What is
not hidden and no sink has its own distance, so the rules below are for sinks alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posbench.config.extensions import LmInfiniteConfig, StreamingConfig, WindowConfig
from posbench.encodings.regrouping import Turn, far_scores
from posbench.errors import UnsupportedError

if TYPE_CHECKING:  # the contract itself hides keys
    from posbench.encodings.base import MaskMod, Rescore, ScoreMod


def refuse_sizes(train_length: int, extension: WindowConfig) -> None:
    """Raise UnsupportedError where there is no window, or none that hides a key before 2x."""
    sinks, window, _ = extension.sizes_for(train_length)
    if window < 1:
        raise UnsupportedError(
            f"{extension.name} has no room for a window: extension.sinks={sinks} fill the training "
            f"length of {train_length} tokens; give extension.window a number"
        )
    if sinks + window >= 2 * train_length:
        raise UnsupportedError(
            f"{extension.name} hides nothing within twice the training length of {train_length} "
            f"tokens: extension.sinks={sinks} and extension.window={window} see {sinks + window}"
        )


def visible(positions: Tensor, sinks: int, window: int) -> MaskMod:
    """The `mask_mod` of a window and sinks, the keys at positions 0 .. sinks - 1."""

    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j < window) | (positions[j] < sinks)

    return keep


def sink_positions(
    positions: Tensor, train_length: int, extension: WindowConfig
) -> tuple[Tensor, Tensor]:
    """Where queries and sinks beyond the window stand for each other, [T] each.

    Their difference is the distance the score has: the window (Han et al. 2023, arXiv:2308.16137,
    section 4), or that in a cache of sinks and window (Xiao et al. 2023, arXiv:2309.17453, 3.2),
    where the query is last. The cache holds the query's own key too, so that all distances are
    below sinks + window.
    """
    _, window, longest = extension.sizes_for(train_length)
    match extension:
        case LmInfiniteConfig():
            return torch.full_like(positions, window), torch.zeros_like(positions)
        case StreamingConfig():
            return positions.clamp(max=longest), positions
    raise UnsupportedError(f"no rule for sinks in extension {extension.name}")


def sink_scores(
    positions: Tensor, train_length: int, extension: WindowConfig, turn: Turn, scale: float
) -> Rescore:
    """The `rescore` that puts other scores in place of RoPE's at sinks beyond the window.

    `turn(x, by)` rotates rows of x by `by` [T] positions; `scale` is the softmax scale.
    """
    sinks, window, _ = extension.sizes_for(train_length)
    moved = sink_positions(positions, train_length, extension)
    far = far_scores(positions, window, moved, turn, scale)

    def rescore(scores: Tensor, q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
        first = far(scores[..., :sinks], q, k[..., :sinks, :], rows)
        return torch.cat((first, scores[..., sinks:]), dim=-1)

    return rescore


def sink_biases(
    positions: Tensor, train_length: int, extension: WindowConfig, further: Tensor
) -> ScoreMod | None:
    """The `score_mod` that turns the bias at the window into that of a sink beyond it.

    `further` [H, longest - window + 1] is what is added at distance window, window + 1, and so on;
    None where no sink is beyond the window.
    """
    _, window, longest = extension.sizes_for(train_length)
    if longest == window:
        return None
    for_q, for_k = sink_positions(positions, train_length, extension)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # Nothing is added within the window, nor to what is hidden: there the index is 0.
        return score + further[h, (for_q[i] - for_k[j] - window).clamp(min=0)]

    return score_mod
