"""A trained policy: its parameters, and the statistics that normalise its observations."""

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
    """The learned part of a policy."""

    params: PyTree
    observation_statistics: RunningStatistics | tuple[()]


@dataclass(frozen=True)
class PolicyProgram:
    """The static part of a policy: how it acts, given its parameters."""

    agent: Agent
    observation_space: Space
    action_space: Space

    def act(
        self, learned: PolicyParameters, carry: PyTree, obs: PyTree, reset: jax.Array, key: Key, greedy: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """Act on observations `[N, ...]`; return the next recurrent state, and actions `[N, ...]`."""
        params, statistics = learned.params, learned.observation_statistics
        carry, action, _ = act(self.agent, self.action_space, params, statistics, carry, obs, reset, key, greedy)
        return carry, action


@dataclass(frozen=True)
class Policy:
    """A callable policy: `policy(obs)` returns the most likely action, `policy(obs, key)` samples one.

    `obs` is one observation or a batch. For a recurrent policy, use `initial_carry` and `step`.
    """

    program: PolicyProgram
    learned: PolicyParameters

    def __call__(self, obs: PyTree, key: Key | None = None) -> PyTree:
        """Return the action for an observation, or the actions for a batch."""
        if has_memory(self.program.agent):
            raise InputError(
                "This policy is recurrent; use carry = policy.initial_carry(n), then carry, action = "
                "policy.step(carry, obs, reset, key) with observations [n, ...]."
            )
        single = self._is_single(obs)
        batch = jax.tree.map(lambda x: jnp.asarray(x)[None] if single else jnp.asarray(x), obs)
        size = jax.tree.leaves(batch)[0].shape[0]
        _, action = self.step(self.initial_carry(size), batch, np.zeros(size, bool), key)
        return jax.tree.map(lambda x: x[0], action) if single else action

    def initial_carry(self, size: int) -> PyTree:
        """Return the recurrent state before the first step of `size` episodes."""
        return self.program.agent.initial_carry((size,))

    def step(self, carry: PyTree, obs: PyTree, reset: Any, key: Key | None = None) -> tuple[PyTree, PyTree]:
        """Return the next recurrent state and the actions for `[n, ...]`; `reset` is true where an episode starts."""
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
        raise InputError(f"The observation has shapes {given}; this policy expects {shapes}, or a batch of them.")


@partial(jax.jit, static_argnums=0)
def _act(program: PolicyProgram, *arguments: Any) -> tuple[PyTree, PyTree]:
    return program.act(*arguments)
