"""Models whose loss on every target is known, and what protocol v1 must say of them.

The text behind an oracle never repeats a token: token t of the split is the number t. From its
inputs alone an oracle then knows where its window lies and which token comes next, so it can give
that token any loss, and a rule of (target, tokens visible, window length) is a whole model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from posbench import evaluation, scoring
from posbench.config import EvalConfig, ModelConfig, Protocol
from posbench.config.encodings import ENCODINGS, NoneConfig
from posbench.config.extensions import ExtensionConfig
from posbench.data import Split
from posbench.encodings.base import Encoding, Shape
from posbench.evaluation import Subject, plan
from posbench.model import GPT, build_model
from posbench.results import Evaluation, Row, Status
from posbench.runtime import Runtime
from posbench.targets import Targets

Rule = Callable[[Tensor, Tensor, int], Tensor]  # targets [B, T], visible [T], length -> nats

CPU = Runtime(torch.device("cpu"), torch.float32)
TRAIN = 8  # training length of the oracles: 4 targets per window, longest window 32
DOCUMENTS = (20, 33, 34, 70, 131, 5, 100, 32, 65, 1, 40)  # below, at and above what is needed
ALL = 1_000_000  # more targets than there are: every place is chosen


def make_split(lengths: Sequence[int] = DOCUMENTS, vocabulary: int | None = None) -> Split:
    """Documents of these lengths whose tokens count upwards, modulo `vocabulary` if given."""
    offsets = np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]).astype(np.int64)
    tokens = np.arange(offsets[-1])
    if vocabulary is not None:
        tokens = tokens * 7 % vocabulary
    names = [f"{index}.txt" for index in range(len(lengths))]
    return Split(tokens.astype(np.uint16), offsets, names, "toy")


class OracleEncoding(Encoding):
    """An encoding that says of itself what a test wants."""

    def __init__(self, limit: int | None = None, consistent: bool = True) -> None:
        super().__init__(NoneConfig(), Shape(1, 1, 2, 2, TRAIN))
        self.longest, self.consistent = limit, consistent

    @property
    def max_length(self) -> int | None:
        return self.longest

    @property
    def prefix_consistent(self) -> bool:
        return self.consistent


class Oracle(nn.Module):
    """A model whose loss on the token that follows is `rule`; it keeps what it was asked.

    Its logits are float64, so the loss it is meant to have is the loss it gets to 1e-12.
    """

    def __init__(self, vocabulary: int, rule: Rule, encoding: Encoding | None = None) -> None:
        super().__init__()
        self.vocabulary, self.rule = vocabulary, rule
        self.encoding = encoding or OracleEncoding()
        self.asked: list[tuple[int, int, int]] = []  # (first token, input, length) of each target
        self.batches: list[int] = []  # rows of each forward pass
        self.tokens = 0

    def forward(self, tokens: Tensor, positions: Any = None, last: int | None = None) -> Tensor:
        rows, length = tokens.shape
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(length)), "a window has a gap"
        last = last or length
        self.batches.append(rows)
        self.tokens += tokens.numel()
        for window in tokens.tolist():
            self.asked += [(window[0], each, length) for each in window[-last:]]
        following = tokens[:, -last:] + 1
        visible = torch.arange(length - last + 1, length + 1)
        nats = self.rule(following, visible, length).double().expand(rows, last)
        others = torch.log(-torch.expm1(-nats)) - math.log(self.vocabulary - 1)
        logits = others.unsqueeze(-1).repeat(1, 1, self.vocabulary)
        return logits.scatter_(2, following.unsqueeze(-1), -nats.unsqueeze(-1))


def uniform(vocabulary: int) -> Rule:
    """U: every token is as likely as any other."""
    return lambda targets, visible, length: torch.tensor(math.log(vocabulary), dtype=torch.float64)


def by_visible(nats: Callable[[Tensor], Tensor]) -> Rule:
    """P(f): the loss depends on nothing but how many tokens are visible (the position plus 1)."""
    return lambda targets, visible, length: nats(visible.double())


def toy(visible: Any) -> Any:
    """2 + 1 / (1 + c) nats with c tokens visible."""
    return 2 + 1 / (1 + visible)


def amnesic(reach: int) -> Rule:
    """C(f, W): a model that uses its last `reach` tokens and forgets the rest."""
    return by_visible(lambda visible: toy(visible.clamp(max=reach)))


def cliff(train_length: int) -> Rule:
    """CLIFF: 2 nats at the positions of training, 6 at all others."""
    return by_visible(lambda visible: torch.where(visible <= train_length, 2.0, 6.0))


def broken_at(position: int) -> Rule:
    """NAN@p: no loss at one position."""
    return by_visible(lambda v: torch.where(v == position + 1, math.nan, 2.0))


def traced_loss(target: Any, visible: Any, length: int) -> Any:
    """A loss from which no wrong choice of target, context or window length escapes."""
    return 1 + 0.6180339887498949 * target % 1 + 1 / (1 + visible) + length / 100


def tracer(targets: Tensor, visible: Tensor, length: int) -> Tensor:
    """COUNT: see `traced_loss`."""
    loss: Tensor = traced_loss(targets.double(), visible.double(), length)
    return loss


def traced_prefix(targets: Tensor, visible: Tensor, length: int) -> Tensor:
    """COUNT for an encoding whose first losses do not depend on the window's length."""
    return tracer(targets, visible, 0)


