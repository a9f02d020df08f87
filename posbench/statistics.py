"""How sure a number is, and what a curve of losses says in one number."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
FEWEST_DOCUMENTS = 10
_SEED = 20_190_612  # any fixed number: the interval of one table of losses is always the same


def bootstrap_interval(
    sums: Floats, counts: npt.NDArray[np.generic], resamples: int
) -> tuple[float, float] | None:
    """95 % percentile interval of the mean loss, nats, with documents resampled whole.

    `sums` and `counts` [documents] are the summed loss and the number of targets of each. None
    with fewer than ten documents: an interval from so few would mislead.
    """
    if len(sums) < FEWEST_DOCUMENTS:
        return None
    low, high = np.percentile(resampled_means(sums, counts, resamples), (2.5, 97.5))
    return float(low), float(high)


def wilson_interval(share: float, trials: int) -> tuple[float, float]:
    """95 % interval of a share of `trials` independent ones (Wilson 1927).

    `share` may also be the mean of values between 0 and 1, one per trial: none of those varies more
    than a share does, so the interval is then rather too wide than too narrow.
    """
    z = 1.959963984540054
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    inner = share * (1 - share) / trials + z * z / (4 * trials * trials)
    half = z * math.sqrt(inner) / (1 + z * z / trials)
    # Rounding must not leave 0 of n with a least above 0, nor n of n with a most below 1.
    return (centre - half if share > 0 else 0.0), (centre + half if share < 1 else 1.0)


def resampled_means(sums: Floats, counts: npt.NDArray[np.generic], resamples: int) -> Floats:
    """Mean losses [..., resamples] over documents drawn with return; `sums` [..., documents].

    The same draws for every table of as many documents, so that differences are paired.
    """
    generator = np.random.Generator(np.random.Philox(_SEED))
    picks = generator.integers(len(counts), size=(resamples, len(counts)))
    means: Floats = sums[..., picks].sum(axis=-1) / counts[picks].sum(axis=-1)
    return means


def effective_length(lengths: list[int], nats: list[float], tolerance: float) -> int:
    """The largest of `lengths` up to which every perplexity is within `tolerance` of the first.

    `lengths` ascend from the training length; `nats` are mean losses, infinite where there is none.
    """
    held = lengths[0]
    for length, loss in zip(lengths, nats, strict=True):
        if not loss - nats[0] <= math.log1p(tolerance):
            break
        held = length
    return held


def cliff_position(
    lo: list[int], hi: list[int], nats: list[float], train_length: int, threshold: float
) -> int | None:
    """Where the loss by position rises by more than `threshold` nats for good; None: nowhere.

    The first bucket [lo, hi) from which on every mean exceeds the least mean within the training
    length by more than `threshold`. A loss that is not finite exceeds everything.
    """
    inside = [loss for end, loss in zip(hi, nats, strict=True) if end <= train_length]
    finite = [loss for loss in inside if math.isfinite(loss)]
    if not finite:
        return lo[0]
    cliff = None
    for start, loss in zip(reversed(lo), reversed(nats), strict=True):
        if loss - min(finite) <= threshold:
            break
        cliff = start
    return cliff


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
