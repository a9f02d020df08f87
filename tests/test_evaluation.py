"""Protocol v1 on models whose losses are known, and proof that a wrong evaluator is found out.

See tests/oracles.py for the models. Tolerances: oracles give float64 logits, so sums must agree to
1e-10; what real models compute in float32 must agree to 1e-5.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import (
    MEANS,
    MUTANTS,
    OWN,
    TRAIN,
    Copy,
    Hungry,
    Oracle,
    OracleEncoding,
    amnesic,
    broken_at,
    by_visible,
    cell,
    check_oracles,
    cliff,
    disjoint_ends,
    expected_targets,
    make_config,
    make_split,
    measure,
    perplexities,
    real,
    toy,
    traced_prefix,
    tracer,
)
from torch import Tensor

from posbench.config import Protocol
from posbench.config.extensions import EXTENSIONS, NtkConfig
from posbench.data import Split
from posbench.evaluation import position_buckets
from posbench.model import LanguageModel
from posbench.plan import plan, planned_tokens
from posbench.results import Evaluation, Status, read_results, write_results

SPLIT = make_split()
VOCABULARY = len(SPLIT.tokens) + 1
LENGTHS = (TRAIN, 2 * TRAIN, 4 * TRAIN)
EXACT = 1e-10
MANY = make_split([33, 40, 70, 131] * 4)  # enough documents for an interval
REAL = make_split([33, 40, 70, 131, 100] * 3, vocabulary=31)  # for models with real weights


toy_rule = by_visible(toy)


def oracle(rule: Any, encoding: OracleEncoding | None = None, split: Split = SPLIT) -> Oracle:
    return Oracle(len(split.tokens) + 1, rule, encoding)


def numbers(measured: Evaluation) -> dict[tuple[str, int], dict[str, Any]]:
    """All that rows say but for what a clock or a memory meter reads."""
    rows = [dataclasses.asdict(row) for row in perplexities(measured)]
    for row in rows:
        for key in ("seconds", "tokens_per_s", "peak_mem_mb"):
            del row[key]
    return {(row["protocol"], row["eval_length"]): row for row in rows}


# ---------------------------------------------------------------- soundness of the whole


def test_every_oracle_is_measured_as_it_is() -> None:
    assert check_oracles() == []


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_evaluator_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    assert traces() != []


def traces() -> list[str]:
    """What `check_oracles` finds; tables that do not fit together are a finding too."""
    try:
        return check_oracles()
    except ValueError as error:
        return [str(error)]


# ---------------------------------------------------------------- U, COUNT: what is scored


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(dtype: torch.dtype) -> None:
    class Uniform(LanguageModel):
        encoding = OracleEncoding()

        def features(self, tokens: Tensor, positions: Any = None, last: int = 1) -> Tensor:
            return torch.full((len(tokens), last, VOCABULARY), 3.0, dtype=dtype)

    measured = measure(Uniform(), SPLIT)
    assert len(perplexities(measured)) == 9
    for row in perplexities(measured):
        assert row.ppl == row.value == pytest.approx(VOCABULARY, rel=1e-6)


@pytest.mark.parametrize("length", LENGTHS)
def test_controlled_asks_for_each_target_once_at_full_context(length: int) -> None:
    model = oracle(tracer)
    measured = measure(model, SPLIT, ratios=[length / TRAIN], protocols=["controlled"])
    (row,) = perplexities(measured)
    wanted = expected_targets(SPLIT, "controlled", length, 4 * TRAIN, TRAIN // 2)
    asked = Counter((token + 1, token + 1 - first) for first, token, _ in model.asked)
    assert asked == Counter((target, visible) for target, visible, _ in wanted)
    assert set(asked.values()) == {1}
    assert row.n_targets == len(wanted)
    assert row.min_context == length - TRAIN // 2 + 1


@pytest.mark.parametrize("protocol", MEANS)
def test_no_window_crosses_a_document(protocol: str) -> None:
    model = oracle(tracer)
    measure(model, SPLIT, protocols=[protocol], ratios=[0.75, 1, 2, 4])
    document = np.repeat(np.arange(len(SPLIT)), SPLIT.lengths)
    for first, token, length in model.asked:
        assert document[first] == document[token + 1]
        assert first <= token < first + length


@pytest.mark.parametrize("protocol", ["controlled", "nonoverlap"])
def test_targets_are_the_same_whatever_is_asked_and_however_it_is_computed(protocol: str) -> None:
    """Lengths, encodings, batch sizes: one digest."""
    every = [
        measure(oracle(tracer), SPLIT, protocols=[protocol], max_targets=40),
        measure(oracle(toy_rule), SPLIT, protocols=[protocol], max_targets=40, ratios=[1]),
        measure(oracle(tracer), SPLIT, protocols=[protocol], max_targets=40, batch_tokens=1),
        measure(oracle(tracer, OracleEncoding(TRAIN)), SPLIT, max_targets=40, protocols=[protocol]),
    ]
    rows = [each for measured in every for each in perplexities(measured)]
    rows = [row for row in rows if row.status is Status.ok]
    assert len(rows) == 3 + 1 + 3 + 1
    assert len({row.targets_sha256 for row in rows}) == 1
    assert len({(row.n_targets, row.n_docs) for row in rows}) == 1


def test_position_names_the_targets_of_each_length() -> None:
    measured = measure(oracle(toy_rule), SPLIT)
    digests = [cell(measured, "position", length).targets_sha256 for length in LENGTHS]
    alone = measure(oracle(tracer), SPLIT, ratios=[1], protocols=["position"])
    assert len(set(digests)) == 3  # other lengths, other targets
    assert alone.rows[0].targets_sha256 == digests[0]


@pytest.mark.parametrize("settings", [{}, {"anchor_targets": 1}, {"anchor_targets": TRAIN}])
def test_context_of_controlled(settings: dict[str, int]) -> None:
    size = settings.get("anchor_targets", TRAIN // 2)
    for row in perplexities(measure(oracle(toy_rule), SPLIT, protocols=["controlled"], **settings)):
        length = row.eval_length
        assert row.min_context == length - size + 1
        assert row.mean_context == pytest.approx(length - (size - 1) / 2)


# ---------------------------------------------------------------- P(f): the toy's exact values

# eval/disjoint_carry/N=*/L=*: mean loss of 2 + 1/(1+c) over N - 1 targets in blocks of L
DISJOINT = {
    # eval/disjoint_carry/N=10/L=4, its mutant MUT_mean_of_window_means
    (9, 4): (2.340740740740741, 2.380555555555556),
    # eval/disjoint_carry/N=1000/L=128
    (999, 128): (2.0353480478136152, 2.0354868423816015),
    # eval/disjoint_carry/N=1000/L=256
    (999, 256): (2.0204312459468783, 2.0204636383184934),
    # eval/disjoint_carry/N=1000/L=512
    (999, 512): (2.0115986197830598, 2.0116046369459273),
}


@pytest.mark.parametrize(("span", "length"), DISJOINT)
def test_nonoverlap_weighs_targets_not_windows(span: int, length: int) -> None:
    """One span, cut with a remainder: the mean is over its targets, the last block's among them."""
    wanted, of_windows = DISJOINT[span, length]
    split = make_split([span + 1])
    train = span // 4  # four times it is shorter than the span, which sets the longest window
    measured = measure(
        oracle(toy_rule, split=split),
        split,
        train_length=train,
        ratios=[length / train, span / train],
        protocols=["nonoverlap"],
        anchor_targets=1,
    )
    row = cell(measured, "nonoverlap", length)
    assert row.n_targets == span
    assert row.nll == pytest.approx(wanted, abs=1e-12)
    assert row.ppl == pytest.approx(math.exp(wanted), rel=1e-12)
    assert abs(wanted - of_windows) > 1e-6  # the tolerance tells them apart