class Copy(nn.Module):
    """COPY: predicts the token seen `distance` earlier, and knows nothing when that is too far."""

    def __init__(self, vocabulary: int, distance: int) -> None:
        super().__init__()
        self.vocabulary, self.distance = vocabulary, distance
        self.encoding = OracleEncoding()

    def forward(self, tokens: Tensor, positions: Any = None, last: int | None = None) -> Tensor:
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


class Hungry(nn.Module):
    """A model that runs out of memory above `most` tokens in one forward pass."""

    def __init__(self, model: GPT, most: int, error: Exception | None = None) -> None:
        super().__init__()
        self.model, self.most, self.encoding = model, most, model.encoding
        self.error = error or torch.OutOfMemoryError("CUDA out of memory")
        self.refused = 0

    def forward(self, tokens: Tensor, positions: Any = None, last: int | None = None) -> Tensor:
        if tokens.numel() > self.most:
            self.refused += 1
            raise self.error
        logits: Tensor = self.model(tokens, positions, last)
        return logits


# ---------------------------------------------------------------- driving the evaluator


def make_config(**settings: Any) -> EvalConfig:
    """Score every place there is, unless told otherwise."""
    fixed: dict[str, Any] = {"max_targets": ALL, "span_tokens": ALL, "bootstrap": 100}
    config = EvalConfig(**(fixed | settings))
    config.protocols = [Protocol(each) for each in config.protocols]
    return config


def measure(
    model: nn.Module,
    split: Split,
    train_length: int = TRAIN,
    byte_lengths: npt.NDArray[np.int64] | None = None,
    **settings: Any,
) -> Evaluation:
    """What the real evaluator says of `model` on `split`."""
    row = Row("r", "oracle", "none", "", "tiny", 0, train_length, 0, 0.0, "")
    config = make_config(**settings)
    if byte_lengths is None:
        byte_lengths = np.ones(int(split.tokens.max(initial=0)) + 2, dtype=np.int64)
    subject = Subject(model, row, split, byte_lengths)  # type: ignore[arg-type]
    return evaluation.evaluate_model(subject, plan(split, train_length, config, "cpu"), config, CPU)


def cell(measured: Evaluation, protocol: str, length: int) -> Row:
    """The one row of a protocol at a length."""
    (row,) = [r for r in measured.rows if (r.protocol, r.eval_length) == (protocol, length)]
    return row


# ---------------------------------------------------------------- what must come out


def all_ends(split: Split, longest: int, size: int) -> list[int]:
    """Every end of `size` targets with `longest` tokens of its own document before it."""
    return [
        int(first) + end
        for first, length in zip(split.offsets, split.lengths, strict=False)
        for end in range(longest, int(length), size)
    ]


