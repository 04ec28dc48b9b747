"""One step of acting, shared by rollouts on the device and on the host, evaluation, and policies."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from lehr.maths.distributions import Distribution
from lehr.maths.normalise import RunningStatistics, normalise
from lehr.networks import ActorCriticNetwork
from lehr.spaces import Box, Discrete, Space
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


@dataclass(frozen=True)
class ActorCriticAgent:
    """An agent with an actor-critic network."""

    config: Any
    """Settings of the algorithm that trains it."""
    network: ActorCriticNetwork

    def initial_carry(self, batch_shape: tuple[int, ...]) -> PyTree:
        """Return the network's initial carry."""
        return self.network.initial_carry(batch_shape)

    def act(
        self, params: PyTree, carry: PyTree, obs: PyTree, reset: jax.Array, key: Key, greedy: Any = False
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        """Sample from the policy, or take its mode. The value is stored only if it depends on the carry."""
        kept: dict[str, Any] = {}
        policy: Distribution
        if self.network.critic_is_recurrent:
            carry, policy, kept["value"] = self.network.step(params, carry, obs, reset)
        else:
            carry, policy = self.network.act(params, carry, obs, reset)
        if greedy is False:
            kept["action"], kept["log_prob"] = policy.sample_and_log_prob(key)
        else:
            kept["action"] = jax.tree.map(partial(jnp.where, greedy), policy.mode(), policy.sample(key))
        return carry, policy.environment_action(kept["action"]), kept

    def value(self, params: PyTree, carry: PyTree, obs: PyTree) -> jax.Array:
        """Return the critic's value."""
        return self.network.value(params, carry, obs)


class Acted(NamedTuple):
    """What a rollout stores of one step."""

    obs: PyTree
    """As the agent saw it, after normalisation."""
    action: PyTree
    """As the agent chose it: before squashing or clipping to the action space, and counted from 0."""
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
    return carry, member_of(action_space, action), Acted(seen, kept.get("action", action), rest)


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


def member_of(space: Space, action: PyTree) -> PyTree:
    """Return a network's action as a member of the space: clipped to a Box, or counted from the start of a Discrete.

    >>> member_of(Discrete(3, start=5), jnp.int32(2)), member_of(Box(-1, 1, (1,)), jnp.array([3.0]))
    (Array(7, dtype=int32), Array([1.], dtype=float32))
    """
    if isinstance(space, Discrete) and space.start:
        return action + space.start
    if not isinstance(space, Box):
        return action
    return jnp.clip(action, *(jnp.broadcast_to(bound, action.shape) for bound in (space.low, space.high)))


def has_memory(agent: Agent) -> bool:
    """Whether the agent is recurrent."""
    return bool(jax.tree.leaves(jax.eval_shape(lambda: agent.initial_carry((1,)))))
