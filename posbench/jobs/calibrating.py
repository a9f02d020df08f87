"""How fast a model is on this machine, from a few real steps and passes on random tokens."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from posbench.config import BpeConfig, EvalConfig, TrainSettings
from posbench.config.tasks import TaskConfig
from posbench.data import Batches, Split
from posbench.errors import UnsupportedError
from posbench.passes import Sharing
from posbench.plan import MAX_TARGETS, USUAL_RATIOS, plan, planned_tokens
from posbench.runtime import Runtime
from posbench.scoring import window_losses
from posbench.tasks import TaskDataset
from posbench.training import Trainer

SECONDS = 0.5  # spent on steps, and on passes at each length, beside a first one that warms up
MOST_TIMES = 5
STARTING_SECONDS = 6.0  # of a process until its first step: PyTorch, corpus, tokens


@dataclass(frozen=True)
class Speed:
    """Seconds of one optimizer step, and of one token read in evaluation, by length."""

    step: float
    read: dict[int, float]

    def training_seconds(self, settings: TrainSettings) -> float:
        """A whole run: steps, validations at the training length, and its start."""
        train = settings.train
        every = train.validate_every or max(1, train.steps // 10)
        size = min(256, max(1, settings.context // 2))
        windows = max(1, train.validate_targets // size)
        lengths = [max(2, round(ratio * settings.context)) for ratio in train.validate_ratios]
        validation = sum(windows * length * self._per_token(length) for length in lengths)
        return STARTING_SECONDS + train.steps * self.step + train.steps // every * validation

    def evaluation_seconds(self, tokens: dict[int, int], runs: int = 1) -> float:
        """Evaluating `runs` runs in one process, each reading `tokens` of each length."""
        reading = sum(count * self._per_token(length) for length, count in tokens.items())
        return STARTING_SECONDS + runs * reading

    def _per_token(self, length: int) -> float:
        """At the nearest length measured; 0 where the encoding is not defined at any."""
        nearest = min(self.read, key=lambda known: abs(known - length), default=None)
        return 0.0 if nearest is None else self.read[nearest]


@dataclass(frozen=True)
class _RandomText:
    """Random tokens in the place of a dataset: what they are does not change how long they take."""

    split: Split
    vocabulary: int

    @property
    def tokenizer(self) -> _RandomText:
        return self

    def batches(self, context: int, batch_size: int, seed: int) -> Batches:
        return Batches(self.split, context, batch_size, seed)


def vocabulary_of(settings: TrainSettings) -> int:
    """Tokens in the vocabulary, without reading the corpus: as many as were asked for."""
    if isinstance(settings.data, TaskConfig):
        return TaskDataset(settings.data).tokenizer.vocabulary
    tokenizer = settings.tokenizer
    return tokenizer.vocab_size if isinstance(tokenizer, BpeConfig) else 256


def calibrate(settings: TrainSettings, lengths: Sequence[int], runtime: Runtime) -> Speed:
    """The speed of the model of `settings` in training, and in evaluation at each length.

    A length that the encoding is not defined at is left out.
    """
    dataset = _dataset(settings, max(*lengths, settings.context))
    endless = replace(settings, train=replace(settings.train, steps=1_000_000))
    trainer = Trainer(endless, dataset, runtime)
    steps = trainer.run()
    step = _median_seconds(lambda: next(steps), runtime)
    trainer.optimizer.zero_grad(set_to_none=True)
    text = _random_text(max(lengths), trainer.model.vocabulary)
    config = EvalConfig()
    read = {}
    for length in lengths:
        rows = max(1, config.batch_tokens // length)
        ends = np.full(rows, length, dtype=np.int64)
        last = max(1, min(256, settings.context // 2, length))

        def one(length: int = length, ends: Any = ends, last: int = last) -> None:
            most = config.batch_tokens
            window_losses(trainer.model, text.tokens, ends, length, last, runtime, most)

        try:
            read[length] = _median_seconds(one, runtime) / (rows * length)
        except UnsupportedError:
            continue
    if runtime.device.type == "cuda":  # what is kept for later would be missed by the jobs
        torch.cuda.empty_cache()
    return Speed(step, read)


def _dataset(settings: TrainSettings, longest: int) -> Any:
    if isinstance(settings.data, TaskConfig):
        return TaskDataset(settings.data)
    vocabulary = vocabulary_of(settings)
    return _RandomText(_random_text(4 * longest, vocabulary), vocabulary)


def _random_text(size: int, vocabulary: int, documents: int = 1) -> Split:
    """Documents of `size` + 1 random tokens each."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(vocabulary, size=documents * (size + 1), dtype=np.uint32)
    offsets = np.arange(documents + 1, dtype=np.int64) * (size + 1)
    return Split(tokens, offsets, [str(number) for number in range(documents)])


def _median_seconds(work: Callable[[], Any], runtime: Runtime) -> float:
    """Of a few calls, after one that is not counted."""
    work()
    times: list[float] = []
    while len(times) < MOST_TIMES and sum(times) < SECONDS:
        runtime.synchronize()
        started = time.perf_counter()
        work()
        runtime.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def evaluation_tokens(settings: TrainSettings, config: EvalConfig, device: str) -> dict[int, int]:
    """Tokens read by an evaluation of one run, by length, where the test text is long enough.

    They are those of a plan made on documents that hold every window asked for.
    """
    if isinstance(settings.data, TaskConfig):
        lengths = [round(ratio * settings.context) for ratio in config.ratios]
        return {length: length * config.examples for length in lengths}
    longest = round(max(*USUAL_RATIOS, *config.ratios) * settings.context)
    most = config.max_targets or MAX_TARGETS[device]
    text = _random_text(4 * longest, 256, max(64, 2 * most // longest))
    made = plan(text, settings.context, config, device)
    asked = [windows for each in made.layouts.values() for windows in each.windows]
    tokens: Counter[int] = Counter()
    for windows in Sharing(asked).read():
        tokens[windows.length] += len(windows.starts) * windows.length
    tokens[longest] += planned_tokens(made, config) - tokens.total()  # of diagnostics
    return dict(tokens)
