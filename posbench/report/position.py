"""Loss by position in the longest window, seeds averaged."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from posbench.report.lines import Subject, labels_of, subjects_of
from posbench.results import Evaluation, PositionCurve


@dataclass
class Trace:
    """One line of the picture: mean loss in nats by bucket, with the range over seeds."""

    label: str
    encoding: str
    extension: str
    train_length: int
    length: int
    centres: list[float]
    nll: list[float]
    low: list[float]
    high: list[float]


def traces_of(evaluation: Evaluation) -> list[Trace]:
    """One trace for each subject, from its longest pass; a loss that is not finite is a gap."""
    longest: dict[tuple[str, str, str], PositionCurve] = {}
    for curve in evaluation.curves:
        key = (curve.run_id, curve.extension, curve.variant)
        if key not in longest or curve.eval_length > longest[key].eval_length:
            longest[key] = curve
    subjects = subjects_of(evaluation)
    labels = labels_of(subjects.values(), evaluation)
    groups: dict[Subject, list[PositionCurve]] = defaultdict(list)
    for key, curve in longest.items():
        groups[subjects.get(key) or _subject(curve)].append(curve)
    return [
        _trace(labels.get(subject) or _plain_label(subject), curves)
        for subject, curves in groups.items()
        if curves[0].nll
    ]


def _subject(curve: PositionCurve) -> Subject:
    variant, run = curve.variant, curve.run_id
    return Subject(curve.encoding, curve.extension, variant, "", curve.train_length, "", run)


def _plain_label(subject: Subject) -> str:
    plain = subject.extension in ("", "none")
    return subject.encoding if plain else f"{subject.encoding} + {subject.extension}"


def _trace(label: str, curves: list[PositionCurve]) -> Trace:
    first = curves[0]
    alike = [curve for curve in curves if (curve.lo, curve.hi) == (first.lo, first.hi)]
    buckets = sorted(zip(first.lo, first.hi, *(c.nll for c in alike), strict=True))
    losses = [[x if math.isfinite(x) else math.nan for x in bucket[2:]] for bucket in buckets]
    return Trace(
        label,
        first.encoding,
        first.extension,
        first.train_length,
        first.eval_length,
        [(bucket[0] + bucket[1]) / 2 for bucket in buckets],
        [sum(values) / len(values) for values in losses],
        [min(values) for values in losses],
        [max(values) for values in losses],
    )
