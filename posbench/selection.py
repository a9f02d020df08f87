"""The learning rate of each encoding, chosen from a grid on validation alone. No torch here.

Reads of a run its settings, how it ended, and its validation loss at 1x: nothing that was measured
beyond the training length, and nothing of the test split (a choice by either would leak).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posbench.errors import UserError
from posbench.runs import Run, identity, scheme_of

TUNED = ("seed", "train.lr")  # what the runs of one encoding differ in


@dataclass(frozen=True)
class Trial:
    """One run of the grid."""

    folder: Path
    encoding: str
    model: str
    train_length: int
    others: str  # all settings but learning rate and seed
    lr: float
    seed: int
    nll: float  # mean validation loss at 1x, nats; infinite if training diverged


@dataclass(frozen=True)
class Point:
    """One learning rate of one encoding: the mean over its seeds."""

    encoding: str
    model: str
    train_length: int
    lr: float
    seeds: list[int]
    validation_nll: float
    chosen: bool
    edge: str = ""  # `lowest` or `highest` of the grid, if the choice lies there


def trial_of(run: Run) -> Trial:
    """What the choice may know of a run. Raises UserError if it has no validation loss at 1x."""
    settings, status = run.settings, run.manifest.get("status")
    known = identity(settings) | {"validate_targets": settings.train.validate_targets}
    if status == "diverged":
        nll = math.inf
    elif status == "finished":
        nll = _validation(run)
    else:
        raise UserError(
            f"tune=per_encoding: {run.folder} is not finished ({status}), and the choice needs "
            f"every run of the grid. Continue it: posbench train resume={run.folder}"
        )
    return Trial(
        run.folder,
        scheme_of(settings),
        settings.model.name,
        settings.context,
        json.dumps({key: value for key, value in known.items() if key not in TUNED}),
        settings.train.lr,
        settings.seed,
        nll,
    )


def _validation(run: Run) -> float:
    nll = run.manifest.get("validation_nll", {}).get("1x")
    if not isinstance(nll, float):
        raise UserError(
            f"tune=per_encoding: {run.folder} has no validation loss at 1x. Train with 1 in "
            "train.validate_ratios."
        )
    return nll if math.isfinite(nll) else math.inf


def choose(trials: Sequence[Trial]) -> tuple[list[Path], list[Point]]:
    """The folders to evaluate, in the order given, and every point of the grid.

    For each encoding (all settings alike but learning rate and seed) the rate with the least mean
    validation loss over its seeds. Raises UserError unless every encoding has the same rates, each
    with the same seeds.
    """
    groups: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[trial.others].append(trial)
    _check_grid(list(groups.values()))
    folders: set[Path] = set()
    points: list[Point] = []
    for group in groups.values():
        by_rate: dict[float, list[Trial]] = defaultdict(list)
        for trial in sorted(group, key=lambda trial: (trial.lr, trial.seed)):
            by_rate[trial.lr].append(trial)
        means = {lr: sum(trial.nll for trial in own) / len(own) for lr, own in by_rate.items()}
        best = min(means, key=lambda lr: means[lr])
        if math.isinf(means[best]):
            raise UserError(
                f"tune=per_encoding: encoding={group[0].encoding} diverged at every learning rate "
                f"({_listed(means)}). Leave it out of runs=, or train it with lower ones too."
            )
        folders.update(trial.folder for trial in by_rate[best])
        ends = {min(means): "lowest", max(means): "highest"}
        points += [
            Point(
                group[0].encoding,
                group[0].model,
                group[0].train_length,
                lr,
                [trial.seed for trial in own],
                means[lr],
                lr == best,
                ends.get(lr, "") if lr == best else "",
            )
            for lr, own in by_rate.items()
        ]
    return [trial.folder for trial in trials if trial.folder in folders], points


def _check_grid(groups: list[list[Trial]]) -> None:
    first = groups[0]
    rates = {trial.lr for trial in first}
    if len(rates) < 2:
        raise UserError(
            f"tune=per_encoding has nothing to choose from: all runs have train.lr={_listed(rates)}"
            ". Train a grid: posbench train -m train.lr=1e-3,3e-3 ..."
        )
    grid = {(lr, trial.seed) for lr in rates for trial in first}
    for group in groups:
        own = [(trial.lr, trial.seed) for trial in group]
        if len(own) != len(set(own)):
            raise UserError(
                f"tune=per_encoding: encoding={group[0].encoding} has two runs with one train.lr "
                "and seed; leave one out."
            )
        if set(own) != grid:
            lr, seed = min(grid ^ set(own))
            who, without = (group, first) if (lr, seed) in own else (first, group)
            raise UserError(
                "tune=per_encoding needs the same learning rates and seeds for each encoding: "
                f"train.lr={lr:g} seed={seed} is there for encoding={who[0].encoding} but not for "
                f"encoding={without[0].encoding}."
            )


def _listed(rates: Sequence[float] | set[float] | dict[float, float]) -> str:
    return ",".join(f"{lr:g}" for lr in sorted(rates))
