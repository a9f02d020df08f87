"""Seed inference against scipy, values worked out by hand, and sweeps in which nothing differs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, stats

from posbench.inference import (
    FEWEST_SEEDS,
    SeedInference,
    detectable_difference,
    holm,
    infer,
    paired_t_p,
    power_of,
    probability_of_improvement,
    seeds_needed,
    sign_flip_p,
    significant_difference,
)
from posbench.statistics import Floats, bootstrap_interval

SWEEPS = 2000


def pairs(n: int, shift: float = 0.0, seed: int = 0) -> tuple[Floats, Floats]:
    """Losses of two encodings at the same seeds: what a seed does, it does to both."""
    generator = np.random.default_rng(seed)
    common = generator.normal(2.0, 0.2, n)
    return common + generator.normal(shift, 0.01, n), common + generator.normal(0.0, 0.01, n)


# ---------------------------------------------------------------- against scipy and by hand


@pytest.mark.parametrize("n", [3, 5, 8, 20])
def test_the_paired_t_test_is_scipys(n: int) -> None:
    ours, theirs = pairs(n, 0.01)
    found, wanted = infer(ours - theirs), stats.ttest_rel(ours, theirs)
    assert found.p == pytest.approx(wanted.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx(wanted.confidence_interval(0.95), rel=1e-9)
    assert found.mean == pytest.approx(np.mean(ours - theirs), rel=1e-12)
    assert found.sd == pytest.approx(np.std(ours - theirs, ddof=1), rel=1e-12)
    # d_z, and the t value that belongs to it
    assert found.effect is not None
    assert found.effect * math.sqrt(n) == pytest.approx(wanted.statistic, rel=1e-9)


def test_pairing_sees_what_a_test_of_two_groups_does_not() -> None:
    ours, theirs = pairs(8, 0.02)
    found = infer(ours - theirs)
    assert found.p is not None
    assert found.p < 0.01
    assert stats.ttest_ind(ours, theirs).pvalue > 0.5


@pytest.mark.parametrize(("n", "least"), [(3, 0.25), (5, 0.0625), (6, 0.03125), (8, 0.0078125)])
def test_the_least_p_of_the_sign_flip_test(n: int, least: float) -> None:
    assert sign_flip_p(np.arange(1.0, n + 1)) == pytest.approx(least, rel=1e-12)


def test_the_sign_flip_test_is_what_all_flips_say() -> None:
    differences = np.array([0.3, -0.1, 0.2, 0.25, -0.05, 0.4, 0.15])
    flips = np.array(list(itertools.product((1, -1), repeat=len(differences))))
    means = np.abs((flips * differences).mean(axis=1))
    wanted = np.mean(means >= abs(differences.mean()) - 1e-12)
    assert sign_flip_p(differences) == pytest.approx(wanted, rel=1e-12)


def test_the_sign_flip_test_of_many_seeds_is_drawn_and_always_the_same() -> None:
    differences = pairs(40, 0.004)[0] - pairs(40, 0.004)[1]
    assert sign_flip_p(differences) == sign_flip_p(differences)
    # A normal sample of 40: both tests ask the same question.
    assert sign_flip_p(differences) == pytest.approx(float(paired_t_p(differences)), abs=0.02)


def test_holm_by_hand() -> None:
    # 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.04 x 1; the last two may not fall below the one before.
    np.testing.assert_allclose(holm(np.array([0.03, 0.01, 0.04, 0.02])), [0.06, 0.04, 0.06, 0.06])
    np.testing.assert_allclose(holm(np.array([0.5, 0.001])), [0.5, 0.002])
    np.testing.assert_allclose(holm(np.array([0.9, 0.8, 0.7])), [1.0, 1.0, 1.0])
    np.testing.assert_allclose(holm(np.array([0.04])), [0.04])


def test_holm_rejects_what_its_definition_rejects() -> None:
    generator = np.random.default_rng(1)
    for p in generator.uniform(0, 0.1, (200, 6)):
        rejected = np.zeros(6, bool)
        for step, place in enumerate(np.argsort(p)):
            if p[place] > 0.05 / (6 - step):
                break
            rejected[place] = True
        np.testing.assert_array_equal(holm(p) <= 0.05, rejected)


def test_the_probability_of_improvement_is_mann_whitneys() -> None:
    ours, theirs = pairs(7, 0.1)
    ours[0] = theirs[3]  # a tie
    wanted = stats.mannwhitneyu(theirs, ours).statistic / 49
    assert probability_of_improvement(ours, theirs) == pytest.approx(wanted, rel=1e-12)
    assert probability_of_improvement(theirs - 9, theirs) == 1.0
    assert probability_of_improvement(theirs, theirs) == pytest.approx(0.5)


def test_an_infinite_loss_is_the_worst() -> None:
    broken, whole = np.array([1.0, math.inf]), np.array([2.0, 3.0])
    assert probability_of_improvement(broken, whole) == 0.5


# ---------------------------------------------------------------- what is left out


@pytest.mark.parametrize("n", [1, 2])
def test_no_inference_below_three_seeds(n: int) -> None:
    assert FEWEST_SEEDS == 3
    found = infer(np.arange(1.0, n + 1))
    assert found.mean == pytest.approx((n + 1) / 2)
    assert found.sd == (None if n == 1 else pytest.approx(math.sqrt(0.5)))
    rest = (found.low, found.high, found.p, found.p_flip, found.effect, found.detectable)
    assert rest == (None,) * 6


def test_the_sign_flip_test_stands_beside_from_six_seeds_on() -> None:
    assert infer(np.arange(1.0, 6)).p_flip is None
    assert infer(np.arange(1.0, 7)).p_flip == pytest.approx(2 / 64)


@pytest.mark.parametrize("constant", [0.0, 0.25])
def test_differences_without_spread_are_not_tested(constant: float) -> None:
    assert infer(np.full(5, constant)) == SeedInference(5, constant, 0.0)


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_a_difference_that_is_not_finite_is_neither_dropped_nor_tested(broken: float) -> None:
    found = infer(np.array([0.1, 0.2, broken, 0.3]))
    assert found.n == 4
    assert not math.isfinite(found.mean)
    assert (found.sd, found.p) == (None, None)


# ---------------------------------------------------------------- power


@pytest.mark.parametrize(("n", "wanted"), [(3, 2.48), (5, 1.24), (8, 0.84), (10, 0.72)])
def test_the_least_significant_difference_in_deviations(n: int, wanted: float) -> None:
    assert significant_difference(n, 1.0) == pytest.approx(wanted, abs=0.005)
    # A sample with that mean and deviation has a p of exactly 0.05.
    sample = np.linspace(-1, 1, n)
    sample = sample / np.std(sample, ddof=1) + significant_difference(n, 1.0)
    assert infer(sample).p == pytest.approx(0.05, rel=1e-9)


@pytest.mark.parametrize(
    ("n", "difference", "alpha"), [(3, 1.0, 0.05), (5, 1.7, 0.05), (20, 0.3, 0.01), (20, 2.0, 0.05)]
)
def test_power_is_what_integration_over_the_deviation_says(
    n: int, difference: float, alpha: float
) -> None:
    critical = stats.t.isf(alpha / 2, n - 1)

    def given(chi2: float) -> float:
        edge = critical * math.sqrt(chi2 / (n - 1))
        shift = difference * math.sqrt(n)
        tails = stats.norm.sf(edge - shift) + stats.norm.cdf(-edge - shift)
        return float(stats.chi2.pdf(chi2, n - 1) * tails)

    wanted = integrate.quad(given, 0, np.inf, limit=200)[0]
    assert power_of(n, 1.0, difference, alpha) == pytest.approx(wanted, abs=1e-7)


def test_power_without_a_difference_is_alpha_and_a_huge_one_is_found() -> None:
    assert power_of(4, 0.3, 0.0, 0.05) == pytest.approx(0.05, rel=1e-9)
    assert power_of(3, 1e-300, 1e300) == pytest.approx(1.0)


def test_the_seeds_needed_are_the_fewest() -> None:
    # 34 pairs for half a deviation at power 0.8 is the value of the textbook (Cohen 1988).
    assert seeds_needed(1.0, 0.5) == 34
    assert power_of(34, 1.0, 0.5) >= 0.8 > power_of(33, 1.0, 0.5)
    assert seeds_needed(0.004, 0.01) == 4
    assert seeds_needed(1e-6, 1.0) == 3  # never below what inference takes
    assert seeds_needed(1.0, 1e-5) is None


@pytest.mark.parametrize("n", [3, 5, 30])
def test_what_is_detectable_is_found_as_often_as_it_says(n: int) -> None:
    difference = detectable_difference(n, 0.004, 0.05, 0.8)
    assert power_of(n, 0.004, difference) == pytest.approx(0.8, abs=1e-8)


# ---------------------------------------------------------------- sweeps in which nothing differs


def within_chance(errors: int, rate: float = 0.05) -> bool:
    """Whether so many of 2,000 are within the 99 % interval of a binomial with that rate."""
    low, high = stats.binom.interval(0.99, SWEEPS, rate)
    return bool(low <= errors <= high)


def null_sweeps(n: int, tests: int) -> Floats:
    """Differences [sweeps, tests, seeds] from a baseline that all share, of alike encodings."""
    generator = np.random.default_rng(n)
    losses = generator.normal(2.0, 0.01, (SWEEPS, tests + 1, n))
    losses += generator.normal(0.0, 0.2, (SWEEPS, 1, n))  # the seed's own, for all encodings
    differences: Floats = losses[:, 1:] - losses[:, :1]
    return differences


@pytest.mark.parametrize("n", [3, 5, 8])
def test_false_positives_of_the_t_test_are_as_many_as_it_says(n: int) -> None:
    assert within_chance(int((paired_t_p(null_sweeps(n, 1)) <= 0.05).sum()))


@pytest.mark.parametrize("n", [6, 8])
def test_false_positives_of_the_sign_flip_test_are_as_many_as_it_says(n: int) -> None:
    # p comes in steps of 2 / 2^n: so often is it at or below 0.05, exactly.
    rate = math.floor(0.05 * 2**n / 2) * 2 / 2**n
    assert within_chance(int((sign_flip_p(null_sweeps(n, 1)[:, 0]) <= 0.05).sum()), rate)


def test_under_holm_a_table_errs_at_all_with_alpha_at_most() -> None:
    p = paired_t_p(null_sweeps(5, 12))
    uncorrected = int((p <= 0.05).any(axis=1).sum())
    corrected = int((holm(p) <= 0.05).any(axis=1).sum())
    assert uncorrected > 0.2 * SWEEPS  # twelve tests of one baseline: this is what Holm is for
    assert corrected <= stats.binom.ppf(0.995, SWEEPS, 0.05)
    assert corrected > 0.005 * SWEEPS  # and it is not merely asleep


# ---------------------------------------------------------------- the other variance


def test_documents_resampled_together_tell_two_checkpoints_apart() -> None:
    """Documents differ by far more than the models do; only the paired interval sees past that."""
    generator = np.random.default_rng(2)
    counts = np.full(40, 64)
    theirs = 64 * generator.normal(2.0, 0.5, 40)
    ours = theirs - 64 * generator.normal(0.02, 0.01, 40)
    paired = bootstrap_interval(ours - theirs, counts, 2000)
    assert paired is not None
    assert paired[1] < 0
    alone = [bootstrap_interval(sums, counts, 2000) for sums in (ours, theirs)]
    assert alone[0] is not None
    assert alone[1] is not None
    assert alone[0][1] > alone[1][0]  # they overlap widely
