"""A dataclass field that carries its meaning and its range."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any


def setting(default: Any, help: str, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field with its meaning and, for numbers, the closed range it must lie in."""
    metadata = {"help": help, "low": low, "high": high}
    if isinstance(default, list) or dataclasses.is_dataclass(default):
        return field(default_factory=lambda: _copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _copy(default: Any) -> Any:
    if isinstance(default, list):
        return list(default)
    return dataclasses.replace(default)


def default_of(item: dataclasses.Field[Any]) -> Any:
    """What a field holds when nothing is said."""
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def changed_settings(node: Any) -> dict[str, Any]:
    """The settings of `node` that differ from its defaults, in the order of its fields."""
    values = {
        item.name: (getattr(node, item.name), default_of(item)) for item in dataclasses.fields(node)
    }
    return {name: value for name, (value, default) in values.items() if value != default}
