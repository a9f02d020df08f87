"""What several seeds allow to say: paired differences, their tests, and how many seeds it takes.

Seed variance alone: how much training again, from other weights and batches, would change a number.
How much the choice of documents matters is another question, answered in `statistics`. Where a
table of differences is given, the seeds lie along its last axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

from posbench.statistics import Floats

FEWEST_SEEDS = 3  # with two, a t test needs a difference of nine standard deviations
FEWEST_TO_FLIP = 6  # with five, the least p of a sign-flip test is 0.0625
MOST_TO_ENUMERATE = 16  # seeds up to which every flip of signs is tried; above, as many at random
NO_SPREAD = 1e-12  # nats: below it, an sd is rounding
MOST_SEEDS = 1_000_000
_CERTAIN = 1e6  # a shift of t at which power is 1; scipy cannot do infinity
_SEED = 20_190_612  # any fixed number: one table always has the same p


@dataclass(frozen=True)
class SeedInference:
    """What paired differences say of the mean difference; None where there are too few seeds.

    Differences are in nats. Tests are two-sided, of a mean difference of zero.
    """

    n: int
    mean: float
    sd: float | None = None  # of the differences, n - 1 below the line
    low: float | None = None  # 95 % t interval of the mean
    high: float | None = None
    p: float | None = None  # paired t test
    p_flip: float | None = None  # sign-flip test
    effect: float | None = None  # d_z: mean over sd of the paired differences (Cohen 1988)
    detectable: float | None = None  # true difference that so many seeds find 8 times in 10


def infer(differences: Floats) -> SeedInference:
    """What the paired differences [seeds] allow to say.

    A difference that is not finite leaves a mean that is not, and no test. Differences without any
    spread leave no test either: there is nothing to measure the mean against.
    """
    n, mean = len(differences), float(np.mean(differences))
    if n < 2 or not np.isfinite(differences).all():
        return SeedInference(n, mean)
    sd = float(np.std(differences, ddof=1))
    if n < FEWEST_SEEDS or sd < NO_SPREAD:
        return SeedInference(n, mean, sd)
    found = stats.ttest_1samp(differences, 0.0)
    low, high = found.confidence_interval(0.95)
    return SeedInference(
        n,
        mean,
        sd,
        float(low),
        float(high),
        float(found.pvalue),
        float(sign_flip_p(differences)) if n >= FEWEST_TO_FLIP else None,
        mean / sd,
        detectable_difference(n, sd),
    )


def paired_t_p(differences: Floats) -> Floats:
    """p of the paired t test, two-sided, for each row of `differences` [..., seeds].

    It is the t test of one sample on the differences, and so supposes that they are normal.
    """
    found: Floats = stats.ttest_1samp(differences, 0.0, axis=-1).pvalue
    return found


def sign_flip_p(differences: Floats) -> Floats:
    """p of the sign-flip test, two-sided, for each row of `differences` [..., seeds].

    If the baseline and the other are alike, each difference could as well have the other sign
    (Fisher 1935). Exact up to 16 seeds, where all 2^n flips are tried; above that, 65,536 of them
    are drawn by a fixed generator.
    """
    n = differences.shape[-1]
    found: Floats = stats.permutation_test(
        (differences,),
        lambda sample, axis: np.mean(sample, axis=axis),
        permutation_type="samples",
        n_resamples=2 ** min(n, MOST_TO_ENUMERATE),
        vectorized=True,
        axis=-1,
        rng=np.random.default_rng(_SEED),
    ).pvalue
    return found


def holm(p: Floats) -> Floats:
    """p values [..., tests] such that rejecting those below alpha errs at all with alpha at most.

    Step-down procedure of Holm (1979): the smallest times m, the next times m - 1, and so on,
    never less than one before it. It holds however the tests hang together.
    """
    order = np.argsort(p, axis=-1)
    factors = np.arange(p.shape[-1], 0, -1)
    ascending = np.take_along_axis(p, order, axis=-1) * factors
    adjusted = np.empty_like(p)
    np.put_along_axis(
        adjusted, order, np.minimum(np.maximum.accumulate(ascending, axis=-1), 1.0), axis=-1
    )
    return adjusted


def probability_of_improvement(losses: Floats, baseline: Floats) -> float:
    """How often a seed of `losses` is lower than a seed of `baseline`; a tie counts half.

    All pairs of seeds, not only those that match, as in rliable (Agarwal et al. 2021): the
    Mann-Whitney statistic over the number of pairs. An infinite loss is the worst there is.
    """
    ours, theirs = losses[:, None], baseline[None, :]
    return float(np.mean(ours < theirs) + np.mean(ours == theirs) / 2)


# ---------------------------------------------------------------- power


def significant_difference(n: int, sd: float, alpha: float = 0.05) -> float:
    """The least |mean difference| that a paired t test of `n` seeds calls significant."""
    return float(stats.t.isf(alpha / 2, n - 1)) * sd / math.sqrt(n)


def power_of(n: int, sd: float, difference: float, alpha: float = 0.05) -> float:
    """How often a paired t test of `n` seeds finds a true mean `difference`, two-sided.

    From the noncentral t distribution with n - 1 degrees of freedom and difference sqrt(n) / sd.
    """
    critical = stats.t.isf(alpha / 2, n - 1)
    shift = min(difference / sd * math.sqrt(n), _CERTAIN)
    # The lower tail by symmetry: scipy's cdf is nan far below a shift, its sf is not.
    upper, lower = (stats.nct.sf(critical, n - 1, where) for where in (shift, -shift))
    return float(upper + lower)


def detectable_difference(n: int, sd: float, alpha: float = 0.05, power: float = 0.8) -> float:
    """The true mean difference that `n` seeds find as often as `power` says."""
    high = 1.0
    while power_of(n, 1.0, high, alpha) < power:
        high *= 2
    found = optimize.brentq(lambda d: power_of(n, 1.0, d, alpha) - power, 0.0, high, xtol=1e-10)
    return float(found) * sd


def seeds_needed(
    sd: float, difference: float, alpha: float = 0.05, power: float = 0.8
) -> int | None:
    """The fewest seeds that find `difference` as often as `power` says; None: over a million.

    Never fewer than three, below which nothing is inferred.
    """

    def enough(n: int) -> bool:
        return power_of(n, sd, difference, alpha) >= power

    few, many = FEWEST_SEEDS - 1, FEWEST_SEEDS
    while not enough(many):
        few, many = many, many * 2
        if many > 2 * MOST_SEEDS:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many if many <= MOST_SEEDS else None
