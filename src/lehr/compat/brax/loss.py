"""Brax's PPO loss of one minibatch of segments, from the library's own losses.

Where Brax's mathematics is its own, it has a function here: an advantage that looks through λ-returns, a time limit
whose step is left out, and a critic of quantiles.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lehr.maths.losses import clipped_surrogate, clipped_value_loss, standardise, total_loss, value_loss
from lehr.maths.recurrence import linear_recurrence
from lehr.maths.shapes import check_same_shape
from lehr.types import Key, Metrics, PyTree


class Networks(NamedTuple):
    """The parameters that gradients change."""

    policy: PyTree
    value: PyTree


class Minibatch(NamedTuple):
    """Segments of `T` steps, time first: leaves `[T, B, ...]`."""

    obs: PyTree
    """Leaves `[T + 1, B, ...]`: the last one follows the last step, after a reset if there was one."""
    raw_action: PyTree
    """As sampled, before it is squashed."""
    log_prob: jax.Array
    policy: PyTree
    """The parameters of the distribution that acted."""
    reward: jax.Array
    done: jax.Array
    """1 where an episode ended with this step, for whatever reason."""
    truncation: jax.Array
    """1 where a time limit ended it."""
    value: Any = ()
    """The critic's when it acted; `()` where nothing looks at it."""


class LossSettings(NamedTuple):
    """What shapes the loss and is no coefficient."""

    normalize_advantage: bool
    clipping_epsilon_value: float | None
    """How far a value may leave the one of the rollout; for a critic of quantiles, where Huber's loss turns linear."""
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

    with V_T = v_T the value after the last step. The targets are those of TD(λ), so the advantage looks one step past
    GAE's: λ weighs v_{t+1} inside it and not A_{t+1}. A truncated step, whose successor is of another episode, has its
    own value as target and no advantage.

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
    """The loss of a critic of Q quantiles (Dabney et al., 2018), a mean over all.

        τ_i = (i + ½) / Q,  u = R − q_i
        L = |τ_i − 1[u < 0]| · (½ u² where |u| ≤ κ, else κ (|u| − ½ κ))

    Args:
        quantiles: `[T, B, Q]`.
        targets: R, `[T, B]`.
        kappa: κ, where the loss turns linear.

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
    params: Networks,
    normalizer: PyTree,
    batch: Minibatch,
    key: Key,
    network: Any,
    settings: LossSettings,
    coef: Mapping[str, Any],
) -> tuple[jax.Array, Metrics]:
    """The loss of a minibatch and what Brax reports of it.

        L = L_policy + vf_loss_coefficient · L_value − entropy_cost · H

    Args:
        params: of both networks.
        normalizer: the statistics of observations.
        batch: the segments; values and advantages are computed anew with these parameters.
        key: of the sample that estimates the entropy of squashed actions.
        network: Brax's `PPONetworks`.
        settings: what is no coefficient.
        coef: a scalar for each of `lehr.compat.brax.numbers.NAMES`.
    """
    actions = network.parametric_action_distribution
    obs = jax.tree.map(lambda x: x[:-1], batch.obs)

    # --- values and advantages; of the last observation too, in one go: what it adds to the gradients is 0
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

    # --- the policy's loss
    policy = network.policy_network.apply(normalizer, params.policy, obs)
    log_ratio = actions.log_prob(policy, batch.raw_action) - batch.log_prob
    scaled = standardise(advantages) if settings.normalize_advantage else advantages
    policy_loss = clipped_surrogate(log_ratio, scaled, coef["clipping_epsilon"])

    # --- the critic's loss
    clip = settings.clipping_epsilon_value
    if settings.use_distributional_critic:
        assert clip is not None
        critic_loss = quantile_huber_loss(valued[1][:-1], advantages + jax.lax.stop_gradient(values), clip)
    elif clip is None:
        critic_loss = value_loss(values, targets)
    else:
        critic_loss = clipped_value_loss(values, batch.value, targets, clip)

    # --- their sum
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
    """The divergence from the policy that acted, and the range of means and deviations, as far as there are any."""
    metrics = {"kl_mean": jnp.mean(now.kl_divergence(before)) if hasattr(now, "kl_divergence") else jnp.float32(0)}
    for name, part in (("std", "scale"), ("loc", "loc")):
        if hasattr(now, part):
            found = getattr(now, part)
            metrics[f"policy_dist_mean_{name}"] = jnp.mean(found)
            metrics[f"policy_dist_max_{name}"] = jnp.max(found)
            metrics[f"policy_dist_min_{name}"] = jnp.min(found)
    return metrics
