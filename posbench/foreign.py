"""Models that others trained, in Hugging Face's format, behind the evaluator's own interface.

transformers builds and computes them; nothing is put in place of its attention. What posbench
changes for an extension are the inverse frequencies of a rotary model, and its factor on cos and
sin. Weights come from safetensors alone, never from a pickle, and no code of a checkpoint is run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from posbench.config.encodings import (
    AlibiConfig,
    EncodingConfig,
    LearnedConfig,
    RopeConfig,
    RopePartialConfig,
)
from posbench.config.extensions import ExtensionConfig, Need
from posbench.encodings import Encoding, Shape
from posbench.encodings.absolute import Learned
from posbench.encodings.bias import Alibi
from posbench.encodings.rotary import Rope
from posbench.errors import CheckpointError, OutOfMemoryError, UnsupportedError, UserError
from posbench.files import UNREADABLE, sha256_file
from posbench.model import LanguageModel, Look
from posbench.runtime import is_out_of_memory
from posbench.tokenizer import ForeignTokenizer

OLDEST = (5, 24)  # of transformers: what the extra `hf` asks for
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
WEIGHTS, SHARDS = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
LENGTH_KEYS = ("n_positions", "max_position_embeddings", "max_seq_len")


class Family(NamedTuple):
    """Where one architecture of transformers keeps what is needed of it."""

    model: str  # its class
    encoding: str
    layers: str  # the list of its blocks, below its base model
    attention: str  # the attention of a block
    takes_positions: bool = True  # ALiBi counts distances, and has no argument for positions
    kernel: str = "sdpa"  # the fastest of transformers' own that the class has


FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", "learned", "h", "attn"),
    "llama": Family("LlamaForCausalLM", "rope", "layers", "self_attn"),
    "gpt_neox": Family("GPTNeoXForCausalLM", "rope", "layers", "attention"),
    "bloom": Family("BloomForCausalLM", "alibi", "h", "self_attention", False, "eager"),
    "mpt": Family("MptForCausalLM", "alibi", "blocks", "attn", False, "eager"),
}


# ---------------------------------------------------------------- encodings


def _keep_attention(extension: ExtensionConfig) -> None:
    """Raise UnsupportedError for an extension that takes more than other frequencies."""
    if extension.needs not in (Need.nothing, Need.frequencies):
        raise UnsupportedError(
            f"{extension.name} changes how attention is computed, and a model of others keeps "
            "its own; what can be changed are rotary frequencies"
        )


class ForeignRope(Rope):
    """RoPE as the checkpoint has it: its own inverse frequencies, and perhaps its own scaling."""

    def __init__(self, config: RopeConfig, shape: Shape, rope_type: str = "default") -> None:
        super().__init__(config, shape)
        self.rope_type = rope_type
        self.own: Tensor | None = None  # known once the model is loaded

    def trained(self, device: torch.device | None) -> Tensor:
        return super().trained(device) if self.own is None else self.own.to(device).clone()

    @property
    def prefix_consistent(self) -> bool:
        return super().prefix_consistent and self.rope_type not in ("dynamic", "longrope")

    def extend(self, extension: ExtensionConfig) -> None:
        _keep_attention(extension)
        if self.rope_type != "default" and extension.needs is not Need.nothing:
            raise UnsupportedError(
                f"its {CONFIG} stretches the frequencies already (rope_type {self.rope_type}), and "
                f"{extension.name} would stretch them twice"
            )
        super().extend(extension)


class ForeignTable(Learned):
    """The checkpoint's own table of positions."""

    def extend(self, extension: ExtensionConfig) -> None:
        _keep_attention(extension)
        super().extend(extension)

    def rows(self, positions: Tensor) -> Tensor:
        """The vectors [T, C] for `positions` [T]."""
        return self._rows(positions)


class ForeignAlibi(Alibi):
    """ALiBi, which transformers computes."""

    def extend(self, extension: ExtensionConfig) -> None:
        _keep_attention(extension)
        super().extend(extension)


class _Rows(nn.Module):
    """In place of GPT-2's table of positions: the same rows, and `eval.beyond` past its end."""

    def __init__(self, encoding: ForeignTable) -> None:
        super().__init__()
        self.encoding = encoding

    def forward(self, positions: Tensor) -> Tensor:
        return self.encoding.rows(positions[0])[None]


