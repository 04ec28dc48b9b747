"""Advantage actor-critic (Mnih et al., 2016), synchronous: one gradient step on each rollout of all environments.

    L = −mean A log π(a|s) + value_coef · ½ mean (V − R)² − entropy_coef · H

See docs/a2c.md for the details.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from lehr.algorithms.base import ActorCriticAlgorithm, HalfBoxNetworkConfig
from lehr.algorithms.settings import ActorCriticSettings, OpenDiscountSettings
from lehr.config import AutoBool, Coef, Plugin
from lehr.maths import losses
from lehr.maths.advantages import advantages_of
from lehr.types import Key, Learner, Metrics, PyTree, Rollout


@dataclass(frozen=True)
class Config(OpenDiscountSettings, ActorCriticSettings):
    """Settings of A2C. Coefficients accept a number or any schedule; the others are static."""

    num_envs: int = 16
    horizon: int = 8
    """Steps per environment in a rollout; with gae_lambda = 1, the n of n-step returns."""
    normalise_observations: AutoBool = "auto"
    """Normalise observations by their running mean and standard deviation; auto does if they are vectors with entries
    outside [-1, 1]."""
    normalise_rewards: AutoBool = "auto"
    """Divide rewards by the running standard deviation of the discounted return; auto does if actions are continuous,
    or observations are vectors with entries outside [-1, 1]."""
    noise_steps: int = 8
    optimiser: Plugin = "rmsprop"
    learning_rate: Coef = "3e-3 -> 0"
    discount: Coef | None = None
    """Discount factor; none is 0.95 -> 0.99 if actions are continuous, else 0.99."""
    entropy_coef: Coef | None = None
    """Weight of the entropy bonus in the loss; none is 0.1 -> 0 if actions are continuous, else 0.01 -> 0."""
    gae_lambda: Coef = 0.95
    """GAE's lambda: the bias-variance trade-off of the advantage; 1 gives n-step returns."""

    allows_overlap: ClassVar[bool] = False
    normalises_choices: ClassVar[bool] = True
    by_actions: ClassVar[Mapping[str, tuple[Any, Any]]] = {
        "discount": ("0.95 -> 0.99", 0.99),
        "entropy_coef": ("0.1 -> 0", "0.01 -> 0"),
    }


@dataclass(frozen=True)
class Algorithm(ActorCriticAlgorithm):
    """A2C: one gradient step on each rollout."""

    Config: ClassVar[type] = Config
    NetworkConfig: ClassVar[type] = HalfBoxNetworkConfig

    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Make one update: compute advantages, then take one gradient step on the whole rollout."""
        valid = losses.validity(rollout)
        advantages, targets = advantages_of(rollout, coef["discount"], coef["gae_lambda"])
        weighed = losses.standardise(advantages, valid) if self.config.standardise_advantages else advantages
        differentiate = jax.grad(self.loss, has_aux=True)
        gradients, metrics = differentiate(learner.params, rollout, weighed, targets, coef, key)
        rate, limit = coef["learning_rate"], coef.get("max_grad_norm")
        step = self.optimiser.improve(learner.params, learner.optimiser, gradients, rate, limit, coef)
        # --- metrics; evaluate the policy once more, to measure how far the step went
        _, policy, _ = self.network.unroll(step.params, rollout.carry, rollout.obs, rollout.reset)
        log_ratio = policy.log_prob(rollout.action) - rollout.log_prob
        metrics["policy/approximate_kl"] = losses.approximate_kl(log_ratio, valid)
        metrics["gradient/norm"] = step.gradient_norm
        return Learner(step.params, step.state), metrics | losses.rollout_metrics(rollout, advantages, targets)

    def loss(
        self, params: PyTree, rollout: Rollout, advantages: jax.Array, targets: jax.Array, coef: Metrics, key: Key
    ) -> tuple[jax.Array, Metrics]:
        """Return the loss of a rollout, and metrics; advantages and targets `[T, N]` are constants."""
        valid = losses.validity(rollout)
        _, policy, values = self.network.unroll(params, rollout.carry, rollout.obs, rollout.reset)
        log_prob = policy.log_prob(rollout.action)
        policy_loss = losses.policy_gradient_loss(log_prob, advantages, valid)
        critic_loss = losses.value_loss(values, targets, valid)
        entropy = losses.weighted_mean(policy.entropy(key), valid)
        total, metrics = losses.total_loss(policy_loss, critic_loss, entropy, coef)
        return total, metrics | losses.policy_metrics(policy, entropy, log_prob - rollout.log_prob, valid)
