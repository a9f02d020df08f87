"""Tasks: one right answer each, disjoint splits, honest scores; and the probe on a repeat.

Solvers here read words, never the mask of the generator: an answer in the wrong place is found out.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from scipy import stats
from test_board import points
from torch import Tensor, nn

from posbench.cli import main
from posbench.config import (
    CORPORA,
    BytesConfig,
    Device,
    EvalConfig,
    EvalSettings,
    ModelConfig,
    Precision,
    Protocol,
    TrainConfig,
    TrainSettings,
)
from posbench.config.encodings import ENCODINGS
from posbench.config.tasks import (
    TASKS,
    AdditionConfig,
    CopyConfig,
    DigitOrder,
    MqarConfig,
    ParityConfig,
    PasskeyConfig,
    ReverseConfig,
    SortConfig,
    TaskConfig,
)
from posbench.encodings import Encoding
from posbench.errors import UserError
from posbench.induction import METRIC, SEQUENCES, measure_induction, repeated
from posbench.jobs.evaluate import evaluate
from posbench.jobs.sample import question, sample
from posbench.jobs.train import resume_training, run_training
from posbench.model import IGNORED, LanguageModel
from posbench.report import terminal_table, write_report
from posbench.report.probes import probe_grids
from posbench.results import Evaluation, Row, Status
from posbench.runs import load_run
from posbench.runtime import resolve
from posbench.scoring import answer_scores
from posbench.statistics import wilson_interval
from posbench.task_evaluation import evaluate_task, plan_task, problem_lengths
from posbench.tasks import Draws, TaskDataset, build_task
from posbench.tasks.generators import PAD
from posbench.training import Trainer

CPU = resolve(Device.cpu, Precision.float32, training=False)
VARIANTS: dict[str, TaskConfig] = {
    **{name: kind() for name, kind in TASKS.items()},
    "addition reversed": AdditionConfig(order=DigitOrder.reversed),
    "mqar without filler": MqarConfig(filler=0, keys=30, values=3),
    "mqar with much filler": MqarConfig(filler=3, keys=20, values=2),
    "passkey of one digit": PasskeyConfig(digits=1),
    "copy of two symbols": CopyConfig(symbols=2),
}
every_task = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)


def words_of(config: TaskConfig, tokens: Any) -> list[str]:
    return TaskDataset(config).tokenizer.decode(tokens).split()


# ---------------------------------------------------------------- one right answer


def solve(config: TaskConfig, words: list[str], length: int) -> dict[int, str]:
    """Place -> word of the answer that the question has; raises AssertionError for a bad one."""
    if isinstance(config, MqarConfig):
        return solve_recall(words, length)
    sign = "?" if isinstance(config, PasskeyConfig) else "="
    assert words.count(sign) == 1
    end = words.index(sign)
    question = words[:end]
    match config:
        case CopyConfig():
            answer = question
        case ReverseConfig():
            answer = [question[-1 - place] for place in range(len(question))]
        case SortConfig():
            counts = Counter(int(word) for word in question)
            answer = [str(n) for n in range(config.symbols) for _ in range(counts[n])]
        case ParityConfig():
            assert set(question) <= {"0", "1"}
            answer = ["1" if question.count("1") % 2 else "0"]
        case AdditionConfig():
            answer = add_by_hand(question, config.order is DigitOrder.reversed)
        case PasskeyConfig():
            assert question.count("key") == 1
            first = question.index("key") + 1
            answer = question[first : first + config.digits]
            rest = question[: first - 1] + question[first + config.digits :]
            assert all(word.startswith(".") for word in rest)
            assert len(rest) == length
    if not isinstance(config, PasskeyConfig | AdditionConfig):
        assert len(question) == length
    return {end + 1 + place: word for place, word in enumerate(answer)}


def add_by_hand(question: list[str], lowest_first: bool) -> list[str]:
    """Digit by digit, with a carry."""
    plus = question.index("+")
    left, right = question[:plus], question[plus + 1 :]
    assert len(left) == len(right)
    if not lowest_first:
        left, right = left[::-1], right[::-1]
    carry, total = 0, []
    for a, b in zip(left, right, strict=True):
        carry, digit = divmod(int(a) + int(b) + carry, 10)
        total.append(str(digit))
    total.append(str(carry))
    return total if lowest_first else total[::-1]


def solve_recall(words: list[str], length: int) -> dict[int, str]:
    keys, values = words[: 2 * length : 2], words[1 : 2 * length : 2]
    assert len(set(keys)) == length, "a key with two values has two answers"
    known = dict(zip(keys, values, strict=True))
    answers, place, asked = {}, 2 * length, []
    while place < len(words):
        if words[place].startswith("."):  # filler is never a key and never a value
            place += 1
            continue
        asked.append(words[place])
        answers[place + 1] = known[words[place]]
        place += 2
    assert sorted(asked) == sorted(keys), "every key is asked for once"
    return answers


@every_task
def test_every_question_has_one_answer_and_it_is_the_marked_one(config: TaskConfig) -> None:
    task = build_task(config)
    most = config.limit or 1000
    lengths = [*range(1, 21), *(n for n in (50, 200) if n <= most)]
    checked = 0
    for length in lengths:
        for index in range(100):
            tokens, is_answer = task.draw(length, Draws("solver", length, index))
            assert len(tokens) == len(is_answer) == config.tokens(length)
            assert is_answer.sum() == config.answers(length)
            words = words_of(config, tokens)
            marked = {place: words[place] for place in np.flatnonzero(is_answer)}
            assert marked == solve(config, words, length)
            assert PAD not in words
            assert set(tokens[is_answer]) <= set(task.answers)
            checked += 1
    assert checked >= 2000


@every_task
def test_all_questions_are_drawn_alike(config: TaskConfig) -> None:
    """Every word an answer may hold comes up, each as often as chance has it."""
    task = build_task(config)
    drawn = [task.draw(1, Draws("words", index)) for index in range(4000)]
    place = 0 if VARIANTS["addition reversed"] is config else -1  # not the carry, which is 0 or 1
    seen = Counter(int(tokens[is_answer][place]) for tokens, is_answer in drawn)
    expected = 4000 / len(task.answers)
    assert set(seen) == set(task.answers)
    assert stats.chisquare([seen[t] for t in task.answers], [expected] * len(seen)).pvalue > 1e-4


def test_a_passkey_stands_anywhere() -> None:
    task = build_task(PasskeyConfig())
    key = task.words.index("key")
    places = Counter(
        int(np.flatnonzero(task.draw(9, Draws("depth", i)).tokens == key)[0]) for i in range(5000)
    )
    assert sorted(places) == list(range(10))
    assert stats.chisquare(list(places.values())).pvalue > 1e-4


# ---------------------------------------------------------------- determinism and splits


@every_task
def test_examples_depend_on_their_settings_alone(config: TaskConfig) -> None:
    one, other = TaskDataset(config), TaskDataset(dataclasses.replace(config))
    first = one.examples("test", 7, 20)
    other.examples("test", 3, 5)  # what else is asked for changes nothing
    again = other.examples("test", 7, 40)
    assert first.sha256 != again.sha256
    np.testing.assert_array_equal(first.tokens, again.tokens[:20])
    np.testing.assert_array_equal(first.is_answer, again.is_answer[:20])
    assert one.fingerprint == other.fingerprint
    assert TaskDataset(dataclasses.replace(config, test=0.2)).fingerprint != one.fingerprint


def test_every_task_has_a_fingerprint_of_its_own() -> None:
    prints = [TaskDataset(config).fingerprint for config in VARIANTS.values()]
    assert len(set(prints)) == len(prints)


def test_draws_are_those_of_philox() -> None:
    """The raw stream of the counter-based generator, whose values numpy promises to keep."""
    assert Draws("a", 1).below(10**9, 3).tolist() == Draws("a/1").below(10**9, 3).tolist()
    assert Draws("a", 1).below(10**9, 3).tolist() != Draws("a", 2).below(10**9, 3).tolist()
    assert sorted(Draws("b").shuffled(50)) == list(range(50))


def keys_of(tokens: Any) -> set[bytes]:
    return {np.asarray(row).tobytes() for row in tokens}


def test_no_example_is_in_two_splits() -> None:
    """Exhaustively: 2,048 different examples, and draws enough to have met almost all of them."""
    dataset = TaskDataset(CopyConfig(symbols=2))
    assert dataset.is_split(11)
    train = {dataset.draw("train", 11, Draws("t", i)).tokens.tobytes() for i in range(8000)}
    validation = keys_of(dataset.examples("validation", 11, 1500).tokens)
    test = keys_of(dataset.examples("test", 11, 1500).tokens)
    assert train.isdisjoint(test)
    assert train.isdisjoint(validation)
    assert test.isdisjoint(validation)
    assert len(train | test | validation) > 2000
    assert 0.07 < len(test) / 2048 < 0.13


@every_task
def test_training_never_meets_a_test_example(config: TaskConfig) -> None:
    dataset = TaskDataset(config)
    context = config.tokens(8) - 1
    batches = dataset.batches(context, batch_size=16, seed=0)
    assert batches.longest == 8
    trained = keys_of(batches.example(step, row).tokens for step in range(40) for row in range(16))
    for length in range(1, 9):
        held_out = keys_of(dataset.examples("test", length, 100).tokens)
        if dataset.is_split(length):
            assert trained.isdisjoint(held_out)


def test_lengths_with_few_examples_are_in_every_split_and_results_say_so() -> None:
    dataset = TaskDataset(ParityConfig())
    assert not dataset.is_split(9)  # 512 examples, 5 % of which are too few
    assert dataset.is_split(10)
    assert len(keys_of(dataset.examples("test", 2, 100).tokens)) == 4
    rows = evaluate_task(Flat(4), blank_row(12), plan_task(dataset, 13, few()), few(), CPU).rows
    said = {row.eval_length: "training has them too" in row.reason for row in rows}
    assert said == {3: True, 6: True, 9: True, 12: False, 24: False, 48: False}


def test_training_lengths_are_uniform() -> None:
    batches = TaskDataset(CopyConfig()).batches(context=20, batch_size=50, seed=3)
    lengths = Counter(
        (len(batches.example(step, row).tokens) - 1) // 2 for step in range(60) for row in range(50)
    )
    assert sorted(lengths) == list(range(1, 11))
    assert stats.chisquare(list(lengths.values())).pvalue > 1e-4


# ---------------------------------------------------------------- batches


@every_task
def test_a_batch_asks_for_the_answers_and_nothing_else(config: TaskConfig) -> None:
    dataset = TaskDataset(config)
    context = config.tokens(6) + 2
    batches = dataset.batches(context, batch_size=24, seed=1)
    inputs, targets = batches.batch(5)
    assert inputs.shape == targets.shape == (24, context)
    for row in range(24):
        asked = targets[row] != IGNORED
        last = int(asked.nonzero()[-1])
        # The tokens read, and the last answer, are the whole example.
        reads = int((inputs[row] != 0).sum())
        assert not inputs[row, reads:].any()
        assert last < reads
        tokens = [*inputs[row, :reads].tolist(), *([int(targets[row, last])] * (last == reads - 1))]
        words = words_of(config, tokens)
        if last < reads - 1:  # mqar may end in filler, whose last token is not read
            words.append(".")
        lengths = range(1, batches.longest + 1)
        length = next(n for n in lengths if config.tokens(n) == len(words))
        wanted = solve(config, words, length)
        got = {place + 1: int(targets[row, place]) for place in asked.nonzero().flatten().tolist()}
        assert {place: dataset.task.words[token] for place, token in got.items()} == wanted


def test_batches_are_functions_of_seed_and_step() -> None:
    dataset = TaskDataset(MqarConfig())
    one, other = (dataset.batches(40, 8, seed=4) for _ in range(2))
    later = [one.batch(step) for step in range(6)]
    for step in (5, 0, 3):  # in whatever order
        for left, right in zip(later[step], other.batch(step), strict=True):
            assert torch.equal(left, right)
    assert not torch.equal(later[0][0], later[1][0])
    assert not torch.equal(later[0][0], dataset.batches(40, 8, seed=5).batch(0)[0])


def settings(data: TaskConfig, context: int, encoding: str = "rope", **train: Any) -> TrainSettings:
    return TrainSettings(
        encoding=ENCODINGS[encoding](),
        model=ModelConfig(layers=2, width=32, heads=2),
        data=data,
        tokenizer=BytesConfig(),
        train=TrainConfig(**({"steps": 20, "batch_size": 8, "log_every": 1} | train)),
        context=context,
        device=Device.cpu,
        threads=1,
    )


def test_encodings_get_the_same_batches_and_micro_batches_the_same_gradient() -> None:
    data = CopyConfig(symbols=4)
    trainers = [
        Trainer(settings(data, 12, encoding, micro_batch=size), TaskDataset(data), CPU)
        for encoding, size in (("rope", None), ("alibi", None), ("rope", 3))
    ]
    for left, right in zip(*(each.batches.batch(7) for each in trainers[:2]), strict=True):
        assert torch.equal(left, right)
    whole, parts = trainers[0], trainers[2]
    torch.testing.assert_close(whole._gradients(0), parts._gradients(0), rtol=1e-5, atol=1e-6)
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_mean_over_answer_tokens() -> None:
    data = CopyConfig(symbols=4)
    trainer = Trainer(settings(data, 12), TaskDataset(data), CPU)
    inputs, targets = trainer.batches.batch(0)
    shares = torch.log_softmax(trainer.model(inputs).double(), -1).detach()
    wanted = [
        -float(shares[row, place, targets[row, place]])
        for row in range(8)
        for place in range(12)
        if targets[row, place] != IGNORED
    ]
    assert float(trainer._gradients(0)) == pytest.approx(sum(wanted) / len(wanted), rel=1e-5)


def test_padding_changes_nothing() -> None:
    """A longer context only pads more: the same examples, the same loss and gradient."""
    data = ParityConfig()
    losses = []
    for context in (9, 30):
        trainer = Trainer(settings(data, context, "alibi"), TaskDataset(data), CPU)
        trainer.batches.longest = 8
        losses.append(float(trainer._gradients(0)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# ---------------------------------------------------------------- scores


class Flat(LanguageModel):
    """Says `token` everywhere, or nothing in particular."""

    def __init__(self, vocabulary: int, token: int | None = None) -> None:
        super().__init__()
        self.vocabulary, self.token = vocabulary, token
        self.encoding = Encoding(ENCODINGS["none"](), None)  # type: ignore[arg-type]

    def features(self, tokens: Tensor, positions: Any = None, last: int = 1) -> Tensor:
        logits = torch.zeros(*tokens.shape, self.vocabulary)
        if self.token is not None:
            logits[..., self.token] = 5.0
        return logits[:, -last:]


class Copier(Flat):
    """Knows how to copy: at place t of an example of n symbols it says what stood n before."""

    def features(self, tokens: Tensor, positions: Any = None, last: int = 1) -> Tensor:
        half = tokens.shape[1] // 2
        said = torch.roll(tokens, half, dims=1)
        return (nn.functional.one_hot(said, self.vocabulary) * 50.0)[:, -last:]


class Guesser(Flat):
    """Every token an answer may hold is as likely as the other, drawn anew each time."""

    def __init__(self, vocabulary: int, answers: range) -> None:
        super().__init__(vocabulary)
        self.answers = answers
        self.generator = torch.Generator().manual_seed(0)

    def features(self, tokens: Tensor, positions: Any = None, last: int = 1) -> Tensor:
        logits = torch.full((*tokens.shape, self.vocabulary), -1e4)
        noise = torch.rand(*tokens.shape, len(self.answers), generator=self.generator)
        logits[..., self.answers.start : self.answers.stop] = noise
        return logits[:, -last:]


def blank_row(longest: int) -> Row:
    return Row("run", "none", "none", "", "tiny", 0, longest, 0, 0.0, "")


def few(**changes: Any) -> EvalConfig:
    return EvalConfig(**({"examples": 60, "ratios": [1.0, 2.0, 4.0]} | changes))


def scores(model: Any, data: TaskConfig, context: int, config: EvalConfig) -> dict[Any, Row]:
    dataset = TaskDataset(data)
    plan = plan_task(dataset, context, config)
    rows = evaluate_task(model, blank_row(plan.longest), plan, config, CPU).rows
    return {(row.metric, row.eval_length): row for row in rows}


def test_a_model_that_knows_scores_one_at_every_length() -> None:
    found = scores(Copier(18), CopyConfig(), 16, few(ratios=[1.0, 2.0, 4.0, 8.0]))
    assert sorted({length for _, length in found}) == [2, 4, 6, 8, 16, 32, 64]
    for (metric, length), row in found.items():
        assert row.value == row.ci_hi == 1.0, metric
        assert row.ci_lo == pytest.approx(60 / (60 + 1.959964**2), rel=1e-6)
        assert row.nll == pytest.approx(0, abs=1e-6)
        assert (row.n_docs, row.n_targets, row.ratio) == (60, 60 * length, length / 8)
        assert (row.min_context, row.mean_context) == (length + 1, length + 1 + (length - 1) / 2)
        assert row.status is Status.ok
        assert row.ppl is None


def test_a_mask_that_is_one_off_is_found_out() -> None:
    examples = TaskDataset(CopyConfig()).examples("test", 6, 50)
    early = np.roll(examples.is_answer, -1, axis=1)
    for mask, is_right in ((examples.is_answer, True), (early, False)):
        _, right = answer_scores(Copier(18), examples.tokens, mask, CPU, 8192)
        assert right.shape == (50, 6)
        assert bool(right.all()) is is_right


def test_a_constant_scores_chance() -> None:
    data = CopyConfig(symbols=4)
    config = few(examples=1500)
    found = scores(Flat(6, token=3), data, 6, config)
    for length in (1, 2, 3, 6, 12):
        row = found["token_accuracy", length]
        assert row.ci_lo is not None
        assert row.ci_hi is not None
        assert row.ci_lo < 1 / 4 < row.ci_hi
    assert found["exact_match", 12].value == 0


@every_task
def test_chance_is_what_a_blind_guess_scores(config: TaskConfig) -> None:
    task = build_task(config)
    counted = few(examples=500, ratios=[1.0])
    context = config.tokens(2) - 1
    found = scores(Guesser(len(task.words), task.answers), config, context, counted)
    for (metric, length), row in found.items():
        exact = task.token_chance ** config.answers(length)
        chance = exact if metric == "exact_match" else task.token_chance
        assert row.value is not None
        sigma = math.sqrt(chance * (1 - chance) / 500)
        assert abs(row.value - chance) <= 4 * sigma + 1 / 500
        assert row.reason.startswith(f"chance {chance:.3g}")


def test_the_batch_size_changes_nothing() -> None:
    wide, narrow = (
        scores(Copier(18), CopyConfig(), 16, few(batch_tokens=tokens)) for tokens in (8192, 70)
    )
    for key, row in wide.items():
        assert row.value == narrow[key].value
        assert row.targets_sha256 == narrow[key].targets_sha256


def test_what_is_not_finite_counts_as_wrong_and_has_its_status() -> None:
    class Broken(Copier):
        def features(self, tokens: Tensor, positions: Any = None, last: int = 1) -> Tensor:
            logits = super().features(tokens, positions, last).clone()
            logits[:, -1] = math.nan
            return logits

    for row in scores(Broken(18), CopyConfig(), 8, few()).values():
        assert row.status is Status.nonfinite
        assert row.n_nonfinite == 60
        expected = 0 if row.metric == "exact_match" else 1 - 1 / row.eval_length
        assert row.value == pytest.approx(expected)
        assert row.nll == math.inf


@pytest.mark.parametrize("trials", [1, 7, 60, 500])
def test_wilson_is_that_of_scipy(trials: int) -> None:
    for right in {0, 1, trials // 3, trials - 1, trials}:
        expected = stats.binomtest(right, trials).proportion_ci(method="wilson")
        got = wilson_interval(right / trials, trials)
        assert got == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_wilson_over_examples_covers_tokens_that_hang_together() -> None:
    """Tokens right or wrong as one: an interval over tokens would miss far more than 5 %."""
    generator = np.random.default_rng(1)
    accuracies = (generator.random((2000, 50)) < 0.3).astype(float).mean(axis=1)
    hits = [low <= 0.3 <= high for low, high in (wilson_interval(a, 50) for a in accuracies)]
    assert np.mean(hits) > 0.93
    too_sure = [low <= 0.3 <= high for low, high in (wilson_interval(a, 500) for a in accuracies)]
    assert np.mean(too_sure) < 0.8


def test_lengths_in_range_are_always_tested() -> None:
    assert problem_lengths([1.0, 2.0, 4.0], 64) == {
        0.25: 16, 0.5: 32, 0.75: 48, 1.0: 64, 2.0: 128, 4.0: 256,
    }  # fmt: skip
    assert problem_lengths([4.0], 2) == {0.5: 1, 0.75: 2, 4.0: 8}
    with pytest.raises(UserError, match=r"eval.ratios holds 0.1"):
        problem_lengths([0.1, 1.0], 4)
    with pytest.raises(UserError, match="round to one length"):
        problem_lengths([1.0, 1.1], 4)


def test_lengths_past_the_vocabulary_have_a_status() -> None:
    data = MqarConfig(keys=8, values=4, filler=0)
    found = scores(Flat(29), data, 19, few())  # 5 pairs; 2x is 10
    assert found["exact_match", 5].status is Status.ok
    for length in (10, 20):
        row = found["exact_match", length]
        assert (row.status, row.value) == (Status.not_enough_data, None)
        assert row.reason == f"mqar has at most 8 pairs, and {length} were asked for"


# ---------------------------------------------------------------- from train to report

RUNS = ("none", "rope", "alibi", "learned")
SORT = SortConfig(symbols=4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    for encoding in RUNS:
        run_training(settings(SORT, 8, encoding, checkpoint_every=10), folder / encoding, [])
    return folder


def test_training_learns(tmp_path: Path) -> None:
    """Sorting up to four numbers of four, in some seconds."""
    chosen = settings(SORT, 8, "learned", steps=200, batch_size=32, lr=5e-3, log_every=50)
    run_training(chosen, tmp_path / "run", [])
    run = load_run(tmp_path / "run")
    assert run.manifest["validation_exact_match"]["1x"] > 0.9
    found = evaluate(run.folder, EvalSettings(eval=few(ratios=[1.0])))
    in_range = {row.eval_length: row.value for row in found.rows if row.metric == "exact_match"}
    assert sorted(in_range) == [1, 2, 3, 4]
    assert all(value is not None and value > 0.85 for value in in_range.values())
    text, count = question(run)
    assert count == 4
    answered = sample(run, text, count, 0.0, 0).split()
    examples = TaskDataset(SORT).examples("test", 4, 50)
    model = run.model()
    _, right = answer_scores(model, examples.tokens, examples.is_answer, CPU, 8192)
    greedy = [greedily(model, tokens[:5]) == tokens[5:].tolist() for tokens in examples.tokens]
    assert greedy == right.all(axis=1).tolist()
    assert [word for word in answered if word != "="][:4] == text.split()[:4]


def greedily(model: nn.Module, start: Any) -> list[int]:
    """Four tokens, each the likeliest after what was written itself."""
    tokens = torch.from_numpy(start)[None]
    with torch.inference_mode():
        for _ in range(4):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    written: list[int] = tokens[0, -4:].tolist()
    return written


def test_greedy_decoding_agrees_where_the_model_errs(trained: Path) -> None:
    """After few steps: some answers right, most wrong, and both ways of scoring say which."""
    model = load_run(trained / "rope").model()
    examples = TaskDataset(SORT).examples("test", 4, 200)
    _, right = answer_scores(model, examples.tokens, examples.is_answer, CPU, 8192)
    greedy = [greedily(model, tokens[:5]) == tokens[5:].tolist() for tokens in examples.tokens]
    assert not all(greedy)
    assert greedy == right.all(axis=1).tolist()


def test_a_task_goes_through_both_commands(trained: Path, tmp_path: Path) -> None:
    found = evaluate(trained, EvalSettings(eval=few(ratios=[1.0, 2.0, 4.0, 8.0])), tmp_path / "out")
    assert {row.protocol for row in found.rows} == {"task"}
    assert len(found.rows) == len(RUNS) * 2 * 7
    by_length: dict[int, set[str]] = {}
    for row in found.rows:
        reads = SORT.tokens(row.eval_length) - 1
        beyond = row.encoding == "learned" and reads > 8
        assert row.status is (Status.unsupported if beyond else Status.ok), row
        assert (row.value is None) is beyond
        assert (row.train_length, row.eval_length) == (4, round(4 * row.ratio))
        if not beyond:
            by_length.setdefault(row.eval_length, set()).add(row.targets_sha256)
    assert {length: len(hashes) for length, hashes in by_length.items()} == dict.fromkeys(
        (1, 2, 3, 4, 8, 16, 32), 1
    )
    report = (tmp_path / "out" / "report.md").read_text()
    assert "## Exact match by length, sort" in report
    assert "| chance |" in report
    assert "n/a (table 8)" in report
    assert "Perplexity" not in report
    text = terminal_table(found, 80)
    assert "Exact match by length, sort" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    drawn = points(tmp_path / "out" / "tb" / "rope-seed0", "by_length/exact_match")
    assert [step for step, _ in drawn] == [1, 2, 3, 4, 8, 16, 32]
    record = found.runs[0]
    assert record["task"] == "sort"
    assert record["protocol"]["token_chance"] == 0.25
    assert record["protocol"]["exact_chance"]["4"] == 0.25**4


def test_tasks_and_text_stand_side_by_side(trained: Path, tmp_path: Path) -> None:
    corpus = tiny.write_corpus(tmp_path / "corpus")
    run_training(tiny.small(corpus), tmp_path / "text", [])
    both = [str(trained / "rope"), str(tmp_path / "text")]
    config = few(max_targets=64, protocols=[Protocol.controlled, Protocol.induction])
    found = evaluate(both, EvalSettings(eval=config), tmp_path / "out")
    assert {row.protocol for row in found.rows} == {"task", "controlled", "induction"}
    report = (tmp_path / "out" / "report.md").read_text()
    for title in ("Perplexity, controlled", "Exact match by length, sort", "induction"):
        assert title in report
    write_report(found, tmp_path / "again")


def test_extensions_apply_to_tasks(trained: Path) -> None:
    from posbench.config.extensions import NtkConfig

    config = few(ratios=[1.0, 4.0])
    found = evaluate(trained, EvalSettings(eval=config, extension=NtkConfig()))
    status = {(row.encoding, row.status) for row in found.rows}
    assert ("rope", Status.ok) in status
    assert ("alibi", Status.unsupported) in status
    plain = evaluate(trained / "rope", EvalSettings(eval=config))
    stretched = [row for row in found.rows if row.encoding == "rope"]
    for row, other in zip(plain.rows, stretched, strict=True):
        assert row.targets_sha256 == other.targets_sha256
        assert (row.nll == other.nll) is (row.ratio <= 1)


def test_tuning_works_on_text_alone(trained: Path) -> None:
    from posbench.config.extensions import PiConfig

    chosen = EvalSettings(eval=few(), extension=PiConfig(finetune_steps=5))
    with pytest.raises(UserError, match=r"extension.finetune_steps works on text"):
        evaluate(trained / "rope", chosen)


class Killed(BaseException):
    """Ends a run at once."""


def test_a_resumed_run_is_bit_exact(trained: Path, tmp_path: Path) -> None:
    chosen = settings(SORT, 8, "rope", checkpoint_every=10)
    original = Trainer._advance

    def advance(self: Trainer) -> Any:
        if self.step == 13:
            raise Killed
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_advance", advance)
        with pytest.raises(Killed):
            run_training(chosen, tmp_path / "run", [])
    assert tiny.last(tmp_path / "run").step == 10
    resume_training(tmp_path / "run", True, [], [], [])
    tiny.assert_same_run(trained / "rope", tmp_path / "run")
    records = [each["val_exact_match"] for each in tiny.validations(tmp_path / "run")]
    assert len(records) == 10


def test_another_task_is_refused(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that gives other examples than those trained beside has another fingerprint."""
    from posbench.tasks import generators

    monkeypatch.setattr(generators.Sort, "answer", lambda self, symbols: np.sort(symbols)[::-1])
    with pytest.raises(UserError, match=r"data=sort here is not the task .* fingerprint"):
        evaluate(trained / "rope", EvalSettings(eval=few()))


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=passkey", "context=11"], "Set context=12 or more"),
        (["data=mqar", "data.keys=24"], "data.keys=24 is fewer than the 25 pairs"),
        (["data=copy", "tokenizer=bpe"], "has a vocabulary of its own"),
        (["data=copy", "data.symbols=1"], "data.symbols=1 is too small; the least is 2"),
        (["data=copy", "data.keys=3"], "it belongs to data=mqar"),
        (["data=addition", "data.order=up"], "must be one of plain, reversed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_fit_is_told_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", *words, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_the_longest_example_fills_the_context() -> None:
    for config in VARIANTS.values():
        for context in range(1, 60):
            longest = config.longest(context)
            assert config.tokens(longest + 1) - 1 > context
            assert longest == 0 or config.tokens(longest) - 1 <= context


def test_a_sample_is_in_words(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(trained / "rope"), "temperature=0"]) == 0
    written = capsys.readouterr().out.split()
    assert written.index("=") == 4
    assert len(written) == 9
    assert main(["sample", str(trained / "rope"), "prompt=3 1 =", "tokens=2"]) == 0
    assert capsys.readouterr().out.startswith("3 1 = ")
    assert main(["sample", str(trained / "rope"), "prompt=3 9 ="]) == 2
    assert "'9' is not in the vocabulary of data=sort" in capsys.readouterr().err


