"""Biases that gates read from the content sum up along the text: FoX, CABLE and GRAPE-AP."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posbench.config.encodings import FoxConfig, GrapeConfig, Layout
from posbench.encodings.base import Encoding, Generators, Hooks, Shape, precise
from posbench.encodings.bias import alibi_slopes
from posbench.encodings.rotary import rotate

WEIGHT_STD = 0.02  # of a projection of the content, as in the originals


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [B, T, C] times `weight` [K, C], in float32 or better whatever autocast would do."""
    exact = precise(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(exact), weight.to(exact), None if bias is None else bias.to(exact))


def future(rows: Tensor, keys: int) -> Tensor:
    """Where key j lies after query i: [R, keys] for queries `rows` [R]."""
    return torch.arange(keys, device=rows.device) > rows.unsqueeze(-1)


def later(values: Tensor) -> Tensor:
    """For each key j of a row [..., S], the sum of `values` at all keys after j.

    Added up from the row's end, so that near the query, where the attention is, nothing cancels.
    """
    return values.flip(-1).cumsum(-1).flip(-1) - values


class Fox(Encoding):
    """Forgetting attention: each token may fade all before it (Lin et al. 2025, eq. 3 and 4).

    score(i, j) += sum over l = j+1..i of ln f_l, with f_l = sigmoid(w.x_l + b) for each head.
    """

    config: FoxConfig
    relative = True

    def __init__(self, config: FoxConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        self.weight = nn.Parameter(torch.empty(shape.layers, shape.heads, shape.width))
        self.bias = nn.Parameter(torch.empty(shape.layers, shape.heads))

    def initialise(self, generators: Generators) -> None:
        nn.init.normal_(self.weight, std=WEIGHT_STD, generator=generators("weight"))
        nn.init.constant_(self.bias, self.config.gate_bias)

    def log_forget(self, gates: Tensor) -> Tensor:
        """ln f of gates w.x + b before their squashing."""
        return F.logsigmoid(gates)

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        gates = project(x, self.weight[layer], self.bias[layer]).transpose(1, 2)
        # In float64: a float32 sum of thousands of gates is off by more than the last of them.
        return Hooks(key_bias=-self.log_forget(gates).double().cumsum(-1))

    def describe(self, length: int) -> dict[str, Any]:
        return {"forget": self.log_forget(self.bias.detach().double()).exp()}


class Cable(Fox):
    """CABLE: forgetting by -softplus(w.x + b), FoX with the sign of its gates turned."""

    def log_forget(self, gates: Tensor) -> Tensor:
        return -F.softplus(gates)


def path_bias(queries: Tensor, keys: Tensor, slopes: Tensor, rows: Tensor) -> Tensor:
    """GRAPE-AP's bias [B, H, R, S]: the sum over l = j+1..i of slope ln sigmoid(q_i.k_l / size).

    `queries` [B, H, R, P] are those of `rows` [R]; keys [B, H, S, P] start at token 0.
    """
    similar = queries @ keys.transpose(-1, -2) / queries.shape[-1]
    edges = slopes.view(-1, 1, 1) * F.logsigmoid(similar)
    return later(edges.masked_fill(future(rows, keys.shape[-2]), 0.0))


def _along_path(
    scores: Tensor, q: Tensor, k: Tensor, rows: Tensor, content: Tensor, turned: Tensor
) -> Tensor:
    content, turned = content.to(scores.dtype), turned.to(scores.dtype)
    slopes = alibi_slopes(scores.shape[1], scores.device).to(scores.dtype)
    keys = turned[:, :, : scores.shape[-1]]
    return scores + path_bias(content[:, :, rows], keys, slopes, rows)


class Grape(Encoding):
    """GRAPE-AP: the path from key to query is as long as its tokens are unlike the query.

    Zhang et al. 2025, section 5, as their code has it: p = W x of a few channels for each head;
    the keys' side is normalised and turned by one radian per token, the queries' side is neither,
    so that scores depend on where the text stands. ALiBi's slopes scale the heads.
    """

    config: GrapeConfig

    def __init__(self, config: GrapeConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        size = shape.heads * config.size
        self.weight = nn.Parameter(torch.empty(shape.layers, size, shape.width))

    def initialise(self, generators: Generators) -> None:
        nn.init.normal_(self.weight, std=WEIGHT_STD, generator=generators("weight"))

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        batch, length, _ = x.shape
        content = project(x, self.weight[layer])
        content = content.view(batch, length, self.shape.heads, -1).transpose(1, 2)
        normal = F.rms_norm(content, content.shape[-1:])
        angles = positions.double().unsqueeze(-1).expand(-1, self.config.size // 2)
        cos, sin = angles.cos().to(content.dtype), angles.sin().to(content.dtype)
        turned = rotate(normal, cos, -sin, Layout.half)
        return Hooks(rescore=partial(_along_path, content=content, turned=turned))

    def describe(self, length: int) -> dict[str, Any]:
        return {"path_slopes": alibi_slopes(self.shape.heads)}
