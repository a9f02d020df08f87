"""Shift, ablation, key tokens and attention: on models of which the answer is known."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from oracles import (
    CPU,
    TRAIN,
    Oracle,
    OracleEncoding,
    by_visible,
    cell,
    make_config,
    make_split,
    measure,
    real,
    toy,
)
from torch import Tensor

from posbench import attention as kernels
from posbench import diagnostics
from posbench.evaluation import Subject, evaluate_model, judge_key_tokens
from posbench.model import GPT, LanguageModel
from posbench.plan import plan
from posbench.results import Row, Status
from posbench.targets import documents_of

SPLIT = make_split()
REAL = make_split([33, 40, 70, 131, 100] * 3, vocabulary=31)
ENDS = np.array([40, 150, 300])


# ---------------------------------------------------------------- shift


@pytest.mark.parametrize("encoding", ["none", "rope", "alibi", "t5"])
def test_distances_alone_do_not_feel_a_shift(encoding: str) -> None:
    rows = measure(real(encoding), REAL, protocols=["shift"]).rows
    assert [row.eval_length for row in rows] == [12, 16, 32]  # the last position and one
    for row in rows:
        assert row.status is Status.ok
        assert row.value is not None
        assert row.value < 2e-4  # float32 angles, weights ten times their usual size


def test_absolute_positions_feel_it() -> None:
    for row in measure(real("sinusoidal"), REAL, protocols=["shift"]).rows:
        assert row.value is not None
        assert row.value > 0.01
        assert f"positions {row.eval_length - TRAIN} further on" in row.reason


def test_a_table_cannot_be_shifted() -> None:
    for row in measure(real("learned"), REAL, protocols=["shift"]).rows:
        assert (row.status, row.value) == (Status.unsupported, None)
        assert f"{row.eval_length} positions requested" in row.reason


# ---------------------------------------------------------------- context ablation


class Reader(LanguageModel):
    """Remembers the windows it was given; its loss grows with the first token it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.encoding = OracleEncoding()
        self.windows: list[list[int]] = []

    def features(self, tokens: Tensor, positions: Any = None, last: int = 1) -> Tensor:
        self.windows += tokens.tolist()
        logits = torch.zeros(len(tokens), last, len(SPLIT.tokens) + 1, dtype=torch.float64)
        logits[..., 0] = tokens[:, :1].double() / 100
        return logits


def test_far_tokens_become_those_of_another_document() -> None:
    model = Reader()
    measured = measure(model, SPLIT, protocols=["context_ablation"], ratios=[1, 4])
    assert cell(measured, "context_ablation", TRAIN, "loss_change").status is Status.skipped
    row = cell(measured, "context_ablation", 32, "loss_change")
    count = 32 - TRAIN // 2 + 1 - TRAIN  # every target keeps the TRAIN tokens before it
    assert f"the first {count} of 32 tokens replaced" in row.reason
    owner = np.repeat(np.arange(len(SPLIT)), SPLIT.lengths)
    changed = [window for window in model.windows if len(window) == 32 and broken(window)]
    plain = [window for window in model.windows if len(window) == 32 and not broken(window)]
    assert len(changed) == len(plain) == row.n_targets // (TRAIN // 2)
    for before, after in zip(plain, changed, strict=True):
        assert after[count:] == before[count:]
        assert owner[after[0]] == owner[after[count - 1]] != owner[before[0]]
        assert not broken(after[:count])
    losses = [
        [math.log(len(SPLIT.tokens) + math.exp(window[0] / 100)) for window in windows]
        for windows in (plain, changed)
    ]
    assert row.value == pytest.approx(np.mean(losses[1]) - np.mean(losses[0]), rel=1e-9)


def broken(window: list[int]) -> bool:
    """Whether the text, whose tokens count upwards, has a gap."""
    return any(after - before != 1 for before, after in itertools.pairwise(window))


def test_how_far_is_a_setting_and_a_model_without_far_sight_loses_nothing() -> None:
    class Blind(LanguageModel):
        encoding = OracleEncoding()

        def features(self, tokens: Tensor, positions: Any = None, last: int = 1) -> Tensor:
            near = tokens[:, -last:].double()
            return torch.stack([near / 100, 0 * near], -1).repeat(1, 1, 300)

    asked = {"protocols": ["context_ablation"], "ratios": [1, 2, 4], "ablate_beyond": 2}
    for row in measure(Blind(), SPLIT, **asked).rows:
        assert (row.status, row.value) == (Status.ok, 0.0)
        assert row.reason.startswith(f"the first {row.eval_length - 5} of")


def test_one_document_has_nothing_to_replace_with() -> None:
    split = make_split([100])
    model = Oracle(101, by_visible(toy))
    row = cell(
        measure(model, split, protocols=["context_ablation"]), "context_ablation", 32, "loss_change"
    )
    assert row.status is Status.not_enough_data
    assert "one document" in row.reason


# ---------------------------------------------------------------- key tokens


def far_sighted(every: int, after: float = 1.0) -> Any:
    """5 nats for every n-th token at 1x, `after` with more context; 3 nats for all others."""

    def rule(targets: Tensor, visible: Tensor, length: int) -> Tensor:
        known = torch.where(visible > TRAIN, after, 5.0).expand_as(targets)
        return torch.where(targets % every == 0, known, 3.0)

    return rule


def longppl(rule: Any) -> Any:
    return measure(Oracle(len(SPLIT.tokens) + 1, rule), SPLIT, protocols=["longppl_self"])


