"""FoPE: a pair of channels turns by a Fourier series of frequencies instead of by one."""

from __future__ import annotations

import math
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from posbench.config.encodings import FopeConfig
from posbench.encodings.base import Hooks, Shape, precise
from posbench.encodings.rotary import Rotary, rotate_both

Bits = TypeVar("Bits", int, Tensor)
_LOW_32 = 0xFFFFFFFF


def hashed(bits: Bits) -> Bits:
    """32 bits to 32 bits that look random, one to one (C. Wellons 2018, hash-prospector).

    Both factors are below 2^31, so that no product leaves int64.
    """
    bits = bits + 0x9E3779B9 & _LOW_32
    bits = (bits ^ (bits >> 16)) * 0x21F0AAAD & _LOW_32
    bits = (bits ^ (bits >> 15)) * 0x735A2D97 & _LOW_32
    return bits ^ (bits >> 15)


def normal_numbers(
    shape: tuple[int, ...], seed: int, layer: int, device: torch.device | None = None
) -> Tensor:
    """Standard normal numbers, float64 of `shape`, by (seed, layer, place) alone.

    Hashed, not drawn: the same on every device and in any order of calls, and nothing to keep.
    """
    stream = hashed(hashed(seed) ^ layer)
    places = torch.arange(math.prod(shape), device=device)
    uniform = (hashed(hashed(places) ^ stream).double() + 0.5) / 2**32
    numbers: Tensor = torch.special.ndtri(uniform)
    return numbers.view(shape)


def xavier_std(gain: float, heads: int, pairs: int) -> float:
    """Standard deviation of Xavier's normal numbers in a tensor [heads, pairs, pairs].

    Its fans count as those of a convolution (Glorot and Bengio 2010, as torch has it): pairs^2
    in, heads * pairs out.
    """
    return gain * math.sqrt(2 / (pairs * pairs + heads * pairs))


def series(waves: Tensor, coefficients: Tensor) -> Tensor:
    """Waves [T, pairs] plus a sum over the leading ones, by head [H, T, pairs].

    Pair m of M leading ones gains sum_w coefficients[h, w, m] waves[:, w], `coefficients` being
    [H, M, M] (Hua et al. 2024); the other pairs are left alone.
    """
    heads, kept, _ = coefficients.shape
    leading, others = waves[:, :kept], waves[:, kept:]
    return torch.cat((leading + leading @ coefficients, others.expand(heads, -1, -1)), dim=-1)


class Fope(Rotary):
    """Fourier position embedding (Hua et al. 2024, arXiv:2412.17739; ICML 2025).

    Pair m turns by e^(i w_m p) + sum_w a_w e^(i w p) at position p, over the frequencies w of
    RoPE's grid that complete `turns` turns within the training length. A slower pair has
    frequency zero, cos 1 and sin 0, and enters no sum. The a_w differ between cos and sin, pairs,
    heads and layers; queries and keys share them. This is not a rotation: it multiplies the pair
    by a number whose size varies with p, and a score depends on both positions.

    Where the paper's text, the listing in its appendix and the authors' repository differ:

    - The coefficients do not train, as in the listing and in every configuration of the
      repository, where training them is an option; there is none here. Hence no parameters, and
      `encoding.seed` fixes the coefficients for all runs, whatever the run's seed.
    - They are not divided by their sum, as in the text and the repository; the listing divides.
    - Their size is the repository's, Xavier's for a tensor [H, M, M] with a gain of 0.3 for 60M
      parameters, 0.4 for 180M and 0.6 for 1.2B; the text names a standard deviation only.
    - All M pairs that keep a frequency turn, and the others have sin 0, as in the text. The
      repository lets at most half of a head's pairs turn and pads sin with 1, which multiplies
      the scores of the others by two.

    An extension stretches the frequencies w after the slow ones are cut, as the authors combine
    FoPE with YaRN.
    """

    config: FopeConfig

    def __init__(self, config: FopeConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        self.kept = config.kept(self.size, shape.train_length)

    @property
    def _alone(self) -> bool:
        """Whether each pair turns by its own frequency and no other, as in RoPE."""
        return self.config.gain == 0 or self.kept == 0

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self._alone

    @property
    def keeps_norm(self) -> bool:  # type: ignore[override]
        return self._alone

    def trained(self, device: torch.device | None) -> Tensor:
        inverse = super().trained(device)
        inverse[self.kept :] = 0
        return inverse

    def coefficients(self, layer: int, device: torch.device | None) -> Tensor:
        """a of cos and of sin, float64 [2, H, M, M]: frequency w adds [..., w, m] to pair m."""
        heads, kept = self.shape.heads, self.kept
        numbers = normal_numbers((2, heads, kept, kept), self.config.seed, layer, device)
        return numbers * xavier_std(self.config.gain, heads, kept)

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        if self.kept == 0:
            return Hooks()
        dtype = precise(x.dtype)
        waves = self.angles(positions, torch.float64)
        coefficients = self.coefficients(layer, positions.device)
        cos, sin = (series(w, a).to(dtype) for w, a in zip(waves, coefficients, strict=True))
        return Hooks(rotate=partial(rotate_both, cos=cos, sin=sin, layout=self.config.layout))
