"""Biases that the distance i - j alone decides, by a formula: ALiBi and Sandwich."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from posbench.config.encodings import AlibiConfig, SandwichConfig
from posbench.config.extensions import AlibiPiConfig, ExtensionConfig, Need, WindowConfig
from posbench.encodings.base import Encoding, Hooks, precise
from posbench.encodings.extension import scale
from posbench.encodings.windows import sink_biases
from posbench.errors import UnsupportedError


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """ALiBi's slope of each head, float64 [heads] (Press et al. 2022, section 3, and their code).

    For a power of two: 2^(-8h/heads), h = 1..heads. Otherwise the slopes of the next lower power
    of two n, then every other slope of 2n, so the list does not fall monotonically.
    """
    return torch.exp2(-alibi_halvings(heads, device))


def alibi_halvings(heads: int, device: torch.device | None = None) -> Tensor:
    """How many times each of ALiBi's slopes is halved from 1, float64 [heads]."""
    if heads == 0:
        return torch.empty(0, device=device, dtype=torch.float64)
    power = 1 << (heads.bit_length() - 1)
    first = torch.arange(1, power + 1, device=device, dtype=torch.float64) / power
    rest = torch.arange(heads - power, device=device, dtype=torch.float64)
    return 8 * torch.cat((first, (2 * rest + 1) / (2 * power)))


def sandwich(distances: Tensor, heads: int, dimension: int, base: float) -> Tensor:
    """Sandwich's bias [heads, ...] of float64 `distances` [...] (Chi et al. 2023).

    The product of two sinusoidal embeddings, sum over k = 1..dimension/2 of
    cos(distance base^(-2k/dimension)), divided by 8h/heads for head h = 1..heads. Half the
    dimension is taken off first, which the softmax ignores: the bias is 0 at distance 0 and never
    below -dimension heads / 8h.
    """
    device = distances.device
    steps = torch.arange(1, dimension // 2 + 1, device=device, dtype=torch.float64)
    angles = distances.unsqueeze(-1) * base ** (-2 * steps / dimension)
    total = (torch.cos(angles) - 1).sum(dim=-1)
    numbers = torch.arange(1, heads + 1, device=device, dtype=torch.float64)
    return per_head(heads / (8 * numbers), distances) * total


def per_head(values: Tensor, distances: Tensor) -> Tensor:
    """`values` [H] with an axis of size one for each axis of `distances`."""
    return values.view(-1, *(1,) * distances.dim())


class ByDistance(Encoding):
    """A bias that depends on i - j alone. A subclass gives it in float64, as `bias`.

    It is evaluated on one row of distances a layer, so float64 costs nothing, and a large distance
    or a cancelling sum cannot spoil it.
    """

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self.extension.relative

    def bias(self, distances: Tensor, layer: int) -> Tensor:
        """Bias [H, ...] of float64 `distances` [...] in layer number `layer`."""
        raise NotImplementedError

    def shrink(self, length: int) -> float:
        """What distances are divided by in a text of `length` tokens."""
        if isinstance(self.extension, AlibiPiConfig):
            return scale(self.extension.factor, self.shape.train_length, length)
        return 1.0

    def _rounded_once(self, distances: Tensor, layer: int, shrink: float) -> Tensor:
        return self.bias(distances.double() / shrink, layer).to(distances.dtype)

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        hooks = self.sight(positions)
        if isinstance(self.extension, WindowConfig):
            return self._windowed(hooks, x, positions, layer, self.extension)
        shrink = self.shrink(len(positions))
        return hooks._replace(distance_bias=partial(self._rounded_once, layer=layer, shrink=shrink))

    def _windowed(
        self, hooks: Hooks, x: Tensor, positions: Tensor, layer: int, extension: WindowConfig
    ) -> Hooks:
        """The bias stays the same from the window on, where sinks alone are seen."""
        length = self.shape.train_length
        _, window, longest = extension.sizes_for(length)
        distances = torch.arange(longest + 1, device=x.device, dtype=torch.float64)
        table = self.bias(distances, layer)
        further = (table[:, window:] - table[:, window, None]).to(precise(x.dtype))

        def bias(distances: Tensor) -> Tensor:
            return table[:, distances.long().clamp(max=window)].to(distances.dtype)

        score_mod = sink_biases(positions, length, extension, further)
        return hooks._replace(distance_bias=bias, score_mod=score_mod)

    def describe(self, length: int) -> dict[str, Any]:
        return {"bias": self.bias(torch.arange(length, dtype=torch.float64), 0).detach()}


class Alibi(ByDistance):
    """Attention with linear biases: -slope * (i - j) (Press et al. 2022)."""

    config: AlibiConfig

    def slopes(self, device: torch.device | None = None) -> Tensor:
        """Slope of each head, float64 [H]; 0 for the free heads, which come last."""
        biased = alibi_slopes(self.shape.heads - self.config.free_heads, device)
        return torch.cat((biased, biased.new_zeros(self.config.free_heads)))

    def refuse(self, extension: ExtensionConfig) -> None:
        super().refuse(extension)
        if extension.needs is Need.slopes and not self.slopes().any():
            raise UnsupportedError(
                f"{extension.refusal(self.config.name)} but 0 "
                f"(encoding.free_heads={self.config.free_heads})"
            )

    def bias(self, distances: Tensor, layer: int) -> Tensor:
        return -per_head(self.slopes(distances.device), distances) * distances

    def describe(self, length: int) -> dict[str, Any]:
        return {"slopes": self.slopes() / self.shrink(length)}


class Sandwich(ByDistance):
    """The product of two sinusoidal embeddings, compressed per head (Chi et al. 2023)."""

    config: SandwichConfig

    def bias(self, distances: Tensor, layer: int) -> Tensor:
        return sandwich(distances, self.shape.heads, self.config.dimension, self.config.base)
