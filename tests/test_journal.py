"""metrics.jsonl survives a crash: whole lines are kept, what will be written again is dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posbench.errors import StorageError
from posbench.journal import Journal, read


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": step / 7}) + "\n" for step in steps)


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read(path)]


def test_what_is_written_is_read_back_to_the_last_bit(tmp_path: Path) -> None:
    records = [{"step": 1, "loss": 0.1 + 0.2}, {"step": 2, "val_nll": {"1x": 1 / 3}}]
    journal = Journal(tmp_path / "metrics.jsonl")
    for record in records:
        journal.write(record)
    assert read(tmp_path / "metrics.jsonl") == records  # before close: a crash loses nothing
    journal.close()
    assert read(tmp_path / "metrics.jsonl") == records


def test_records_after_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2, 2, 3, 4))
    journal = Journal(path, from_step=2)
    journal.write({"step": 3})
    journal.close()
    assert steps(path) == [1, 2, 2, 3]


def test_a_new_run_starts_with_an_empty_journal(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2))
    Journal(path).close()
    assert path.read_text() == ""


@pytest.mark.parametrize("cut", range(1, len(lines(3))))
def test_a_torn_last_line_is_dropped_and_the_rest_kept(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    torn = lines(3)[:cut]
    path.write_text(lines(1, 2) + torn)
    is_whole = torn.endswith("}")  # only the newline is missing
    assert steps(path) == [1, 2, 3] if is_whole else [1, 2]
    journal = Journal(path, from_step=9)
    journal.write({"step": 10})
    journal.close()
    assert steps(path) == ([1, 2, 3, 10] if is_whole else [1, 2, 10])


@pytest.mark.parametrize(
    "junk", [b"\0\0\0\0", b"\xff\xfe\x80", b"[1]\n", b'{"loss": 1}\n', b"12\n"]
)
def test_junk_after_a_power_cut_ends_the_journal(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(1, 2).encode() + junk)
    assert steps(path) == [1, 2]


def test_a_number_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        journal.write({"step": 1, "loss": float("nan")})
    journal.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_disk_that_refuses_is_a_storage_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    with pytest.raises(StorageError, match=r"metrics\.jsonl"):
        Journal(path)
