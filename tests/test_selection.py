"""tune=per_encoding: one grid for all, chosen on 1x validation and on nothing else."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from posbench.config import EvalConfig, EvalSettings, Protocol, Tune
from posbench.errors import UserError
from posbench.jobs.evaluate import evaluate
from posbench.jobs.train import run_training
from posbench.report import terminal_table
from posbench.report.content import content_of
from posbench.report.tuned import learning_rates
from posbench.results import read_results, write_results
from posbench.runs import Run, load_run
from posbench.selection import Trial, choose, trial_of

RATES = (1e-3, 3e-3, 1e-2)


def trials(
    losses: dict[str, list[float]], seeds: int = 2, rates: tuple[float, ...] = RATES
) -> list[Trial]:
    """A grid; `losses[encoding][rate]` are means, the seeds lie around them."""
    return [
        Trial(
            Path(f"{encoding}-{lr}-{seed}"), encoding, "tiny", 64, encoding, lr, seed,
            losses[encoding][place] + 0.01 * (seed - (seeds - 1) / 2),
        )
        for place, lr in enumerate(rates)
        for encoding in losses
        for seed in range(seeds)
    ]  # fmt: skip


def test_each_encoding_gets_the_rate_with_the_least_mean() -> None:
    given = trials({"rope": [2.0, 1.5, 1.8], "alibi": [1.9, 1.95, 2.2]})
    folders, points = choose(given)
    assert {str(folder) for folder in folders} == {
        "rope-0.003-0", "rope-0.003-1", "alibi-0.001-0", "alibi-0.001-1",
    }  # fmt: skip
    assert [(p.encoding, p.lr, p.edge) for p in points if p.chosen] == [
        ("rope", 0.003, ""),
        ("alibi", 0.001, "lowest"),
    ]
    assert len(points) == 6  # all are kept
    assert all(point.seeds == [0, 1] for point in points)
    assert [p.validation_nll for p in points[:3]] == pytest.approx([2.0, 1.5, 1.8])


def test_one_lucky_seed_does_not_decide() -> None:
    given = trials({"rope": [1.6, 1.5, 1.8]})
    lucky = [
        replace(t, nll=1.3) if (t.lr, t.seed) == (1e-3, 0) else
        replace(t, nll=1.9) if (t.lr, t.seed) == (1e-3, 1) else t
        for t in given
    ]  # fmt: skip
    assert [point.lr for point in choose(lucky)[1] if point.chosen] == [3e-3]


def test_a_rate_at_which_one_seed_diverged_is_not_chosen() -> None:
    given = trials({"rope": [2.0, 1.9, 1.5]})
    given = [replace(t, nll=math.inf) if (t.lr, t.seed) == (1e-2, 1) else t for t in given]
    points = choose(given)[1]
    assert [point.lr for point in points if point.chosen] == [3e-3]
    assert points[2].validation_nll == math.inf


def drop(given: list[Trial], encoding: str, lr: float, seed: int) -> list[Trial]:
    return [t for t in given if (t.encoding, t.lr, t.seed) != (encoding, lr, seed)]


BOTH = {"rope": [2.0, 1.9, 1.5], "alibi": [2.0, 1.9, 1.5]}
REFUSED = {
    "a rate missing": (
        [t for t in trials(BOTH) if (t.encoding, t.lr) != ("alibi", 1e-2)],
        r"train.lr=0.01 seed=0 is there for encoding=rope but not for encoding=alibi",
    ),
    "a seed missing": (drop(trials(BOTH), "alibi", 3e-3, 1), r"train.lr=0.003 seed=1 is there"),
    "one too many": (
        [t for t in trials(BOTH) if (t.encoding, t.lr) != ("rope", 1e-3)],
        r"train.lr=0.001 seed=0 is there for encoding=alibi but not for encoding=rope",
    ),
    "a seed missing in the only grid": (
        drop(trials({"rope": [2.0, 1.9, 1.5]}), "rope", 3e-3, 1),
        "train.lr=0.003 seed=1",
    ),
    "twice": ([*trials(BOTH), trials(BOTH)[1]], r"two runs with one train.lr"),
    "one rate": (trials({"rope": [2.0]}, rates=(1e-3,)), "nothing to choose from"),
    "all diverged": (trials({"rope": [math.inf] * 3}), r"rope diverged at every.*0.001,0.003,0.01"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_grid_that_is_not_the_same_for_all_is_refused(case: str) -> None:
    given, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as caught:
        choose(given)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- what the choice may read


class Watched(dict[str, Any]):
    """A mapping that notes what was asked of it."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all of it was read")


