"""Rotary encodings: queries and keys are rotated by angles that grow with the position."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from posbench.config import (
    ExtensionConfig,
    Layout,
    NoExtensionConfig,
    RopeConfig,
    rotary_size,
)
from posbench.encodings.base import Encoding, Hooks, Shape, precise
from posbench.encodings.extension import extended


def inverse_frequencies(size: int, theta: float, device: torch.device | None = None) -> Tensor:
    """theta^(-2c/size) for each pair c of `size` rotated channels, float64 [size/2].

    Su et al. 2021, section 3.2.2. Radians per token; the first is 1.
    """
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float64) / size
    return theta**-exponents


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Rotate the leading pairs of x [..., T, D] by the angles behind cos and sin, [T, pairs]."""
    size = 2 * cos.shape[-1]
    turned, rest = x[..., :size].to(cos.dtype), x[..., size:]
    if layout is Layout.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pairs = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.stack(pairs, dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _rotate_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    return rotate(q, cos, sin, layout), rotate(k, cos, sin, layout)


class Rope(Encoding):
    """Rotary position embedding (Su et al. 2021), stretched at evaluation by an extension."""

    config: RopeConfig
    relative = True

    def __init__(self, config: RopeConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        self.size = rotary_size(config, shape.head_size)
        self.extension: ExtensionConfig = NoExtensionConfig()

    @property
    def prefix_consistent(self) -> bool:
        # With a free factor the frequencies depend on the length of the whole text.
        return getattr(self.extension, "factor", 1.0) is not None

    def extend(self, extension: ExtensionConfig) -> None:
        if self.size == 0:  # nothing is rotated, so there is nothing to stretch
            return super().extend(extension)
        plain = inverse_frequencies(self.size, self.config.theta)
        length = self.shape.train_length
        extended(plain, self.config.theta, length, length, extension)  # refuse now, not in a layer
        self.extension = extension
        return None

    def frequencies(self, length: int, device: torch.device | None) -> tuple[Tensor, float]:
        """Inverse frequencies float64 [pairs] and factor on cos and sin, for a text of `length`."""
        plain = inverse_frequencies(self.size, self.config.theta, device)
        return extended(plain, self.config.theta, self.shape.train_length, length, self.extension)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, pairs] in `dtype`, each times the extension's factor.

        The angles are float64: in float32 they are off by 0.004 radians at position 65,536.
        """
        inverse, factor = self.frequencies(len(positions), positions.device)
        angles = torch.outer(positions.double(), inverse)
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        if self.size == 0:
            return Hooks()
        cos, sin = self.angles(positions, precise(x.dtype))
        return Hooks(rotate=partial(_rotate_both, cos=cos, sin=sin, layout=self.config.layout))

    def describe(self, length: int) -> dict[str, Any]:
        inverse, factor = self.frequencies(length, None)
        return {"inverse_frequencies": inverse, "attention_factor": factor}
