"""An exploration task: the path to the reward has a small cost at every step."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from lehr.envs.base import NEVER, Environment
from lehr.envs.registry import register
from lehr.errors import InputError
from lehr.spaces import Box, Discrete
from lehr.types import Key, Timestep


class ChainState(NamedTuple):
    """The agent's position and the number of steps taken, int32 `[]` each."""

    place: jax.Array
    elapsed: jax.Array


@register("DeepChain-v0")
@dataclass(frozen=True)
class DeepChain(Environment):
    """Walk to the right end of a chain, although every step to the right has a small cost.

    The chain has `length` positions and an episode has `length` steps. Action 1 moves right and costs `cost / length`;
    action 0 moves left at no cost. An agent that moved right at every step receives 1 at the end. The best return is
    1 − cost, and always moving left returns 0. A policy that moves right with probability p finds the reward in a
    fraction p^length of its episodes.

    Observation `[length]`: one-hot position.
    """

    length: int = 6
    cost: float = 0.1
    truncation_gap: ClassVar[int] = NEVER

    def __post_init__(self) -> None:
        if self.length < 2:
            raise InputError(f"DeepChain got length={self.length}; it must be 2 or more.")

    @property
    def observation_space(self) -> Box:
        """The one-hot position."""
        return Box(0, 1, shape=(self.length,))

    @property
    def action_space(self) -> Discrete:
        """Left or right."""
        return Discrete(2)

    def _observe(self, place: jax.Array) -> jax.Array:
        return jax.nn.one_hot(jnp.minimum(place, self.length - 1), self.length, dtype=jnp.float32)

    def reset(self, key: Key) -> tuple[ChainState, jax.Array]:
        """Start at the left end."""
        state = ChainState(jnp.int32(0), jnp.int32(0))
        return state, self._observe(state.place)

    def step(self, key: Key, state: ChainState, action: jax.Array) -> tuple[ChainState, Timestep]:
        """Move one position."""
        right = action == 1
        place = jnp.where(right, state.place + 1, jnp.maximum(state.place - 1, 0))
        elapsed = state.elapsed + 1
        over = elapsed >= self.length
        paid = (over & (place == self.length)).astype(jnp.float32)
        reward = paid - right.astype(jnp.float32) * (self.cost / self.length)
        return ChainState(place, elapsed), Timestep(self._observe(place), reward, over, jnp.bool(False), {})
