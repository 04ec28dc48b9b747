"""Brax's PPO loss for one minibatch of segments.

Clipped surrogate, value losses and their sum are the core's. What only Brax has is here: advantages from λ-returns, in
which truncated steps are left out, and a distributional critic.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lehr.kernels import linear_recurrence
from lehr.maths.losses import clipped_surrogate, clipped_value_loss, standardise, total_loss, value_loss
from lehr.types import Key, Metrics, PyTree, check_same_shape


class NetworkParams(NamedTuple):
    """The parameters that are trained."""

    policy: PyTree
    value: PyTree


class Transitions(NamedTuple):
    """Steps of several segments or environments, time first: leaves `[T, B, ...]`."""

    obs: PyTree
    """Leaves `[T + 1, B, ...]`: the last row is the observation after the last step, and after a reset if one followed.
    `()` in a rollout, which keeps its observations apart."""
    raw_action: PyTree
    """The sampled action, before squashing."""
    log_prob: jax.Array
    policy: PyTree
    """The parameters of the action distribution during the rollout."""
    reward: jax.Array
    done: jax.Array
    """1 where the episode ended with this step, terminated or truncated."""
    truncation: jax.Array
    """1 where a time limit ended it."""
    value: Any = ()
    """The critic's value during the rollout; `()` if it is not used."""


class LossSettings(NamedTuple):
    """The settings of the loss that are not coefficients."""

    normalize_advantage: bool
    clipping_epsilon_value: float | None
    """Clip range of the value loss; for a distributional critic, where the Huber loss becomes linear."""
    use_distributional_critic: bool