# ---------------------------------------------------------------- the folder


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A model folder that was looked at, but whose weights are not read yet."""

    folder: Path
    config: Any  # of transformers
    context: int
    context_from: str  # which setting says so
    sha256: str  # of the weights
    config_sha256: str

    @property
    def family(self) -> Family:
        return FAMILIES[self.config.model_type]

    @property
    def name(self) -> str:
        """What people call it: the name of its folder."""
        return self.folder.resolve().name

    @property
    def id(self) -> str:
        """Name, and a hash of weights and config: another one of that name is told apart."""
        both = hashlib.sha256(f"{self.sha256} {self.config_sha256}".encode()).hexdigest()
        plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in self.name)
        return f"{plain}-{both[:8]}"

    @property
    def rope(self) -> dict[str, Any]:
        """The checkpoint's own rotary settings; empty if it turns nothing."""
        return dict(getattr(self.config, "rope_parameters", None) or {})

    def tokenizer(self) -> ForeignTokenizer:
        """The checkpoint's own tokenizer. Raises CheckpointError if there is no readable one."""
        path = self.folder / TOKENIZER
        if not path.is_file():
            raise CheckpointError(
                f"{self.folder} has no {TOKENIZER}. transformers writes one: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        try:
            return ForeignTokenizer(path.read_text())
        except UNREADABLE as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None

    def encoding(self) -> Encoding:
        """What the model knows of positions, with the formula's numbers until it is loaded."""
        config = self.config
        heads, width = int(config.num_attention_heads), int(config.hidden_size)
        size = int(getattr(config, "head_dim", None) or width // heads)
        rows = int(config.n_positions) if self.family.encoding == "learned" else None
        shape = Shape(int(config.num_hidden_layers), heads, size, width, self.context, rows)
        built: dict[str, Callable[[], Encoding]] = {
            "rope": lambda: ForeignRope(self._rope_config(size), shape, self.rope_type),
            "learned": lambda: ForeignTable(LearnedConfig(), shape),
            "alibi": lambda: ForeignAlibi(AlibiConfig(), shape),
        }
        return built[self.family.encoding]()

    def encoding_config(self) -> EncodingConfig:
        """The settings of its encoding, whose name is what rows say."""
        config = self.encoding().config
        assert isinstance(config, EncodingConfig)
        return config

    @property
    def rope_type(self) -> str:
        """How its config stretches the frequencies; `default`: not at all."""
        return str(self.rope.get("rope_type", "default"))

    def _rope_config(self, size: int) -> RopeConfig:
        fraction = float(self.rope.get("partial_rotary_factor", 1.0))
        kind = RopeConfig if fraction == 1 else RopePartialConfig
        return kind(theta=float(self.rope["rope_theta"]), fraction=int(size * fraction) / size)


def folder_of(model: str) -> Path:
    """The folder that `model=hf:FOLDER` names; raises UserError if there is none."""
    folder = Path(model.removeprefix("hf:")).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"model={model}: no such folder (looked in {Path.cwd()}). Models are not fetched from "
            "the hub here; download one first, and name its folder."
        )
    return folder


def open_foreign(model: str, context: int | None) -> ForeignCheckpoint:
    """The checkpoint that `model=hf:FOLDER` names, its weights hashed but not loaded.

    Raises UserError for what is no such folder or no architecture known here, and CheckpointError
    for weights that are missing, damaged, or a pickle.
    """
    folder = folder_of(model)
    transformers = _transformers()
    settings = _settings(model, folder)
    model_type = settings.get("model_type")
    if model_type not in FAMILIES:
        raise UserError(
            f"model={model}: its {CONFIG} says model_type {model_type!r}; posbench evaluates "
            f"{', '.join(FAMILIES)}."
        )
    _refuse_parts(model, folder, settings)
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever a malformed config makes it raise
        raise CheckpointError(f"{folder / CONFIG}: {_first_line(error)}") from None
    length, told_by = (context, "context") if context else _length(model, config)
    config_sha256 = sha256_file(folder / CONFIG)
    return ForeignCheckpoint(folder, config, length, told_by, weights_sha256(folder), config_sha256)


def _settings(model: str, folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(
            f"model={model}: the folder has no {CONFIG}, so it is no model in Hugging Face's "
            "format. A run of posbench is runs=FOLDER."
        )
    try:
        settings = json.loads(path.read_text())
    except UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} is no JSON object.")
    return settings


def _refuse_parts(model: str, folder: Path, settings: dict[str, Any]) -> None:
    """Raise UserError for a checkpoint that is not all of a model in plain numbers."""
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"model={model} holds an adapter; merge it into its model first.")
    if settings.get("quantization_config"):
        raise UserError(f"model={model} is quantised; give the checkpoint it was made from.")
    attention = settings.get("attn_config")
    if isinstance(attention, dict):
        for key, value in (("alibi", False), ("qk_ln", True), ("prefix_lm", True)):
            if attention.get(key) is value:
                raise UserError(
                    f"model={model}: its attn_config says {key}={str(value).lower()}, which the "
                    "MPT of transformers does not compute."
                )


