"""Settings of each encoding, `encoding.*`: one dataclass per id, and the table of ids."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from posbench.config.extensions import ExtensionConfig, Need
from posbench.config.fields import setting


class Layout(StrEnum):
    """Which two channels of a head form a pair: neighbours (2c, 2c+1), or (c, c + D/2)."""

    interleaved = "interleaved"
    half = "half"


class SineLayout(StrEnum):
    interleaved = "interleaved"
    concat = "concat"


class PhaseInit(StrEnum):
    zero = "zero"
    uniform = "uniform"


class DistanceScale(StrEnum):
    """How a distance r enters a network: log(1 + r), or r over the training length."""

    log = "log"
    linear = "linear"


class DapeBase(StrEnum):
    """The bias by distance that DAPE reads and adds to."""

    kerple_log = "kerple_log"
    alibi = "alibi"


@dataclass
class EncodingConfig:
    """How the model learns where its tokens are."""

    offers: ClassVar[frozenset[Need]] = frozenset()  # what extensions can act on
    in_layers: ClassVar[bool] = True  # acts in attention layers, not on the embeddings
    by_position: ClassVar[bool] = True  # reads the numbers of positions
    name: str = setting("none", "id of the scheme")

    def takes(self, extension: ExtensionConfig) -> bool:
        """Whether `extension` means something to the scheme."""
        return extension.needs in {Need.nothing, *self.offers}


@dataclass
class NoneConfig(EncodingConfig):
    """No positional encoding; the causal mask alone orders the tokens (Haviv et al. 2022)."""

    offers: ClassVar[frozenset[Need]] = frozenset({Need.distances})
    in_layers: ClassVar[bool] = False
    by_position: ClassVar[bool] = False
    name: str = setting("none", "id of the scheme")


@dataclass
class SinusoidalConfig(EncodingConfig):
    """Fixed sines and cosines added to the token embeddings (Vaswani et al. 2017)."""

    in_layers: ClassVar[bool] = False
    name: str = setting("sinusoidal", "id of the scheme")
    base: float = setting(10_000.0, "base of the geometric series of wavelengths", low=1.0)
    scale: float = setting(
        0.1, "amplitude; 1.0 is the paper's, beside embeddings multiplied by sqrt(width)", low=0.0
    )
    layout: SineLayout = setting(SineLayout.interleaved, "sin,cos side by side, or in two halves")


@dataclass
class LearnedConfig(EncodingConfig):
    """One trained vector per absolute position (GPT-2); undefined beyond its table."""

    in_layers: ClassVar[bool] = False
    name: str = setting("learned", "id of the scheme")
    std: float = setting(0.02, "standard deviation of the initial table", low=0.0)


@dataclass
class RotaryConfig(EncodingConfig):
    """What every scheme that turns queries and keys by frequencies has."""

    offers: ClassVar[frozenset[Need]] = frozenset({Need.frequencies})
    theta: float = setting(10_000.0, "base of the geometric series of frequencies", low=1.0)

    def rotated(self, head_size: int) -> int:
        """Channels of a head that are rotated, in pairs, after any widening of the head."""
        return head_size


@dataclass
class PairedConfig(RotaryConfig):
    """What every scheme that turns pairs of a head's channels has."""

    layout: Layout = setting(Layout.interleaved, "which two channels of a head form a pair")


_ROTATION = frozenset({Need.frequencies, Need.rotation, Need.distances})


@dataclass
class LayeredConfig(PairedConfig):
    """What every RoPE whose base may differ between layers has (Gemma Team 2025)."""

    global_theta: float | None = setting(
        None, "base in the last of every global_every layers; null: theta in all layers", low=1.0
    )
    global_every: int | None = setting(
        None, "layers in a group whose last has global_theta; must divide model.layers", low=2
    )

    def is_global(self, layer: int) -> bool:
        """Whether layer number `layer`, from 0, has `global_theta`."""
        if self.global_theta is None or self.global_every is None:
            return False
        return (layer + 1) % self.global_every == 0


