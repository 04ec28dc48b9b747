"""One step of acting, shared by rollouts on the device and on the host, evaluation, and policies."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from lehr.maths.normalise import RunningStatistics, normalise
from lehr.spaces import Box, Space
from lehr.types import Key, PyTree


class Agent(Protocol):
    """The part of an algorithm that acting uses; see `lehr.algorithms.base.Algorithm`."""

    def initial_carry(self, batch_shape: tuple[int, ...]) -> PyTree:
        """Return the recurrent state before the first step of an episode."""

    def act(
        self, params: PyTree, carry: PyTree, obs: PyTree, reset: jax.Array, key: Key, greedy: Any = False
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        """Return the next carry, the actions, and what else the rollout stores."""

    def value(self, params: PyTree, carry: PyTree, obs: PyTree) -> jax.Array:
        """Return the values of observations, given the carry before them."""


class Acted(NamedTuple):
    """What a rollout stores of one step."""

    obs: PyTree
    """As the agent saw it, after normalisation."""
    action: PyTree
    """As the agent chose it, before squashing or clipping to the action space."""
    kept: dict[str, Any]
    """What else the agent stores: `log_prob`, `value`, and so on."""


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
    """Return the next carry, the environment's actions, and what the rollout stores; arguments as in `Agent.act`."""
    seen = observed(statistics, obs)
    carry, action, kept = agent.act(params, carry, seen, reset, key, greedy)
    rest = {name: value for name, value in kept.items() if name != "action"}
    return carry, clip_to(action_space, action), Acted(seen, kept.get("action", action), rest)


def action_keys(key: Key, horizon: int, action_space: Space, noise_steps: int) -> Key:
    """Return the keys with which the actions of a rollout are drawn, `[T]`.

    Continuous actions have the same key, and so the same noise, for `noise_steps` steps in a row.
    """
    keys = jax.random.split(key, horizon)
    if noise_steps == 1 or not isinstance(action_space, Box):
        return keys
    steps = jnp.arange(horizon)
    return keys[steps - steps % noise_steps]


def observed(statistics: Any, obs: PyTree) -> PyTree:
    """Normalise an observation, unless the statistics are `()`."""
    return normalise(statistics, obs) if isinstance(statistics, RunningStatistics) else obs


def clip_to(space: Space, action: PyTree) -> PyTree:
    """Clip a continuous action to the bounds of its Box; return other actions unchanged."""
    if not isinstance(space, Box):
        return action
    return jnp.clip(action, *(jnp.broadcast_to(bound, action.shape) for bound in (space.low, space.high)))


def has_memory(agent: Agent) -> bool:
    """Whether the agent is recurrent."""
    return bool(jax.tree.leaves(jax.eval_shape(lambda: agent.initial_carry((1,)))))
