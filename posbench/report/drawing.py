"""What the two pictures draw: perplexity against length, and loss against position."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

from posbench.report.lines import LIMIT, Cell, Line, Table
from posbench.report.position import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# An encoding keeps its colour in every figure, whatever else is shown. These five were chosen for
# contrast on white and on near-black, and to differ under every common colour blindness; so many
# that all encodings differ do not exist, so every line carries its name as well.
_FIXED = {
    "none": "#8e9393",
    "sinusoidal": "#c88804",
    "learned": "#8c519a",
    "rope": "#368bfa",
    "alibi": "#b83c33",
}
_OTHERS = ("#1f9a76", "#7d57c2", "#8a6d3b", "#2aa0b8", "#a03050", "#6b8e23")
_DASHES: dict[str, str | tuple[int, tuple[float, ...]]] = {
    "none": "-",
    "pi": (0, (1.2, 1.6)),
    "ntk": (0, (6, 2, 1.2, 2)),
    "yarn": (0, (5, 2)),
}
_OTHER_DASHES = ((0, (8, 2)), (0, (3, 1.5)), (0, (8, 2, 1.2, 2, 1.2, 2)), (0, (1.2, 3)))


def color_of(encoding: str) -> str:
    """The colour of an encoding, the same in every figure."""
    return _FIXED.get(encoding) or _OTHERS[zlib.crc32(encoding.encode()) % len(_OTHERS)]


def dash_of(extension: str) -> str | tuple[int, tuple[float, ...]]:
    """The line style of an extension, the same in every figure."""
    other = _OTHER_DASHES[zlib.crc32(extension.encode()) % len(_OTHER_DASHES)]
    return _DASHES.get(extension or "none", other)


# ---------------------------------------------------------------- perplexity against length


def draw_curves(axes: Axes, table: Table | None) -> None:
    """Perplexity against length, log-log; a value above 1e4 is a triangle at the upper edge."""
    axes.set_title(
        "Perplexity against length" + (f" ({table.protocol})" if table else ""), loc="left"
    )
    lines = [line for line in table.lines if _points(line, False)] if table else []
    if table is None or not lines:
        _nothing(axes, "no line has a perplexity to draw")
        return
    by_ratio = len({line.subject.train_length for line in lines}) > 1
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    top = _vertical_range(axes, lines)
    labels = []
    for index, line in enumerate(lines):
        _draw_line(axes, line, by_ratio, top)
        # Side by side, within 3 % of the length: bars on one spot would hide each other.
        share = 2 * index / (len(lines) - 1) - 1 if len(lines) > 1 else 0
        _draw_bars(axes, line, by_ratio, top, aside=1.03**share)
        x, y = _points(line, by_ratio)[-1]
        words = [c.text for r in table.ratios if not _drawn(c := line.cell(r))]
        text = f"{line.label}: {words[-1]}" if words else line.label
        labels.append((x, min(y, top), text, color_of(line.subject.encoding)))
    _lengths_axis(axes, table, by_ratio)
    axes.set_ylabel("perplexity (log scale)")
    _label_ends(axes, labels)


def _drawn(cell: Cell) -> bool:
    """Whether the cell has a height of its own in the picture."""
    return cell.mean is not None and cell.mean <= LIMIT


def _points(line: Line, by_ratio: bool) -> list[tuple[float, float]]:
    return [
        (ratio if by_ratio else cell.length, cell.mean)
        for ratio, cell in sorted(line.cells.items())
        if cell.mean is not None
    ]


def _draw_line(axes: Axes, line: Line, by_ratio: bool, top: float) -> None:
    color = color_of(line.subject.encoding)
    points = _points(line, by_ratio)
    x = [each for each, _ in points]
    y = [min(value, top) for _, value in points]
    axes.plot(x, y, color=color, ls=dash_of(line.subject.extension), lw=2, zorder=3)
    inside = [(a, b) for a, b in points if b <= LIMIT]
    axes.plot([a for a, _ in inside], [b for _, b in inside], "o", color=color, ms=5, zorder=4)
    beyond = [a for a, b in points if b > LIMIT]
    axes.plot(beyond, [top] * len(beyond), "^", color=color, ms=9, zorder=4, clip_on=False)


def _draw_bars(axes: Axes, line: Line, by_ratio: bool, top: float, aside: float) -> None:
    """The interval, or the range over seeds, at each length."""
    color = color_of(line.subject.encoding)
    for ratio, cell in line.cells.items():
        if cell.low is None or cell.high is None or not _drawn(cell):
            continue
        at = (ratio if by_ratio else cell.length) * aside
        ends = [max(cell.low, 1e-9), min(cell.high, top)]
        axes.plot([at, at], ends, color=color, lw=2.5, alpha=0.45, solid_capstyle="butt")


def _vertical_range(axes: Axes, lines: list[Line]) -> float:
    """Set the limits and ticks of the perplexity axis; returns its upper edge.

    A perplexity above 1e4 does not stretch the axis: it would press all others flat.
    """
    cells = [cell for line in lines for cell in line.cells.values() if cell.mean is not None]
    values = [v for c in cells for v in (c.mean, c.low, c.high) if v is not None and v <= LIMIT]
    low, high = (max(min(values), 1e-3), max(values)) if values else (1.0, LIMIT)
    margin = max(high / low, 1.1) ** 0.08
    low, top = float(low / margin), float(high * margin)
    axes.set_ylim(low, top)
    ticks = _log_ticks(low, top)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", color=_grid(), alpha=0.18, lw=0.8)
    return top


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between `low` and `high`: evenly spaced if close together, else 1-2-5."""
    from matplotlib.ticker import MaxNLocator

    if high / low < 8:
        ticks = list(MaxNLocator(6).tick_values(low, high))
    else:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if high / low < 1000 else (1,)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
    return [float(tick) for tick in ticks if low <= tick <= high * (1 + 1e-9)]


