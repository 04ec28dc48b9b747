"""A task that only exploration solves: the way to the reward costs a little at every step."""

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
    """Where the agent is, and the step of the episode, int32 `[]` each."""

    place: jax.Array
    elapsed: jax.Array


@register("DeepChain-v0")
@dataclass(frozen=True)
class DeepChain(Environment):
    """Walk right all the way, although each step right costs a little.

    `length` places in a row and `length` steps in an episode. Action 1 goes right and costs `cost / length`, action 0
    goes left for nothing. Whoever has gone right at every step receives 1 at the end. The best return is 1 − cost, and
    that of not trying is 0; a policy that goes right with probability p finds the reward in p^length of its episodes.

    Observation `[length]`: 1 at the place, 0 elsewhere.
    """

    length: int = 6
    cost: float = 0.1
    truncation_gap: ClassVar[int] = NEVER

    def __post_init__(self) -> None:
        if self.length < 2:
            raise InputError(f"DeepChain has length {self.length}; it must be 2 or more.")

    @property
    def observation_space(self) -> Box:
        """One place is marked."""
        return Box(0, 1, shape=(self.length,))

    @property
    def action_space(self) -> Discrete:
        """Left or right."""
        return Discrete(2)

    def _observe(self, place: jax.Array) -> jax.Array:
        return jax.nn.one_hot(jnp.minimum(place, self.length - 1), self.length, dtype=jnp.float32)

    def reset(self, key: Key) -> tuple[ChainState, jax.Array]:
        """Begin at the left end."""
        state = ChainState(jnp.int32(0), jnp.int32(0))
        return state, self._observe(state.place)

    def step(self, key: Key, state: ChainState, action: jax.Array) -> tuple[ChainState, Timestep]:
        """Go one place."""
        right = action == 1
        place = jnp.where(right, state.place + 1, jnp.maximum(state.place - 1, 0))
        elapsed = state.elapsed + 1
        over = elapsed >= self.length
        paid = (over & (place == self.length)).astype(jnp.float32)
        reward = paid - right.astype(jnp.float32) * (self.cost / self.length)
        return ChainState(place, elapsed), Timestep(self._observe(place), reward, over, jnp.bool(False), {})