def expected_targets(
    split: Split, protocol: str, length: int, longest: int, size: int
) -> list[tuple[int, int, int]]:
    """(target, tokens visible, window length) of all that a protocol scores, by its definition."""
    found = []
    if protocol == "controlled":
        for end in all_ends(split, longest, size):
            found += [(t, length - (end - t), length) for t in range(end - size + 1, end + 1)]
        return found
    for end in all_ends(split, longest, longest):
        scored = longest if protocol == "nonoverlap" else length
        for place in range(scored):
            block = place // length * length
            window = min(length, longest - block)
            found.append((end - longest + 1 + place, place - block + 1, window))
    return found


def check_oracles() -> list[str]:
    """How the evaluator's words about the oracles deviate from their known losses; empty if sound.

    A wrong evaluator must leave a trace here: tests/test_evaluation.py breaks it in many ways.
    """
    split = make_split()
    vocabulary = len(split.tokens) + 1
    ratios = [0.75, 1.0, 2.0, 4.0]  # 0.75: six does not divide the 32 tokens of a span
    wrong: list[str] = []

    def compare(what: str, found: float | None, wanted: float, tolerance: float = 1e-10) -> None:
        if found is None or not math.isclose(found, wanted, rel_tol=tolerance):
            wrong.append(f"{what}: {found}, not {wanted}")

    # Losses that depend on the window's length stand for an encoding whose prefixes do too.
    varying = Oracle(vocabulary, tracer, OracleEncoding(consistent=False))
    steady = Oracle(vocabulary, traced_prefix)
    for model in (varying, steady):
        measured = measure(model, split, ratios=ratios)
        for row in measured.rows:
            what = f"{row.protocol} at {row.eval_length}"
            triples = expected_targets(split, row.protocol, row.eval_length, 4 * TRAIN, TRAIN // 2)
            used = [(t, c, w if model is varying else 0) for t, c, w in triples]
            nll = math.fsum(traced_loss(*each) for each in used) / len(used)
            compare(f"{what}: nll", row.nll, nll)
            compare(f"{what}: ppl", row.ppl, math.exp(nll))
            compare(f"{what}: n_targets", row.n_targets, len(used))
            compare(f"{what}: min_context", row.min_context, min(c for _, c, _ in used))
            mean_context = math.fsum(c for _, c, _ in used) / len(used)
            compare(f"{what}: mean_context", row.mean_context, mean_context)

    for row in measure(Oracle(vocabulary, uniform(vocabulary)), split, ratios=ratios).rows:
        compare(f"uniform, {row.protocol} at {row.eval_length}: ppl", row.ppl, vocabulary)

    # Tokens 4, 5, ... of a window are lost; `controlled` at 8 scores its tokens 4 to 7.
    for row in measure(Oracle(vocabulary, broken_at(4)), split, protocols=["controlled"]).rows:
        hit = row.eval_length == TRAIN
        wanted = Status.nonfinite if hit else Status.ok
        if row.status is not wanted or (hit and row.ppl != math.inf):
            wrong.append(f"NaN, controlled at {row.eval_length}: {row.status}, ppl {row.ppl}")
    return wrong


# ---------------------------------------------------------------- evaluators that are wrong


def wrong_target(shift: int) -> Callable[..., Any]:
    """Targets `shift` tokens away from where they should be: never shifted, or shifted twice."""

    def mutant(logits: Tensor, targets: Tensor) -> Tensor:
        return token_losses(logits, (targets + shift) % logits.shape[-1])

    return mutant


def mean_of_window_means(self: Any, length: int) -> Any:
    made = nonoverlap(self, length)
    means = [made.losses[:, at : at + length].mean() for at in range(0, 4 * TRAIN, length)]
    return dataclasses.replace(made, losses=np.full_like(made.losses, np.mean(means)))


def last_window_dropped(self: Any, length: int) -> Any:
    made = nonoverlap(self, length)
    whole = 4 * TRAIN // length * length
    places = Targets(made.places.ends, made.places.documents, whole, made.places.sha256)
    return dataclasses.replace(
        made, losses=made.losses[:, :whole], contexts=made.contexts[:whole], places=places
    )


def first_token_scored(model: Any, tokens: Any, ends: Any, length: int, *rest: Any) -> Any:
    """The first target of each block is predicted from nothing."""
    losses = window_losses(model, tokens, ends, length, *rest)
    if losses.shape[1] == length:
        losses[:, 0] = math.log(len(make_split().tokens))
    return losses


def last_token_lost(model: Any, tokens: Any, ends: Any, *rest: Any) -> Any:
    return window_losses(model, tokens, ends - 1, *rest)


def last_window_repeated(model: Any, tokens: Any, ends: Any, *rest: Any) -> Any:
    """The last window is not read; the one before it stands in."""
    losses = window_losses(model, tokens, ends[:-1], *rest)
    return np.concatenate([losses, losses[-1:]])


def other_targets_at_each_length(self: Any, length: int) -> Any:
    places = self.plan.anchors
    moved = dataclasses.replace(places, ends=places.ends - (4 * TRAIN - length))
    made = self._pass(moved.ends, length, places.size)
    contexts = np.arange(length - places.size + 1, length + 1)
    return dataclasses.replace(controlled(self, length), losses=made.losses, contexts=contexts)


def all_targets_of_the_window(self: Any, length: int) -> Any:
    """`controlled` that scores early tokens too."""
    places = self.plan.anchors
    made = self._pass(places.ends, length, length)
    wide = dataclasses.replace(places, size=length)
    return evaluation._Cell(made.losses, wide, np.arange(1, length + 1), [made])


def always_from_the_longest(self: Any, length: int) -> Any:
    return self._span_pass(max(self.plan.lengths.values()))


def mean_of_perplexities(self: Any, row: Row, cell: Any) -> None:
    summarise(self, row, cell)
    row.ppl = float(np.exp(cell.losses).mean())


def nonfinite_dropped(self: Any, row: Row, cell: Any) -> None:
    finite = np.isfinite(cell.losses)
    losses = np.where(finite, cell.losses, cell.losses[finite].mean())
    summarise(self, row, dataclasses.replace(cell, losses=losses))


def float32_sums(self: Any, row: Row, cell: Any) -> None:
    summarise(self, row, dataclasses.replace(cell, losses=cell.losses.astype(np.float32)))


def bfloat16_logits(logits: Tensor, targets: Tensor) -> Tensor:
    return token_losses(logits.bfloat16(), targets)


def packed(split: Split, *rest: Any) -> Targets:
    """Spans of the text as one stream, across documents."""
    length = len(split.tokens)
    return spans(Split(split.tokens, np.array([0, length]), ["all"]), *rest)


controlled = evaluation._Cells._controlled
nonoverlap = evaluation._Cells._nonoverlap
summarise = evaluation._Cells._summarise
window_losses = scoring.window_losses
token_losses = scoring.token_losses
spans = evaluation.spans

# What is replaced, and by what.
MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "target is the input": (scoring, "token_losses", wrong_target(-1)),
    "target shifted twice": (scoring, "token_losses", wrong_target(1)),
    "logits rounded to bfloat16": (scoring, "token_losses", bfloat16_logits),
    "mean of window means": (evaluation._Cells, "_nonoverlap", mean_of_window_means),
    "last partial window dropped": (evaluation._Cells, "_nonoverlap", last_window_dropped),
    "first token scored without context": (evaluation, "window_losses", first_token_scored),
    "last token of each window lost": (evaluation, "window_losses", last_token_lost),
    "last window not read": (evaluation, "window_losses", last_window_repeated),
    "targets move with the length": (
        evaluation._Cells,
        "_controlled",
        other_targets_at_each_length,
    ),
    "early tokens in controlled": (evaluation._Cells, "_controlled", all_targets_of_the_window),
    "prefix taken though it is not consistent": (
        evaluation._Cells,
        "_prefix",
        always_from_the_longest,
    ),
    "mean of perplexities": (evaluation._Cells, "_summarise", mean_of_perplexities),
    "losses that are not finite dropped": (evaluation._Cells, "_summarise", nonfinite_dropped),
    "windows across documents": (evaluation, "spans", packed),
    "sums in float32": (evaluation._Cells, "_summarise", float32_sums),
}
