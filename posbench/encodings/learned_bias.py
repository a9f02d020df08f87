"""Trained biases that the distance i - j alone decides: learned ALiBi, T5, KERPLE and DPB."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posbench.config.encodings import (
    AlibiLearnedConfig,
    DistanceScale,
    DpbConfig,
    KerpleLogConfig,
    KerplePowerConfig,
    T5Config,
)
from posbench.encodings.base import Generators, Shape
from posbench.encodings.bias import ByDistance, alibi_halvings, per_head


def copies(size: tuple[int, ...], count: int) -> nn.ParameterList:
    """`count` parameters of one size, not yet initialised: one for all layers, or one for each."""
    return nn.ParameterList(nn.Parameter(torch.empty(size)) for _ in range(count))


def of_layer(parameters: nn.ParameterList, layer: int) -> Tensor:
    """The float64 values that layer number `layer` uses, of one parameter or one per layer."""
    values: Tensor = parameters[layer % len(parameters)]
    return values.double()


class AlibiLearned(ByDistance):
    """ALiBi with trained slopes; a slope is 2^-halvings, so it stays positive."""

    config: AlibiLearnedConfig

    def __init__(self, config: AlibiLearnedConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        self.halvings = copies((shape.heads,), 1 if config.share_layers else shape.layers)

    @torch.no_grad()
    def initialise(self, generators: Generators) -> None:
        for halvings in self.halvings:
            halvings.copy_(alibi_halvings(self.shape.heads))

    def bias(self, distances: Tensor, layer: int) -> Tensor:
        slopes = torch.exp2(-of_layer(self.halvings, layer))
        return -per_head(slopes, distances) * distances

    def describe(self, length: int) -> dict[str, Any]:
        slopes = torch.exp2(-of_layer(self.halvings, 0)).detach()
        return {"slopes": slopes / self.shrink(length)}


def t5_starts(buckets: int, max_distance: int) -> tuple[int, ...]:
    """First distance of each of T5's causal buckets (Raffel et al. 2020, and their code).

    With h = buckets / 2: a bucket for each distance below h, then buckets of equal width in log
    distance, h + floor(h ln(r / h) / ln(max_distance / h)), the last for all that is farther. In
    integers, since a rounded logarithm may fall on either side of a boundary. Two buckets that
    start at one distance are one; the later is used.
    """
    half = buckets // 2
    starts = list(range(half))
    distance = half
    for step in range(half):  # bucket half + step begins where (r/half)^half >= (max/half)^step
        bound = max_distance**step * half ** (half - step)
        while distance**half < bound:
            distance += 1
        starts.append(distance)
    return tuple(starts)


class T5(ByDistance):
    """A trained bias per head and bucket of distances (Raffel et al. 2020).

    T5 adds its table to q.k without 1/sqrt(D). Here q.k / sqrt(D) has unit scale already, and the
    table is multiplied by `scale` so that it can grow as fast as such a sum.
    """

    config: T5Config

    def __init__(self, config: T5Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.buckets, reach = config.buckets, config.max_distance
        if reach is None:
            # Not one bucket more than distances in training: at 2x it would be read untrained.
            reach = shape.train_length
            self.buckets = min(config.buckets, reach // 2 * 2)
        self.starts = t5_starts(self.buckets, reach)
        self.scale = math.sqrt(shape.head_size) if config.scale is None else config.scale
        count = 1 if config.share_layers else shape.layers
        self.table = copies((self.buckets, shape.heads), count)

    def initialise(self, generators: Generators) -> None:
        for number, table in enumerate(self.table):
            nn.init.normal_(table, std=0.02, generator=generators(f"table.{number}"))

    def bias(self, distances: Tensor, layer: int) -> Tensor:
        starts = torch.tensor(self.starts, device=distances.device, dtype=torch.float64)
        bucket = torch.bucketize(distances, starts, right=True) - 1
        return self.scale * of_layer(self.table, layer)[bucket].movedim(-1, 0)


def kerple_log(distances: Tensor, p: Tensor, a: Tensor) -> Tensor:
    """-p log(1 + a r), [H, ...] for p, a [H] > 0 (KERPLE, Chi et al. 2022)."""
    return -per_head(p, distances) * torch.log1p(per_head(a, distances) * distances)


def kerple_power(distances: Tensor, p: Tensor, a: Tensor) -> Tensor:
    """-a r^p, [H, ...] for a [H] > 0 and 0 < p <= 2 (KERPLE, Chi et al. 2022).

    `pow` and not exp(p log r): the gradient for p must be 0 at distance 0.
    """
    return -per_head(a, distances) * torch.pow(distances, per_head(p, distances))


LEAST = 0.01  # KERPLE's smallest initial value


class KerpleLog(ByDistance):
    """-p log(1 + a r) with p and a trained per head; softplus keeps both positive."""

    config: KerpleLogConfig

    def __init__(self, config: KerpleLogConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        count = 1 if config.share_layers else shape.layers
        self.p = copies((shape.heads,), count)
        self.a = copies((shape.heads,), count)

    @torch.no_grad()
    def initialise(self, generators: Generators) -> None:
        for name, parameters, most in (("p", self.p, 2.0), ("a", self.a, 1.0)):
            for number, values in enumerate(parameters):
                nn.init.uniform_(values, LEAST, most, generator=generators(f"{name}.{number}"))
                values.copy_(values.double().expm1().log())  # undoes the softplus

    def bias(self, distances: Tensor, layer: int) -> Tensor:
        p, a = (F.softplus(of_layer(each, layer)) for each in (self.p, self.a))
        return kerple_log(distances, p, a)


class KerplePower(ByDistance):
    """-a r^p with a > 0 and 0 < p < 2 trained per head, by a softplus and a sigmoid."""

    config: KerplePowerConfig

    def __init__(self, config: KerplePowerConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        count = 1 if config.share_layers else shape.layers
        self.p = copies((shape.heads,), count)
        self.a = copies((shape.heads,), count)

    @torch.no_grad()
    def initialise(self, generators: Generators) -> None:
        for number, values in enumerate(self.p):  # away from both ends, where a sigmoid is flat
            nn.init.uniform_(values, LEAST, 2 - LEAST, generator=generators(f"p.{number}"))
            values.copy_((values.double() / 2).logit())
        for number, values in enumerate(self.a):
            nn.init.uniform_(values, LEAST, 1.0, generator=generators(f"a.{number}"))
            values.copy_(values.double().expm1().log())

    def bias(self, distances: Tensor, layer: int) -> Tensor:
        p = 2 * torch.sigmoid(of_layer(self.p, layer))
        return kerple_power(distances, p, F.softplus(of_layer(self.a, layer)))


class Dpb(ByDistance):
    """Dynamic position bias: a network 1 -> width -> width -> H of the distance (Wang et al. 2022).

    Its hidden layers have biases; a bias of the output would be one number per head, which the
    softmax ignores.
    """

    config: DpbConfig

    def __init__(self, config: DpbConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        count, width = 1 if config.share_layers else shape.layers, config.width
        self.into = copies((width, 1), count)
        self.into_bias = copies((width,), count)
        self.inner = copies((width, width), count)
        self.inner_bias = copies((width,), count)
        self.out = copies((shape.heads, width), count)

    def initialise(self, generators: Generators) -> None:
        for name, parameter in self.named_parameters():
            # The usual bound of a linear layer, 1 / sqrt(inputs); the first has a single input.
            bound = 1.0 if name.startswith("into") else 1 / math.sqrt(self.config.width)
            nn.init.uniform_(parameter, -bound, bound, generator=generators(name))

    def bias(self, distances: Tensor, layer: int) -> Tensor:
        into, into_bias, inner, inner_bias, out = (
            of_layer(each, layer)
            for each in (self.into, self.into_bias, self.inner, self.inner_bias, self.out)
        )
        if self.config.distance is DistanceScale.log:
            features = torch.log1p(distances)
        else:
            features = distances / self.shape.train_length
        hidden = F.silu(F.linear(features.unsqueeze(-1), into, into_bias))
        hidden = F.silu(F.linear(hidden, inner, inner_bias))
        return F.linear(hidden, out).movedim(-1, 0)
