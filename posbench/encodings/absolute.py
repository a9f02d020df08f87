"""Encodings added to the token embeddings: sinusoidal and learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posbench.config import Beyond
from posbench.config.encodings import LearnedConfig, SineLayout, SinusoidalConfig
from posbench.encodings.base import Encoding, Generators, Shape, precise


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


def stretched(table: Tensor, positions: Tensor, length: int) -> Tensor:
    """Rows [T, C] of a `table` stretched over `length` positions, linear between its rows.

    Ends on ends (align-corners): position p reads row p (rows - 1) / (length - 1), so that the
    first and the last position read the first and the last row exactly.
    """
    last = len(table) - 1
    place = (positions.double() * (last / (length - 1))).clamp(max=last)
    low = place.floor()
    below = low.long()
    exact = precise(table.dtype)
    share = (place - low).unsqueeze(-1).to(exact)
    rows = torch.lerp(table[below].to(exact), table[(below + 1).clamp(max=last)].to(exact), share)
    return rows.to(table.dtype)


class Learned(Encoding):
    """A trained vector per position, one for each of the training length (GPT-2).

    Past the table it is undefined, unless an evaluation asks for a variant: the table stretched
    over a longer text (`interpolate`), its last row for all that follow (`clamp`), or the table
    over and over (`wrap`). A text no longer than the table reads its own rows in each of them.
    """

    config: LearnedConfig

    def __init__(self, config: LearnedConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        self.table = nn.Parameter(torch.empty(shape.positions, shape.width))
        self.beyond = Beyond.error

    @property
    def max_length(self) -> int | None:
        return self.shape.positions if self.beyond is Beyond.error else None

    @property
    def limit(self) -> str:
        return f"learned table has {len(self.table)} rows"

    @property
    def prefix_consistent(self) -> bool:
        return self.beyond is not Beyond.interpolate

    def go_beyond(self, beyond: Beyond) -> None:
        self.beyond = beyond

    def initialise(self, generators: Generators) -> None:
        nn.init.normal_(self.table, std=self.config.std, generator=generators("table"))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self._rows(positions).to(x.dtype)

    def _rows(self, positions: Tensor) -> Tensor:
        """The vectors [T, C] for `positions` [T]."""
        rows, length = len(self.table), len(positions)
        match self.beyond:
            case Beyond.interpolate if length > rows:
                return stretched(self.table, positions, length)
            case Beyond.interpolate | Beyond.clamp:
                return self.table[positions.clamp(max=rows - 1)]
            case Beyond.wrap:
                return self.table[positions % rows]
        # By shape, on the host: an index past the table would poison a CUDA context.
        self.check_length(length)
        return self.table[positions]

    def describe(self, length: int) -> dict[str, Any]:
        return {"table": self.table.detach().double()}
