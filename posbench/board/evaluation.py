"""The curves of an evaluation: a sub-run for each model, and one for each mean over seeds.

Step is a length in tokens (`by_length`), a position (`by_position`), or a length in percent of the
training length (`by_percent`); no tag mixes them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from posbench.board.events import EventFile, clear, drawable, warn
from posbench.board.hparams import (
    Settings,
    metrics_of,
    settings_of,
    write_experiment,
    write_session,
)
from posbench.board.layout import EVALUATION, drawn, over_seeds, write_layout
from posbench.board.names import distinct, folder_name, run_name
from posbench.catalog import PROTOCOL_CARDS
from posbench.report.lines import HEADLINE, Subject, labels_of, subjects_of, word
from posbench.report.tables import terminal_table
from posbench.results import Evaluation, PositionCurve, Row, Status

Points = dict[int, dict[str, float]]  # step -> tag -> value

# Metrics that are one number for all lengths, or that a ratio of others already shows.
_NO_CURVE = {"effective_length", "cliff_position", "key_fraction", "extrapolation_ratio"}
_WITH_INTERVAL = {"exact_match", "token_accuracy", "induction_gain"}
_STATUSES = {"ppl", *_WITH_INTERVAL}  # whose missing points are explained


@dataclass
class SubRun:
    """One name in TensorBoard's list of runs, and all that is shown of it."""

    name: str
    points: Points = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    settings: Settings | None = None  # of a measured model: its row in the HParams tab
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add one point for each tag whose value can be drawn."""
        kept = {tag: value for tag, value in values.items() if value is not None}
        there = {tag: value for tag, value in kept.items() if drawable(value)}
        if there:
            self.points.setdefault(step, {}).update(there)

    def has(self, tag: str, step: int) -> bool:
        """Whether there is such a point."""
        return tag in self.points.get(step, {})


def write_evaluation_board(evaluation: Evaluation, folder: Path) -> None:
    """Write the sub-runs of an evaluation into `folder`; an error is a warning.

    What an earlier call left in `folder` is removed first: a point is never there twice.
    """
    try:
        clear(folder)
        write_sub_runs(evaluation, folder)
    except OSError as error:
        warn(folder, error)


def write_sub_runs(evaluation: Evaluation, folder: Path) -> None:
    """Write the sub-runs of an evaluation into `folder`; may raise OSError."""
    at = _measured_at(evaluation)
    found = sub_runs(evaluation)
    for each in found:
        with EventFile(folder / each.name) as events:
            for step, values in sorted(each.points.items()):
                events.scalars(step, values, at)
            for tag, text in each.texts.items():
                events.text(tag, text, at)
            if each.settings is not None:
                write_session(events, each.settings, each.metrics, at)
    tags = {tag for each in found for values in each.points.values() for tag in values}
    with EventFile(folder / "results") as events:
        events.text("by_length/results", f"```\n{terminal_table(evaluation, 140)}\n```", at)
        events.text("by_length/protocol", _protocol(evaluation), at)
        if layout := drawn(EVALUATION, tags):
            write_layout(events, layout, at)
        models = [each.settings for each in found if each.settings is not None]
        write_experiment(events, models, evaluation.rows, at)


def _measured_at(evaluation: Evaluation) -> float:
    """When the evaluation was made: a board that is rebuilt shows the same time."""
    try:
        last = evaluation.provenance["evaluations"][-1]
        return datetime.fromisoformat(last["created"]).timestamp()
    except (LookupError, TypeError, ValueError):
        return time.time()


def sub_runs(evaluation: Evaluation) -> list[SubRun]:
    """A sub-run for each run under each extension and variant, then the means over seeds."""
    subjects = subjects_of(evaluation)
    labels = labels_of(subjects.values(), evaluation)
    rows, curves = defaultdict(list), defaultdict(list)
    for row in evaluation.rows:
        rows[row.run_id, row.extension, row.variant].append(row)
    for curve in evaluation.curves:
        curves[curve.run_id, curve.extension, curve.variant].append(curve)
    runs = {run["run_id"]: run for run in evaluation.runs}
    names = distinct(run_name(labels[subjects[key]], rows[key][0].seed) for key in subjects)
    models = [
        _model(name, rows[key], curves[key], runs.get(key[0], {}))
        for key, name in zip(subjects, names, strict=True)
    ]
    groups: dict[Subject, list[SubRun]] = defaultdict(list)
    for subject, each in zip(subjects.values(), models, strict=True):
        groups[subject].append(each)
    several = {
        subject: group
        for subject, group in groups.items()
        if len(group) > 1 and any(each.points for each in group)
    }
    labelled = distinct(folder_name(labels[subject]) for subject in several)
    means = [
        _mean(f"mean/{name}", group) for name, group in zip(labelled, several.values(), strict=True)
    ]
    return [*models, *means]


def _model(
    name: str, rows: list[Row], curves: list[PositionCurve], run: Mapping[str, Any]
) -> SubRun:
    """All that was measured of one run under one extension and variant."""
    found = SubRun(name, metrics=metrics_of(rows))
    at_1x = {row.protocol: row for row in rows if row.metric == "ppl" and row.ratio == 1}
    for row in rows:
        if row.status is Status.ok and row.metric not in _NO_CURVE:
            found.add(row.eval_length, _points_of(row))
    for row in rows:
        if (row.protocol, row.metric, row.status) == (HEADLINE, "ppl", Status.ok):
            _add_ratio(found, row, at_1x.get(HEADLINE))
    if curves:
        longest = max(curves, key=lambda curve: curve.eval_length)
        for low, high, nll in zip(longest.lo, longest.hi, longest.nll, strict=True):
            found.add((low + high) // 2, {"by_position/nll": nll})
    if found.points:
        found.settings = settings_of(rows[0], run)
    missing = [
        row
        for row in rows
        if row.metric in _STATUSES and not found.has(f"by_length/{_quantity(row)}", row.eval_length)
    ]
    if missing:
        found.texts["by_length/status"] = _statuses(missing)
    return found


def _quantity(row: Row) -> str:
    return f"ppl_{row.protocol}" if row.metric == "ppl" else row.metric


def _points_of(row: Row) -> dict[str, float | None]:
    """What one row draws at its length: value, interval, and the loss beside a perplexity."""
    tag = f"by_length/{_quantity(row)}"
    if row.metric == "gain":
        return {"by_length/gain_nats": row.value, **_interval("by_length/gain_ci", row)}
    points = {tag: row.value}
    if row.metric == "ppl":
        points[f"by_length/nll_{row.protocol}"] = row.nll
    elif row.metric == "key_ppl":
        points["by_length/key_nll"] = row.nll
    if row.metric == "ppl" and row.protocol == HEADLINE:
        points |= _interval("by_length/ci", row)
    elif row.metric in _WITH_INTERVAL:
        points |= _interval(f"{tag}_ci", row)
    return points


def _interval(tag: str, row: Row) -> dict[str, float | None]:
    return {f"{tag}_lo": row.ci_lo, f"{tag}_hi": row.ci_hi}


def _add_ratio(found: SubRun, row: Row, base: Row | None) -> None:
    if row.ppl and base and base.ppl:
        ratio = row.ppl / base.ppl
        found.add(row.eval_length, {"by_length/ratio_vs_1x": ratio})
        found.add(round(100 * row.ratio), {"by_percent/ratio_vs_1x": ratio})


def _mean(name: str, models: list[SubRun]) -> SubRun:
    """Mean, least and greatest over seeds, where every seed that was measured has a point."""
    found = SubRun(name)
    measured = [each for each in models if each.points]
    places = dict.fromkeys(
        (step, tag) for each in measured for step, tags in each.points.items() for tag in tags
    )
    lacking = defaultdict(list)
    for step, tag in places:
        group, quantity = tag.split("/", 1)
        if group == "by_percent" or quantity.endswith(("ci_lo", "ci_hi")):
            continue
        values = [each.points[step][tag] for each in measured if each.has(tag, step)]
        if len(values) < len(measured):
            lacking[step, len(values)].append(quantity)
            continue
        band = (sum(values) / len(values), min(values), max(values))
        found.add(step, dict(zip(over_seeds(group, quantity), band, strict=True)))
    notes = [
        f"- {step}: {count} of {len(measured)} seeds have a number: {', '.join(quantities)}"
        for (step, count), quantities in sorted(lacking.items())
    ]
    notes += [f"- {each.name} was not measured" for each in models if not each.points]
    if notes:
        found.texts["by_length_over_seeds/status"] = "\n".join(notes)
    return found


def _statuses(rows: Iterable[Row]) -> str:
    """A table of the points that are not there, with the reason of each."""
    lines = [
        _line(row.protocol, row.eval_length, _quantity(row), word(row), row.status, row.reason)
        for row in sorted(rows, key=lambda row: (row.protocol, row.eval_length))
    ]
    header = _line("protocol", "length", "curve", "shown as", "status", "reason")
    return "\n".join([header, _line(*("---",) * 6), *dict.fromkeys(lines)])


def _line(*cells: object) -> str:
    """A line of a Markdown table."""
    plain = (" ".join(str(cell).split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(plain)} |"


def _protocol(evaluation: Evaluation) -> str:
    """What each protocol scores, and with what the evaluation was made."""
    asked = dict.fromkeys(row.protocol for row in evaluation.rows)
    cards = [card for card in PROTOCOL_CARDS if card.id in asked]
    lines = [f"**{card.id}**: {card.scores} {card.differs}\n" for card in cards]
    facts = {key: value for key, value in evaluation.provenance.items() if key != "evaluations"}
    if evaluation.runs and isinstance(evaluation.runs[0].get("protocol"), dict):
        facts |= evaluation.runs[0]["protocol"]
    table = [_line(key, value) for key, value in facts.items()]
    return "\n".join([*lines, _line("setting", "value"), _line("---", "---"), *table])
