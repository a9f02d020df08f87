"""The learning rates that were tried for each encoding, and which were chosen."""

from __future__ import annotations

import math
from typing import Any

from posbench.report.grid import Grid
from posbench.results import Evaluation

TUNE = "tune"  # in the provenance
ABOUT = (
    "For each encoding the learning rate with the least mean loss on the validation split at the "
    "training length, over the same seeds and from the same grid; only its runs were evaluated. "
    "Nothing longer than the training length took part in the choice."
)


def learning_rates(evaluation: Evaluation) -> list[Grid]:
    """One table with every point of the grid, if there was one."""
    points: list[dict[str, Any]] = evaluation.provenance.get(TUNE, [])
    if not points:
        return []
    several = [key for key in ("model", "train_length") if len({p[key] for p in points}) > 1]
    rows: list[list[Any]] = [
        [
            point["encoding"],
            *(str(point[key]) for key in several),
            f"{point['lr']:g}",
            ", ".join(str(seed) for seed in point["seeds"]),
            _loss(point["validation_nll"]),
            "chosen" if point["chosen"] else "",
        ]
        for point in points
    ]
    notes = [
        f"{point['encoding']}: {point['lr']:g} is the {point['edge']} rate tried; one beyond it "
        "may be better."
        for point in points
        if point["edge"]
    ]
    names = {"model": "model", "train_length": "context"}
    header = ["encoding", *(names[key] for key in several), "train.lr", "seeds", "validation nats"]
    return [Grid("Learning rates tried", [*header, "choice"], rows, ABOUT, notes)]


def _loss(nats: Any) -> str:
    """A loss as it stands in the provenance, where an infinity is a word."""
    return f"{float(nats):.4f}" if math.isfinite(float(nats)) else "diverged"
