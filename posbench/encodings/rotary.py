"""Rotary encodings: queries and keys are rotated by angles that grow with the position."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posbench.config.encodings import (
    LayeredConfig,
    Layout,
    PhaseInit,
    PopeConfig,
    RopePConfig,
    RotaryConfig,
    XposConfig,
)
from posbench.config.extensions import ExtensionConfig, Need, RegroupingConfig, WindowConfig
from posbench.encodings.base import Encoding, Generators, Hooks, Shape, precise
from posbench.encodings.extension import extended, refuse_without_effect
from posbench.encodings.regrouping import Turn, far_positions, far_scores, logn, refuse_window
from posbench.encodings.windows import sink_scores
from posbench.errors import UnsupportedError


def inverse_frequencies(size: int, theta: float, device: torch.device | None = None) -> Tensor:
    """theta^(-2c/size) for each pair c of `size` rotated channels, float64 [size/2].

    Su et al. 2021, section 3.2.2. Radians per token; the first is 1.
    """
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float64) / size
    return theta**-exponents


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Rotate the leading pairs of x [..., T, D] by the angles behind cos and sin.

    Those are [T, pairs], or [H, T, pairs] where heads differ.
    """
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


def rotate_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    return rotate(q, cos, sin, layout), rotate(k, cos, sin, layout)


class Rotary(Encoding):
    """What turns queries and keys by frequencies, stretched at evaluation by an extension."""

    config: RotaryConfig

    def __init__(self, config: RotaryConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        self.size = config.rotated(shape.head_size)

    def refuse(self, extension: ExtensionConfig) -> None:
        super().refuse(extension)
        plain, length = self.trained(None), self.shape.train_length
        if extension.needs in (Need.frequencies, Need.rotation) and not plain.any():
            raise UnsupportedError(extension.refusal(self.config.name))  # nothing turns
        if isinstance(extension, RegroupingConfig):
            refuse_window(length, extension)
        if extension.needs is Need.frequencies:
            refuse_without_effect(plain, self.config.theta, length, extension)

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self.extension.relative

    def trained(self, device: torch.device | None) -> Tensor:
        """Inverse frequencies as trained, float64 [pairs]."""
        return inverse_frequencies(self.size, self.config.theta, device)

    def frequencies(self, length: int, device: torch.device | None) -> tuple[Tensor, float]:
        """Inverse frequencies float64 [pairs] and factor on cos and sin, for a text of `length`."""
        plain = self.trained(device)
        if self.extension.needs is not Need.frequencies:
            return plain, 1.0
        return extended(plain, self.config.theta, self.shape.train_length, length, self.extension)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, pairs] in `dtype`, each times the extension's factor.

        The angles are float64: in float32 they are off by 0.004 radians at position 65,536.
        """
        inverse, factor = self.frequencies(len(positions), positions.device)
        angles = torch.outer(positions.double(), inverse)
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def describe(self, length: int) -> dict[str, Any]:
        inverse, factor = self.frequencies(length, None)
        return {"inverse_frequencies": inverse, "attention_factor": factor}


class Rope(Rotary):
    """Rotary position embedding (Su et al. 2021), of a whole head or its leading channels.

    The last of every `global_every` layers may have a base of its own, `global_theta` (Gemma Team
    2025, section 2, there beside windows in the other layers): `global_rope` is what these do. An
    extension stretches each layer's own frequencies.
    """

    config: LayeredConfig

    def __init__(self, config: LayeredConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        self.global_rope: Rope | None = None
        if config.global_theta is not None:
            alone = dataclasses.replace(
                config, theta=config.global_theta, global_theta=None, global_every=None
            )
            self.global_rope = type(self)(alone, shape)

    def extend(self, extension: ExtensionConfig) -> None:
        before = self.extension
        super().extend(extension)
        if self.global_rope is None:
            return
        try:
            self.global_rope.extend(extension)
        except UnsupportedError as error:
            self.extension = before
            raise UnsupportedError(f"in layers with encoding.global_theta, {error}") from error

    def describe(self, length: int) -> dict[str, Any]:
        numbers = super().describe(length)
        if self.global_rope is not None:
            there = self.global_rope.describe(length)
            numbers["global_inverse_frequencies"] = there["inverse_frequencies"]
        return numbers

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        if self.global_rope is not None and self.config.is_global(layer):
            return self.global_rope.hooks(x, positions, layer)
        hooks = self.sight(positions)
        if self.size == 0:
            return hooks
        cos, sin = self.angles(positions, precise(x.dtype))
        rotation = partial(rotate_both, cos=cos, sin=sin, layout=self.config.layout)
        hooks = hooks._replace(rotate=rotation)
        match self.extension:
            case RegroupingConfig() as extension:
                return self._regrouped(hooks, positions, extension)
            case WindowConfig(sinks=sinks) as extension if sinks != 0:
                return self._with_sinks(hooks, positions, extension)
        return hooks

    def _regrouped(self, hooks: Hooks, positions: Tensor, extension: RegroupingConfig) -> Hooks:
        length, scale = self.shape.train_length, 1 / math.sqrt(self.shape.head_size)
        window = extension.window_for(length)
        moved = far_positions(positions, window, extension)
        rescore = far_scores(positions, window, moved, self._turn(positions), scale)
        temperature = logn(positions.double() + 1, length) if extension.logn else 1.0
        return hooks._replace(rescore=rescore, temperature=temperature)

    def _with_sinks(self, hooks: Hooks, positions: Tensor, extension: WindowConfig) -> Hooks:
        length, scale = self.shape.train_length, 1 / math.sqrt(self.shape.head_size)
        rescore = sink_scores(positions, length, extension, self._turn(positions), scale)
        return hooks._replace(rescore=rescore)

    def _turn(self, positions: Tensor) -> Turn:
        """Rotation of rows [..., T, D] by any number of positions [T] each."""
        inverse = self.trained(positions.device)

        def turn(x: Tensor, by: Tensor) -> Tensor:
            angles = torch.outer(by.double(), inverse)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            return rotate(x, cos, sin, self.config.layout)

        return turn


def kept_pairs(pairs: int, share: float) -> int:
    """Pairs that turn in p-RoPE: the whole part of share * pairs, as in public code."""
    return math.floor(share * pairs + 1e-9)  # 0.29 * 100 is less than 29 in binary


class RopeP(Rope):
    """p-RoPE: RoPE's grid without its lowest frequencies (Barbero et al. 2024, section 6).

    Share 0 is NoPE and share 1 is RoPE; unlike rope_partial, the pairs that turn keep the
    frequencies they have in RoPE.
    """

    config: RopePConfig

    def trained(self, device: torch.device | None) -> Tensor:
        inverse = super().trained(device)
        inverse[kept_pairs(len(inverse), self.config.share) :] = 0
        return inverse


def xpos_zeta(size: int, gamma: float, device: torch.device | None = None) -> Tensor:
    """zeta_c = (2c/size + gamma) / (1 + gamma), float64 [size/2] (Sun et al. 2022, section 3.2)."""
    steps = torch.arange(0, size, 2, device=device, dtype=torch.float64) / size
    return (steps + gamma) / (1 + gamma)


class Xpos(Rotary):
    """xPos: RoPE with scores times zeta^((i-j)/B) in each pair (Sun et al. 2022).

    Queries are multiplied by zeta^(p/B), keys by zeta^(-p/B), with p counted from the middle of the
    text for both, which keeps either small. An extension stretches the rotation alone. The
    paper's blockwise attention at evaluation is not part of this.
    """

    config: XposConfig
    keeps_norm = False

    @property
    def max_length(self) -> int:
        return self.config.longest(self.shape.train_length)

    @property
    def limit(self) -> str:
        return f"xpos scales overflow float32 beyond {self.max_length} tokens"

    def scales(self, positions: Tensor) -> Tensor:
        """Factor on queries, and one over that on keys, float64 [T, pairs]."""
        centred = positions.double() - (positions[0] + positions[-1]).double() / 2
        zeta = xpos_zeta(self.size, self.config.gamma, positions.device)
        base = self.config.base_for(self.shape.train_length)
        return zeta ** (centred / base).unsqueeze(-1)

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        self.check_length(len(positions))
        dtype, layout = precise(x.dtype), self.config.layout
        cos, sin = self.angles(positions, torch.float64)
        scale = self.scales(positions)
        for_q, for_k = (
            ((cos * factor).to(dtype), (sin * factor).to(dtype)) for factor in (scale, 1 / scale)
        )

        def both(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            return rotate(q, *for_q, layout), rotate(k, *for_k, layout)

        return Hooks(rotate=both)


def polar(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Points [..., T, 2D] of magnitude softplus(x) at the angles behind cos and sin [..., T, D]."""
    magnitude = F.softplus(x.to(cos.dtype))
    return torch.cat((magnitude * cos, magnitude * sin), dim=-1).to(x.dtype)


