"""Protocol v1: perplexity at multiples of the training length, on the same targets for everyone.

controlled   windows of L tokens that end at the same targets for every L: what longer context does
             to the very same tokens. The headline.
nonoverlap   the same spans cut into blocks of L tokens, all targets scored: the number of most
             papers. It includes the early-token effect: long blocks have fewer tokens with little
             context.
position     one pass over the spans at the longest length: mean loss by position, and the
             perplexity of the first L positions.
induction    random tokens and their repeat: see posbench.induction.

Losses are summed in float64 and divided by the number of targets, then exponentiated.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from posbench.config import EvalConfig, Protocol
from posbench.data import Split
from posbench.errors import OutOfMemoryError, UnsupportedError, UserError
from posbench.induction import METRIC, SEQUENCES, measure_induction
from posbench.model import GPT
from posbench.results import DocumentLoss, Evaluation, PositionCurve, Row, Status
from posbench.runtime import Runtime
from posbench.scoring import Losses, Scored, window_losses
from posbench.statistics import bootstrap_interval, perplexity
from posbench.targets import Integers, Targets, anchors, prefixes, spans

LONGEST_RATIO = 4.0  # targets are chosen for at least this, so 1x alone scores the same tokens
MAX_TARGETS = {"cpu": 16_384, "cuda": 131_072}


@dataclass(frozen=True)
class Subject:
    """One model to be evaluated, with what identifies its rows."""

    model: GPT
    row: Row  # run_id, encoding, extension, model, seed, train_length, fingerprints filled in
    split: Split
    byte_lengths: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """What is scored, before any model is looked at."""

    lengths: dict[float, int]
    longest: int
    anchors: Targets
    spans: Targets
    kept_documents: int  # test documents long enough for the longest window
    kept_tokens: int
    shortage: str  # why there is nothing to score; empty if there is


def plan(split: Split, train_length: int, config: EvalConfig, device: str) -> Plan:
    """Lengths and targets for one split. Raises UserError for settings that contradict."""
    lengths = {ratio: round(ratio * train_length) for ratio in config.ratios}
    for ratio, length in lengths.items():
        if length < 2:
            raise UserError(f"eval.ratios holds {ratio}: {length} tokens; the least is 2.")
    if len(set(lengths.values())) < len(lengths):
        raise UserError(
            f"eval.ratios={config.ratios}: two of them round to one length at context "
            f"{train_length}."
        )
    size = config.anchor_targets or min(256, train_length // 2)
    shortest = min(lengths.values())
    if size > shortest:
        raise UserError(
            f"eval.ratios asks for windows of {shortest} tokens, too short for {size} targets. "
            f"Set eval.anchor_targets={shortest} or less."
        )
    longest = max(round(LONGEST_RATIO * train_length), *lengths.values())
    most = config.max_targets or MAX_TARGETS[device]
    chosen = anchors(split, longest, size, most)
    shortage = ""
    if not len(chosen):
        shortage = (
            f"no test document of data={split.corpus} has {longest + 1} tokens; "
            f"the longest has {int(max(split.lengths, default=0))}"
        )
    kept = split.lengths[split.lengths > longest]
    return Plan(
        lengths,
        longest,
        chosen,
        spans(split, longest, config.span_tokens or 4 * most),
        len(kept),
        int(kept.sum()),
        shortage,
    )


def evaluate_model(
    subject: Subject,
    plan: Plan,
    config: EvalConfig,
    runtime: Runtime,
    scored: Scored = lambda _: None,
) -> Evaluation:
    """All cells of one model: a row for each protocol and length, each with a status."""
    cells = _Cells(subject, plan, config, runtime, scored)
    for protocol in config.protocols:
        cells.fill(protocol)
    return cells.evaluation


def planned_tokens(plan: Plan, config: EvalConfig) -> int:
    """Tokens that go through the model for one subject, about: for a progress bar."""
    lengths = list(plan.lengths.values())
    cost = {
        Protocol.controlled: len(plan.anchors) * sum(lengths),
        Protocol.nonoverlap: len(plan.spans) * plan.longest * len(lengths),
        Protocol.position: len(plan.spans) * max(lengths),
        Protocol.induction: SEQUENCES * sum(2 * (length // 2) - 1 for length in lengths),
    }
    if Protocol.nonoverlap in config.protocols and max(lengths) == plan.longest:
        cost[Protocol.position] = 0  # the same pass
    return sum(cost[protocol] for protocol in config.protocols)


class _Cells:
    """Fills the cells of one subject; passes that two protocols share are made once."""

    def __init__(
        self, subject: Subject, plan: Plan, config: EvalConfig, runtime: Runtime, scored: Scored
    ) -> None:
        self.subject, self.plan, self.config = subject, plan, config
        self.runtime, self.scored = runtime, scored
        self.evaluation = Evaluation()
        self._passes: dict[int, _Pass] = {}

    def fill(self, protocol: Protocol) -> None:
        measure: dict[Protocol, Callable[[int], _Cell]] = {
            Protocol.controlled: self._controlled,
            Protocol.nonoverlap: self._nonoverlap,
            Protocol.position: self._position,
        }
        for ratio, length in self.plan.lengths.items():
            row = replace(
                self.subject.row, protocol=protocol.value, eval_length=length, ratio=ratio
            )
            if protocol is Protocol.induction:
                self._induction(row)
            else:
                self._fill_row(row, measure[protocol])
        if protocol is Protocol.position:
            self._curve()

    def _induction(self, row: Row) -> None:
        model, config = self.subject.model, self.config
        self.evaluation.rows.append(
            measure_induction(model, row, config, self.runtime, self.scored)
        )

    def _fill_row(self, row: Row, measure: Callable[[int], _Cell]) -> None:
        self.evaluation.rows.append(row)
        try:
            self._refuse(row.eval_length)
            cell = measure(row.eval_length)
        except UnsupportedError as reason:
            row.status, row.reason = Status.unsupported, str(reason)
            return
        except OutOfMemoryError as reason:
            row.status, row.reason = Status.oom, str(reason)
            return
        except _ShortageError as reason:
            row.status, row.reason = Status.not_enough_data, str(reason)
            return
        row.seconds = sum(each.seconds for each in cell.passes)
        row.tokens_per_s = sum(each.tokens for each in cell.passes) / row.seconds
        row.peak_mem_mb = max(each.peak_mem_mb for each in cell.passes)
        self._summarise(row, cell)

    def _refuse(self, length: int) -> None:
        """Raise for a length that cannot be measured, before any work."""
        if self.plan.shortage:
            raise _ShortageError(self.plan.shortage)
        self.subject.model.encoding.check_length(length)

    # ------------------------------------------------------------ protocols

    def _controlled(self, length: int) -> _Cell:
        places = self.plan.anchors
        made = self._pass(places.ends, length, places.size)
        contexts = np.arange(length - places.size + 1, length + 1)
        return _Cell(made.losses, places, contexts, [made])

    def _nonoverlap(self, length: int) -> _Cell:
        places, longest = self.plan.spans, self.plan.longest
        if length == longest:
            made = self._span_pass(length)
            return _Cell(made.losses, places, np.arange(1, longest + 1), [made])
        blocks, rest = divmod(longest, length)
        ends = places.ends[:, None] - longest + length * np.arange(1, blocks + 1)
        passes = [self._pass(ends.ravel(), length, length)]
        pieces = [passes[0].losses.reshape(len(places), blocks * length)]
        if rest:  # the last block of each span is shorter, and is scored at its own size
            passes.append(self._pass(places.ends, rest, rest))
            pieces.append(passes[1].losses)
        contexts = np.arange(longest) % length + 1
        return _Cell(np.concatenate(pieces, axis=1), places, contexts, passes)

    def _position(self, length: int) -> _Cell:
        made = self._prefix(length)
        places = prefixes(self.subject.split, self.plan.spans, length)
        return _Cell(made.losses[:, :length], places, np.arange(1, length + 1), [made])

    def _prefix(self, length: int) -> _Pass:
        """A pass over at least the first `length` tokens of each span.

        The longest that fits where the first T logits do not depend on the rest.
        """
        encoding = self.subject.model.encoding
        limit = encoding.max_length or self.plan.longest
        longer = {each for each in self.plan.lengths.values() if length < each <= limit}
        if encoding.prefix_consistent:
            for each in sorted(longer, reverse=True):
                with contextlib.suppress(OutOfMemoryError):
                    return self._span_pass(each)
        return self._span_pass(length)

    def _span_pass(self, length: int) -> _Pass:
        """The pass over the first `length` tokens of each span, made once."""
        if length not in self._passes:
            ends = prefixes(self.subject.split, self.plan.spans, length).ends
            self._passes[length] = self._pass(ends, length, length)
        return self._passes[length]

    def _pass(self, ends: Integers, length: int, last: int) -> _Pass:
        self.runtime.reset_peak_memory()
        started = time.perf_counter()
        losses = window_losses(
            self.subject.model,
            self.subject.split.tokens,
            ends,
            length,
            last,
            self.runtime,
            self.config.batch_tokens,
            self.scored,
        )
        seconds = time.perf_counter() - started
        return _Pass(losses, len(ends) * length, seconds, self.runtime.peak_memory_mb())

    # ------------------------------------------------------------ numbers

    def _summarise(self, row: Row, cell: _Cell) -> None:
        losses, places = cell.losses, cell.places
        row.n_targets, row.targets_sha256 = losses.size, places.sha256
        row.min_context, row.mean_context = int(cell.contexts.min()), float(cell.contexts.mean())
        finite = np.isfinite(losses)
        row.n_nonfinite = int((~finite).sum())
        owners, place = np.unique(places.documents, return_inverse=True)
        row.n_docs = len(owners)
        if row.n_nonfinite:
            first = int(cell.contexts[~finite.all(axis=0)].min()) - 1
            row.status, row.value, row.ppl, row.nll = Status.nonfinite, math.inf, math.inf, math.inf
            row.reason = (
                f"{row.n_nonfinite} of {losses.size} losses are not finite, "
                f"the first at position {first} of its window"
            )
            return
        sums = np.bincount(place, weights=losses.sum(axis=1)).astype(np.float64)
        counts = np.bincount(place).astype(np.int64) * losses.shape[1]
        row.nll = float(losses.sum() / losses.size)
        row.ppl = row.value = perplexity(row.nll)
        tokens = self.subject.split.tokens
        scored_bytes = int(self.subject.byte_lengths[tokens[places.indices()]].sum())
        row.bpb = float(losses.sum()) / (math.log(2) * scored_bytes)
        interval = bootstrap_interval(sums, counts, self.config.bootstrap)
        if interval is None:
            row.reason = f"no interval: {row.n_docs} documents, fewer than 10"
        else:
            row.ci_lo, row.ci_hi = (perplexity(bound) for bound in interval)
        self.evaluation.documents += [
            DocumentLoss(
                row.run_id,
                row.extension,
                row.protocol,
                row.eval_length,
                self.subject.split.names[owner],
                float(total),
                int(count),
                row.variant,
            )
            for owner, total, count in zip(owners, sums, counts, strict=True)
        ]

    def _curve(self) -> None:
        """The loss by position of the longest pass that could be made."""
        measured = [
            row
            for row in self.evaluation.rows
            if row.protocol == Protocol.position and row.n_targets
        ]
        if not measured:
            return
        longest = max(measured, key=lambda row: row.eval_length)
        losses = self._span_pass(longest.eval_length).losses
        edges = position_buckets(longest.train_length, longest.eval_length)
        buckets = [losses[:, lo:hi] for lo, hi in edges]
        self.evaluation.curves.append(
            PositionCurve(
                longest.run_id,
                longest.encoding,
                longest.extension,
                longest.seed,
                longest.train_length,
                longest.eval_length,
                lo=[lo for lo, _ in edges],
                hi=[hi for _, hi in edges],
                nll=[float(bucket.mean()) for bucket in buckets],
                sd=[_spread(bucket) for bucket in buckets],
                n=[bucket.size for bucket in buckets],
                variant=longest.variant,
            )
        )


class _ShortageError(Exception):
    """Too few long documents."""


@dataclass(frozen=True)
class _Pass:
    """Losses [N, last] of windows that went through the model, and what that took."""

    losses: Losses
    tokens: int
    seconds: float
    peak_mem_mb: float


@dataclass(frozen=True)
class _Cell:
    """Losses [N, size] of the targets at `places`, and the passes they were taken from."""

    losses: Losses
    places: Targets
    contexts: Integers  # [size] tokens that each target can see
    passes: list[_Pass]


def _spread(losses: Losses) -> float:
    """Standard deviation, nan without a warning where a loss is not finite."""
    return float(losses.std()) if np.isfinite(losses).all() else math.nan


def position_buckets(train_length: int, longest: int) -> list[tuple[int, int]]:
    """Buckets [lo, hi) of position: doubling up to an eighth of the training length, then eighths.

    Every multiple of the training length is an edge, so that a cliff there falls between buckets.
    """
    eighths = (train_length * k // 8 for k in range(1, 8 * longest // train_length + 1))
    doubling = (2**k - 1 for k in range(1, (train_length // 8).bit_length() + 1))
    edges = {*eighths, *(edge for edge in doubling if edge < train_length // 8)}
    inside = sorted(edge for edge in edges if 0 < edge < longest)
    return list(itertools.pairwise([0, *inside, longest]))


def skipped_rows(row: Row, lengths: dict[float, int], protocols: Iterable[Protocol]) -> list[Row]:
    """Rows that say why a run was not evaluated (`row.reason`), one per cell it would have had."""
    metrics = {Protocol.induction: METRIC}
    return [
        replace(
            row,
            protocol=protocol.value,
            metric=metrics.get(protocol, row.metric),
            ratio=ratio,
            eval_length=length,
        )
        for protocol in protocols
        for ratio, length in lengths.items()
    ]
