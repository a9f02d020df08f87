"""report.md and report.html from their templates."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from posbench.report.content import Content
from posbench.report.grid import Grid


def markdown(content: Content) -> str:
    """The report as Markdown; its pictures are PNG files beside it."""
    return _environment(autoescape=False).get_template("report.md.j2").render(c=content)


def html(content: Content, drawings: dict[str, str]) -> str:
    """The report as one page that needs no other file and no network.

    `drawings` are SVG elements by the names under which the content speaks of them.
    """
    template = _environment(autoescape=True).get_template("report.html.j2")
    return template.render(c=content, svg={name: Markup(svg) for name, svg in drawings.items()})


def comparison_markdown(
    baseline: str, grids: list[Grid], warnings: list[str], sources: list[str]
) -> str:
    """A comparison with a baseline as Markdown."""
    template = _environment(autoescape=False).get_template("compare.md.j2")
    return template.render(baseline=baseline, grids=grids, warnings=warnings, sources=sources)


def _environment(autoescape: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["words"] = _words
    environment.filters["plain"] = plain
    return environment


# What Markdown takes for code, emphasis, a link or HTML; `kerple_log` and `<0.001` are none.
_MARKUP = re.compile(r"[\\`*]|(?<!\w)_|_(?!\w)|\](?=\()|<(?=[A-Za-z/!?])|~(?=~)|&(?=#?\w+;)")


def plain(text: str) -> str:
    """`text` in one line of Markdown that shows it as it is, whatever it holds."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def _words(cell: object) -> str:
    """A cell in one line of Markdown: its parts apart, and no sign that ends the cell."""
    parts = cell if isinstance(cell, tuple) else (cell,)
    return plain(" ".join(str(part) for part in parts if part != "")).replace("|", "\\|")
