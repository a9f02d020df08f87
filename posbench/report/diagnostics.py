"""Tables of diagnostics: what is no perplexity, and says why one rises or falls."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import mean, stdev

from posbench.catalog import PROTOCOL_CARDS
from posbench.report.grid import Grid
from posbench.report.lines import NOT_MEASURED, Subject, labels_of, number, subjects_of, word
from posbench.results import Evaluation, HeadAttention, Row, Status

# (protocol, metric) -> title of its table, and how its numbers are written.
_TABLES = {
    ("shift", "max_abs_delta_nll"): ("Largest change of a loss when positions are shifted", ".2e"),
    ("context_ablation", "loss_change"): ("Loss added when far tokens are replaced, nats", "+.3f"),
    ("longppl_self", "key_ppl"): ("Perplexity on key tokens (LongPPL)", ""),
    ("longppl_self", "key_fraction"): ("Share of targets that are key tokens", ".4f"),
    ("attention", "entropy"): ("Attention: entropy, over that of even weights", ".3f"),
    ("attention", "mean_distance"): ("Attention: mean distance, tokens", ".1f"),
    ("attention", "mass_beyond"): ("Attention: weight at distances of 1x or more", ".3f"),
    ("attention", "mass_on_first"): ("Attention: weight on the first token", ".3f"),
}
_ABOUT = {card.id: f"{card.scores} {card.differs}" for card in PROTOCOL_CARDS}


def diagnostic_grids(evaluation: Evaluation) -> list[Grid]:
    """One table for each diagnostic that was asked for."""
    subjects = subjects_of(evaluation)
    labels = labels_of(subjects.values(), evaluation)
    grids, told = [], set()
    for (protocol, metric), (title, form) in _TABLES.items():
        rows = [r for r in evaluation.rows if (r.protocol, r.metric) == (protocol, metric)]
        if not rows:
            continue
        lengths = sorted({row.eval_length for row in rows})
        cells: dict[Subject, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            subject = subjects[row.run_id, row.extension, row.variant]
            cells[subject][row.eval_length].append(row)
        lines: list[list[object]] = [
            [labels[subject], *(_cell(own.get(length, []), form) for length in lengths)]
            for subject, own in cells.items()
        ]
        header = ["encoding", *(_heading(rows, length) for length in lengths)]
        about = "" if protocol in told else _ABOUT[protocol]
        told.add(protocol)
        reasons = dict.fromkeys(r.reason for r in rows if r.reason and r.status is not Status.ok)
        grids.append(Grid(title, header, lines, about, list(reasons)))
    return grids


def _heading(rows: list[Row], length: int) -> str:
    ratios = {row.ratio for row in rows if row.eval_length == length}
    return f"{ratios.pop():g}x ({length})" if len(ratios) == 1 else str(length)


def _cell(rows: list[Row], form: str) -> tuple[str, str, str]:
    """The mean over seeds of one line at one length, and their deviation or the interval."""
    good = [row for row in rows if row.status is Status.ok and row.value is not None]
    if not good:
        return (word(rows[0]) if rows else NOT_MEASURED, "", "")
    values = [row.value for row in good if row.value is not None]

    def shown(value: float) -> str:
        return format(value, form) if form else number(value)

    text = shown(mean(values))
    if len(good) < len(rows):
        text += f" ({len(good)} of {len(rows)} seeds)"
    if len(values) > 1:
        return text, "", f"±{stdev(values):.2g}"
    low, high = good[0].ci_lo, good[0].ci_hi
    return text, "", "" if low is None or high is None else f"[{shown(low)}, {shown(high)}]"


@dataclass
class Heads:
    """Weight at distances of a training length or more, by layer and head, seeds averaged."""

    label: str
    eval_length: int
    weights: list[list[float]]  # [layers][heads]


def heads_of(evaluation: Evaluation) -> list[Heads]:
    """One picture for each line whose attention was looked at, at its longest length."""
    subjects = subjects_of(evaluation)
    labels = labels_of(subjects.values(), evaluation)
    groups: dict[Subject, list[HeadAttention]] = defaultdict(list)
    for each in evaluation.attention:
        groups[subjects[each.run_id, each.extension, each.variant]].append(each)
    found = []
    for subject, heads in groups.items():
        longest = max(each.eval_length for each in heads)
        cells: dict[tuple[int, int], list[float]] = defaultdict(list)
        for each in heads:
            if each.eval_length == longest:
                cells[each.layer, each.head].append(each.mass_beyond)
        layers = 1 + max(layer for layer, _ in cells)
        width = 1 + max(head for _, head in cells)
        grid = [[mean(cells[layer, head]) for head in range(width)] for layer in range(layers)]
        found.append(Heads(labels[subject], longest, grid))
    return found
