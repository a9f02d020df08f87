"""Tasks: examples made on the spot, of any length, each with one right answer. No torch here.

A task's size is written here, so that what does not fit is told before any work: an example of
`length` (pairs, digits, symbols: see `unit`) has `tokens(length)` tokens, all but the last of which
the model reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from posbench.config.data import DataConfig
from posbench.config.fields import setting


class DigitOrder(StrEnum):
    plain = "plain"
    reversed = "reversed"


@dataclass
class TaskConfig(DataConfig):
    """Examples of a task, of lengths 1 to the longest that fits; trained on the answers alone."""

    unit: ClassVar[str] = "symbols"  # what `length` counts

    @property
    def per_unit(self) -> int:
        """Tokens by which an example grows with its length."""
        return 2

    @property
    def fixed(self) -> int:
        """Tokens that an example of any length has."""
        return 1

    def tokens(self, length: int) -> int:
        """Tokens of an example, question and answer."""
        return self.per_unit * length + self.fixed

    def answers(self, length: int) -> int:
        """Tokens of its answer."""
        return length

    def longest(self, context: int) -> int:
        """The longest example whose tokens, the last left out, fit into `context`; 0: none."""
        return max(0, (context + 1 - self.fixed) // self.per_unit)

    @property
    def limit(self) -> int | None:
        """The longest example there is; None: no bound."""
        return None


@dataclass
class CopyConfig(TaskConfig):
    """Task: write the symbols again.

    a c b = a c b (Deletang et al. 2023, Kazemnejad et al. 2023).
    """

    name: str = setting("copy", "id of the task")
    symbols: int = setting(16, "different symbols", 2, 10_000)


@dataclass
class ReverseConfig(TaskConfig):
    """Task: write the symbols backwards.

    a c b = b c a (Deletang et al. 2023).
    """

    name: str = setting("reverse", "id of the task")
    symbols: int = setting(16, "different symbols", 2, 10_000)


@dataclass
class SortConfig(TaskConfig):
    """Task: write the numbers in ascending order, each as often as it came.

    7 2 7 = 2 7 7 (Deletang et al. 2023, Kazemnejad et al. 2023).
    """

    unit: ClassVar[str] = "numbers"
    name: str = setting("sort", "id of the task")
    symbols: int = setting(64, "different numbers", 2, 10_000)


@dataclass
class ParityConfig(TaskConfig):
    """Task: say whether the number of ones is odd; one bit for an answer.

    1 0 1 = 0 (Deletang et al. 2023, Kazemnejad et al. 2023).
    """

    unit: ClassVar[str] = "bits"
    name: str = setting("parity", "id of the task")

    @property
    def per_unit(self) -> int:
        return 1

    @property
    def fixed(self) -> int:
        return 2

    def answers(self, length: int) -> int:
        return 1


@dataclass
class AdditionConfig(TaskConfig):
    """Task: add two numbers of as many digits; the sum has one digit more, 0 if need be.

    3 7 + 8 5 = 1 2 2 (Deletang et al. 2023, Kazemnejad et al. 2023).
    """

    unit: ClassVar[str] = "digits"
    name: str = setting("addition", "id of the task")
    order: DigitOrder = setting(
        DigitOrder.plain, "highest digit first (plain), or lowest first in all three numbers"
    )

    @property
    def per_unit(self) -> int:
        return 3

    @property
    def fixed(self) -> int:
        return 3

    def answers(self, length: int) -> int:
        return length + 1


@dataclass
class MqarConfig(TaskConfig):
    """Task: multi-query associative recall; after each key, write the value it came with.

    k1 v4 k7 v2 . k7 v2 k1 v4: every key is asked for once (Arora et al. 2023).
    """

    unit: ClassVar[str] = "pairs"
    name: str = setting("mqar", "id of the task")
    keys: int = setting(256, "different keys; at least as many as pairs", 1, 10_000)
    values: int = setting(64, "different values", 2, 10_000)
    filler: int = setting(1, "filler tokens per pair, scattered between the queries", 0, 1000)

    @property
    def per_unit(self) -> int:
        return 4 + self.filler

    @property
    def fixed(self) -> int:
        return 0

    @property
    def limit(self) -> int | None:
        return self.keys


@dataclass
class PasskeyConfig(TaskConfig):
    """Task: find some digits in a long filler and write them again.

    The digits stand at a random place behind a marker that occurs once (Mohtashami & Jaggi 2023).
    """

    unit: ClassVar[str] = "filler tokens"
    name: str = setting("passkey", "id of the task")
    digits: int = setting(5, "digits of the key", 1, 100)

    @property
    def per_unit(self) -> int:
        return 1

    @property
    def fixed(self) -> int:
        return 2 + 2 * self.digits

    def answers(self, length: int) -> int:
        return self.digits


TASKS: dict[str, type[TaskConfig]] = {
    "mqar": MqarConfig,
    "copy": CopyConfig,
    "reverse": ReverseConfig,
    "addition": AdditionConfig,
    "parity": ParityConfig,
    "sort": SortConfig,
    "passkey": PasskeyConfig,
}
