"""What longer context is worth, and how far it is any good: one row per line of the headline."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import mean, stdev

from posbench.report.grid import Grid
from posbench.report.lines import HEADLINE, NOT_MEASURED, Subject, labels_of, subjects_of, word
from posbench.results import Evaluation, Row, Status

ABOUT = (
    "Gain is how much lower the loss is than at 1x on the same targets, in nats per token: above "
    "zero, the longer context helped. The effective length is the longest up to which perplexity "
    "stays within the tolerance of 1x; a cliff is the position from which on the loss is higher "
    "for good than it ever was within the training length."
)


def gains(evaluation: Evaluation) -> Grid | None:
    """Gain by length, effective length and cliff; None if nothing was measured beyond 1x."""
    rows = [row for row in evaluation.rows if row.metric in ("gain", *_ENDS)]
    if not any(row.metric == "gain" and row.status is not Status.skipped for row in rows):
        return None
    subjects = subjects_of(evaluation)
    labels = labels_of(subjects.values(), evaluation)
    grouped: dict[Subject, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[subjects[row.run_id, row.extension, row.variant]].append(row)
    ratios = sorted({row.ratio for row in rows if row.metric == "gain"})
    ends = [metric for metric in _ENDS if any(row.metric == metric for row in rows)]
    lines = []
    for subject, own in grouped.items():
        if subject.extension not in ("", "none") and {r.status for r in own} == {
            Status.unsupported
        }:
            continue  # it does not apply there
        cells: list[object] = [labels[subject]]
        for ratio in ratios:
            cells.append(_gain([r for r in own if (r.metric, r.ratio) == ("gain", ratio)]))
        cells += [_end([row for row in own if row.metric == metric]) for metric in ends]
        lines.append(cells)
    header = ["encoding", *(f"{ratio:g}x" for ratio in ratios), *(_ENDS[end] for end in ends)]
    return Grid(f"Gain over 1x, nats per token ({HEADLINE})", header, lines, ABOUT)


_ENDS = {"effective_length": "effective length", "cliff_position": "cliff"}


def _gain(rows: list[Row]) -> tuple[str, str, str]:
    good = [row for row in rows if row.status is Status.ok and row.value is not None]
    if not good:
        return (word(rows[0]) if rows else NOT_MEASURED, "", "")
    values = [row.value for row in good if row.value is not None]
    text = f"{mean(values):+.3f}"
    if len(good) < len(rows):
        text += f" ({len(good)} of {len(rows)} seeds)"
    if len(values) > 1:
        return (text, "", f"±{stdev(values):.3f}")
    low, high = good[0].ci_lo, good[0].ci_hi
    return (text, "", "" if low is None or high is None else f"[{low:+.3f}, {high:+.3f}]")


def _end(rows: list[Row]) -> str:
    """A length or a position, least to greatest over seeds, and whether it is but a bound."""
    good = [row for row in rows if row.status is Status.ok and row.value is not None]
    if not good:
        return word(rows[0]) if rows else NOT_MEASURED
    words = [_end_of_one(row) for row in sorted(good, key=lambda row: row.value or 0)]
    return words[0] if words[0] == words[-1] else f"{words[0]} to {words[-1]}"


def _end_of_one(row: Row) -> str:
    value = row.value or 0.0
    if math.isinf(value):
        return "none"
    return f"{value:.0f}+" if row.reason.startswith(">=") else f"{value:.0f}"