@pytest.mark.parametrize("ratio", [0.75, 1.5, 3.0])
def test_a_last_block_that_is_shorter_counts_by_its_size(ratio: float) -> None:
    length, longest = round(ratio * TRAIN), 4 * TRAIN
    assert longest % length
    model = oracle(toy_rule)
    (row,) = measure(model, SPLIT, ratios=[ratio], protocols=["nonoverlap"]).rows
    contexts = [place % length + 1 for place in range(longest)]
    assert row.nll == pytest.approx(math.fsum(map(toy, contexts)) / longest, rel=EXACT)
    assert row.mean_context == pytest.approx(sum(contexts) / longest)
    assert row.min_context == 1
    assert {window for _, _, window in model.asked} == {length, longest % length}
    assert all(count == 1 for count in Counter(token for _, token, _ in model.asked).values())


@pytest.mark.parametrize("length", LENGTHS)
def test_position_is_the_mean_over_the_first_positions(length: int) -> None:
    row = cell(measure(oracle(toy_rule), SPLIT), "position", length)
    assert row.nll == pytest.approx(math.fsum(map(toy, range(1, length + 1))) / length, rel=EXACT)
    assert (row.min_context, row.mean_context) == (1, (1 + length) / 2)


# ---------------------------------------------------------------- C(f, W), CLIFF, COPY