@dataclass
class RopeConfig(LayeredConfig):
    """Rotary embedding: rotate pairs of query and key channels by the position (Su et al. 2021)."""

    offers: ClassVar[frozenset[Need]] = _ROTATION
    name: str = setting("rope", "id of the scheme")
    fraction: float = setting(1.0, "leading share of each head that is rotated", 0.0, 1.0)

    def rotated(self, head_size: int) -> int:
        return round(self.fraction * head_size)


@dataclass
class RopePartialConfig(RopeConfig):
    """RoPE on the leading channels of each head only, on a grid of its own (GPT-NeoX, GPT-J)."""

    name: str = setting("rope_partial", "id of the scheme")
    fraction: float = setting(0.5, "leading share of each head that is rotated", 0.0, 1.0)


@dataclass
class RopeAbfConfig(RopeConfig):
    """RoPE trained with a larger base, 500,000 (Xiong et al. 2023; Llama 3)."""

    name: str = setting("rope_abf", "id of the scheme")
    theta: float = setting(500_000.0, "base of the geometric series of frequencies", low=1.0)


@dataclass
class RopeLocalGlobalConfig(RopeConfig):
    """RoPE with a far larger base in every fourth layer (Gemma Team 2025: every sixth)."""

    name: str = setting("rope_local_global", "id of the scheme")
    global_theta: float | None = setting(
        1_000_000.0,
        "base in the last of every global_every layers; null: theta in all layers",
        low=1.0,
    )
    global_every: int | None = setting(
        4, "layers in a group whose last has global_theta; must divide model.layers", low=2
    )


@dataclass
class RopePConfig(LayeredConfig):
    """p-RoPE: the slowest pairs do not turn, the others as in RoPE (Barbero et al. 2024)."""

    offers: ClassVar[frozenset[Need]] = _ROTATION
    name: str = setting("rope_p", "id of the scheme")
    share: float = setting(0.75, "p: share of the pairs that turn, the fastest first", 0.0, 1.0)


