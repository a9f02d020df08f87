"""The figures of a report, drawn: lines with their names at their ends, and where heads look."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posbench.report.curves import Curve, Figure
from posbench.report.diagnostics import Heads
from posbench.report.lines import LIMIT
from posbench.report.style import color_of, dash_of, marker_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

MOST_LINES = 10  # in one panel; more are drawn in a panel for each family
DEEPEST = 0.5  # nats of loss over 1x; a gain below does not stretch the axis
WIDTH, HEIGHT = 8.0, 4.6  # inches, of a figure of one panel
_PANEL = 3.3  # height of one of several
_FONT, _LABEL = 9.5, 12.0  # of a name in points, and the least distance of two
_LEFT, _BELOW = 0.85, 0.78  # inches beside the axes for their own numbers and names


@dataclass
class _Panel:
    """One pair of axes: the lines in colour, and all others behind them in grey."""

    axes: Axes
    curves: list[Curve]
    behind: list[Curve]


# ---------------------------------------------------------------- perplexity against length


def draw_curves(canvas: Canvas, figure: Figure | None) -> None:
    """Perplexity against length, log-log; a value above 1e4 is a triangle at the upper edge."""
    if figure is None:
        _nothing(canvas, "no line has a perplexity to draw")
        return
    low, top = _perplexity_range(figure.curves)
    for panel in _panels(canvas, figure):
        axes = panel.axes
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(low, top)
        ticks = _log_ticks(low, top)
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        _draw(panel, lambda y: y > LIMIT, top, "^")
        _lengths_axis(axes, figure)
        axes.set_ylabel("perplexity (log)")
        _label_ends(panel, lambda y: min(y, top))


def _perplexity_range(curves: list[Curve]) -> tuple[float, float]:
    """A perplexity above 1e4 does not stretch the axis: it would press all others flat."""
    values = [
        value
        for curve in curves
        for value in (*curve.y, *curve.low, *curve.high)
        if value is not None and value <= LIMIT
    ]
    low, high = (max(min(values), 1e-3), max(values)) if values else (1.0, LIMIT)
    margin = max(high / low, 1.1) ** 0.08
    return float(low / margin), float(high * margin)


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between `low` and `high`, evenly spaced if these are close together."""
    from matplotlib.ticker import MaxNLocator

    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps: tuple[float, ...] = (1,)
    if high / low < 1000:
        steps = (1, 2, 5) if high / low > 15 else (1, 1.5, 2, 3, 4, 5, 7)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    if high / low < 2.5:
        ticks = list(MaxNLocator(6).tick_values(low, high))
    return [float(tick) for tick in ticks if low <= tick <= high * (1 + 1e-9)]


def _lengths_axis(axes: Axes, figure: Figure) -> None:
    """One tick for each length that was measured; a dashed line at 1x."""
    names = [
        f"{ratio:g}x" if figure.by_ratio else f"{x:g}\n{ratio:g}x"
        for x, ratio in zip(figure.ticks, figure.ratios, strict=True)
    ]
    axes.set_xticks(figure.ticks, names)
    axes.set_xlim(min(figure.ticks) / 1.12, max(figure.ticks) * 1.12)
    _mark(axes, figure.ticks[0] / figure.ratios[0])
    axes.set_xlabel("length / training length" if figure.by_ratio else "length in tokens (log)")


# ---------------------------------------------------------------- gain from longer context


def draw_gain(canvas: Canvas, figure: Figure | None) -> None:
    """Nats per token gained over 1x; a loss of more than half a nat is a triangle below."""
    if figure is None:
        _nothing(canvas, "nothing was measured beyond 1x")
        return
    values = [
        value
        for curve in figure.curves
        for value in (*curve.y, *curve.low, *curve.high)
        if value is not None and value >= -DEEPEST
    ]
    low, high = min([*values, 0.0]), max([*values, 0.0])
    margin = 0.08 * max(high - low, 0.02)
    if any(y < -DEEPEST for curve in figure.curves for y in curve.y):
        low = min(low, -DEEPEST)
    low, high = low - margin, high + margin
    for panel in _panels(canvas, figure):
        axes = panel.axes
        axes.set_xscale("log", base=2)
        axes.set_ylim(low, high)
        axes.axhline(0, color=_ink(), lw=0.8, alpha=0.6, zorder=1)
        _draw(panel, lambda y: y < -DEEPEST, low, "v")
        _lengths_axis(axes, figure)
        axes.set_ylabel("gain over 1x, nats")
        _label_ends(panel, lambda y: max(y, low), lambda y: f"{y:+.2f}" if y < -DEEPEST else "")


