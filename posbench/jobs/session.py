"""One stretch of training: everything around the loop that touches files, clocks or people."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posbench.errors import (
    InterruptedRunError,
)
from posbench.journal import Journal, read
from posbench.runs import (
    CHECKPOINTS,
    METRICS,
    TENSORBOARD,
    Run,
    fingerprint,
    now,
    scheme_of,
    update,
)

if TYPE_CHECKING:
    from posbench.data import Dataset
    from posbench.runtime import Runtime
    from posbench.tasks import TaskDataset
    from posbench.training import Step, Trainer

VALIDATIONS = 10  # in a run, unless train.validate_every says otherwise


@dataclass
class Session:
    """One stretch of training: everything around the loop that touches files, clocks or people."""

    run: Run
    trainer: Trainer
    dataset: Dataset | TaskDataset
    runtime: Runtime
    told: bool = False  # which ratios cannot be validated

    def announce(self) -> None:
        """Say what the run is and what it will cost, before it starts."""
        settings, cost = self.run.settings, self.run.manifest["cost"]
        left = settings.train.steps - self.trainer.step
        seconds = self.trainer.seconds_per_step() * left
        kernels = sorted(set(self.trainer.model.kernels(self.runtime.device.type)))
        lines = [
            f"run        {self.run.id} in {self.run.folder}",
            f"model      {settings.model.name}, {cost['parameters']:,} parameters, of which "
            f"{cost['encoding_parameters']:,} belong to encoding={scheme_of(settings)}",
            f"data       {self.dataset.describe(settings)}",
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
        from posbench.board import TrainBoard, run_name
        from posbench.progress import Progress
        from posbench.signals import StopRequest

        settings = self.run.settings
        first = self.trainer.step
        self.validation: dict[float, float] = {}
        self.exact_match: dict[float, float] = {}  # of a task
        self.spent = 0.0  # seconds in optimizer steps, validation and saving left out
        journal = Journal(self.run.folder / METRICS, first)
        earlier = read(self.run.folder / METRICS)
        name = run_name(scheme_of(settings), settings.seed)
        title = f"train {scheme_of(settings)}"
        try:
            with (
                TrainBoard(self.run.folder / TENSORBOARD, name, earlier) as board,
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
                "time": round(time.time(), 3),
            }
            journal.write(record)
            board.write(record)
        every = train.validate_every or max(1, train.steps // VALIDATIONS)
        if is_last or step.step % every == 0:
            self._validate(step.step, journal, board)
        due = train.checkpoint_every is not None and step.step % train.checkpoint_every == 0
        if is_last or due:
            self._save()

    def _validate(self, step: int, journal: Journal, board: Any) -> None:
        self.validation = self._validation_losses()
        if not self.validation:
            return
        named = {f"{ratio:g}x": loss for ratio, loss in self.validation.items()}
        record: dict[str, Any] = {"step": step, "val_nll": named}
        if self.exact_match:
            record["val_exact_match"] = {f"{r:g}x": x for r, x in self.exact_match.items()}
        record["time"] = round(time.time(), 3)
        journal.write(record)
        board.write(record)

    def _validation_losses(self) -> dict[float, float]:
        from posbench.statistics import perplexity
        from posbench.task_evaluation import validate_task
        from posbench.tasks import TaskDataset
        from posbench.training import validation_losses

        model, settings = self.trainer.model, self.run.settings
        if isinstance(self.dataset, TaskDataset):
            found = validate_task(model, self.dataset, settings, self.runtime)
            losses = {ratio: each.nll for ratio, each in found.items()}
            self.exact_match = {ratio: each.exact_match for ratio, each in found.items()}
        else:
            losses = validation_losses(model, self.dataset, settings, self.runtime)
        self._tell_left_out(losses)
        return {ratio: loss for ratio, loss in losses.items() if perplexity(loss) < float("inf")}

    def _tell_left_out(self, losses: dict[float, float]) -> None:
        ratios = self.run.settings.train.validate_ratios
        missing = [f"{ratio:g}x" for ratio in ratios if ratio not in losses]
        if missing and not self.told:
            print(
                f"warning: no validation at {', '.join(missing)}: the encoding ends before, or no "
                "validation document is that long.",
                file=sys.stderr,
                flush=True,
            )
            self.told = True

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
            validation_exact_match={f"{ratio:g}x": x for ratio, x in self.exact_match.items()},
        )
        parts = [f"{speed:,.0f} tokens/s"] if speed else []
        parts.append(f"peak memory {memory:,.0f} MiB")
        parts += [
            f"exact match {self.exact_match[ratio]:.3f} at {ratio:g}x of held-out examples"
            if ratio in self.exact_match
            else f"validation perplexity {perplexity(loss):.2f} at {ratio:g}x"
            for ratio, loss in self.validation.items()
        ]
        print(f"done       {', '.join(parts)}\n           {self.run.folder}", flush=True)


def duration(seconds: float) -> str:
    """Seconds in words, to two digits at most."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
