"""Context extension at evaluation: pure functions on inverse frequencies, plus a temperature.

Each takes the inverse frequencies as trained, float64 [pairs], of which pair c turns by
theta^(-c/pairs) radians per token or not at all. Those with a scale s are the trained model at
s = 1. The result depends on (training length, length, settings) only, never on what was evaluated
before.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posbench.config.extensions import (
    AbfConfig,
    DynamicNtkConfig,
    ExtensionConfig,
    Llama3Config,
    LongropeConfig,
    NoExtensionConfig,
    NtkByPartsConfig,
    NtkConfig,
    PiConfig,
    Ramp,
    ScaledConfig,
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
        case AbfConfig():
            return rebased(inverse, theta, extension.theta), 1.0
        case DynamicNtkConfig():
            s = dynamic_scale(extension.factor, train_length, length)
            return ntk_aware(inverse, s), 1.0
        case ScaledConfig():
            s = scale(extension.factor, train_length, length)
            return _scaled(inverse, s, theta, train_length, extension)
    raise UnsupportedError(f"no rotary rule for extension {extension.name}")


def _scaled(
    inverse: Tensor, s: float, theta: float, train_length: int, extension: ScaledConfig
) -> tuple[Tensor, float]:
    match extension:
        case PiConfig():
            return interpolated(inverse, s), 1.0
        case NtkConfig():
            return ntk_aware(inverse, s), 1.0
        case YarnConfig():
            return by_parts(inverse, s, theta, train_length, extension), yarn_factor(s, extension)
        case NtkByPartsConfig():
            return by_parts(inverse, s, theta, train_length, extension), 1.0
        case Llama3Config():
            slow, fast = extension.low_freq_factor, extension.high_freq_factor
            return ramped(inverse, s, turns_ramp(inverse, train_length, slow, fast)), 1.0
        case LongropeConfig():
            factor = longrope_factor(s, train_length, extension.attention_factor)
            return longrope(inverse, s, extension.factors), factor
    raise UnsupportedError(f"no rotary rule for extension {extension.name}")


def refuse_without_effect(
    inverse: Tensor, theta: float, train_length: int, extension: ExtensionConfig
) -> None:
    """Raise UnsupportedError where `extension` cannot be used, or would change no frequency.

    Constants of published models are tied to their lengths: at another one they may do nothing,
    and a result under the extension's name would be plain RoPE's. Twice the training length
    decides; who asks for a factor of 1 gets it.
    """
    changed, _ = extended(inverse, theta, train_length, 2 * train_length, extension)
    if isinstance(extension, NoExtensionConfig):
        return
    if isinstance(extension, ScaledConfig) and extension.factor == 1:
        return
    if torch.equal(changed, inverse):
        shared = vars(NoExtensionConfig())
        own = {key: value for key, value in vars(extension).items() if key not in shared}
        settings = ", ".join(f"extension.{key}={value}" for key, value in own.items())
        raise UnsupportedError(
            f"{extension.name} changes no frequency of this model, trained at {train_length} "
            f"tokens with encoding.theta={theta:g} ({settings})"
        )


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


def dynamic_scale(factor: float, train_length: int, length: int) -> float:
    """Dynamic NTK's scale, factor * n / L - (factor - 1) for n tokens, at least 1 (emozilla 2023).

    Every token of a text uses the scale of the whole text.
    """
    return max(1.0, factor * length / train_length - (factor - 1))


def rebased(inverse: Tensor, theta: float, new_theta: float) -> Tensor:
    """The frequencies of another base (Xiong et al. 2023): pair c by (new/old)^(-c/pairs)."""
    pairs = len(inverse)
    exponents = torch.arange(pairs, device=inverse.device, dtype=inverse.dtype) / pairs
    return inverse * (new_theta / theta) ** -exponents


def ramped(inverse: Tensor, s: float, interpolate: Tensor) -> Tensor:
    """Each frequency divided by s in the share `interpolate` [pairs], from 0 to 1."""
    return inverse * (interpolate / s + (1 - interpolate))  # the sum is exactly 1 at s = 1


def turns_ramp(inverse: Tensor, train_length: int, slow: float, fast: float) -> Tensor:
    """1 for pairs with fewer than `slow` turns in the training length, 0 above `fast`, and between.

    Peng et al. 2023, eq. 18; with 1 and 4 turns, the rule of Llama 3.1 (Dubey et al. 2024).
    """
    turns = train_length * inverse / (2 * math.pi)
    return ((fast - turns) / (fast - slow)).clamp(0, 1)


def pair_range(
    pairs: int, theta: float, train_length: int, fast: float, slow: float
) -> tuple[float, float]:
    """Pair numbers that turn `fast` and `slow` times within the training length, unrounded.

    Peng et al. 2023, eq. 17: pair c turns L theta^(-c/pairs) / 2 pi times.
    """

    def pair_turning(turns: float) -> float:
        return pairs * math.log(train_length / (turns * 2 * math.pi)) / math.log(theta)

    return pair_turning(fast), pair_turning(slow)


def pair_ramp(
    inverse: Tensor, theta: float, train_length: int, options: NtkByPartsConfig
) -> Tensor:
    """0 before the pair that turns beta_fast times, 1 after beta_slow's, linear between.

    The ramp of the authors' code, where the paper's is linear in the turns.
    """
    if theta <= 1:
        raise UnsupportedError(f"{options.name} needs encoding.theta greater than 1")
    pairs = len(inverse)
    low, high = pair_range(pairs, theta, train_length, options.beta_fast, options.beta_slow)
    if options.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The authors clamp to 2 * pairs - 1, not to the last pair; public checkpoints rely on it.
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(pairs, device=inverse.device, dtype=inverse.dtype) - low) / (high - low)
    return ramp.clamp(0, 1)


def by_parts(
    inverse: Tensor, s: float, theta: float, train_length: int, options: NtkByPartsConfig
) -> Tensor:
    """Fast pairs as they are, slow pairs divided by s, a ramp between (Peng et al. 2023, 3.2).

    The ramp comes from the training length, whatever the length evaluated.
    """
    if options.ramp is Ramp.pairs:
        share = pair_ramp(inverse, theta, train_length, options)
    else:
        share = turns_ramp(inverse, train_length, options.beta_slow, options.beta_fast)
    return ramped(inverse, s, share)


def yarn_factor(s: float, options: YarnConfig) -> float:
    """Factor on cos and sin; scores are multiplied by its square (Peng et al. 2023, eq. 22)."""
    if s <= 1:
        return 1.0
    if options.attention_factor is not None:
        return options.attention_factor
    return 0.1 * math.log(s) + 1.0


def longrope(inverse: Tensor, s: float, factors: list[float]) -> Tensor:
    """Each frequency divided by its own factor where s > 1 (Ding et al. 2024, eq. 4).

    Factors from outside stand for the paper's search, for every s; no token is exempt.
    """
    if len(factors) != len(inverse):
        raise UnsupportedError(
            f"longrope needs a factor for each of {len(inverse)} pairs per head; "
            f"extension.factors has {len(factors)}"
        )
    if s <= 1:
        return inverse
    return inverse / torch.tensor(factors, device=inverse.device, dtype=inverse.dtype)


def longrope_factor(s: float, train_length: int, given: float | None) -> float:
    """Factor on cos and sin: sqrt(1 + ln s / ln L) beyond the training length (their code)."""
    if s <= 1:
        return 1.0
    return math.sqrt(1 + math.log(s) / math.log(train_length)) if given is None else given
