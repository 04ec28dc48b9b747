"""IMPALA (Espeholt et al., 2018): actors lag some updates behind the learner, and V-trace corrects for that.

    L = −mean A log π(a|s) + value_coef · ½ mean (V − v)² − entropy_coef · H

with the targets v and the advantages A of `lehr.maths.advantages.vtrace`. On one device, the acting policy is exactly
`lag` updates behind; with asynchronous actors (`lehr.acting.actors`), the lag varies. See docs/impala.md.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax

from lehr.algorithms import a2c
from lehr.algorithms.base import ActorCriticAlgorithm
from lehr.algorithms.settings import LagSettings
from lehr.config import Coef
from lehr.maths import losses
from lehr.maths.advantages import vtrace_of
from lehr.types import Key, Learner, Metrics, PyTree, Rollout


@dataclass(frozen=True)
class Config(a2c.Config, LagSettings):
    """Settings of IMPALA: those of A2C, and those of an acting policy that lags behind."""

    horizon: int = a2c.Config.horizon
    """Steps of each environment in one rollout."""
    gae_lambda: Coef = a2c.Config.gae_lambda
    """Factor on the ratio in V-trace's trace."""

    allows_overlap: ClassVar[bool] = True


@dataclass(frozen=True)
class Algorithm(ActorCriticAlgorithm):
    """IMPALA: one gradient step on each rollout, corrected by V-trace."""

    Config: ClassVar[type] = Config
    NetworkConfig: ClassVar[type] = a2c.Algorithm.NetworkConfig
    needs_behind: ClassVar[frozenset[str]] = frozenset({"final_obs"})

    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Make one update: one gradient step on the whole rollout."""
        gradients, metrics = jax.grad(self.loss, has_aux=True)(learner.params, rollout, coef, key)
        rate, limit = coef["learning_rate"], coef.get("max_grad_norm")
        step = self.optimiser.improve(learner.params, learner.optimiser, gradients, rate, limit, coef)
        metrics["gradient/norm"] = step.gradient_norm
        return Learner(step.params, step.state), metrics

    def loss(self, params: PyTree, rollout: Rollout, coef: Metrics, key: Key) -> tuple[jax.Array, Metrics]:
        """Return the loss of a rollout, and metrics; V-trace's targets and advantages are constants."""
        valid = losses.validity(rollout)
        # --- current policy and value, and the ratio to the policy that acted
        carry, policy, values = self.network.unroll(params, rollout.carry, rollout.obs, rollout.reset)
        log_prob = policy.log_prob(rollout.action)
        fixed, carry, known, log_ratio = jax.lax.stop_gradient((params, carry, values, log_prob - rollout.log_prob))
        targets, advantages = vtrace_of(rollout, known, self.next_values(fixed, rollout, carry, known), log_ratio, coef)
        weighed = losses.standardise(advantages, valid) if self.config.standardise_advantages else advantages
        # --- the three losses
        policy_loss = losses.policy_gradient_loss(log_prob, weighed, valid)
        critic_loss = losses.value_loss(values, targets, valid)
        entropy = losses.weighted_mean(policy.entropy(key), valid)
        total, metrics = losses.total_loss(policy_loss, critic_loss, entropy, coef)
        # --- metrics
        metrics |= losses.policy_metrics(policy, entropy, log_ratio, valid)
        metrics |= losses.ratio_metrics(log_ratio, coef["rho_clip"], valid)
        return total, metrics | losses.rollout_metrics(rollout._replace(value=known), advantages, targets)