def test_tasks_are_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(TASKS) <= set(CORPORA)
    assert main(["list", "data"]) == 0
    listed = capsys.readouterr().out
    assert main(["train", "--help"]) == 0
    explained = capsys.readouterr().out
    for name in TASKS:
        assert f" {name} " in listed
        assert f" {name} " in explained
    assert "data.filler=1" in explained


# ---------------------------------------------------------------- induction


class Rereader(Flat):
    """Uniform on what is new; after a first repeat of `distance`, says what came then."""

    def __init__(self, vocabulary: int, distance: int) -> None:
        super().__init__(vocabulary)
        self.distance = distance

    def features(self, tokens: Tensor, positions: Any = None, last: int = 1) -> Tensor:
        logits = torch.zeros(*tokens.shape, self.vocabulary)
        for place in range(self.distance, tokens.shape[1]):
            again = tokens[:, place - self.distance] == tokens[:, place]
            copied = nn.functional.one_hot(
                tokens[:, place - self.distance + 1], self.vocabulary
            ).float()
            logits[:, place] = 60.0 * copied * again[:, None]
        return logits[:, -last:]


def probe(model: Any, length: int, **changes: Any) -> Row:
    row = dataclasses.replace(blank_row(16), protocol="induction", eval_length=length)
    return measure_induction(model, row, EvalConfig(bootstrap=200, **changes), CPU)