def test_key_tokens_are_those_that_far_context_makes_known() -> None:
    measured = longppl(far_sighted(5))
    for length, nats in ((TRAIN, 5.0), (16, 1.0), (32, 1.0)):
        row = cell(measured, "longppl_self", length, "key_ppl")
        assert row.ppl == pytest.approx(math.exp(nats), rel=1e-9)
        assert row.status is Status.ok
    share = cell(measured, "longppl_self", 32, "key_fraction")
    targets = plan(SPLIT, TRAIN, make_config(protocols=["controlled"]), "cpu").layouts
    wanted = [t % 5 == 0 for t in next(iter(targets.values())).targets()]
    assert share.value == pytest.approx(np.mean(wanted))
    assert row.n_targets == sum(wanted)


@pytest.mark.parametrize("after", [2.01, 3.0])  # not below 2; saved too little
def test_without_key_tokens_the_status_says_so(after: float) -> None:
    for row in longppl(far_sighted(5, after)).rows:
        assert (row.status, row.value) == (Status.not_enough_data, None)
        assert row.reason.startswith("no_key_tokens: none of ")


def test_another_run_can_judge() -> None:
    config = make_config(protocols=["longppl_self"])
    made = plan(SPLIT, TRAIN, config, "cpu")
    row = Row("r", "oracle", "none", "", "tiny", 0, TRAIN, 0, 0.0, "")

    def subject(rule: Any, limit: int | None = None) -> Subject:
        model = Oracle(len(SPLIT.tokens) + 1, rule, OracleEncoding(limit))
        ones = np.ones(len(SPLIT.tokens) + 1, dtype=np.int64)
        return Subject(model, row, SPLIT, ones)  # type: ignore[arg-type]

    judged = judge_key_tokens(subject(far_sighted(5)), made, config, CPU, lambda _: None)
    flat = subject(by_visible(toy))  # has no key token of its own
    found = evaluate_model(flat, made, config, CPU, key_tokens=judged)
    assert cell(found, "longppl_self", 32, "key_fraction").value == judged.chosen.mean() > 0.1
    ended = judge_key_tokens(subject(far_sighted(5), TRAIN), made, config, CPU, lambda _: None)
    for each in evaluate_model(flat, made, config, CPU, key_tokens=ended).rows:
        assert each.status is Status.unsupported
        assert each.reason.startswith("the judging run: ")


# ---------------------------------------------------------------- attention


def look(model: GPT, length: int) -> Any:
    return diagnostics.attention(model, REAL.tokens, ENDS, length, TRAIN, CPU)


def expected(weights: np.ndarray, train: int) -> list[float]:
    """The four means from weights [T, T] of one head, query by query."""
    sums = [0.0] * 4
    for i in range(1, len(weights)):
        row = weights[i, : i + 1]
        sums[0] -= sum(p * math.log(p) for p in row if p > 0) / math.log(i + 1)
        sums[1] += sum(p * (i - j) for j, p in enumerate(row))
        sums[2] += sum(p for j, p in enumerate(row) if i - j >= train)
        sums[3] += row[0]
    return [each / (len(weights) - 1) for each in sums]


def flat_scores(encoding: str) -> GPT:
    model = real(encoding)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.zero_()  # type: ignore[union-attr, operator]
    return model


@pytest.mark.parametrize("length", [TRAIN, 32])
def test_even_weights_are_spread_as_far_as_they_can(length: int) -> None:
    found = look(flat_scores("none"), length)
    weights = np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]
    assert found.shape == (2, 2, 4)
    np.testing.assert_allclose(found, np.broadcast_to(expected(weights, TRAIN), (2, 2, 4)), 1e-5)
    assert found[0, 0, 0] == pytest.approx(1.0, abs=1e-6)  # the entropy of even weights


def test_a_bias_by_distance_draws_weights_near() -> None:
    length = 32
    found = look(flat_scores("alibi"), length)
    distance = np.arange(length)[:, None] - np.arange(length)
    for head, slope in enumerate((1 / 16, 1 / 256)):  # 2^(-8 h / 2)
        scores = np.where(distance >= 0, -slope * distance, -np.inf)
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        for layer in range(2):
            np.testing.assert_allclose(found[layer, head], expected(weights, TRAIN), 1e-4)


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = look(real("rope"), 32)
    monkeypatch.setattr(kernels, "SCORES_PER_CHUNK", 2 * 32 * 5)
    np.testing.assert_allclose(look(real("rope"), 32), wanted, rtol=1e-6)


def test_rows_are_means_over_heads_and_the_table_has_each() -> None:
    measured = measure(real("rope"), REAL, protocols=["attention"])
    assert len(measured.rows) == 4 * 3
    assert len(measured.attention) == 3 * 2 * 2
    for row in measured.rows:
        assert row.status is Status.ok
        own = [
            getattr(each, row.metric)
            for each in measured.attention
            if each.eval_length == row.eval_length
        ]
        assert row.value == pytest.approx(np.mean(own), rel=1e-12)
    assert cell(measured, "attention", TRAIN, "mass_beyond").value == 0


@pytest.mark.parametrize("encoding", ["stickbreak", "path"])
def test_a_kernel_of_its_own_has_no_weights_to_look_at(encoding: str) -> None:
    for row in measure(real(encoding), REAL, protocols=["attention"], ratios=[1]).rows:
        assert (row.status, row.value) == (Status.unsupported, None)
        assert "kernel of its own" in row.reason


def test_the_next_window_of_another_document_gives_the_tokens() -> None:
    ends = np.array([60, 64, 90, 94, 200])
    donors = diagnostics.foreign(SPLIT, ends, 3)
    assert donors is not None
    owners = documents_of(SPLIT, ends)
    wanted = []
    for index in range(len(ends)):
        later = [*range(index + 1, len(ends)), *range(index)]
        wanted.append(next(ends[each] for each in later if owners[each] != owners[index]))
    assert donors.ends.tolist() == wanted
    assert donors.tokens == 3