@dataclass
class FopeConfig(PairedConfig):
    """FoPE: each pair turns by a Fourier series, without slow frequencies (Hua et al. 2024)."""

    name: str = setting("fope", "id of the scheme")
    gain: float = setting(
        0.3, "Xavier gain of the random coefficients; the paper's grows with the model to 0.6", 0.0
    )
    turns: float = setting(
        1.0, "a frequency of fewer turns in the training length becomes zero; 0 keeps all", 0.0
    )
    seed: int = setting(
        0, "seed of the coefficients, which do not train; not the run's own", 0, 2**32 - 1
    )

    def kept(self, size: int, context: int) -> int:
        """Pairs out of `size` rotated channels that keep a frequency, the fastest first."""
        least = 2 * math.pi * self.turns / context
        return sum(self.theta ** (-2 * c / size) >= least for c in range(size // 2))


@dataclass
class XposConfig(PairedConfig):
    """RoPE whose scores fall with distance, slow pairs the least (Sun et al. 2022)."""

    name: str = setting("xpos", "id of the scheme")
    scale_base: float | None = setting(
        None, "B: tokens over which pair c falls to zeta_c; null means half the context", low=1.0
    )
    gamma: float = setting(0.4, "zeta_c = (2c/D + gamma) / (1 + gamma); more falls less", 0.01)

    def base_for(self, context: int) -> float:
        """B in tokens; the paper trained at 1,024 tokens with 512."""
        return context / 2 if self.scale_base is None else self.scale_base

    def longest(self, context: int) -> int:
        """Tokens up to which the growth of k against q, zeta_0^(-T/B), stays below 1e30.

        Beyond, products of the pairs that causality hides would overflow float32 and bfloat16.
        """
        fall = math.log10((1 + self.gamma) / self.gamma)
        return math.floor(30 / fall * self.base_for(context))


@dataclass
class PopeConfig(RotaryConfig):
    """Polar embedding: magnitudes say what, angles say where (Gopalakrishnan et al. 2025)."""

    name: str = setting("pope", "id of the scheme")
    phase_init: PhaseInit = setting(
        PhaseInit.zero, "learned phase of each channel at first: 0, or uniform in [-2 pi, 0]"
    )

    def rotated(self, head_size: int) -> int:
        return 2 * head_size  # every channel becomes a pair


@dataclass
class ByDistanceConfig(EncodingConfig):
    """What every scheme has whose bias the distance i - j alone decides."""

    offers: ClassVar[frozenset[Need]] = frozenset({Need.distances})


@dataclass
class AlibiConfig(ByDistanceConfig):
    """A bias that falls linearly with distance, one slope per head (Press et al. 2022)."""

    offers: ClassVar[frozenset[Need]] = frozenset({Need.distances, Need.slopes})
    name: str = setting("alibi", "id of the scheme")
    free_heads: int = setting(0, "last heads that get no bias; the others share the slopes", low=0)


_SHARE = "one set of parameters for all layers, instead of one for each"


@dataclass
class AlibiLearnedConfig(ByDistanceConfig):
    """ALiBi whose slopes are trained, from ALiBi's own, and stay positive."""

    offers: ClassVar[frozenset[Need]] = frozenset({Need.distances, Need.slopes})
    name: str = setting("alibi_learned", "id of the scheme")
    share_layers: bool = setting(True, _SHARE)


@dataclass
class T5Config(ByDistanceConfig):
    """A trained bias per head and bucket of distances (Raffel et al. 2020)."""

    name: str = setting("t5", "id of the scheme")
    buckets: int = setting(32, "buckets of distances, an even number; half hold one distance", 2)
    max_distance: int | None = setting(
        None, "distance where the last bucket is full; null: the training length, all trained", 2
    )
    scale: float | None = setting(
        None, "factor on the table; null: sqrt(head size), as GPT-NeoX has it", low=0.0
    )
    share_layers: bool = setting(True, _SHARE)


@dataclass
class KerpleLogConfig(ByDistanceConfig):
    """A bias that falls with the logarithm of the distance, trained per head (Chi et al. 2022)."""

    name: str = setting("kerple_log", "id of the scheme")
    share_layers: bool = setting(True, _SHARE)


@dataclass
class KerplePowerConfig(ByDistanceConfig):
    """A bias that falls with a power of the distance, trained per head (Chi et al. 2022)."""

    name: str = setting("kerple_power", "id of the scheme")
    share_layers: bool = setting(True, _SHARE)


@dataclass
class SandwichConfig(ByDistanceConfig):
    """The product of two sinusoidal embeddings as a bias, per head (Chi et al. 2023)."""

    name: str = setting("sandwich", "id of the scheme")
    dimension: int = setting(128, "channels of the sinusoids, an even number", low=2)
    base: float = setting(10_000.0, "base of the geometric series of wavelengths", low=1.0)


@dataclass
class DpbConfig(ByDistanceConfig):
    """Dynamic position bias: a small network from the distance to a bias (Wang et al. 2022)."""

    name: str = setting("dpb", "id of the scheme")
    width: int = setting(32, "channels of its two hidden layers", low=1)
    distance: DistanceScale = setting(
        DistanceScale.log, "how the distance r enters: log(1 + r), or r / training length"
    )
    share_layers: bool = setting(True, _SHARE)


@dataclass
class FireConfig(EncodingConfig):
    """A small network of log distance over log query position (Li et al. 2024)."""

    name: str = setting("fire", "id of the scheme")
    width: int = setting(32, "channels of its hidden layer", low=1)
    c: float = setting(0.1, "initial factor on a distance inside the logarithm", low=1e-6)
    threshold: float | None = setting(
        None,
        "initial position below which all queries count as this one; null: a quarter of the "
        "training length, the paper's 512 of 2048",
        low=1.0,
    )
    share_layers: bool = setting(False, _SHARE)


@dataclass
class ShawConfig(EncodingConfig):
    """A trained vector per clipped distance, added to the keys (Shaw et al. 2018)."""

    name: str = setting("shaw", "id of the scheme")
    clip: int = setting(16, "distances beyond this one share its vector", low=1)


@dataclass
class TxlConfig(EncodingConfig):
    """Transformer-XL: content and position scores of sinusoids of the distance (Dai et al. 2019)"""

    name: str = setting("txl", "id of the scheme")
    base: float = setting(10_000.0, "base of the geometric series of wavelengths", low=1.0)


@dataclass
class FoxConfig(EncodingConfig):
    """Forgetting attention: each token may fade all before it (Lin et al. 2025)."""

    by_position: ClassVar[bool] = False
    name: str = setting("fox", "id of the scheme")
    gate_bias: float = setting(
        0.0, "initial gate constant b: a token keeps sigmoid(b) of the past; 0 is the paper's"
    )


@dataclass
class CableConfig(FoxConfig):
    """CABLE: context-aware biases; FoX with the sign of its gates turned (Veisi et al. 2025)."""

    name: str = setting("cable", "id of the scheme")
    gate_bias: float = setting(
        0.0, "initial gate constant b: a token keeps sigmoid(-b) of the past; 0 is the paper's"
    )


@dataclass
class GrapeConfig(EncodingConfig):
    """GRAPE-AP: a bias summed along the path, from how alike its tokens are (Zhang et al. 2025)."""

    name: str = setting("grape_ap", "id of the scheme")
    size: int = setting(8, "channels of the projection for each head, an even number", low=2)


@dataclass
class CopeConfig(EncodingConfig):
    """Contextual positions: count only the tokens that gates let count (Golovneva et al. 2024)."""

    by_position: ClassVar[bool] = False
    name: str = setting("cope", "id of the scheme")
    steps: int = setting(
        16, "positions with a vector, the last for all beyond; the paper's 64 is for 1024", low=2
    )


@dataclass
class DapeConfig(EncodingConfig):
    """DAPE: a small network over the heads adapts the bias to the scores (Zheng et al. 2024)."""

    name: str = setting("dape", "id of the scheme")
    base: DapeBase = setting(DapeBase.kerple_log, "bias by distance that is adapted")
    hidden: int = setting(32, "width of the network", low=1)
    kernel: int = setting(1, "neighbouring keys read at once, an odd number", low=1)


@dataclass
class DapeV2Config(DapeConfig):
    """DAPE v2: as DAPE, convolving over neighbouring keys (Zheng et al. 2024)."""

    name: str = setting("dape_v2", "id of the scheme")
    kernel: int = setting(3, "neighbouring keys read at once, an odd number", low=1)


@dataclass
class StickbreakConfig(EncodingConfig):
    """Stick-breaking attention: nearer keys take their share first (Tan et al. 2025)."""

    by_position: ClassVar[bool] = False
    name: str = setting("stickbreak", "id of the scheme")
    remainder: bool = setting(False, "give what no key took to the token's own value")


@dataclass
class PathConfig(EncodingConfig):
    """PaTH: accumulated reflections between key and query, chosen by content (Yang et al. 2025)."""

    by_position: ClassVar[bool] = False
    name: str = setting("path", "id of the scheme")
    rank: int = setting(32, "rank of the projection that the directions come from", low=1)


ENCODINGS: dict[str, type[EncodingConfig]] = {
    "none": NoneConfig,
    "sinusoidal": SinusoidalConfig,
    "learned": LearnedConfig,
    "rope": RopeConfig,
    "rope_partial": RopePartialConfig,
    "rope_p": RopePConfig,
    "rope_abf": RopeAbfConfig,
    "rope_local_global": RopeLocalGlobalConfig,
    "fope": FopeConfig,
    "xpos": XposConfig,
    "pope": PopeConfig,
    "alibi": AlibiConfig,
    "alibi_learned": AlibiLearnedConfig,
    "t5": T5Config,
    "kerple_log": KerpleLogConfig,
    "kerple_power": KerplePowerConfig,
    "sandwich": SandwichConfig,
    "dpb": DpbConfig,
    "fire": FireConfig,
    "shaw": ShawConfig,
    "txl": TxlConfig,
    "fox": FoxConfig,
    "cable": CableConfig,
    "grape_ap": GrapeConfig,
    "cope": CopeConfig,
    "dape": DapeConfig,
    "dape_v2": DapeV2Config,
    "stickbreak": StickbreakConfig,
    "path": PathConfig,
}
