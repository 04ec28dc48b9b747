"""APPO: PPO's clipped surrogate for lagging actors, with a target network (as in IMPACT, Luo et al., 2020).

    L = −mean min(r A, clip(r, 1 ± clip_range) A) + value_coef · L_value − entropy_coef · H + kl_coef · KL(π_target ‖ π)

with r = π / π_target. The advantages A and the value targets are V-trace's, for π_target against the acting policy μ,
so A contains the clipped ratio π_target / μ. The target network is a copy of the learner's from some updates ago. See
docs/appo.md.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from lehr.algorithms import ppo
from lehr.algorithms.base import ActorCriticAlgorithm
from lehr.algorithms.settings import ClippedSettings, DivergenceSettings, LagSettings
from lehr.config import Coef, check_counts
from lehr.maths.advantages import vtrace_of
from lehr.maths.losses import ratio_metrics, validity
from lehr.types import Key, Learner, Metrics, PyTree, Rollout


@dataclass(frozen=True)
class Config(ClippedSettings, LagSettings, DivergenceSettings):
    """Settings of APPO. Coefficients accept a number or any schedule; the others are static."""

    target_updates: int = 1
    """Updates between refreshes of the target network."""
    gae_lambda: Coef = 0.95
    """Factor on the ratio in V-trace's trace."""
    kl_coef: Coef | None = None
    """Weight of the KL divergence from the target network's policy; none leaves it out of the loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "target_updates")


class Target(NamedTuple):
    """The target network."""

    params: PyTree
    age: jax.Array
    """uint32 `[]`: updates since the last refresh."""


@dataclass(frozen=True)
class Algorithm(ActorCriticAlgorithm):
    """APPO: PPO's gradient steps, against the policy of a target network."""

    Config: ClassVar[type] = Config
    needs_behind: ClassVar[frozenset[str]] = frozenset({"final_obs"})

    @property
    def inner(self) -> ppo.Algorithm:
        """PPO, which takes the gradient steps."""
        return ppo.Algorithm(ppo.config_of(self.config), self.network)

    def init(self, key: Key, params: PyTree, example: Rollout) -> Learner:
        """Return a learner whose target network starts with the same parameters."""
        return Learner(params, self.inner.optimiser.init(params), Target(params, jnp.uint32(0)))

    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Make one update: V-trace for the target network's policy, then PPO's gradient steps against that policy."""
        samples, log_ratio = self.samples(learner, rollout, coef)
        updated, metrics = self.inner.passes(learner, samples, coef, key)
        metrics |= ratio_metrics(log_ratio, coef["rho_clip"], validity(rollout))
        # --- the target network
        target: Target = learner.auxiliary
        age = target.age + 1
        metrics["target/age"] = target.age.astype(jnp.float32)
        refresh = age >= self.config.target_updates
        params = jax.tree.map(lambda new, old: jnp.where(refresh, new, old), updated.params, target.params)
        return updated._replace(auxiliary=Target(params, jnp.where(refresh, 0, age))), metrics

    def samples(self, learner: Learner, rollout: Rollout, coef: Metrics) -> tuple[ppo.Samples, jax.Array]:
        """Return the samples for PPO's gradient steps, and log π_target − log μ, `[T, N]`."""
        policy = self.policies(learner.auxiliary.params, rollout)
        carry, values = self.values(learner.params, rollout)
        next_values = self.next_values(learner.params, rollout, carry, values)
        log_prob = policy.log_prob(rollout.action)
        log_ratio = log_prob - rollout.log_prob
        targets, advantages = vtrace_of(rollout, values, next_values, log_ratio, coef)
        reference: Any = policy if "kl_coef" in coef else ()
        return ppo.Samples(rollout._replace(log_prob=log_prob, value=values), advantages, targets, reference), log_ratio