def test_a_repeat_is_random_tokens_twice() -> None:
    sequences = repeated(50, 40)
    assert sequences.tokens.shape == (SEQUENCES, 80)
    np.testing.assert_array_equal(sequences.tokens[:, :40], sequences.tokens[:, 40:])
    counts = np.bincount(sequences.tokens[:, :40].ravel(), minlength=50)
    assert stats.chisquare(counts).pvalue > 1e-4
    assert len(keys_of(sequences.tokens)) == SEQUENCES
    assert sequences.sha256 == repeated(50, 40).sha256


def test_a_perfect_reader_gains_the_entropy_and_one_that_does_not_look_gains_nothing() -> None:
    perfect = probe(Rereader(50, 32), 64)
    assert perfect.metric == METRIC
    assert perfect.value == pytest.approx(math.log(50), rel=1e-5)
    assert perfect.nll == pytest.approx(0, abs=1e-6)
    assert (perfect.n_docs, perfect.n_targets) == (SEQUENCES, SEQUENCES * 31)
    assert (perfect.min_context, perfect.mean_context) == (33, 48.0)
    blind = probe(Flat(50), 64)
    assert blind.value == pytest.approx(0, abs=1e-6)
    assert blind.nll == pytest.approx(math.log(50), rel=1e-6)


