"""What may be done to a trained model before it is measured: a search of factors, then tuning.

Both work on the copy that an evaluation holds; the run's folder is only read. The search reads the
validation split, tuning the training split.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from typing import Any, Protocol

from posbench.config import EvalSettings, Schedule
from posbench.config.encodings import RotaryConfig
from posbench.config.extensions import ExtensionConfig, LongropeConfig
from posbench.config.policies import Positions
from posbench.data import Dataset, Split
from posbench.encodings import Encoding
from posbench.encodings.policies import in_order
from posbench.encodings.seeds import seeded
from posbench.errors import DivergedError, OutOfMemoryError, UnsupportedError
from posbench.longrope_search import search, starting_points, widest
from posbench.model import GPT
from posbench.results import Status
from posbench.runs import Run
from posbench.runtime import Runtime
from posbench.saved import to_dict
from posbench.scoring import window_losses
from posbench.targets import anchors, digest, targets_at
from posbench.training import Trainer

SEARCH_TARGETS = 4096  # validation tokens scored by one trial
STARTS = 3  # lists of factors that a search begins with
# Chen et al. 2023, section 3.1: AdamW at 2e-5 for models trained at 3e-4 (LLaMA), constant after
# 20 steps. A tenth is also where this project's cosine schedule ends.
LR_SHARE, WARMUP_STEPS = 0.1, 20


class NotAdaptedError(Exception):
    """The model asked for cannot be made: the status of its rows, and why."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Heard(Protocol):
    """Called with tokens that went through the model, and what they were for."""

    def __call__(self, tokens: int, doing: str = "") -> None: ...


def extend_provisionally(encoding: Encoding, extension: ExtensionConfig) -> None:
    """Use `extension`, or where its factors are still to be found, those of PI at scale 2.

    Raises UnsupportedError where the extension means nothing.
    """
    if isinstance(extension, LongropeConfig) and extension.search:
        extension = replace(extension, factors=[2.0] * _pairs(encoding))
    encoding.extend(extension)


def _pairs(encoding: Encoding) -> int:
    return len(encoding.describe(2).get("inverse_frequencies", ()))


def adapting_tokens(run: Run, settings: EvalSettings) -> int:
    """Tokens that go through the model before it is measured, about: for a progress bar."""
    extension = settings.extension
    length = _length(run, extension, settings)
    tokens = extension.finetune_steps * _sequences(run, length) * length
    if isinstance(extension, LongropeConfig) and extension.search:
        windows = SEARCH_TARGETS // _targets_of_a_window(run)
        tokens += (extension.search + STARTS) * windows * length
    return tokens


def adapt(
    model: GPT,
    run: Run,
    dataset: Dataset,
    settings: EvalSettings,
    runtime: Runtime,
    heard: Heard,
    done: dict[str, Any],
) -> None:
    """Extend `model`, with factors found and weights tuned where that is asked for.

    What was found and spent is put into `done`. Raises NotAdaptedError where it cannot be done.
    """
    extension = settings.extension
    try:
        if isinstance(extension, LongropeConfig) and extension.search:
            done["search"] = _search(model, run, dataset.validation, settings, runtime, heard)
            extension = replace(extension, factors=done["search"]["factors"], search=0)
        if extension.finetune_steps:
            extension = extension.fixed(max(settings.eval.ratios))
        model.encoding.extend(extension)
        if extension.finetune_steps:
            length = _length(run, extension, settings)
            done["tuning"] = _tune(model, run, dataset, extension, length, runtime, heard)
    except UnsupportedError as error:
        raise NotAdaptedError(Status.unsupported, str(error)) from None
    except OutOfMemoryError as error:
        raise NotAdaptedError(Status.oom, str(error)) from None


def _length(run: Run, extension: ExtensionConfig, settings: EvalSettings) -> int:
    """Tokens of the windows that are tuned on, or searched on."""
    return max(2, round(extension.reach(max(settings.eval.ratios)) * run.settings.context))


def _require_positions(encoding: Encoding, asked: str, length: int) -> None:
    """Raise NotAdaptedError for an encoding that ends before `length`."""
    most = encoding.max_length
    if most is not None and most < length:
        reason = f"{asked} needs {length} positions; {encoding.config.name} ends after {most}"
        raise NotAdaptedError(Status.unsupported, reason)


def _require_text(split: Split, kind: str, asked: str, length: int) -> None:
    """Raise NotAdaptedError unless a document holds a window of `length` and its last target."""
    longest = int(max(split.lengths, default=0))
    if longest <= length:
        raise NotAdaptedError(
            Status.not_enough_data,
            f"{asked} needs a {kind} document of {length + 1} tokens; the longest of "
            f"data={split.corpus} has {longest}",
        )


# ---------------------------------------------------------------- search