def test_only_the_validation_loss_at_1x_is_read_of_a_run(corpus: Path, tmp_path: Path) -> None:
    losses = Watched({"1x": 1.25, "2x": 0.5, "4x": 0.25})
    manifest = Watched(
        {"status": "finished", "validation_nll": losses, "test_nll": 0.1, "tokens_per_s": 9.0}
    )
    trial = trial_of(Run(tmp_path, manifest, tiny.small(corpus)))
    assert trial.nll == 1.25
    assert losses.asked == {"1x"}
    assert manifest.asked == {"status", "validation_nll"}


def test_a_run_that_diverged_is_infinitely_bad(corpus: Path, tmp_path: Path) -> None:
    assert trial_of(Run(tmp_path, {"status": "diverged"}, tiny.small(corpus))).nll == math.inf
    broken = {"status": "finished", "validation_nll": {"1x": math.nan}}
    assert trial_of(Run(tmp_path, broken, tiny.small(corpus))).nll == math.inf


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"status": "running"}, r"is not finished \(running\).*posbench train resume="),
        ({"status": "out of memory"}, "not finished"),
        ({"status": "finished", "validation_nll": {"2x": 1.0}}, "train.validate_ratios"),
    ],
)
def test_a_run_without_a_loss_is_refused(
    manifest: dict[str, Any], message: str, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        trial_of(Run(tmp_path, manifest, tiny.small(corpus)))


# ---------------------------------------------------------------- on real runs


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def grid(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two encodings, two rates (one of them hopeless), two seeds."""
    folder = tmp_path_factory.mktemp("grid")
    for number, (name, lr, seed) in enumerate(
        (name, lr, seed) for name in ("rope", "alibi") for lr in (1e-2, 1e-6) for seed in (0, 1)
    ):
        settings = tiny.small(corpus, name, lr=lr, seed=seed, steps=8)
        run_training(settings, folder / f"{number}-{name}", ["test"])
    return folder


def settings_for(grid: Path, tune: Tune = Tune.per_encoding) -> EvalSettings:
    config = EvalConfig(ratios=[1.0, 2.0], protocols=[Protocol.controlled], max_targets=256)
    return EvalSettings(runs=str(grid), tune=tune, eval=config)


def test_only_the_chosen_runs_are_evaluated_and_all_are_told(grid: Path, tmp_path: Path) -> None:
    evaluation = evaluate(settings=settings_for(grid))
    assert sorted((run["encoding"], run["seed"]) for run in evaluation.runs) == [
        ("alibi", 0), ("alibi", 1), ("rope", 0), ("rope", 1),
    ]  # fmt: skip
    rates = {run["folder"]: load_run(Path(run["folder"])).settings.train.lr
             for run in evaluation.runs}  # fmt: skip
    assert set(rates.values()) == {1e-2}
    write_results(evaluation, tmp_path)
    again = read_results(tmp_path)
    points = again.provenance["tune"]
    assert [(p["encoding"], p["lr"], p["chosen"]) for p in points] == [
        ("rope", 1e-6, False), ("rope", 1e-2, True), ("alibi", 1e-6, False), ("alibi", 1e-2, True),
    ]  # fmt: skip
    (table,) = learning_rates(again)
    assert len(table.rows) == 4
    assert table.notes[0].startswith("rope: 0.01 is the highest rate tried")
    assert re.search(r"^ rope +0\.01 +0, 1 +\d\.\d{4} +chosen", terminal_table(again), re.MULTILINE)
    assert table.title in [section.title for section in content_of(again).sections]
    assert learning_rates(evaluate(settings=settings_for(grid / "0-rope", Tune.none))) == []


def test_the_choice_follows_validation_at_1x_and_nothing_beyond(grid: Path) -> None:
    """Validation said to favour the hopeless rate is believed; losses at 2x are not heard."""
    before: dict[Path, str] = {}
    for path in sorted(grid.glob("*/run.json")):
        before[path] = path.read_text()
        manifest = json.loads(before[path])
        hopeless = manifest["settings"]["train"]["lr"] < 1e-3
        manifest["validation_nll"] |= {"1x": 1.0 if hopeless else 2.0, "2x": 9.0 if hopeless else 0}
        path.write_text(json.dumps(manifest))
    try:
        evaluation = evaluate(settings=settings_for(grid))
    finally:
        for path, text in before.items():
            path.write_text(text)
    chosen = {point["lr"] for point in evaluation.provenance["tune"] if point["chosen"]}
    assert chosen == {1e-6}
