"""Checkpoints: one folder each, complete or absent, every byte accounted for.

    step-00000800/weights.safetensors     the model
                  optimizer.safetensors   AdamW's moments and counts
                  manifest.json           written last: step, identity, SHA-256 of each file

A folder is written under a temporary name, synced, and renamed; a checkpoint is valid if and only
if its manifest's own digest and every hash in it hold. Nothing here is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from posbench.errors import CheckpointError, DivergedError
from posbench.files import UNREADABLE, storage, sync_folder, write_bytes

FORMAT = 1
WEIGHTS, OPTIMIZER, MANIFEST = "weights.safetensors", "optimizer.safetensors", "manifest.json"
_NAME = re.compile(r"step-(\d{8})")
# What reading a file that is not ours may raise.
_UNREADABLE = (*UNREADABLE, SafetensorError)


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its bytes were hashed, and these very bytes are what is loaded."""

    folder: Path
    step: int
    identity: dict[str, str]
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    sha256: str  # of the manifest, which holds the hashes of all else


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: dict[str, str],
    keep: int,
) -> str:
    """Write checkpoint `step` below `folder`, verify it, prune old ones; returns its SHA-256.

    A valid one of the same step and identity stays as it is: training is a function of both.
    """
    final = folder / _name(step)
    saved = _saved_before(final, identity) or _write(final, step, model, optimizer, identity)
    for old in sorted(_folders(folder))[:-keep]:
        shutil.rmtree(folder / old, ignore_errors=True)
    return saved.sha256


def _saved_before(final: Path, identity: dict[str, str]) -> Checkpoint | None:
    with contextlib.suppress(CheckpointError):
        saved = load(final)
        return saved if saved.identity == identity else None
    return None


def _write(
    final: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: dict[str, str],
) -> Checkpoint:
    weights = {
        name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    moments = _optimizer_tensors(model, optimizer)
    _check_finite(weights | moments, step)
    files = {WEIGHTS: save_tensors(weights), OPTIMIZER: save_tensors(moments)}
    temporary = final.parent / f".{final.name}.tmp-{os.getpid()}"
    with storage(final):
        temporary.mkdir(parents=True, exist_ok=True)
        try:
            for name, data in files.items():
                write_bytes(temporary / name, data)
            write_bytes(temporary / MANIFEST, _manifest(step, identity, files))
            if final.exists():  # damaged, or of other settings
                shutil.rmtree(final)
            temporary.rename(final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(final.parent)
    return load(final)


def _check_finite(tensors: dict[str, Tensor], step: int) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise DivergedError(f"step {step}: {name} is not finite; nothing was saved.")


def _manifest(step: int, identity: dict[str, str], files: dict[str, bytes]) -> bytes:
    content = {
        "format": FORMAT,
        "step": step,
        "identity": identity,
        "files": {
            name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
            for name, data in files.items()
        },
    }
    return _encoded(content | {"digest": _digest(content)})


def _encoded(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, indent=1).encode()


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`. Raises CheckpointError naming the file that is not as written."""
    try:
        raw = (folder / MANIFEST).read_bytes()
        manifest = json.loads(raw)
        content = {key: value for key, value in manifest.items() if key != "digest"}
        intact = manifest["digest"] == _digest(content) and raw == _encoded(manifest)
        if not intact or manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder / MANIFEST} was altered or is of another format.")
        tensors = {name: _verified(folder / name, manifest) for name in (WEIGHTS, OPTIMIZER)}
        step, identity = int(manifest["step"]), dict(manifest["identity"])
        if folder.name != _name(step):
            raise CheckpointError(f"checkpoint {folder} is of step {step}: it was renamed.")
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {folder} is incomplete: no {error.filename}.") from None
    except _UNREADABLE as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from None
    sha256 = hashlib.sha256(raw).hexdigest()
    return Checkpoint(folder, step, identity, tensors[WEIGHTS], tensors[OPTIMIZER], sha256)


def _verified(path: Path, manifest: dict[str, Any]) -> dict[str, Tensor]:
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != manifest["files"][path.name]["sha256"]:
        raise CheckpointError(f"{path} is not what was saved (SHA-256 differs).")
    tensors: dict[str, Tensor] = load_tensors(data)
    return tensors


def newest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest valid checkpoint below `folder`, for resuming; None if there is no folder at all.

    A damaged one is set aside as *.corrupt, loudly. Raises CheckpointError if none is valid.
    """
    for stale in folder.glob(".step-*.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    names = sorted(_folders(folder), reverse=True)
    for name in names:
        try:
            return load(folder / name)
        except CheckpointError as error:
            aside = _unused(folder, f"{name}.corrupt")
            warn(f"{error} Set aside as {aside.name}; falling back to the one before.")
            with storage(folder / name):
                (folder / name).rename(aside)
    if names or any(folder.glob("*.corrupt*")):
        raise CheckpointError(f"no usable checkpoint below {folder}: all are damaged.")
    return None


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _unused(folder: Path, name: str) -> Path:
    taken = {entry.name for entry in folder.iterdir()}
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return folder / next(each for each in names if each not in taken)


def _folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return [entry.name for entry in folder.iterdir() if _NAME.fullmatch(entry.name)]


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return tensors


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put weights and optimizer state back, exactly."""
    load_weights(checkpoint, model)
    for name, parameter in model.named_parameters():
        state = {}
        for key in ("step", "exp_avg", "exp_avg_sq"):
            value = checkpoint.optimizer.get(f"{key}/{name}")
            if value is None:
                raise CheckpointError(f"{checkpoint.folder} has no optimizer state for {name}.")
            # AdamW's own copies: `step` stays on the CPU unless it is fused on a GPU.
            on_device = key != "step" or optimizer.defaults.get("fused")
            state[key] = value.to(parameter.device) if on_device else value
        optimizer.state[parameter] = state


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Put the weights back; names and shapes must agree exactly."""
    try:
        model.load_state_dict(checkpoint.weights, strict=True)
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise CheckpointError(f"{checkpoint.folder} does not fit this model: {first}") from None