def test_the_same_tokens_are_compared() -> None:
    """A model that knows nothing but how likely each token is gains nothing, to the last bit."""

    class Frequencies(Flat):
        def features(self, tokens: Tensor, positions: Any = None, last: int = 1) -> Tensor:
            return torch.linspace(-3, 3, self.vocabulary).expand(*tokens.shape, -1)[:, -last:]

    row = probe(Frequencies(50), 64)
    assert row.value == 0
    assert row.ci_lo == row.ci_hi == 0


def test_a_reader_of_another_distance_gains_nothing() -> None:
    near = probe(Rereader(2000, 16), 64)
    assert near.value is not None
    assert abs(near.value) < 0.02 * math.log(2000)


def test_a_loss_that_is_not_a_number_is_a_row_that_says_so() -> None:
    class Broken(Flat):
        def features(self, tokens: Tensor, positions: Any = None, last: int = 1) -> Tensor:
            return torch.full((*tokens.shape, self.vocabulary), math.nan)[:, -last:]

    row = probe(Broken(50), 64)
    assert row.status is Status.nonfinite
    assert row.value is not None  # no blank
    assert math.isnan(row.value)


def test_a_seed_that_failed_hides_none_that_did_not() -> None:
    good = [dataclasses.replace(probe(Rereader(50, 32), 64), seed=seed) for seed in (0, 1)]
    bad = dataclasses.replace(good[0], seed=2, status=Status.oom, value=None, reason="too long")
    (grid,) = probe_grids(Evaluation([*good, bad]))
    assert grid.rows[0][-1][0] == "3.91 (2 of 3 seeds, else oom (1))"
    assert grid.rows[0][-1][2].startswith("±")
    (grid,) = probe_grids(Evaluation([bad]))
    assert grid.rows[0][-1] == ("oom (1)", "", "")


