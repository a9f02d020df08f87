"""PaTH: keys walk towards the query through reflections that the tokens between them choose."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posbench.config.encodings import PathConfig
from posbench.encodings.base import Encoding, Generators, Hooks, Shape, precise
from posbench.encodings.gates import WEIGHT_STD, future, project

ROWS = 64  # tokens whose reflections are multiplied out at once
TAPS = 3  # of the short convolution: a token and the two before it


def reflections(w: Tensor, beta: Tensor) -> Tensor:
    """The triangular factor M [..., n, n] of the reflections H_t = I - beta_t w_t w_t^T.

    For tokens 1..n, H_n ... H_1 = I - W^T M W, and every shorter product is the same with the
    corresponding block of M (the UT transform; Yang et al. 2025, section 3.3).
    """
    scale = beta.unsqueeze(-1)
    system = (scale * (w @ w.transpose(-1, -2))).tril(-1)
    factor: Tensor = torch.linalg.solve_triangular(
        system, torch.diag_embed(beta), upper=False, unitriangular=True
    )
    return factor


def path_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, w: Tensor, beta: Tensor
) -> Tensor:
    """Attention [B, H, T, D] with scores q_i . (H_i ... H_{j+1} k_j) / sqrt(D), causal.

    w [B, H, T, D] are unit vectors and beta [B, H, T] from 0 to 2. Chunk by chunk: the keys so far
    are kept as the tokens since then have left them, so the whole costs T^2 D.
    """
    exact = precise(q.dtype)
    q, values = q.to(exact) / math.sqrt(q.shape[-1]), v.to(exact)
    k, w, beta = k.to(exact), w.to(exact), beta.to(exact)
    walked = k[:, :, :0]  # earlier keys, having passed all tokens before this chunk
    chunks = []
    for start in range(0, q.shape[2], ROWS):
        here = slice(start, start + ROWS)
        own, passed, seen = k[:, :, here], w[:, :, here], values[:, :, : start + ROWS]
        factor = reflections(passed, beta[:, :, here])
        towards = (q[:, :, here] @ passed.transpose(-1, -2)).tril() @ factor
        met = passed @ own.transpose(-1, -2)
        inside = q[:, :, here] @ own.transpose(-1, -2) - towards @ met.tril(-1)
        earlier = (q[:, :, here] - towards @ passed) @ walked.transpose(-1, -2)
        scores = torch.cat((earlier, inside), dim=-1)
        rows = torch.arange(start, scores.shape[-1], device=q.device)
        hidden = future(rows, scores.shape[-1])
        if window is not None:
            hidden |= ~future(rows - window, scores.shape[-1])
        chunks.append(scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ seen)
        # Through the rest of the chunk: all tokens for earlier keys, the later ones for its own.
        back = passed.transpose(-1, -2) @ factor
        own = own - (back @ met.tril(-1)).transpose(-1, -2)
        walked = walked - (back @ (passed @ walked.transpose(-1, -2))).transpose(-1, -2)
        walked = torch.cat((walked, own), dim=2)
    return torch.cat(chunks, dim=2).to(v.dtype)


def short_convolution(x: Tensor, taps: Tensor) -> Tensor:
    """Each channel of x [B, T, C] convolved with its `taps` [C, TAPS] over itself and its past."""
    padded = F.pad(x.transpose(1, 2), (TAPS - 1, 0))
    return F.conv1d(padded, taps.unsqueeze(1), groups=len(taps)).transpose(1, 2)


class Path(Encoding):
    """PaTH attention (Yang et al. 2025): position as accumulated Householder transformations.

    w = normalised silu(conv(W2 W1 x)) with W1 of low rank, beta = 2 sigmoid(u.x + b), per head.
    """

    config: PathConfig
    relative = True

    def __init__(self, config: PathConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        layers, width = shape.layers, shape.width
        self.down = nn.Parameter(torch.empty(layers, config.rank, width))
        self.up = nn.Parameter(torch.empty(layers, width, config.rank))
        self.taps = nn.Parameter(torch.empty(layers, width, TAPS))
        self.beta = nn.Parameter(torch.empty(layers, shape.heads, width))
        self.beta_bias = nn.Parameter(torch.empty(layers, shape.heads))

    def initialise(self, generators: Generators) -> None:
        for name in ("down", "up", "beta"):
            nn.init.normal_(getattr(self, name), std=WEIGHT_STD, generator=generators(name))
        bound = 1 / math.sqrt(TAPS)
        nn.init.uniform_(self.taps, -bound, bound, generator=generators("taps"))
        nn.init.zeros_(self.beta_bias)

    def walk(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Directions w [B, H, T, D], of length one, and strengths beta [B, H, T] of a layer."""
        batch, length, _ = x.shape
        raw = project(project(x, self.down[layer]), self.up[layer])
        with torch.autocast(x.device.type, enabled=False):
            raw = F.silu(short_convolution(raw, self.taps[layer].to(raw.dtype)))
        heads = raw.view(batch, length, self.shape.heads, -1).transpose(1, 2)
        w = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
        strength = project(x, self.beta[layer], self.beta_bias[layer]).transpose(1, 2)
        return w, 2 * torch.sigmoid(strength)

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        w, beta = self.walk(x, layer)
        return Hooks(attend=partial(path_attention, w=w, beta=beta))

    def describe(self, length: int) -> dict[str, Any]:
        return {"beta": 2 * torch.sigmoid(self.beta_bias.detach().double())}
