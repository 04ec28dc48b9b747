"""Losses and metrics: arrays of the same shape in, a scalar out.

With `weights`, every mean is a weighted mean, Σ w x / Σ w. Weights broadcast to the arrays: they are a mask `[T, N]`,
or one importance weight per segment, `[N]`. Dividing by Σ w is correct for masks, and makes the loss independent of the
scale of the weights. For the unbiased importance-sampling mean, Σ w x / n, pass `weights * advantages` as the
advantages instead.

On several devices, a loss or a metric is this device's part: its mean over devices is that of the whole.
"""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from lehr.maths import across
from lehr.maths.distributions import Distribution
from lehr.types import Metrics, Rollout, check_same_shape


def validity(rollout: Any) -> jax.Array | None:
    """Return the weights of a rollout's steps: its mask `valid`, or `None` if it is `()`, which means all of them."""
    return None if isinstance(rollout.valid, tuple) else rollout.valid


class PartOf(NamedTuple):
    """The weights of a part, with which means over equal parts, averaged, are the weighted mean over the whole."""

    weights: jax.Array
    """In the shape of the part."""
    total: jax.Array
    """`[]`: the sum of the weights of the whole, divided by the number of parts."""


Weights: TypeAlias = jax.Array | PartOf | None
"""Of the terms of a mean: a mask, importance weights, those of a part of a minibatch, or none."""


def masked(terms: jax.Array, valid: Weights) -> jax.Array:
    """Return the terms with 0 where a step is not valid.

    >>> masked(jnp.array([1.0, 2.0]), jnp.array([True, False])).tolist()
    [1.0, 0.0]
    """
    if isinstance(valid, PartOf):
        valid = valid.weights
    return terms if valid is None else jnp.where(valid, terms, 0.0)


def weighted_mean(terms: jax.Array, weights: Weights = None) -> jax.Array:
    """Return Σ w x / Σ w; without weights the plain mean, and 0 when all weights are 0.

    >>> float(weighted_mean(jnp.array([1.0, 2.0, 30.0]), jnp.array([1.0, 3.0, 0.0])))
    1.75

    Two parts of these three terms, of which the second is one that does not count:

    >>> weights, total = jnp.array([[1.0, 3.0], [0.0, 0.0]]), jnp.float32(4.0 / 2)
    >>> parts = [weighted_mean(jnp.array([1.0, 2.0]), PartOf(part, total)) for part in weights]
    >>> float(sum(parts) / 2)
    1.75
    """
    if weights is None:
        return jnp.mean(terms)
    total = weights.total if isinstance(weights, PartOf) else None
    weights = jnp.broadcast_to(weights.weights if isinstance(weights, PartOf) else weights, terms.shape)
    total = across.mean_count(jnp.sum(weights)) if total is None else total
    return jnp.sum(weights * terms) / jnp.where(total == 0, 1, total)


def standardise(advantages: jax.Array, weights: Weights = None, epsilon: float = 1e-8) -> jax.Array:
    """(A − mean A) / (std A + ε), in the shape of A; mean and variance are weighted.

    >>> standardise(jnp.array([1.0, 3.0])).tolist()
    [-1.0, 1.0]
    """
    centred = advantages - across.mean(weighted_mean(advantages, weights))
    return centred / (jnp.sqrt(across.mean(weighted_mean(jnp.square(centred), weights))) + epsilon)


def policy_gradient_loss(log_prob: jax.Array, advantages: jax.Array, weights: Weights = None) -> jax.Array:
    """The loss whose gradient is the policy gradient: −mean A log π(a|s).

    >>> float(policy_gradient_loss(jnp.array([-1.0, -2.0]), jnp.array([3.0, -1.0])))
    0.5
    """
    check_same_shape(log_prob=log_prob, advantages=advantages)
    return -weighted_mean(log_prob * advantages, weights)


def surrogate_loss(log_ratio: jax.Array, advantages: jax.Array, weights: Weights = None) -> jax.Array:
    """TRPO's policy loss (Schulman et al., 2015): −mean ρ A, ρ = exp(log_ratio).

    >>> float(surrogate_loss(jnp.log(jnp.array([2.0, 0.5])), jnp.array([1.0, -1.0])))
    -0.75
    """
    check_same_shape(log_ratio=log_ratio, advantages=advantages)
    return -weighted_mean(jnp.exp(log_ratio) * advantages, weights)


def clipped_surrogate(
    log_ratio: jax.Array,
    advantages: jax.Array,
    clip_range: float | jax.Array,
    weights: Weights = None,
) -> jax.Array:
    """PPO's policy loss (Schulman et al., 2017): −mean min(ρ A, clip(ρ, 1 − ε, 1 + ε) A), ρ = exp(log_ratio).

    >>> ratio = jnp.array([2.0, 2.0])
    >>> float(clipped_surrogate(jnp.log(ratio), jnp.array([1.0, -1.0]), clip_range=0.5))
    0.25
    """
    check_same_shape(log_ratio=log_ratio, advantages=advantages)
    ratio = jnp.exp(log_ratio)
    # Inside the range, both terms of the formula are equal: the gradient of their minimum is half of each, but wrong
    # where a compiler evaluates them twice and rounds differently, which was seen on a CPU.
    bounded = jnp.where(advantages >= 0, jnp.minimum(ratio, 1.0 + clip_range), jnp.maximum(ratio, 1.0 - clip_range))
    return -weighted_mean(bounded * advantages, weights)


