"""An algorithm of your own: REINFORCE with a baseline, whose weight is a coefficient of its own.

Run it with `python examples/own_algorithm.py`, or
`lehr train examples.own_algorithm:Reinforce --env CartPole-v1 --baseline-coef "0 -> 1 over 20%"`.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax

import lehr
from lehr.algorithms.base import ActorCriticAlgorithm
from lehr.algorithms.settings import ActorCriticSettings
from lehr.config import Coef
from lehr.maths.advantages import advantages_of
from lehr.maths.losses import policy_gradient_loss, standardise, total_loss, validity, value_loss, weighted_mean
from lehr.schedules import Coefficient
from lehr.types import Learner


@dataclass(frozen=True)
class Config(ActorCriticSettings):
    """The settings of every actor-critic, with other defaults, and one coefficient more."""

    learning_rate: Coef = "1e-2 -> 0"
    gae_lambda: Coef = 1.0  # whole returns
    baseline_coef: Annotated[Coef, Coefficient(("baseline_weight",), maximum=1.0)] = 1.0
    """Share of the value that is subtracted from the return; 0 is REINFORCE without a baseline."""


@dataclass(frozen=True)
class Reinforce(ActorCriticAlgorithm):
    """One gradient step on each rollout. Networks, optimiser and acting come from the parent class."""

    Config: ClassVar[type] = Config

    def learn(self, learner, rollout, coef, key):
        """One update: `coef` has the value of each coefficient, and `loss/total` must be among the metrics."""
        valid = validity(rollout)
        _, returns = advantages_of(rollout, coef["discount"], coef["gae_lambda"])
        gains = returns - coef["baseline_coef"] * rollout.value
        gains = standardise(gains, valid) if self.config.standardise_advantages else gains

        def loss(params):
            _, policy, values = self.network.unroll(params, rollout.carry, rollout.obs, rollout.reset)
            policy_loss = policy_gradient_loss(policy.log_prob(rollout.action), gains, valid)
            entropy = weighted_mean(policy.entropy(key), valid)
            return total_loss(policy_loss, value_loss(values, returns, valid), entropy, coef)

        gradients, metrics = jax.grad(loss, has_aux=True)(learner.params)
        rate, limit = coef["learning_rate"], coef.get("max_grad_norm")
        step = self.optimiser.improve(learner.params, learner.optimiser, gradients, rate, limit, coef)
        return Learner(step.params, step.state), metrics


if __name__ == "__main__":
    result = lehr.train(Reinforce, "CartPole-v1", total_steps=300_000, baseline_coef="0 -> 1 over 20%")
    print(f"Mean return of 100 episodes: {result.final['evaluate/return']:.0f}")
