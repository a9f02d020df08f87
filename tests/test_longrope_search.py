"""LongRoPE's search: what it may look at, where it starts, and that it never ends up worse."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from posbench.config import EvalConfig, EvalSettings, InspectSettings
from posbench.config.encodings import ENCODINGS
from posbench.config.extensions import ExtensionConfig, LongropeConfig, NoExtensionConfig, PiConfig
from posbench.data import Dataset, prepare_with
from posbench.errors import UserError
from posbench.jobs.adapting import adapt
from posbench.jobs.evaluate import evaluate
from posbench.jobs.train import run_training
from posbench.longrope_search import Factors, mutated, search, starting_points, widest
from posbench.model import build_model
from posbench.results import Evaluation, Row, Status, read_results
from posbench.rules import check, check_extension
from posbench.runs import Run, load_run
from posbench.runtime import Runtime
from posbench.scoring import window_losses
from posbench.targets import anchors, digest, targets_at

CPU = Runtime(torch.device("cpu"), torch.float32)
PAIRS, LONGEST = 8, 4 * tiny.CONTEXT


def rising(factors: Factors) -> bool:
    return all(low <= high for low, high in itertools.pairwise(factors))


# ---------------------------------------------------------------- where it starts


def test_starting_points_by_hand() -> None:
    """Each formula written out: PI s, NTK s^(c/(P-1)), YaRN's ramp over whole pairs (d=64, L=512).

    The ends 3 and 16 are those of published YaRN code for this size and length.
    """
    pairs, s = 32, 4.0
    starts = starting_points(pairs, 1e4, 512, s)
    assert list(starts) == ["pi", "ntk", "yarn"]
    ramp = [min(max((c - 3) / (16 - 3), 0), 1) for c in range(pairs)]
    expected = {
        "pi": [s] * pairs,
        "ntk": [s ** (c / (pairs - 1)) for c in range(pairs)],
        "yarn": [1 / (share / s + 1 - share) for share in ramp],
    }
    for name, factors in starts.items():
        assert factors == pytest.approx(expected[name], rel=1e-12), name


@pytest.mark.parametrize("pairs", [1, 2, 8, 64])
@pytest.mark.parametrize("theta", [1.0, 2.0, 1e4, 5e5])
@pytest.mark.parametrize("length", [2, 16, 4096])
@pytest.mark.parametrize("s", [1.0001, 3.0, 49.0])
def test_starting_points_lie_in_the_space(pairs: int, theta: float, length: int, s: float) -> None:
    """Also where NTK (one pair) or YaRN (base 1, or only fast pairs) has nothing to offer."""
    starts = starting_points(pairs, theta, length, s)
    assert starts["pi"] == [s] * pairs
    assert ("ntk" in starts) == (pairs > 1)
    for factors in starts.values():
        assert rising(factors)
        assert len(factors) == pairs
        assert min(factors) >= 1
        assert 1 < max(factors) <= widest(s)


# ---------------------------------------------------------------- how it goes on


@pytest.mark.parametrize("pairs", [1, 2, 8, 48])
@pytest.mark.parametrize("s", [1.01, 4.0, 32.0])
def test_mutations_stay_in_the_space(pairs: int, s: float) -> None:
    generator = random.Random(pairs)
    factors = [s] * pairs
    seen = set()
    for _ in range(500):
        child = mutated(factors, widest(s), generator)
        assert child != factors
        assert rising(child)
        assert min(child) >= 1
        assert 1 < max(child) <= 1.25 * s
        seen.add(tuple(child))
        factors = child
    assert len(seen) > 100  # it does move
    if pairs > 1:
        assert len({len(set(each)) for each in seen}) > 1


def distance(to: Factors) -> Any:
    return lambda factors: sum(math.log(a / b) ** 2 for a, b in zip(factors, to, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_it_comes_nearer_to_a_known_optimum(seed: int) -> None:
    best = [1.0, 1.0, 1.1, 2.0, 3.0, 4.5, 4.8, 5.0]
    starts = starting_points(PAIRS, 1e4, 64, 4.0)
    found = search(starts, widest(4.0), 300, random.Random(seed), distance(best))
    assert found.nll == distance(best)(found.factors)
    assert found.starts == {name: distance(best)(factors) for name, factors in starts.items()}
    assert found.nll < 0.5 * min(found.starts.values())


@pytest.mark.parametrize("trials", [0, 1, 20])
def test_it_is_never_worse_than_where_it_started(trials: int) -> None:
    """On a landscape without any sense; each list is scored once."""
    noise = random.Random(5)
    scored: list[tuple[float, Factors]] = []

    def score(factors: Factors) -> float:
        scored.append((noise.random(), factors))
        return scored[-1][0]

    starts = starting_points(PAIRS, 1e4, 64, 4.0)
    found = search(starts, widest(4.0), trials, random.Random(1), score)
    assert len(scored) == len(starts) + trials
    assert (found.nll, found.factors) == min(scored)
    assert found.nll <= min(found.starts.values())


def test_losses_that_are_not_finite_lose() -> None:
    starts = starting_points(PAIRS, 1e4, 64, 4.0)

    def only_ntk(factors: Factors) -> float:
        return 3.0 if factors == starts["ntk"] else math.nan

    found = search(starts, widest(4.0), 20, random.Random(1), only_ntk)
    assert (found.nll, found.factors) == (3.0, starts["ntk"])
    assert found.starts == {"pi": math.inf, "ntk": 3.0, "yarn": math.inf}


def test_the_seed_decides() -> None:
    starts = starting_points(PAIRS, 1e4, 64, 4.0)

    def found(seed: int) -> Any:
        return search(starts, widest(4.0), 30, random.Random(seed), distance([1.0] * PAIRS))

    assert found(3) == found(3)
    assert found(3) != found(4)


# ---------------------------------------------------------------- on a trained run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("search")
    corpus = tiny.write_corpus(folder / "corpus")
    for name in ("rope", "alibi"):
        run_training(tiny.small(corpus, name, steps=60), folder / name, [])
    return {name: folder / name for name in ("rope", "alibi")}


def measured(
    runs: list[Path], extension: ExtensionConfig, folder: Path | None = None, **config: Any
) -> Evaluation:
    values: dict[str, Any] = {"max_targets": 256, "bootstrap": 100}
    settings = EvalSettings(eval=EvalConfig(**values | config), extension=extension, threads=1)
    return evaluate([str(run) for run in runs], settings, folder)


def numbers(evaluation: Evaluation) -> list[dict[str, Any]]:
    """All that rows say but for the variant and what a clock or a memory meter reads."""
    rows = [dataclasses.asdict(row) for row in evaluation.rows]
    passing = ("variant", "seconds", "tokens_per_s", "peak_mem_mb")
    return [{key: row[key] for key in row if key not in passing} for row in rows]


def outcome(evaluation: Evaluation) -> dict[str, Any]:
    """What the search of the only run says, but for the time it took."""
    (run,) = evaluation.runs
    (each,) = run["adaptations"]
    return {key: value for key, value in each["search"].items() if key != "seconds"}


def dataset_of(run: Run) -> Dataset:
    return prepare_with(run.settings.data, run.tokenizer_json())


class Forbidden:
    """A split that must not be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a forbidden split was read")


