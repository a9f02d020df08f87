"""Records of a JSON file checked against the dataclass they were written from."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def record(kind: type[T], saved: Any, where: str, *, complete: bool = False) -> T:
    """`saved` as a `kind`; raises ValueError, beginning with `where`, if it does not fit.

    A field with a default may be missing, unless the record must be `complete`.
    """
    if not isinstance(saved, dict):
        raise ValueError(f"{where} is not a mapping of names to values")
    types, required = _fields(kind)  # type: ignore[arg-type]  # a class is hashable
    for name in saved:
        if name not in types:
            raise ValueError(f"{where}: unknown column {name!r}")
    for name in types if complete else required:
        if name not in saved:
            raise ValueError(f"{where}: column {name!r} is missing")
    for name, value in saved.items():
        if not _fits(value, types[name]):
            raise ValueError(f"{where}: {name}={value!r} is not {_described(types[name])}")
    enums = {
        name: types[name](value)
        for name, value in saved.items()
        if isinstance(types[name], type) and issubclass(types[name], StrEnum)
    }
    return kind(**saved | enums)


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The types of a dataclass's fields, and the names of those without a default."""
    missing = dataclasses.MISSING
    required = tuple(
        item.name
        for item in dataclasses.fields(kind)
        if item.default is missing and item.default_factory is missing
    )
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}, required


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return type(value) in (float, int)
    if kind in (int, str):
        return type(value) is kind
    if get_origin(kind) is UnionType:  # X | None, the only one there is
        return value is None or _fits(value, get_args(kind)[0])
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(each, get_args(kind)[0]) for each in value)
    return isinstance(value, str) and value in list(kind)


def _described(kind: Any) -> str:
    if get_origin(kind) is UnionType:
        return f"{_described(get_args(kind)[0])} or null"
    if get_origin(kind) is list:
        return f"a list, each {_described(get_args(kind)[0])}"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return f"one of {', '.join(kind)}"
    return {int: "a whole number", float: "a number", str: "a text"}[kind]
