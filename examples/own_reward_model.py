"""A reward model of your own: a bonus for observations that were rarely seen, with a scheduled weight.

Run it with `python examples/own_reward_model.py`, or
`lehr train ppo --env MountainCar-v0 --reward-model examples.own_reward_model:Novelty --novelty-coef "1 -> 0"`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp

import lehr
from lehr.config import Coef
from lehr.rewards import RewardModel
from lehr.schedules import Coefficient
from lehr.types import Learner


@dataclass(frozen=True)
class NoveltySettings:
    """Settings of the bonus: flags, and a coefficient that is scheduled and logged, as the algorithm's are."""

    novelty_coef: Annotated[Coef, Coefficient(("novelty_weight",))] = "1 -> 0"
    """Weight of the bonus."""
    novelty_cells: int = 16
    """Cells along each axis of the observation."""


@dataclass(frozen=True)
class Novelty(RewardModel):
    """The environment's reward plus novelty_coef / √(1 + visits), on a grid over a bounded observation space."""

    Config: ClassVar[type] = NoveltySettings
    space: Any
    cells: int

    @classmethod
    def build(cls, spaces, config):
        """The model for an environment."""
        return cls(spaces.observation, config.novelty_cells)

    def init(self, key, example):
        """No visits; what a model learns is part of the run's state, so it is saved and resumed."""
        return Learner(jnp.zeros(self.cells ** self.space.shape[0]), ())

    def cell(self, obs):
        """The number of the cell of one observation."""
        share = (obs - self.space.low) / (self.space.high - self.space.low)
        place = jnp.clip((share * self.cells).astype(jnp.int32), 0, self.cells - 1)
        return jnp.sum(place * self.cells ** jnp.arange(place.size))

    def reward(self, learner, rollout, coef):
        """The rewards to learn from, `[T, N]`: `T` steps of `N` environments."""
        cells = jax.vmap(jax.vmap(self.cell))(rollout.obs)
        return rollout.reward + coef["novelty_coef"] / jnp.sqrt(1 + learner.params[cells])

    def learn(self, learner, rollout, coef, key):
        """Count the visits of a rollout; metrics are logged with the algorithm's."""
        visits = learner.params.at[jax.vmap(jax.vmap(self.cell))(rollout.obs)].add(1.0)
        return Learner(visits, ()), {"novelty/cells_seen": jnp.sum(visits > 0).astype(jnp.float32)}


if __name__ == "__main__":
    result = lehr.train("ppo", "MountainCar-v0", reward_model=Novelty, total_steps=500_000)
    print(f"Mean return of 100 episodes: {result.final['evaluate/return']:.0f}")
