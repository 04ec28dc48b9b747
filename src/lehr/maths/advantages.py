"""Advantage and return estimators: arrays `[T, N]` in, arrays `[T, N]` out.

Every estimator is a reverse linear recurrence over time, solved by `linear_recurrence`. Off-policy ones also take
`log_ratios[t]`, log π(a_t|s_t) − log μ(a_t|s_t), with the learner's policy π and the behaviour policy μ.

The discount, lambda and the clips are numbers or traced scalars. Gradients flow through all arguments: wrap targets in
`jax.lax.stop_gradient`. Any axes may follow the first: `[T]` works as well as `[T, N]`.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from lehr.kernels import linear_recurrence
from lehr.types import Rollout, check_same_shape

Number: TypeAlias = float | jax.Array
"""A number, or a traced scalar."""


class Steps(NamedTuple):
    """What is known of the steps of a rollout, `[T, N]` each."""

    rewards: jax.Array
    """The reward of the action at step t."""
    values: jax.Array
    """V(s_t)."""
    next_values: jax.Array
    """V of the observation after step t; where an episode ended, this is its final observation, never the one after
    the reset."""
    terminated: jax.Array
    """The episode ended in a terminal state of value 0, so there is no bootstrapping."""
    done: jax.Array
    """Terminated or truncated: the next row belongs to another episode, so the recurrence stops."""

    @classmethod
    def of(cls, rollout: Rollout) -> "Steps":
        """Those of a rollout with values."""
        return cls(rollout.reward, rollout.value, rollout.next_value, rollout.terminated, rollout.done)

    def errors(self, discount: Number) -> jax.Array:
        """The errors of the values, r_t + γ (1 − terminated_t) V'_t − V_t."""
        return self.rewards + discount * jnp.where(self.terminated, 0.0, self.next_values) - self.values


