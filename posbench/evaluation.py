"""Models measured by protocol: perplexity at multiples of the training length, and what follows.

`protocols.py` says what each protocol scores, `passes.py` which forward passes serve several of
them, `diagnostics.py` what is measured otherwise than as a mean loss. Here losses become rows, each
with a status, and the rows that need no pass of their own are derived.

Losses are summed in float64 and divided by the number of targets, then exponentiated.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from posbench import diagnostics
from posbench.config import EvalConfig, Protocol
from posbench.data import Split
from posbench.errors import OutOfMemoryError, UnsupportedError
from posbench.induction import measure_induction
from posbench.model import LanguageModel
from posbench.passes import Pass, Passes, Sharing
from posbench.plan import CellKey, Plan, ShortageError, cell_keys, row_of
from posbench.protocols import Layout, Windows
from posbench.results import DocumentLoss, Evaluation, HeadAttention, PositionCurve, Row, Status
from posbench.runtime import Runtime
from posbench.scoring import Losses, Scored, window_losses
from posbench.statistics import (
    FEWEST_DOCUMENTS,
    bootstrap_interval,
    cliff_position,
    effective_length,
    perplexity,
    resampled_means,
)
from posbench.targets import Integers, digest, documents_of


@dataclass(frozen=True)
class Subject:
    """One model to be evaluated, with what identifies its rows."""

    model: LanguageModel
    row: Row  # run_id, encoding, extension, model, seed, train_length, fingerprints filled in
    split: Split
    byte_lengths: npt.NDArray[np.int64] | None  # None: not known, so no bits per byte


def evaluate_model(
    subject: Subject,
    plan: Plan,
    config: EvalConfig,
    runtime: Runtime,
    scored: Scored = lambda _: None,
    key_tokens: diagnostics.KeyTokens | None = None,
) -> Evaluation:
    """All cells of one model: a row for each protocol, metric and length, each with a status.

    `key_tokens` are the targets that `longppl_self` scores, judged by another run; None: this one.
    """
    cells = _Cells(subject, plan, config, runtime, scored, key_tokens)
    for protocol in config.protocols:
        cells.fill(protocol)
    return cells.evaluation


def judge_key_tokens(
    subject: Subject, plan: Plan, config: EvalConfig, runtime: Runtime, scored: Scored
) -> diagnostics.KeyTokens:
    """Which targets of `controlled` the model of `subject` finds to hang on far context."""
    nothing = np.zeros(0, dtype=bool)
    try:
        found = _Cells(subject, plan, config, runtime, scored, None).key_tokens()
    except _REFUSALS as reason:
        return diagnostics.KeyTokens(nothing, _status_of(reason), f"the judging run: {reason}")
    return diagnostics.KeyTokens(found)


_REFUSALS = (UnsupportedError, OutOfMemoryError, ShortageError)


def _status_of(reason: Exception) -> Status:
    if isinstance(reason, UnsupportedError):
        return Status.unsupported
    return Status.oom if isinstance(reason, OutOfMemoryError) else Status.not_enough_data


# ---------------------------------------------------------------- filling them


@dataclass(frozen=True)
class _Measured:
    """Losses of the targets of one layout [n], and the passes they were taken from."""

    layout: Layout
    losses: Losses
    passes: list[Pass]


@dataclass
class _Sums:
    """Summed losses and numbers of targets by document."""

    sums: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]


@dataclass
class _Cells:
    """Fills the cells of one subject; passes that two protocols share are made once."""

    subject: Subject
    plan: Plan
    config: EvalConfig
    runtime: Runtime
    scored: Scored
    judged: diagnostics.KeyTokens | None
    evaluation: Evaluation = field(default_factory=Evaluation)

    def __post_init__(self) -> None:
        encoding = self.subject.model.encoding
        asked = [windows for each in self.plan.layouts.values() for windows in each.windows]
        sharing = Sharing(asked, encoding.prefix_consistent, encoding.max_length)
        self._passes = Passes(sharing, self._read)
        self._measured: dict[tuple[Protocol, int], _Measured] = {}
        self._rows: dict[CellKey, Row] = {}
        self._unmoved: dict[int, Losses] = {}
        self._heads: dict[int, npt.NDArray[np.float64]] = {}

    def fill(self, protocol: Protocol) -> None:
        """Append the rows of one protocol."""
        keys = cell_keys(protocol, self.plan.lengths, self.plan.train_length)
        for key in keys:
            row = self._rows[key] = row_of(self.subject.row, key)
            self.evaluation.rows.append(row)
            try:
                self._fill_row(key, row)
            except _REFUSALS as reason:
                row.status, row.reason = _status_of(reason), str(reason)

    def _fill_row(self, key: CellKey, row: Row) -> None:
        measure: dict[str, Callable[[CellKey, Row], None]] = {
            "ppl": self._perplexity,
            "gain": self._gain,
            "extrapolation_ratio": self._ratio,
            "effective_length": self._effective_length,
            "cliff_position": self._cliff,
            "max_abs_delta_nll": self._shift,
            "loss_change": self._ablation,
            "key_ppl": self._key_perplexity,
            "key_fraction": self._key_fraction,
            "induction_gain": self._induction,
        }
        measure.get(key.metric, self._attention)(key, row)

    def _induction(self, key: CellKey, row: Row) -> None:
        measure_induction(self.subject.model, row, self.config, self.runtime, self.scored)

    # ------------------------------------------------------------ mean losses

    def _perplexity(self, key: CellKey, row: Row) -> None:
        measured = self._measure(key.protocol, key.length)
        _cost(row, measured.passes)
        row.targets_sha256 = self.plan.digests[key.protocol, key.length]
        self._summarise(row, measured)

    def _measure(self, protocol: Protocol, length: int) -> _Measured:
        """The losses of one protocol at one length, taken from passes that are made once."""
        key = protocol, length
        if key not in self._measured:
            self.plan.check_length(length)
            self.subject.model.encoding.check_length(length)
            found = self.plan.layouts[key]
            if not found.windows:
                raise ShortageError(f"{protocol} scores nothing in windows of {length} tokens")
            taken = [self._passes.losses(windows) for windows in found.windows]
            losses = np.concatenate([losses.ravel() for losses, _ in taken])
            passes = list({id(made): made for _, made in taken}.values())
            self._measured[key] = _Measured(found, losses, passes)
        return self._measured[key]

    def _read(self, windows: Windows) -> Pass:
        self.runtime.reset_peak_memory()
        started = time.perf_counter()
        losses = self._losses(windows.starts + windows.length, windows.length, windows.scored)
        seconds = time.perf_counter() - started
        tokens = len(windows.starts) * windows.length
        return Pass(losses, tokens, seconds, self.runtime.peak_memory_mb())

    def _losses(self, ends: Integers, length: int, last: int, **how: object) -> Losses:
        return window_losses(
            self.subject.model,
            self.subject.split.tokens,
            ends,
            length,
            last,
            self.runtime,
            self.config.batch_tokens,
            self.scored,
            **how,  # type: ignore[arg-type]
        )

    def _summarise(
        self, row: Row, measured: _Measured, chosen: npt.NDArray[np.bool_] | slice = slice(None)
    ) -> None:
        """The mean loss of all targets, or of those chosen."""
        losses, visible = measured.losses[chosen], measured.layout.visible()[chosen]
        targets = measured.layout.targets()[chosen]
        weights = measured.layout.weights()[chosen]
        row.n_targets = losses.size
        row.min_context, row.mean_context = int(visible.min()), float(visible.mean())
        owners, place = np.unique(documents_of(self.subject.split, targets), return_inverse=True)
        row.n_docs = len(owners)
        finite = np.isfinite(losses)
        row.n_nonfinite = int((~finite).sum())
        if row.n_nonfinite:
            first = int(visible[~finite].min()) - 1
            row.status, row.value, row.ppl, row.nll = Status.nonfinite, math.inf, math.inf, math.inf
            row.reason = (
                f"{row.n_nonfinite} of {losses.size} losses are not finite, "
                f"the first at position {first} of its window"
            )
            return
        weighed = losses * weights
        row.nll = float(weighed.sum() / weights.sum())
        row.ppl = row.value = perplexity(row.nll)
        row.bpb = self._bits_per_byte(row.nll, targets)
        interval = bootstrap_interval(
            _totals(place, weighed), _totals(place, weights), self.config.bootstrap
        )
        row.reason = measured.layout.note
        self._interval(row, interval, perplexity)
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
            for owner, total, count in zip(
                owners, _totals(place, losses), np.bincount(place), strict=True
            )
        ]

    @staticmethod
    def _interval(
        row: Row, interval: tuple[float, float] | None, scale: Callable[[float], float]
    ) -> None:
        """Put an interval of mean losses on the row's own scale, or say why there is none."""
        if interval is None:
            missing = f"no interval: {row.n_docs} documents, fewer than 10"
            row.reason = "; ".join(part for part in (row.reason, missing) if part)
        else:
            row.ci_lo, row.ci_hi = sorted(scale(bound) for bound in interval)

    # ------------------------------------------------------------ loss by position

    def _cliff(self, key: CellKey, row: Row) -> None:
        rows = [r for k, r in self._rows.items() if (k.protocol, k.metric) == (key.protocol, "ppl")]
        measured = [each for each in rows if each.n_targets]
        if not measured:
            _like(row, max(rows, key=lambda each: each.eval_length))
            return
        longest = max(measured, key=lambda each: each.eval_length)
        curve = self._curve(longest)
        found = cliff_position(curve.lo, curve.hi, curve.nll, row.train_length, self.config.cliff)
        row.value = math.inf if found is None else float(found)
        row.reason = "" if found is not None else f"no cliff up to {longest.eval_length}"
        if longest.eval_length < row.eval_length:
            row.reason = f"looked at up to {longest.eval_length} tokens" + (
                ", no cliff there" if found is None else ""
            )
        for name in ("n_targets", "n_docs", "n_nonfinite", "targets_sha256"):
            setattr(row, name, getattr(longest, name))

    def _curve(self, row: Row) -> PositionCurve:
        """The loss by position of the longest pass that could be made."""
        losses = self._measured[Protocol.position, row.eval_length].losses
        by_place = losses.reshape(-1, row.eval_length)
        edges = position_buckets(row.train_length, row.eval_length)
        buckets = [by_place[:, lo:hi] for lo, hi in edges]
        curve = PositionCurve(
            row.run_id,
            row.encoding,
            row.extension,
            row.seed,
            row.train_length,
            row.eval_length,
            lo=[lo for lo, _ in edges],
            hi=[hi for _, hi in edges],
            nll=[float(bucket.mean()) for bucket in buckets],
            sd=[_spread(bucket) for bucket in buckets],
            n=[bucket.size for bucket in buckets],
            variant=row.variant,
        )
        self.evaluation.curves.append(curve)
        return curve

    # ------------------------------------------------------------ against 1x, on the same targets

    def _gain(self, key: CellKey, row: Row) -> None:
        """How much lower the loss is than at 1x, in nats per token: positive, context helped."""
        pair = self._against_1x(key, row)
        if pair is None:
            return
        base, here = pair
        row.value = float((base.losses - here.losses).mean())
        sums = self._by_document(base, base.losses - here.losses)
        row.bpb = self._bits_per_byte(row.value, base.layout.targets())
        self._interval(
            row, bootstrap_interval(sums.sums, sums.counts, self.config.bootstrap), float
        )

    def _ratio(self, key: CellKey, row: Row) -> None:
        """The perplexity as a multiple of that at 1x."""
        pair = self._against_1x(key, row)
        if pair is None:
            return
        base, here = pair
        row.value = perplexity(float((here.losses - base.losses).mean()))
        sums = self._by_document(base, here.losses - base.losses)
        self._interval(
            row, bootstrap_interval(sums.sums, sums.counts, self.config.bootstrap), perplexity
        )

    def _against_1x(self, key: CellKey, row: Row) -> tuple[_Measured, _Measured] | None:
        """Losses at 1x and at the row's length; None, and the row says why, without either."""
        base = self._rows.get(CellKey(key.protocol, "ppl", 1.0, self.plan.train_length))
        here = self._rows[CellKey(key.protocol, "ppl", key.ratio, key.length)]
        if base is None:
            row.status, row.reason = Status.skipped, "1x was not measured: add 1 to eval.ratios"
            return None
        for each, at in ((here, ""), (base, "at 1x: ")):
            if each.status is not Status.ok:
                _like(row, each, at)
                return None
        for name in ("n_targets", "n_docs", "targets_sha256", "min_context", "mean_context"):
            setattr(row, name, getattr(here, name))
        return (
            self._measured[key.protocol, self.plan.train_length],
            self._measured[key.protocol, key.length],
        )

    def _effective_length(self, key: CellKey, row: Row) -> None:
        """The longest length up to which perplexity stays within the tolerance of that at 1x."""
        rows = {
            r.eval_length: r
            for k, r in self._rows.items()
            if (k.protocol, k.metric) == (key.protocol, "ppl") and r.ratio >= 1
        }
        base = rows.get(self.plan.train_length)
        if base is None:
            row.status, row.reason = Status.skipped, "1x was not measured: add 1 to eval.ratios"
            return
        if base.status is not Status.ok:
            _like(row, base, "at 1x: ")
            return
        lengths = sorted(rows)
        known = [n for n in lengths if rows[n].status is Status.ok]
        sums = [
            self._by_document(
                self._measured[key.protocol, n], self._measured[key.protocol, n].losses
            )
            for n in known
        ]
        nats = [math.inf] * len(lengths)
        for length in known:
            nats[lengths.index(length)] = float(rows[length].nll or 0.0)
        held = effective_length(lengths, nats, self.config.tolerance)
        row.value = float(held)
        row.reason = _why_it_ends(held, lengths, rows)
        for name in ("n_targets", "n_docs", "targets_sha256"):
            setattr(row, name, getattr(base, name))
        if row.n_docs < FEWEST_DOCUMENTS:
            self._interval(row, None, float)
            return
        table = np.stack([each.sums for each in sums])
        drawn = resampled_means(table, sums[0].counts, self.config.bootstrap)
        found = []
        for means in drawn.T:
            losses = dict(zip(known, means, strict=True))
            found.append(
                effective_length(
                    lengths, [losses.get(n, math.inf) for n in lengths], self.config.tolerance
                )
            )
        low, high = np.percentile(found, (2.5, 97.5), method="inverted_cdf")
        row.ci_lo, row.ci_hi = float(low), float(high)

    def _by_document(self, measured: _Measured, losses: Losses) -> _Sums:
        owners = documents_of(self.subject.split, measured.layout.targets())
        _, place = np.unique(owners, return_inverse=True)
        return _Sums(_totals(place, losses), np.bincount(place).astype(np.int64))

    def _bits_per_byte(self, nats: float, targets: Integers) -> float | None:
        """A mean of nats per target as bits per byte of the targets."""
        if self.subject.byte_lengths is None:
            return None
        scored = int(self.subject.byte_lengths[self.subject.split.tokens[targets]].sum())
        return nats * targets.size / (math.log(2) * scored)

    # ------------------------------------------------------------ diagnostics

    def _shift(self, key: CellKey, row: Row) -> None:
        """The largest change of a loss when all positions move by the same distance."""
        length, offset = self.plan.train_length, key.length - self.plan.train_length
        self.plan.check_length(length)
        self.subject.model.encoding.check_length(key.length)
        ends = np.array(self.plan.probes, np.int64)
        if length not in self._unmoved:
            self._unmoved[length] = self._losses(ends, length, length)
        moved = self._losses(ends, length, length, offset=offset)
        row.n_targets, row.n_docs = moved.size, len({*documents_of(self.subject.split, ends)})
        change = np.abs(moved - self._unmoved[length])
        row.n_nonfinite = int((~np.isfinite(change)).sum())
        row.value = float(change.max()) if not row.n_nonfinite else math.inf
        row.reason = f"the same windows of {length} tokens at positions {offset} further on"
        if row.n_nonfinite:
            row.status = Status.nonfinite

    def _ablation(self, key: CellKey, row: Row) -> None:
        """The change of the loss when far tokens are another document's: positive, they helped."""
        plain = self._measure(Protocol.controlled, key.length)
        count = self.plan.foreign_count(self.config, key.length)
        if count <= 0:
            beyond = self.config.ablate_beyond or self.plan.train_length
            row.status = Status.skipped
            row.reason = f"no token is farther than {beyond} from all targets of its window"
            return
        ends = np.array(self.plan.places.anchors, np.int64)
        foreign = diagnostics.foreign(self.subject.split, ends, count)
        if foreign is None:
            raise ShortageError("all targets lie in one document; there is no other to read from")
        changed = self._losses(ends, key.length, self.plan.places.size, foreign=foreign).ravel()
        change = changed - plain.losses
        row.n_targets, row.targets_sha256 = (
            change.size,
            self.plan.digests[Protocol.controlled, key.length],
        )
        sums = self._by_document(plain, change)
        row.n_docs = len(sums.sums)
        row.n_nonfinite = int((~np.isfinite(change)).sum())
        row.reason = f"the first {count} of {key.length} tokens replaced"
        if row.n_nonfinite:
            row.status, row.value = Status.nonfinite, math.inf
            return
        row.value = float(change.mean())
        self._interval(
            row, bootstrap_interval(sums.sums, sums.counts, self.config.bootstrap), float
        )

    def key_tokens(self) -> npt.NDArray[np.bool_]:
        """Targets whose loss falls by more than `alpha` nats with the longest context, to < 2."""
        short = self._measure(Protocol.controlled, self.plan.train_length)
        reached = [n for n in self.plan.lengths.values() if n <= self.plan.reach]
        longest = max(reached, default=self.plan.train_length)
        if longest <= self.plan.train_length:
            self.plan.check_length(max(self.plan.lengths.values()))
            raise ShortageError("key tokens need a length beyond 1x; add one to eval.ratios")
        far = self._measure(Protocol.controlled, longest)
        return diagnostics.key_tokens(short.losses, far.losses)

    def _keys(self, row: Row) -> npt.NDArray[np.bool_] | None:
        """The key tokens; None, and the row says why, if there are none."""
        judged = self.judged or diagnostics.KeyTokens(self.key_tokens())
        if judged.status is not Status.ok:
            row.status, row.reason = judged.status, judged.reason
            return None
        if not judged.chosen.any():
            row.status = Status.not_enough_data
            row.reason = f"no_key_tokens: none of {judged.chosen.size} targets hangs on far context"
            return None
        return judged.chosen

    def _key_perplexity(self, key: CellKey, row: Row) -> None:
        """Perplexity of the key tokens alone."""
        keys = self._keys(row)
        if keys is None:
            return
        measured = self._measure(Protocol.controlled, key.length)
        _cost(row, measured.passes)
        targets = measured.layout.targets()[keys]
        row.targets_sha256 = digest(self.subject.split, targets)
        self._summarise(row, measured, keys)

    def _key_fraction(self, key: CellKey, row: Row) -> None:
        """The share of targets that are key tokens."""
        keys = self._keys(row)
        if keys is None:
            return
        row.value, row.n_targets = float(keys.mean()), keys.size
        row.targets_sha256 = self.plan.digests[Protocol.controlled, self.plan.train_length]

    def _attention(self, key: CellKey, row: Row) -> None:
        """One number of all heads; the table has each."""
        self.plan.check_length(key.length)
        self.subject.model.encoding.check_length(key.length)
        ends = np.array(self.plan.probes, np.int64)
        if key.length not in self._heads:
            self._heads[key.length] = diagnostics.attention(
                self.subject.model,
                self.subject.split.tokens,
                ends,
                key.length,
                row.train_length,
                self.runtime,
                self.scored,
            )
            self._head_rows(row, self._heads[key.length])
        found = self._heads[key.length]
        row.value = float(found[:, :, diagnostics.ATTENTION.index(key.metric)].mean())
        row.n_docs = len({*documents_of(self.subject.split, ends)})
        row.reason = f"mean over {found.shape[0]} layers of {found.shape[1]} heads"
        if not math.isfinite(row.value):
            row.status, row.value = Status.nonfinite, math.inf

    def _head_rows(self, row: Row, found: npt.NDArray[np.float64]) -> None:
        self.evaluation.attention += [
            HeadAttention(
                row.run_id,
                row.encoding,
                row.extension,
                row.variant,
                row.seed,
                row.train_length,
                row.eval_length,
                layer,
                head,
                *(float(value) for value in found[layer, head]),
            )
            for layer, head in itertools.product(range(found.shape[0]), range(found.shape[1]))
        ]


def _totals(place: Integers, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sums of `values` by place; bincount's dtype is not known to the type checker."""
    return np.bincount(place, weights=values).astype(np.float64)


def _like(row: Row, other: Row, at: str = "") -> None:
    """Let `row` share the fate of the row that it would have been derived from."""
    row.status, row.reason = other.status, f"{at}{other.reason}"
    row.n_nonfinite = other.n_nonfinite
    if other.status is Status.nonfinite:
        # At 1x there is then nothing to compare with; elsewhere it is infinitely worse.
        row.value = math.nan if at else -math.inf if row.metric == "gain" else math.inf


def _why_it_ends(held: int, lengths: list[int], rows: dict[int, Row]) -> str:
    after = lengths[lengths.index(held) + 1 :]
    if not after:
        return f">= {held}: never exceeded"
    status = rows[after[0]].status
    return "" if status is Status.ok else f"{after[0]}: {status.replace('_', ' ')}"


def _cost(row: Row, passes: list[Pass]) -> None:
    row.seconds = sum(each.seconds for each in passes)
    row.tokens_per_s = sum(each.tokens for each in passes) / row.seconds
    row.peak_mem_mb = max(each.peak_mem_mb for each in passes)


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
