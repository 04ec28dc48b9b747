"""A trained policy: its parameters, and the statistics that normalise its observations."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from lehr.acting.agent import Agent, act, has_memory
from lehr.envs.host.answers import beyond
from lehr.errors import InputError
from lehr.maths.normalise import RunningStatistics
from lehr.spaces import Box, Dict, Space
from lehr.types import Key, PyTree

Randomness: TypeAlias = Key | np.random.Generator
"""What random actions are drawn with: a JAX key, or a generator of NumPy, which each call advances."""


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

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether a carry must be passed on from step to step."""
        return has_memory(self.agent)

    @cached_property
    def inputs(self) -> tuple[tuple[tuple[str, ...], tuple[int, ...], Any], ...]:
        """The path, the shape and the dtype of each array of one observation."""
        return tuple(_leaves(self.observation_space))


@dataclass(frozen=True, eq=False)  # hashable, so that `jax.jit(policy)` works
class Policy:
    """A callable policy: `policy(obs)` returns the most likely action, `policy(obs, key)` samples one.

    `obs` is one observation or a batch. NumPy arrays give NumPy arrays that Gymnasium's environments accept, JAX arrays
    give JAX arrays. To sample, pass a JAX key or NumPy's `default_rng(seed)`. For a recurrent policy, use
    `initial_carry` and `step`.
    """

    program: PolicyProgram
    learned: PolicyParameters

    def __repr__(self) -> str:
        size = sum(leaf.size for leaf in jax.tree.leaves(self.learned.params))
        spaces = f"{self.program.observation_space} -> {self.program.action_space}"
        memory = ", recurrent" if self.program.is_recurrent else ""
        return f"Policy({spaces}, {size} parameters{memory})"

    def __call__(self, obs: PyTree, key: Randomness | None = None) -> PyTree:
        """Return the action for an observation, or the actions for a batch."""
        if self.program.is_recurrent:
            raise InputError(
                "This policy is recurrent; use carry = policy.initial_carry(n), then carry, action = "
                "policy.step(carry, obs, reset, key) with observations [n, ...]."
            )
        seen, on_host = _own(self.program.observation_space, obs)
        single = self._is_single(seen)
        if key is None:
            action = _most_likely(self.program, single, self.learned, seen)
        else:
            action = _sampled(self.program, single, self.learned, seen, _drawn(key))
        return self._to_numpy(action) if on_host else action

    def initial_carry(self, size: int) -> PyTree:
        """Return the recurrent state before the first step of `size` episodes."""
        return self.program.agent.initial_carry((size,))

    def step(self, carry: PyTree, obs: PyTree, reset: Any, key: Randomness | None = None) -> tuple[PyTree, PyTree]:
        """Return the next recurrent state and the actions for `[n, ...]`; `reset` is true where an episode starts."""
        seen, on_host = _own(self.program.observation_space, obs)
        carry, action = self.step_on_device(carry, seen, reset, key)
        return carry, self._to_numpy(action) if on_host else action

    def step_on_device(
        self, carry: PyTree, obs: PyTree, reset: Any, key: Randomness | None = None
    ) -> tuple[PyTree, PyTree]:
        """Return what `step` returns, as JAX arrays whatever the observations are."""
        greedy, drawn = np.bool_(key is None), np.uint32(0) if key is None else _drawn(key)
        if not isinstance(reset, jax.Array):
            reset = np.asarray(reset, bool)
        return _step(self.program, self.learned, carry, obs, reset, drawn, greedy)

    def _is_single(self, obs: PyTree) -> bool:
        expected = [shape for _, shape, _ in self.program.inputs]
        given = [np.shape(leaf) for leaf in jax.tree.leaves(obs)] if isinstance(obs, dict) else [obs.shape]
        if given == expected:
            return True
        if len(given) == len(expected) and all(a and a[1:] == b for a, b in zip(given, expected, strict=True)):
            return False
        raise InputError(f"The observation has shapes {given}; this policy expects {expected}, or a batch of them.")

    def _to_numpy(self, action: PyTree) -> PyTree:
        """Return the action as Gymnasium's environments accept it: Box actions in their dtype, integers as int64."""
        space = self.program.action_space
        dtype = space.dtype if isinstance(space, Box) and space.dtype.kind == "f" else None
        if isinstance(action, jax.Array):
            return _copied(action, dtype)
        return jax.tree.map(lambda x: _copied(x, dtype), action)


