"""Generators: (length, draws) to one example of a task, with one right answer to its question.

No example ends with a token that says so: a model that must learn when to stop extrapolates worse
(Newman et al. 2020, "The EOS Decision and Length Extrapolation"), and that is another question.
Answers have a length that the question decides.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import perm
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from posbench.config.tasks import (
    AdditionConfig,
    CopyConfig,
    DigitOrder,
    MqarConfig,
    ParityConfig,
    PasskeyConfig,
    ReverseConfig,
    SortConfig,
    TaskConfig,
)

Integers = npt.NDArray[np.int64]
PAD = "<pad>"  # id 0: never asked for, never an answer
FILLERS = 16  # different filler tokens, which are no keys, no values, no digits and no markers


class Example(NamedTuple):
    """Tokens [n] of question and answer, and which of them [n] are the answer."""

    tokens: Integers
    is_answer: npt.NDArray[np.bool_]


class Draws:
    """Random numbers that a label decides: the same on every machine, in every version of numpy."""

    def __init__(self, *label: object) -> None:
        digest = hashlib.sha256("/".join(str(part) for part in label).encode()).digest()
        self._stream = np.random.Philox(key=int.from_bytes(digest[:16], "little"))

    def below(self, bound: int, count: int) -> Integers:
        """Whole numbers 0 .. bound - 1, uniform: the bias of `%` is below 1e-14."""
        return (self._stream.random_raw(count) % np.uint64(bound)).astype(np.int64)

    def shuffled(self, count: int) -> Integers:
        """0 .. count - 1 in random order."""
        return np.argsort(self._stream.random_raw(count), kind="stable").astype(np.int64)


class Task(ABC):
    """What examples are made of. Ids index `words`; `answers` are those an answer may hold."""

    words: list[str]
    answers: range

    def __init__(self, config: TaskConfig) -> None:
        self.config = config

    @abstractmethod
    def draw(self, length: int, draws: Draws) -> Example:
        """One example; all questions of this length are equally likely."""

    @abstractmethod
    def distinct(self, length: int) -> int:
        """How many different examples of a length there are, or a bound below that."""

    @property
    def token_chance(self) -> float:
        """Accuracy of a guess that knows nothing but which tokens an answer may hold."""
        return 1 / len(self.answers)

    def exact_chance(self, length: int) -> float:
        """The chance that such a guess has every token of the answer right."""
        return float(self.token_chance ** self.config.answers(length))


def _vocabulary(*groups: Iterable[str]) -> list[str]:
    return [PAD, *(word for group in groups for word in group)]


def _numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def _question_and_answer(question: list[Any], answer: Integers) -> Example:
    tokens = np.concatenate([*question, answer]).astype(np.int64)
    return Example(tokens, np.arange(len(tokens)) >= len(tokens) - len(answer))


class _Rewriting(Task):
    """Symbols, an equals sign, and the symbols in an order that a rule decides."""

    def __init__(self, config: CopyConfig | ReverseConfig | SortConfig) -> None:
        super().__init__(config)
        self.words = _vocabulary(["="], _numbered("", config.symbols))
        self.answers = range(2, 2 + config.symbols)

    def draw(self, length: int, draws: Draws) -> Example:
        symbols = 2 + draws.below(len(self.answers), length)
        return _question_and_answer([symbols, [1]], self.answer(symbols))

    @abstractmethod
    def answer(self, symbols: Integers) -> Integers:
        """What is to be written."""

    def distinct(self, length: int) -> int:
        return int(len(self.answers) ** length)


class Copy(_Rewriting):
    """a c b = a c b."""

    def answer(self, symbols: Integers) -> Integers:
        return symbols


class Reverse(_Rewriting):
    """a c b = b c a."""

    def answer(self, symbols: Integers) -> Integers:
        return np.flip(symbols)


class Sort(_Rewriting):
    """7 2 7 = 2 7 7."""

    def answer(self, symbols: Integers) -> Integers:
        return np.sort(symbols)


class Parity(Task):
    """1 0 1 = 0."""

    def __init__(self, config: ParityConfig) -> None:
        super().__init__(config)
        self.words = _vocabulary("=01")
        self.answers = range(2, 4)

    def draw(self, length: int, draws: Draws) -> Example:
        bits = draws.below(2, length)
        return _question_and_answer([2 + bits, [1]], 2 + bits.sum(keepdims=True) % 2)

    def distinct(self, length: int) -> int:
        return int(2**length)


class Addition(Task):
    """3 7 + 8 5 = 1 2 2."""

    def __init__(self, config: AdditionConfig) -> None:
        super().__init__(config)
        self.words = _vocabulary("=+", _numbered("", 10))
        self.answers = range(3, 13)
        self.step = -1 if config.order is DigitOrder.reversed else 1

    def draw(self, length: int, draws: Draws) -> Example:
        numbers = [draws.below(10, length) for _ in range(2)]  # highest digit first
        total = sum(int("".join(map(str, digits))) for digits in numbers)
        digits = np.array([int(digit) for digit in str(total).zfill(length + 1)])
        left, right, total_digits = (3 + each[:: self.step] for each in (*numbers, digits))
        return _question_and_answer([left, [2], right, [1]], total_digits)

    def distinct(self, length: int) -> int:
        return int(10 ** (2 * length))


class Mqar(Task):
    """k1 v4 k7 v2 . k7 v2 k1 v4: keys differ, and filler is neither a key nor a value."""

    def __init__(self, config: MqarConfig) -> None:
        super().__init__(config)
        self.keys, self.values, self.filler = config.keys, config.values, config.filler
        self.words = _vocabulary(
            _numbered("k", config.keys), _numbered("v", config.values), _numbered(".", FILLERS)
        )
        self.answers = range(1 + config.keys, 1 + config.keys + config.values)

    def draw(self, length: int, draws: Draws) -> Example:
        keys = 1 + draws.shuffled(self.keys)[:length]
        values = self.answers.start + draws.below(self.values, length)
        filler = self.answers.stop + draws.below(FILLERS, self.filler * length)
        # Queries (two tokens each) and filler (one) in random order.
        order = draws.shuffled(length + len(filler))
        is_query = order < length
        starts = np.cumsum(1 + is_query) - (1 + is_query)
        asked = np.empty(2 * length + len(filler), dtype=np.int64)
        asked[starts[~is_query]] = filler
        asked[starts[is_query]] = keys[order[is_query]]
        answers = starts[is_query] + 1
        asked[answers] = values[order[is_query]]
        tokens = np.concatenate([np.stack([keys, values], axis=1).ravel(), asked])
        is_answer = np.zeros(len(tokens), dtype=bool)
        is_answer[2 * length + answers] = True
        return Example(tokens, is_answer)

    def distinct(self, length: int) -> int:
        return int(perm(self.keys, length) * self.values**length)


class Passkey(Task):
    """. . key 4 0 9 . . ? 4 0 9: one key, at a random place."""

    def __init__(self, config: PasskeyConfig) -> None:
        super().__init__(config)
        self.digits = config.digits
        self.words = _vocabulary(["key", "?"], _numbered("", 10), _numbered(".", FILLERS))
        self.answers = range(3, 13)

    def draw(self, length: int, draws: Draws) -> Example:
        filler = 13 + draws.below(FILLERS, length)
        depth = int(draws.below(length + 1, 1)[0])  # filler tokens before the key
        key = 3 + draws.below(10, self.digits)
        return _question_and_answer([filler[:depth], [1], key, filler[depth:], [2]], key)

    def distinct(self, length: int) -> int:
        return int(10**self.digits * FILLERS**length * (length + 1))


_CLASSES: dict[type[TaskConfig], type[Any]] = {
    CopyConfig: Copy,
    ReverseConfig: Reverse,
    SortConfig: Sort,
    ParityConfig: Parity,
    AdditionConfig: Addition,
    MqarConfig: Mqar,
    PasskeyConfig: Passkey,
}


def build_task(config: TaskConfig) -> Task:
    """The task that `config` describes."""
    task: Task = _CLASSES[type(config)](config)
    return task
