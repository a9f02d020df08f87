"""How sure a perplexity is: the document bootstrap."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
FEWEST_DOCUMENTS = 10
_SEED = 20_190_612  # any fixed number: the interval of one table of losses is always the same


def bootstrap_interval(
    sums: Floats, counts: npt.NDArray[np.int64], resamples: int
) -> tuple[float, float] | None:
    """95 % percentile interval of the mean loss, nats, with documents resampled whole.

    `sums` and `counts` [documents] are the summed loss and the number of targets of each. None
    with fewer than ten documents: an interval from so few would mislead.
    """
    documents = len(sums)
    if documents < FEWEST_DOCUMENTS:
        return None
    generator = np.random.Generator(np.random.Philox(_SEED))
    picks = generator.integers(documents, size=(resamples, documents))
    means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def perplexity(nats: float) -> float:
    """exp(nats), infinite where a float cannot hold it."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def unigram_perplexity(
    train: npt.NDArray[np.unsignedinteger],
    test: npt.NDArray[np.unsignedinteger],
    vocabulary: int,
) -> float:
    """Perplexity on `test` of token frequencies counted on `train`, plus one each.

    What a model that ignores all context can reach; one that has learned lies far below.
    """
    seen = np.bincount(train, minlength=vocabulary) + 1
    wanted = np.bincount(test, minlength=vocabulary)
    nats = -np.log(seen / seen.sum())
    return perplexity(float((wanted * nats).sum() / wanted.sum()))
