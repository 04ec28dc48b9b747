"""Rollouts in host environments: one compiled call per step for all of them, and one for the whole rollout."""

from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from lehr.acting.agent import Acted, Agent, act, action_keys, observed
from lehr.acting.rollout import Collected, RunningEpisodes, Trajectory, collected
from lehr.envs.host.base import HostBatch, HostEnvironment, HostStep, ask, begin, check_obs, check_step, own
from lehr.maths.normalise import RunningStatistics
from lehr.spaces import Space
from lehr.types import Actor, Key, PyTree, derive

pack = jax.jit(lambda params: ravel_pytree(params)[0])
"""Pack parameters into one vector: passing it to a compiled call at every step is faster than passing many arrays."""


class Collector:
    """Host environments, and the compiled functions that act in them.

    Args:
        env: the environment.
        agent: the agent that acts.
        num_envs: number of environments.
        horizon: steps per rollout.
        params: example of the agent's parameters.
        needs: the optional parts of a rollout to keep.
        noise_steps: steps for which the noise of continuous actions is kept.
    """

    def __init__(
        self,
        env: HostEnvironment,
        agent: Agent,
        num_envs: int,
        horizon: int,
        params: PyTree,
        needs: frozenset[str],
        noise_steps: int = 1,
    ) -> None:
        self.env, self.agent, self.num_envs, self.horizon = env, agent, num_envs, horizon
        self.size = num_envs * env.num_agents
        self.batch: HostBatch | None = None
        self.needs = needs
        self.needs_value, self.needs_final_obs = "value" in needs, "final_obs" in needs
        unpack = ravel_pytree(params)[1]
        self._act = jax.jit(lambda packed, *arguments: _act(env, agent, unpack(packed), *arguments))
        self._value = jax.jit(lambda packed, *arguments: _value(agent, unpack(packed), *arguments))
        self._collected = jax.jit(lambda packed, *arguments: _collected(env, agent, needs, unpack(packed), *arguments))
        self._keys = jax.jit(partial(_keys, horizon, env.action_space, noise_steps))

    def compile(self, packed: jax.Array, statistics: Any, actor: Actor, key: Key) -> None:
        """Compile acting."""
        keys = np.asarray(self._keys(key, np.uint32(0)))
        self._act(packed, statistics, actor.carry, actor.obs, actor.reset, keys[0])
        if self.needs_value:
            self._value(packed, statistics, actor.carry, actor.obs)

    def start(self) -> HostBatch:
        """Create the environments."""
        self.batch = begin(self.env, self.num_envs)
        return self.batch

    def reset(self, key: Key) -> Actor:
        """Start a new episode in each environment."""
        assert self.batch is not None
        seeds = np.asarray(jax.random.bits(key, (self.num_envs,), jnp.uint32))
        obs = ask(self.env.name, "reset", partial(self.batch.reset, seeds))
        check_obs(self.env, obs, self.size)
        carry, episodes = self.agent.initial_carry((self.size,)), RunningEpisodes.begin(self.size)
        return Actor((), own(self.env, obs), jnp.ones(self.size, bool), carry, episodes)

    def collect(self, packed: jax.Array, statistics: Any, actor: Actor, key: Key, number: int) -> Collected:
        """Collect rollout `number` from the actor's current state, with these packed parameters."""
        assert self.batch is not None
        shape = (self.horizon, self.size)
        # Allocate new arrays for every rollout: on a CPU, JAX may use them without a copy.
        obs = self._room(shape)
        final_obs = self._room(shape) if self.needs_final_obs else ()
        reward, final_value = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        terminated, done, valid = (np.zeros(shape, bool) for _ in range(3))
        keys = np.asarray(self._keys(key, np.uint32(number)))
        acted, actions = [], []
        current, reset, carry = actor.obs, np.asarray(actor.reset), actor.carry
        for t in range(self.horizon):
            here = jax.tree.map(itemgetter(t), obs)
            jax.tree.map(np.copyto, here, current)
            carry, taken, kept = self._act(packed, statistics, carry, here, reset, keys[t])
            action = np.array(taken)  # a copy, because an environment may write into it
            acted.append(kept)
            if "taken" in self.needs:
                actions.append(action.copy())
            answer: HostStep = ask(self.env.name, "step", partial(self.batch.step, action))
            check_step(self.env, answer, self.size)
            reward[t], terminated[t], done[t] = answer.reward, answer.terminated, answer.terminated | answer.truncated
            if answer.valid is not None:
                valid[t] = answer.valid
            if self.needs_final_obs:
                jax.tree.map(np.copyto, jax.tree.map(itemgetter(t), final_obs), own(self.env, answer.final_obs))
            if self.needs_value and answer.truncated.any():
                last = own(self.env, answer.final_obs)
                final_value[t] = np.asarray(self._value(packed, statistics, carry, last))
            current, reset = answer.obs, done[t]
        lived = {
            "obs": obs,
            "acted": jax.tree.map(lambda *steps: np.stack([np.asarray(x) for x in steps]), *acted),
            "reward": reward,
            "terminated": terminated,
            "done": done,
            "valid": valid if self.env.masks else (),
            "final_value": final_value,
            "final_obs": final_obs,
            "taken": np.stack(actions) if actions else (),
        }
        before = actor._replace(env_state=())
        return self._collected(packed, statistics, before, lived, carry, own(self.env, current))

    def close(self) -> None:
        """Close the environments."""
        if self.batch is not None:
            self.batch.close()

    def _room(self, shape: tuple[int, int]) -> PyTree:
        return jax.tree.map(lambda like: np.empty((*shape, *like.shape), like.dtype), self.env.layout)


