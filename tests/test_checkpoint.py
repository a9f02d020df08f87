"""Checkpoints: complete or absent, every byte accounted for, no code in them ever run."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from posbench import checkpoint
from posbench.checkpoint import MANIFEST, OPTIMIZER, WEIGHTS, load, load_weights, newest, restore
from posbench.checkpoint import save as save_checkpoint
from posbench.config import ModelConfig, TrainConfig
from posbench.config.encodings import ENCODINGS
from posbench.errors import CheckpointError, DivergedError, Exit, StorageError
from posbench.model import GPT, build_model
from posbench.training import make_optimizer

IDENTITY = {"settings": "a" * 64, "corpus": "b" * 64, "tokenizer": "c" * 64}
FILES = (WEIGHTS, OPTIMIZER, MANIFEST)


def trained(
    encoding: str = "learned", width: int = 16, layers: int = 1
) -> tuple[GPT, torch.optim.AdamW]:
    """A model and its optimizer after one step, so that there are moments to save."""
    shape = ModelConfig(layers=layers, width=width, heads=2)
    model = build_model(shape, ENCODINGS[encoding](), 8, 32, seed=0)
    optimizer = make_optimizer(model, TrainConfig())
    model(torch.arange(8)[None]).logsumexp(-1).mean().backward()
    optimizer.step()
    return model, optimizer


MODEL, ADAM = trained()


def save(folder: Path, step: int, keep: int = 9) -> str:
    return save_checkpoint(folder, step, MODEL, ADAM, IDENTITY, keep)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path, 10)
    return tmp_path / "step-00000010"


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# ---------------------------------------------------------------- round trip


def test_what_is_saved_is_loaded_to_the_last_bit(saved: Path) -> None:
    loaded = load(saved)
    assert (loaded.step, loaded.identity) == (10, IDENTITY)
    other, adam = trained()
    for parameter in other.parameters():
        parameter.data.zero_()
    adam.state.clear()
    restore(loaded, other, adam)
    assert tiny.digest(other.state_dict()) == tiny.digest(MODEL.state_dict())
    for parameter, original in zip(other.parameters(), MODEL.parameters(), strict=True):
        assert set(adam.state[parameter]) == set(ADAM.state[original])
        for key, value in ADAM.state[original].items():
            assert torch.equal(adam.state[parameter][key], value)
            assert adam.state[parameter][key].dtype == value.dtype
    assert names(saved) == sorted(FILES)


def test_the_sha256_names_the_content(tmp_path: Path, saved: Path) -> None:
    one = load(saved).sha256
    assert save(tmp_path / "other", 10) == one
    assert save(tmp_path / "other", 11) != one


def test_a_valid_checkpoint_is_never_rewritten(tmp_path: Path, saved: Path) -> None:
    """A crash between removing the old one and naming the new one would lose both."""
    before = {name: (saved / name).stat() for name in FILES}
    save(tmp_path, 10)
    after = {name: (saved / name).stat() for name in FILES}
    assert {n: (s.st_ino, s.st_mtime_ns) for n, s in before.items()} == {
        n: (s.st_ino, s.st_mtime_ns) for n, s in after.items()
    }
    (saved / WEIGHTS).write_bytes(b"damaged")
    save(tmp_path, 10)
    assert load(saved).step == 10


# ---------------------------------------------------------------- damage


def test_every_flipped_bit_is_detected(saved: Path) -> None:
    generator = random.Random(0)
    sizes = {name: (saved / name).stat().st_size for name in FILES}
    # As many in the small manifest as in the large files: each has its own defence.
    for number in range(240):
        name = FILES[number % 3]
        path = saved / name
        good = path.read_bytes()
        bad = bytearray(good)
        bad[generator.randrange(sizes[name])] ^= 1 << generator.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"step-00000010"):
            load(saved)
        path.write_bytes(good)
    assert load(saved).step == 10


def test_every_replaced_byte_of_the_manifest_is_detected(saved: Path) -> None:
    """Also one blank for another, which is the same JSON."""
    path = saved / MANIFEST
    good = path.read_bytes()
    for place in range(len(good)):
        for value in b" \n0":
            if good[place] == value:
                continue
            path.write_bytes(good[:place] + bytes([value]) + good[place + 1 :])
            with pytest.raises(CheckpointError):
                load(saved)
    path.write_bytes(good)
    assert load(saved).step == 10


@pytest.mark.parametrize("name", FILES)
def test_truncation_growth_and_absence_are_detected(saved: Path, name: str) -> None:
    path = saved / name
    good = path.read_bytes()
    for size in {0, 1, 7, 8, len(good) // 2, len(good) - 1}:
        path.write_bytes(good[:size])
        with pytest.raises(CheckpointError):
            load(saved)
    path.write_bytes(good + b"\0")
    with pytest.raises(CheckpointError):
        load(saved)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"incomplete.*{name}"):
        load(saved)


def test_a_folder_in_place_of_a_file_is_detected(saved: Path) -> None:
    (saved / WEIGHTS).unlink()
    (saved / WEIGHTS).mkdir()
    with pytest.raises(CheckpointError):
        load(saved)


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", "null", "12", '"text"', "{", "\ufeff{}", "\0" * 40, "<html></html>",
        '{"digest": 1}', '{"digest": "x", "format": 1, "files": []}',
        '{"step": ' + "9" * 5000 + "}", "[" * 100_000, '{"a":' * 100_000,
    ],
)  # fmt: skip
def test_foreign_json_is_refused(saved: Path, text: str) -> None:
    (saved / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        load(saved)
    assert caught.value.code == Exit.CHECKPOINT == 3


def forge(folder: Path, **changes: Any) -> None:
    """A manifest whose own digest holds, as one who means harm would write it."""
    manifest = json.loads((folder / MANIFEST).read_text()) | changes
    content = {key: value for key, value in manifest.items() if key != "digest"}
    signed = content | {"digest": checkpoint._digest(content)}
    (folder / MANIFEST).write_bytes(checkpoint._encoded(signed))


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "ten"}, {"step": None}, {"step": [1]}, {"step": float("inf")},
        {"step": float("nan")}, {"step": 11}, {"step": -1},
        {"identity": 5}, {"identity": "abc"}, {"identity": [[1]]},
        {"files": {}}, {"files": None}, {"files": {WEIGHTS: "x"}},
        {"format": 2}, {"format": "1"},
    ],
    ids=str,
)  # fmt: skip
def test_a_forged_manifest_is_refused(saved: Path, changes: dict[str, Any]) -> None:
    forge(saved, **changes)
    with pytest.raises(CheckpointError):
        load(saved)


def pickled() -> bytes:
    class Payload:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, ("touch CANARY",)

    import pickle

    return pickle.dumps(Payload())


@pytest.mark.parametrize(
    "data",
    [
        b"", b"text", b"\0" * 64, b"\xff" * 64, b"PK\x03\x04" + b"\0" * 30,
        (2**62).to_bytes(8, "little") + b"{}", (10).to_bytes(8, "little") + b'{"a":[]}  ',
        pickled(),
    ],
)  # fmt: skip
def test_forged_tensors_are_refused_and_run_nothing(
    saved: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import hashlib

    monkeypatch.chdir(tmp_path)
    files = json.loads((saved / MANIFEST).read_text())["files"]
    files[WEIGHTS] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (saved / WEIGHTS).write_bytes(data)
    forge(saved, files=files)
    with pytest.raises(CheckpointError):
        load(saved)
    assert not (tmp_path / "CANARY").exists()


def test_a_manifest_of_another_checkpoint_is_refused(tmp_path: Path, saved: Path) -> None:
    other, adam = trained("rope")
    save_checkpoint(tmp_path, 20, other, adam, IDENTITY, keep=9)
    shutil.copy(tmp_path / "step-00000020" / MANIFEST, saved / MANIFEST)
    with pytest.raises(CheckpointError):
        load(saved)


def test_a_renamed_checkpoint_is_refused(tmp_path: Path, saved: Path) -> None:
    saved.rename(tmp_path / "step-00000099")
    with pytest.raises(CheckpointError, match="of step 10"):
        load(tmp_path / "step-00000099")


# ---------------------------------------------------------------- names and shapes


@pytest.mark.parametrize(
    ("encoding", "width", "layers"),
    [("rope", 16, 1), ("learned", 32, 1), ("learned", 16, 2), ("alibi", 16, 1)],
)
def test_weights_of_another_model_are_refused(
    saved: Path, encoding: str, width: int, layers: int
) -> None:
    other, adam = trained(encoding, width, layers)
    for put in (
        lambda: load_weights(load(saved), other),
        lambda: restore(load(saved), other, adam),
    ):
        with pytest.raises(CheckpointError, match="does not fit this model"):
            put()


def test_missing_optimizer_state_is_refused(tmp_path: Path) -> None:
    model, _ = trained()
    fresh = make_optimizer(model, TrainConfig())
    save_checkpoint(tmp_path, 1, model, fresh, IDENTITY, keep=2)
    with pytest.raises(CheckpointError, match="no optimizer state for embedding"):
        restore(load(tmp_path / "step-00000001"), model, fresh)


# ---------------------------------------------------------------- keeping, falling back


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    for step in (1, 2, 9, 10, 11, 100):
        save(tmp_path, step, keep)
        assert load(tmp_path / f"step-{step:08d}").step == step
    assert names(tmp_path) == [f"step-{s:08d}" for s in (1, 2, 9, 10, 11, 100)[-keep:]]


def damage(folder: Path) -> None:
    path = folder / WEIGHTS
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("keep", [1, 2, 5])
@pytest.mark.parametrize("damaged", [1, 2])
def test_a_failed_save_never_costs_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, damaged: int
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    for step in (3, 2)[:damaged]:
        damage(tmp_path / f"step-{step:08d}")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(StorageError):
            save(tmp_path, 4, keep)
    warnings: list[str] = []
    found = newest(tmp_path, warnings.append)
    assert found is not None
    assert found.step == 3 - damaged
    assert len(warnings) == damaged


def full_disk(*arguments: object, **keywords: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing_after(calls: int, real: Callable[..., Any]) -> Callable[..., Any]:
    left = [calls]

    def maybe(*arguments: Any, **keywords: Any) -> Any:
        left[0] -= 1
        return full_disk() if left[0] < 0 else real(*arguments, **keywords)

    return maybe


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [(os, "fsync", n) for n in range(6)]
    + [(Path, "replace", n) for n in range(3)]
    + [(Path, "rename", 0), (Path, "mkdir", 0)],
)
def test_a_full_disk_leaves_the_previous_checkpoint_and_no_partial_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saved: Path,
    owner: object,
    name: str,
    calls: int,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing_after(calls, getattr(owner, name)))
        with pytest.raises(StorageError) as caught:
            save(tmp_path, 20, keep=1)
    assert caught.value.code == Exit.STORAGE == 4
    assert "step-00000020" in str(caught.value)
    assert os.strerror(errno.ENOSPC) in str(caught.value)
    assert names(tmp_path) == ["step-00000010"]
    assert load(saved).step == 10


def test_the_manifest_is_written_last_and_the_folder_named_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    write, rename, sync = checkpoint.write_bytes, Path.rename, checkpoint.sync_folder

    def watched_write(path: Path, data: bytes) -> None:
        events.append(path.name)
        write(path, data)

    def watched_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    def watched_sync(folder: Path) -> None:
        events.append("sync")
        sync(folder)

    monkeypatch.setattr(checkpoint, "write_bytes", watched_write)
    monkeypatch.setattr(Path, "rename", watched_rename)
    monkeypatch.setattr(checkpoint, "sync_folder", watched_sync)
    save(tmp_path, 1)
    assert events == [WEIGHTS, OPTIMIZER, MANIFEST, "rename", "sync"]


def test_resuming_falls_back_loudly(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "step-00000003")
    (tmp_path / "step-00000002" / OPTIMIZER).unlink()
    warnings: list[str] = []
    found = newest(tmp_path, warnings.append)
    assert found is not None
    assert found.step == 1
    assert "step-00000003" in warnings[0]
    assert WEIGHTS in warnings[0]
    assert "step-00000002" in warnings[1]
    assert OPTIMIZER in warnings[1]
    assert names(tmp_path) == [
        "step-00000001", "step-00000002.corrupt", "step-00000003.corrupt",
    ]  # fmt: skip
    # Trained again and damaged again: the first witness stays.
    save(tmp_path, 3)
    damage(tmp_path / "step-00000003")
    assert newest(tmp_path, warnings.append) is not None
    assert "step-00000003.corrupt-2" in names(tmp_path)


def test_without_a_good_one_there_is_no_silent_fresh_start(tmp_path: Path) -> None:
    assert newest(tmp_path / "absent", pytest.fail) is None
    for step in (1, 2):
        save(tmp_path, step)
        damage(tmp_path / f"step-{step:08d}")
    for _ in range(2):  # and none the next time either
        with pytest.raises(CheckpointError, match="no usable checkpoint"):
            newest(tmp_path, lambda _: None)


def test_what_a_killed_save_left_is_swept(tmp_path: Path, saved: Path) -> None:
    stale = tmp_path / ".step-00000020.tmp-4711"
    shutil.copytree(saved, stale)
    (stale / MANIFEST).unlink()
    found = newest(tmp_path, pytest.fail)
    assert found is not None
    assert found.step == 10
    assert names(tmp_path) == ["step-00000010"]


def test_only_a_killed_first_save_is_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / ".step-00000010.tmp-4711").mkdir()
    assert newest(tmp_path, pytest.fail) is None
    assert names(tmp_path) == []


# ---------------------------------------------------------------- not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["weight", "moment"])
def test_nothing_that_is_not_finite_is_saved(tmp_path: Path, value: float, where: str) -> None:
    model, adam = trained()
    parameter = model.blocks[0].get_parameter("mlp.into.weight")
    spoiled: Tensor = parameter.data if where == "weight" else adam.state[parameter]["exp_avg_sq"]
    spoiled[1, 1] = value
    with pytest.raises(DivergedError, match=r"blocks\.0\.mlp\.into\.weight is not finite"):
        save_checkpoint(tmp_path, 5, model, adam, IDENTITY, keep=2)
    assert names(tmp_path) == []


def test_many_saves_leave_no_open_files(tmp_path: Path) -> None:
    handles = Path("/proc/self/fd")
    save(tmp_path, 0, keep=2)
    before = len(list(handles.iterdir()))
    for step in range(1, 40):
        save(tmp_path, step, keep=2)
    assert len(list(handles.iterdir())) == before
    assert len(names(tmp_path)) == 2


def test_a_checkpoint_holds_plain_tensors(saved: Path) -> None:
    """Readable with safetensors alone: the weights are a format others know."""
    loaded = load(saved)
    assert (saved / WEIGHTS).read_bytes() == to_bytes(
        {name: tensor.detach().contiguous() for name, tensor in MODEL.state_dict().items()}
    )
    assert set(loaded.weights) == set(dict(MODEL.named_parameters()))
