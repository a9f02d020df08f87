"""Relative encodings that need more than a bias by distance: FIRE, Shaw et al., Transformer-XL."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posbench.config.encodings import FireConfig, ShawConfig, SineLayout, TxlConfig
from posbench.encodings.absolute import sinusoids
from posbench.encodings.base import Encoding, Generators, Hooks, Shape, precise
from posbench.encodings.learned_bias import copies

EPSILON = 1e-6  # FIRE's guard against a division by log 1


def fire_input(queries: Tensor, keys: Tensor, c: Tensor, threshold: Tensor) -> Tensor:
    """log(1 + c (i - j)) / log(1 + c max(i, threshold)) (FIRE, Li et al. 2024), in [0, 1).

    The divisor belongs to the query's row, not to the whole text: what follows changes nothing.
    Keys after the query count as at it; they are masked.
    """
    scale = torch.log1p(c * torch.maximum(queries, threshold)) + EPSILON
    return torch.log1p(c * (queries - keys).clamp(min=0)) / scale


class Fire(Encoding):
    """A network 1 -> width -> H of normalised log distance (Li et al. 2024), ReLU inside.

    The original's bias of the output is left out: it is one number per head, which the softmax
    ignores.
    """

    config: FireConfig

    def __init__(self, config: FireConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        count = 1 if config.share_layers else shape.layers
        self.c = copies((1,), count)
        self.reach = copies((1,), count)  # the threshold, in units of its initial value
        self.into = copies((config.width,), count)
        self.into_bias = copies((config.width,), count)
        self.out = copies((shape.heads, config.width), count)

    @property
    def threshold(self) -> float:
        """Initial threshold in tokens: the paper's 512 of a training length of 2048, re-based."""
        return self.config.threshold or max(1.0, self.shape.train_length / 4)

    @torch.no_grad()
    def initialise(self, generators: Generators) -> None:
        for number, (into, bias) in enumerate(zip(self.into, self.into_bias, strict=True)):
            self.c[number].fill_(self.config.c)
            self.reach[number].fill_(1.0)
            nn.init.uniform_(into, -1.0, 1.0, generator=generators(f"into.{number}"))
            # Each unit bends somewhere in [0, 1): with a free bias 3 of 8 would be 0 on all inputs.
            nn.init.uniform_(bias, 0.0, 1.0, generator=generators(f"into_bias.{number}"))
            bias.mul_(-into)
            bound = 1 / math.sqrt(self.config.width)
            out = self.out[number]
            nn.init.uniform_(out, -bound, bound, generator=generators(f"out.{number}"))

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        number, exact = layer % len(self.c), precise(x.dtype)
        c, reach, into, into_bias, out = (
            each[number].to(exact)
            for each in (self.c, self.reach, self.into, self.into_bias, self.out)
        )
        places = positions.to(exact)
        c, threshold = c.abs()[0], (reach * self.threshold).abs()[0]

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            features = fire_input(places[i], places[j], c, threshold)
            # Unit by unit: FlexAttention sees single scores, and the dense path keeps memory for
            # `width` values per pair of tokens, not per head and pair.
            for unit in range(len(into)):
                hidden = torch.relu(into[unit] * features + into_bias[unit])
                score = score + out[h, unit] * hidden
            return score

        return Hooks(score_mod=score_mod)

    def describe(self, length: int) -> dict[str, Any]:
        return {"c": self.c[0].item(), "threshold": self.reach[0].item() * self.threshold}


class Shaw(Encoding):
    """(q_i . (k_j + a_r)) / sqrt(D) with a trained a_r per distance r = i - j, clipped.

    The keys' half of Shaw et al. 2018; their ablation finds no use in the values' half. The
    vectors are shared by the heads of a layer.
    """

    config: ShawConfig
    relative = True

    def __init__(self, config: ShawConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        # No vector for distances that training never sees: at 2x it would be read untrained.
        self.clip = min(config.clip, shape.train_length - 1)
        self.vectors = copies((self.clip + 1, shape.head_size), shape.layers)

    def initialise(self, generators: Generators) -> None:
        for number, vectors in enumerate(self.vectors):
            nn.init.normal_(vectors, std=0.02, generator=generators(f"vectors.{number}"))

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        vectors = self.vectors[layer].to(precise(x.dtype)) / math.sqrt(self.shape.head_size)

        def rescore(scores: Tensor, q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
            distances = positions[rows].unsqueeze(1) - positions[: scores.shape[-1]]
            index = distances.clamp(0, self.clip).expand(scores.shape)
            biased: Tensor = scores + (q @ vectors.T).gather(-1, index)
            return biased

        return Hooks(rescore=rescore)

    def describe(self, length: int) -> dict[str, Any]:
        return {"vectors": self.vectors[0].detach().double()}


class Txl(Encoding):
    """((q_i + u) . k_j + (q_i + v) . W R_(i-j)) / sqrt(D) (Transformer-XL, Dai et al. 2019).

    R_r are sinusoids of the distance, as wide as the model. Since sin and cos of i - j are sums of
    products of those of i and of j, the second term is itself a product of a query widened by C
    channels, turned by i, and the sinusoids of j: no relative shift, and any fused kernel.
    """

    config: TxlConfig
    relative = True
    keeps_norm = False

    def __init__(self, config: TxlConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        per_head = (shape.heads, shape.head_size)
        self.channels = shape.width // 2 * 2  # a sine and a cosine each
        self.u = copies(per_head, shape.layers)
        self.v = copies(per_head, shape.layers)
        self.w = copies((*per_head, self.channels), shape.layers)

    def initialise(self, generators: Generators) -> None:
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, std=0.02, generator=generators(name))

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        exact = precise(x.dtype)
        u, v, w = (each[layer].to(exact) for each in (self.u, self.v, self.w))
        table = sinusoids(positions, self.channels, self.config.base, SineLayout.concat)
        return Hooks(rotate=partial(_txl_widened, u=u, v=v, w=w, table=table.to(exact)))

    def describe(self, length: int) -> dict[str, Any]:
        return {"u": self.u[0].detach().double(), "v": self.v[0].detach().double()}


def _txl_widened(
    q: Tensor, k: Tensor, u: Tensor, v: Tensor, w: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """q and k [B, H, T, D] with C more channels; table [T, C] holds sin, then cos, of positions.

    sum_c s_c sin((i - j) f_c) + z_c cos((i - j) f_c), for (s, z) = (q_i + v) W, is the product of
    (z sin i - s cos i, s sin i + z cos i) and (sin j, cos j).
    """
    with torch.autocast(q.device.type, enabled=False):
        q, k = q.to(table.dtype), k.to(table.dtype)
        s, z = ((q + v.unsqueeze(1)) @ w).chunk(2, dim=-1)
        sines, cosines = table.chunk(2, dim=-1)
        turned = torch.cat((z * sines - s * cosines, s * sines + z * cosines), dim=-1)
        widened = torch.cat((q + u.unsqueeze(1), turned), dim=-1)
        return widened, torch.cat((k, table.expand(*k.shape[:2], -1, -1)), dim=-1)