def _copied(x: jax.Array, dtype: Any) -> Any:
    """Return a writable array, or a scalar; integers as int64, unless another dtype is given."""
    array = np.asarray(x)
    dtype = dtype or (np.int64 if array.dtype.kind in "iu" else array.dtype)
    return array.astype(dtype)[()]


def _leaves(space: Space, path: tuple[str, ...] = ()) -> Any:
    if isinstance(space, Dict):
        for name, inner in space.spaces.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield path, space.shape, jax.dtypes.canonicalize_dtype(space.dtype)


def _own(space: Space, obs: PyTree) -> tuple[PyTree, bool]:
    """Return an observation as arrays in plain dicts, and whether it comes without any JAX array."""
    if isinstance(space, Dict) and not isinstance(obs, jax.Array | np.ndarray):
        if missing := [name for name in space.spaces if name not in obs]:
            raise InputError(f"The observation lacks {missing[0]!r}; this policy expects {', '.join(space.spaces)}.")
        parts = {name: _own(inner, obs[name]) for name, inner in space.spaces.items()}
        return {name: seen for name, (seen, _) in parts.items()}, all(on_host for _, on_host in parts.values())
    if isinstance(obs, jax.Array):
        return obs, False
    array = np.asarray(obs)
    # Only floats are normalised, so whole numbers in a space of floats must be floats too.
    if isinstance(space, Box) and space.dtype.kind == "f" and array.dtype != np.float32:
        array = array.astype(jax.dtypes.canonicalize_dtype(space.dtype))
    elif not isinstance(space, Dict) and (bad := beyond(array, jax.dtypes.canonicalize_dtype(space.dtype))) is not None:
        raise InputError(f"The observation has the integer {bad}, but this policy expects {space}.")
    return array, True


def _drawn(key: Randomness) -> Any:
    """Return the key, or a random seed of one from NumPy's generator."""
    return np.uint32(key.integers(2**32)) if isinstance(key, np.random.Generator) else key


def _as_key(drawn: jax.Array) -> Key:
    return jax.random.key(drawn) if drawn.dtype == jnp.uint32 and drawn.ndim == 0 else drawn


@partial(jax.jit, static_argnums=(0, 1))
def _most_likely(program: PolicyProgram, single: bool, learned: PolicyParameters, obs: PyTree) -> PyTree:
    return _answer(program, single, learned, obs, jax.random.key(0), jnp.bool(True))


@partial(jax.jit, static_argnums=(0, 1))
def _sampled(program: PolicyProgram, single: bool, learned: PolicyParameters, obs: PyTree, drawn: jax.Array) -> PyTree:
    return _answer(program, single, learned, obs, _as_key(drawn), jnp.bool(False))


def _answer(
    program: PolicyProgram, single: bool, learned: PolicyParameters, obs: PyTree, key: Key, greedy: jax.Array
) -> PyTree:
    batch = jax.tree.map(lambda x: x[None], obs) if single else obs
    size = jax.tree.leaves(batch)[0].shape[0]
    carry = program.agent.initial_carry((size,))
    _, action = program.act(learned, carry, batch, jnp.zeros(size, bool), key, greedy)
    return jax.tree.map(lambda x: x[0], action) if single else action


@partial(jax.jit, static_argnums=0)
def _step(
    program: PolicyProgram,
    learned: PolicyParameters,
    carry: PyTree,
    obs: PyTree,
    reset: jax.Array,
    drawn: jax.Array,
    greedy: jax.Array,
) -> tuple[PyTree, PyTree]:
    return program.act(learned, carry, obs, reset, _as_key(drawn), greedy)
