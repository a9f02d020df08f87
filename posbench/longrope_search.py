"""LongRoPE's search: a factor for each pair, tried out on a loss (Ding et al. 2024, section 3.2).

The space is the paper's: factors between 1 and 1.25 s that do not fall from fast pairs to slow
ones. So are the starting points, what PI, NTK and YaRN divide each pair by. The evolution is
smaller: mutations alone, one at a time, of the best lists so far.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from posbench.config.extensions import YarnConfig
from posbench.encodings.extension import by_parts, ntk_aware
from posbench.errors import UnsupportedError

PARENTS = 8  # the best lists so far, from which new ones are made
MOST_CHANGED = 3  # pairs that one mutation draws anew; neighbours follow to keep the order
SPREAD = 0.25  # standard deviation of a mutation, in the logarithm of a factor

Factors = list[float]
Score = Callable[[Factors], float]


@dataclass(frozen=True)
class Found:
    """The best factors, their loss, and the loss of each starting point by name."""

    factors: Factors
    nll: float
    starts: dict[str, float]


def widest(s: float) -> float:
    """The largest factor looked at for a scale s (Ding et al. 2024, section 3.2)."""
    return 1.25 * s


def starting_points(pairs: int, theta: float, train_length: int, s: float) -> dict[str, Factors]:
    """What PI, NTK and YaRN divide the frequency of each pair by at scale s > 1.

    NTK and YaRN are left out where they are not defined or would change nothing.
    """
    ones = torch.ones(pairs, dtype=torch.float64)
    rules = {
        "ntk": partial(ntk_aware, ones, s),
        "yarn": partial(by_parts, ones, s, theta, train_length, YarnConfig()),
    }
    starts = {"pi": [s] * pairs}
    for name, rule in rules.items():
        try:
            factors = (1 / rule()).tolist()
        except UnsupportedError:
            continue
        if max(factors) > 1:
            starts[name] = factors
    return starts


def search(
    starts: dict[str, Factors], most: float, trials: int, generator: random.Random, score: Score
) -> Found:
    """The factors with the lowest score among `starts` and `trials` mutations.

    A score that is not finite counts as the worst. Only `generator.random()` is drawn from, whose
    stream is the same in every version of Python.
    """
    losses = {name: _finite(score(factors)) for name, factors in starts.items()}
    tried = [(losses[name], factors) for name, factors in starts.items()]
    for _ in range(trials):
        tried.sort(key=lambda each: each[0])  # stable: of equals, the first one tried
        parents = tried[:PARENTS]
        place = int(len(parents) * generator.random() ** 2)  # the better, the oftener
        child = mutated(parents[place][1], most, generator)
        tried.append((_finite(score(child)), child))
    nll, factors = min(tried, key=lambda each: each[0])
    return Found(factors, nll, losses)


def _finite(nll: float) -> float:
    return nll if math.isfinite(nll) else math.inf


def mutated(factors: Factors, most: float, generator: random.Random) -> Factors:
    """`factors` with up to three of them changed: never falling, from 1 to `most`, not all 1."""
    while True:
        child = list(factors)
        for _ in range(1 + int(MOST_CHANGED * generator.random())):
            pair = int(len(child) * generator.random())
            value = child[pair] * math.exp(SPREAD * _normal(generator))
            value = min(max(value, 1.0), most)
            faster = [min(each, value) for each in child[:pair]]
            slower = [max(each, value) for each in child[pair + 1 :]]
            child = [*faster, value, *slower]
        if child != factors and child[-1] > 1:
            return child


def _normal(generator: random.Random) -> float:
    """A standard normal draw (Box and Muller 1958)."""
    radius = math.sqrt(-2 * math.log(1 - generator.random()))
    return radius * math.cos(2 * math.pi * generator.random())
