"""Causal attention with any combination of hooks: which kernel serves which form, and the kernels.

Shapes: q, k, v [B, H, T, D]. Query and key lengths are equal by construction. `dense` in float64
with one chunk is the oracle of every other path (tests/test_attention.py).

    form                          CPU        CUDA
    nothing, rotate, temperature  sdpa       sdpa
    distance_bias, window         strided    flex
    key_bias, score_mod, mask_mod dense      flex
    rescore                       dense      dense
    attend                        own        own

Where flex cannot run (heads of fewer than 16 channels, no compiler), CUDA takes dense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from posbench.encodings.base import DistanceBias, Hooks, MaskMod, precise
from posbench.toolchain import can_compile

SCORES_PER_CHUNK = 1 << 24  # float32 scores held at once by the dense path without gradients
FLEX_HEAD_SIZE = 16  # the smallest that FlexAttention compiles for
FLEX_VARIANTS = 64  # of the compiled kernel; torch's 8 are too few for lengths x sizes x models


class Kernel(StrEnum):
    """How one attention layer is computed."""

    own = "own"
    sdpa = "sdpa"
    strided = "strided"
    flex = "flex"
    dense = "dense"


def choose(hooks: Hooks, device: str, head_size: int) -> Kernel:
    """The fastest exact kernel for `hooks` on a device type ("cpu", "cuda"): the table above."""
    if hooks.attend is not None:
        return Kernel.own
    if hooks.rescore is not None:
        return Kernel.dense
    by_pair = any(form is not None for form in (hooks.key_bias, hooks.score_mod, hooks.mask_mod))
    if not by_pair and hooks.distance_bias is None and hooks.window is None:
        return Kernel.sdpa
    if device == "cuda":
        # While the model itself is being compiled there is nothing to try.
        fused = head_size >= FLEX_HEAD_SIZE and (torch.compiler.is_compiling() or can_compile())
        return Kernel.flex if fused else Kernel.dense
    return Kernel.dense if by_pair else Kernel.strided


def attend(q: Tensor, k: Tensor, v: Tensor, hooks: Hooks, kernel: Kernel | None = None) -> Tensor:
    """Causal attention [B, H, T, D] under `hooks`; `kernel` overrides the choice, for tests."""
    kernel = kernel or choose(hooks, q.device.type, v.shape[-1])
    # Autocast would round biases, and the positions behind them, to eight bits (257 becomes 256),
    # and copy the strided table to its full T x T.
    with torch.autocast(q.device.type, enabled=False):
        if hooks.attend is not None:
            return hooks.attend(_warmed(q, hooks.temperature), k, v, hooks.window)
        q, k, scale = _placed(q, k, hooks)
        q, k = q.to(v.dtype), k.to(v.dtype)
        return _KERNELS[kernel](q, k, v, hooks, scale)


def _placed(q: Tensor, k: Tensor, hooks: Hooks) -> tuple[Tensor, Tensor, float]:
    """q and k after rotation and temperature, and the scale q.k still needs."""
    scale = 1 / math.sqrt(q.shape[-1])  # of the head size, before any widening by `rotate`
    if hooks.rotate is not None:
        q, k = hooks.rotate(q, k)
    return _warmed(q, hooks.temperature), k, scale


def _warmed(q: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return (q * temperature.unsqueeze(-1)).to(q.dtype)
    return q if temperature == 1 else q * temperature


def score_rows(q: Tensor, k: Tensor, hooks: Hooks, rows: list[int]) -> list[Tensor]:
    """Scores [B, H, i + 1] of each query i in `rows` before the softmax, as `dense` has them."""
    q, k, scale = _placed(q, k, hooks)
    return [_scores(q[:, :, i : i + 1], k[:, :, : i + 1], hooks, scale, i)[:, :, 0] for i in rows]


def sdpa(q: Tensor, k: Tensor, v: Tensor, hooks: Hooks, scale: float) -> Tensor:
    """PyTorch's fused kernel, for scores with no bias.

    It wants heads of one size: without zeros beside narrower values, a T x T matrix would be made.
    """
    size = v.shape[-1]
    if q.shape[-1] > size:
        v = F.pad(v, (0, q.shape[-1] - size))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out[..., :size]


def strided(q: Tensor, k: Tensor, v: Tensor, hooks: Hooks, scale: float) -> Tensor:
    """A distance bias in O(T) memory: a [H, 2T-1] table seen through overlapping strides.

    With keys and values flipped in time, the bias of query i and key j' = T-1-j is
    table[i + j'], which is a view; the causal mask and the window live in the table as -inf.
    """
    length, heads = q.shape[-2], q.shape[1]
    distances = torch.arange(1 - length, length, device=q.device, dtype=precise(q.dtype))
    table = distances.new_zeros(heads, len(distances))
    if hooks.distance_bias is not None:
        table = hooks.distance_bias(distances.clamp(min=0))
    hidden = distances < 0
    if hooks.window is not None:
        hidden |= distances >= hooks.window
    table = table.masked_fill(hidden, float("-inf")).contiguous()
    mask = table.as_strided((1, heads, length, length), (0, 2 * length - 1, 1, 1))
    return F.scaled_dot_product_attention(q, k.flip(2), v.flip(2), attn_mask=mask, scale=scale)


def dense(
    q: Tensor, k: Tensor, v: Tensor, hooks: Hooks, scale: float, rows: int | None = None
) -> Tensor:
    """Every form, by its definition, in chunks of query rows; scores are float32 or better."""
    batch, heads, length, _ = q.shape
    rows = rows or max(1, SCORES_PER_CHUNK // (batch * heads * length))
    values = v.to(precise(q.dtype))
    chunks = []
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        chunks.append(_weights(q, k, hooks, scale, start, stop) @ values[:, :, :stop])
    return torch.cat(chunks, dim=2).to(q.dtype)


def weights(q: Tensor, k: Tensor, hooks: Hooks) -> Iterator[tuple[Tensor, Tensor]]:
    """Attention weights as `dense` has them, in chunks: queries [R] and weights [B, H, R, S].

    S is the number of keys up to the last of the queries. Not for `hooks.attend`.
    """
    with torch.autocast(q.device.type, enabled=False):
        q, k, scale = _placed(q, k, hooks)
        batch, heads, length, _ = q.shape
        rows = max(1, SCORES_PER_CHUNK // (batch * heads * length))
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            queries = torch.arange(start, stop, device=q.device)
            yield queries, _weights(q, k, hooks, scale, start, stop)


def _weights(q: Tensor, k: Tensor, hooks: Hooks, scale: float, start: int, stop: int) -> Tensor:
    """Softmax over the keys up to each query of start, ..., stop - 1."""
    exact = precise(q.dtype)
    queries, keys = q[:, :, start:stop].to(exact), k[:, :, :stop].to(exact)
    return _scores(queries, keys, hooks, scale, start).softmax(dim=-1)


def _scores(q: Tensor, k: Tensor, hooks: Hooks, scale: float, start: int) -> Tensor:
    """Biased and masked scores [B, H, R, S] of query rows start, start+1, ... and keys 0..S-1."""
    batch, heads, rows, _ = q.shape
    device = q.device
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1)
    i = torch.arange(start, start + rows, device=device).view(1, 1, -1, 1)
    j = torch.arange(k.shape[2], device=device).view(1, 1, 1, -1)
    scores = q @ k.transpose(-1, -2) * scale
    if hooks.distance_bias is not None:
        distances = (i - j).clamp(min=0)[0, 0].to(scores.dtype)
        scores = scores + hooks.distance_bias(distances)
    if hooks.key_bias is not None:
        # Counted from each query's own: a sum over a long text is far larger than its differences.
        own = hooks.key_bias[:, :, start : start + rows, None]
        scores = scores + (hooks.key_bias[:, :, None, : k.shape[2]] - own).to(scores.dtype)
    if hooks.score_mod is not None:
        scores = hooks.score_mod(scores, b, h, i, j)
    if hooks.rescore is not None:
        scores = hooks.rescore(scores, q, k, i.view(-1))
    keep = j <= i
    if hooks.window is not None:
        keep = keep & (i - j < hooks.window)
    if hooks.mask_mod is not None:
        keep = keep & hooks.mask_mod(b, h, i, j)
    return scores.masked_fill(~keep, float("-inf"))


def flex(q: Tensor, k: Tensor, v: Tensor, hooks: Hooks, scale: float) -> Tensor:
    """FlexAttention: one fused kernel for biases and masks given by index."""
    batch, heads, length, _ = q.shape
    score_mod = _flex_score_mod(hooks, length, q)
    mask = _block_mask(batch, heads, length, hooks, str(q.device))
    kernel = _flex_kernel(q.device.type)
    out: Tensor = kernel(q, k, v, score_mod=score_mod, block_mask=mask, scale=scale)
    return out


def _flex_score_mod(hooks: Hooks, length: int, q: Tensor) -> Callable[..., Tensor] | None:
    if hooks.distance_bias is None and hooks.key_bias is None and hooks.score_mod is None:
        return None
    table = _table(hooks.distance_bias, length, q)
    key_bias, inner = hooks.key_bias, hooks.score_mod
    if key_bias is not None:
        key_bias = key_bias.to(precise(q.dtype))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if table is not None:
            score = score + table[h, torch.abs(i - j)]  # masked pairs too must stay in bounds
        if key_bias is not None:
            score = score + key_bias[b, h, j]
        return score if inner is None else inner(score, b, h, i, j)

    return score_mod


def _table(distance_bias: DistanceBias | None, length: int, q: Tensor) -> Tensor | None:
    if distance_bias is None:
        return None
    return distance_bias(torch.arange(length, device=q.device, dtype=precise(q.dtype)))


def _flex_kernel(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # The CPU has no fused backward and needs no compiler: it serves tests of the score rules only.
    # In a model that is being compiled, flex_attention becomes a part of the model's graph.
    kernel: Callable[..., Any] = flex_attention
    return kernel if device != "cuda" or torch.compiler.is_compiling() else _compiled_flex()


@cache
def _compiled_flex(backend: str = "inductor") -> Callable[..., Any]:
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, backend=backend)

    def kernel(*args: Any, **options: Any) -> Any:
        with config.patch(recompile_limit=FLEX_VARIANTS):
            return compiled(*args, **options)

    return kernel


def _block_mask(batch: int, heads: int, length: int, hooks: Hooks, device: str) -> Any:
    """Which blocks of 128 x 128 pairs hold a visible one, and the rule within a block."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask_mod = hooks.mask_mod
    if mask_mod is None:
        # Compiling a model, torch traces past a cache and warns: the mask is part of the graph.
        build = _causal_blocks if torch.compiler.is_compiling() else _kept_causal_blocks
        return build(length, hooks.window, device)
    in_sight = _causal if hooks.window is None else _within(hooks.window)

    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return in_sight(b, h, i, j) & mask_mod(b, h, i, j)

    # Not kept: a rule may hold the tensors of one forward pass. For each head on its own, since
    # shared over heads the list of blocks to visit would be that of head 0 for all of them.
    return create_block_mask(keep, batch, heads, length, length, device=device)


def _causal_blocks(length: int, window: int | None, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    rule = _causal if window is None else _within(window)
    return create_block_mask(rule, None, None, length, length, device=device)


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _within(window: int) -> MaskMod:
    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < window)

    return keep


@lru_cache(maxsize=64)
def _kept_causal_blocks(length: int, window: int | None, device: str) -> Any:
    # First asked for by an evaluation, it must still serve training.
    with torch.inference_mode(False):
        return _causal_blocks(length, window, device)


_KERNELS: dict[Kernel, Callable[..., Tensor]] = {
    Kernel.sdpa: sdpa,
    Kernel.strided: strided,
    Kernel.flex: flex,
    Kernel.dense: dense,
}