# Compiled functions --------------------------------------------------------------------------------------------------


def _act(
    env: HostEnvironment,
    agent: Agent,
    params: PyTree,
    statistics: Any,
    carry: PyTree,
    obs: PyTree,
    reset: jax.Array,
    key: jax.Array,
) -> tuple[PyTree, jax.Array, Acted]:
    """Act for one step; drop the observations, which the host already has."""
    action_key = jax.random.wrap_key_data(key)
    carry, taken, acted = act(agent, env.action_space, params, statistics, carry, obs, reset, action_key)
    return carry, taken, acted._replace(obs=())


def _keys(steps: int, action_space: Space, noise_steps: int, key: Key, number: jax.Array) -> jax.Array:
    """Return the key data of one rollout, one row per step, computed at once so that single steps need not."""
    return jax.random.key_data(action_keys(derive(key, "rollout", number), steps, action_space, noise_steps))


def _value(agent: Agent, params: PyTree, statistics: Any, carry: PyTree, obs: PyTree) -> jax.Array:
    return agent.value(params, carry, observed(statistics, obs))


def _collected(
    env: HostEnvironment,
    agent: Agent,
    needs: frozenset[str],
    params: PyTree,
    statistics: Any,
    actor: Actor,
    lived: dict[str, Any],
    carry: PyTree,
    last_obs: PyTree,
) -> Collected:
    """Assemble the steps into a rollout, with its values."""
    acted: Acted = lived["acted"]
    trajectory = Trajectory(
        obs=observed(statistics, lived["obs"]),
        action=acted.action,
        kept=acted.kept,
        reward=lived["reward"],
        terminated=lived["terminated"],
        done=lived["done"],
        valid=lived["valid"],
        final_value=lived["final_value"],
        final_obs=observed(statistics, lived["final_obs"]) if "final_obs" in needs else (),
        taken=lived["taken"],
    )
    last = actor._replace(env_state=(), obs=last_obs, reset=lived["done"][-1], carry=carry)
    raw_obs = lived["obs"] if isinstance(statistics, RunningStatistics) else ()
    return collected(agent, params, statistics, actor, trajectory, last, raw_obs, env.num_agents, needs)


def collected_shapes(
    env: HostEnvironment,
    agent: Agent,
    horizon: int,
    needs: frozenset[str],
    params: PyTree,
    statistics: Any,
    actor: Actor,
) -> Collected:
    """Return the shapes of what `Collector.collect` returns."""
    actor = actor._replace(env_state=())
    size = actor.reset.shape[0]
    key = jax.random.key_data(jax.random.key(0))
    seen = actor.carry, actor.obs, actor.reset
    _, taken, acted = jax.eval_shape(partial(_act, env, agent), params, statistics, *seen, key)

    def stacked(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((horizon, *x.shape), x.dtype)

    number_of, flag = (jax.ShapeDtypeStruct((horizon, size), kind) for kind in (jnp.float32, jnp.bool))
    obs = jax.tree.map(stacked, actor.obs)
    lived = {
        "obs": obs,
        "acted": jax.tree.map(stacked, acted),
        "reward": number_of,
        "terminated": flag,
        "done": flag,
        "valid": flag if env.masks else (),
        "final_value": number_of,
        "final_obs": obs if "final_obs" in needs else (),
        "taken": stacked(taken) if "taken" in needs else (),
    }
    make = partial(_collected, env, agent, needs)
    return jax.eval_shape(make, params, statistics, actor, lived, actor.carry, actor.obs)
