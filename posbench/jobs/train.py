"""`posbench train`: one run, from its manifest to its finished checkpoint.

Torch is imported only once the manifest stands, so a mistake is told within a second.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import TextConfig, TrainSettings
from posbench.config.tasks import TaskConfig
from posbench.discovery import outputs
from posbench.errors import (
    CheckpointError,
    DivergedError,
    InterruptedRunError,
    OutOfMemoryError,
    UserError,
)
from posbench.files import stamp, write_text
from posbench.plugins import LOADED
from posbench.rules import check
from posbench.runs import (
    CHECKPOINTS,
    JOB_FILES,
    LOCK,
    MANIFEST,
    TOKENIZER,
    Lock,
    Run,
    clear,
    describe,
    differences,
    fingerprint,
    keep_plugin,
    load_run,
    now,
    open_run,
    scheme_of,
    update,
)
from posbench.saved import from_dict, to_dict

if TYPE_CHECKING:
    from posbench.checkpoint import Checkpoint
    from posbench.data import Dataset
    from posbench.runtime import Runtime
    from posbench.tasks import TaskDataset
    from posbench.training import Trainer


def train(settings: TrainSettings, folder: Path | str | None = None) -> Run:
    """Train in `folder`, or continue the same run there; returns the finished run.

    Without a folder, in a new one below outputs/train.
    """
    if folder is None:
        folder = outputs() / "train" / f"{stamp()}-{scheme_of(settings)}"
    run_training(settings, Path(folder), ["posbench.train"])
    return load_run(folder)


def run_training(settings: TrainSettings, folder: Path, command: list[str]) -> None:
    """`posbench train`: a new run, the rest of an unfinished one, or word that it is complete."""
    check(settings)
    settings = located(settings)
    lock = Lock(folder)
    try:
        try:
            run, is_new = open_run(folder, settings, command)
        except UserError:
            lock.discard()
            raise
        if run.finished:
            print(f"complete: {folder} already holds this run, finished.")
            return
        try:
            _train(run, strict=False, allow=[])
        except UserError:
            if is_new:  # nothing was trained: leave no husk behind
                clear(folder)
            raise
    finally:
        _remove_husk(folder)
        lock.release()


def located(settings: TrainSettings) -> TrainSettings:
    """The same settings with a path that means the same from any folder."""
    data = settings.data
    if isinstance(data, TextConfig):
        return replace(
            settings, data=replace(data, path=str(Path.cwd() / Path(data.path).expanduser()))
        )
    return settings


def _remove_husk(folder: Path) -> None:
    """Remove a folder that holds nothing but our lock; as a sweep's job it keeps its log."""
    names = {entry.name for entry in folder.iterdir()}
    if names <= {LOCK, *JOB_FILES}:
        (folder / LOCK).unlink(missing_ok=True)
    if names == {LOCK}:
        folder.rmdir()


def resume_training(
    folder: Path, strict: bool, allow: list[str], changes: list[str], command: list[str]
) -> None:
    """`posbench train resume=DIR`: continue the run there with its own settings.

    `changes` are key=value settings; those that alter the run must be admitted by `allow`
    ("data", "schedule"), and are recorded. `strict` refuses what would not be bit-exact.
    """
    if not (folder / MANIFEST).is_file():
        raise UserError(f"resume={folder}: no posbench run there (no {MANIFEST}).")
    for word in allow:
        if word not in ("data", "schedule"):
            raise UserError(f"resume_allow={word} is not known; use data or schedule.")
    lock = Lock(folder)
    try:
        run = load_run(folder)
        wanted = located(_changed(run.settings, changes))
        check(wanted)
        changed = differences(run.settings, wanted)
        _admit(changed, allow)
        if run.finished and not changed:
            print(f"complete: {folder} already holds this run, finished.")
            return
        if changed:  # written once all is ready to go on, so that a refusal leaves no trace
            entry = {"at": now(), "settings": changed, "before": fingerprint(run.settings)}
            run.manifest["changes"] = [*run.manifest.get("changes", []), entry]
            run.manifest["settings"] = to_dict(wanted)
        run.settings = wanted
        _train(run, strict, allow)
    finally:
        lock.release()


def _changed(settings: TrainSettings, changes: list[str]) -> TrainSettings:
    saved = to_dict(settings)
    for change in changes:
        key, _, text = change.partition("=")
        *groups, name = key.split(".")
        node: Any = saved
        for group in groups:
            node = node.get(group) if isinstance(node, dict) else None
        if not isinstance(node, dict) or name not in node or isinstance(node[name], dict):
            raise UserError(f"{key} is not a setting that a resumed run can change.")
        try:
            node[name] = json.loads(text)
        except ValueError:
            node[name] = text
    try:
        changed: TrainSettings = from_dict(TrainSettings, saved)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{error}.") from None
    return changed


def _admit(changed: dict[str, tuple[Any, Any]], allow: list[str]) -> None:
    for key, (old, new) in changed.items():
        kind = {"train": "schedule", "data": "data"}.get(key.split(".")[0])
        if kind is None:
            raise UserError(
                f"{key}={new} would make this another run ({key}={old} there); train a new one."
            )
        if kind not in allow:
            raise UserError(
                f"{describe({key: (old, new)})}. To continue all the same: resume_allow=[{kind}]."
            )


