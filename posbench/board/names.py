"""Names of sub-runs: they are folders, and what TensorBoard shows beside each curve."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

_LONGEST = 120  # bytes; a file system takes 255


def run_name(label: str, seed: int) -> str:
    """`rope-seed0`, `rope+yarn-seed1`: the name of one trained model."""
    return f"{folder_name(label)}-seed{seed}"


def folder_name(label: str) -> str:
    """`label` as the name of one folder, near to how it reads."""
    plain = re.sub(r"[^\w.+-]+", "-", label.replace(" + ", "+")).strip("-.") or "unnamed"
    if len(plain.encode()) <= _LONGEST:
        return plain
    start = plain.encode()[: _LONGEST - 9].decode(errors="ignore")
    return f"{start}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"


def distinct(names: Iterable[str]) -> list[str]:
    """The names in their order; from the second on, equal ones get a number."""
    taken: set[str] = set()
    result = []
    for name in names:
        number, found = 2, name
        while found in taken:
            number, found = number + 1, f"{name}-{number}"
        taken.add(found)
        result.append(found)
    return result
