"""How well a model does a task, by the length of the example: exact match and token accuracy.

Lengths are multiples of the longest length trained; some within the trained range are always among
them, so that a model that learned only its longest examples is found out. The same held-out
examples are scored whatever the encoding, the seed, or the other lengths asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posbench.config import EvalConfig, TrainSettings
from posbench.errors import OutOfMemoryError, UnsupportedError, UserError
from posbench.model import GPT
from posbench.results import Evaluation, Row, Status
from posbench.runtime import Runtime
from posbench.scoring import Scored, answer_scores
from posbench.statistics import wilson_interval
from posbench.targets import PROTOCOL
from posbench.tasks import Examples, TaskDataset

TASK = "task"  # the protocol of its rows
METRICS = ("exact_match", "token_accuracy")
IN_RANGE = (0.25, 0.5, 0.75)  # of the longest trained: measured beside what is asked for
MOST_VALIDATED = 128  # examples in one validation


def problem_lengths(ratios: list[float], longest: int) -> dict[float, int]:
    """Problem lengths by ratio to the longest trained; raises UserError for what contradicts."""
    lengths = {ratio: round(ratio * longest) for ratio in ratios}
    for ratio, length in lengths.items():
        if length < 1:
            raise UserError(
                f"eval.ratios holds {ratio}: of the longest trained length, {longest}, that is "
                "less than 1."
            )
    if len(set(lengths.values())) < len(lengths):
        raise UserError(
            f"eval.ratios={ratios}: two of them round to one length; the longest trained is "
            f"{longest}."
        )
    for ratio in IN_RANGE:
        length = round(ratio * longest)
        if length >= 1 and length not in lengths.values():
            lengths[ratio] = length
    return dict(sorted(lengths.items()))


@dataclass(frozen=True)
class TaskPlan:
    """What is scored: test examples by length, before any model is looked at."""

    dataset: TaskDataset
    longest: int  # trained
    lengths: dict[float, int]
    examples: dict[int, Examples]  # a length past the task's limit has none

    @property
    def tokens(self) -> int:
        """Tokens that go through the model for one subject."""
        return sum(each.tokens.size - len(each) for each in self.examples.values())

    def record(self) -> dict[str, Any]:
        """What a result keeps of it."""
        task, config = self.dataset.task, self.dataset.config
        held = {str(length): each for length, each in self.examples.items()}
        return {
            "protocol": PROTOCOL,
            "task": config.name,
            "unit": config.unit,
            "longest_trained": self.longest,
            "examples": {length: len(each) for length, each in held.items()},
            "tokens": {length: each.tokens.shape[1] for length, each in held.items()},
            "token_chance": task.token_chance,
            "exact_chance": {length: task.exact_chance(int(length)) for length in held},
            "seen_in_training": [n for n in self.examples if not self.dataset.is_split(n)],
        }


def plan_task(dataset: TaskDataset, context: int, config: EvalConfig) -> TaskPlan:
    """Lengths and examples for one task. Raises UserError for settings that contradict."""
    longest = dataset.config.longest(context)
    lengths = problem_lengths(config.ratios, longest)
    most = dataset.config.limit
    examples = {
        length: dataset.examples("test", length, config.examples)
        for length in lengths.values()
        if most is None or length <= most
    }
    return TaskPlan(dataset, longest, lengths, examples)


def task_rows(row: Row, lengths: dict[float, int]) -> list[Row]:
    """The rows of one run, one per length and metric, not yet filled in."""
    return [
        replace(row, protocol=TASK, metric=metric, ratio=ratio, eval_length=length)
        for ratio, length in lengths.items()
        for metric in METRICS
    ]


def evaluate_task(
    model: GPT,
    row: Row,
    plan: TaskPlan,
    config: EvalConfig,
    runtime: Runtime,
    scored: Scored = lambda _: None,
) -> Evaluation:
    """All cells of one model: two rows for each length, each with a status."""
    evaluation = Evaluation()
    for ratio, length in plan.lengths.items():
        rows = task_rows(row, {ratio: length})
        evaluation.rows += rows
        with status_of(rows):
            _measure(model, rows, plan, config, runtime, scored)
    return evaluation


@contextmanager
def status_of(rows: list[Row]) -> Iterator[None]:
    """Turn what keeps rows from being measured into their status and reason."""
    try:
        yield
    except (UnsupportedError, OutOfMemoryError) as reason:
        status = Status.oom if isinstance(reason, OutOfMemoryError) else Status.unsupported
        for row in rows:
            row.status, row.reason = status, str(reason)


def _measure(
    model: GPT,
    rows: list[Row],
    plan: TaskPlan,
    config: EvalConfig,
    runtime: Runtime,
    scored: Scored,
) -> None:
    length = rows[0].eval_length
    examples = plan.examples.get(length)
    if examples is None:
        for row in rows:
            row.status, row.reason = Status.not_enough_data, _shortage(plan, length)
        return
    reads = examples.tokens.shape[1] - 1
    model.encoding.check_length(reads)
    runtime.reset_peak_memory()
    started = time.perf_counter()
    losses, right = answer_scores(
        model, examples.tokens, examples.is_answer, runtime, config.batch_tokens, scored
    )
    seconds = time.perf_counter() - started
    contexts = np.nonzero(examples.is_answer)[1]  # tokens before each answer token
    broken = int((~np.isfinite(losses)).sum())
    task = plan.dataset.task
    values = {
        "exact_match": (float(right.all(axis=1).mean()), task.exact_chance(length)),
        "token_accuracy": (float(right.mean()), task.token_chance),
    }
    for row in rows:
        row.value, chance = values[row.metric]
        row.nll = math.inf if broken else float(losses.mean())
        row.ci_lo, row.ci_hi = wilson_interval(row.value, len(examples))
        row.n_targets, row.n_docs, row.n_nonfinite = losses.size, len(examples), broken
        row.min_context, row.mean_context = int(contexts.min()), float(contexts.mean())
        row.targets_sha256 = examples.sha256
        row.reason = f"chance {chance:.3g}"
        if not plan.dataset.is_split(length):
            row.reason += "; few different examples of this length exist, and training has them too"
        if broken:
            row.status = Status.nonfinite
            row.reason = f"{broken} of {losses.size} losses are not finite, and count as wrong"
        row.seconds, row.tokens_per_s = seconds, len(examples) * reads / seconds
        row.peak_mem_mb = runtime.peak_memory_mb()


def _shortage(plan: TaskPlan, length: int) -> str:
    config = plan.dataset.config
    return f"{config.name} has at most {config.limit} {config.unit}, and {length} were asked for"


@dataclass(frozen=True)
class Validation:
    """One validation: nats per answer token, and the share of examples all right."""

    nll: float
    exact_match: float


def validate_task(
    model: GPT, dataset: TaskDataset, settings: TrainSettings, runtime: Runtime
) -> dict[float, Validation]:
    """Scores on validation examples, by ratio to the longest trained length.

    A ratio that the encoding or the task cannot serve is left out.
    """
    config, longest = dataset.config, dataset.config.longest(settings.context)
    found = {}
    for ratio in settings.train.validate_ratios:
        length = max(1, round(ratio * longest))
        if length > (config.limit or length):
            continue
        wanted = settings.train.validate_targets // config.answers(length)
        count = min(MOST_VALIDATED, max(1, wanted))
        try:
            model.encoding.check_length(config.tokens(length) - 1)
            examples = dataset.examples("validation", length, count)
            losses, right = answer_scores(
                model, examples.tokens, examples.is_answer, runtime, batch_tokens=8192
            )
        except UnsupportedError:
            continue
        found[ratio] = Validation(float(losses.mean()), float(right.all(axis=1).mean()))
    return found