# ---------------------------------------------------------------- one training run


def _train(run: Run, strict: bool, allow: list[str]) -> None:
    """Prepare, train, and leave the manifest with a status whatever happens."""
    from posbench.jobs.session import Session
    from posbench.runtime import resolve
    from posbench.training import Trainer

    settings = run.settings
    _check_plugin(settings)
    kept = keep_plugin(run)
    runtime = resolve(settings.device, settings.dtype, settings.compile, settings.threads)
    saved = _newest_checkpoint(run)
    if saved:
        _check_origin(run, saved)
        _compare_environment(run, runtime, strict)
    dataset = _dataset(run, allow)
    trainer = Trainer(settings, dataset, runtime)
    if saved:
        trainer.restore(saved)
    for stale in ("reason", "stopped"):
        run.manifest.pop(stale, None)
    update(
        run,
        status="running",
        runtime=runtime.record(),
        corpus=_corpus_record(dataset, trainer),
        files={TOKENIZER: dataset.tokenizer.sha256, **kept},
        cost=trainer.cost(),
    )
    session = Session(run, trainer, dataset, runtime)
    try:
        session.announce()
        session.train()
    except InterruptedRunError as stop:
        update(run, status="interrupted", reason=str(stop), stopped=now())
        raise
    except (DivergedError, OutOfMemoryError) as error:
        status = "diverged" if isinstance(error, DivergedError) else "out of memory"
        update(run, status=status, reason=str(error), stopped=now(), step=trainer.step)
        raise


def _check_plugin(settings: TrainSettings) -> None:
    """Raise UserError for a plugin that breaks a promise which a second is enough to check."""
    if settings.encoding.name in LOADED:
        from posbench.promises import refuse_broken

        refuse_broken(settings.encoding, settings.model, settings.context)


def _newest_checkpoint(run: Run) -> Checkpoint | None:
    from posbench.checkpoint import newest

    return newest(run.folder / CHECKPOINTS, _warn)


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def _check_origin(run: Run, saved: Checkpoint) -> None:
    """Raise unless this very run wrote the checkpoint, and its end still lies ahead."""
    before = [change["before"] for change in run.manifest.get("changes", [])]
    if saved.identity.get("settings") not in (fingerprint(run.settings), *before):
        raise CheckpointError(
            f"{saved.folder} was trained with other settings than those in {run.folder / MANIFEST}."
        )
    if saved.step > run.settings.train.steps:
        raise UserError(
            f"train.steps={run.settings.train.steps}, but {run.folder} has already trained "
            f"{saved.step} steps."
        )


def _compare_environment(run: Run, runtime: Runtime, strict: bool) -> None:
    before, after = run.manifest.get("runtime", {}), runtime.record()
    keys = [key for key in before if before[key] != after[key]]
    changed = [f"{key} {before[key]} -> {after[key]}" for key in keys]
    if not changed:
        return
    message = f"not bit-exact with the part already trained: {', '.join(changed)}"
    if strict:
        raise UserError(f"{message}. Restore that, or leave out resume_strict=true.")
    _warn(f"{message}.")


def _dataset(run: Run, allow: list[str]) -> Dataset | TaskDataset:
    """The run's documents and tokenizer; a run already begun must find the very same ones."""
    known = run.manifest.get("corpus")
    if known is None:
        dataset = _prepare(run.settings)
        write_text(run.folder / TOKENIZER, dataset.tokenizer.to_json())
        return dataset
    dataset = _prepare_again(run)
    if dataset.fingerprint != known["fingerprint"] and "data" not in allow:
        raise UserError(
            f"data={dataset.corpus} has changed since this run began: fingerprint "
            f"{dataset.fingerprint[:12]} now, {known['fingerprint'][:12]} then. Restore it, or "
            "continue on the new text with resume_allow=[data]."
        )
    return dataset


def _prepare(settings: TrainSettings) -> Dataset | TaskDataset:
    from posbench.data import prepare
    from posbench.tasks import TaskDataset

    if isinstance(settings.data, TaskConfig):
        return TaskDataset(settings.data)
    return prepare(settings.data, settings.tokenizer, context=settings.context)


def _prepare_again(run: Run) -> Dataset | TaskDataset:
    from posbench.data import prepare_with
    from posbench.tasks import TaskDataset

    if isinstance(run.settings.data, TaskConfig):
        dataset = TaskDataset(run.settings.data)
        if dataset.tokenizer.to_json() != run.tokenizer_json():
            raise UserError(
                f"data={dataset.corpus} has another vocabulary than when this run began; train a "
                "new one."
            )
        return dataset
    return prepare_with(run.settings.data, run.tokenizer_json())


def _corpus_record(dataset: Dataset | TaskDataset, trainer: Trainer) -> dict[str, Any]:
    return {
        "name": dataset.corpus,
        "fingerprint": dataset.fingerprint,
        "vocabulary": dataset.tokenizer.vocabulary,
        **dataset.record(),
        **trainer.batches.record(),
    }