def nll(measured: Evaluation, protocol: str, length: int) -> float:
    row = cell(measured, protocol, length)
    assert row.status is Status.ok
    assert row.nll is not None
    return row.nll


def test_early_tokens_pass_for_skill_in_nonoverlap_but_not_in_controlled() -> None:
    """A model that forgets all but its last `TRAIN - K + 1` tokens gains nothing from more.

    With a reach of TRAIN the targets of `controlled` at 1x still miss up to K - 1 tokens; from 2x
    on they miss none, and the curve is flat.
    """
    fewest = TRAIN - TRAIN // 2 + 1
    short = measure(oracle(amnesic(fewest)), SPLIT)
    assert nll(short, "controlled", TRAIN) == pytest.approx(toy(fewest), rel=EXACT)
    full = measure(oracle(amnesic(TRAIN)), SPLIT)
    for measured, first in ((short, 0), (full, 1)):
        for shorter, longer in itertools.pairwise(LENGTHS[first:]):
            gain = nll(measured, "controlled", shorter) - nll(measured, "controlled", longer)
            assert gain == pytest.approx(0, abs=1e-12)
            for flattered in ("nonoverlap", "position"):
                gain = nll(measured, flattered, shorter) - nll(measured, flattered, longer)
                assert gain > 1e-3
    assert nll(full, "controlled", TRAIN) > nll(full, "controlled", 2 * TRAIN) + 1e-3


def test_use_of_all_context_is_seen_in_controlled() -> None:
    measured = measure(oracle(toy_rule), SPLIT)
    first, second, third = (nll(measured, "controlled", length) for length in LENGTHS)
    assert first > second > third


def test_a_cliff_at_the_training_length_falls_between_two_buckets() -> None:
    measured = measure(oracle(cliff(TRAIN)), SPLIT)
    (curve,) = measured.curves
    assert curve.eval_length == 4 * TRAIN
    assert TRAIN in curve.lo
    for lo, found in zip(curve.lo, curve.nll, strict=True):
        assert found == pytest.approx(2.0 if lo < TRAIN else 6.0, rel=EXACT)
    assert nll(measured, "controlled", TRAIN) == pytest.approx(2.0, rel=EXACT)
    assert nll(measured, "controlled", 2 * TRAIN) == pytest.approx(6.0, rel=EXACT)
    assert nll(measured, "position", 2 * TRAIN) == pytest.approx(4.0, rel=EXACT)


