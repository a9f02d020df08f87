"""Context extension at evaluation: pure functions on inverse frequencies, plus a temperature.

Each takes the inverse frequencies of plain RoPE, float64 [pairs], and a scale s >= 1, and is plain
RoPE at s = 1. The result depends on (training length, length, factor) only, never on what was
evaluated before.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posbench.config import (
    ExtensionConfig,
    NoExtensionConfig,
    NtkConfig,
    PiConfig,
    YarnConfig,
)
from posbench.errors import UnsupportedError


def extended(
    inverse: Tensor, theta: float, train_length: int, length: int, extension: ExtensionConfig
) -> tuple[Tensor, float]:
    """Stretched inverse frequencies [pairs] and the factor on cos and sin, for a text of `length`.

    `extension.factor` fixes the scale; without it the scale is max(1, length / train_length).
    """
    match extension:
        case NoExtensionConfig():
            return inverse, 1.0
        case PiConfig():
            return interpolated(inverse, scale(extension.factor, train_length, length)), 1.0
        case NtkConfig():
            return ntk_aware(inverse, scale(extension.factor, train_length, length)), 1.0
        case YarnConfig():
            s = scale(extension.factor, train_length, length)
            return yarn(inverse, s, theta, train_length, extension), yarn_factor(s, extension)
    raise UnsupportedError(f"no rotary rule for extension {extension.name}")


def scale(factor: float | None, train_length: int, length: int) -> float:
    """The scale s: the fixed factor, or how many training lengths the text is long, at least 1."""
    return max(1.0, length / train_length) if factor is None else float(factor)


def interpolated(inverse: Tensor, s: float) -> Tensor:
    """Position interpolation (Chen et al. 2023): every frequency divided by s."""
    return inverse / s


def ntk_aware(inverse: Tensor, s: float) -> Tensor:
    """NTK-aware scaling (bloc97 2023; Peng et al. 2023, eq. 16): base times s^(d/(d-2)).

    The first pair is unchanged, the last is divided by s exactly.
    """
    pairs = len(inverse)
    if pairs < 2:
        raise UnsupportedError("ntk needs at least 4 rotated channels per head")
    exponents = torch.arange(pairs, device=inverse.device, dtype=inverse.dtype) / (pairs - 1)
    return inverse * s**-exponents


def yarn_range(
    pairs: int, theta: float, train_length: int, fast: float, slow: float
) -> tuple[float, float]:
    """Pair numbers that turn `fast` and `slow` times within the training length, unrounded.

    Peng et al. 2023, eq. 17: pair c turns L theta^(-c/pairs) / 2 pi times.
    """

    def pair_turning(turns: float) -> float:
        return pairs * math.log(train_length / (turns * 2 * math.pi)) / math.log(theta)

    return pair_turning(fast), pair_turning(slow)


def yarn(inverse: Tensor, s: float, theta: float, train_length: int, options: YarnConfig) -> Tensor:
    """YaRN's frequencies: fast pairs as they are, slow pairs divided by s, a ramp between.

    Peng et al. 2023, section 3.2, with the ramp linear in the pair's number as in the authors'
    code. The range comes from the training length, whatever the length evaluated.
    """
    if theta <= 1:
        raise UnsupportedError("yarn needs encoding.theta greater than 1")
    pairs = len(inverse)
    low, high = yarn_range(pairs, theta, train_length, options.beta_fast, options.beta_slow)
    if options.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The authors clamp to 2 * pairs - 1, not to the last pair; public checkpoints rely on it.
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(pairs, device=inverse.device, dtype=inverse.dtype) - low) / (high - low)
    interpolate = ramp.clamp(0, 1)
    return inverse * (interpolate / s + (1 - interpolate))  # the sum is exactly 1 at s = 1


def yarn_factor(s: float, options: YarnConfig) -> float:
    """Factor on cos and sin; scores are multiplied by its square (Peng et al. 2023, eq. 22)."""
    if s <= 1:
        return 1.0
    if options.attention_factor is not None:
        return options.attention_factor
    return 0.1 * math.log(s) + 1.0
