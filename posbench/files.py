"""Writing files so that a crash leaves the old content or the new, never half of it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from posbench.errors import StorageError

# What reading a file that is not as we wrote it may raise.
UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


@contextmanager
def storage(path: Path) -> Iterator[None]:
    """Turn an OSError while writing `path` into a StorageError that names it (exit 4)."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"cannot write {path}: {reason}.") from error


def write_bytes(path: Path, data: bytes, *, exclusive: bool = False) -> None:
    """Write `data` to `path` atomically and durably: temporary file, fsync, rename, fsync."""
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # mkstemp makes files private; a result is as readable as the umask allows.
            Path(name).chmod(0o666 & ~_umask())
            _place(Path(name), path, exclusive)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def _place(temporary: Path, path: Path, exclusive: bool) -> None:
    """Give a finished file its name; `exclusive`: FileExistsError if the name is taken."""
    if exclusive:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # a disk without hard links
            path.touch(exist_ok=False)
        else:
            temporary.unlink()
            return
    temporary.replace(path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str, *, exclusive: bool = False) -> None:
    """Write UTF-8 text atomically."""
    write_bytes(path, text.encode(), exclusive=exclusive)


def write_json(path: Path, value: Any, *, exclusive: bool = False) -> None:
    """Write strict JSON (no bare NaN or Infinity) atomically."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def stamp() -> str:
    """Name of a folder made now: sorts by time, and does not collide."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{os.urandom(2).hex()}"


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
