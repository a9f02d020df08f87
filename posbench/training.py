"""Training: one optimizer step at a time, as a pure function of (settings, step).

Batches and dropout depend on (seed, step) alone, so a resumed run goes on exactly as if it had
never stopped. The loop yields records; its caller writes them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posbench import checkpoint
from posbench.config import Schedule, TrainConfig, TrainSettings
from posbench.config.policies import policies_of
from posbench.data import Dataset
from posbench.encodings.policies import draw_positions
from posbench.encodings.seeds import seeded
from posbench.errors import DivergedError, OutOfMemoryError, UnsupportedError
from posbench.model import (
    GPT,
    IGNORED,
    build_model,
    decay_groups,
    flops_per_token,
    token_losses,
)
from posbench.runtime import Runtime, is_out_of_memory
from posbench.scoring import window_losses
from posbench.targets import anchors
from posbench.tasks import TaskDataset


@dataclass(frozen=True)
class Step:
    """What one optimizer step did. Loss in nats per token, before the update."""

    step: int  # 1 after the first update
    loss: float
    lr: float
    grad_norm: float  # before clipping


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of update number `step` (from 0): linear warm-up, then the schedule.

    cosine falls to final_lr * lr along half a cosine; wsd (warm-up, stable, decay; Hu et al. 2024)
    holds the peak and falls linearly over the last `decay` of the steps.
    """
    warmup = round(config.warmup * config.steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    floor = config.final_lr * config.lr
    if config.schedule is Schedule.cosine:
        share = (step - warmup) / max(1, config.steps - 1 - warmup)
        return floor + (config.lr - floor) * (1 + math.cos(math.pi * share)) / 2
    if config.schedule is Schedule.wsd:
        decay = round(config.decay * config.steps)
        left = config.steps - 1 - step  # steps after this one
        return config.lr if left >= decay else floor + (config.lr - floor) * left / max(1, decay)
    return config.lr


class Trainer:
    """A model, its optimizer, and how far they are.

    A given `model` is one that has been trained, and is trained on; without one, it is a new one.
    """

    def __init__(
        self,
        settings: TrainSettings,
        dataset: Dataset | TaskDataset,
        runtime: Runtime,
        model: GPT | None = None,
    ) -> None:
        self.settings, self.runtime = settings, runtime
        self.policies = policies_of(settings)
        self.batches = dataset.batches(settings.context, settings.train.batch_size, settings.seed)
        self.begun = 0.0 if model is None else 1.0  # share of the training that is behind it
        vocabulary = dataset.tokenizer.vocabulary
        self.model: GPT = (
            model
            or build_model(
                settings.model,
                settings.encoding,
                settings.context,
                vocabulary,
                settings.seed,
                self.policies,
            )
        ).to(runtime.device)
        self.optimizer = make_optimizer(self.model, settings.train)
        self.step = 0
        # One graph per shape: training has one length, so nothing is dynamic.
        self._forward = torch.compile(self.model, dynamic=False) if runtime.compile else self.model

    @property
    def tokens_per_step(self) -> int:
        return self.settings.train.batch_size * self.settings.context

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Go on from a checkpoint."""
        checkpoint.restore(saved, self.model, self.optimizer)
        self.step = saved.step
        self.model.encoding.trained_to(self.step / self.settings.train.steps)

    def run(self) -> Iterator[Step]:
        """Train to the last step, yielding each one."""
        self.model.train()
        while self.step < self.settings.train.steps:
            yield self._advance()

    def seconds_per_step(self, trials: int = 3) -> float:
        """Time of one step's forward and backward passes, tried without changing anything."""
        self.model.train()
        times = []
        for _ in range(trials):
            self.runtime.synchronize()
            started = time.perf_counter()
            self._gradients(0)
            self.runtime.synchronize()
            times.append(time.perf_counter() - started)
        self.optimizer.zero_grad(set_to_none=True)
        return min(times)

    def _advance(self) -> Step:
        config = self.settings.train
        lr = learning_rate(self.step, config)
        loss = self._gradients(self.step)
        grads = [each.grad for each in self.model.parameters() if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        loss_value, norm_value = torch.stack((loss, norm.float())).tolist()
        # Before clipping, which would spread one bad gradient over all of them.
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            raise DivergedError(self._divergence(loss_value, norm_value, lr))
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), config.clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self._memory_advice():  # its first step makes room for the moments
            self.optimizer.step()
        self.step += 1
        return Step(self.step, loss_value, lr, norm_value)

    def _gradients(self, step: int) -> Tensor:
        """Gradients of the mean loss over the step's whole batch, in micro-batches; that loss.

        Each micro-batch weighs as many targets as it holds, so a smaller last one counts for less.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self.model.encoding.trained_to(max(self.begun, step / self.settings.train.steps))
        positions = self._positions(step)
        inputs, targets = self.batches.batch(step)
        count = int((targets != IGNORED).sum())
        inputs, targets = inputs.to(self.runtime.device), targets.to(self.runtime.device)
        size = self.settings.train.micro_batch or len(inputs)
        total = torch.zeros((), device=self.runtime.device)
        with self._memory_advice():
            for part, (rows, wanted) in enumerate(
                zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
            ):
                self._seed_dropout(step, part)
                with self.runtime.autocast():
                    logits = self._forward(rows, positions)
                loss = token_losses(logits, wanted).sum() / count
                torch.autograd.backward(loss)
                total += loss.detach()
        return total

    def _positions(self, step: int) -> Tensor | None:
        generator = seeded(self.settings.seed, f"positions/{step}")
        drawn = draw_positions(self.policies, self.settings.context, generator)
        return None if drawn is None else drawn.to(self.runtime.device)

    def _seed_dropout(self, step: int, part: int) -> None:
        if self.settings.model.dropout > 0:
            words = np.random.SeedSequence([self.settings.seed, step, part]).generate_state(1)
            torch.manual_seed(int(words[0]))

    def _divergence(self, loss: float, norm: float, lr: float) -> str:
        bad = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ]
        where = f", first in {bad[0]}" if bad else ""
        return (
            f"training diverged at step {self.step + 1}: loss {loss:g}, gradient norm {norm:g}"
            f"{where}, learning rate {lr:g}. The update was not made. "
            f"Try a smaller train.lr than {self.settings.train.lr:g}."
        )

    @contextlib.contextmanager
    def _memory_advice(self) -> Iterator[None]:
        """Turn torch's word for too little memory into ours, with a setting that needs less."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            train = self.settings.train
            size = train.micro_batch or train.batch_size
            advice = "Try a smaller model or context."
            if size > 1:
                advice = f"Try train.micro_batch={size // 2}, which gives the same results."
            raise OutOfMemoryError(
                f"out of memory with train.micro_batch={size}, context={self.settings.context} "
                f"and {sum(p.numel() for p in self.model.parameters()):,} parameters. {advice}"
            ) from None

    def cost(self) -> dict[str, int]:
        """What the run will spend: parameters, tokens, floating-point operations."""
        tokens = self.tokens_per_step * self.settings.train.steps
        encoding = self.model.encoding.parameter_count()
        total = sum(parameter.numel() for parameter in self.model.parameters())
        return {
            "parameters": total,
            "encoding_parameters": encoding,
            "tokens": tokens,
            "flops": tokens * flops_per_token(self.model, self.settings.context),
        }


def make_optimizer(model: GPT, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW that decays only the matrices that multiply activations."""
    parameters = dict(model.named_parameters())
    decayed, kept = decay_groups(model)
    groups = [
        {"params": [parameters[name] for name in decayed], "weight_decay": config.weight_decay},
        {"params": [parameters[name] for name in kept], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


def validation_losses(
    model: GPT, dataset: Dataset, settings: TrainSettings, runtime: Runtime
) -> dict[float, float]:
    """Mean nats per token on validation documents, by ratio; the same targets at every ratio.

    A ratio that the encoding or the documents cannot serve is left out. The targets depend on the
    documents alone, so that encodings are compared on the same ones.
    """
    ratios = settings.train.validate_ratios
    lengths = {ratio: max(2, round(ratio * settings.context)) for ratio in ratios}
    size = min(256, max(1, settings.context // 2), *lengths.values())
    longest = int(max(dataset.validation.lengths, default=0)) - 1  # one more token is predicted
    lengths = {ratio: length for ratio, length in lengths.items() if length <= longest}
    if not lengths:
        return {}
    most = settings.train.validate_targets
    chosen = anchors(dataset.validation, max(lengths.values()), size, most)
    losses = {}
    for ratio, length in lengths.items():
        if (model.encoding.max_length or length) < length:
            continue
        try:
            nats = window_losses(
                model, dataset.validation.tokens, chosen, length, size, runtime, 8192
            )
        except UnsupportedError:
            continue
        losses[ratio] = float(nats.mean())
    return losses