def found_by(run: Run, dataset: Any, **config: Any) -> dict[str, Any]:
    settings = EvalSettings(eval=EvalConfig(**config), extension=LongropeConfig(search=6))
    done: dict[str, Any] = {}
    adapt(run.model(), run, dataset, settings, CPU, lambda *_: None, done)
    return done["search"]  # type: ignore[no-any-return]


def test_only_validation_documents_are_read(runs: dict[str, Path]) -> None:
    run = load_run(runs["rope"])
    dataset = dataset_of(run)
    kept = dataclasses.replace(dataset, train=Forbidden(), test=Forbidden())  # type: ignore[arg-type]
    search = found_by(run, kept)
    places = anchors(dataset.validation, LONGEST, tiny.CONTEXT // 2, 4096)
    assert search["targets"] == len(places) * tiny.CONTEXT // 2 > 0
    wanted = digest(dataset.validation, targets_at(places, tiny.CONTEXT // 2))
    assert search["targets_sha256"] == wanted
    assert search["length"] == LONGEST
    reversed_text = dataclasses.replace(
        dataset.validation, tokens=dataset.validation.tokens[::-1].copy()
    )
    other = found_by(run, dataclasses.replace(kept, validation=reversed_text))
    assert other["start_nll"] != search["start_nll"]
    with pytest.raises(AssertionError, match="forbidden split was read"):
        found_by(run, dataclasses.replace(kept, validation=Forbidden()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", [name for name, kind in ENCODINGS.items() if kind().takes(LongropeConfig())]
)
def test_every_encoding_that_takes_factors_can_be_searched(
    runs: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """A factor for each of its frequencies, and the model is left with those found."""
    run = load_run(runs["rope"])
    settings = dataclasses.replace(run.settings, encoding=ENCODINGS[name]())
    dataset = dataset_of(run)
    model = build_model(
        settings.model, settings.encoding, tiny.CONTEXT, dataset.tokenizer.vocabulary, 0
    )
    plain = model.encoding.describe(LONGEST)["inverse_frequencies"]
    asked = EvalSettings(extension=LongropeConfig(search=2))
    done: dict[str, Any] = {}
    adapt(model, Run(tmp_path, {}, settings), dataset, asked, CPU, lambda *_: None, done)
    factors = torch.tensor(done["search"]["factors"], dtype=torch.float64)
    found = model.encoding.describe(LONGEST)["inverse_frequencies"]
    torch.testing.assert_close(found, plain / factors, rtol=1e-12, atol=0)


def test_the_losses_are_those_of_the_extension(runs: dict[str, Path]) -> None:
    """Of PI's start and of the winner, each computed anew on a fresh model."""
    run = load_run(runs["rope"])
    dataset = dataset_of(run)
    search = found_by(run, dataset)
    split, size = dataset.validation, tiny.CONTEXT // 2
    places = anchors(split, LONGEST, size, 4096)
    for factors, expected in (
        ([4.0] * PAIRS, search["start_nll"]["pi"]),
        (search["factors"], search["nll"]),
    ):
        model = run.model()
        model.encoding.extend(LongropeConfig(factors=factors))
        losses = window_losses(model, split.tokens, places, LONGEST, size, CPU, 8192)
        assert losses.mean() == expected
    assert search["nll"] <= min(search["start_nll"].values())


def test_found_factors_typed_in_give_the_very_same_numbers(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    searched = measured([runs["rope"]], LongropeConfig(search=8), tmp_path)
    assert {row.variant for row in searched.rows} == {"search=8"}
    assert {row.status for row in searched.rows} == {Status.ok}
    search = outcome(searched)
    assert (search["trials"], search["factor"], search["length"]) == (8, 4.0, LONGEST)
    assert set(search["start_nll"]) == {"pi", "ntk", "yarn"}
    typed = [
        line.split("extension.factors=")[1]
        for line in (tmp_path / "report.md").read_text().splitlines()
        if "extension.factors=" in line
    ]
    assert len(typed) == 1
    factors = [float(each) for each in typed[0].strip("[]").split(",")]
    assert factors == search["factors"]
    given = measured([runs["rope"]], LongropeConfig(factors=factors))
    (variant,) = {row.variant for row in given.rows}
    assert re.fullmatch(r"factors=[0-9a-f]{8}", variant)  # told from other factors
    assert numbers(given) == numbers(searched)
    assert outcome(read_results(tmp_path)) == search
    # Beyond 1x only: at the training length the model is as it was trained.
    plain = measured([runs["rope"]], NoExtensionConfig())
    at_1x = [each for each in numbers(plain) if each["ratio"] == 1]
    assert [each["nll"] for each in at_1x] == [
        each["nll"] for each in numbers(searched) if each["ratio"] == 1
    ]


def test_the_same_command_finds_the_same(runs: dict[str, Path]) -> None:
    one, two = (measured([runs["rope"]], LongropeConfig(search=5)) for _ in range(2))
    assert outcome(one) == outcome(two)
    assert numbers(one) == numbers(two)


def test_the_scale_given_is_the_scale_searched(runs: dict[str, Path]) -> None:
    search = outcome(measured([runs["rope"]], LongropeConfig(search=3, factor=2.0)))
    assert (search["factor"], search["length"]) == (2.0, 2 * tiny.CONTEXT)
    assert max(search["factors"]) <= 2.5


def test_search_then_tuning(runs: dict[str, Path]) -> None:
    evaluation = measured([runs["rope"]], LongropeConfig(search=3, finetune_steps=2))
    assert {row.variant for row in evaluation.rows} == {"search=3 finetune_steps=2"}
    (adaptation,) = evaluation.runs[0]["adaptations"]
    assert adaptation["search"]["factors"] == adaptation["tuning"]["settings"]["factors"]
    assert outcome(evaluation) == outcome(measured([runs["rope"]], LongropeConfig(search=3)))
    again = LongropeConfig(factors=adaptation["search"]["factors"], finetune_steps=2)
    assert numbers(measured([runs["rope"]], again)) == numbers(evaluation)


def test_other_runs_go_on(runs: dict[str, Path]) -> None:
    evaluation = measured([runs["alibi"], runs["rope"]], LongropeConfig(search=2))
    by_encoding: dict[str, set[Status]] = {}
    for row in evaluation.rows:
        by_encoding.setdefault(row.encoding, set()).add(row.status)
    assert by_encoding == {"alibi": {Status.unsupported}, "rope": {Status.ok}}


def test_short_validation_documents_are_told(runs: dict[str, Path]) -> None:
    rows: list[Row] = measured([runs["rope"]], LongropeConfig(search=2, factor=64.0)).rows
    assert {row.status for row in rows} == {Status.not_enough_data}
    (reason,) = {row.reason for row in rows}
    assert reason.startswith("extension.search=2 needs a validation document of 1025 tokens;")


def test_trials_are_seen(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("posbench.progress.PLAIN_SECONDS", 0.0)
    measured([runs["rope"]], LongropeConfig(search=2))
    shown = capsys.readouterr().err
    assert "rope search 1/5" in shown
    assert "rope search 5/5" in shown


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("extension", "said"),
    [
        (LongropeConfig(), r"needs extension.factors=\[...\].*extension.search=50"),
        (LongropeConfig(factors=[2.0], search=5), "search=5 .* leave out one of the two"),
        (LongropeConfig(search=-1), "extension.search=-1 is too small"),
        (LongropeConfig(search=5, factor=1.0), "search=5 has nothing to look for at 1x"),
    ],
)
def test_bad_settings(extension: ExtensionConfig, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(EvalSettings(extension=extension))


def test_nothing_to_search_at_1x() -> None:
    settings = EvalSettings(eval=EvalConfig(ratios=[0.5, 1.0]), extension=LongropeConfig(search=5))
    with pytest.raises(UserError, match=r"ratio above 1 in eval.ratios"):
        check(settings)


@pytest.mark.parametrize(
    ("extension", "said"),
    [
        (LongropeConfig(search=5), "search=5 needs a trained model"),
        (PiConfig(finetune_steps=5), "finetune_steps=5 tunes a trained model"),
    ],
)
def test_inspect_has_no_trained_model(extension: ExtensionConfig, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_extension(InspectSettings(extension=extension))
