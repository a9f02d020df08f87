"""Which examples a split holds, and batches of them.

The tokens of an example decide its split, by their hash: no test example is ever trained on,
however many are drawn. A length with so few different examples that a split might get none is not
split at all: all of its examples are in every split, and results say so.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posbench.config import TrainSettings
from posbench.config.tasks import TaskConfig
from posbench.model import IGNORED
from posbench.saved import to_dict
from posbench.targets import PROTOCOL
from posbench.tasks.generators import Draws, Example, Integers, Task, build_task
from posbench.tokenizer import WordTokenizer

FORMAT = 1
FEWEST = 50  # different examples that the smallest split of a length must be expected to hold


@dataclass(frozen=True)
class Examples:
    """Examples of one length: tokens [N, n], which of them are the answer [N, n]."""

    tokens: Integers
    is_answer: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sha256(self) -> str:
        """SHA-256 of tokens and answers: two sets with one hash are the same."""
        digest = hashlib.sha256(self.tokens.astype("<u4").tobytes())
        digest.update(self.is_answer.tobytes())
        return digest.hexdigest()


class TaskDataset:
    """A task with its splits, in the place of a corpus of documents."""

    def __init__(self, config: TaskConfig) -> None:
        self.config = config
        self.task: Task = build_task(config)
        self.corpus = config.name
        self.tokenizer = WordTokenizer(self.task.words)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of settings, vocabulary and some examples: of all that decides the examples."""
        lengths = [n for n in (1, 2, 3, 7, 20) if n <= (self.config.limit or n)]
        probes = [self.examples("test", length, 4).sha256 for length in lengths]
        known = [FORMAT, to_dict(self.config), self.task.words, probes]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    def is_split(self, length: int) -> bool:
        """Whether no example of this length is in two splits."""
        held_out = self.config.validation, self.config.test
        return self.task.distinct(length) >= FEWEST / min(*held_out, 1 - sum(held_out))

    def split_of(self, tokens: Integers) -> str:
        """The split of one example, by the hash of its tokens alone."""
        digest = hashlib.sha256(tokens.astype("<u4").tobytes()).digest()
        place = int.from_bytes(digest[:8], "little") / 2**64
        if place < self.config.test:
            return "test"
        return "validation" if place < self.config.test + self.config.validation else "train"

    def draw(self, split: str, length: int, draws: Draws) -> Example:
        """One example of the split; all of them are equally likely."""
        example = self.task.draw(length, draws)
        if self.is_split(length):
            while self.split_of(example.tokens) != split:
                example = self.task.draw(length, draws)
        return example

    def examples(self, split: str, length: int, count: int) -> Examples:
        """The first `count` examples of a held-out split: no seed decides them, nor other counts.

        They are drawn with return: where few differ, some come more than once.
        """
        label = PROTOCOL, "task", split, self.config.name, length
        drawn = [self.draw(split, length, Draws(*label, index)) for index in range(count)]
        return Examples(
            np.stack([each.tokens for each in drawn]), np.stack([each.is_answer for each in drawn])
        )

    def batches(self, context: int, batch_size: int, seed: int) -> TaskBatches:
        """What a run is trained on."""
        return TaskBatches(self, context, batch_size, seed)

    def describe(self, settings: TrainSettings) -> str:
        """What it is, in one line for people."""
        longest = self.config.longest(settings.context)
        return (
            f"{self.corpus}, lengths 1 to {longest} {self.config.unit}, "
            f"{self.tokenizer.vocabulary} tokens in the vocabulary"
        )

    def record(self) -> dict[str, Any]:
        """What a run keeps of it, beside name and fingerprint."""
        return {"unit": self.config.unit}


class TaskBatches:
    """One example in each row, padded on the right; its length uniform on 1 .. `longest`.

    Only answers are predicted: every other target is IGNORED, the padding's too. No token sees the
    padding, which comes after it. Rows are not packed: every example starts at position 0, at
    training as at evaluation, and no attention has to be cut between two of them.
    """

    def __init__(self, dataset: TaskDataset, context: int, batch_size: int, seed: int) -> None:
        self.dataset, self.context, self.batch_size, self.seed = dataset, context, batch_size, seed
        self.longest = dataset.config.longest(context)

    def example(self, step: int, row: int) -> Example:
        """One example: a pure function of (seed, step, row)."""
        draws = Draws("task", "train", self.seed, step, row)
        length = 1 + int(draws.below(self.longest, 1)[0])
        return self.dataset.draw("train", length, draws)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [batch_size, context], int64: a pure function of (seed, step)."""
        inputs = torch.zeros(self.batch_size, self.context, dtype=torch.int64)
        targets = torch.full_like(inputs, IGNORED)
        for row in range(self.batch_size):
            tokens, is_answer = (torch.from_numpy(each) for each in self.example(step, row))
            reads = len(tokens) - 1
            inputs[row, :reads] = tokens[:-1]
            targets[row, :reads] = tokens[1:].where(is_answer[1:], IGNORED)
        return inputs, targets

    def record(self) -> dict[str, Any]:
        """What a run keeps of them."""
        return {"longest_trained": self.longest}