def value_loss(values: jax.Array, returns: jax.Array, weights: Weights = None) -> jax.Array:
    """½ mean (V − R)².

    >>> float(value_loss(jnp.array([1.0, 2.0]), jnp.array([3.0, 2.0])))
    1.0
    """
    check_same_shape(values=values, returns=returns)
    return 0.5 * weighted_mean(jnp.square(values - returns), weights)


def clipped_value_loss(
    values: jax.Array,
    old_values: jax.Array,
    returns: jax.Array,
    clip_range: float | jax.Array,
    weights: Weights = None,
) -> jax.Array:
    """½ mean max((V − R)², (V_old + clip(V − V_old, −ε, ε) − R)²): no gain from moving V more than ε from V_old.

    >>> float(clipped_value_loss(jnp.array([2.0]), jnp.array([0.0]), jnp.array([2.0]), clip_range=0.5))
    1.125
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    clipped = old_values + jnp.clip(values - old_values, -clip_range, clip_range)
    errors = jnp.maximum(jnp.square(values - returns), jnp.square(clipped - returns))
    return 0.5 * weighted_mean(errors, weights)


def total_loss(
    policy_loss: jax.Array, critic_loss: jax.Array, entropy: jax.Array, coef: Metrics
) -> tuple[jax.Array, Metrics]:
    """L = L_policy + value_coef · L_value − entropy_coef · H, and its terms as metrics."""
    bonus = coef["entropy_coef"] * entropy
    total = policy_loss + coef["value_coef"] * critic_loss - bonus
    parts = {"loss/total": total, "loss/policy": policy_loss, "loss/value": critic_loss, "loss/entropy": -bonus}
    return total, parts


def approximate_kl(log_ratio: jax.Array, weights: Weights = None) -> jax.Array:
    """Estimate KL(μ ‖ π) from samples of μ as mean (ρ − 1 − log ρ) with ρ = π/μ: unbiased and never negative.

    >>> round(float(approximate_kl(jnp.log(jnp.array([2.0, 0.5])))), 3)
    0.25
    """
    return weighted_mean(jnp.expm1(log_ratio) - log_ratio, weights)


def clip_fraction(log_ratio: jax.Array, clip_range: float | jax.Array, weights: Weights = None) -> jax.Array:
    """The fraction of samples outside the clip range, mean 1[|ρ − 1| > ε].

    >>> float(clip_fraction(jnp.log(jnp.array([1.0, 1.1, 1.5, 0.5])), clip_range=0.2))
    0.5
    """
    return weighted_mean((jnp.abs(jnp.expm1(log_ratio)) > clip_range).astype(log_ratio.dtype), weights)


def explained_variance(values: jax.Array, returns: jax.Array, weights: Weights = None) -> jax.Array:
    """1 − Var(R − V) / Var(R): 1 for perfect values, 0 for constant values, and 0 if R is constant.

    >>> float(explained_variance(jnp.array([1.0, 2.0, 3.0]), jnp.array([2.0, 4.0, 6.0])))
    0.75
    """
    check_same_shape(values=values, returns=returns)
    samples = returns, returns - values
    means = across.mean([weighted_mean(x, weights) for x in samples])
    squares = [weighted_mean(jnp.square(x - mean), weights) for x, mean in zip(samples, means, strict=True)]
    total, rest = across.mean(squares)
    return jnp.where(total > 0, 1.0 - rest / jnp.where(total > 0, total, 1.0), 0.0)


def policy_metrics(policy: Distribution, entropy: jax.Array, log_ratio: jax.Array, weights: Weights = None) -> Metrics:
    """Return metrics of a policy: mean entropy, approximate KL from the behaviour policy, standard deviation."""
    metrics = {"policy/entropy": entropy, "policy/approximate_kl": approximate_kl(log_ratio, weights)}
    if (std := policy.std()) is not None:
        metrics["policy/std"] = jnp.mean(std)
    return metrics


def ratio_metrics(log_ratio: jax.Array, rho_clip: jax.Array, weights: Weights = None) -> Metrics:
    """Return metrics of ρ = π/μ: its mean, its mean distance from 1, and the fraction that is clipped."""
    ratio = jnp.exp(log_ratio)
    return {
        "vtrace/ratio": weighted_mean(ratio, weights),
        "vtrace/ratio_distance": weighted_mean(jnp.abs(jnp.expm1(log_ratio)), weights),
        "vtrace/clip_fraction": weighted_mean((ratio > rho_clip).astype(ratio.dtype), weights),
    }


def rollout_metrics(rollout: Rollout, advantages: jax.Array, returns: jax.Array) -> Metrics:
    """Return metrics of a rollout with advantages and returns `[T, N]`: explained variance and means."""
    valid = validity(rollout)
    return {
        "value/explained_variance": explained_variance(rollout.value, returns, valid),
        "value/mean": weighted_mean(rollout.value, valid),
        "advantage/mean": weighted_mean(advantages, valid),
        "return/mean": weighted_mean(returns, valid),
    }
