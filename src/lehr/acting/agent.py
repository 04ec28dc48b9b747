"""One step of acting, the same for rollouts on the device and on the host, for evaluation and for policies to call."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from lehr.maths.normalise import RunningStatistics, normalise
from lehr.spaces import Box, Space
from lehr.types import Key, PyTree


class Agent(Protocol):
    """Who acts: the part of an algorithm that acting knows, see `lehr.algorithms.base.Algorithm`."""

    def initial_carry(self, batch_shape: tuple[int, ...]) -> PyTree:
        """What is remembered before the first step of an episode."""

    def act(
        self, params: PyTree, carry: PyTree, obs: PyTree, reset: jax.Array, key: Key, greedy: Any = False
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        """The next carry, the actions, and what a rollout keeps besides."""

    def value(self, params: PyTree, carry: PyTree, obs: PyTree) -> jax.Array:
        """The values of observations that follow the carry."""


class Acted(NamedTuple):
    """What a rollout keeps of one step."""

    obs: PyTree
    """As the agent saw it."""
    action: PyTree
    """As the agent made it, before any clipping to the action space."""
    kept: dict[str, Any]
    """What else the agent keeps: `log_prob`, `value`, and more."""


def act(
    agent: Agent,
    action_space: Space,
    params: PyTree,
    statistics: Any,
    carry: PyTree,
    obs: PyTree,
    reset: jax.Array,
    key: Key,
    greedy: Any = False,
) -> tuple[PyTree, PyTree, Acted]:
    """The next carry, the actions for the environment, and what a rollout keeps; arguments as for `Agent.act`."""
    seen = observed(statistics, obs)
    carry, action, kept = agent.act(params, carry, seen, reset, key, greedy)
    return carry, clip_to(action_space, action), Acted(seen, action, kept)


def observed(statistics: Any, obs: PyTree) -> PyTree:
    """An observation as the agent sees it: normalised, unless the statistics are `()`."""
    return normalise(statistics, obs) if isinstance(statistics, RunningStatistics) else obs


def clip_to(space: Space, action: PyTree) -> PyTree:
    """What an environment is given: the action of a normal policy, clipped to its Box."""
    if not isinstance(space, Box):
        return action
    return jnp.clip(action, *(jnp.broadcast_to(bound, action.shape) for bound in (space.low, space.high)))


def has_memory(agent: Agent) -> bool:
    """Whether it remembers anything from step to step."""
    return bool(jax.tree.leaves(jax.eval_shape(lambda: agent.initial_carry((1,)))))
