"""Encodings added to the token embeddings: sinusoidal and learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posbench.config import LearnedConfig, SineLayout, SinusoidalConfig
from posbench.encodings.base import Encoding, Generators, Shape
from posbench.errors import UnsupportedError


def sinusoids(positions: Tensor, width: int, base: float, layout: SineLayout) -> Tensor:
    """Sine and cosine features of `positions` [T], float64 [T, width] (Vaswani et al. 2017, 3.5).

    Pair c turns by positions * base^(-2c/width). An odd width has one sine more than cosines.
    """
    pairs = (width + 1) // 2
    exponents = torch.arange(pairs, device=positions.device, dtype=torch.float64) * (2 / width)
    angles = torch.outer(positions.double(), base**-exponents)
    sines, cosines = angles.sin(), angles.cos()[:, : width // 2]
    if layout is SineLayout.concat:
        return torch.cat((sines, cosines), dim=-1)
    features = angles.new_empty(len(positions), width)
    features[:, 0::2] = sines
    features[:, 1::2] = cosines
    return features


class Sinusoidal(Encoding):
    """Fixed sinusoids, scaled to the size of a token embedding (Vaswani et al. 2017)."""

    config: SinusoidalConfig

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        config = self.config
        features = sinusoids(positions, x.shape[-1], config.base, config.layout)
        return x + (config.scale * features).to(x.dtype)

    def describe(self, length: int) -> dict[str, Any]:
        positions = torch.arange(length)
        table = sinusoids(positions, self.shape.width, self.config.base, self.config.layout)
        return {"table": self.config.scale * table}


class Learned(Encoding):
    """A trained vector per position, one for each of the training length (GPT-2)."""

    config: LearnedConfig

    def __init__(self, config: LearnedConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        self.table = nn.Parameter(torch.empty(shape.train_length, shape.width))

    @property
    def max_length(self) -> int:
        return self.shape.train_length

    def initialise(self, generators: Generators) -> None:
        nn.init.normal_(self.table, std=self.config.std, generator=generators("table"))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        # By shape, on the host: an index past the table would poison a CUDA context.
        if len(positions) > self.max_length:
            raise UnsupportedError(
                f"learned table has {self.max_length} rows; {len(positions)} positions requested"
            )
        return x + self.table[positions].to(x.dtype)

    def describe(self, length: int) -> dict[str, Any]:
        return {"table": self.table.detach().double()}
