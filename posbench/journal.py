"""metrics.jsonl: one JSON object per line, the source of truth for every training curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posbench.files import storage, write_text


class Journal:
    """Appends records that carry a `step`; a resumed run first forgets what it will write again."""

    def __init__(self, path: Path, from_step: int = 0) -> None:
        self._path = path
        with storage(path):
            kept = [record for record in read(path) if record["step"] <= from_step]
            write_text(path, "".join(_line(record) for record in kept))
            self._file = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record and hand it to the operating system."""
        with storage(self._path):
            self._file.write(_line(record))
            self._file.flush()

    def close(self) -> None:
        """No more records."""
        with storage(self._path):
            self._file.close()


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    """All whole records of a journal; a line torn by a crash ends it. Empty if there is none."""
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            break
        records.append(record)
    return records