def test_position_curve_has_all_losses_of_each_bucket() -> None:
    measured = measure(oracle(traced_prefix), SPLIT)
    (curve,) = measured.curves
    wanted = expected_targets(SPLIT, "position", 4 * TRAIN, 4 * TRAIN, TRAIN // 2)
    for lo, hi, mean, spread, count in zip(
        curve.lo, curve.hi, curve.nll, curve.sd, curve.n, strict=True
    ):
        targets = torch.tensor([t for t, visible, _ in wanted if lo < visible <= hi])
        visible = torch.tensor([visible for _, visible, _ in wanted if lo < visible <= hi])
        losses = traced_prefix(targets, visible, 0).numpy()
        assert count == len(losses)
        assert mean == pytest.approx(losses.mean(), rel=EXACT)
        assert spread == pytest.approx(losses.std(), rel=1e-8)


def test_what_is_copied_from_further_back_than_a_window_is_not_known() -> None:
    distance, vocabulary = 12, 64
    tokens = np.arange(200) % distance  # each token stands `distance` before its next occurrence
    split = Split(tokens.astype(np.uint16), np.array([0, 100, 200]), ["a", "b"], "toy")
    measured = measure(Copy(vocabulary, distance), split, ratios=[1, 2, 4])
    known = {TRAIN: 0.0, 2 * TRAIN: 1.0, 4 * TRAIN: 1.0}  # 2x: the first target sees 13 tokens
    for length, share in known.items():
        wanted = (1 - share) * math.log(vocabulary)
        assert nll(measured, "controlled", length) == pytest.approx(wanted, abs=1e-12)
        blind = min(length, distance - 1) / length * math.log(vocabulary)
        assert nll(measured, "position", length) == pytest.approx(blind, rel=EXACT)


# ---------------------------------------------------------------- passes


def test_position_takes_every_length_from_one_pass_where_that_is_right() -> None:
    model = oracle(traced_prefix)
    measured = measure(model, SPLIT, protocols=["position"])
    spans = cell(measured, "position", 4 * TRAIN).n_targets // (4 * TRAIN)
    assert model.tokens == spans * 4 * TRAIN
    for length in LENGTHS:
        ratios = [length / TRAIN]
        alone = measure(oracle(traced_prefix), SPLIT, protocols=["position"], ratios=ratios)
        assert nll(measured, "position", length) == nll(alone, "position", length)


def test_position_takes_the_longest_pass_that_a_table_allows() -> None:
    model = oracle(traced_prefix, OracleEncoding(2 * TRAIN))
    rows = perplexities(measure(model, SPLIT, protocols=["position"]))
    assert [row.status for row in rows] == [Status.ok, Status.ok, Status.unsupported]
    assert model.tokens == rows[1].n_targets


def test_position_makes_a_pass_for_each_length_where_prefixes_differ() -> None:
    model = oracle(tracer, OracleEncoding(consistent=False))
    measured = measure(model, SPLIT, protocols=["position"])
    spans = cell(measured, "position", 4 * TRAIN).n_targets // (4 * TRAIN)
    assert model.tokens == spans * sum(LENGTHS)
    assert {length for _, _, length in model.asked} == set(LENGTHS)


def test_the_longest_pass_serves_nonoverlap_and_position() -> None:
    both, one = oracle(tracer), oracle(tracer)
    measure(both, SPLIT, protocols=["nonoverlap", "position"], ratios=[4])
    measure(one, SPLIT, protocols=["position"], ratios=[4])
    assert both.tokens == one.tokens


@pytest.mark.parametrize("protocols", [*([each] for each in MEANS), list(OWN), list(MEANS)])
def test_progress_is_planned_in_the_tokens_that_are_read(protocols: list[str]) -> None:
    model, config = oracle(traced_prefix), make_config(protocols=protocols, max_targets=40)
    measure(model, SPLIT, protocols=protocols, max_targets=40)
    assert planned_tokens(plan(SPLIT, TRAIN, config, "cpu"), config) == model.tokens


def test_speed_is_that_of_the_pass_a_row_was_taken_from() -> None:
    """Not that of a look-up, whichever length came first."""
    for ratios in ([1, 2, 4], [4, 1, 2]):
        measured = measure(oracle(traced_prefix), SPLIT, protocols=["position"], ratios=ratios)
        rows = perplexities(measured)
        assert len({(row.seconds, row.tokens_per_s) for row in rows}) == 1
        row = rows[0]
        assert row.seconds is not None
        assert row.tokens_per_s is not None
        most = max(each.n_targets for each in rows)
        assert row.seconds * row.tokens_per_s == pytest.approx(most)


# ---------------------------------------------------------------- status


def strict_json(path: Path) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def written(measured: Evaluation, folder: Path) -> list[dict[str, str]]:
    """The rows as results.csv has them, after a round trip of all through strict JSON."""
    write_results(measured, folder)
    assert strict_json(folder / "results.json")["rows"]
    assert repr(read_results(folder).rows) == repr(measured.rows)  # repr: nan is not nan
    with (folder / "results.csv").open(newline="") as file:
        return [line for line in csv.DictReader(file) if line["metric"] == "ppl"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("position", [0, 5, 12])
def test_a_loss_that_is_not_a_number_is_never_dropped(position: int, tmp_path: Path) -> None:
    measured = measure(oracle(broken_at(position)), SPLIT)
    places = cell(measured, "position", 4 * TRAIN).n_targets // (4 * TRAIN)
    for row in perplexities(measured):
        least = row.eval_length - TRAIN // 2 if row.protocol == "controlled" else 0
        if not least <= position < row.eval_length:
            assert row.status is Status.ok
            assert row.nll == pytest.approx(2.0, rel=EXACT)
            continue
        assert row.status is Status.nonfinite
        assert row.ppl == row.value == row.nll == math.inf
        assert (row.ci_lo, row.bpb) == (None, None)
        windows = {"controlled": row.n_targets // (TRAIN // 2), "position": places}
        windows["nonoverlap"] = places * 4 * TRAIN // row.eval_length
        assert row.n_nonfinite == windows[row.protocol]
        assert f"{row.n_nonfinite} of {row.n_targets} losses" in row.reason
        assert f"the first at position {position} " in row.reason
    (curve,) = measured.curves
    gaps = [lo for lo, loss in zip(curve.lo, curve.nll, strict=True) if not math.isfinite(loss)]
    assert len(gaps) == 1
    assert gaps[0] == max(lo for lo in curve.lo if lo <= position)
    for row, line in zip(perplexities(measured), written(measured, tmp_path), strict=True):
        assert line["ppl"] == ("inf" if row.status is Status.nonfinite else repr(row.ppl))


@pytest.mark.filterwarnings("error")
def test_an_infinite_loss_is_counted_too() -> None:
    class Sure(Oracle):
        def features(self, tokens: Tensor, *how: Any) -> Tensor:
            logits = super().features(tokens, *how)
            return logits.masked_fill(logits == logits.amin(), -math.inf)

    model = Sure(VOCABULARY, by_visible(lambda v: torch.where(v == 3, 30.0, 0.5)))
    row = cell(measure(model, SPLIT), "position", TRAIN)
    assert row.status is Status.nonfinite
    assert row.n_nonfinite == row.n_targets // TRAIN
    assert "position 2" in row.reason


def test_one_loss_that_is_not_a_number_is_enough() -> None:
    (first, *_) = expected_targets(SPLIT, "controlled", TRAIN, 4 * TRAIN, TRAIN // 2)

    def rule(targets: Tensor, visible: Tensor, length: int) -> Tensor:
        return torch.where(targets == first[0], math.nan, 2.0)

    for row in perplexities(measure(oracle(rule), SPLIT, protocols=["controlled"])):
        assert (row.status, row.n_nonfinite) == (Status.nonfinite, 1)
        assert f"1 of {row.n_targets} losses" in row.reason
        assert f"position {row.eval_length - TRAIN // 2} " in row.reason


def test_a_loss_too_large_for_a_perplexity_is_kept(tmp_path: Path) -> None:
    measured = measure(oracle(by_visible(lambda v: 800 + 0 * v), split=MANY), MANY)
    for row in perplexities(measured):
        assert row.status is Status.ok
        assert row.nll == pytest.approx(800, rel=EXACT)
        assert row.ppl == row.value == row.ci_lo == row.ci_hi == math.inf
        assert row.bpb == pytest.approx(800 / math.log(2), rel=EXACT)
    assert {line["ppl"] for line in written(measured, tmp_path)} == {"inf"}


@pytest.mark.parametrize("model", ["oracle", "learned"])
def test_a_table_ends_where_it_ends(model: str) -> None:
    """At the training length itself it is whole; one more is a status, not a crash."""
    split = REAL if model == "learned" else MANY
    tested: LanguageModel = oracle(tracer, OracleEncoding(TRAIN), split)
    limit = f"none is defined for {TRAIN} positions"
    if model == "learned":
        tested, limit = real("learned"), f"learned table has {TRAIN} rows"
    measured = measure(tested, split, ratios=[1, 1.125, 2, 4])
    assert len(perplexities(measured)) == 12
    for row in perplexities(measured):
        if row.eval_length == TRAIN:
            assert row.status is Status.ok
            assert row.ppl is not None
            continue
        assert row.status is Status.unsupported
        assert row.reason == f"{limit}; {row.eval_length} positions requested"
        assert (row.value, row.nll, row.ppl, row.n_targets, row.seconds) == (None,) * 3 + (0, None)
    (curve,) = measured.curves
    assert curve.eval_length == curve.hi[-1] == TRAIN


def test_documents_too_short_are_a_status_with_numbers(tmp_path: Path) -> None:
    split = make_split([20, 32, 7])
    model = oracle(tracer, split=split)
    protocols = [each for each in Protocol if each is not Protocol.induction]  # reads no text
    measured = measure(model, split, ratios=[4.0], protocols=protocols)
    assert {row.protocol for row in measured.rows} == set(protocols)
    for row in measured.rows:
        if row.protocol == "shift":  # its windows are those of 1x
            assert row.status is Status.ok
            continue
        if row.metric in ("gain", "extrapolation_ratio", "effective_length"):
            assert row.status is Status.skipped  # 1x was not asked for
            continue
        assert row.status is Status.not_enough_data
        assert "has 33 tokens; the longest has 32" in row.reason
        assert (row.value, row.ppl, row.n_targets, row.n_docs) == (None, None, 0, 0)
    assert (measured.curves, measured.documents) == ([], [])
    assert {line["ppl"] for line in written(measured, tmp_path)} == {""}


def test_too_little_memory_costs_rows_of_a_batch_never_targets() -> None:
    plenty = numbers(measure(real("rope"), REAL))
    scarce = numbers(measure(Hungry(real("rope"), 4 * TRAIN), REAL))
    assert {row["status"] for row in scarce.values()} == {Status.ok}
    assert_close(scarce, plenty)


def test_a_length_that_does_not_fit_leaves_the_others_alone() -> None:
    plenty = numbers(measure(real("rope"), REAL))
    measured = measure(Hungry(real("rope"), 2 * TRAIN), REAL)
    scarce = numbers(measured)
    for (_, length), row in scarce.items():
        assert row["status"] is (Status.oom if length == 4 * TRAIN else Status.ok)
    assert "one window of 32 tokens" in scarce["nonoverlap", 4 * TRAIN]["reason"]
    fitting = {key: row for key, row in scarce.items() if row["status"] is Status.ok}
    assert_close(fitting, {key: plenty[key] for key in fitting})
    (curve,) = measured.curves
    assert curve.eval_length == 2 * TRAIN


# ---------------------------------------------------------------- batches, order, mode


def assert_close(found: dict[Any, dict[str, Any]], wanted: dict[Any, dict[str, Any]]) -> None:
    """Equal, numbers to 1e-5."""
    assert found.keys() == wanted.keys()
    for key, row in wanted.items():
        for column, value in row.items():
            if isinstance(value, float):
                assert found[key][column] == pytest.approx(value, rel=1e-5), (key, column)
            else:
                assert found[key][column] == value, (key, column)


@pytest.mark.parametrize("encoding", ["rope", "alibi"])
def test_batch_size_changes_no_number(encoding: str) -> None:
    alone = numbers(measure(real(encoding), REAL, batch_tokens=1))
    assert len({row["nll"] for row in alone.values()}) == 8  # two come from the longest pass
    for windows in (3, 8):
        batched = measure(real(encoding), REAL, batch_tokens=windows * 4 * TRAIN)
        assert_close(numbers(batched), alone)


RUNS = {
    "rope": ("rope", None),
    "rope+ntk": ("rope", EXTENSIONS["ntk"]()),
    "rope+yarn": ("rope", EXTENSIONS["yarn"]()),
    "rope+ntk, fixed": ("rope", NtkConfig(factor=4.0)),
    "alibi": ("alibi", None),
    "learned": ("learned", None),
}


@pytest.mark.parametrize("name", RUNS)
def test_order_of_lengths_changes_no_bit(name: str) -> None:
    encoding, extension = RUNS[name]
    model = real(encoding, extension)
    wanted = measure(model, REAL, ratios=[1, 2, 4])
    for ratios in ([4, 1, 2], [2, 4, 1]):
        # The same model again: what an earlier length left behind would show.
        for used in (model, real(encoding, extension)):
            found = measure(used, REAL, ratios=ratios)
            assert numbers(found) == numbers(wanted)
            assert found.curves == wanted.curves


@pytest.mark.parametrize("name", RUNS)
def test_a_length_alone_is_measured_as_among_others(name: str) -> None:
    encoding, extension = RUNS[name]
    among = numbers(measure(real(encoding, extension), REAL))
    for ratio in (1, 2, 4):
        alone = numbers(measure(real(encoding, extension), REAL, ratios=[ratio]))
        for key, row in alone.items():
            if key[0] == "position":  # may be cut from a longer pass: equal up to rounding
                assert_close({key: row}, {key: among[key]})
            else:
                assert row == among[key]


def test_extension_is_nothing_at_the_training_length_and_something_beyond() -> None:
    plain = numbers(measure(real("rope"), REAL))
    for name in ("ntk", "yarn"):
        stretched = numbers(measure(real("rope", EXTENSIONS[name]()), REAL))
        for key, row in stretched.items():
            if key[1] == TRAIN:
                assert_close({key: row}, {key: plain[key]})
            else:
                assert row["nll"] != pytest.approx(plain[key]["nll"], rel=1e-5)


def test_protocols_do_not_depend_on_each_other() -> None:
    """Up to rounding: a pass that serves several has more windows to a batch."""
    together = numbers(measure(real("rope"), REAL, protocols=OWN))
    for protocol in OWN:
        alone = numbers(measure(real("rope"), REAL, protocols=[protocol]))
        assert_close(alone, {key: together[key] for key in alone})


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_mode_is_left_as_it_was(training: bool) -> None:
    model = real("rope", dropout=0.5).train(training)
    first, second = numbers(measure(model, REAL)), numbers(measure(model, REAL))
    assert first == second == numbers(measure(real("rope"), REAL))
    assert all(module.training is training for module in model.modules())


# ---------------------------------------------------------------- averages, bytes, documents


def test_losses_are_averaged_before_they_become_a_perplexity() -> None:
    """Two documents of 2 and 6 nats: exp(4) = 54.598, not the mean of perplexities, 205.4."""
    split = make_split([33, 33])
    second = int(split.offsets[1])

    def rule(targets: Tensor, visible: Tensor, length: int) -> Tensor:
        return torch.where(targets < second, 2.0, 6.0)

    for row in perplexities(measure(oracle(rule, split=split), split)):
        assert row.ppl == pytest.approx(54.598150033144236, rel=EXACT)


def test_documents_weigh_by_their_targets() -> None:
    split = make_split([33, 33 + 3 * 32])
    second = int(split.offsets[1])
    spans = len(disjoint_ends(split, 4 * TRAIN, TRAIN // 2))
    assert spans > 2  # one in the first document, more in the second

    def rule(targets: Tensor, visible: Tensor, length: int) -> Tensor:
        return torch.where(targets < second, 2.0, 6.0)

    measured = measure(oracle(rule, split=split), split)
    assert nll(measured, "nonoverlap", TRAIN) == pytest.approx(
        (2 + (spans - 1) * 6) / spans, rel=EXACT
    )
    assert nll(measured, "controlled", TRAIN) == pytest.approx((2 + 25 * 6) / 26, rel=EXACT)


def test_document_losses_add_up_to_the_rows() -> None:
    measured = measure(oracle(tracer), SPLIT)
    for row in perplexities(measured):
        own = [
            each
            for each in measured.documents
            if (each.protocol, each.eval_length) == (row.protocol, row.eval_length)
        ]
        assert len({each.document for each in own}) == len(own) == row.n_docs
        assert sum(each.n for each in own) == row.n_targets
        assert math.fsum(each.sum_nll for each in own) / row.n_targets == pytest.approx(row.nll)
        wanted = Counter()
        document = np.repeat(SPLIT.names, SPLIT.lengths)
        for target, *_ in expected_targets(SPLIT, row.protocol, row.eval_length, 32, 4):
            wanted[str(document[target])] += 1
        assert {each.document: each.n for each in own} == dict(wanted)


def test_bits_per_byte_of_bytes_is_the_loss_in_bits() -> None:
    for row in perplexities(measure(oracle(tracer), SPLIT)):
        assert row.nll is not None
        assert row.bpb == pytest.approx(row.nll / math.log(2), rel=1e-14)


def test_bits_per_byte_counts_the_bytes_of_targets_alone() -> None:
    sizes = np.random.default_rng(0).integers(1, 12, VOCABULARY)
    for row in perplexities(
        measure(oracle(traced_prefix), SPLIT, byte_lengths=sizes, max_targets=40)
    ):
        model = oracle(traced_prefix)
        measure(model, SPLIT, protocols=[row.protocol], ratios=[row.ratio], max_targets=40)
        scored = [token + 1 for _, token, _ in model.asked]
        assert len(scored) == row.n_targets
        assert row.nll is not None
        wanted = row.nll * row.n_targets / (math.log(2) * int(sizes[scored].sum()))
        assert row.bpb == pytest.approx(wanted, rel=EXACT)


def test_interval_holds_the_value_and_needs_ten_documents() -> None:
    for row in perplexities(measure(oracle(tracer, split=MANY), MANY)):
        assert row.n_docs == 16
        assert row.ci_lo is not None
        assert row.ci_hi is not None
        assert row.value is not None
        assert row.ci_lo < row.value < row.ci_hi
        assert row.reason == ""
    few = make_split([33] * 9)
    for row in perplexities(measure(oracle(tracer, split=few), few)):
        assert (row.status, row.ci_lo, row.ci_hi) == (Status.ok, None, None)
        assert row.value is not None
        assert "9 documents, fewer than 10" in row.reason


# ---------------------------------------------------------------- buckets of position


@pytest.mark.parametrize("train", [1, 2, 3, 7, 8, 9, 16, 100, 128, 129, 1000, 1024])
@pytest.mark.parametrize("factor", [0.05, 0.3, 0.75, 1, 1.5, 2, 4, 8])
def test_buckets_cover_every_position_once(train: int, factor: float) -> None:
    longest = max(1, round(factor * train))
    buckets = position_buckets(train, longest)
    covered = [position for lo, hi in buckets for position in range(lo, hi)]
    assert covered == list(range(longest))
    assert all(lo < hi for lo, hi in buckets)
    edges = {hi for _, hi in buckets}
    assert edges >= set(range(train, longest + 1, train))
    assert max(hi - lo for lo, hi in buckets) <= max(1, -(-train // 8))


def test_buckets_at_the_default_length() -> None:
    assert position_buckets(128, 144) == [
        *[(0, 1), (1, 3), (3, 7), (7, 15), (15, 16)],
        *[(lo, lo + 16) for lo in range(16, 144, 16)],
    ]