# ---------------------------------------------------------------- loss against position


def draw_position(canvas: Canvas, figure: Figure | None) -> None:
    """Loss against position in the longest window, with 1x, 2x, 4x, ... marked."""
    if figure is None:
        _nothing(canvas, "no loss by position was measured")
        return
    low, high = _loss_range(figure)
    longest = max(max(curve.x) for curve in figure.curves)
    for panel in _panels(canvas, figure):
        axes = panel.axes
        axes.set_ylim(low, high)
        for curve in panel.behind:
            axes.plot(curve.x, curve.y, color=_ink(), alpha=0.15, lw=1, zorder=2)
        for curve in panel.curves:
            color = color_of(curve.encoding)
            axes.plot(curve.x, curve.y, color=color, ls=dash_of(curve.extension), lw=1.8, zorder=3)
            if curve.banded:
                _band(axes, curve, curve.low, curve.high)
        for x in figure.ticks:
            _mark(axes, x)
        axes.set_xlim(0, max(longest, *figure.ticks) * 1.01)
        names = [
            f"{ratio:g}x" if figure.by_ratio else f"{x:g}\n{ratio:g}x"
            for x, ratio in zip(figure.ticks, figure.ratios, strict=True)
        ]
        axes.set_xticks([0, *figure.ticks], ["0", *names])
        axes.set_xlabel(
            "position / training length" if figure.by_ratio else "position in the window, tokens"
        )
        axes.set_ylabel("loss, nats per token")
        _label_ends(panel, lambda y: min(max(y, low), high))


def _loss_range(figure: Figure) -> tuple[float, float]:
    """The losses after the first sixteenth of the training length.

    The first tokens have next to no context; their loss is the same high number for every
    encoding, and an axis that holds it has no room for the differences further on.
    """
    start = figure.ticks[0] / figure.ratios[0] / 16
    later = [
        value
        for curve in figure.curves
        for x, *values in zip(curve.x, curve.y, curve.low, curve.high, strict=True)
        if x >= start
        for value in values
        if value is not None and math.isfinite(value)
    ]
    if not later:
        return 0.0, 1.0
    margin = 0.06 * max(max(later) - min(later), 0.1)
    return min(later) - margin, max(later) + margin


# ---------------------------------------------------------------- where heads look


def draw_heads(canvas: Canvas, pictures: list[Heads]) -> None:
    """For each line a field of layers and heads: weight at distances of 1x or more."""
    across = min(4, len(pictures))
    down = math.ceil(len(pictures) / across)
    canvas.set_size_inches(WIDTH, 0.6 + 1.9 * down)
    fields = canvas.subplots(down, across, squeeze=False)
    for axes in fields.flat[len(pictures) :]:
        axes.remove()
    for axes, picture in zip(fields.flat, pictures, strict=False):
        _draw_heads(axes, picture)
    canvas.subplots_adjust(
        left=0.06, right=0.98, top=1 - 0.35 / (0.6 + 1.9 * down), bottom=0.15 / down + 0.05,
        hspace=0.65, wspace=0.42,
    )  # fmt: skip


def _draw_heads(axes: Axes, picture: Heads) -> None:
    layers, heads = len(picture.weights), len(picture.weights[0])
    axes.pcolormesh(picture.weights, cmap="cividis", vmin=0, vmax=1, edgecolor="face", lw=0.2)
    if layers * heads <= 48:
        for layer, row in enumerate(picture.weights):
            for head, weight in enumerate(row):
                color = "white" if weight < 0.5 else "black"
                place = (head + 0.5, layer + 0.5)
                axes.annotate(
                    f"{weight:.2f}", place, ha="center", va="center", fontsize=7, color=color
                )
    axes.set_title(_shortened(f"{picture.label}, {picture.eval_length} tokens"), fontsize=8.5)
    axes.set_xticks([0.5, heads - 0.5], ["head 1", f"{heads}"] if heads > 1 else ["1", ""])
    axes.set_yticks([0.5, layers - 0.5], ["layer 1", f"{layers}"] if layers > 1 else ["1", ""])
    axes.tick_params(length=0, labelsize=7.5)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)


