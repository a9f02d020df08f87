"""Run folders: opening one for training, finding finished ones, reading them back. No torch here.

run.json         the manifest: status, settings, versions, results; made by the lock's holder
tokenizer.json   the exact tokenizer
metrics.jsonl    one line per logged step; the source of truth for curves
checkpoints/     see posbench.checkpoint
tb/              TensorBoard, a view of metrics.jsonl
plugins/         the source of an encoding that is not posbench's own; never run from here
.lock            held by the process that trains here
job.log          what the run said as a job of a sweep; job.json says how it ended there
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from posbench import plugins
from posbench.config import TrainSettings
from posbench.config.encodings import EncodingConfig
from posbench.config.policies import policies_of, scheme
from posbench.errors import CheckpointError, StorageError, UserError
from posbench.files import UNREADABLE, sha256_file, storage, write_bytes, write_json
from posbench.rules import check
from posbench.saved import from_dict, to_dict
from posbench.version import __version__

if TYPE_CHECKING:
    from posbench.checkpoint import Checkpoint
    from posbench.model import GPT

FORMAT = 1
MANIFEST, TOKENIZER, METRICS, CHECKPOINTS, PLUGINS, TENSORBOARD = (
    "run.json", "tokenizer.json", "metrics.jsonl", "checkpoints", "plugins", "tb",
)  # fmt: skip
LOCK = ".lock"

# What a sweep writes into the folder of each of its jobs.
JOB, JOB_LOG = "job.json", "job.log"
JOB_FILES = (JOB, JOB_LOG)

# All that can be in a run's folder.
FILES = (MANIFEST, TOKENIZER, METRICS, CHECKPOINTS, PLUGINS, "tb", LOCK, *JOB_FILES)

# Settings that may differ when a run goes on: they change neither weights nor what is compared.
FREE = {
    "device", "compile", "threads", "overwrite", "train.checkpoint_every",
    "train.keep_checkpoints", "train.log_every", "train.validate_every", "train.validate_ratios",
    "train.validate_targets",
}  # fmt: skip


@dataclass
class Run:
    """A training run read from its folder, never from anybody's configuration."""

    folder: Path
    manifest: dict[str, Any]
    settings: TrainSettings

    @property
    def id(self) -> str:
        return str(self.manifest["run_id"])

    @property
    def finished(self) -> bool:
        return self.manifest.get("status") == "finished"

    def tokenizer_json(self) -> str:
        """The tokenizer's text; raises CheckpointError if it is not the one trained with."""
        from posbench.tokenizer import load_tokenizer

        path = self.folder / TOKENIZER
        if not path.is_file():
            raise CheckpointError(f"{self.folder} has no {TOKENIZER}.")
        if sha256_file(path) != self.manifest["files"].get(TOKENIZER):
            raise CheckpointError(f"{path} is not what was saved (SHA-256 differs).")
        text = path.read_text()
        try:
            load_tokenizer(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: {error}.") from None
        return text

    def checkpoint(self) -> Checkpoint:
        """The final checkpoint, every byte verified. Raises CheckpointError; never falls back."""
        from posbench.checkpoint import load

        if not self.finished:
            raise CheckpointError(
                f"{self.folder} is not finished ({self.manifest.get('status')}). "
                f"Continue it: posbench train resume={self.folder}"
            )
        try:
            final = self.manifest["checkpoint"]
            name, sha256 = f"step-{int(final['step']):08d}", str(final["sha256"])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{self.folder / MANIFEST} names no checkpoint.") from None
        checkpoint = load(self.folder / CHECKPOINTS / name)
        if checkpoint.sha256 != sha256:
            raise CheckpointError(f"{checkpoint.folder} is not the checkpoint this run ended with.")
        told = {
            "settings": fingerprint(self.settings),
            "corpus": self.corpus_fingerprint,
            "tokenizer": self.manifest["files"].get(TOKENIZER),
        }
        for what, value in told.items():
            if checkpoint.identity.get(what) != value:
                raise CheckpointError(
                    f"the {what} in {self.folder / MANIFEST} is not what "
                    f"{checkpoint.folder.name} was trained with."
                )
        return checkpoint

    @property
    def corpus_fingerprint(self) -> str:
        """Of the corpus trained on; empty before it was read."""
        return str(self.manifest.get("corpus", {}).get("fingerprint", ""))

    def model(self) -> GPT:
        """The trained model, float32 on the CPU, in evaluation mode."""
        from posbench.checkpoint import load_weights
        from posbench.model import build_model
        from posbench.tokenizer import load_tokenizer

        checkpoint = self.checkpoint()
        settings = self.settings
        vocabulary = load_tokenizer(self.tokenizer_json()).vocabulary
        model = build_model(
            settings.model,
            settings.encoding,
            settings.context,
            vocabulary,
            settings.seed,
            policies_of(settings),
        )
        load_weights(checkpoint, model)
        model.encoding.trained_to(1.0)
        return model.eval()


class PluginError(UserError):
    """A run whose encoding's plugin is not loaded, or is not the one it was trained with.

    `run` is that run but for the encoding's settings, of which only the name is known.
    """

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


def load_run(folder: Path | str, *, plugins_changed: bool = False) -> Run:
    """The run in `folder`; raises CheckpointError if its manifest cannot be read.

    Raises PluginError if its encoding needs a plugin that is not loaded, or, unless
    `plugins_changed`, one that has changed since.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder} holds no posbench run (no {MANIFEST}).")
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, not {FORMAT}")
        _check_shape(manifest)
        _check_plugin(folder, manifest, plugins_changed)
        settings = from_dict(TrainSettings, manifest["settings"])
        check(settings)
    except UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return Run(folder, manifest, settings)


def _check_plugin(folder: Path, manifest: dict[str, Any], plugins_changed: bool) -> None:
    """Raise PluginError unless the run's encoding is posbench's own, or its plugin is loaded."""
    saved = manifest["settings"]["encoding"]
    name, source = saved["name"], saved.get(plugins.SOURCE, "")
    if not source:
        return
    if not isinstance(name, str) or not isinstance(source, str):
        raise TypeError("encoding.name or encoding.source is not a text")
    here = plugins.LOADED.get(name)
    if here is not None and (plugins_changed or here.sha256 == source):
        return
    known = from_dict(TrainSettings, manifest["settings"] | {"encoding": {"name": "none"}})
    known.encoding = EncodingConfig(name)
    copy = next(iter(sorted((folder / PLUGINS).glob("*.py"))), None)
    if here is None:
        file = copy.name if copy else f"{name}.py"
        where = f" (a copy is in {copy})" if copy else ""
        message = f"encoding={name} comes from a plugin; add plugins=[{file}]{where}."
    else:
        where = f" The code it was trained with is in {copy}." if copy else ""
        message = (
            f"encoding={name} of {folder} was trained with another {here.path.name}: SHA-256 "
            f"{source[:12]} there, {here.sha256[:12]} here ({here.path}).{where}"
        )
    raise PluginError(message, Run(folder, manifest, known))


def _check_shape(manifest: dict[str, Any]) -> None:
    """Raise TypeError where a value is not of the kind that is written there."""
    for key in ("run_id", "started"):
        if not isinstance(manifest[key], str):
            raise TypeError(f"{key} is not a text")
    for key in ("files", "corpus", "cost", "validation_nll", "runtime"):
        if not isinstance(manifest.get(key, {}), dict):
            raise TypeError(f"{key} is not a mapping")


def scheme_of(settings: TrainSettings) -> str:
    """What results call the encoding of a run, its policies included."""
    return scheme(settings.encoding.name, policies_of(settings), settings.context)


def identity(settings: TrainSettings) -> dict[str, Any]:
    """The settings that make the run what it is, flat: key as typed -> value."""
    return saved_identity(to_dict(settings))


def saved_identity(saved: dict[str, Any]) -> dict[str, Any]:
    """The same of settings as a manifest has them, whether their plugin is loaded or not."""
    return {key: value for key, value in flat(saved).items() if key not in FREE}


def flat(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one mapping: key as typed -> value."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def fingerprint(settings: TrainSettings, *, without_seed: bool = False) -> str:
    """SHA-256 of the identity: two runs with one fingerprint are the same experiment.

    `without_seed`: the same experiment but for chance, so their results may be averaged.
    """
    kept = identity(settings)
    if without_seed:
        del kept["seed"]
    return digest(kept)


def digest(kept: dict[str, Any]) -> str:
    """SHA-256 of settings that are plain JSON values."""
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def differences(old: TrainSettings, new: TrainSettings) -> dict[str, tuple[Any, Any]]:
    """Identity settings that differ: key -> (old, new)."""
    before, after = identity(old), identity(new)
    keys = sorted(set(before) | set(after))
    return {
        key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)
    }


# ---------------------------------------------------------------- opening a folder for training


class Lock:
    """Exclusive use of a run folder, until released or the process ends.

    Its holder starts clean: what a killed process left half-written is removed.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._is_new = not self._path.exists()
        self._file: IO[str]
        with storage(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                self._file.close()
                raise StorageError(f"cannot lock {self._path}: {error.strerror}.") from None
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise UserError(f"{folder} is in use by {holder}. Choose another folder.") from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}, since {now()}")
        self._file.flush()
        for name in (MANIFEST, TOKENIZER, METRICS):
            for stale in folder.glob(f".{name}.*.tmp"):
                stale.unlink(missing_ok=True)

    def discard(self) -> None:
        """Leave no trace in a folder that was refused."""
        if self._is_new:
            self._path.unlink(missing_ok=True)

    def release(self) -> None:
        """Let others in."""
        self._file.close()


def is_locked(folder: Path) -> bool:
    """Whether a living process holds the lock of `folder`."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    return False


_OTHERWISE = "Choose another hydra.run.dir, or overwrite=true to start anew in this one."


def open_run(folder: Path, settings: TrainSettings, command: list[str]) -> tuple[Run, bool]:
    """The run to train in `folder`, whose lock the caller holds, and whether it is a new one.

    A folder with the same run gives that run back, whatever its status; other settings raise
    UserError with the difference; a folder with anything else in it is refused.
    """
    path = folder / MANIFEST
    if path.exists() and settings.overwrite:
        clear(folder)
    else:
        run = earlier_run(folder, settings)
        if run is not None:
            return run, False
    manifest = {
        "format": FORMAT,
        "status": "running",
        "run_id": f"{scheme_of(settings)}-s{settings.seed}-{fingerprint(settings)[:8]}",
        "command": command,
        "settings": to_dict(settings),
        "started": now(),
        "posbench": __version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "files": {},
    }
    write_json(path, manifest, exclusive=True)  # the lock says so too, where disks have locks
    return Run(folder, manifest, settings), True


def earlier_run(folder: Path, settings: TrainSettings) -> Run | None:
    """The same run, begun before in `folder`; raises UserError for anything else there."""
    if (folder / MANIFEST).exists():
        try:
            run = load_run(folder)
        except PluginError as error:
            raise UserError(f"{folder} holds another run: {error} {_OTHERWISE}") from None
        changed = differences(run.settings, settings)
        if changed:
            raise UserError(
                f"{folder} holds a run with other settings: {describe(changed)}. {_OTHERWISE}"
            )
        run.settings = settings  # the free ones may differ
        return run
    known = {LOCK, *JOB_FILES}
    foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in known)
    if foreign:
        raise UserError(
            f"{folder} is not empty and holds no posbench run (it has {foreign[0]}). "
            "Choose another hydra.run.dir."
        )
    return None


def keep_plugin(run: Run) -> dict[str, str]:
    """Keep the source of the run's encoding beside it, as a record: name of the file -> SHA-256.

    Empty for posbench's own encodings.
    """
    plugin = plugins.LOADED.get(run.settings.encoding.name)
    if plugin is None:
        return {}
    name = f"{PLUGINS}/{plugin.path.name}"
    if not (run.folder / name).is_file():
        write_bytes(run.folder / name, plugin.code)
    return {name: plugin.sha256}


def clear(folder: Path) -> None:
    """Remove what a run wrote, and nothing else; of a link the link, not what it points to."""
    with storage(folder):
        for name in (CHECKPOINTS, PLUGINS, TENSORBOARD, METRICS, TOKENIZER, MANIFEST):
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def describe(changed: dict[str, tuple[Any, Any]]) -> str:
    """Differing settings in words."""
    return ", ".join(f"{key}={old} there, {new} here" for key, (old, new) in changed.items())


def update(run: Run, **values: Any) -> None:
    """Write new values into the manifest, atomically."""
    run.manifest |= values
    write_json(run.folder / MANIFEST, run.manifest)


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
