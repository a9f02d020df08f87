"""Encodings that read the whole row of scores: CoPE and DAPE.

Both look at a row's keys together, so both could look into the future: a row comes with the keys
up to the last row of its chunk, and each scheme masks what lies after its query before it looks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posbench.config.encodings import CopeConfig, DapeBase, DapeConfig
from posbench.encodings.base import Encoding, Generators, Hooks, Shape
from posbench.encodings.bias import alibi_slopes, per_head
from posbench.encodings.gates import future
from posbench.encodings.learned_bias import kerple_log

# ---------------------------------------------------------------- CoPE


def contextual_positions(scores: Tensor, rows: Tensor) -> Tensor:
    """CoPE's position of key j seen from query i, [B, H, R, S]: how many gates open from j to i.

    Golovneva et al. 2024, eq. 4 and 5: the sum over k = j..i of sigmoid(score(i, k)).
    """
    gates = torch.sigmoid(scores).masked_fill(future(rows, scores.shape[-1]), 0.0)
    return gates.flip(-1).cumsum(-1).flip(-1)


def _contextual(scores: Tensor, q: Tensor, k: Tensor, rows: Tensor, vectors: Tensor) -> Tensor:
    """Scores plus q.e[p], e between its rows by linear interpolation, p at most the last row."""
    places = contextual_positions(scores, rows).clamp(max=len(vectors) - 1)
    low = places.floor()
    share = places - low
    by_row = q @ vectors.to(q.dtype).T
    below = by_row.gather(-1, low.long())
    above = by_row.gather(-1, places.ceil().long())
    return scores + torch.lerp(below, above, share)


class Cope(Encoding):
    """Contextual positions: a token counts as one step if the query finds it worth counting.

    Golovneva et al. 2024. The gates read the scaled scores, as in the paper's listing; the vectors
    are shared by the heads of a layer and start at zero, so an untrained model has none.
    """

    config: CopeConfig
    relative = True

    def __init__(self, config: CopeConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        self.vectors = nn.Parameter(torch.empty(shape.layers, config.steps, shape.head_size))

    def initialise(self, generators: Generators) -> None:
        nn.init.zeros_(self.vectors)

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        return Hooks(rescore=partial(_contextual, vectors=self.vectors[layer]))

    def describe(self, length: int) -> dict[str, Any]:
        return {"vectors": self.vectors.detach().double()}


# ---------------------------------------------------------------- DAPE


INNER_PER_CHUNK = 1 << 22  # values of the hidden layer computed at once


class Dape(Encoding):
    """DAPE: a small network over all heads reads score and bias of a pair, and adds to them.

    Zheng et al. 2024: score + bias + MLP([score; bias]). With a kernel wider than one (v2, Zheng et
    al. 2024b) both layers are convolutions over neighbouring keys, and keys after the query are
    zeros for each of them. The last layer has no constant: the softmax would ignore it.
    """

    config: DapeConfig
    relative = True

    def __init__(self, config: DapeConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        layers, heads = shape.layers, shape.heads
        inner, kernel = config.hidden, config.kernel
        self.into = nn.Parameter(torch.empty(layers, inner, 2 * heads, 1, kernel))
        self.into_bias = nn.Parameter(torch.empty(layers, inner))
        self.out = nn.Parameter(torch.empty(layers, heads, inner, 1, kernel))
        self.kernels: nn.Parameter | None = None
        if config.base is DapeBase.kerple_log:
            self.kernels = nn.Parameter(torch.empty(layers, 2, heads))

    def initialise(self, generators: Generators) -> None:
        for name, fan_in in (("into", 2 * self.shape.heads), ("out", self.config.hidden)):
            bound = 1 / math.sqrt(fan_in * self.config.kernel)
            nn.init.uniform_(getattr(self, name), -bound, bound, generator=generators(name))
        bound = 1 / math.sqrt(2 * self.shape.heads * self.config.kernel)
        nn.init.uniform_(self.into_bias, -bound, bound, generator=generators("into_bias"))
        if self.kernels is not None:
            # exp of it: p from 0 to 2 and a from 0 to 1 as in KERPLE, away from its floor 0.01.
            generator = generators("kernels")
            nn.init.uniform_(self.kernels, 0.01, 1.0, generator=generator)
            self.kernels.data[:, 0] *= 2
            self.kernels.data.log_()

    def base(self, distances: Tensor, layer: int) -> Tensor:
        """The bias [H, R, S] that the network reads and adds to, of `distances` [R, S]."""
        if self.kernels is None:
            slopes = alibi_slopes(self.shape.heads, distances.device).to(distances.dtype)
            return -per_head(slopes, distances) * distances
        p, a = self.kernels[layer].to(distances.dtype).exp()
        return kerple_log(distances, p, a)

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        return Hooks(rescore=partial(self._rescore, positions=positions, layer=layer))

    def _rescore(
        self, scores: Tensor, q: Tensor, k: Tensor, rows: Tensor, positions: Tensor, layer: int
    ) -> Tensor:
        batch, _, _, keys = scores.shape
        step = max(1, INNER_PER_CHUNK // (batch * self.config.hidden * keys))
        parts = zip(torch.split(scores, step, dim=2), torch.split(rows, step), strict=True)
        return torch.cat([self.adapt(*part, positions, layer) for part in parts], dim=2)

    def adapt(self, scores: Tensor, rows: Tensor, positions: Tensor, layer: int) -> Tensor:
        """Scores [B, H, R, S] of queries `rows` [R] with what bias and network add."""
        keys = scores.shape[-1]
        distances = (positions[rows].unsqueeze(-1) - positions[:keys]).clamp(min=0)
        bias = self.base(distances.to(scores.dtype), layer).expand_as(scores)
        hidden = future(rows, keys)
        pairs = torch.cat((scores, bias), dim=1).masked_fill(hidden, 0.0)
        into, constant, out = (
            p[layer].to(scores.dtype) for p in (self.into, self.into_bias, self.out)
        )
        padding = (0, self.config.kernel // 2)
        inner = F.leaky_relu(F.conv2d(pairs, into, constant, padding=padding))
        # Again: a key after the query holds the constant by now, and only in a longer text.
        inner = inner.masked_fill(hidden, 0.0)
        return scores + bias + F.conv2d(inner, out, padding=padding)

    def describe(self, length: int) -> dict[str, Any]:
        distances = torch.arange(length, dtype=torch.float64).unsqueeze(0)
        return {"base_bias": self.base(distances, 0).detach()[:, 0]}
