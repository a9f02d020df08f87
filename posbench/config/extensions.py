"""Settings of each context extension, `extension.*`, and the table of ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, NamedTuple

from posbench.config.fields import setting


class Ramp(StrEnum):
    """What a ramp between kept and stretched pairs is linear in: a pair's number, or its turns."""

    pairs = "pairs"
    turns = "turns"


class Need(StrEnum):
    """What an extension acts on, in words for a scheme {} that does not have it."""

    nothing = "is for every scheme, {} included"
    frequencies = "changes rotary frequencies; {} has none"
    rotation = "needs scores that a rotation alone decides; those of {} are not"
    slopes = "divides the slopes of a linear bias; {} has none"
    distances = (
        "gives keys other distances, which takes a plain rotation, a bias by distance alone, or "
        "no position at all; {} is none of these"
    )


@dataclass
class ExtensionConfig:
    """How a trained model is taken to longer texts; tuning changes a copy of it."""

    needs: ClassVar[Need] = Need.frequencies
    name: str = setting("none", "id of the extension")
    finetune_steps: int = setting(
        0, "train a copy on for N steps at the longer length before it is evaluated", low=0
    )
    finetune_lr: float | None = setting(
        None, "learning rate of finetune_steps; null means a tenth of the run's train.lr", low=0.0
    )

    def refusal(self, scheme: str) -> str:
        """Why the extension means nothing to a scheme without what it needs."""
        return f"{self.name} {self.needs.format(scheme)}"

    @property
    def relative(self) -> bool:
        """Whether scores that depended on i - j alone still do."""
        return True

    @property
    def by_length(self) -> bool:
        """Whether what it does depends on the length of the whole text."""
        return False

    def reach(self, longest: float) -> float:
        """Training lengths that a model is tuned for when `longest` is the largest evaluated."""
        return max(1.0, longest)

    def fixed(self, longest: float) -> ExtensionConfig:
        """What a tuned model has: the same extension with one scale for every length."""
        return self


@dataclass
class NoExtensionConfig(ExtensionConfig):
    """The model as it was trained."""

    needs: ClassVar[Need] = Need.nothing
    name: str = setting("none", "id of the extension")


@dataclass
class ScaledConfig(ExtensionConfig):
    """An extension with a scale s; at s = 1 it is the model as it was trained."""

    factor: float | None = setting(
        None,
        "scale s; null means max(1, length / training length), a number fixes it at every length",
        low=1.0,
    )

    @property
    def by_length(self) -> bool:
        return self.factor is None

    def reach(self, longest: float) -> float:
        return super().reach(longest) if self.factor is None else self.factor

    def fixed(self, longest: float) -> ExtensionConfig:
        return replace(self, factor=self.reach(longest))


@dataclass
class PiConfig(ScaledConfig):
    """Position interpolation: every frequency divided by s (Chen et al. 2023)."""

    name: str = setting("pi", "id of the extension")


@dataclass
class NtkConfig(ScaledConfig):
    """NTK-aware scaling: a larger base, so that only low frequencies stretch (bloc97 2023)."""

    name: str = setting("ntk", "id of the extension")


@dataclass
class DynamicNtkConfig(ExtensionConfig):
    """NTK-aware scaling that grows with the text: s = factor n/L - (factor - 1) beyond L."""

    name: str = setting("dynamic_ntk", "id of the extension")
    factor: float = setting(2.0, "growth of s per training length; 1 is ntk with s = n/L", low=1.0)

    @property
    def by_length(self) -> bool:
        return True


@dataclass
class NtkByPartsConfig(ScaledConfig):
    """Slow pairs divided by s, fast pairs left alone, a ramp between (Peng et al. 2023, 3.2)."""

    name: str = setting("ntk_by_parts", "id of the extension")
    beta_fast: float = setting(32.0, "pairs that turn more often than this are left alone", 0.0)
    beta_slow: float = setting(1.0, "pairs that turn less often than this are interpolated", 0.0)
    ramp: Ramp = setting(
        Ramp.turns, "linear in turns within the training length (paper), or over pairs (code)"
    )
    truncate: bool = setting(True, "ramp=pairs: round its ends to whole pairs, as public code does")


@dataclass
class YarnConfig(NtkByPartsConfig):
    """YaRN: interpolation by parts and a softmax temperature (Peng et al. 2023)."""

    name: str = setting("yarn", "id of the extension")
    ramp: Ramp = setting(
        Ramp.pairs,
        "linear over pairs (public code), or in turns within the training length (paper)",
    )
    attention_factor: float | None = setting(
        None, "factor on cos and sin; null means 0.1 ln s + 1", low=0.0
    )


@dataclass
class Llama3Config(ScaledConfig):
    """Llama 3.1's rule: like ntk_by_parts, between 1 and 4 turns within the training length."""

    name: str = setting("llama3", "id of the extension")
    low_freq_factor: float = setting(1.0, "pairs that turn less often are divided by s", low=0.0)
    high_freq_factor: float = setting(4.0, "pairs that turn more often are left alone", low=0.0)


@dataclass
class AbfConfig(ExtensionConfig):
    """Adjusted base frequency: another theta at every length (Xiong et al. 2023)."""

    name: str = setting("abf", "id of the extension")
    theta: float = setting(500_000.0, "base that replaces encoding.theta", low=1.0)


