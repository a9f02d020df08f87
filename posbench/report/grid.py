"""A table of words, as the Markdown, the page and the terminal print it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Grid:
    """A table of words with a heading; a cell is a text, or (value, beside it, below it)."""

    title: str
    header: list[str]
    rows: list[list[Any]]
    about: str = ""
    notes: list[str] = field(default_factory=list)
