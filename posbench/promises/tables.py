"""Positions as numbers: exact at any distance, in any dtype, whatever the class casts to.

The reference is the encoding's own code in float64 with its casts taken out, so a cast that is
written there in so many words shows like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from posbench.encodings import Encoding
from posbench.promises.probe import Measured, Subject, number, twin
from posbench.promises.signs import only_bias

FAR = 65_536
NEARER = 4_096  # how far where the encoding makes a T x T table
FLOAT32 = 2.0**-23  # spacing of float32 numbers, relative
VALUES = 1e-5  # of the largest value: what float32 arithmetic may lose
DISTINCT = 1e-6  # of the largest value: neighbours that differ by more must do so in float32 too

_NARROW = {torch.float32, torch.float16, torch.bfloat16}
_CASTS = {"float", "half", "bfloat16"}


class _Widened(TorchFunctionMode):
    """Inside, whatever asks for a floating dtype gets float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _CASTS and len(args) == 1:
            return args[0].double()
        wide = [torch.float64 if _is_narrow(each) else each for each in args]
        named = {k: torch.float64 if _is_narrow(v) else v for k, v in (kwargs or {}).items()}
        return func(*wide, **named)


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _NARROW


@contextmanager
def widened() -> Iterator[None]:
    """Inside, casts to a narrower floating dtype do nothing, and new tensors are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)


class _Largest(TorchFunctionMode):
    """Remembers the size of the largest tensor made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.size = max(self.size, made.numel())
        return made


class Tables(NamedTuple):
    """What an encoding feeds into a model at positions 0..T-1, float64, a row per position."""

    embedded: Tensor  # [T, C], added to the token embeddings
    turned: Tensor  # [T, *], queries and keys of ones after `rotate`
    bias: Tensor  # [T, H], by distance, for q = k = 0


@torch.no_grad()
def tables(encoding: Encoding, length: int, dtype: torch.dtype) -> Tables:
    """The tables behind the hooks, from cos and sin themselves: q and k are float32 or float64."""
    shape, positions = encoding.shape, torch.arange(length)
    x = torch.zeros(1, length, shape.width, dtype=dtype)
    hooks = encoding.hooks(x, positions, 0)
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    turned = torch.zeros(length, 0)
    if hooks.rotate is not None:
        ones = torch.ones(1, shape.heads, length, shape.head_size, dtype=exact)
        both = torch.cat(hooks.rotate(ones, ones), dim=-1)
        turned = both[0].transpose(0, 1).flatten(1)
    bias = only_bias(hooks, shape.heads, shape.head_size, length, exact).T
    embedded = encoding.embed(x, positions)[0]
    return Tables(embedded.double(), turned.double(), bias.double())


def reach(encoding: Encoding, limit: int) -> int:
    """Positions that can be looked at: `limit`, or fewer if the encoding makes T x T tensors."""
    sizes = []
    for length in (256, 512):
        if length > limit:
            return limit
        with _Largest() as seen:
            tables(encoding, length, torch.float32)
        sizes.append(seen.size)
    is_square = sizes[1] > 3 * sizes[0]
    return min(limit, NEARER) if is_square else limit


class _Way(NamedTuple):
    """How a model may be run: the dtype of its weights, of what it reads, and autocast."""

    name: str
    weights: torch.dtype = torch.float32
    inputs: torch.dtype = torch.float32
    autocast: bool = False


WAYS = (
    _Way("float32"),
    _Way("bfloat16 inputs", inputs=torch.bfloat16),
    _Way("bfloat16 autocast", autocast=True),
    _Way("bfloat16", torch.bfloat16, torch.bfloat16),
    _Way("float16", torch.float16, torch.float16),
)


def exact(subject: Subject) -> Measured:
    """Embeddings, rotations and biases are exact to position 65,536 however the model is run."""
    model = subject.model()
    length = reach(model.encoding, min(FAR + 1, subject.limit or FAR + 1))
    references: dict[torch.dtype, Tables] = {}
    for way in WAYS:
        # What is trained is rounded by a cast; what is computed from positions must not be.
        cast = twin(model).to(way.weights)
        if way.weights not in references:
            with widened():
                wide = twin(cast).double().encoding
                references[way.weights] = tables(wide, length, torch.float64)
        reference = references[way.weights]
        with torch.autocast("cpu", torch.bfloat16, enabled=way.autocast):
            found = tables(cast.encoding, length, way.inputs)
        for name in Tables._fields:
            # A few roundings of the weights' dtype may be lost, and one of the embedding's own.
            dtype = way.inputs if name == "embedded" else way.weights
            own = 0.0 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
            message = _compared(name, getattr(found, name), getattr(reference, name), own)
            if message:
                return Measured(False, f"{way.name}: {message}", "float32's rounding", _WHERE)
    names = ", ".join(way.name for way in WAYS)
    return Measured(True, f"positions to {length - 1:,} in {names}", "float32's rounding")


_WHERE = (
    "compute angles and distances from positions.double(), and round the result once, to float32; "
    "257 is no bfloat16 number"
)


def _compared(name: str, found: Tensor, reference: Tensor, own: float) -> str:
    """What is wrong with a table [T, *], in words; empty if it is right."""
    if not reference.numel():
        return ""
    alike = (found == reference) & found.isinf()  # a window, for example
    found, reference = found.masked_fill(alike, 0.0), reference.masked_fill(alike, 0.0)
    if not found.isfinite().all():
        place = int((~found.isfinite()).any(dim=1).nonzero()[0])
        return f"{_NAMES[name]} is not finite at {place:,}"
    scale = reference.abs().amax(dim=1, keepdim=True) if name == "turned" else reference.abs().max()
    scale = scale.clamp(min=1e-30)
    error = ((found - reference).abs() / scale).amax(dim=1)
    steps = (reference.diff(dim=0).abs() / (scale[1:] if scale.dim() else scale)).amax(dim=1)
    nothing = steps.new_zeros(1)
    slope = torch.maximum(torch.cat((nothing, steps)), torch.cat((steps, nothing)))
    # As if the position itself had been rounded to float32, and the value too.
    bound = own + VALUES + 4 * FLOAT32 * torch.arange(len(error)) * slope
    wrong = ~(error <= bound)
    merged = (found[1:] == found[:-1]).all(dim=1) & (steps > DISTINCT)
    if name == "embedded" and own:
        merged = merged & False
    if not (wrong.any() or merged.any()):
        return ""
    worst = int(error.argmax())
    parts = [f"{_NAMES[name]} off by {number(float(error[worst]))} of its size at {worst:,}"]
    if wrong.any():
        parts.append(f"first at {int(wrong.nonzero()[0]):,}")
    if merged.any():
        place = int(merged.nonzero()[0])
        parts.append(f"{place:,} and {place + 1:,} look the same")
    return ", ".join(parts)


_NAMES = {"embedded": "embedding", "turned": "rotation", "bias": "bias"}
