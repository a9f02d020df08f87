"""The Encoding contract: what a scheme may say about positions, and what every scheme promises.

Shapes: B batch, T tokens, C model width, H heads, D head size. Query index i, key index j <= i.

A scheme overrides `embed` or `hooks`, or both; the class alone is NoPE. What an attention layer
does with position is declared in the cheapest form that is exact, because each form has its own
fast path, written once in `posbench.attention`:

    rotate         (q, k) -> (q, k), each [B, H, T, D]; the softmax scale stays 1/sqrt(D)
    distance_bias  distances [...] -> [H, ...], a bias that depends on i - j alone; evaluated on
                   arange(T) for the fast paths, never on a T x T grid
    key_bias       [B, H, T], a term of the key alone (forgetting gates: c_i - c_j, where c_i
                   cancels in the softmax); float64 where it is a sum over the text
    score_mod      (score, b, h, i, j) -> score, FlexAttention's signature, for anything else that
                   (i, j) decide; only indexing and arithmetic, no Python `if` on tensors
    mask_mod       (b, h, i, j) -> keep; and-ed with the causal mask
    rescore        (scores [B, H, R, T], q [B, H, R, D], k, rows [R]) -> scores, for what needs the
                   whole row of logits
    attend         (q, k, v, window) -> out, for what is not a softmax over q.k; owns causality,
                   scale and the window
    window         how many keys a query looks back on, its own included; None: all
    temperature    multiplies the scaled scores q.k / sqrt(D) before any bias: a number, [T], one
                   per query, or [H, T]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from posbench.config import Beyond
from posbench.config.encodings import EncodingConfig
from posbench.config.extensions import ExtensionConfig, NoExtensionConfig, WindowConfig
from posbench.encodings.windows import refuse_sizes, visible
from posbench.errors import UnsupportedError

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
DistanceBias = Callable[[Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Rescore = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
Generators = Callable[[str], torch.Generator]


class Shape(NamedTuple):
    """What a scheme may know of the model it serves."""

    layers: int
    heads: int
    head_size: int
    width: int
    train_length: int
    drawn_below: int | None = None  # bound of the positions that training draws; None: plain ones

    @property
    def positions(self) -> int:
        """How many different positions training has."""
        return self.drawn_below or self.train_length


class Hooks(NamedTuple):
    """What one attention layer does with position. The default is plain causal attention."""

    rotate: Rotate | None = None
    distance_bias: DistanceBias | None = None
    key_bias: Tensor | None = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    rescore: Rescore | None = None
    attend: Attend | None = None
    window: int | None = None
    temperature: float | Tensor = 1.0


def precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype for cos, sin, distances and biases: float32 for all models but a float64 one."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class Encoding(nn.Module):
    """How a model learns where its tokens are. This class alone is NoPE.

    Promises, each held by tests/test_contract.py for every scheme in the table: causal; equal
    under a shift of all positions where `relative`; the first T logits do not depend on what
    follows where `prefix_consistent`; no buffer, hence nothing that a cast or a longer text can
    spoil; every parameter trains.
    """

    relative: ClassVar[bool] = False  # scores depend on i - j only
    keeps_norm: ClassVar[bool] = True  # `rotate` multiplies no vector but by an extension's factor

    def __init__(self, config: EncodingConfig, shape: Shape) -> None:
        super().__init__()
        self.config = config
        self.shape = shape
        self.extension: ExtensionConfig = NoExtensionConfig()

    @property
    def max_length(self) -> int | None:
        """Longest text the scheme is defined for, in tokens; None: no bound."""
        return None

    @property
    def limit(self) -> str:
        """Why there is a `max_length`, in words that name it."""
        return f"{self.config.name} is defined for {self.max_length} positions"

    def check_length(self, length: int) -> None:
        """Raise UnsupportedError for a text longer than the scheme is defined for."""
        if self.max_length is not None and length > self.max_length:
            raise UnsupportedError(f"{self.limit}; {length} positions requested")

    @property
    def prefix_consistent(self) -> bool:
        """Whether the logits of the first T tokens are the same whatever the text's length."""
        return not self.extension.by_length

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Token embeddings [B, T, C] with what the scheme adds for `positions` [T]."""
        return x

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        """What layer number `layer` does; x [B, T, C] is its normalised input, positions [T]."""
        return self.sight(positions)

    def sight(self, positions: Tensor) -> Hooks:
        """What the extension hides in every layer, also in one without the scheme."""
        if not isinstance(self.extension, WindowConfig):
            return Hooks()
        sinks, window, _ = self.extension.sizes_for(self.shape.train_length)
        if sinks == 0:
            return Hooks(window=window)
        return Hooks(mask_mod=visible(positions, sinks, window))

    def extend(self, extension: ExtensionConfig) -> None:
        """Use `extension` from now on. Raises UnsupportedError if it means nothing here."""
        if not self.config.takes(extension):
            raise UnsupportedError(extension.refusal(self.config.name))
        self.refuse(extension)  # now, not in a layer
        self.extension = extension

    def refuse(self, extension: ExtensionConfig) -> None:
        """Raise UnsupportedError where an extension that the scheme takes would change nothing."""
        if isinstance(extension, WindowConfig):
            refuse_sizes(self.shape.train_length, extension)

    def go_beyond(self, beyond: Beyond) -> None:
        """Do `beyond` past the end of a table from now on; UnsupportedError without a table."""
        if beyond is not Beyond.error:
            raise UnsupportedError(
                f"beyond={beyond} is for tables that end; {self.config.name} has none"
            )

    def trained_to(self, share: float) -> None:
        """Training has come as far as `share`, 0 to 1; what changes on the way changes here."""

    def initialise(self, generators: Generators) -> None:
        """Fill the scheme's own parameters; `generators(name)` is seeded for that parameter."""

    def describe(self, length: int) -> dict[str, Any]:
        """The numbers behind the scheme at `length` tokens, for `posbench inspect`."""
        return {}

    def parameter_count(self) -> int:
        """Number of trained values that belong to the encoding."""
        return sum(parameter.numel() for parameter in self.parameters())
