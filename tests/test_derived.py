"""Rows that need no pass of their own: gain, ratio, effective length, cliff."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from oracles import (
    TRAIN,
    Oracle,
    OracleEncoding,
    amnesic,
    broken_at,
    by_visible,
    cell,
    cliff,
    make_config,
    make_split,
    measure,
    toy,
)
from torch import Tensor

from posbench.config import Protocol
from posbench.plan import skipped_rows
from posbench.results import Evaluation, Row, Status
from posbench.statistics import bootstrap_interval, cliff_position, effective_length

MANY = make_split([33, 40, 70, 131] * 4)  # enough documents for an interval
LENGTHS = (TRAIN, 2 * TRAIN, 4 * TRAIN)
EXACT = 1e-10
toy_rule = by_visible(toy)


def of(rule: object, encoding: OracleEncoding | None = None, **asked: object) -> Evaluation:
    return measure(Oracle(len(MANY.tokens) + 1, rule, encoding), MANY, **asked)  # type: ignore[arg-type]


def value(row: Row) -> float:
    assert row.status is Status.ok
    assert row.value is not None
    return row.value


# ---------------------------------------------------------------- gain and ratio


def test_gain_is_positive_where_context_helps() -> None:
    measured = of(toy_rule)
    base = cell(measured, "controlled", TRAIN)
    for length in LENGTHS[1:]:
        here = cell(measured, "controlled", length)
        gain = cell(measured, "controlled", length, "gain")
        assert base.nll is not None
        assert here.nll is not None
        assert value(gain) == pytest.approx(base.nll - here.nll, rel=1e-9)
        assert value(gain) > 0
        assert gain.bpb == pytest.approx(value(gain) / math.log(2), rel=EXACT)  # a byte each
        ratio = cell(measured, "controlled", length, "extrapolation_ratio")
        assert value(ratio) == pytest.approx(math.exp(-value(gain)), rel=EXACT)
        assert gain.targets_sha256 == ratio.targets_sha256 == base.targets_sha256
        assert (gain.n_targets, gain.n_docs) == (base.n_targets, base.n_docs)
        assert (gain.nll, gain.ppl) == (None, None)


def test_a_model_that_forgets_gains_nothing_from_2x_to_4x() -> None:
    """It does in nonoverlap: the early-token effect."""
    measured = of(amnesic(TRAIN), protocols=["controlled", "nonoverlap"])
    gains = [value(cell(measured, "controlled", n, "gain")) for n in LENGTHS[1:]]
    assert gains[0] == pytest.approx(gains[1], abs=1e-12)
    flattered = [cell(measured, "nonoverlap", n).nll or 0.0 for n in LENGTHS]
    assert flattered[1] - flattered[2] > 1e-3


def test_gain_is_paired_by_document() -> None:
    """Documents differ by nats, but each gains the same: no doubt is left about the gain."""
    documents = torch.from_numpy(np.repeat(np.arange(len(MANY)), MANY.lengths))

    def rule(targets: Tensor, visible: Tensor, length: int) -> Tensor:
        return 1 + documents[targets].double() / 4 - 0.1 * math.log2(length / TRAIN)

    measured = of(rule)
    plain, gain = cell(measured, "controlled", 32), cell(measured, "controlled", 32, "gain")
    assert plain.ci_lo is not None
    assert plain.ci_hi is not None
    assert plain.ci_hi / plain.ci_lo > 2
    assert value(gain) == pytest.approx(0.2, rel=1e-9)
    assert (gain.ci_lo, gain.ci_hi) == (pytest.approx(0.2), pytest.approx(0.2))
    ratio = cell(measured, "controlled", 32, "extrapolation_ratio")
    assert (ratio.ci_lo, ratio.ci_hi) == (pytest.approx(math.exp(-0.2)),) * 2


def test_gain_has_the_interval_of_the_differences() -> None:
    def rule(targets: Tensor, visible: Tensor, length: int) -> Tensor:
        return 2 + torch.sin(targets.double() / 50 * math.log2(length))

    measured = of(rule)
    sums = {
        length: {d.document: (d.sum_nll, d.n) for d in measured.documents
                 if (d.protocol, d.eval_length) == ("controlled", length)}
        for length in (TRAIN, 32)
    }  # fmt: skip
    names = sorted(sums[TRAIN], key=MANY.names.index)
    differences = np.array([sums[TRAIN][n][0] - sums[32][n][0] for n in names])
    counts = np.array([sums[TRAIN][n][1] for n in names])
    wanted = bootstrap_interval(differences, counts, 100)
    gain = cell(measured, "controlled", 32, "gain")
    assert wanted is not None
    assert (gain.ci_lo, gain.ci_hi) == (pytest.approx(wanted[0]), pytest.approx(wanted[1]))
    assert wanted[0] < value(gain) < wanted[1]


def test_without_1x_there_is_nothing_to_compare_with() -> None:
    measured = of(toy_rule, ratios=[0.5, 2, 4], protocols=["controlled"])
    derived = [row for row in measured.rows if row.metric != "ppl"]
    assert len(derived) == 7
    for row in derived:
        assert row.status is Status.skipped
        assert "add 1 to eval.ratios" in row.reason
        assert row.value is None


def test_what_a_row_is_derived_from_decides_its_status() -> None:
    measured = of(toy_rule, OracleEncoding(2 * TRAIN), protocols=["controlled", "position"])
    for metric in ("gain", "extrapolation_ratio"):
        assert cell(measured, "controlled", 16, metric).status is Status.ok
        row = cell(measured, "controlled", 32, metric)
        assert (row.status, row.value) == (Status.unsupported, None)
        assert "32 positions requested" in row.reason
    effective = cell(measured, "controlled", 32, "effective_length")
    assert (effective.value, effective.reason) == (16.0, "32: unsupported")
    edge = cell(measured, "position", 32, "cliff_position")
    assert (edge.status, edge.value) == (Status.ok, math.inf)
    assert edge.reason == "looked at up to 16 tokens, no cliff there"


def test_a_loss_that_is_not_finite_is_an_infinite_loss_of_context() -> None:
    measured = of(broken_at(20), protocols=["controlled"])  # 2x scores its tokens 12 to 15
    assert value(cell(measured, "controlled", 16, "gain")) == 0
    measured = of(broken_at(30), protocols=["controlled"])
    gain, ratio = (cell(measured, "controlled", 32, m) for m in ("gain", "extrapolation_ratio"))
    assert (gain.status, gain.value) == (Status.nonfinite, -math.inf)
    assert (ratio.status, ratio.value) == (Status.nonfinite, math.inf)
    assert "not finite" in gain.reason
    assert cell(measured, "controlled", 32, "effective_length").value == 16
    lost = of(broken_at(6), protocols=["controlled"])  # at 1x itself
    gain = cell(lost, "controlled", 32, "gain")
    assert gain.status is Status.nonfinite
    assert math.isnan(gain.value or 0.0)
    assert gain.reason.startswith("at 1x: ")


def test_few_documents_give_no_interval_and_say_so() -> None:
    few = make_split([33] * 9)
    measured = measure(Oracle(len(few.tokens) + 1, toy_rule), few)
    for metric in ("gain", "extrapolation_ratio", "effective_length"):
        row = cell(measured, "controlled", 32, metric)
        assert (row.status, row.ci_lo, row.ci_hi) == (Status.ok, None, None)
        assert "9 documents, fewer than 10" in row.reason


# ---------------------------------------------------------------- effective length and cliff


def test_a_cliff_at_the_training_length_is_found_there() -> None:
    measured = of(cliff(TRAIN))
    assert value(cell(measured, "position", 32, "cliff_position")) == TRAIN
    row = cell(measured, "controlled", 32, "effective_length")
    assert (value(row), row.reason) == (TRAIN, "")
    assert (row.ci_lo, row.ci_hi) == (TRAIN, TRAIN)


def test_no_cliff_is_said_so() -> None:
    measured = of(toy_rule)
    edge = cell(measured, "position", 32, "cliff_position")
    assert (edge.status, edge.value, edge.reason) == (Status.ok, math.inf, "no cliff up to 32")
    row = cell(measured, "controlled", 32, "effective_length")
    assert (value(row), row.reason) == (32, ">= 32: never exceeded")


def test_tolerance_and_threshold_are_those_asked_for() -> None:
    measured = of(cliff(TRAIN), tolerance=math.exp(4.0) - 1 + 1e-9, cliff=4.1)
    assert value(cell(measured, "controlled", 32, "effective_length")) == 32
    assert cell(measured, "position", 32, "cliff_position").value == math.inf


@pytest.mark.parametrize(
    ("nats", "held"),
    [
        ([2.0, 2.0, 2.0], 32),
        ([2.0, 2.04, 2.0], 32),  # exp(0.04) is within 5 %
        ([2.0, 2.05, 2.0], 8),  # exp(0.05) is not; what comes after does not count
        ([2.0, 1.0, 2.1], 16),
        ([2.0, math.inf, 1.0], 8),
        ([2.0, math.nan, 1.0], 8),
    ],
)
def test_effective_length_ends_at_the_first_excess(nats: list[float], held: int) -> None:
    assert effective_length([8, 16, 32], nats, 0.05) == held


@pytest.mark.parametrize(
    ("nats", "position"),
    [
        ([5, 2, 2, 2], None),  # early tokens are no cliff
        ([5, 2, 3, 2], None),  # a hill is none: the loss comes back
        ([5, 2, 3, 3], 4),
        ([5, 2, 2, 2.5], None),  # not more than half a nat
        ([5, 2, 2, 2.6], 6),
        ([5, 3, 3, math.nan], 6),
        ([math.nan, math.nan, 2, 2], 0),
    ],
)
def test_a_cliff_rises_for_good(nats: list[float], position: int | None) -> None:
    assert cliff_position([0, 2, 4, 6], [2, 4, 6, 8], nats, 4, 0.5) == position


# ---------------------------------------------------------------- which cells there are


@pytest.mark.parametrize("ratios", [[1.0, 2.0, 4.0], [0.5, 2.0], [1.0]])
def test_a_run_that_is_skipped_has_the_cells_of_one_that_is_not(ratios: list[float]) -> None:
    measured = of(toy_rule, ratios=ratios, protocols=list(Protocol)[:6])
    row = Row("r", "oracle", "none", "", "tiny", 0, TRAIN, 0, 0.0, "", reason="damaged")
    row.status = Status.skipped
    skipped = skipped_rows(row, make_config(ratios=ratios, protocols=list(Protocol)[:6]))

    def keys(rows: list[Row]) -> list[tuple[str, str, int, float]]:
        return [(r.protocol, r.metric, r.eval_length, r.ratio) for r in rows]

    assert keys(skipped) == keys(measured.rows)
    assert {(each.status, each.reason) for each in skipped} == {(Status.skipped, "damaged")}
    assert all(dataclasses.asdict(each)["status"] for each in measured.rows)
