"""The figures of a report as PNG and SVG files, and as SVG elements for the page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.files import write_bytes, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_INK = "#1c2027"  # text and axes; in the page it becomes the page's own text colour
_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.fonttype": "none",
    "text.parse_math": False,  # names are names, dollar signs and all
}


@dataclass
class Picture:
    """One figure in both formats."""

    png: bytes
    svg: str  # an element without a size or colour of its own, for a page

    def write(self, folder: Path, name: str) -> None:
        """Write `name`.png and `name`.svg."""
        write_bytes(folder / f"{name}.png", self.png)
        alone = f'<svg {_NAMESPACES} style="color: {_INK}; background: white"'
        write_text(folder / f"{name}.svg", self.svg.replace("<svg", alone, 1))


def picture(name: str, draw: Callable[[Canvas], None]) -> Picture:
    """What `draw` draws; the same bytes each time. `name` keeps ids in one page apart."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": f"posbench-{name}"}):
        canvas = Figure()
        FigureCanvasAgg(canvas)
        draw(canvas)
        png, svg = io.BytesIO(), io.StringIO()
        canvas.savefig(png, format="png", dpi=150, facecolor="white", metadata={"Software": None})
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        canvas.savefig(svg, format="svg", transparent=True, metadata=nothing)
    return Picture(png.getvalue(), _element(svg.getvalue()))


def _element(svg: str) -> str:
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    # Inside HTML the namespaces are implied; a fixed size would not fit a phone.
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg)
    # Several pictures share the page, so an id that nothing refers to would stand there twice.
    used = set(re.findall(r"#([\w-]+)", svg))
    return re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)