# ---------------------------------------------------------------- panels


def _panels(canvas: Canvas, figure: Figure) -> list[_Panel]:
    """One panel for all lines, or one for each family with the other lines in grey."""
    curves = figure.curves
    families = list(dict.fromkeys(curve.family for curve in curves))
    longest = max(len(_name(curve)) for curve in curves) + 4
    if len(curves) <= MOST_LINES or len(families) == 1:
        height = max(HEIGHT, 1.2 + len(curves) * _LABEL / 72)
        canvas.set_size_inches(WIDTH, height)
        axes = canvas.subplots()
        _margins(canvas, height, 1, 1, longest, 0.15)
        _plain(axes)
        return [_Panel(axes, curves, [])]
    across = 2
    down = math.ceil(len(families) / across)
    crowd = max(sum(curve.family == family for curve in curves) for family in families)
    height = down * max(_PANEL, 1.4 + crowd * _LABEL / 72)
    canvas.set_size_inches(WIDTH * 1.35, height)
    places = canvas.subplots(down, across, squeeze=False)
    _margins(canvas, height, down, across, longest, 0.45)
    for axes in places.flat[len(families) :]:
        axes.remove()
    panels = []
    for axes, family in zip(places.flat, families, strict=False):
        _plain(axes)
        axes.set_title(family, loc="left")
        own = [curve for curve in curves if curve.family == family]
        panels.append(_Panel(axes, own, [curve for curve in curves if curve.family != family]))
    return panels


def _margins(
    canvas: Canvas, height: float, down: int, across: int, longest: int, top: float
) -> None:
    """Room for axes at the left and below, and for names of `longest` letters at the right."""
    width = canvas.get_size_inches()[0]
    names = min(0.35 + 0.083 * longest, 0.5 * width / across)
    canvas.subplots_adjust(
        left=_LEFT / width,
        right=1 - names / width,
        bottom=_BELOW / height,
        top=1 - top / height,
        wspace=(names + _LEFT) / (width / across - names - _LEFT),
        hspace=(_BELOW + top) / (height / down - _BELOW - top),
    )


def _plain(axes: Axes) -> None:
    axes.minorticks_off()
    axes.grid(axis="y", color=_ink(), alpha=0.18, lw=0.8)


def _draw(panel: _Panel, beyond: Callable[[float], bool], edge: float, triangle: str) -> None:
    """The lines of a panel; values that are `beyond` the axis are triangles at its `edge`."""
    axes = panel.axes
    axes.minorticks_off()
    for curve in panel.behind:
        y = [edge if beyond(value) else value for value in curve.y]
        axes.plot(curve.x, y, color=_ink(), alpha=0.15, lw=1, zorder=2)
    for index, curve in enumerate(panel.curves):
        color = color_of(curve.encoding)
        y = [edge if beyond(value) else value for value in curve.y]
        axes.plot(curve.x, y, color=color, ls=dash_of(curve.extension), lw=2, zorder=3)
        inside = [(a, b) for a, b in zip(curve.x, curve.y, strict=True) if not beyond(b)]
        marker = marker_of(curve.encoding)
        axes.plot([a for a, _ in inside], [b for _, b in inside], marker, color=color, ms=5.5,
                  zorder=4)  # fmt: skip
        out = [a for a, b in zip(curve.x, curve.y, strict=True) if beyond(b)]
        axes.plot(out, [edge] * len(out), triangle, color=color, ms=9, zorder=5, clip_on=False)
        low = [None if v is None else edge if beyond(v) else v for v in curve.low]
        high = [None if v is None else edge if beyond(v) else v for v in curve.high]
        if curve.banded:
            _band(axes, curve, low, high)
        else:
            # Side by side, within 3 % of the length: bars on one spot would hide each other.
            count = len(panel.curves)
            aside = 1.03 ** (2 * index / (count - 1) - 1) if count > 1 else 1.0
            for x, a, b in zip(curve.x, low, high, strict=True):
                if a is not None and b is not None and a != b:
                    axes.plot([x * aside] * 2, [a, b], color=color, lw=2.5, alpha=0.45,
                              solid_capstyle="butt")  # fmt: skip


