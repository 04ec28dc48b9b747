"""Statistics of few runs: cases worked by hand, and SciPy's."""

import numpy as np
import pytest
from scipy import stats

from lehr.sweeps.statistics import (
    bootstrap,
    interquartile_mean,
    mean,
    performance_profile,
    probability_of_improvement,
)


@pytest.fixture
def generator():
    return np.random.default_rng(7)


@pytest.mark.parametrize("seeds", [1, 2, 3, 4, 5, 8, 11, 100])
def test_interquartile_mean_is_the_trimmed_mean(generator, seeds):
    scores = generator.standard_cauchy((3, 2, seeds))
    np.testing.assert_allclose(interquartile_mean(scores), stats.trim_mean(scores, 0.25, axis=-1))


def test_interquartile_mean_leaves_outliers_out():
    assert interquartile_mean(np.array([-1e9, 1.0, 2.0, 3.0, 1e9])) == 2.0


@pytest.mark.parametrize(("n", "m"), [(1, 1), (5, 5), (4, 9)])
def test_probability_of_improvement_is_the_u_of_mann_and_whitney(generator, n, m):
    x, y = generator.integers(0, 4, n).astype(float), generator.integers(0, 4, m).astype(float)  # many ties
    expected = stats.mannwhitneyu(x, y).statistic / (n * m)
    np.testing.assert_allclose(probability_of_improvement(x, y), expected)
    np.testing.assert_allclose(probability_of_improvement(y, x), 1 - expected)


def test_a_failed_run_loses_to_every_number_and_ties_with_another():
    failed, low = np.array([np.nan]), np.array([-1e300])
    assert probability_of_improvement(failed, low) == 0
    assert probability_of_improvement(low, failed) == 1
    assert probability_of_improvement(failed, failed) == 0.5


def test_probability_of_improvement_keeps_leading_axes(generator):
    x, y = generator.normal(size=(6, 3, 5)), generator.normal(size=(6, 3, 4))
    each = [[probability_of_improvement(x[i, j], y[i, j]) for j in range(3)] for i in range(6)]
    np.testing.assert_allclose(probability_of_improvement(x, y), each)


def test_profile_is_the_share_above_each_threshold(generator):
    scores = generator.integers(0, 6, (4, 3, 5)).astype(float)
    scores[1, 2, 3] = np.nan
    thresholds = np.array([-1.0, 0.0, 2.0, 2.5, 5.0, 7.0])
    with np.errstate(invalid="ignore"):
        expected = np.stack([(scores > threshold).mean(axis=(1, 2)) for threshold in thresholds], axis=-1)
    np.testing.assert_allclose(performance_profile(scores, thresholds), expected)


def test_profile_is_one_minus_the_empirical_distribution(generator):
    scores = generator.normal(size=(10, 5))
    thresholds = np.linspace(-2, 2, 9)
    below = stats.ecdf(scores.ravel()).cdf.evaluate(thresholds)
    np.testing.assert_allclose(performance_profile(scores, thresholds), 1 - below)


def test_two_seeds_have_three_resampled_means():
    """The means 0, 5 and 10 come with 1/4, 1/2 and 1/4: the middle half is 5, the middle 95% is everything."""
    scores = np.array([0.0, 10.0])
    assert bootstrap(mean, scores, confidence=0.4)[1:] == (5, 5)
    assert bootstrap(mean, scores, confidence=0.95)[1:] == (0, 10)


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_interval_is_that_of_scipy(generator, statistic):
    scores = generator.gamma(2.0, size=20)
    ours = bootstrap(statistic, scores, resamples=40_000)
    theirs = stats.bootstrap(
        (scores,), lambda x, axis: statistic(x), n_resamples=40_000, method="percentile", rng=1, vectorized=True
    ).confidence_interval
    spread = theirs.high - theirs.low
    np.testing.assert_allclose([ours.low, ours.high], [theirs.low, theirs.high], atol=0.02 * spread)


def test_interval_of_two_samples_is_that_of_scipy(generator):
    x, y = generator.normal(0.5, size=12), generator.normal(size=9)
    ours = bootstrap(probability_of_improvement, x, y, resamples=20_000)
    theirs = stats.bootstrap(
        (x, y),
        lambda x, y, axis: probability_of_improvement(x, y),
        n_resamples=20_000,
        method="percentile",
        rng=1,
        vectorized=True,
    ).confidence_interval
    np.testing.assert_allclose([ours.low, ours.high], [theirs.low, theirs.high], atol=0.02)


def test_strata_are_never_mixed(generator):
    """Strata at 0 and at 1000 with a spread of 1: a resample that drew from both would be hundreds off."""
    scores = generator.normal(size=(2, 50)) + np.array([[0.0], [1000.0]])
    value, low, high = bootstrap(lambda x: x.mean(axis=(-2, -1)), scores, resamples=4000)
    deviation = np.sqrt((scores.var(axis=1) / 50).sum()) / 2  # of the mean of two means
    assert value == pytest.approx(scores.mean())
    np.testing.assert_allclose([low, high], value + 1.96 * deviation * np.array([-1, 1]), atol=0.15 * deviation)


def test_resamples_of_two_strata_are_independent(generator):
    """With one draw for both strata, the difference of two equal strata would have no spread."""
    scores = np.tile(generator.normal(size=30), (2, 1))
    _, low, high = bootstrap(lambda x: x[..., 0, :].mean(-1) - x[..., 1, :].mean(-1), scores)
    deviation = np.sqrt(2 * scores[0].var() / 30)
    np.testing.assert_allclose([low, high], 1.96 * deviation * np.array([-1, 1]), rtol=0.15)


def test_the_interval_depends_on_the_seed_alone(generator):
    scores = generator.normal(size=(3, 5))
    first, same, other = (bootstrap(mean, scores, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


def test_blocks_cover_all_resamples(generator, monkeypatch):
    scores = generator.normal(size=(10, 20))
    whole = bootstrap(mean, scores)
    shapes = []

    def recorded(sample):
        shapes.append(sample.shape)
        return mean(sample)

    monkeypatch.setattr("lehr.sweeps.statistics._LARGEST_BLOCK", 200 * 300)
    np.testing.assert_array_equal(bootstrap(recorded, scores), whole)
    assert shapes == [(10, 20)] + [(300, 10, 20)] * 6 + [(200, 10, 20)]


def test_one_seed_has_no_interval():
    value, low, high = bootstrap(mean, np.array([[3.0], [4.0]]))
    assert value.tolist() == [3, 4]
    assert np.isnan(low).all()
    assert np.isnan(high).all()
    probability, low, _ = bootstrap(probability_of_improvement, np.array([1.0]), np.array([0.0, 2.0]))
    assert (probability, low) == (0.5, 0)  # the other sample does have a spread
