"""Every setting of posbench: typed dataclasses and their meaning; `rules.py` says what fits.

No torch here: a typing error must be found before a heavy import. Each field carries its meaning
(`help`), which `posbench train --help` prints; a default written here is the only truth. Encodings
and extensions have a page each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from posbench.config.data import DataConfig as DataConfig
from posbench.config.encodings import ENCODINGS, EncodingConfig, RopeConfig
from posbench.config.extensions import EXTENSIONS, ExtensionConfig, NoExtensionConfig
from posbench.config.fields import setting
from posbench.config.policies import Policies, Temperature
from posbench.config.tasks import TASKS


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
    """What can be measured: protocol v1, its diagnostics, and presets that follow others' code."""

    controlled = "controlled"
    nonoverlap = "nonoverlap"
    sliding = "sliding"
    position = "position"
    tail = "tail"

    shift = "shift"
    context_ablation = "context_ablation"
    longppl_self = "longppl_self"
    attention = "attention"
    induction = "induction"

    alibi_paper = "alibi_paper"
    stride1 = "stride1"
    yarn_truncate = "yarn_truncate"
    yarn_sliding = "yarn_sliding"
    hf_stride = "hf_stride"
    lm_eval_rolling = "lm_eval_rolling"
    last256 = "last256"
    llama_cpp = "llama_cpp"


class EvalSplit(StrEnum):
    """Which documents an evaluation scores."""

    test = "test"
    validation = "validation"
    train = "train"
    all = "all"


class Beyond(StrEnum):
    """What a table of positions does past its end, at evaluation."""

    error = "error"
    interpolate = "interpolate"
    clamp = "clamp"
    wrap = "wrap"


class Tune(StrEnum):
    """Which runs of a grid of learning rates are evaluated."""

    none = "none"
    per_encoding = "per_encoding"


class Format(StrEnum):
    table = "table"
    json = "json"


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
class TrainSettings(Policies):
    """All settings of `posbench train`."""

    encoding: EncodingConfig = setting(RopeConfig(), "positional encoding")
    model: ModelConfig = setting(ModelConfig(), "size and shape of the transformer")
    data: DataConfig = setting(PysourceConfig(), "corpus, or a task")
    tokenizer: TokenizerConfig = setting(BytesConfig(), "tokenizer")
    train: TrainConfig = setting(TrainConfig(), "optimizer and loop")
    context: int = setting(128, "training length L in tokens", low=2)
    seed: int = setting(0, "seed of weights and batches; same seed, same batches everywhere", 0)
    device: Device = setting(Device.auto, "auto takes CUDA when there is one")
    dtype: Precision = setting(Precision.auto, "auto: bfloat16 autocast on CUDA, float32 on a CPU")
    compile: Switch = setting(Switch.auto, "torch.compile; auto: on for CUDA, off for a CPU")
    threads: int | None = setting(None, "CPU threads; null leaves torch's choice", 1, 1024)
    overwrite: bool = setting(False, "start anew in a folder that already holds this run")


@dataclass
class EstimateSettings(TrainSettings):
    """All settings of `posbench estimate`: those of a training run, and what to say of it."""

    ratios: list[float] = setting(
        [1.0, 2.0, 4.0], "lengths of the evaluation, in multiples of the training context"
    )
    calibrate: bool = setting(True, "time a few steps and passes here; false tells no times")
    format: Format = setting(Format.table, "table for people, json for programs")


# ---------------------------------------------------------------- evaluation


@dataclass
class EvalConfig:
    """Protocol v1: what is scored, and how sure the number is."""

    ratios: list[float] = setting([1.0, 2.0, 4.0], "lengths, in multiples of the training context")
    protocols: list[Protocol] = setting(
        [Protocol.controlled, Protocol.nonoverlap, Protocol.position],
        "what to measure; a run on a task is measured by its task",
    )
    split: EvalSplit = setting(
        EvalSplit.test,
        "documents that are scored; train is refused, and all is for model=hf:FOLDER",
    )
    max_targets: int | None = setting(
        None, "target tokens of each protocol, at most; null: 16384 on a CPU, 131072 on CUDA", low=1
    )
    anchor_targets: int | None = setting(
        None, "targets at the end of each window (K); null: min(256, context / 2)", low=1
    )
    span_tokens: int | None = setting(
        None, "target tokens of `nonoverlap` and `sliding`; null: as max_targets", low=1
    )
    stride: int | None = setting(
        None, "tokens that a window of `sliding` moves on; null: a quarter of the context", low=1
    )
    tolerance: float = setting(
        0.05, "how far above 1x perplexity may lie within the effective length, as a share", 0.0
    )
    cliff: float = setting(
        0.5, "nats above the least loss within the context that make a cliff", low=0.0
    )
    ablate_beyond: int | None = setting(
        None, "`context_ablation` replaces what lies farther back; null: the context", low=1
    )
    reference: str | None = setting(
        None, "the run that judges the key tokens of `longppl_self`; null: each its own"
    )
    batch_tokens: int = setting(8192, "tokens per forward pass; never changes a number", low=1)
    beyond: Beyond = setting(
        Beyond.error, "past the end of a trained table (learned): refuse, or a named variant"
    )
    temperature: Temperature | None = setting(
        None,
        "of the scores: another one than in training (none, logn, yarn, drope); null: as trained",
    )
    examples: int = setting(500, "tasks: examples per length", low=1)
    bootstrap: int = setting(2000, "resamples of the document bootstrap", low=100)


@dataclass
class EvalSettings:
    """All settings of `posbench eval-extrapolate`."""

    runs: Any = setting(None, "a run, a sweep, a list or a glob; null takes the newest")
    models: Any = setting(
        None, "instead of runs: a model that others trained, hf:FOLDER in Hugging Face's format"
    )
    context: int | None = setting(
        None, "model=hf:FOLDER: its training length in tokens; null: what its config says", low=2
    )
    data: DataConfig | None = setting(
        None, "model=hf:FOLDER: the corpus to measure on; null: pysource"
    )
    plugins_changed: bool = setting(
        False, "evaluate with a plugin that has changed since training; every row says so"
    )
    tune: Tune = setting(
        Tune.none,
        "per_encoding: of a grid of train.lr, evaluate for each encoding the rate with the least "
        "validation loss at 1x; none: evaluate all runs",
    )
    eval: EvalConfig = setting(EvalConfig(), "protocol")
    extension: ExtensionConfig = setting(NoExtensionConfig(), "context extension")
    device: Device = setting(Device.auto, "auto takes CUDA when there is one")
    dtype: Precision = setting(Precision.auto, "auto is float32: exactness before speed")
    threads: int | None = setting(None, "CPU threads; null leaves torch's choice", 1, 1024)


@dataclass
class InspectConfig:
    """What `posbench inspect` looks at."""

    distances: list[int] = setting(
        [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], "distances i - j at which bias is given"
    )


@dataclass
class InspectSettings(Policies):
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

CORPORA: dict[str, type[DataConfig]] = {
    "pysource": PysourceConfig,
    "stdlib": StdlibConfig,
    "text": TextConfig,
    **TASKS,
}
TOKENIZERS: dict[str, type[TokenizerConfig]] = {"bytes": BytesConfig, "bpe": BpeConfig}

# Which table turns the `name` of a group into its dataclass.
GROUPS: dict[str, dict[str, Any]] = {
    "encoding": ENCODINGS,
    "extension": EXTENSIONS,
    "data": CORPORA,
    "tokenizer": TOKENIZERS,
}

Settings = TrainSettings | EstimateSettings | EvalSettings | InspectSettings