def lambda_advantages(
    rewards: jax.Array,
    values: jax.Array,
    last_value: jax.Array,
    termination: jax.Array,
    truncation: jax.Array,
    discount: float | jax.Array,
    gae_lambda: float | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Brax's value targets and advantages, `[T, B]` each.

        m_t = 1 − truncation_t,  γ_t = γ (1 − termination_t)
        v_t = V_t + m_t (r_t + γ_t V_{t+1} − V_t) + m_t γ_t λ (v_{t+1} − V_{t+1})
        A_t = m_t (r_t + γ_t v_{t+1} − V_t)

    with V_T = v_T, the value after the last step. The targets are TD(λ) returns. The advantage bootstraps from the
    target v_{t+1}, so unlike in GAE its first step is not weighted by λ. The observation after a truncated step belongs
    to the next episode, so the target of such a step is its own value, and its advantage is 0.

    >>> zeros, ones = jnp.zeros((2, 1)), jnp.ones((2, 1))
    >>> targets, advantages = lambda_advantages(ones, zeros, jnp.ones(1), zeros, zeros, 0.5, 0.5)
    >>> targets.ravel().tolist(), advantages.ravel().tolist()
    ([1.375, 1.5], [1.75, 1.5])
    """
    check_same_shape(rewards=rewards, values=values, termination=termination, truncation=truncation)
    lasts, discounts = 1.0 - truncation, discount * (1.0 - termination)
    following = jnp.concatenate([values[1:], last_value[None]])
    errors = lasts * (rewards + discounts * following - values)
    targets = values + linear_recurrence(lasts * discounts * gae_lambda, errors)
    following = jnp.concatenate([targets[1:], last_value[None]])
    return targets, lasts * (rewards + discounts * following - values)


def quantile_huber_loss(quantiles: jax.Array, targets: jax.Array, kappa: float | jax.Array) -> jax.Array:
    """The loss of a critic with Q quantiles (Dabney et al., 2018), averaged over all of them.

        τ_i = (i + ½) / Q,  u = R − q_i
        L = |τ_i − 1[u < 0]| · (½ u² where |u| ≤ κ, else κ (|u| − ½ κ))

    Args:
        quantiles: `[T, B, Q]`.
        targets: R, `[T, B]`.
        kappa: κ, where the loss becomes linear.

    >>> round(float(quantile_huber_loss(jnp.array([[[1.0, 2.0, 3.0, 4.0, 5.0]]]), jnp.array([[3.0]]), 1.0)), 6)
    0.12
    """
    count = quantiles.shape[-1]
    levels = ((jnp.arange(count) + 0.5) / count).reshape(1, 1, count)
    errors = targets[..., None] - quantiles
    sizes = jnp.abs(errors)
    huber = jnp.where(sizes <= kappa, 0.5 * jnp.square(errors), kappa * (sizes - 0.5 * kappa))
    return jnp.mean(jnp.abs(levels - (errors < 0)) * huber)


def ppo_loss(
    params: NetworkParams,
    normalizer: PyTree,
    batch: Transitions,
    key: Key,
    network: Any,
    settings: LossSettings,
    coef: Mapping[str, Any],
) -> tuple[jax.Array, Metrics]:
    """The loss of a minibatch, and Brax's metrics of it.

        L = L_policy + vf_loss_coefficient · L_value − entropy_cost · H

    Args:
        params: the parameters of both networks.
        normalizer: the running statistics of observations.
        batch: segments; values and advantages are recomputed with these parameters.
        key: for the sample that estimates the entropy of squashed actions.
        network: Brax's `PPONetworks`.
        settings: the settings that are not coefficients.
        coef: a scalar for each of `lehr.compat.brax.coefficients.NAMES`.
    """
    actions = network.parametric_action_distribution
    obs = jax.tree.map(lambda x: x[:-1], batch.obs)

    # --- values and advantages; one call evaluates the last observation too, and no gradient flows through that value
    valued = network.value_network.apply(normalizer, params.value, batch.obs)
    all_values = valued[0] if settings.use_distributional_critic else valued
    values, last_value = all_values[:-1], jax.lax.stop_gradient(all_values[-1])
    targets, advantages = lambda_advantages(
        batch.reward * coef["reward_scaling"],
        jax.lax.stop_gradient(values),
        last_value,
        batch.done * (1.0 - batch.truncation),
        batch.truncation,
        coef["discounting"],
        coef["gae_lambda"],
    )

    # --- policy loss
    policy = network.policy_network.apply(normalizer, params.policy, obs)
    log_ratio = actions.log_prob(policy, batch.raw_action) - batch.log_prob
    scaled = standardise(advantages) if settings.normalize_advantage else advantages
    policy_loss = clipped_surrogate(log_ratio, scaled, coef["clipping_epsilon"])

    # --- value loss
    clip = settings.clipping_epsilon_value
    if settings.use_distributional_critic:
        assert clip is not None
        critic_loss = quantile_huber_loss(valued[1][:-1], advantages + jax.lax.stop_gradient(values), clip)
    elif clip is None:
        critic_loss = value_loss(values, targets)
    else:
        critic_loss = clipped_value_loss(values, batch.value, targets, clip)

    # --- total loss
    entropy = jnp.mean(actions.entropy(policy, key))
    weights = {"value_coef": coef["vf_loss_coefficient"], "entropy_coef": coef["entropy_cost"]}
    total, parts = total_loss(policy_loss, critic_loss, entropy, weights)
    metrics = {
        "total_loss": total,
        "policy_loss": policy_loss,
        "v_loss": coef["vf_loss_coefficient"] * critic_loss,
        "entropy_loss": parts["loss/entropy"],
    }
    return total, metrics | _policy_metrics(actions.create_dist(policy), actions.create_dist(batch.policy))


def _policy_metrics(now: Any, before: Any) -> Metrics:
    """The divergence from the rollout's policy, and statistics of means and deviations if the distribution has them."""
    metrics = {"kl_mean": jnp.mean(now.kl_divergence(before)) if hasattr(now, "kl_divergence") else jnp.float32(0)}
    for name, part in (("std", "scale"), ("loc", "loc")):
        if hasattr(now, part):
            found = getattr(now, part)
            metrics[f"policy_dist_mean_{name}"] = jnp.mean(found)
            metrics[f"policy_dist_max_{name}"] = jnp.max(found)
            metrics[f"policy_dist_min_{name}"] = jnp.min(found)
    return metrics
