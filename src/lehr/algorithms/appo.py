"""APPO: PPO's clipped surrogate for actors that are behind, with a target network (as in IMPACT, Luo et al., 2020).

    L = −mean min(r A, clip(r, 1 ± clip_range) A) + value_coef · L_value − entropy_coef · H + kl_coef · KL(π_target ‖ π)

with r = π / π_target, and the advantages A and value targets of V-trace for π_target against the policy μ that acted:
so A holds the ratio π_target / μ, clipped. The target network is the learner's of some updates ago. See docs/appo.md.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from lehr.algorithms import ppo
from lehr.config import Coef, check_counts
from lehr.maths.advantages import vtrace_of
from lehr.maths.losses import ratio_metrics, validity
from lehr.networks import ActorCriticNetwork
from lehr.types import Key, Learner, Metrics, PyTree, Rollout

_OF_PPO = ("num_envs", "horizon", "epochs", "minibatches", "standardise_advantages", "optimiser", "value_clip_range")


@dataclass(frozen=True)
class Config:
    """APPO's settings. Coefficients take a number or any schedule; the others shape arrays and are fixed."""

    num_envs: int = 32
    """Environments that run side by side; with actors, those of each."""
    horizon: int = 64
    """Steps of each environment in one rollout."""
    lag: int = 1
    """Updates by which the policy that acts is behind; actors of their own are as far behind as they are."""
    target_updates: int = 1
    """Updates between two refreshes of the target network."""
    epochs: int = 4
    """Passes over a rollout."""
    minibatches: int = 8
    """Gradient steps in one pass."""
    standardise_advantages: bool = True
    """Whether advantages are brought to mean 0 and deviation 1 in each minibatch."""
    normalise_observations: bool = False
    """Whether observations are normalised by their running mean and deviation."""
    normalise_rewards: bool = False
    """Whether rewards are divided by the running deviation of the discounted return."""
    optimiser: str = "adam"
    """Any optimiser of optax by its name: adam, adamw, rmsprop, muon, ..."""
    learning_rate: Coef = "1e-3 -> 0"
    """Step size of the optimiser."""
    entropy_coef: Coef = 0.01
    """Weight of the entropy bonus."""
    value_coef: Coef = 0.5
    """Weight of the value loss."""
    clip_range: Coef = 0.2
    """How far the ratio to the target network's policy may leave 1 before its gradient is cut."""
    value_clip_range: Coef | None = None
    """How far a value may leave the one before the update before its gradient is cut; none clips nothing."""
    discount: Coef = 0.99
    """Worth of a reward one step later."""
    gae_lambda: Coef = 0.95
    """Factor on V-trace's ratio in the trace."""
    rho_clip: Coef = 1.0
    """V-trace's clip of the ratio in the temporal difference: which policy the values are of."""
    c_clip: Coef = 1.0
    """V-trace's clip of the ratio in the trace: how fast the values are learned."""
    policy_rho_clip: Coef = 1.0
    """V-trace's clip of the ratio in the gradient of the policy."""
    kl_coef: Coef | None = None
    """Weight of the divergence from the target network's policy; none adds nothing to the loss."""
    max_grad_norm: Coef | None = 0.5
    """Largest global norm of the gradient; none clips nothing."""
    reward_scale: Coef | None = None
    """Factor on the rewards; none leaves them as they are."""

    corrects_lag: ClassVar[bool] = True
    """It learns from what other policies did, so that actors need not wait for it."""

    def __post_init__(self) -> None:
        check_counts(self, "num_envs", "horizon", "epochs", "minibatches", "target_updates")
        check_counts(self, "lag", least=0)

    @property
    def unused(self) -> frozenset[str]:
        """All coefficients are used."""
        return frozenset()


class Target(NamedTuple):
    """The target network."""

    params: PyTree
    age: jax.Array
    """uint32 `[]`: the updates since it was refreshed."""


@dataclass(frozen=True)
class Algorithm:
    """The algorithm: how a learner begins, and how it learns from a rollout."""

    config: Config
    network: ActorCriticNetwork

    @property
    def inner(self) -> ppo.Algorithm:
        """The one that makes the gradient steps."""
        return ppo.Algorithm(ppo.Config(**{name: getattr(self.config, name) for name in _OF_PPO}), self.network)

    def init(self, params: PyTree) -> Learner:
        """A learner with these parameters, which are those of the target network too."""
        return self.inner.init(params)._replace(memory=Target(params, jnp.uint32(0)))

    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """One update: V-trace for the target network's policy, then PPO's gradient steps against that policy."""
        batch, log_ratio = self.batch(learner, rollout, coef)
        updated, metrics = self.inner.passes(learner, batch, coef, key)
        metrics |= ratio_metrics(log_ratio, coef["rho_clip"], validity(rollout))
        # --- the target network
        target: Target = learner.memory
        age = target.age + 1
        metrics["target/age"] = target.age.astype(jnp.float32)
        refresh = age >= self.config.target_updates
        params = jax.tree.map(lambda new, old: jnp.where(refresh, new, old), updated.params, target.params)
        return updated._replace(memory=Target(params, jnp.where(refresh, 0, age))), metrics

    def batch(self, learner: Learner, rollout: Rollout, coef: Metrics) -> tuple[ppo.Batch, jax.Array]:
        """What PPO's steps start from, and log π_target − log μ, `[T, N]`."""
        seen = rollout.carry, rollout.obs, rollout.reset
        _, policy, _ = self.network.unroll(learner.memory.params, *seen)
        _, _, values = self.network.unroll(learner.params, *seen)
        log_prob = policy.log_prob(rollout.action)
        log_ratio = log_prob - rollout.log_prob
        targets, advantages = vtrace_of(rollout, values, log_ratio, coef)
        reference: Any = policy if "kl_coef" in coef else ()
        return ppo.Batch(rollout._replace(log_prob=log_prob, value=values), advantages, targets, reference), log_ratio
