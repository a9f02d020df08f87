"""mine: a bias that falls with the logarithm of the distance, as fast as each head learns.

This file is a plugin of posbench. It runs as it stands; change it into what you want to measure.

    posbench check-encoding mine.py
    posbench train -m encoding=rope,alibi,mine plugins=[mine.py]
    posbench eval-extrapolate plugins=[mine.py]

Keep it in one file: a run records the SHA-256 of this file and keeps a copy of it, as the code that
it was trained with. Import what is installed, not what lies beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posbench.plugin import Encoding, EncodingConfig, Generators, Hooks, Shape, per_head, setting


@dataclass
class MineConfig(EncodingConfig):
    """A bias that falls with the logarithm of the distance, trained per head."""

    # What can be typed as encoding.KEY=VALUE. Each has a default, a meaning, and perhaps a range.
    # mine.yaml, beside this file, may give other defaults.
    name: str = setting("mine", "id of the scheme")
    slope: float = setting(1.0, "slope of the first head at first; each next one has half", 1e-3)


def log_bias(distances: Tensor, slopes: Tensor) -> Tensor:
    """-slope log(1 + r), [H, ...], for distances r [...] and slopes [H]."""
    return -per_head(slopes, distances) * torch.log1p(distances)


class Mine(Encoding):
    """-slope log(1 + i - j) on the score of query i and key j, one slope per layer and head."""

    config: MineConfig
    relative = True  # scores depend on i - j alone; check-encoding shifts all positions to see

    # If it is not defined for every length, say to which, and refuse longer texts:
    #
    #     @property
    #     def max_length(self) -> int | None:
    #         return self.shape.train_length
    #
    # and `self.check_length(len(positions))` in `embed` or `hooks`. If logits depend on how long
    # the text is, `prefix_consistent` is a property too, and False.

    def __init__(self, config: MineConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        # shape says layers, heads, head_size, width and train_length of the model.
        # All that is kept is a parameter. Tables are computed from the positions each time, for
        # nothing else survives .to(torch.bfloat16), another device and a longer text.
        self.log_slope = nn.Parameter(torch.empty(shape.layers, shape.heads))

    @torch.no_grad()
    def initialise(self, generators: Generators) -> None:
        """Fill every parameter. generators(NAME) is seeded by the run's seed and that name."""
        halvings = torch.arange(self.shape.heads) * math.log(2)
        nn.init.normal_(self.log_slope, std=0.02, generator=generators("log_slope"))
        self.log_slope.add_(math.log(self.config.slope) - halvings)

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        """What attention layer number `layer` does with position.

        x [B, T, C] is the layer's normalised input, positions [T] are 0..T-1 unless shifted. Say
        it in the cheapest of these forms that is exact; several may be given together.

        distance_bias   a function of distances [...] to [H, ...], as below: what depends on i - j
        rotate          (q, k) -> (q, k), each [B, H, T, D], for rotations:

            angles = torch.outer(positions.double(), frequencies)   # float64, rounded once:
            cos, sin = angles.cos().float(), angles.sin().float()   # 257 is no bfloat16 number
            return Hooks(rotate=lambda q, k: (turn(q, cos, sin), turn(k, cos, sin)))

        score_mod       (score, b, h, i, j) -> score, for what (i, j) decide in another way; only
                        indexing and arithmetic, for FlexAttention compiles it:

            gate = self.gate[layer](x)                              # [B, T, H]
            return Hooks(score_mod=lambda s, b, h, i, j: s + gate[b, j, h])

                        (of x, it may read i, j and what came before, and nothing after i)
        key_bias, mask_mod, rescore, attend, temperature: see posbench/encodings/base.py.
        """
        slopes = self.log_slope[layer].double().exp()

        def bias(distances: Tensor) -> Tensor:
            return log_bias(distances.double(), slopes).to(distances.dtype)

        return Hooks(distance_bias=bias)

    # What is added to the token embeddings x [B, T, C] instead, or as well:
    #
    #     def embed(self, x: Tensor, positions: Tensor) -> Tensor:
    #         return x + self.vectors(positions).to(x.dtype)

    def reference(
        self, q: list[float], k: list[float], i: int, j: int, head: int, layer: int
    ) -> float:
        """The score of query i and key j before the softmax, from the paper, in plain Python.

        Optional. check-encoding compares what the tensors make with it, to 1e-6.
        """
        product = sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q))
        slope = math.exp(float(self.log_slope[layer, head]))
        return product - slope * math.log(1 + i - j)