def gae(steps: Steps, discount: Number, gae_lambda: Number) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation (Schulman et al., 2016): advantages and returns, `[T, N]` each.

        δ_t = r_t + γ (1 − terminated_t) V'_t − V_t
        A_t = δ_t + γ λ (1 − done_t) A_{t+1}
        returns_t = A_t + V_t

    The second step is truncated by a time limit: it bootstraps from 4 and is independent of the third step.

    >>> rewards, values, next_values = jnp.array([1.0, 1.0, 1.0]), jnp.zeros(3), jnp.array([0.0, 4.0, 0.0])
    >>> terminated, done = jnp.array([False, False, False]), jnp.array([False, True, False])
    >>> advantages, returns = gae(Steps(rewards, values, next_values, terminated, done), 0.5, gae_lambda=1.0)
    >>> advantages.tolist()
    [2.5, 3.0, 1.0]
    """
    check_same_shape(**steps._asdict())
    advantages = linear_recurrence(jnp.where(steps.done, 0.0, discount * gae_lambda), steps.errors(discount))
    return advantages, advantages + steps.values


def advantages_of(rollout: Rollout, discount: Number, gae_lambda: Number) -> tuple[jax.Array, jax.Array]:
    """Compute the advantages and returns of a rollout with `gae`, `[T, N]` each."""
    return gae(Steps.of(rollout), discount, gae_lambda)


def corrected_gae(
    steps: Steps, log_ratios: jax.Array, discount: Number, rho_clip: Number, c_clip: Number, gae_lambda: Number
) -> tuple[jax.Array, jax.Array]:
    """GAE for off-policy data, with V-trace's clipped ratios: advantages and returns, `[T, N]` each.

        ρ_t = min(ρ̄, π/μ),  c_t = min(c̄, π/μ)
        δ_t = ρ_t (r_t + γ (1 − terminated_t) V'_t − V_t)
        A_t = δ_t + γ λ c_t (1 − done_t) A_{t+1}
        returns_t = A_t + V_t

    This is PufferLib's advantage. The returns are the value targets of `vtrace`. If π = μ and no clip is below 1, both
    equal those of `gae`.

    >>> rewards, zeros, never = jnp.ones(2), jnp.zeros(2), jnp.zeros(2, bool)
    >>> steps, log_ratios = Steps(rewards, zeros, zeros, never, never), jnp.log(jnp.array([0.5, 4.0]))
    >>> advantages, returns = corrected_gae(steps, log_ratios, discount=1.0, rho_clip=2.0, c_clip=1.0, gae_lambda=1.0)
    >>> advantages.tolist()
    [1.5, 2.0]
    """
    check_same_shape(**steps._asdict(), log_ratios=log_ratios)
    ratios = jnp.exp(log_ratios)
    decay = jnp.where(steps.done, 0.0, discount * gae_lambda * jnp.minimum(c_clip, ratios))
    advantages = linear_recurrence(decay, jnp.minimum(rho_clip, ratios) * steps.errors(discount))
    return advantages, advantages + steps.values


def corrected_gae_of(
    rollout: Rollout, log_ratios: jax.Array, coef: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Compute the advantages and returns of a rollout with `corrected_gae`, `[T, N]` each.

    Args:
        rollout: collected with the behaviour policy μ.
        log_ratios: `[T, N]`, log π − log μ.
        coef: discount, rho_clip, c_clip and gae_lambda.
    """
    clips = coef["discount"], coef["rho_clip"], coef["c_clip"], coef["gae_lambda"]
    return corrected_gae(Steps.of(rollout), log_ratios, *clips)


def vtrace(
    steps: Steps,
    log_ratios: jax.Array,
    discount: Number,
    rho_clip: Number,
    c_clip: Number,
    gae_lambda: Number = 1.0,
    policy_rho_clip: Number | None = None,
) -> tuple[jax.Array, jax.Array]:
    """V-trace (Espeholt et al., 2018): value targets and policy-gradient advantages, `[T, N]` each.

        ρ_t = min(ρ̄, π/μ),  c_t = λ min(c̄, π/μ)
        v_t = V_t + ρ_t (r_t + γ (1 − terminated_t) V'_t − V_t) + γ c_t (1 − done_t) (v_{t+1} − V_{t+1})
        A_t = min(ρ̄_policy, π/μ) (r_t + γ v'_t − V_t)

    with v'_t = v_{t+1} within an episode, 0 where it terminated, and V'_t where it was truncated or the rollout ends.
    ρ̄_policy defaults to ρ̄.

    >>> rewards, zeros, never = jnp.ones(2), jnp.zeros(2), jnp.zeros(2, bool)
    >>> steps, log_ratios = Steps(rewards, zeros, zeros, never, never), jnp.log(jnp.array([0.5, 4.0]))
    >>> targets, advantages = vtrace(steps, log_ratios, discount=1.0, rho_clip=2.0, c_clip=1.0, gae_lambda=0.5)
    >>> targets.tolist(), advantages.tolist()
    ([1.0, 2.0], [1.5, 2.0])
    """
    _, targets = corrected_gae(steps, log_ratios, discount, rho_clip, c_clip, gae_lambda)
    following = jnp.concatenate([targets[1:], steps.next_values[-1:]])
    bootstrap = jnp.where(steps.terminated, 0.0, jnp.where(steps.done, steps.next_values, following))
    rho = jnp.minimum(rho_clip if policy_rho_clip is None else policy_rho_clip, jnp.exp(log_ratios))
    return targets, rho * (steps.rewards + discount * bootstrap - steps.values)


def vtrace_of(
    rollout: Rollout,
    values: jax.Array,
    next_values: jax.Array,
    log_ratios: jax.Array,
    coef: Mapping[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Compute the value targets and advantages of an off-policy rollout with `vtrace`, `[T, N]` each.

    Args:
        rollout: collected with the behaviour policy μ.
        values: `[T, N]`, the learner's values.
        next_values: `[T, N]`, the learner's values of the observations that follow.
        log_ratios: `[T, N]`, log π − log μ.
        coef: discount, gae_lambda, rho_clip, c_clip and policy_rho_clip.
    """
    steps = Steps(rollout.reward, values, next_values, rollout.terminated, rollout.done)
    clips = coef["rho_clip"], coef["c_clip"], coef["gae_lambda"], coef["policy_rho_clip"]
    return vtrace(steps, log_ratios, coef["discount"], *clips)


def lambda_returns(
    rewards: jax.Array,
    next_values: jax.Array,
    continues: jax.Array,
    discount: Number,
    return_lambda: Number,
    done: jax.Array | None = None,
) -> jax.Array:
    """TD(λ) returns `[T, N]` with a continuation probability per step, as in Dreamer.

        G_t = r_t + γ continues_t ((1 − λ_t) V'_t + λ_t G_{t+1})

    with λ_t = λ within an episode. It is 0 where the episode is done and at the last step, which bootstrap from V'_t.

    Args:
        rewards: `[T, N]`.
        next_values: `[T, N]`, V of the state after step t.
        continues: `[T, N]` in [0, 1], the probability that the state after step t is not terminal.
        discount: γ, a scalar.
        return_lambda: λ, a scalar.
        done: `[T, N]`, or `None` for imagined sequences, which never end early.

    >>> lambda_returns(jnp.ones(3), jnp.full(3, 2.0), jnp.array([1.0, 1.0, 0.5]), 0.5, 0.5).tolist()
    [1.96875, 1.875, 1.5]
    """
    done = jnp.zeros(rewards.shape, bool) if done is None else jnp.asarray(done)
    check_same_shape(rewards=rewards, next_values=next_values, continues=continues, done=done)
    mix = jnp.where(done.at[-1].set(True), 0.0, return_lambda)
    discounts = discount * continues
    return linear_recurrence(discounts * mix, rewards + discounts * (1.0 - mix) * next_values)