def _search(
    model: GPT,
    run: Run,
    validation: Split,
    settings: EvalSettings,
    runtime: Runtime,
    heard: Heard,
) -> dict[str, Any]:
    """The factors with the lowest loss on validation windows at the longest length."""
    extension, encoding = settings.extension, run.settings.encoding
    assert isinstance(extension, LongropeConfig)
    assert isinstance(encoding, RotaryConfig)
    length, context = _length(run, extension, settings), run.settings.context
    asked = f"extension.search={extension.search}"
    _require_positions(model.encoding, asked, length)
    _require_text(validation, "validation", asked, length)
    size = _targets_of_a_window(run)
    places = anchors(validation, length, size, SEARCH_TARGETS)
    trial, tokens, batch_tokens = 0, 0, settings.eval.batch_tokens
    started = time.perf_counter()

    def nll(factors: list[float]) -> float:
        nonlocal trial, tokens
        trial += 1
        doing = f"search {trial}/{extension.search + len(starts)}"
        try:
            model.encoding.extend(replace(extension, factors=factors))
        except UnsupportedError:  # it changes only pairs that do not turn; refused when given, too
            return math.inf
        tokens += len(places) * length
        losses = window_losses(
            model,
            validation.tokens,
            places,
            length,
            size,
            runtime,
            batch_tokens,
            lambda tokens: heard(tokens, doing),
        )
        return float(losses.mean())

    s = extension.reach(max(settings.eval.ratios))
    starts = starting_points(_pairs(model.encoding), encoding.theta, context, s)
    generator = random.Random(_seed(run, "longrope"))
    found = search(starts, widest(s), extension.search, generator, nll)
    return {
        "trials": extension.search,
        "factor": s,
        "length": length,
        "targets": len(places) * size,
        "targets_sha256": digest(validation, targets_at(places, size)),
        "tokens": tokens,
        "seconds": time.perf_counter() - started,
        "start_nll": found.starts,
        "nll": found.nll,
        "factors": found.factors,
    }


def _targets_of_a_window(run: Run) -> int:
    """As many targets at the end of a window as `controlled` scores."""
    return min(256, run.settings.context // 2)


# ---------------------------------------------------------------- tuning


def _tune(
    model: GPT,
    run: Run,
    dataset: Dataset,
    extension: ExtensionConfig,
    length: int,
    runtime: Runtime,
    heard: Heard,
) -> dict[str, Any]:
    """Train `model` on at `length`, as the run was trained but for a small, constant rate.

    The optimizer starts anew, positions are plain. Batches are a function of the run's seed and the
    step, and none of training's own.
    """
    steps, before = extension.finetune_steps, run.settings.train
    asked = f"extension.finetune_steps={steps}"
    _require_positions(model.encoding, asked, length)
    _require_text(dataset.train, "training", asked, length)
    micro_batch = before.micro_batch and max(1, before.micro_batch * run.settings.context // length)
    warmup = min(WARMUP_STEPS, steps // 10)
    train = replace(
        before,
        steps=steps,
        batch_size=_sequences(run, length),
        micro_batch=micro_batch,
        lr=LR_SHARE * before.lr if extension.finetune_lr is None else extension.finetune_lr,
        schedule=Schedule.constant,
        warmup=warmup / steps,
    )
    in_order(model.encoding)
    settings = replace(
        run.settings,
        train=train,
        context=length,
        seed=_seed(run, "finetune"),
        positions=Positions.plain,
        max_position=None,
    )
    trainer = Trainer(settings, dataset, runtime, model)
    started = time.perf_counter()
    losses = []
    try:
        for step in trainer.run():
            losses.append(step.loss)
            heard(trainer.tokens_per_step, f"tuning {step.step}/{steps}, loss {step.loss:.3f}")
    except DivergedError:
        raise NotAdaptedError(
            Status.nonfinite,
            f"tuning diverged at step {trainer.step + 1} of {steps}; try a smaller "
            f"extension.finetune_lr than {train.lr:g}",
        ) from None
    except OutOfMemoryError:
        raise OutOfMemoryError(
            f"one tuning step of {train.batch_size} x {length} tokens does not fit"
        ) from None
    finally:
        model.zero_grad(set_to_none=True)
        model.eval()
    runtime.synchronize()
    return {
        "steps": steps,
        "length": length,
        "batch_size": train.batch_size,
        "lr": train.lr,
        "warmup_steps": warmup,
        "tokens": steps * trainer.tokens_per_step,
        "seconds": time.perf_counter() - started,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "settings": to_dict(extension),
    }


def _sequences(run: Run, length: int) -> int:
    """As many tokens a step as in training, at least one sequence."""
    return max(1, run.settings.train.batch_size * run.settings.context // length)


def _seed(run: Run, purpose: str) -> int:
    return seeded(run.settings.seed, purpose).initial_seed()
