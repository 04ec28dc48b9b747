"""Two-hot numbers, lambda-returns and the range of returns, against NumPy and hand-worked cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.maths.two_hot import (
    ReturnRange,
    bins,
    lambda_returns,
    symexp,
    symlog,
    two_hot,
    two_hot_loss,
    two_hot_mean,
    update_range,
)

NUMBERS = np.float32([-1e9, -4000.0, -3.2, -1e-3, 0.0, 1e-6, 0.5, 1.0, 77.7, 1e6, 4e8])


def test_symlog_and_its_inverse():
    np.testing.assert_allclose(symlog(NUMBERS), np.sign(NUMBERS) * np.log(np.abs(NUMBERS.astype(float)) + 1), rtol=1e-5)
    np.testing.assert_allclose(symexp(symlog(NUMBERS)), NUMBERS, rtol=2e-5)
    assert float(jax.grad(symlog)(0.0)) == 0.0  # of the sign, so that a constant 0 stays finite


@pytest.mark.parametrize("count", [255, 63, 6])
def test_bins_are_symmetric_and_spaced_by_symexp(count):
    places = bins(count)
    np.testing.assert_array_equal(places, -places[::-1])
    expected = np.linspace(-20, 20, count)
    np.testing.assert_allclose(places, np.sign(expected) * np.expm1(np.abs(expected)), rtol=1e-6, atol=1e-9)


def two_hot_by_search(x, places):
    """The two neighbours of each number, found one by one."""
    weights = np.zeros((len(x), len(places)))
    for row, number in enumerate(np.clip(x.astype(float), places[0], places[-1])):
        above = min(int(np.searchsorted(places, number, side="right")), len(places) - 1)
        share = (number - places[above - 1]) / (places[above] - places[above - 1])
        weights[row, above - 1 : above + 1] = 1 - share, share
    return weights


@pytest.mark.parametrize("count", [255, 63])
def test_two_neighbours_share_a_number(count):
    random = np.random.default_rng(0).normal(size=500) * np.exp(np.random.default_rng(1).uniform(-3, 12, 500))
    places = bins(count)
    x = np.concatenate([NUMBERS, np.float32(random), places])
    found = np.asarray(two_hot(jnp.asarray(x), count))
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-6)
    assert ((found > 0).sum(-1) <= 2).all()
    np.testing.assert_allclose(found @ places.astype(float), np.clip(x, places[0], places[-1]), rtol=1e-5, atol=1e-6)
    inner = np.abs(x) < 1e6  # beyond, float32 has too few digits to compare single weights
    np.testing.assert_allclose(found[inner], two_hot_by_search(x[inner], places.astype(float)), atol=2e-3)


def test_the_mean_is_the_inverse():
    x = jnp.float32(NUMBERS[1:-1])
    np.testing.assert_allclose(two_hot_mean(jnp.log(two_hot(x, 255))), x, rtol=1e-4, atol=1e-5)
    assert float(two_hot_mean(jnp.zeros(255))) == 0
    assert float(two_hot_mean(jnp.full(63, 3.0))) == 0


def test_the_loss_is_a_cross_entropy_whose_gradient_is_the_difference_of_the_distributions():
    logits = jax.random.normal(jax.random.key(0), (4, 63))
    target = jnp.array([0.3, -7.0, 120.0, 0.0])
    probs = np.exp(np.asarray(logits, float))
    probs /= probs.sum(-1, keepdims=True)
    weights = two_hot_by_search(np.asarray(target), bins(63).astype(float))
    np.testing.assert_allclose(two_hot_loss(logits, target), -(weights * np.log(probs)).sum(-1), rtol=1e-5)
    gradient = jax.grad(lambda logits: two_hot_loss(logits, target).sum())(logits)
    np.testing.assert_allclose(gradient, probs - weights, atol=1e-5)
    assert not np.any(jax.grad(lambda target: two_hot_loss(logits, target).sum())(target))


def returns_by_loop(reward, bootstrap, live, last, discount, mixing):
    """Each return by its definition, from the end."""
    found = np.zeros((len(reward) - 1, *reward.shape[1:]))
    following = bootstrap[-1]
    for t in reversed(range(len(reward) - 1)):
        for index in np.ndindex(*reward.shape[1:]):
            ahead = following[index] if not last[t + 1][index] else bootstrap[t + 1][index]
            mean = (1 - mixing) * bootstrap[t + 1][index] + mixing * ahead
            found[t][index] = reward[t + 1][index] + discount * live[t + 1][index] * mean
        following = found[t]
    return found


def test_lambda_returns_against_a_loop():
    random = np.random.default_rng(0)
    reward, bootstrap = random.normal(size=(2, 9, 5))
    live, last = random.uniform(size=(9, 5)), (random.uniform(size=(9, 5)) < 0.3).astype(float)
    arguments = reward, bootstrap, live, last
    for mixing in (0.0, 0.8, 1.0):
        found = lambda_returns(*map(jnp.float32, arguments), 0.9, mixing)
        np.testing.assert_allclose(found, returns_by_loop(*arguments, 0.9, mixing), rtol=1e-5, atol=1e-6)


def test_the_range_of_returns_follows_its_percentiles():
    random = np.random.default_rng(0).normal(size=(20, 30, 7)) * 9
    known, low, high = ReturnRange(jnp.float32(0), jnp.float32(0)), 0.0, 0.0
    for returns in random:
        known = update_range(known, jnp.float32(returns), 0.25)
        ordered = np.sort(returns.ravel())
        ends = [np.interp(share * (len(ordered) - 1), np.arange(len(ordered)), ordered) for share in (0.05, 0.95)]
        low, high = 0.75 * low + 0.25 * ends[0], 0.75 * high + 0.25 * ends[1]
        np.testing.assert_allclose(known, (low, high), rtol=1e-5)
    np.testing.assert_allclose(known.scale, high - low, rtol=1e-5)


def test_small_returns_are_not_blown_up():
    assert float(update_range(ReturnRange(jnp.float32(0), jnp.float32(0)), jnp.linspace(0, 0.1, 50), 1.0).scale) == 1
