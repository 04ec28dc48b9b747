"""Statistics of a few runs each of many configurations, in NumPy: arrays of scores in, estimates with intervals out.

The last axis of an array of scores is the seeds; every axis before it (configurations, tasks) is a stratum of its own,
so a resample draws seeds within each of them and never mixes two. Agarwal et al. (2021), "Deep reinforcement learning
at the edge of the statistical precipice", say why these and not the mean of the best runs.

A percentile interval of few seeds is too narrow: at 95%, five seeds cover about 85%, ten about 90%.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

RESAMPLES = 2000
"""Bootstrap resamples: enough for two digits of a 95% interval."""
CONFIDENCE = 0.95
_LARGEST_BLOCK = 2_000_000
"""The maximum number of scores that are resampled at once."""


class Estimate(NamedTuple):
    """A statistic and its confidence interval: numbers, or arrays of one shape."""

    value: Any
    low: Any
    high: Any


def mean(scores: np.ndarray) -> np.ndarray:
    """The mean over seeds: `[..., S]` to `[...]`.

    >>> float(mean(np.array([1.0, 2.0, 6.0])))
    3.0
    """
    return np.mean(scores, axis=-1)


def mean_interval(scores: np.ndarray, confidence: float = CONFIDENCE) -> Estimate:
    """The mean over seeds with Student's interval, `[..., S]` to `[...]`; a NaN, a run that failed, is left out.

        x̄ ± t_{(1+c)/2, S−1} · s / √S

    Of few seeds this is wider than a percentile bootstrap, and covers what it promises if scores are about normal.

    >>> [round(float(part), 3) for part in mean_interval(np.array([1.0, 2.0, 3.0, np.nan]))]
    [2.0, -0.484, 4.484]
    """
    from scipy.stats import t  # slow to import

    known = ~np.isnan(scores)
    count = known.sum(axis=-1)
    value = np.where(count > 0, np.where(known, scores, 0).sum(axis=-1) / np.maximum(count, 1), np.nan)
    squares = np.where(known, (scores - value[..., None]) ** 2, 0).sum(axis=-1)
    degrees = np.maximum(count - 1, 1)
    half = np.where(
        count > 1, t.ppf((1 + confidence) / 2, degrees) * np.sqrt(squares / degrees / np.maximum(count, 1)), np.nan
    )
    return Estimate(value, value - half, value + half)


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """The mean of the middle half of the seeds: `[..., S]` to `[...]`.

        IQM(x) = 1 / (S − 2k) Σ_{i = k+1}^{S−k} x_(i),  k = ⌊S / 4⌋,  x_(1) ≤ … ≤ x_(S)

    It ignores outliers as the median does, but uses more of the scores. Of fewer than four it is the mean.

    >>> float(interquartile_mean(np.array([1.0, 2.0, 6.0, 100.0])))
    4.0
    """
    cut = scores.shape[-1] // 4
    if not cut:
        return mean(scores)
    return np.mean(np.sort(scores, axis=-1)[..., cut:-cut], axis=-1)


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The probability that a run of X scores higher than a run of Y: `[..., N]` and `[..., M]` to `[...]`.

        P(X > Y) = 1 / (N M) Σ_i Σ_j ( 1[x_i > y_j] + ½ 1[x_i = y_j] )

    It is the statistic U of Mann and Whitney, divided by N M. A NaN, a run that failed, loses to every number and ties
    with another. Over several tasks, take the mean.

    >>> float(probability_of_improvement(np.array([3.0, 1.0]), np.array([1.0, 2.0])))
    0.625
    >>> float(probability_of_improvement(np.array([3.0, np.nan]), np.array([1.0])))
    0.5
    """
    first, second = _failed_lowest(x)[..., :, None], _failed_lowest(y)[..., None, :]
    return np.mean(np.where(first == second, 0.5, first > second), axis=(-2, -1))


def performance_profile(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """The share of all runs that score above each threshold: `[..., C, S]` and `[K]`, ascending, to `[..., K]`.

        F(τ) = 1 / (C S) Σ_c Σ_s 1[x_cs > τ]

    A NaN, a run that failed, is above none.

    >>> performance_profile(np.array([[1.0, 2.0], [3.0, np.nan]]), np.array([0.0, 1.0, 2.5])).tolist()
    [0.75, 0.5, 0.25]
    """
    *batch, configurations, seeds = scores.shape
    runs = configurations * seeds
    # Count runs by the number of thresholds below them: linear in the runs, where comparing each with each is not.
    below = np.searchsorted(thresholds, _failed_lowest(scores)).reshape(-1, runs)
    bins = len(thresholds) + 1
    rows = np.arange(len(below))[:, None] * bins
    counts = np.bincount((rows + below).ravel(), minlength=len(below) * bins).reshape(-1, bins)
    above = np.cumsum(counts[:, ::-1], axis=1)[:, -2::-1]
    return above.reshape(*batch, len(thresholds)) / runs


def bootstrap(
    statistic: Callable[..., np.ndarray],
    *samples: np.ndarray,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Estimate:
    """A statistic with its stratified percentile bootstrap interval (Efron, 1979).

        [ q_{(1−c)/2}, q_{(1+c)/2} ]  of  θ(x*_1), …, θ(x*_B)

    Each resample `x*_b` draws, in each stratum on its own, as many seeds as there are, with replacement.

    Args:
        statistic: takes the samples with any number of leading axes, and keeps those: `[B, ..., S]` to `[B, ...]`.
        samples: `[..., S]` each; the number of seeds may differ from one sample to the next.
        resamples: B.
        confidence: c, between 0 and 1.
        seed: the same seed gives the same interval.

    Returns:
        The statistic of the samples and the ends of its interval. Where no stratum has a second seed, the spread is
        unknown, so the ends are NaN.

    >>> value, low, high = bootstrap(mean, np.array([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]]))
    >>> value.tolist(), low.tolist(), high.tolist()
    ([2.0, 5.0], [1.0, 5.0], [3.0, 5.0])
    >>> bootstrap(mean, np.array([4.0]))
    Estimate(value=np.float64(4.0), low=np.float64(nan), high=np.float64(nan))
    """
    value = statistic(*samples)
    if all(sample.shape[-1] < 2 for sample in samples):
        unknown = np.full_like(value, np.nan)[()]
        return Estimate(value, unknown, unknown)
    generator = np.random.default_rng(seed)
    block = max(1, _LARGEST_BLOCK // max(1, sum(sample.size for sample in samples)))
    blocks = []
    for begin in range(0, resamples, block):
        count = min(block, resamples - begin)
        blocks.append(statistic(*(_resampled(sample, count, generator) for sample in samples)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(blocks), [tail, 1 - tail], axis=0)
    return Estimate(value, low, high)


def _resampled(sample: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """`count` resamples of the seeds of each stratum: `[..., S]` to `[count, ..., S]`."""
    drawn = generator.integers(sample.shape[-1], size=(count, *sample.shape))
    return np.take_along_axis(sample[None], drawn, axis=-1)


def _failed_lowest(scores: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(scores), -np.inf, scores)
