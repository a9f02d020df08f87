"""Atomic writing: the old content or the new, never half of it, and errors that name the file."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

import pytest

from posbench.errors import Exit, StorageError
from posbench.files import sha256_file, storage, write_bytes, write_json, write_text


def fail(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, code: int) -> None:
    def refuse(*arguments: object, **keywords: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(owner, name, refuse)


@pytest.mark.parametrize(
    ("owner", "name"), [(os, "fsync"), (Path, "replace"), (Path, "chmod"), (os, "fdopen")]
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG])
def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, code: int
) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with monkeypatch.context() as patch:
        fail(patch, owner, name, code)
        with pytest.raises(StorageError) as caught:
            write_text(path, "new")
    assert str(path) in str(caught.value)
    assert os.strerror(code) in str(caught.value)
    assert caught.value.code == Exit.STORAGE == 4
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]  # noqa: PTH208, hidden names too


def test_an_interrupt_while_writing_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "result.json"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_bytes_are_durable_before_their_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order: the file's data, then the rename, then the folder that holds the name."""
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def watched_fsync(handle: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        events.append(f"sync {kind}")
        fsync(handle)

    def watched_replace(self: Path, target: Path) -> Path:
        events.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    write_bytes(tmp_path / "new" / "data", b"x")
    assert events == ["sync file", "rename", "sync folder"]


def test_a_file_is_as_readable_as_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "result", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "result").stat().st_mode) == 0o640


def test_json_is_strict(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"name": "é"})
    assert (tmp_path / "a.json").read_text() == '{\n "name": "é"\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"loss": float("inf")})
    assert "é" in (tmp_path / "a.json").read_text()


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"cannot write .*file/inside"):
        write_text(tmp_path / "file" / "inside", "y")


def test_only_operating_system_errors_become_storage_errors(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), storage(tmp_path):
        _ = 1 / 0


def test_sha256_is_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\x00\r\n" * 100_000)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(b"\x00\r\n" * 100_000).hexdigest()
