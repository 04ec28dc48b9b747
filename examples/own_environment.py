"""An environment of your own: Catch. A ball falls; move the paddle under it.

Run it with `python examples/own_environment.py`, or
`lehr train ppo --env examples.own_environment:Catch --env-parameters columns=7`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

import lehr
from lehr.envs import Environment, check_env
from lehr.spaces import Box, Discrete
from lehr.types import Timestep


class State(NamedTuple):
    """All that changes during an episode."""

    ball: jax.Array
    height: jax.Array
    paddle: jax.Array


@dataclass(frozen=True)
class Catch(Environment):
    """The reward is 1 for a caught ball and −1 for one that is missed; actions are left, stay and right."""

    columns: int = 5
    rows: int = 10
    observation_space = Box(0, 1, (3,))
    action_space = Discrete(3)

    def reset(self, key):
        """A ball at the top of a random column."""
        ball = jax.random.randint(key, (), 0, self.columns)
        state = State(ball, jnp.int32(self.rows), jnp.int32(self.columns // 2))
        return state, self.observe(state)

    def step(self, key, state, action):
        """The ball falls by one row."""
        paddle = jnp.clip(state.paddle + action - 1, 0, self.columns - 1)
        state = State(state.ball, state.height - 1, paddle)
        landed = state.height == 0
        reward = jnp.where(landed, jnp.where(state.ball == paddle, 1.0, -1.0), 0.0)
        return state, Timestep(self.observe(state), reward, landed, jnp.bool_(False), {})

    def observe(self, state):
        """Where the ball and the paddle are, from 0 to 1."""
        sizes = jnp.array([self.columns - 1, self.rows, self.columns - 1])
        return jnp.stack(state) / sizes


if __name__ == "__main__":
    assert check_env(Catch()) == []
    result = lehr.train("ppo", Catch(), total_steps=100_000)
    print(f"Mean return of 100 episodes: {result.final['evaluate/return']:.2f}")
