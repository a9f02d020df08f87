"""`posbench train`: one run, from its manifest to its finished checkpoint.

Torch is imported only once the manifest stands, so a mistake is told within a second.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import TextConfig, TrainSettings
from posbench.errors import (
    CheckpointError,
    DivergedError,
    InterruptedRunError,
    OutOfMemoryError,
    UserError,
)
from posbench.files import write_text
from posbench.journal import Journal
from posbench.rules import check
from posbench.runs import (
    CHECKPOINTS,
    MANIFEST,
    METRICS,
    TOKENIZER,
    Lock,
    Run,
    clear,
    describe,
    differences,
    fingerprint,
    load_run,
    now,
    open_run,
    update,
)
from posbench.saved import from_dict, to_dict

if TYPE_CHECKING:
    from posbench.checkpoint import Checkpoint
    from posbench.data import Dataset
    from posbench.runtime import Runtime
    from posbench.training import Step, Trainer

VALIDATIONS = 10  # in a run, unless train.validate_every says otherwise


def train(settings: TrainSettings, folder: Path | str) -> Run:
    """Train in `folder`, or continue the same run there; returns the finished run."""
    run_training(settings, Path(folder), ["posbench.train"])
    return load_run(folder)


def run_training(settings: TrainSettings, folder: Path, command: list[str]) -> None:
    """`posbench train`: a new run, the rest of an unfinished one, or word that it is complete."""
    check(settings)
    settings = _located(settings)
    lock = Lock(folder)
    try:
        run, is_new = open_run(folder, settings, command)
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


def _located(settings: TrainSettings) -> TrainSettings:
    """The same settings with a path that means the same from any folder."""
    data = settings.data
    if isinstance(data, TextConfig):
        return replace(
            settings, data=replace(data, path=str(Path.cwd() / Path(data.path).expanduser()))
        )
    return settings


def _remove_husk(folder: Path) -> None:
    """Remove a folder that holds nothing but our lock."""
    if [entry.name for entry in folder.iterdir()] == [".lock"]:
        (folder / ".lock").unlink()
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
        wanted = _located(_changed(run.settings, changes))
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
    from posbench.runtime import resolve
    from posbench.training import Trainer

    settings = run.settings
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
        corpus=_corpus_record(dataset),
        files={TOKENIZER: dataset.tokenizer.sha256},
        cost=trainer.cost(),
    )
    session = _Session(run, trainer, dataset, runtime)
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


def _dataset(run: Run, allow: list[str]) -> Dataset:
    """The run's documents and tokenizer; a run already begun must find the very same ones."""
    from posbench.data import prepare, prepare_with

    settings = run.settings
    known = run.manifest.get("corpus")
    if known is None:
        dataset = prepare(settings.data, settings.tokenizer, context=settings.context)
        write_text(run.folder / TOKENIZER, dataset.tokenizer.to_json())
        return dataset
    dataset = prepare_with(settings.data, run.tokenizer_json())
    if dataset.fingerprint != known["fingerprint"] and "data" not in allow:
        raise UserError(
            f"data={dataset.corpus} has changed since this run began: fingerprint "
            f"{dataset.fingerprint[:12]} now, {known['fingerprint'][:12]} then. Restore it, or "
            "continue on the new text with resume_allow=[data]."
        )
    return dataset


def _corpus_record(dataset: Dataset) -> dict[str, Any]:
    return {
        "name": dataset.corpus,
        "fingerprint": dataset.fingerprint,
        "documents": dataset.documents,
        "characters": dataset.characters,
        "train_tokens": int(dataset.train.offsets[-1]),
        "vocabulary": dataset.tokenizer.vocabulary,
        **dataset.note,
    }


