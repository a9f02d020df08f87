"""`posbench runs`: what there is below outputs/, how two of them differ, and removing some."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from posbench.cli import inventory
from posbench.cli.inventory import Item, Kind
from posbench.cli.matching import did_you_mean
from posbench.discovery import outputs
from posbench.errors import UserError

HELP = """posbench runs [PATH...] [--json]: runs, sweeps and evaluations, and how each stands.
posbench runs diff A B: settings, versions and data that differ between two of them.
posbench runs prune PATH...: delete these, after a list and a question.
posbench runs prune [--unfinished] [--failed] [--older-than AGE] [PATH...]: delete such ones.

  PATH           a folder to look in, or to delete; outputs/ if left out. Of a sweep named here
                 every job is listed
  --json         a JSON array of objects, for programs
  --unfinished   stopped or interrupted before their end
  --failed       ended by an error, a signal or a time limit, diverged, or out of memory
  --older-than   nothing in it written for AGE: 12h, 7d, 4w
  --yes          do not ask

Nothing that is running is deleted, and no folder with a file in it that posbench did not write. Of
a sweep, the flags take single jobs; all of it only if they fit every job.

  posbench runs diff outputs/train/20261130-061502-1f3a-rope outputs/train/20261130-070000-2b1c-rope
  posbench runs prune --failed --older-than 7d"""

PRUNE_FLAGS = ("--unfinished", "--failed", "--older-than", "--yes")
_UNITS = {"h": 3600.0, "d": 86400.0, "w": 604800.0}


def run_runs(words: list[str]) -> None:
    """`posbench runs`, `posbench runs diff` and `posbench runs prune`."""
    if "--help" in words or "-h" in words:
        print(HELP)
    elif words[:1] == ["diff"]:
        _diff(words[1:])
    elif words[:1] == ["prune"]:
        _prune(words[1:])
    else:
        _list(words)


def _list(words: list[str]) -> None:
    places = _paths([word for word in words if word != "--json"])
    found = inventory.items(places)
    if "--json" in words:
        print(json.dumps([item.record() for item in found], indent=1, ensure_ascii=False))
    elif found:
        whole = {place.resolve() for place in places}
        rows = [
            row
            for item in found
            for row in (item, *(item.jobs if item.path.resolve() in whole else ()))
        ]
        print(_table(rows))
    else:
        where = ", ".join(str(place) for place in places) or str(outputs())
        print(f"no run, sweep or evaluation below {where}")


def _paths(words: list[str]) -> list[Path]:
    for word in words:
        if word.startswith("-"):
            hint = did_you_mean(word, ("--json", *PRUNE_FLAGS))
            raise UserError(f"posbench runs has no option {word} here.{hint}")
    return [Path(word).expanduser() for word in words]


def _table(rows: list[Item]) -> str:
    head = ("path", "kind", "status", "age", "size", "encoding", "seed")
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    padded = (
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        for line in cells
    )
    return "\n".join(line.rstrip() for line in padded)


def _cells(item: Item) -> tuple[str, ...]:
    age = _age(item.seconds_old) if item.size else ""
    size = _size(item.size) if item.size else ""
    return str(item.path), item.kind, item.progress, age, size, item.encoding, item.seed


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size(count: int) -> str:
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= length:
            return f"{count / length:.1f} {unit}"
    return f"{count} B"


def _diff(words: list[str]) -> None:
    paths = _paths(words)
    if len(paths) != 2:
        raise UserError("posbench runs diff takes two folders: posbench runs diff A B.")
    changed = inventory.differing(*paths)
    if not changed:
        print("no difference")
        return
    width = max(len(key) for key in changed)
    for key, (one, other) in changed.items():
        print(f"{key:<{width}}  {_shown(one)} -> {_shown(other)}")


def _shown(value: Any) -> str:
    return "(not there)" if value is None else str(value)


def _prune(words: list[str]) -> None:
    flags, rest, age = _prune_words(words)
    filters = {"--unfinished", "--failed"} & flags or age is not None
    paths = _paths(rest)
    if not filters and not paths:
        raise UserError("say what to delete: posbench runs prune PATH, or --unfinished, --failed.")
    if filters:
        found = inventory.items(paths)
        doomed = inventory.chosen(found, "--unfinished" in flags, "--failed" in flags, age)
    else:
        doomed = inventory.named(paths)
    if not doomed:
        print("nothing to delete")
        return
    print(_table(doomed), flush=True)
    if "--yes" not in flags and not _agreed(doomed):
        print("nothing was deleted")
        return
    inventory.remove(doomed)
    print(f"deleted {_counted(doomed)}")


def _prune_words(words: list[str]) -> tuple[set[str], list[str], float | None]:
    """Flags, other words, and the age in seconds."""
    flags: set[str] = set()
    rest: list[str] = []
    age = None
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name == "--older-than":
            value = value if equals else (left.pop(0) if left else "")
            age = _seconds(value)
        elif word in PRUNE_FLAGS:
            flags.add(word)
        else:
            rest.append(word)
    return flags, rest, age


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([hdw])", age)
    if match is None:
        raise UserError(f"--older-than {age or 'nothing'} is not an age; 12h, 7d and 4w are.")
    return int(match[1]) * _UNITS[match[2]]


def _agreed(doomed: list[Item]) -> bool:
    if not sys.stdin.isatty():
        raise UserError("nothing was deleted: there is nobody to ask. Add --yes to delete.")
    try:
        return input(f"delete {_counted(doomed)}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _counted(doomed: list[Item]) -> str:
    kinds = [item.kind for item in doomed]
    parts = [
        f"{kinds.count(kind)} {kind}{'s' if kinds.count(kind) > 1 else ''}"
        for kind in Kind
        if kind in kinds
    ]
    return f"{', '.join(parts)} ({_size(sum(item.size for item in doomed))})"
