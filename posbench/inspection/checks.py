"""Two claims about encodings, measured rather than believed.

That a rotation keeps the norm of what it rotates, and that a score depends on the distance i - j
alone. Both are read off the hooks, so any encoding can be asked, and a claim that is false comes
out as a number above its tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from posbench.attention import score_rows
from posbench.encodings import Encoding, Hooks
from posbench.encodings.seeds import seeded
from posbench.model import INIT_STD

ROWS = 17  # query positions compared with the last one


@dataclass(frozen=True)
class Measure:
    """A claim in one precision: the largest relative deviation, and what rounding may cause."""

    value: float
    tolerance: float
    holds: bool


@dataclass(frozen=True)
class Check:
    """A claim over the first `positions` positions; `claimed` says whether the scheme makes it."""

    positions: int
    claimed: bool
    float32: Measure
    float64: Measure


def run_checks(
    encoding: Encoding, positions: int, factor: float, seed: int
) -> dict[str, Check | None]:
    """Each claim's check, or None where there is nothing to ask. `factor` multiplies rotations."""
    x = torch.zeros(1, positions, encoding.shape.width)
    hooks = encoding.hooks(x, torch.arange(positions), 0)
    embedded = bool(position_vectors(encoding, positions, torch.float64).any())
    checks: dict[str, Check | None] = dict.fromkeys(
        (
            "rotation_keeps_norm",
            "score_depends_on_distance_alone",
            "embedding_dot_product_depends_on_distance_alone",
        )
    )
    if hooks.rotate is not None:
        checks["rotation_keeps_norm"] = _check(
            positions,
            encoding.keeps_norm,
            lambda dtype: _norm_change(encoding, positions, factor, seed, dtype),
            lambda eps: 8 * eps,
        )
    # Rounding an angle p * f costs about p * eps radians; summing D products, about D * eps.
    noise = 4 * positions + encoding.shape.width
    if hooks.attend is None:
        checks["score_depends_on_distance_alone"] = _check(
            positions,
            encoding.relative,
            lambda dtype: _score_change(encoding, positions, seed, dtype),
            lambda eps: noise * eps,
        )
    if embedded:
        checks["embedding_dot_product_depends_on_distance_alone"] = _check(
            positions,
            False,
            lambda dtype: _dot_product_change(encoding, positions, dtype),
            lambda eps: noise * eps,
        )
    return checks


def _check(
    positions: int,
    claimed: bool,
    measure: Callable[[torch.dtype], float],
    tolerance: Callable[[float], float],
) -> Check:
    measures = []
    for dtype in (torch.float32, torch.float64):
        value, allowed = measure(dtype), tolerance(torch.finfo(dtype).eps)
        measures.append(Measure(value, allowed, value <= allowed))
    return Check(positions, claimed, *measures)


# ---------------------------------------------------------------- a rotation keeps the norm


def _norm_change(
    encoding: Encoding, positions: int, factor: float, seed: int, dtype: torch.dtype
) -> float:
    """max | |R q| / expected - 1 | over positions, heads, q and k.

    Channels that the rotation leaves alone keep their size; the others gain `factor`.
    """
    shape = encoding.shape
    size = (1, shape.heads, positions, shape.head_size)
    q, k = (_normal(size, seed, name).to(dtype) for name in ("inspect.q", "inspect.k"))
    hooks = encoding.hooks(q.new_zeros(1, positions, shape.width), torch.arange(positions), 0)
    assert hooks.rotate is not None
    changes = []
    for before, after in zip((q, k), hooks.rotate(q, k), strict=True):
        exact = before.double()
        if after.shape == before.shape:
            turned = (after != before).flatten(0, -2).any(dim=0)
            exact = torch.where(turned, exact * factor, exact)
        expected = torch.linalg.vector_norm(exact, dim=-1)
        changes.append((torch.linalg.vector_norm(after.double(), dim=-1) / expected - 1).abs())
    return float(torch.stack(changes).max())


# ---------------------------------------------------------------- a score depends on i - j alone


def rows_to_compare(positions: int) -> list[int]:
    """Query positions spread evenly over the text, the last one always among them."""
    count = min(ROWS, positions)
    return sorted({round(step * (positions - 1) / max(1, count - 1)) for step in range(count)})


def probe(
    encoding: Encoding, positions: int, seed: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Hooks]:
    """q, k [1, H, T, D] and hooks of a first layer that reads one and the same token everywhere.

    Whatever differs between two scores is then the encoding's doing.
    """
    shape = encoding.shape
    indices = torch.arange(positions)
    token = INIT_STD * _normal((shape.width,), seed, "inspect.token")
    x = encoding.embed(token.to(dtype).expand(1, positions, -1), indices)
    x = F.layer_norm(x, (shape.width,))
    hooks = encoding.hooks(x, indices, 0)
    q, k = (
        (x @ (_normal((shape.width, shape.width), seed, name) / math.sqrt(shape.width)).to(dtype))
        .view(1, positions, shape.heads, shape.head_size)
        .transpose(1, 2)
        for name in ("inspect.q_weight", "inspect.k_weight")
    )
    return q, k, hooks


def _score_change(encoding: Encoding, positions: int, seed: int, dtype: torch.dtype) -> float:
    """max |score(i + c, j + c) - score(i, j)|, as a share of the largest score of that head."""
    q, k, hooks = probe(encoding, positions, seed, dtype)
    rows = score_rows(q, k, hooks, rows_to_compare(positions))
    # The largest a product q.k could be, too: a score near zero by chance is no scale.
    norms = torch.linalg.vector_norm(q, dim=-1) * torch.linalg.vector_norm(k, dim=-1)
    product = norms.amax(dim=(0, 2)) / math.sqrt(q.shape[-1])
    return _row_change([row[0] for row in rows], product)


def _dot_product_change(encoding: Encoding, positions: int, dtype: torch.dtype) -> float:
    """max |p_{i+c}.p_{j+c} - p_i.p_j| of the position vectors, as a share of the largest."""
    vectors = position_vectors(encoding, positions, dtype)
    rows = [(vectors[i] @ vectors[: i + 1].T)[None] for i in rows_to_compare(positions)]
    return _row_change(rows, rows[0].new_zeros(1))


def _row_change(rows: list[Tensor], least_scale: Tensor) -> float:
    """Largest change of a row [H, i + 1] against the last at equal distance, per scale [H].

    A pair that both rows hide, at -inf, is no change; one that only one of them hides is infinite.
    """
    last = rows[-1]
    finite = last.masked_fill(last.isinf(), 0)
    scale = torch.maximum(finite.abs().amax(dim=-1), least_scale).double()
    changes = [
        (difference(row, last[:, -row.shape[1] :]).amax(dim=-1).double() / scale).max()
        for row in rows
    ]
    return float(torch.stack(changes).max())


def difference(one: Tensor, other: Tensor) -> Tensor:
    """|one - other|; 0 where both are the same infinity."""
    return torch.where(one == other, 0, (one - other).abs())


def position_vectors(encoding: Encoding, positions: int, dtype: torch.dtype) -> Tensor:
    """What the scheme adds to the embedding at each of the first positions, [T, C]."""
    nothing = torch.zeros(1, positions, encoding.shape.width, dtype=dtype)
    return encoding.embed(nothing, torch.arange(positions))[0].detach()


def _normal(size: tuple[int, ...], seed: int, name: str) -> Tensor:
    return torch.randn(size, generator=seeded(seed, name), dtype=torch.float64)