@dataclass
class LongropeConfig(ScaledConfig):
    """LongRoPE: each pair divided by a factor of its own beyond 1x (Ding et al. 2024)."""

    name: str = setting("longrope", "id of the extension")
    factors: list[float] = setting([], "what each pair's frequency is divided by, fastest first")
    search: int = setting(
        0, "instead of factors: look for them in N trials on the validation split", low=0
    )
    attention_factor: float | None = setting(
        None, "factor on cos and sin; null means sqrt(1 + ln s / ln L)", low=0.0
    )


@dataclass
class RegroupingConfig(ExtensionConfig):
    """An extension that leaves distances below a window alone and makes farther ones smaller.

    At every length, 1x included.
    """

    needs: ClassVar[Need] = Need.rotation
    window: int | None = setting(
        None, "distances below it stay as they are; null means half the training length", low=1
    )
    logn: bool = setting(
        True, "multiply scores of query p by max(1, ln(p + 1) / ln(training length))"
    )

    def window_for(self, train_length: int) -> int:
        return max(1, train_length // 2) if self.window is None else self.window

    @property
    def relative(self) -> bool:
        return not self.logn


@dataclass
class ReropeConfig(RegroupingConfig):
    """ReRoPE: every distance beyond the window counts as the window (Su 2023)."""

    name: str = setting("rerope", "id of the extension")


@dataclass
class LeakyReropeConfig(RegroupingConfig):
    """Leaky ReRoPE: beyond the window, distances grow 1/step per token (Su 2023)."""

    name: str = setting("leaky_rerope", "id of the extension")
    step: float = setting(8.0, "tokens beyond the window that count as one", low=1.0)


@dataclass
class SelfExtendConfig(RegroupingConfig):
    """Self-Extend: beyond the window, positions are counted in groups (Jin et al. 2024)."""

    name: str = setting("self_extend", "id of the extension")
    group: int = setting(8, "tokens of a group", low=1)
    logn: bool = setting(
        False, "multiply scores of query p by max(1, ln(p + 1) / ln(training length))"
    )

    @property
    def relative(self) -> bool:
        return False  # groups begin at 0


class Sizes(NamedTuple):
    """What a token sees, in tokens, and the longest distance a sink is scored at."""

    sinks: int
    window: int
    longest: int


@dataclass
class WindowConfig(ExtensionConfig):
    """An extension under which a token sees no more than the nearest tokens and the first, sinks.

    At every length, 1x included.
    """

    needs: ClassVar[Need] = Need.distances
    sinks: int | None = setting(4, "first tokens, which all see; 0 leaves the window alone", low=0)
    window: int | None = setting(None, "nearest tokens that a token sees, itself included", low=1)

    def sizes_for(self, train_length: int) -> Sizes:
        """Sinks, window and longest distance for a model trained at `train_length`."""
        raise NotImplementedError

    @property
    def relative(self) -> bool:
        return self.sinks == 0


@dataclass
class LmInfiniteConfig(WindowConfig):
    """LM-Infinite: sinks and a window, which no distance exceeds (Han et al. 2023)."""

    name: str = setting("lm_infinite", "id of the extension")
    sinks: int | None = setting(
        None,
        "first tokens, which all see; null means 1/64 of the training length, at least 4",
        low=0,
    )
    window: int | None = setting(
        None,
        "nearest tokens that a token sees, itself included, and the longest distance; null means "
        "the training length",
        low=1,
    )

    def sizes_for(self, train_length: int) -> Sizes:
        sinks = max(4, train_length // 64) if self.sinks is None else self.sinks
        window = train_length if self.window is None else self.window
        return Sizes(sinks, window, window)


@dataclass
class StreamingConfig(WindowConfig):
    """StreamingLLM: sinks and a window, at their places in the cache (Xiao et al. 2023)."""

    name: str = setting("streaming", "id of the extension")
    sinks: int = setting(4, "first tokens, which all see; 0 leaves the window alone", low=0)
    window: int | None = setting(
        None,
        "nearest tokens that a token sees, itself included; null means the training length less "
        "the sinks",
        low=1,
    )

    def sizes_for(self, train_length: int) -> Sizes:
        window = train_length - self.sinks if self.window is None else self.window
        return Sizes(self.sinks, window, max(window, self.sinks + window - 1))


@dataclass
class AlibiPiConfig(ScaledConfig):
    """Position interpolation of ALiBi: every slope divided by s (Al-Khateeb et al. 2023)."""

    needs: ClassVar[Need] = Need.slopes
    name: str = setting("alibi_pi", "id of the extension")


EXTENSIONS: dict[str, type[ExtensionConfig]] = {
    "none": NoExtensionConfig,
    "pi": PiConfig,
    "ntk": NtkConfig,
    "dynamic_ntk": DynamicNtkConfig,
    "ntk_by_parts": NtkByPartsConfig,
    "yarn": YarnConfig,
    "llama3": Llama3Config,
    "abf": AbfConfig,
    "longrope": LongropeConfig,
    "rerope": ReropeConfig,
    "leaky_rerope": LeakyReropeConfig,
    "self_extend": SelfExtendConfig,
    "lm_infinite": LmInfiniteConfig,
    "streaming": StreamingConfig,
    "alibi_pi": AlibiPiConfig,
}
