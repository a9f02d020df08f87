"""The document bootstrap against a second computation, and what an interval must do."""

from __future__ import annotations

import math

import numpy as np
import pytest

from posbench.statistics import (
    FEWEST_DOCUMENTS,
    Floats,
    bootstrap_interval,
    perplexity,
    unigram_perplexity,
)


def sample(documents: int, seed: int = 0) -> tuple[Floats, np.ndarray]:
    """Summed losses and target counts of documents of unequal length and difficulty."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(1, 9, documents) * 64
    return counts * generator.normal(3.0, 0.5, documents), counts


def plain_interval(
    sums: Floats, counts: np.ndarray, resamples: int, seed: int
) -> tuple[float, float]:
    """The percentile interval by its definition, with a loop and another stream of numbers."""
    generator = np.random.default_rng(seed)
    means = []
    for _ in range(resamples):
        picked = generator.choice(len(sums), len(sums))
        means.append(sums[picked].sum() / counts[picked].sum())
    means.sort()
    return means[round(0.025 * resamples)], means[round(0.975 * resamples) - 1]


def width(interval: tuple[float, float] | None) -> float:
    assert interval is not None
    return interval[1] - interval[0]


# ---------------------------------------------------------------- bootstrap


def test_interval_agrees_with_a_loop_over_other_draws() -> None:
    sums, counts = sample(40)
    found = bootstrap_interval(sums, counts, 4000)
    assert found is not None
    # The ends of an interval from 4,000 resamples vary by a few hundredths of its width.
    np.testing.assert_allclose(found, plain_interval(sums, counts, 4000, 5), atol=width(found) / 15)


def test_interval_is_the_same_each_time() -> None:
    sums, counts = sample(25)
    assert bootstrap_interval(sums, counts, 300) == bootstrap_interval(sums, counts, 300)


def test_interval_is_about_the_mean_of_targets_not_of_documents() -> None:
    counts = np.array([1000] * 10 + [1] * 10)
    sums = counts * np.array([2.0] * 10 + [9.0] * 10)
    found = bootstrap_interval(sums, counts, 500)
    assert found is not None
    assert found[0] > 2.0
    assert found[1] < 2.1  # the mean over documents is 5.5


def test_documents_that_agree_leave_no_doubt() -> None:
    counts = np.arange(64, 64 * 13, 64)
    found = bootstrap_interval(counts * 2.5, counts, 200)
    np.testing.assert_allclose(found, (2.5, 2.5), rtol=1e-12)


def test_documents_are_resampled_whole() -> None:
    """The same losses, dealt evenly or held by one document: only the latter widens."""
    counts = np.full(20, 64)
    easy = np.full(20, 64 * 2.0)
    outlier = easy.copy()
    outlier[7] = 64 * 12.0
    shared = np.full(20, outlier.sum() / 20)
    assert width(bootstrap_interval(shared, counts, 500)) < 1e-12
    found = bootstrap_interval(outlier, counts, 500)
    assert width(found) > 0.9
    # A document drawn once or not at all moves the mean by its whole loss, 10 / 20 nats.
    assert found is not None
    assert found[0] == pytest.approx(2.0)
    assert (found[1] - 2.0) / 0.5 == pytest.approx(round((found[1] - 2.0) / 0.5), abs=0.1)


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(200):
        sums, counts = sample(30, seed)
        found = bootstrap_interval(sums, counts, 400)
        assert found is not None
        covered += found[0] <= 3.0 <= found[1]
    assert 0.88 * 200 <= covered <= 0.99 * 200


@pytest.mark.parametrize("documents", [0, 1, FEWEST_DOCUMENTS - 1])
def test_few_documents_get_no_interval(documents: int) -> None:
    assert bootstrap_interval(*sample(documents), 200) is None


def test_ten_documents_get_one() -> None:
    assert FEWEST_DOCUMENTS == 10
    assert width(bootstrap_interval(*sample(10), 200)) > 0


# ---------------------------------------------------------------- perplexity


@pytest.mark.parametrize(
    ("nats", "wanted"),
    [(0.0, 1.0), (4.0, 54.598150033144236), (709.0, math.exp(709)), (800.0, math.inf)],
)
def test_perplexity(nats: float, wanted: float) -> None:
    assert perplexity(nats) == wanted


def test_unigram_perplexity_by_hand() -> None:
    train = np.array([0, 0, 0, 1, 2], dtype=np.uint16)
    test = np.array([0, 1, 1, 3], dtype=np.uint16)
    # Counts plus one: 4, 2, 2, 1 of 9; token 3 was never seen.
    wanted = (4 / 9 * 2 / 9 * 2 / 9 * 1 / 9) ** (-1 / 4)
    assert unigram_perplexity(train, test, 4) == pytest.approx(wanted, rel=1e-12)


def test_unigram_perplexity_of_even_frequencies_is_the_vocabulary() -> None:
    even = np.arange(50, dtype=np.uint32).repeat(3)
    assert unigram_perplexity(even, even[:7], 50) == pytest.approx(50, rel=1e-12)
