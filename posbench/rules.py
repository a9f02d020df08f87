"""The rules between settings: what cannot work is told before any work. No torch here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from posbench.config import (
    BytesConfig,
    EstimateSettings,
    EvalSettings,
    EvalSplit,
    InspectSettings,
    ModelConfig,
    Schedule,
    Settings,
    TextConfig,
    TrainSettings,
    Tune,
)
from posbench.config.encodings import (
    ENCODINGS,
    AlibiConfig,
    DapeConfig,
    EncodingConfig,
    FopeConfig,
    GrapeConfig,
    LayeredConfig,
    NoneConfig,
    RopeConfig,
    RotaryConfig,
    SandwichConfig,
    T5Config,
    XposConfig,
)
from posbench.config.extensions import (
    ExtensionConfig,
    Llama3Config,
    LongropeConfig,
    NtkByPartsConfig,
)
from posbench.config.policies import Temperature
from posbench.config.tasks import TaskConfig
from posbench.errors import UserError


def check(settings: Settings) -> None:
    """Raise UserError for settings that cannot work. Needs neither data nor torch."""
    check_ranges(settings)
    if isinstance(settings, EvalSettings):
        _check_ratios("eval.ratios", settings.eval.ratios)
        _check_stretch(settings.extension)
        _check_search(settings)
        _check_models(settings)
        if not settings.eval.protocols:
            raise UserError("eval.protocols is empty; give at least one, such as [controlled].")
        if settings.eval.split is EvalSplit.train:
            raise UserError(
                "eval.split=train would score text that the model was trained on, which says "
                "nothing about new text; choose test or validation."
            )
        _check_twice("eval.protocols", [str(each) for each in settings.eval.protocols])
        if settings.eval.temperature is Temperature.ssmax:
            raise UserError(
                "eval.temperature=ssmax has weights that only training can give; train with "
                "temperature=ssmax, or choose logn, yarn or drope here."
            )
        return
    _check_shape(settings)
    _check_policies(settings)
    if isinstance(settings, TrainSettings):
        _check_training(settings)
    if isinstance(settings, EstimateSettings):
        _check_ratios("ratios", settings.ratios)


def _check_stretch(extension: ExtensionConfig) -> None:
    if extension.finetune_lr == 0:
        raise UserError("extension.finetune_lr=0.0 changes nothing; it must be greater than 0.")
    if isinstance(extension, NtkByPartsConfig):
        _check_order("beta_fast", extension.beta_fast, "beta_slow", extension.beta_slow)
        if extension.beta_slow <= 0:
            raise UserError(f"extension.beta_slow={extension.beta_slow} must be greater than 0.")
    if isinstance(extension, Llama3Config):
        high, low = extension.high_freq_factor, extension.low_freq_factor
        _check_order("high_freq_factor", high, "low_freq_factor", low)
    if isinstance(extension, LongropeConfig):
        _check_factors(extension)


def _check_search(settings: EvalSettings) -> None:
    extension = settings.extension
    if not isinstance(extension, LongropeConfig) or not extension.search:
        return
    if extension.reach(max(settings.eval.ratios)) <= 1:
        raise UserError(
            f"extension.search={extension.search} has nothing to look for at 1x. Give "
            "extension.factor=4, or a ratio above 1 in eval.ratios."
        )


def _check_models(settings: EvalSettings) -> None:
    """What goes with a model that others trained, and what with a run of posbench."""
    if settings.models is None:
        for key, value in (("context", settings.context), ("data", settings.data)):
            if value is not None:
                told = getattr(value, "name", value)
                raise UserError(
                    f"{key}={told} is what a run was trained with (posbench train, inspect), and "
                    f"an evaluation keeps to it; here {key} goes with model=hf:FOLDER."
                )
        if settings.eval.split is EvalSplit.all:
            raise UserError(
                "eval.split=all holds text that the run was trained on, which says nothing about "
                "new text; it goes with model=hf:FOLDER."
            )
        return
    models = settings.models if isinstance(settings.models, list) else [settings.models]
    for model in models:
        if not isinstance(model, str) or not model.startswith("hf:") or model == "hf:":
            raise UserError(
                f"model={model} must be hf: and a folder that holds a model in Hugging Face's "
                "format, as in model=hf:FOLDER. A run of posbench is runs=FOLDER."
            )
    if not models:
        raise UserError("model=[] names no model; give one, as in model=hf:FOLDER.")
    _check_twice("model", models)
    if settings.runs is not None:
        raise UserError(
            f"runs={settings.runs} and model={settings.models} are two evaluations: a run is "
            "measured on its own corpus, under its own tokenizer. Leave out one of the two."
        )
    if settings.tune is not Tune.none:
        raise UserError(
            f"tune={settings.tune} chooses among runs of posbench, by how they were trained; leave "
            "it out with model=."
        )
    if isinstance(settings.data, TaskConfig):
        raise UserError(
            f"data={settings.data.name} is a task, in words of its own; a model of others reads "
            "text. Choose a corpus, such as data=pysource."
        )
    extension = settings.extension
    for key in ("finetune_steps", "search"):
        if getattr(extension, key, 0):
            raise UserError(
                f"extension.{key}={getattr(extension, key)} works on runs of posbench; leave it "
                "out with model=hf:FOLDER."
            )
    for key in ("temperature", "reference"):
        if getattr(settings.eval, key) is not None:
            raise UserError(
                f"eval.{key}={getattr(settings.eval, key)} is for runs of posbench; leave it out "
                "with model=hf:FOLDER."
            )


def _check_order(larger: str, high: float, smaller: str, low: float) -> None:
    if not high > low:
        raise UserError(
            f"extension.{larger}={high} must be greater than extension.{smaller}={low}."
        )


def _check_factors(extension: LongropeConfig) -> None:
    if extension.factors and extension.search:
        raise UserError(
            f"extension.search={extension.search} looks for what extension.factors gives; leave "
            "out one of the two."
        )
    if not extension.factors and not extension.search:
        raise UserError(
            "extension=longrope needs extension.factors=[...]: what the frequency of each rotated "
            "pair of channels is divided by, one number per pair. Or look for them when a run is "
            "evaluated: extension.search=50."
        )
    for factor in extension.factors:
        if not 0 < factor < float("inf"):
            raise UserError(
                f"extension.factors holds {factor}; a factor must be greater than 0 and finite."
            )


def check_ranges(node: Any, prefix: str = "") -> None:
    """Raise UserError for a number outside the range its field states, anywhere below `node`."""
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        if dataclasses.is_dataclass(value):
            check_ranges(value, f"{prefix}{item.name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(f"{prefix}{item.name}", value, item.metadata)


def _check_number(key: str, value: float, bounds: Any) -> None:
    low, high = bounds.get("low"), bounds.get("high")
    if value != value or value in (float("inf"), float("-inf")):
        raise UserError(f"{key}={value} is not a finite number.")
    if low is not None and value < low:
        raise UserError(f"{key}={value} is too small; the least is {low:g}.")
    if high is not None and value > high:
        raise UserError(f"{key}={value} is too large; the most is {high:g}.")


def _check_ratios(key: str, ratios: list[float]) -> None:
    if not ratios:
        raise UserError(f"{key} is empty; give at least one, such as [1,2,4].")
    for ratio in ratios:
        if not 0 < ratio < float("inf"):
            raise UserError(f"{key} holds {ratio}; a ratio must be greater than 0.")
    _check_twice(key, ratios)


def _check_twice(key: str, values: Sequence[object]) -> None:
    for place, value in enumerate(values):
        if value in values[:place]:
            raise UserError(f"{key} holds {value} twice; once is enough.")


def _check_shape(settings: TrainSettings | InspectSettings) -> None:
    model = settings.model
    if model.width % model.heads:
        fitting = [heads for heads in range(1, model.width + 1) if model.width % heads == 0]
        nearest = min(fitting, key=lambda heads: abs(heads - model.heads))
        raise UserError(
            f"model.width={model.width} is not a multiple of model.heads={model.heads}. "
            f"Try model.heads={nearest}."
        )
    if isinstance(settings.encoding, RotaryConfig):
        _check_rotary(settings.encoding, model)
    if isinstance(settings.encoding, FopeConfig):
        _check_fope(settings.encoding, model, settings.context)
    if isinstance(settings.encoding, XposConfig):
        _check_xpos(settings.encoding, settings.context)
    _check_bias(settings.encoding, model)
    if isinstance(settings.encoding, DapeConfig) and settings.encoding.kernel % 2 == 0:
        raise UserError(
            f"encoding.kernel={settings.encoding.kernel} must be odd: as many keys before as after."
        )
    if isinstance(settings.encoding, GrapeConfig) and settings.encoding.size % 2:
        raise UserError(
            f"encoding.size={settings.encoding.size} must be even: its channels turn in pairs."
        )


def _check_rotary(encoding: RotaryConfig, model: ModelConfig) -> None:
    size = encoding.rotated(model.head_size)
    if size % 2:
        where = f"model.width={model.width} over model.heads={model.heads}"
        fraction = encoding.fraction if isinstance(encoding, RopeConfig) else 1.0
        share = "" if fraction == 1 else f" times encoding.fraction={fraction}"
        keys = "model.width or model.heads"
        if isinstance(encoding, RopeConfig):
            keys = "model.width, model.heads or encoding.fraction"
        raise UserError(
            f"encoding={encoding.name} rotates pairs of channels, but {where}{share} gives "
            f"{size} per head, an odd number. Change {keys}."
        )


def _check_global(encoding: LayeredConfig, settings: TrainSettings | InspectSettings) -> None:
    theta, every, layers = encoding.global_theta, encoding.global_every, settings.model.layers
    if theta is None:
        if every is not None:
            raise UserError(
                f"encoding.global_every={every} has no effect without encoding.global_theta, the "
                "base in those layers."
            )
        return
    if theta == encoding.theta:
        raise UserError(
            f"encoding.global_theta={theta} has no effect: it is what encoding.theta is."
        )
    fitting = ", ".join(str(n) for n in range(2, layers + 1) if layers % n == 0)
    way_out = f"It may be {fitting}." if fitting else "No number does; change model.layers."
    if every is None:
        raise UserError(
            f"encoding.global_theta={theta} needs encoding.global_every, which divides "
            f"model.layers={layers}. {way_out}"
        )
    if layers % every:
        raise UserError(
            f"encoding.global_every={every} does not divide model.layers={layers}. {way_out}"
        )
    skipped = settings.skipped_every
    if skipped is not None and every % skipped == 0:
        raise UserError(
            f"encoding.global_every={every} has no effect with layers={settings.layers}: those "
            "layers go without the encoding. Change one of the two."
        )


def _check_fope(encoding: FopeConfig, model: ModelConfig, context: int) -> None:
    if not encoding.kept(encoding.rotated(model.head_size), context):
        most = context / (2 * math.pi)
        raise UserError(
            f"encoding.turns={encoding.turns} leaves no frequency at context={context}: the "
            f"fastest turns {most:.3g} times. Use a longer context, or a smaller encoding.turns."
        )


def _check_xpos(encoding: XposConfig, context: int) -> None:
    longest = encoding.longest(context)
    if longest < context:
        raise UserError(
            f"encoding.scale_base={encoding.scale_base} is too small for context={context}: with "
            f"encoding.gamma={encoding.gamma} the scales of xpos overflow beyond {longest} tokens."
        )


def _check_bias(encoding: EncodingConfig, model: ModelConfig) -> None:
    match encoding:
        case AlibiConfig(free_heads=free) if free > model.heads:
            raise UserError(
                f"encoding.free_heads={free} is more than there are heads; "
                f"the most is model.heads={model.heads}."
            )
        case T5Config(buckets=buckets) if buckets % 2:
            raise UserError(
                f"encoding.buckets={buckets} must be even: half of the buckets hold one distance "
                f"each. Try encoding.buckets={buckets + 1}."
            )
        case T5Config(buckets=buckets, max_distance=int(reach)) if reach <= buckets // 2:
            raise UserError(
                f"encoding.max_distance={reach} leaves nothing for the upper half of the buckets; "
                f"with encoding.buckets={buckets} it must be greater than {buckets // 2}."
            )
        case T5Config(scale=scale) if scale == 0:
            raise UserError("encoding.scale=0.0 leaves no bias; it must be greater than 0.")
        case SandwichConfig(dimension=dimension) if dimension % 2:
            raise UserError(
                f"encoding.dimension={dimension} must be even: sines and cosines come in pairs. "
                f"Try encoding.dimension={dimension + 1}."
            )


def _check_policies(settings: TrainSettings | InspectSettings) -> None:
    _check_layers(settings)
    if isinstance(settings.encoding, LayeredConfig):
        _check_global(settings.encoding, settings)
    _check_positions(settings)
    drop_at = settings.drop_at
    if drop_at is None:
        return
    if isinstance(settings.encoding, NoneConfig):
        raise UserError(f"drop_at={drop_at}: encoding=none leaves nothing to drop.")
    if isinstance(settings, TrainSettings):
        first = math.ceil(drop_at * settings.train.steps)
        if not 0 < first < settings.train.steps:
            raise UserError(
                f"drop_at={drop_at} of train.steps={settings.train.steps} leaves no step "
                f"{'before' if first == 0 else 'after'} the drop; the encoding is dropped at a "
                "share of the training between 0 and 1."
            )


def _check_layers(settings: TrainSettings | InspectSettings) -> None:
    layers, every, count = settings.layers, settings.skipped_every, settings.model.layers
    if layers == "all":
        return
    if every is None or every < 2:
        raise UserError(f"layers={layers} must be all, or everyNth as in layers=every4th.")
    if count % every:
        fitting = [f"every{n}th" for n in range(4, count + 1) if count % n == 0]
        fitting = ["every2nd"] * (count % 2 == 0) + ["every3rd"] * (count % 3 == 0) + fitting
        way_out = f"Try layers={fitting[0]}" if fitting else "Change model.layers"
        raise UserError(
            f"layers={layers} does not divide model.layers={count} into equal groups. {way_out}."
        )
    if not settings.encoding.in_layers and settings.window is None:
        raise UserError(
            f"layers={layers} changes nothing: encoding={settings.encoding.name} does not act in "
            "the attention layers. Leave it out."
        )


def _check_positions(settings: TrainSettings | InspectSettings) -> None:
    positions, below = settings.positions, settings.drawn_below(settings.context)
    if below is None:
        if settings.max_position is not None:
            raise UserError(
                f"max_position={settings.max_position} goes with positions=randomized or pose."
            )
        return
    if below <= settings.context:
        raise UserError(
            f"max_position={below} must be greater than context={settings.context}: positions="
            f"{positions} draws the positions of a training text below it."
        )
    encoding = settings.encoding
    if not encoding.by_position:
        raise UserError(
            f"positions={positions} changes nothing: encoding={encoding.name} does not read the "
            "numbers of positions. Leave it out."
        )
    if isinstance(encoding, XposConfig) and encoding.longest(settings.context) < below:
        raise UserError(
            f"max_position={below} is too large for encoding=xpos, whose scales overflow beyond "
            f"{encoding.longest(settings.context)} tokens."
        )


def _check_training(settings: TrainSettings) -> None:
    train = settings.train
    if train.lr <= 0:
        raise UserError(f"train.lr={train.lr} must be greater than 0.")
    if train.clip <= 0:
        raise UserError(f"train.clip={train.clip} must be greater than 0.")
    if train.micro_batch is not None and train.micro_batch > train.batch_size:
        raise UserError(
            f"train.micro_batch={train.micro_batch} is larger than "
            f"train.batch_size={train.batch_size}."
        )
    if train.schedule is Schedule.wsd and train.warmup + train.decay > 1:
        raise UserError(
            f"train.warmup={train.warmup} and train.decay={train.decay} together exceed "
            "the whole run; their sum may be at most 1."
        )
    _check_ratios("train.validate_ratios", train.validate_ratios)
    data = settings.data
    if data.validation + data.test > 0.9:
        raise UserError(
            f"data.validation={data.validation} and data.test={data.test} leave less than a tenth "
            "of the documents for training."
        )
    if isinstance(data, TaskConfig):
        _check_task(data, settings)
    if isinstance(data, TextConfig) and not data.path:
        raise UserError("data=text needs a path: data.path=FILE, a folder, or a quoted glob.")


def _check_task(task: TaskConfig, settings: TrainSettings) -> None:
    name, context = task.name, settings.context
    longest, limit = task.longest(context), task.limit
    if longest < 1:
        least = task.tokens(1) - 1
        raise UserError(
            f"context={context} is too short for data={name}: its shortest example, of length 1 "
            f"({task.unit}), reads {least} tokens. Set context={least} or more."
        )
    if limit is not None and limit < longest:
        raise UserError(
            f"data.keys={limit} is fewer than the {longest} pairs of different keys that "
            f"context={context} holds. Set data.keys={longest} or more (an evaluation at 4x needs "
            f"{4 * longest}), or a shorter context."
        )
    if not isinstance(settings.tokenizer, BytesConfig):
        raise UserError(
            f"tokenizer={settings.tokenizer.name} does not go with data={name}, which has a "
            "vocabulary of its own. Leave it out."
        )


def check_extension(settings: InspectSettings) -> None:
    """Raise UserError if the encoding does not have what the extension acts on."""
    extension, encoding = settings.extension, settings.encoding
    _check_untrained(extension)
    _check_stretch(extension)
    if not encoding.takes(extension):
        able = ", ".join(name for name, kind in ENCODINGS.items() if kind().takes(extension))
        lacks = extension.refusal(f"encoding={encoding.name}")
        raise UserError(f"extension={lacks}. It applies to encoding={able}.")


def _check_untrained(extension: ExtensionConfig) -> None:
    """Refuse what works on a trained model."""
    if extension.finetune_steps:
        raise UserError(
            f"extension.finetune_steps={extension.finetune_steps} tunes a trained model, and "
            "inspect has none. It is for posbench eval-extrapolate."
        )
    if isinstance(extension, LongropeConfig) and extension.search:
        raise UserError(
            f"extension.search={extension.search} needs a trained model, and inspect has none. "
            "Give extension.factors=[...], as posbench eval-extrapolate prints them."
        )