class Pope(Rotary):
    """PoPE: score = sum over channels of |q| |k| cos((i-j) f - phase) (Gopalakrishnan et al. 2025).

    Magnitudes are softplus(q) and softplus(k); each of D channels has a frequency of its own,
    theta^(-c/D), and each head and layer a learned phase per channel, held within [-2 pi, 0].
    """

    config: PopeConfig
    keeps_norm = False

    def __init__(self, config: PopeConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        self.phases = nn.Parameter(torch.empty(shape.layers, shape.heads, shape.head_size))

    def initialise(self, generators: Generators) -> None:
        low = -2 * math.pi if self.config.phase_init is PhaseInit.uniform else 0.0
        nn.init.uniform_(self.phases, low, 0.0, generator=generators("phases"))

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        cos, sin = self.angles(positions, precise(x.dtype))
        free = self.phases[layer].to(cos.dtype).unsqueeze(-2)
        # Its gradient passes the bounds: one that reached them could otherwise never come back.
        phases = free + (free.clamp(-2 * math.pi, 0) - free).detach()
        turn, tilt = phases.cos(), phases.sin()

        def both(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            shifted = (cos * turn - sin * tilt, sin * turn + cos * tilt)
            return polar(q, cos, sin), polar(k, *shifted)

        return Hooks(rotate=both)