def _lengths_axis(axes: Axes, table: Table, by_ratio: bool) -> None:
    """One tick for each length that was measured; a dashed line at 1x."""
    train = table.lines[0].subject.train_length
    at = table.ratios if by_ratio else [table.lines[0].cell(ratio).length for ratio in table.ratios]
    names = [
        f"{r:g}x" if by_ratio else f"{x:g}\n{r:g}x" for r, x in zip(table.ratios, at, strict=True)
    ]
    axes.set_xticks(at, names)
    axes.minorticks_off()
    axes.set_xlim(min(at) / 1.12, max(at) * 1.12)
    axes.axvline(1 if by_ratio else train, color=_grid(), ls=(0, (4, 3)), lw=1, alpha=0.7, zorder=1)
    axes.set_xlabel("length / training length" if by_ratio else "length in tokens (log scale)")


# ---------------------------------------------------------------- loss against position


def draw_position(axes: Axes, traces: list[Trace]) -> None:
    """Loss against position in the longest window, with 1x, 2x, 4x, ... marked."""
    axes.set_title("Loss against position in the window", loc="left")
    if not traces:
        _nothing(axes, "no loss by position was measured")
        return
    by_ratio = len({trace.train_length for trace in traces}) > 1
    train = 1 if by_ratio else traces[0].train_length
    longest = max(trace.length / (trace.train_length if by_ratio else 1) for trace in traces)
    labels = []
    for trace in traces:
        color = color_of(trace.encoding)
        unit = trace.train_length if by_ratio else 1
        x = [centre / unit for centre in trace.centres]
        axes.plot(x, trace.nll, color=color, ls=dash_of(trace.extension), lw=1.8, zorder=3)
        if trace.low != trace.high:
            axes.fill_between(x, trace.low, trace.high, color=color, alpha=0.18, lw=0)
        finite = [(a, b) for a, b in zip(x, trace.nll, strict=True) if math.isfinite(b)]
        if finite:
            short = f": to {trace.length}" if trace.length / unit < longest else ""
            labels.append((*finite[-1], f"{trace.label}{short}", color))
    _mark_multiples(axes, train, longest, by_ratio)
    _loss_range(axes, traces)
    axes.set_ylabel("loss in nats per token")
    axes.grid(axis="y", color=_grid(), alpha=0.18, lw=0.8)
    _label_ends(axes, labels)


def _mark_multiples(axes: Axes, train: float, longest: float, by_ratio: bool) -> None:
    """A tick and a dashed line at each doubling of the training length."""
    doublings = range(math.floor(math.log2(longest / train) + 1e-9) + 1)
    factors = [2**each for each in doublings] or [1]
    axes.set_xlim(0, max(longest, train) * 1.01)
    for factor in factors:
        axes.axvline(train * factor, color=_grid(), ls=(0, (4, 3)), lw=1, alpha=0.7, zorder=1)
    names = [f"{f}x" if by_ratio else f"{train * f:g}\n{f}x" for f in factors]
    axes.set_xticks([0, *(train * factor for factor in factors)], ["0", *names])
    axes.set_xlabel("position / training length" if by_ratio else "position in tokens")


def _loss_range(axes: Axes, traces: list[Trace]) -> None:
    """Fit the losses after the first sixteenth of the training length.

    The first tokens have next to no context; their loss is the same high number for every
    encoding, and an axis that holds it has no room for the differences further on.
    """
    later = [
        value
        for trace in traces
        for centre, *values in zip(trace.centres, trace.low, trace.high, strict=True)
        if centre >= trace.train_length / 16
        for value in values
        if math.isfinite(value)
    ]
    if not later:
        return
    margin = 0.06 * max(max(later) - min(later), 0.1)
    axes.set_ylim(min(later) - margin, max(later) + margin)


# ---------------------------------------------------------------- both


def _grid() -> str:
    import matplotlib

    return str(matplotlib.rcParams["axes.edgecolor"])


def _nothing(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
    axes.set_xticks([])
    axes.set_yticks([])


def _label_ends(axes: Axes, labels: list[tuple[float, float, str, str]]) -> None:
    """Name each line beside its end, pushed apart so that no two names overlap."""
    height = axes.bbox.height / axes.figure.dpi * 72
    gap = 11.5 / height
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [(to_axes.transform((x, y)), text, color) for x, y, text, color in labels]
    ends.sort(key=lambda end: float(end[0][1]))
    places = spread_out([float(end[0][1]) for end in ends], gap)
    for (end, text, color), place in zip(ends, places, strict=True):
        axes.annotate(
            text,
            xy=(float(end[0]), float(end[1])),
            xytext=(1.02, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=color,
            fontsize=9.5,
            fontweight="bold",
            va="center",
            annotation_clip=False,
        )


def spread_out(places: list[float], gap: float) -> list[float]:
    """Ascending `places` moved as little as needed so that neighbours are `gap` apart."""
    groups: list[list[float]] = []  # [sum of wanted first places, members]
    for place in places:
        groups.append([place, 1])
        while len(groups) > 1 and _first(groups[-1], gap) < _last(groups[-2], gap) + gap:
            total, count = groups.pop()
            groups[-1][0] += total
            groups[-1][1] += count
    return [_first(group, gap) + gap * i for group in groups for i in range(int(group[1]))]


def _first(group: list[float], gap: float) -> float:
    return group[0] / group[1] - gap * (group[1] - 1) / 2


def _last(group: list[float], gap: float) -> float:
    return _first(group, gap) + gap * (group[1] - 1)