@dataclass
class _Session:
    """One stretch of training: everything around the loop that touches files, clocks or people."""

    run: Run
    trainer: Trainer
    dataset: Dataset
    runtime: Runtime

    def announce(self) -> None:
        """Say what the run is and what it will cost, before it starts."""
        settings, cost = self.run.settings, self.run.manifest["cost"]
        left = settings.train.steps - self.trainer.step
        seconds = self.trainer.seconds_per_step() * left
        kernels = sorted(set(self.trainer.model.kernels(self.runtime.device.type)))
        lines = [
            f"run        {self.run.id} in {self.run.folder}",
            f"model      {settings.model.name}, {cost['parameters']:,} parameters, of which "
            f"{cost['encoding_parameters']:,} belong to encoding={settings.encoding.name}",
            f"data       {self.dataset.corpus}, {self.dataset.documents:,} documents, "
            f"{self.dataset.tokenizer.vocabulary} tokens in the vocabulary "
            f"(tokenizer={settings.tokenizer.name})",
            f"training   {settings.train.steps:,} steps of {self.trainer.tokens_per_step:,} tokens "
            f"at context {settings.context}: {cost['tokens']:,} tokens, "
            f"{cost['flops']:.2e} floating-point operations",
            f"machine    {self.runtime.record()['device']}, {self.runtime.record()['dtype']}, "
            f"{self.runtime.record()['threads']} threads, attention {', '.join(kernels)}",
            f"expected   about {duration(seconds)} for {left:,} steps",
        ]
        if self.trainer.step:
            lines.insert(1, f"resuming   from step {self.trainer.step}")
        print("\n".join(lines), flush=True)

    def train(self) -> None:
        """The loop, with its records, checkpoints and validations; ends in a finished manifest."""
        from posbench.board import TrainBoard
        from posbench.progress import Progress
        from posbench.signals import StopRequest

        settings = self.run.settings
        first = self.trainer.step
        self.validation: dict[float, float] = {}
        self.spent = 0.0  # seconds in optimizer steps, validation and saving left out
        journal = Journal(self.run.folder / METRICS, first)
        title = f"train {settings.encoding.name}"
        try:
            with (
                TrainBoard(self.run.folder / "tb", purge_step=first + 1) as board,
                Progress(title, settings.train.steps) as progress,
                StopRequest() as stop,
            ):
                progress.update(first)
                started = time.perf_counter()
                for step in self.trainer.run():
                    self.spent += time.perf_counter() - started
                    self._record(step, first, journal, board)
                    progress.update(step.step, f"loss {step.loss:.3f}")
                    if stop.code is not None:
                        self._save()
                        raise InterruptedRunError(self._stopped(step.step), stop.code)
                    started = time.perf_counter()
        finally:
            journal.close()
        self._finish(first)

    def _record(self, step: Step, first: int, journal: Journal, board: Any) -> None:
        train = self.run.settings.train
        is_last = step.step == train.steps
        if is_last or step.step % train.log_every == 0 or step.step == 1:
            speed = self.trainer.tokens_per_step * (step.step - first) / self.spent
            record = {
                "step": step.step,
                "loss": step.loss,
                "lr": step.lr,
                "grad_norm": step.grad_norm,
                "tokens": step.step * self.trainer.tokens_per_step,
                "tokens_per_s": round(speed, 1),
            }
            journal.write(record)
            tags = ("loss", "lr", "grad_norm", "tokens_per_s")
            board.scalars(step.step, {f"train/{tag}": record[tag] for tag in tags})
        every = train.validate_every or max(1, train.steps // VALIDATIONS)
        if is_last or step.step % every == 0:
            self._validate(step.step, journal, board)
        due = train.checkpoint_every is not None and step.step % train.checkpoint_every == 0
        if is_last or due:
            self._save()

    def _validate(self, step: int, journal: Journal, board: Any) -> None:
        from posbench.statistics import perplexity

        self.validation = self._validation_losses()
        if not self.validation:
            return
        named = {f"{ratio:g}x": loss for ratio, loss in self.validation.items()}
        journal.write({"step": step, "val_nll": named})
        scalars = {}
        for ratio, loss in self.validation.items():
            scalars[f"val/nll_{ratio:g}x"] = loss
            scalars[f"val/ppl_{ratio:g}x"] = perplexity(loss)
        board.scalars(step, scalars)

    def _validation_losses(self) -> dict[float, float]:
        from posbench.statistics import perplexity
        from posbench.training import validation_losses

        losses = validation_losses(
            self.trainer.model, self.dataset, self.run.settings, self.runtime
        )
        return {ratio: loss for ratio, loss in losses.items() if perplexity(loss) < float("inf")}

    def _save(self) -> None:
        from posbench import checkpoint

        identity = {
            "settings": fingerprint(self.run.settings),
            "corpus": self.dataset.fingerprint,
            "tokenizer": self.dataset.tokenizer.sha256,
        }
        self.saved = checkpoint.save(
            self.run.folder / CHECKPOINTS,
            self.trainer.step,
            self.trainer.model,
            self.trainer.optimizer,
            identity,
            self.run.settings.train.keep_checkpoints,
        )

    def _stopped(self, step: int) -> str:
        return (
            f"stopped at step {step} of {self.run.settings.train.steps}; a checkpoint was saved. "
            f"Continue with: posbench train resume={self.run.folder}"
        )

    def _finish(self, first: int) -> None:
        from posbench.statistics import perplexity

        if self.trainer.step == first:  # killed after the last checkpoint, before the manifest
            self._save()
            self.validation = self._validation_losses()
        steps = self.trainer.step - first
        speed = self.trainer.tokens_per_step * steps / self.spent if steps else None
        memory = self.runtime.peak_memory_mb()
        update(
            self.run,
            status="finished",
            finished=now(),
            step=self.trainer.step,
            checkpoint={"step": self.trainer.step, "sha256": self.saved},
            tokens_per_s=speed,
            peak_mem_mb=memory,
            validation_nll={f"{ratio:g}x": loss for ratio, loss in self.validation.items()},
        )
        parts = [f"{speed:,.0f} tokens/s"] if speed else []
        parts.append(f"peak memory {memory:,.0f} MiB")
        parts += [
            f"validation perplexity {perplexity(loss):.2f} at {ratio:g}x"
            for ratio, loss in self.validation.items()
        ]
        print(f"done       {', '.join(parts)}\n           {self.run.folder}", flush=True)


def duration(seconds: float) -> str:
    """Seconds in words, to two digits at most."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
