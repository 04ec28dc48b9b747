"""A controller of your own: an entropy coefficient that falls as the return gets closer to its goal.

Run it with `python examples/own_controller.py`, or
`lehr train ppo --env CartPole-v1 --entropy-coef "examples.own_controller:UntilGoal(goal=500)"`.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import lehr
from lehr.schedules import Controller


class State(NamedTuple):
    """What it remembers between updates, as arrays; `value` is the coefficient."""

    value: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UntilGoal(Controller):
    """The coefficient is maximum · (1 − return / goal), within its limits."""

    goal: Any
    minimum: Any = 0.0
    maximum: Any = 0.05
    metric: str = field(default="episode/return", metadata={"static": True})  # a name is not an array

    def init(self):
        """Before any episode has ended, the largest coefficient."""
        return State(jnp.asarray(self.maximum, jnp.float32))

    def update(self, state, metrics):
        """After an update with these metrics; NaN while no episode has ended."""
        found = metrics[self.metric]
        wanted = jnp.clip(self.maximum * (1 - found / self.goal), self.minimum, self.maximum)
        return State(jnp.where(jnp.isfinite(found), wanted, state.value))


if __name__ == "__main__":
    result = lehr.train("ppo", "CartPole-v1", entropy_coef=UntilGoal(goal=500), total_steps=100_000)
    print(f"Return {result.final['episode/return']:.0f}, entropy_coef {result.final['coef/entropy_coef']:.4f}")
