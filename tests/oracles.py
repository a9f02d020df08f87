"""The oracles of `posbench selftest` as tests use them, and evaluators that are wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posbench import evaluation, protocols, scoring
from posbench import plan as planning
from posbench.config import EvalConfig, ModelConfig, Protocol
from posbench.config.encodings import ENCODINGS
from posbench.config.extensions import ExtensionConfig
from posbench.data import Split
from posbench.jobs import selftest
from posbench.model import GPT, LanguageModel, build_model
from posbench.oracles import (  # noqa: F401
    DOCUMENTS,
    MEANS,
    OWN,
    PRESETS,
    TRAIN,
    Oracle,
    OracleEncoding,
    Rule,
    all_ends,
    amnesic,
    broken_at,
    by_visible,
    cliff,
    disjoint_ends,
    expected_targets,
    expected_windows,
    make_split,
    toy,
    traced_loss,
    traced_prefix,
    tracer,
    uniform,
)
from posbench.passes import Sharing
from posbench.protocols import Places, Window
from posbench.results import Evaluation, Row
from posbench.runtime import Runtime
from posbench.targets import Text, spans

ALL = selftest.ALL
CPU = Runtime(torch.device("cpu"), torch.float32)


class Copy(LanguageModel):
    """COPY: predicts the token seen `distance` earlier, and knows nothing when that is too far."""

    def __init__(self, vocabulary: int, distance: int) -> None:
        super().__init__()
        self.vocabulary, self.distance = vocabulary, distance
        self.encoding = OracleEncoding()

    def features(self, tokens: Tensor, positions: Any = None, last: int | None = None) -> Tensor:
        logits = torch.zeros(*tokens.shape, self.vocabulary, dtype=torch.float64)
        # The token after input i is looked for `distance` before it: at input i + 1 - distance.
        source = tokens[:, : max(0, tokens.shape[1] + 1 - self.distance)]
        known = logits[:, logits.shape[1] - source.shape[1] :]
        known.scatter_(2, source.unsqueeze(-1), 1000.0)
        return logits if last is None else logits[:, -last:]


def real(encoding: str, extension: ExtensionConfig | None = None, **size: Any) -> GPT:
    """A tiny model of 31 tokens whose weights are large enough for its predictions to differ."""
    config = ModelConfig(**({"layers": 2, "width": 16, "heads": 2} | size))
    model = build_model(config, ENCODINGS[encoding](), TRAIN, 31, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    if extension is not None:
        model.encoding.extend(extension)
    return model.eval()


class Hungry(LanguageModel):
    """A model that runs out of memory above `most` tokens in one forward pass."""

    def __init__(self, model: GPT, most: int, error: Exception | None = None) -> None:
        super().__init__()
        self.model, self.most, self.encoding = model, most, model.encoding
        self.error = error or torch.OutOfMemoryError("CUDA out of memory")
        self.refused = 0

    def features(self, tokens: Tensor, positions: Any = None, last: int | None = None) -> Tensor:
        if tokens.numel() > self.most:
            self.refused += 1
            raise self.error
        return self.model.features(tokens, positions, last)

    def logits(self, features: Tensor) -> Tensor:
        return self.model.logits(features)


# ---------------------------------------------------------------- driving the evaluator


def make_config(**settings: Any) -> EvalConfig:
    """Score every place there is, unless told otherwise."""
    fixed: dict[str, Any] = {"max_targets": ALL, "span_tokens": ALL, "bootstrap": 100}
    config = EvalConfig(**(fixed | settings))
    config.protocols = [Protocol(each) for each in config.protocols]
    return config


def measure(
    model: LanguageModel, split: Split, train_length: int = TRAIN, **settings: Any
) -> Evaluation:
    """What the real evaluator says of `model` on `split`, on the CPU."""
    return selftest.measure(model, split, CPU, train_length, **settings)


def cell(measured: Evaluation, protocol: str, length: int, metric: str = "ppl") -> Row:
    """The one row of a protocol and metric at a length."""
    wanted = (protocol, metric, length)
    (row,) = [r for r in measured.rows if (r.protocol, r.metric, r.eval_length) == wanted]
    return row


def perplexities(measured: Evaluation) -> list[Row]:
    """The rows that are a mean loss: none derived from others."""
    return [row for row in measured.rows if row.metric == "ppl"]


def check_oracles() -> list[str]:
    """How the evaluator's words about the oracles deviate from their known losses; empty if sound.

    A wrong evaluator must leave a trace here: tests/test_evaluation.py breaks it in many ways.
    """
    return [str(check) for check in selftest.checks(CPU) if not check.ok]


# ---------------------------------------------------------------- evaluators that are wrong


def wrong_target(shift: int) -> Callable[..., Any]:
    """Targets `shift` tokens away from where they should be: never shifted, or shifted twice."""

    def mutant(logits: Tensor, targets: Tensor) -> Tensor:
        return token_losses(logits, (targets + shift) % logits.shape[-1])

    return mutant


def cut_by(protocol: Protocol, windows: Callable[[Places, int], Any]) -> tuple[Any, str, Any]:
    """The evaluator with another way to cut the text of one protocol."""
    return protocols, "_LAYOUTS", {**protocols._LAYOUTS, protocol: windows}


def as_before(protocol: Protocol, places: Places, length: int) -> list[Window]:
    return list(_LAYOUTS[protocol](places, length))


def mean_of_window_means(places: Places, length: int) -> Any:
    return protocols.window_means(as_before(Protocol.nonoverlap, places, length))


def every_target_alike(protocol: Protocol) -> Any:
    def windows(places: Places, length: int) -> Any:
        return [each._replace(weight=1.0) for each in as_before(protocol, places, length)]

    return cut_by(protocol, windows)


def last_window_dropped(protocol: Protocol) -> Any:
    """A window shorter than it should be is not read."""

    def windows(places: Places, length: int) -> Any:
        made = as_before(protocol, places, length)
        most = max(each.length for each in made)
        return [each for each in made if each.length == most]

    return cut_by(protocol, windows)


def scored_again(places: Places, length: int) -> Any:
    """Windows that overlap and score all of their tokens, those of the window before too."""
    made = as_before(Protocol.sliding, places, length)
    return [each._replace(scored=each.length) for each in made]


def first_window_skipped(places: Places, length: int) -> Any:
    made = as_before(Protocol.sliding, places, length)
    return [each for each in made if each.scored < each.length] or made


def one_fewer(protocol: Protocol) -> Any:
    def windows(places: Places, length: int) -> Any:
        made = as_before(protocol, places, length)
        return [each._replace(scored=max(1, each.scored - 1)) for each in made]

    return cut_by(protocol, windows)


def longer_by_one(protocol: Protocol) -> Any:
    return cut_by(protocol, lambda places, length: as_before(protocol, places, length + 1))


def first_token_scored(model: Any, tokens: Any, ends: Any, length: int, *rest: Any) -> Any:
    """The first target of each block is predicted from nothing."""
    losses = window_losses(model, tokens, ends, length, *rest)
    if losses.shape[1] == length:
        losses[:, 0] = math.log(len(make_split().tokens))
    return losses


def last_token_lost(model: Any, tokens: Any, ends: Any, *rest: Any) -> Any:
    return window_losses(model, tokens, ends - 1, *rest)


def last_window_repeated(model: Any, tokens: Any, ends: Any, *rest: Any) -> Any:
    """The last window is lost; the one before it stands in."""
    losses = window_losses(model, tokens, ends, *rest)
    losses[-1] = losses[max(0, len(ends) - 2)]
    return losses


def other_targets_at_each_length(places: Places, length: int) -> Any:
    for end in places.anchors:
        yield Window(end - 4 * TRAIN, length, places.size)


def all_targets_of_the_window(places: Places, length: int) -> Any:
    """`controlled` that scores early tokens too."""
    for end in places.anchors:
        yield Window(end - length, length, length)


def always_consistent(asked: Any, consistent: bool, limit: int | None) -> Sharing:
    return Sharing(asked, True, limit)


def mean_of_perplexities(self: Any, row: Row, measured: Any, *rest: Any) -> None:
    summarise(self, row, measured, *rest)
    row.ppl = float(np.exp(measured.losses).mean())


def nonfinite_dropped(self: Any, row: Row, measured: Any, *rest: Any) -> None:
    finite = np.isfinite(measured.losses)
    losses = np.where(finite, measured.losses, measured.losses[finite].mean())
    summarise(self, row, dataclasses.replace(measured, losses=losses), *rest)


def float32_sums(self: Any, row: Row, measured: Any, *rest: Any) -> None:
    rounded = measured.losses.astype(np.float32)
    summarise(self, row, dataclasses.replace(measured, losses=rounded), *rest)


def bfloat16_logits(logits: Tensor, targets: Tensor) -> Tensor:
    return token_losses(logits.bfloat16(), targets)


def packed(split: Split, *rest: Any) -> list[Text]:
    """Spans of the text as one stream, across documents."""
    length = len(split.tokens)
    return spans(Split(split.tokens, np.array([0, length]), ["all"]), *rest)


def without_alignment(places: Places, length: int) -> Any:
    """The last window of `lm_eval_rolling` with no more context than it has targets."""
    for text in places.stretches:
        yield from protocols.blocks(text, length)


summarise = evaluation._Cells._summarise
window_losses = scoring.window_losses
token_losses = scoring.token_losses
_LAYOUTS = protocols._LAYOUTS

# What is replaced, and by what.
MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "target is the input": (scoring, "token_losses", wrong_target(-1)),
    "target shifted twice": (scoring, "token_losses", wrong_target(1)),
    "logits rounded to bfloat16": (scoring, "token_losses", bfloat16_logits),
    "mean of window means": cut_by(Protocol.nonoverlap, mean_of_window_means),
    "last partial window dropped": last_window_dropped(Protocol.nonoverlap),
    "last partial window of sliding dropped": last_window_dropped(Protocol.sliding),
    "overlap scored again": cut_by(Protocol.sliding, scored_again),
    "first window of sliding skipped": cut_by(Protocol.sliding, first_window_skipped),
    "one target fewer at the tail": one_fewer(Protocol.tail),
    "first token scored without context": (evaluation, "window_losses", first_token_scored),
    "last token of each window lost": (evaluation, "window_losses", last_token_lost),
    "last window not read": (evaluation, "window_losses", last_window_repeated),
    "targets move with the length": cut_by(Protocol.controlled, other_targets_at_each_length),
    "early tokens in controlled": cut_by(Protocol.controlled, all_targets_of_the_window),
    "prefix taken though it is not consistent": (evaluation, "Sharing", always_consistent),
    "mean of perplexities": (evaluation._Cells, "_summarise", mean_of_perplexities),
    "losses that are not finite dropped": (evaluation._Cells, "_summarise", nonfinite_dropped),
    "windows across documents": (planning, "spans", packed),
    "sums in float32": (evaluation._Cells, "_summarise", float32_sums),
    "alibi_paper drops the last block": last_window_dropped(Protocol.alibi_paper),
    "stride1 scores a token fewer": one_fewer(Protocol.stride1),
    "stride1 weighs its sample like the rest": every_target_alike(Protocol.stride1),
    "yarn_truncate reads its first token as a target": longer_by_one(Protocol.yarn_truncate),
    "yarn_sliding weighs targets": every_target_alike(Protocol.yarn_sliding),
    "hf_stride weighs targets": every_target_alike(Protocol.hf_stride),
    "lm_eval_rolling does not reach back": cut_by(Protocol.lm_eval_rolling, without_alignment),
    "last256 scores one fewer": one_fewer(Protocol.last256),
    "llama_cpp scores one fewer": one_fewer(Protocol.llama_cpp),
    "llama_cpp with the token after the chunk": longer_by_one(Protocol.llama_cpp),
}
