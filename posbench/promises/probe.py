"""The small models that promises are measured on, and what a measurement is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from posbench.config import ModelConfig, Norm
from posbench.config.encodings import EncodingConfig
from posbench.encodings import Encoding
from posbench.model import GPT, build_model
from posbench.plugins import LOADED, told

CONTEXT = 48  # training length; no power of two
VOCABULARY = 61
SIZE = ModelConfig(layers=2, width=48, heads=3)  # as many heads as nothing else is long
Kind = TypeVar("Kind", bound=nn.Module)
ROUNDING = 1e-6  # what two ways of adding the same float64 numbers may differ by, and far more


@dataclass(frozen=True)
class Measured:
    """What was found and what it may be, in words; `where` says where to look if it fails."""

    holds: bool
    found: str
    bound: str = ""
    where: str = ""
    slow: bool = False  # it works, but not as fast as it could


class _Unwritten(TorchFunctionMode):
    """Inside, memory that is handed out as it was found holds nan."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.empty, torch.empty_like, Tensor.new_empty) and made.is_floating_point():
            return made.fill_(torch.nan)
        return made


class Subject:
    """One encoding, in models of one size."""

    def __init__(
        self, config: EncodingConfig, size: ModelConfig = SIZE, context: int = CONTEXT
    ) -> None:
        self.config, self.size, self.context = config, size, context
        self.cap: int | None = None  # longest text that was found to work, if not all do

    def fresh(self, seed: int = 0) -> GPT:
        """A model with the weights a training run starts from, those never written to being nan."""
        with _Unwritten():
            return build_model(self.size, self.config, self.context, VOCABULARY, seed).eval()

    def model(self, seed: int = 0) -> GPT:
        """The same with weights so large that attention does something, and none of them zero."""
        model = self.fresh(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1 and parameter.std() < 0.05:  # not those of unit size already
                    parameter.mul_(8)
                if not parameter.any():  # one that starts at zero would do nothing, leak included
                    generator = torch.Generator().manual_seed(seed)
                    parameter.normal_(0.0, 0.5, generator=generator)
        return model

    def exact(self, norm: Norm | None = None) -> GPT:
        """The same in float64, with another norm if one is named."""
        if norm is None:
            return self.model().double()
        size = replace(self.size, norm=norm)
        return Subject(self.config, size, self.context).model().double()

    @cached_property
    def encoding(self) -> Encoding:
        """The encoding of such a model."""
        return self.model().encoding

    @property
    def limit(self) -> int | None:
        """The longest text that promises are measured on; None: no bound."""
        bounds = [each for each in (self.encoding.max_length, self.cap) if each is not None]
        return min(bounds, default=None)

    @property
    def lengths(self) -> list[int]:
        """1x and 4x the training length, or what is possible."""
        longest = self.limit or 4 * self.context
        return sorted({min(self.context, longest), min(4 * self.context, longest)})


def tokens(length: int, rows: int = 2, seed: int = 5) -> Tensor:
    """Token ids [rows, length], the same each time."""
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def changed(text: Tensor, place: int) -> Tensor:
    """The same text with another token at one place."""
    other = text.clone()
    other[:, place] = (other[:, place] + 1) % VOCABULARY
    return other


def twin(model: Kind) -> Kind:
    """A copy that shares nothing."""
    return copy.deepcopy(model)


def largest(difference: Tensor) -> float:
    """The largest absolute value; nan if there is one, 0 for nothing."""
    return float(difference.detach().abs().max()) if difference.numel() else 0.0


def number(value: float) -> str:
    """Two digits are enough to see by how much a bound was missed."""
    return f"{value:.2g}"


def raised(error: Exception, subject: Subject) -> str:
    """An exception in one line, with the line of the plugin that led to it."""
    plugin = LOADED.get(subject.config.name)
    return told(error, plugin.path if plugin else Path())
