"""The losses against NumPy formulas, and their gradients against closed forms around the clip boundaries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.maths.losses import (
    approximate_kl,
    clip_fraction,
    clipped_surrogate,
    clipped_value_loss,
    explained_variance,
    standardise,
    value_loss,
    weighted_mean,
)

RNG = np.random.default_rng(0)
A, B, C = RNG.normal(size=(3, 6, 4)).astype(np.float32)
WEIGHTS = RNG.uniform(0.1, 2.0, size=(6, 4)).astype(np.float32)


def surrogate_terms(log_ratio, advantages):
    ratio = np.exp(log_ratio)
    return -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)


def clipped_value_terms(values, old_values, returns):
    near = np.clip(values, old_values - 0.3, old_values + 0.3)
    return 0.5 * np.maximum((values - returns) ** 2, (near - returns) ** 2)


CASES = [
    (lambda w: clipped_surrogate(A, B, 0.2, w), surrogate_terms(A, B)),
    (lambda w: value_loss(A, B, w), 0.5 * (A - B) ** 2),
    (lambda w: clipped_value_loss(A, B, C, 0.3, w), clipped_value_terms(A, B, C)),
    (lambda w: approximate_kl(A, w), np.exp(A) - 1 - A),
    (lambda w: clip_fraction(A, 0.2, w), np.abs(np.exp(A) - 1) > 0.2),
    (lambda w: weighted_mean(jnp.asarray(A), w), A),
]


@pytest.mark.parametrize(("loss", "terms"), CASES)
def test_means_equal_numpy(loss, terms):
    np.testing.assert_allclose(loss(None), terms.mean(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(loss(WEIGHTS), np.average(terms, weights=WEIGHTS), rtol=1e-5, atol=1e-7)
    per_column = WEIGHTS[0]
    expected = np.average(terms, weights=np.tile(per_column, (6, 1)))
    np.testing.assert_allclose(loss(per_column), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("loss", "terms"), CASES)
def test_masked_samples_do_not_count(loss, terms):
    mask = np.zeros((6, 4), np.float32)
    mask[:2] = 1.0
    np.testing.assert_allclose(loss(mask), terms[:2].mean(), rtol=1e-5, atol=1e-7)
    assert loss(np.zeros((6, 4), np.float32)) == 0.0


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [0.5, 0.799, 0.801, 1.0, 1.199, 1.201, 3.0])
def test_surrogate_gradient_stops_at_the_clip(ratio, advantage):
    """d/d log ρ of −min(ρA, clip(ρ)A) is −ρA, and 0 past the boundary that A pushes towards."""
    past = ratio > 1.2 if advantage > 0 else ratio < 0.8
    gradient = jax.grad(lambda log_ratio: clipped_surrogate(log_ratio, jnp.array(advantage), 0.2))(jnp.log(ratio))
    np.testing.assert_allclose(gradient, 0.0 if past else -ratio * advantage, rtol=1e-5)


@pytest.mark.parametrize("returns", [5.0, -5.0])
@pytest.mark.parametrize("value", [-0.6, -0.501, -0.499, 0.0, 0.499, 0.501, 0.6])
def test_value_gradient_stops_at_the_clip(value, returns):
    """From V_old = 0 with ε = ½: V − R, and 0 once V has come more than ε nearer to R."""
    past = value > 0.5 if returns > 0 else value < -0.5
    gradient = jax.grad(lambda v: clipped_value_loss(v, jnp.array(0.0), jnp.array(returns), 0.5))(value)
    np.testing.assert_allclose(gradient, 0.0 if past else value - returns, rtol=1e-5)


def test_gradients_of_the_first_epoch_are_the_policy_gradient():
    """At ρ = 1 the surrogate's gradient is −A/n, whatever the clip range."""
    gradient = jax.grad(clipped_surrogate)(jnp.zeros((6, 4)), B, 0.1)
    np.testing.assert_allclose(gradient, -B / B.size, rtol=1e-6)


def test_weights_scale_the_gradients_of_their_samples():
    gradient = jax.grad(value_loss)(A, B, WEIGHTS)
    np.testing.assert_allclose(gradient, WEIGHTS * (A - B) / WEIGHTS.sum(), rtol=1e-4)


def test_approximate_kl_estimates_the_kl_of_two_normals():
    """KL(N(0, 1) ‖ N(μ, 1)) = μ²/2, from samples of the first; no sample is negative, not even by rounding."""
    samples = np.random.default_rng(1).normal(size=200_000)
    log_ratio = jnp.asarray(0.2 * samples - 0.02, jnp.float32)
    np.testing.assert_allclose(approximate_kl(log_ratio), 0.02, rtol=0.02)
    assert float(approximate_kl(jnp.array([1e-6]))) >= 0.0


def test_standardised_advantages_have_mean_0_and_deviation_1():
    result = np.asarray(standardise(100.0 + 5.0 * A))
    np.testing.assert_allclose([result.mean(), result.std()], [0.0, 1.0], atol=1e-4)
    np.testing.assert_allclose(result, (A - A.mean()) / A.std(), atol=1e-3)
    weighted = np.asarray(standardise(A, WEIGHTS))
    np.testing.assert_allclose(np.average(weighted, weights=WEIGHTS), 0.0, atol=1e-6)
    np.testing.assert_allclose(np.average(weighted**2, weights=WEIGHTS), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(standardise(jnp.full(3, 2.0)), 0.0)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_explained_variance(weights):
    mean = np.average(B, weights=weights)
    residual = B - A
    expected = 1 - np.average((residual - np.average(residual, weights=weights)) ** 2, weights=weights) / np.average(
        (B - mean) ** 2, weights=weights
    )
    np.testing.assert_allclose(explained_variance(A, B, weights), expected, rtol=1e-4)
    np.testing.assert_allclose(explained_variance(B + 3.0, B, weights), 1.0, atol=1e-5)
    np.testing.assert_allclose(explained_variance(np.ones_like(B), B, weights), 0.0, atol=1e-5)
    assert explained_variance(A, np.zeros_like(B), weights) == 0.0


def test_a_column_against_a_row_is_refused():
    with pytest.raises(ValueError, match=r"values \(8, 1\), returns \(8,\) must have the same shape; reshape"):
        value_loss(jnp.zeros((8, 1)), jnp.zeros(8))
