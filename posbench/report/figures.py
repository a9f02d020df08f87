"""The pictures of a report as files: one PNG, and two SVG elements for the page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.files import write_bytes
from posbench.report.drawing import draw_curves, draw_position
from posbench.report.lines import Table
from posbench.report.position import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#123456"  # text and axes; in the page it becomes the page's own text colour
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "posbench",
}

Draw = Callable[["Axes"], None]


def write_png(path: Path, table: Table | None, traces: list[Trace]) -> None:
    """Both pictures side by side in one PNG."""
    import matplotlib

    with matplotlib.rc_context(_STYLE | _plain_ink()):
        figure = _figure(15.0, 5.2)
        left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.62})
        draw_curves(left, table)
        draw_position(right, traces)
        figure.subplots_adjust(left=0.05, right=0.875, bottom=0.15, top=0.91)
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    write_bytes(path, data.getvalue())


def _plain_ink() -> dict[Any, Any]:
    keys = [key for key, value in _STYLE.items() if value == _INK]
    return dict.fromkeys(keys, "#222222")


def curves_svg(table: Table | None) -> str:
    """Perplexity against length as an inline SVG element."""
    return _svg(lambda axes: draw_curves(axes, table), "curves")


def position_svg(traces: list[Trace]) -> str:
    """Loss against position as an inline SVG element."""
    return _svg(lambda axes: draw_position(axes, traces), "position")


def _svg(draw: Draw, name: str) -> str:
    import matplotlib

    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": f"posbench-{name}"}):
        figure = _figure(8.0, 4.6)
        draw(figure.subplots())
        figure.subplots_adjust(left=0.085, right=0.76, bottom=0.16, top=0.91)
        text = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    # Inside HTML the namespaces are implied; a fixed size would not fit a phone.
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg)
    # Two pictures share the page, so an id that nothing refers to would stand there twice.
    used = set(re.findall(r"#([\w-]+)", svg))
    return re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure
