"""Stick-breaking attention: no softmax, and order out of the attention itself."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from posbench.config.encodings import StickbreakConfig
from posbench.encodings.base import Encoding, Hooks, precise
from posbench.encodings.gates import later

ROWS = 128  # queries whose weights are held at once


def log_weights(scores: Tensor, rows: Tensor, window: int | None = None) -> Tensor:
    """ln of the weights [..., R, S] of `scores` z, for queries `rows` [R] and keys 0..S-1.

    Tan et al. 2025, section 2: from the nearest key backwards, each takes the share sigmoid(z) of
    what the nearer ones left. A token does not see itself; weights sum to at most 1.
    """
    distances = rows.unsqueeze(-1) - torch.arange(scores.shape[-1], device=rows.device)
    seen = distances > 0
    if window is not None:
        seen &= distances < window
    left = later(F.logsigmoid(-scores).masked_fill(~seen, 0.0))
    return (F.logsigmoid(scores) + left).masked_fill(~seen, float("-inf"))


def stick_breaking(q: Tensor, k: Tensor, v: Tensor, window: int | None, remainder: bool) -> Tensor:
    """Attention [B, H, T, D] by stick-breaking; with `remainder`, what is left goes to oneself."""
    exact = precise(q.dtype)
    q, keys, values = q.to(exact) / math.sqrt(q.shape[-1]), k.to(exact), v.to(exact)
    chunks = []
    for start in range(0, q.shape[2], ROWS):
        stop = min(start + ROWS, q.shape[2])
        scores = q[:, :, start:stop] @ keys[:, :, :stop].transpose(-1, -2)
        rows = torch.arange(start, stop, device=q.device)
        weights = log_weights(scores, rows, window).exp()
        mixed = weights @ values[:, :, :stop]
        if remainder:
            mixed = mixed + (1 - weights.sum(-1, keepdim=True)) * values[:, :, start:stop]
        chunks.append(mixed)
    return torch.cat(chunks, dim=2).to(v.dtype)


class Stickbreak(Encoding):
    """Stick-breaking attention (Tan et al. 2025), with no other notion of position."""

    config: StickbreakConfig
    relative = True

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        return Hooks(attend=partial(stick_breaking, remainder=self.config.remainder))