def test_induction_has_its_statuses(tmp_path: Path) -> None:
    corpus = tiny.write_corpus(tmp_path / "corpus")
    for encoding in ("learned", "rope"):
        run_training(tiny.small(corpus, encoding), tmp_path / "runs" / encoding, [])
    config = few(protocols=[Protocol.induction])
    found = evaluate(tmp_path / "runs", EvalSettings(eval=config), tmp_path / "out")
    rows = {(row.encoding, row.eval_length): row for row in found.rows}
    assert sorted(rows) == [(e, n) for e in ("learned", "rope") for n in (16, 32, 64)]
    for (encoding, length), row in rows.items():
        beyond = encoding == "learned" and length > 16
        assert row.status is (Status.unsupported if beyond else Status.ok)
        assert row.metric == METRIC
        if not beyond:
            assert row.value is not None
            assert row.ci_lo is not None
            assert row.ci_hi is not None
            assert row.ci_lo <= row.value <= row.ci_hi
    assert rows["rope", 16].targets_sha256 == rows["learned", 16].targets_sha256
    assert "gained on a repeat" in (tmp_path / "out" / "report.md").read_text()
    drawn = points(tmp_path / "out" / "tb" / "rope-seed0", "by_length/induction_gain")
    assert [step for step, _ in drawn] == [16, 32, 64]
    assert "nothing measured" not in (tmp_path / "out" / "report.md").read_text().lower()
    assert probe(Flat(50), 3).status is Status.not_enough_data
