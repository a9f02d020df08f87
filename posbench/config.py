"""Every setting of posbench: typed dataclasses and their meaning; `rules.py` says what fits.

No torch here: a typing error must be found before a heavy import. Each field carries its meaning
(`help`), which `posbench train --help` prints; a default written here is the only truth.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar


def setting(default: Any, help: str, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field with its meaning and, for numbers, the closed range it must lie in."""
    metadata = {"help": help, "low": low, "high": high}
    if isinstance(default, list) or dataclasses.is_dataclass(default):
        return field(default_factory=lambda: _copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _copy(default: Any) -> Any:
    if isinstance(default, list):
        return list(default)
    return dataclasses.replace(default)


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Switch(StrEnum):
    auto = "auto"
    on = "on"
    off = "off"


class Layout(StrEnum):
    """Which two channels of a head form a pair: neighbours (2c, 2c+1), or (c, c + D/2)."""

    interleaved = "interleaved"
    half = "half"


class SineLayout(StrEnum):
    interleaved = "interleaved"
    concat = "concat"


class Ramp(StrEnum):
    """What a ramp between kept and stretched pairs is linear in: a pair's number, or its turns."""

    pairs = "pairs"
    turns = "turns"


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


class Norm(StrEnum):
    layernorm = "layernorm"
    rmsnorm = "rmsnorm"


class Mlp(StrEnum):
    gelu = "gelu"
    swiglu = "swiglu"


class Schedule(StrEnum):
    cosine = "cosine"
    wsd = "wsd"
    constant = "constant"


class Protocol(StrEnum):
    controlled = "controlled"
    nonoverlap = "nonoverlap"
    position = "position"


class Beyond(StrEnum):
    """What a table of positions does past its end, at evaluation."""

    error = "error"
    interpolate = "interpolate"
    clamp = "clamp"
    wrap = "wrap"


class Format(StrEnum):
    table = "table"
    json = "json"


# ---------------------------------------------------------------- encodings


@dataclass
class EncodingConfig:
    """How the model learns where its tokens are."""

    rotary: ClassVar[bool] = False  # has rotary frequencies, which extensions stretch
    name: str = setting("none", "id of the scheme")

    def takes(self, extension: ExtensionConfig) -> bool:
        """Whether `extension` means something to the scheme."""
        return isinstance(extension, NoExtensionConfig) or (
            self.rotary and not isinstance(extension, RegroupingConfig)
        )


@dataclass
class NoneConfig(EncodingConfig):
    """No positional encoding; the causal mask alone orders the tokens (Haviv et al. 2022)."""

    name: str = setting("none", "id of the scheme")


@dataclass
class SinusoidalConfig(EncodingConfig):
    """Fixed sines and cosines added to the token embeddings (Vaswani et al. 2017)."""

    name: str = setting("sinusoidal", "id of the scheme")
    base: float = setting(10_000.0, "base of the geometric series of wavelengths", low=1.0)
    scale: float = setting(
        0.1, "amplitude; 1.0 is the paper's, beside embeddings multiplied by sqrt(width)", low=0.0
    )
    layout: SineLayout = setting(SineLayout.interleaved, "sin,cos side by side, or in two halves")


@dataclass
class LearnedConfig(EncodingConfig):
    """One trained vector per absolute position (GPT-2); undefined beyond its table."""

    name: str = setting("learned", "id of the scheme")
    std: float = setting(0.02, "standard deviation of the initial table", low=0.0)


@dataclass
class RotaryConfig(EncodingConfig):
    """What every scheme that turns queries and keys by frequencies has."""

    rotary: ClassVar[bool] = True
    theta: float = setting(10_000.0, "base of the geometric series of frequencies", low=1.0)

    def rotated(self, head_size: int) -> int:
        """Channels of a head that are rotated, in pairs, after any widening of the head."""
        return head_size


@dataclass
class PairedConfig(RotaryConfig):
    """What every scheme that turns pairs of a head's channels has."""

    layout: Layout = setting(Layout.interleaved, "which two channels of a head form a pair")


@dataclass
class RopeConfig(PairedConfig):
    """Rotary embedding: rotate pairs of query and key channels by the position (Su et al. 2021)."""

    name: str = setting("rope", "id of the scheme")
    fraction: float = setting(1.0, "leading share of each head that is rotated", 0.0, 1.0)

    def takes(self, extension: ExtensionConfig) -> bool:
        return True

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
class RopePConfig(PairedConfig):
    """p-RoPE: the slowest pairs do not turn, the others as in RoPE (Barbero et al. 2024)."""

    name: str = setting("rope_p", "id of the scheme")
    share: float = setting(0.75, "p: share of the pairs that turn, the fastest first", 0.0, 1.0)

    def takes(self, extension: ExtensionConfig) -> bool:
        return True


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
class AlibiConfig(EncodingConfig):
    """A bias that falls linearly with distance, one slope per head (Press et al. 2022)."""

    name: str = setting("alibi", "id of the scheme")
    free_heads: int = setting(0, "last heads that get no bias; the others share the slopes", low=0)


_SHARE = "one set of parameters for all layers, instead of one for each"


@dataclass
class AlibiLearnedConfig(EncodingConfig):
    """ALiBi whose slopes are trained, from ALiBi's own, and stay positive."""

    name: str = setting("alibi_learned", "id of the scheme")
    share_layers: bool = setting(True, _SHARE)


@dataclass
class T5Config(EncodingConfig):
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
class KerpleLogConfig(EncodingConfig):
    """A bias that falls with the logarithm of the distance, trained per head (Chi et al. 2022)."""

    name: str = setting("kerple_log", "id of the scheme")
    share_layers: bool = setting(True, _SHARE)


@dataclass
class KerplePowerConfig(EncodingConfig):
    """A bias that falls with a power of the distance, trained per head (Chi et al. 2022)."""

    name: str = setting("kerple_power", "id of the scheme")
    share_layers: bool = setting(True, _SHARE)


@dataclass
class SandwichConfig(EncodingConfig):
    """The product of two sinusoidal embeddings as a bias, per head (Chi et al. 2023)."""

    name: str = setting("sandwich", "id of the scheme")
    dimension: int = setting(128, "channels of the sinusoids, an even number", low=2)
    base: float = setting(10_000.0, "base of the geometric series of wavelengths", low=1.0)


@dataclass
class DpbConfig(EncodingConfig):
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

    name: str = setting("stickbreak", "id of the scheme")
    remainder: bool = setting(False, "give what no key took to the token's own value")


@dataclass
class PathConfig(EncodingConfig):
    """PaTH: accumulated reflections between key and query, chosen by content (Yang et al. 2025)."""

    name: str = setting("path", "id of the scheme")
    rank: int = setting(32, "rank of the projection that the directions come from", low=1)


# ---------------------------------------------------------------- extensions at evaluation


@dataclass
class ExtensionConfig:
    """How a trained rotary model is stretched to longer texts, at evaluation only."""

    name: str = setting("none", "id of the extension")

    @property
    def by_length(self) -> bool:
        """Whether what it does depends on the length of the whole text."""
        return False


@dataclass
class NoExtensionConfig(ExtensionConfig):
    """The model as it was trained."""

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
    attention_factor: float | None = setting(
        None, "factor on cos and sin; null means sqrt(1 + ln s / ln L)", low=0.0
    )


@dataclass
class RegroupingConfig(ExtensionConfig):
    """An extension that leaves distances below a window alone and makes farther ones smaller.

    At every length, 1x included.
    """

    window: int | None = setting(
        None, "distances below it stay as they are; null means half the training length", low=1
    )
    logn: bool = setting(
        True, "multiply scores of query p by max(1, ln(p + 1) / ln(training length))"
    )

    def window_for(self, train_length: int) -> int:
        return max(1, train_length // 2) if self.window is None else self.window


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


# ---------------------------------------------------------------- model, data, training


@dataclass
class ModelConfig:
    """A pre-norm decoder-only transformer."""

    name: str = setting("tiny", "name of the size")
    layers: int = setting(4, "number of blocks", low=1)
    width: int = setting(128, "channels of the residual stream", low=1)
    heads: int = setting(4, "attention heads; must divide the width", low=1)
    norm: Norm = setting(Norm.layernorm, "normalisation before each sub-layer")
    mlp: Mlp = setting(Mlp.gelu, "feed-forward: GELU (erf), or SwiGLU at equal parameters")
    qk_norm: bool = setting(False, "normalise queries and keys, before any rotation")
    tied: bool = setting(True, "output head shares the token embedding")
    dropout: float = setting(0.0, "dropout probability while training", 0.0, 0.99)

    @property
    def head_size(self) -> int:
        return self.width // self.heads


@dataclass
class DataConfig:
    """Where the documents come from."""

    name: str = setting("pysource", "id of the corpus")
    validation: float = setting(0.05, "share of documents held out for validation", 0.001, 0.5)
    test: float = setting(0.10, "share of documents held out for evaluation", 0.001, 0.5)


@dataclass
class PysourceConfig(DataConfig):
    """Python sources already on the machine: torch and the standard library, read as text."""

    name: str = setting("pysource", "id of the corpus")


@dataclass
class StdlibConfig(DataConfig):
    """The standard library's Python sources: small, for trials and tests."""

    name: str = setting("stdlib", "id of the corpus")


@dataclass
class TextConfig(DataConfig):
    """Your own text: a file, a folder, or a glob; UTF-8, one document per file.

    Fewer than 20 files are cut into parts, and the parts are split like documents.
    """

    name: str = setting("text", "id of the corpus")
    path: str = setting("", "file, folder or glob")


@dataclass
class TokenizerConfig:
    """How text becomes tokens."""

    name: str = setting("bytes", "id of the tokenizer")


@dataclass
class BytesConfig(TokenizerConfig):
    """One token per UTF-8 byte; vocabulary 256; nothing to train."""

    name: str = setting("bytes", "id of the tokenizer")


@dataclass
class BpeConfig(TokenizerConfig):
    """Byte-level byte-pair encoding, trained on the training split only."""

    name: str = setting("bpe", "id of the tokenizer")
    vocab_size: int = setting(1024, "entries asked for; at least the 256 bytes", 257, 1_000_000)


@dataclass
class TrainConfig:
    """The optimizer and its loop. Steps count optimizer steps."""

    steps: int = setting(500, "optimizer steps", low=1)
    batch_size: int = setting(16, "sequences per optimizer step", low=1)
    micro_batch: int | None = setting(
        None, "sequences per forward pass; fewer than batch_size accumulates gradients", low=1
    )
    lr: float = setting(3e-3, "peak learning rate", low=0.0)
    schedule: Schedule = setting(
        Schedule.cosine, "cosine, wsd (warm-up, stable, decay) or constant, each after warm-up"
    )
    warmup: float = setting(0.05, "fraction of the steps spent warming up", 0.0, 1.0)
    decay: float = setting(0.2, "wsd: fraction of the steps spent decaying", 0.0, 1.0)
    final_lr: float = setting(0.1, "learning rate at the end, as a fraction of the peak", 0.0, 1.0)
    weight_decay: float = setting(0.1, "AdamW decay on matrices that are not tables", low=0.0)
    beta1: float = setting(0.9, "AdamW first moment", 0.0, 0.9999)
    beta2: float = setting(0.95, "AdamW second moment", 0.0, 0.9999)
    clip: float = setting(1.0, "gradient norm above which gradients are scaled down", low=0.0)
    checkpoint_every: int | None = setting(
        None, "save every N steps for resuming; null saves at the end and when interrupted", low=1
    )
    keep_checkpoints: int = setting(2, "newest checkpoints kept", low=1)
    log_every: int = setting(10, "steps between lines of metrics.jsonl", low=1)
    validate_every: int | None = setting(
        None, "steps between validations; null means ten in a run", low=1
    )
    validate_ratios: list[float] = setting(
        [1.0], "lengths to validate at, in multiples of the training context"
    )
    validate_targets: int = setting(4096, "tokens scored by one validation", low=1)


@dataclass
class TrainSettings:
    """All settings of `posbench train`."""

    encoding: EncodingConfig = setting(RopeConfig(), "positional encoding")
    model: ModelConfig = setting(ModelConfig(), "size and shape of the transformer")
    data: DataConfig = setting(PysourceConfig(), "corpus")
    tokenizer: TokenizerConfig = setting(BytesConfig(), "tokenizer")
    train: TrainConfig = setting(TrainConfig(), "optimizer and loop")
    context: int = setting(128, "training length L in tokens", low=2)
    seed: int = setting(0, "seed of weights and batches; same seed, same batches everywhere", 0)
    device: Device = setting(Device.auto, "auto takes CUDA when there is one")
    dtype: Precision = setting(Precision.auto, "auto: bfloat16 autocast on CUDA, float32 on a CPU")
    compile: Switch = setting(Switch.auto, "torch.compile; auto: on for CUDA, off for a CPU")
    threads: int | None = setting(None, "CPU threads; null leaves torch's choice", low=1)
    overwrite: bool = setting(False, "start anew in a folder that already holds this run")


# ---------------------------------------------------------------- evaluation


@dataclass
class EvalConfig:
    """Protocol v1: what is scored, and how sure the number is."""

    ratios: list[float] = setting([1.0, 2.0, 4.0], "lengths, in multiples of the training context")
    protocols: list[Protocol] = setting(
        [Protocol.controlled, Protocol.nonoverlap, Protocol.position], "what to measure"
    )
    max_targets: int | None = setting(
        None, "target tokens of `controlled`; null: 16384 on a CPU, 131072 on CUDA", low=1
    )
    anchor_targets: int | None = setting(
        None, "targets at the end of each window (K); null: min(256, context / 2)", low=1
    )
    span_tokens: int | None = setting(
        None, "tokens read by `nonoverlap` and `position`; null: four times max_targets", low=1
    )
    batch_tokens: int = setting(8192, "tokens per forward pass; never changes a number", low=1)
    beyond: Beyond = setting(
        Beyond.error, "past the end of a trained table (learned): refuse, or a named variant"
    )
    bootstrap: int = setting(2000, "resamples of the document bootstrap", low=100)


@dataclass
class EvalSettings:
    """All settings of `posbench eval-extrapolate`."""

    runs: Any = setting(None, "a run, a sweep, a list or a glob; null takes the newest")
    eval: EvalConfig = setting(EvalConfig(), "protocol")
    extension: ExtensionConfig = setting(NoExtensionConfig(), "context extension")
    device: Device = setting(Device.auto, "auto takes CUDA when there is one")
    dtype: Precision = setting(Precision.auto, "auto is float32: exactness before speed")
    threads: int | None = setting(None, "CPU threads; null leaves torch's choice", low=1)


@dataclass
class InspectConfig:
    """What `posbench inspect` looks at."""

    distances: list[int] = setting(
        [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], "distances i - j at which bias is given"
    )


@dataclass
class InspectSettings:
    """All settings of `posbench inspect`."""

    encoding: EncodingConfig = setting(RopeConfig(), "positional encoding")
    extension: ExtensionConfig = setting(NoExtensionConfig(), "context extension")
    model: ModelConfig = setting(ModelConfig(), "size; heads and width set head size and slopes")
    inspect: InspectConfig = setting(InspectConfig(), "what to look at")
    context: int = setting(128, "training length in tokens", low=2)
    eval_length: int | None = setting(None, "length looked at; null is the training length", low=1)
    seed: int = setting(0, "seed of an encoding's own weights", low=0)
    format: Format = setting(Format.table, "table for people, json for programs")
    plot: str | None = setting(None, "also draw a figure into this PNG or SVG file")


# ---------------------------------------------------------------- names

ENCODINGS: dict[str, type[EncodingConfig]] = {
    "none": NoneConfig,
    "sinusoidal": SinusoidalConfig,
    "learned": LearnedConfig,
    "rope": RopeConfig,
    "rope_partial": RopePartialConfig,
    "rope_p": RopePConfig,
    "rope_abf": RopeAbfConfig,
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
}
CORPORA: dict[str, type[DataConfig]] = {
    "pysource": PysourceConfig,
    "stdlib": StdlibConfig,
    "text": TextConfig,
}
TOKENIZERS: dict[str, type[TokenizerConfig]] = {"bytes": BytesConfig, "bpe": BpeConfig}

# Which table turns the `name` of a group into its dataclass.
GROUPS: dict[str, dict[str, Any]] = {
    "encoding": ENCODINGS,
    "extension": EXTENSIONS,
    "data": CORPORA,
    "tokenizer": TOKENIZERS,
}

Settings = TrainSettings | EvalSettings | InspectSettings
