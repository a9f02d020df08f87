"""Encodings that add a bias to the attention scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posbench.config import AlibiConfig
from posbench.encodings.base import Encoding, Hooks


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """ALiBi's slope of each head, float64 [heads] (Press et al. 2022, section 3, and their code).

    For a power of two: 2^(-8h/heads), h = 1..heads. Otherwise the slopes of the next lower power
    of two n, then every other slope of 2n, so the list does not fall monotonically.
    """
    power = 1 << (heads.bit_length() - 1)
    first = torch.arange(1, power + 1, device=device, dtype=torch.float64) / power
    rest = torch.arange(heads - power, device=device, dtype=torch.float64)
    return torch.exp2(-8 * torch.cat((first, (2 * rest + 1) / (2 * power))))


class Alibi(Encoding):
    """Attention with linear biases: -slope * (i - j) (Press et al. 2022)."""

    config: AlibiConfig
    relative = True

    def _bias(self, distances: Tensor) -> Tensor:
        slopes = alibi_slopes(self.shape.heads, distances.device).to(distances.dtype)
        return -slopes.view(-1, *(1,) * distances.dim()) * distances

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        return Hooks(distance_bias=self._bias)

    def describe(self, length: int) -> dict[str, Any]:
        return {"slopes": alibi_slopes(self.shape.heads)}
