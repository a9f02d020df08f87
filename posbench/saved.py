"""Settings as JSON and back: what a run folder says of its run. Reading one never imports code."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from posbench.config import GROUPS
from posbench.config.fields import default_of


def to_dict(node: Any) -> dict[str, Any]:
    """Settings as plain JSON values."""
    return {
        item.name: to_dict(value) if dataclasses.is_dataclass(value) else _plain(value)
        for item in dataclasses.fields(node)
        for value in [getattr(node, item.name)]
    }


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, list) else value


def from_dict(kind: type[Any], saved: dict[str, Any], prefix: str = "") -> Any:
    """Settings from plain JSON values; raises ValueError naming a key that does not belong.

    A group is rebuilt from the name table, so a saved run can never name code to be imported.
    """
    hints = {item.name: item for item in dataclasses.fields(kind)}
    types = get_type_hints(kind)
    unknown = sorted(set(saved) - set(hints))
    if unknown:
        raise ValueError(f"unknown setting {unknown[0]!r} in {kind.__name__}")
    values = {}
    for key, value in saved.items():
        default = default_of(hints[key])
        if dataclasses.is_dataclass(default):
            if not isinstance(value, dict):
                raise ValueError(f"{prefix}{key} must be a mapping, not {value!r}")
            group = _group_type(key, value, type(default))
            values[key] = from_dict(group, value, f"{prefix}{key}.")
        else:
            values[key] = _typed(f"{prefix}{key}", value, types[key])
    return kind(**values)


def _group_type(key: str, value: dict[str, Any], fallback: Any) -> Any:
    table = GROUPS.get(key)
    if table is None:
        return fallback
    name = value.get("name")
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"{key}.name={name!r} is not one of {', '.join(sorted(table))}")
    return table[name]


def _typed(key: str, value: Any, kind: Any) -> Any:
    """`value` as the annotation `kind` has it: a whole number is a float too, a name is an Enum."""
    if kind is Any:
        return value
    if get_origin(kind) is UnionType:  # X | None, the only one there is
        return None if value is None else _typed(key, value, get_args(kind)[0])
    if get_origin(kind) is list and isinstance(value, list):
        return [_typed(key, item, get_args(kind)[0]) for item in value]
    if get_origin(kind) is None:
        if issubclass(kind, StrEnum) and value in list(kind):
            return kind(value)
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is kind:
            return value
    raise ValueError(f"{key}={value!r} is not {_described(kind)}")


def _described(kind: Any) -> str:
    if get_origin(kind) is list:
        return f"a list, each {_described(get_args(kind)[0])}"
    if issubclass(kind, StrEnum):
        return f"one of {', '.join(kind)}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
