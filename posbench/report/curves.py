"""The lines of the figures as numbers: perplexity and gain by length, loss by position."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from posbench.catalog import ENCODING_CARDS, POLICY_CARDS
from posbench.report.extended import shown_lines
from posbench.report.lines import Line, Table, labels_of, subjects_of, word
from posbench.report.position import Trace
from posbench.results import Evaluation, Row, Status

_FAMILIES = {card.id: card.family for card in (*ENCODING_CARDS, *POLICY_CARDS)}
EXTENDED = "under extensions"


@dataclass
class Curve:
    """One line of a figure: means over seeds, and around them what `banded` says."""

    label: str
    encoding: str
    extension: str
    x: list[float]
    y: list[float]
    low: list[float | None]
    high: list[float | None]
    banded: bool  # several seeds, least to greatest; otherwise the interval of one
    word: str = ""  # what stands in place of its last value

    @property
    def family(self) -> str:
        """The panel it belongs to where there are too many for one."""
        if self.extension not in ("", "none"):
            return EXTENDED
        base = self.encoding.split("+")[0]  # a name such as rope+window64 begins with its encoding
        if base != self.encoding:
            return "policy"
        return _FAMILIES.get(base, "other")


@dataclass
class Figure:
    """The lines of one figure, and what its horizontal axis is."""

    curves: list[Curve]
    ticks: list[float]
    ratios: list[float]  # of the ticks, in training lengths
    by_ratio: bool  # x is in training lengths, because they differ; otherwise in tokens


def length_figure(table: Table | None) -> Figure | None:
    """Perplexity against length; None if no line has a number."""
    lines = [line for line in shown_lines(table) if _numbers(line)] if table else []
    if table is None or not lines:
        return None
    by_ratio = len({line.subject.train_length for line in lines}) > 1
    curves = []
    for line in lines:
        ratios = _numbers(line)
        cells = [line.cells[ratio] for ratio in ratios]
        words = [line.cell(r).text for r in table.ratios if line.cell(r).mean is None]
        curves.append(
            Curve(
                line.label,
                line.subject.encoding,
                line.subject.extension,
                [ratio if by_ratio else line.cells[ratio].length for ratio in ratios],
                [math.inf if cell.mean is None else cell.mean for cell in cells],
                [cell.low for cell in cells],
                [cell.high for cell in cells],
                len(line.seeds) > 1,
                words[-1] if words else "",
            )
        )
    return Figure(curves, _ticks(table.ratios, lines, by_ratio), table.ratios, by_ratio)


def _numbers(line: Line) -> list[float]:
    return [ratio for ratio, cell in sorted(line.cells.items()) if cell.mean is not None]


def _ticks(ratios: list[float], lines: list[Line], by_ratio: bool) -> list[float]:
    return ratios if by_ratio else [lines[0].cell(ratio).length for ratio in ratios]


def gain_figure(evaluation: Evaluation) -> Figure | None:
    """Gain over 1x against length, zero at 1x; None if nothing was measured beyond 1x."""
    rows = [row for row in evaluation.rows if row.metric == "gain"]
    subjects = subjects_of(evaluation)
    labels = labels_of(subjects.values(), evaluation)
    groups: dict[str, dict[float, list[Row]]] = defaultdict(lambda: defaultdict(list))
    first: dict[str, Row] = {}
    for row in rows:
        label = labels[subjects[row.run_id, row.extension, row.variant]]
        groups[label][row.ratio].append(row)
        first.setdefault(label, row)
    by_ratio = len({row.train_length for row in rows}) > 1
    curves = []
    for label, columns in groups.items():
        one = first[label]
        # At 1x nothing is gained over 1x.
        start = 1.0 if by_ratio else float(one.train_length)
        curve = Curve(label, one.encoding, one.extension, [start], [0.0], [0.0], [0.0], False)
        for ratio, own in sorted(columns.items()):
            _add_gain(curve, own, ratio if by_ratio else own[0].eval_length)
        if len(curve.x) > 1:
            curves.append(_in_order(curve))
    ratios = sorted({1.0, *(row.ratio for row in rows)})
    if not curves or max(ratios) <= 1:
        return None
    lengths = {1.0: float(rows[0].train_length)}
    lengths |= {row.ratio: float(row.eval_length) for row in rows}
    return Figure(curves, ratios if by_ratio else [lengths[r] for r in ratios], ratios, by_ratio)


def _in_order(curve: Curve) -> Curve:
    """The same curve with x ascending: lengths below 1x come before it."""
    points = sorted(zip(curve.x, curve.y, curve.low, curve.high, strict=True))
    curve.x, curve.y, curve.low, curve.high = (list(each) for each in zip(*points, strict=True))
    return curve


def _add_gain(curve: Curve, rows: list[Row], x: float) -> None:
    values = [row.value for row in rows if row.status is Status.ok and row.value is not None]
    if not values:
        curve.word = word(rows[0])
        return
    if x in curve.x:
        return
    curve.x.append(x)
    curve.y.append(sum(values) / len(values))
    several = len(values) > 1
    curve.banded = curve.banded or several
    curve.low.append(min(values) if several else rows[0].ci_lo)
    curve.high.append(max(values) if several else rows[0].ci_hi)


def position_figure(traces: list[Trace]) -> Figure | None:
    """Loss against position, doublings of the training length marked; None without traces."""
    traces = [trace for trace in traces if any(map(math.isfinite, trace.nll))]
    if not traces:
        return None
    by_ratio = len({trace.train_length for trace in traces}) > 1
    units = [trace.train_length if by_ratio else 1 for trace in traces]
    longest = max(trace.length / trace.train_length for trace in traces)
    curves = []
    for trace, unit in zip(traces, units, strict=True):
        short = trace.length / trace.train_length < longest
        curves.append(
            Curve(
                trace.label,
                trace.encoding,
                trace.extension,
                [centre / unit for centre in trace.centres],
                trace.nll,
                [*trace.low],
                [*trace.high],
                trace.low != trace.high,
                f"to {trace.length}" if short else "",
            )
        )
    factors = [2.0**each for each in range(math.floor(math.log2(longest) + 1e-9) + 1)] or [1.0]
    train = 1 if by_ratio else traces[0].train_length
    return Figure(curves, [train * factor for factor in factors], factors, by_ratio)
