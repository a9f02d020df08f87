"""What a section of a report is made of, as the Markdown, the page and the terminal print it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass
class Grid:
    """A table of words with a heading; a cell is a text, or (value, beside it, below it)."""

    title: str
    header: list[str]
    rows: list[list[Any]]
    about: str = ""
    notes: list[str] = field(default_factory=list)
    kind: ClassVar[str] = "grid"


@dataclass
class Drawing:
    """A figure, by the name of its files."""

    name: str
    alternative: str  # what it shows, for who cannot see it
    caption: str
    kind: ClassVar[str] = "drawing"


@dataclass
class Text:
    """Paragraphs, or a list of points."""

    lines: list[str]
    points: bool = False
    kind: ClassVar[str] = "text"


@dataclass
class Pairs:
    """What is called how, one to a line; folded away on the page if it is long."""

    pairs: list[tuple[str, str]]
    folded: str = ""  # what stands there instead until it is opened
    kind: ClassVar[str] = "pairs"


@dataclass
class Code:
    """Text to copy as it is."""

    text: str
    kind: ClassVar[str] = "code"


Part = Grid | Drawing | Text | Pairs | Code


@dataclass
class Section:
    """One heading and what stands below it; a grid with another title brings that as well."""

    title: str
    parts: list[Part]