def _band(axes: Axes, curve: Curve, low: list[float | None], high: list[float | None]) -> None:
    """From the least to the greatest of the seeds; a length that only one seed has has none."""
    known = [
        (x, a, b)
        for x, a, b in zip(curve.x, low, high, strict=True)
        if a is not None and b is not None
    ]
    axes.fill_between(
        [x for x, _, _ in known],
        [a for _, a, _ in known],
        [b for _, _, b in known],
        color=color_of(curve.encoding),
        alpha=0.15,
        lw=0,
        zorder=2.5,
    )


def _mark(axes: Axes, x: float) -> None:
    axes.axvline(x, color=_ink(), ls=(0, (4, 3)), lw=1, alpha=0.6, zorder=1)


def _ink() -> str:
    import matplotlib

    return str(matplotlib.rcParams["axes.edgecolor"])


def _nothing(canvas: Canvas, text: str) -> None:
    canvas.set_size_inches(WIDTH, 1.2)
    axes = canvas.subplots()
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
    axes.set_axis_off()


# ---------------------------------------------------------------- names at the ends of lines


def _name(curve: Curve) -> str:
    word = curve.word.split(" (")[0]
    return _shortened(f"{curve.label}: {word}" if word else curve.label)


def _shortened(text: str, most: int = 44) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _label_ends(
    panel: _Panel,
    seen: Callable[[float], float],
    beside: Callable[[float], str] = lambda _: "",
) -> None:
    """Name each line beside its end, pushed apart so that no two names overlap."""
    axes = panel.axes
    height = axes.bbox.height / axes.figure.dpi * 72
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = []
    for curve in panel.curves:
        points = [p for p in zip(curve.x, curve.y, strict=True) if not math.isnan(p[1])]
        if points:
            x, y = points[-1]
            at = to_axes.transform((x, seen(y)))
            text = f"{_name(curve)} {beside(y)}".rstrip()
            # Ends on one spot at the edge of the axis are in the order of their values.
            ends.append((float(at[1]), y, float(at[0]), text, color_of(curve.encoding)))
    ends.sort()
    places = spread_out([end[0] for end in ends], _LABEL / height, 0.0, 1.0)
    for (y, _, x, text, color), place in zip(ends, places, strict=True):
        lead = {"arrowstyle": "-", "color": color, "lw": 0.8, "alpha": 0.6, "shrinkB": 4}
        # A lead to an end far inside would look like data, a steep one crosses other names.
        near = x > 0.85 and abs(place - y) < 0.1
        axes.annotate(
            text,
            xy=(x, y),
            xytext=(1.03, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=color,
            fontsize=_FONT,
            fontweight="bold",
            va="center",
            annotation_clip=False,
            arrowprops=lead if near else None,
        )


def spread_out(places: list[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending `places` moved as little as needed so that neighbours are `gap` apart.

    All lie between `low` and `high` where there is room for so many.
    """
    last = len(places) - 1
    groups: list[list[float]] = []  # [sum of wanted first places, members]
    for index, place in enumerate(places):
        wanted = max(min(place, high - gap * (last - index)), low + gap * index)
        groups.append([wanted, 1])
        while len(groups) > 1 and _first(groups[-1], gap) < _last(groups[-2], gap) + gap:
            total, count = groups.pop()
            groups[-1][0] += total
            groups[-1][1] += count
    return [_first(group, gap) + gap * i for group in groups for i in range(int(group[1]))]


def _first(group: list[float], gap: float) -> float:
    return group[0] / group[1] - gap * (group[1] - 1) / 2


def _last(group: list[float], gap: float) -> float:
    return _first(group, gap) + gap * (group[1] - 1)
