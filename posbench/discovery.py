"""Finding runs: a folder, a sweep, a glob, a list, or the newest of all. No torch here."""

from __future__ import annotations

import glob
import json
import os
from pathlib import Path
from typing import Any

from posbench.errors import UserError
from posbench.runs import MANIFEST


def outputs() -> Path:
    """Where runs go unless told otherwise: $POSBENCH_OUTPUTS, or outputs/ here."""
    return Path(os.environ.get("POSBENCH_OUTPUTS", "outputs"))


def find_folders(where: Any) -> list[Path]:
    """Run folders at or below `where`: a path, a glob, a list of them; None takes the newest.

    Raises UserError, saying where it looked, if there is none.
    """
    if where is None:
        return _newest()
    patterns = [where] if isinstance(where, str | Path) else list(where)
    found: list[Path] = []
    for pattern in patterns:
        matches = [Path(match) for match in sorted(glob.glob(str(pattern)))]  # noqa: PTH207, absolute patterns too
        # os.path, for a name too long for any disk is an error to pathlib.
        if not matches and not os.path.exists(str(pattern)):  # noqa: PTH110
            raise UserError(f"runs={pattern}: no such folder (looked in {Path.cwd()}).")
        below = [run for match in (matches or [Path(str(pattern))]) for run in _below(match)]
        if not below:
            raise UserError(f"runs={pattern}: no posbench run there (no {MANIFEST} below it).")
        found += [run for run in below if run not in found]
    if not found:
        raise UserError("runs=[] names no run. Give a folder, or leave it out for the newest.")
    return found


def _newest() -> list[Path]:
    root = outputs() / "train"
    groups = [_below(child) for child in root.iterdir()] if root.is_dir() else []
    groups = [group for group in groups if group]
    if not groups:
        raise UserError(
            f"no training run found below {root.resolve()}. Train one first, for example: "
            "posbench train encoding=rope. Or name a folder: runs=DIR."
        )
    return max(groups, key=lambda group: max(_started(folder) for folder in group))


def _started(folder: Path) -> str:
    try:
        return str(json.loads((folder / MANIFEST).read_text())["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _below(folder: Path) -> list[Path]:
    return [folder] if (folder / MANIFEST).is_file() else holders(folder, MANIFEST)


def holders(folder: Path, name: str) -> list[Path]:
    """The folders at or below `folder` that hold a file called `name`, job 2 before job 10."""
    return sorted((path.parent for path in folder.rglob(name) if path.is_file()), key=_natural)


def _natural(folder: Path) -> tuple[Any, ...]:
    """Sort key that puts job 2 before job 10."""
    number = folder.name.split("-")[0]
    return (str(folder.parent), int(number) if number.isdigit() else 0, folder.name)
