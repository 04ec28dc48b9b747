"""A trained policy, to act with: parameters, and the statistics its observations are normalised by."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.acting.agent import Agent, act, has_memory
from lehr.errors import InputError
from lehr.maths.normalise import RunningStatistics
from lehr.spaces import Space
from lehr.types import Key, PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PolicyParameters:
    """What a policy has learned."""

    params: PyTree
    observation_statistics: RunningStatistics | tuple[()]


@dataclass(frozen=True)
class PolicyProgram:
    """How a policy acts, given its parameters: a static value."""

    agent: Agent
    observation_space: Space
    action_space: Space

    def act(
        self, learned: PolicyParameters, carry: PyTree, obs: PyTree, reset: jax.Array, key: Key, greedy: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """One step for observations `[N, ...]`: the next memory, and actions `[N, ...]` for the environment."""
        params, statistics = learned.params, learned.observation_statistics
        carry, action, _ = act(self.agent, self.action_space, params, statistics, carry, obs, reset, key, greedy)
        return carry, action


@dataclass(frozen=True)
class Policy:
    """A policy to call: `policy(obs)` takes the most probable action, `policy(obs, key)` draws one.

    Observations are one or a batch. A policy with a memory is used with `initial_carry` and `step`.
    """

    program: PolicyProgram
    learned: PolicyParameters

    def __call__(self, obs: PyTree, key: Key | None = None) -> PyTree:
        """The action for an observation, or the actions for a batch of them."""
        if has_memory(self.program.agent):
            raise InputError(
                "This policy has a memory: use carry = policy.initial_carry(n), then carry, action = "
                "policy.step(carry, obs, reset, key) with observations [n, ...]."
            )
        single = self._is_single(obs)
        batch = jax.tree.map(lambda x: jnp.asarray(x)[None] if single else jnp.asarray(x), obs)
        size = jax.tree.leaves(batch)[0].shape[0]
        _, action = self.step(self.initial_carry(size), batch, np.zeros(size, bool), key)
        return jax.tree.map(lambda x: x[0], action) if single else action

    def initial_carry(self, size: int) -> PyTree:
        """The memory before the first step of `size` episodes."""
        return self.program.agent.initial_carry((size,))

    def step(self, carry: PyTree, obs: PyTree, reset: Any, key: Key | None = None) -> tuple[PyTree, PyTree]:
        """The next memory and actions for observations `[n, ...]`; `reset` is true where an episode begins."""
        drawn = jax.random.key(0) if key is None else key
        return _act(self.program, self.learned, carry, obs, jnp.asarray(reset), drawn, jnp.bool(key is None))

    def _is_single(self, obs: PyTree) -> bool:
        leaves, space = jax.tree.leaves(obs), self.program.observation_space
        shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(space.sample, jax.random.key(0)))]
        given = [np.shape(leaf) for leaf in leaves]
        if given == shapes:
            return True
        if len(given) == len(shapes) and all(a[1:] == b for a, b in zip(given, shapes, strict=True)):
            return False
        raise InputError(f"The observation has shapes {given}; this policy takes {shapes}, or a batch of them.")


@partial(jax.jit, static_argnums=0)
def _act(program: PolicyProgram, *arguments: Any) -> tuple[PyTree, PyTree]:
    return program.act(*arguments)