def _length(model: str, config: Any) -> tuple[int, str]:
    """The training length that a config tells, and the key that tells it."""
    rope = getattr(config, "rope_parameters", None) or {}
    original = "original_max_position_embeddings"
    if rope.get(original):
        return int(rope[original]), original
    for key in LENGTH_KEYS:
        if getattr(config, key, None):
            return int(getattr(config, key)), key
    raise UserError(
        f"model={model}: its {CONFIG} does not say how long the texts were that it was trained "
        "on; add context=N, in tokens."
    )


def weights_sha256(folder: Path) -> str:
    """SHA-256 of the weights: of their one file, or of the lines "name hash" of several.

    Raises CheckpointError if there are none in safetensors, or a file of them is damaged.
    """
    names = _weight_files(folder)
    for name in names:
        try:
            with safe_open(folder / name, "pt"):  # checks the header against the file's size
                pass
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from None
    hashes = [_sha256(folder / name) for name in names]
    if names == [WEIGHTS]:
        return hashes[0]
    lines = "".join(f"{name} {each}\n" for name, each in zip(names, hashes, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def _sha256(path: Path) -> str:
    """SHA-256 of a file, computed once as long as nobody writes to it."""
    told = path.stat()
    return _known_sha256(path.resolve(), told.st_size, told.st_mtime_ns)


@cache
def _known_sha256(path: Path, size: int, changed: int) -> str:
    return sha256_file(path)


def _weight_files(folder: Path) -> list[str]:
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if (folder / SHARDS).is_file():
        try:
            names = list(json.loads((folder / SHARDS).read_text())["weight_map"].values())
        except UNREADABLE as error:
            raise CheckpointError(f"{folder / SHARDS} cannot be read: {error}") from None
        if not names or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{folder / SHARDS} names no file of weights for a tensor.")
        return sorted(set(names))
    pickles = [name for name in PICKLES if (folder / name).is_file()]
    if pickles:
        raise CheckpointError(
            f"{folder} holds its weights as {pickles[0]}, a pickle, which can run code when it is "
            "read. posbench reads safetensors alone; convert it where you trust it: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
        )
    raise CheckpointError(f"{folder} has no {WEIGHTS}, nor {SHARDS}.")


def _transformers() -> Any:
    """The library, silent; raises UserError where it is missing or too old."""
    wanted = ".".join(str(part) for part in OLDEST)
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "model=hf:FOLDER needs transformers, which is not installed: pip install 'posbench[hf]'"
        ) from None
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise UserError(
            f"model=hf:FOLDER needs transformers {wanted} or later, and {found} is installed: "
            "pip install --upgrade 'posbench[hf]'"
        )
    import transformers

    library: Any = transformers
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library


def transformers_version() -> str:
    """The installed version of transformers, for the record."""
    return importlib.metadata.version("transformers")


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


# ---------------------------------------------------------------- the model


class ForeignModel(LanguageModel):
    """A causal language model of transformers as the evaluator wants one.

    The result depends on the tokens and their number, never on what was computed before.
    """

    def __init__(
        self, checkpoint: ForeignCheckpoint, model: Any, vocabulary: int, unused: str = ""
    ) -> None:
        super().__init__()
        self.family = checkpoint.family
        self.rows = int(model.get_input_embeddings().num_embeddings)
        self.vocabulary = min(vocabulary, self.rows)  # often padded, on either side
        self.unused = unused  # weights of the checkpoint that the model has no place for
        self.model = model
        self.encoding = checkpoint.encoding()
        base = model.base_model
        if isinstance(self.encoding, ForeignRope):
            self.encoding.own = base.rotary_emb.original_inv_freq.detach().double().cpu()
            self._own_factor = float(base.rotary_emb.attention_scaling)
        if isinstance(self.encoding, ForeignTable):
            self.encoding.table = base.wpe.weight
            base.wpe = _Rows(self.encoding)

    def features(
        self, tokens: Tensor, positions: Tensor | None = None, last: int | None = None
    ) -> Tensor:
        """What the head reads [B, T, C], or [B, last, C] of the last tokens alone.

        `positions` [T] are 0..T-1 unless given; a model that knows distances alone ignores them.
        """
        self._fit(tokens.shape[1])
        given = {}
        if positions is not None and self.family.takes_positions:
            given["position_ids"] = positions[None]
        stream: Tensor = self.model.base_model(tokens, use_cache=False, **given)[0]
        return stream if last is None else stream[:, -last:]

    def logits(self, features: Tensor) -> Tensor:
        """Logits [B, T, V] with the weights' precision, whatever the autocast around them."""
        head = self.model.get_output_embeddings()
        with torch.autocast(features.device.type, enabled=False):
            found: Tensor = head(features.to(head.weight.dtype))
        return found

    def _fit(self, length: int) -> None:
        """Make the model ready for a text of `length` tokens, whatever it read before."""
        if hasattr(self.model.config, "max_seq_len"):
            self.model.config.max_seq_len = length  # MPT builds its bias for so many keys
        if not isinstance(self.encoding, ForeignRope):
            return
        rotary = self.model.base_model.rotary_emb
        rotary.max_seq_len_cached = rotary.original_max_seq_len
        if self.encoding.rope_type == "default":
            inverse, factor = self.encoding.frequencies(length, rotary.inv_freq.device)
        else:
            inverse, factor = self.encoding.trained(rotary.inv_freq.device), self._own_factor
        rotary.inv_freq = inverse.float()
        rotary.attention_scaling = factor

    @contextlib.contextmanager
    def watched(self, look: Look) -> Iterator[None]:
        """See LanguageModel."""
        before = self.model.config._attn_implementation
        layers = getattr(self.model.base_model, self.family.layers)
        handles = []
        for number, block in enumerate(layers):

            def seen(module: nn.Module, given: Any, out: Any, layer: int = number) -> None:
                shares = out[1]
                look(layer, torch.arange(shares.shape[-2], device=shares.device), shares)

            handles.append(getattr(block, self.family.attention).register_forward_hook(seen))
        try:
            self.model.set_attn_implementation("eager")  # the others form no shares
            yield
        finally:
            self.model.set_attn_implementation(before)
            for handle in handles:
                handle.remove()


def load_foreign(checkpoint: ForeignCheckpoint, vocabulary: int) -> ForeignModel:
    """The model in float32 on the CPU, in evaluation mode, every weight of it from the checkpoint.

    `vocabulary` is the tokenizer's. Raises CheckpointError if weights are missing or do not fit.
    """
    transformers = _transformers()
    folder = checkpoint.folder
    kind = getattr(transformers, checkpoint.family.model)
    try:
        model, told = kind.from_pretrained(
            folder,
            config=checkpoint.config,
            dtype=torch.float32,
            attn_implementation=checkpoint.family.kernel,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told, and refused below by name
        )
    except Exception as error:  # whatever a malformed checkpoint makes it raise
        if is_out_of_memory(error):
            raise OutOfMemoryError(f"the weights of {folder} do not fit into memory") from None
        raise CheckpointError(f"{folder} cannot be loaded: {_first_line(error)}") from None
    absent = [*told["missing_keys"], *(each[0] for each in told["mismatched_keys"])]
    if absent:
        raise CheckpointError(
            f"{folder}: the weights are not those of its {CONFIG}; {_some(absent)} are missing or "
            "of another shape."
        )
    return ForeignModel(checkpoint, model.eval(), vocabulary, _some(told["unexpected_keys"]))


def _some(names: Iterable[str]) -> str:
    """The first of some names, and how many more there are."""
    known = sorted(names)
    more = f" and {len(known) - 1} more" if len(known) > 1 else ""
    return f"{known[0]}{more}" if known else ""
