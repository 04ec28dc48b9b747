"""Wrappers around environments: frozen dataclasses with pure functions; their state is a `NamedTuple`.

`AutoReset` must be the outermost wrapper, so that a reset also resets the state of the others. `Batch` goes around it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr.envs.base import Environment, forwarded
from lehr.errors import InputError
from lehr.masks import MASK, is_masked
from lehr.maths import across
from lehr.spaces import Box, Dict, Space, flatten, flatten_space
from lehr.types import Key, PyTree, Timestep


@dataclass(frozen=True)
class Wrapper(Environment):
    """Abstract base class; attributes that a wrapper does not override are those of the wrapped environment."""

    _counts: ClassVar[tuple[str, ...]] = ()
    """The fields that must be integers of at least 1."""
    env: Environment

    observation_space = forwarded("env.observation_space")
    action_space = forwarded("env.action_space")
    num_agents = forwarded("env.num_agents")
    env_steps_per_step = forwarded("env.env_steps_per_step")
    truncation_gap = forwarded("env.truncation_gap")
    environments_per_reset = forwarded("env.environments_per_reset")

    def __post_init__(self) -> None:
        if isinstance(self.env, AutoReset):
            raise InputError(
                f"{type(self).__name__} wraps AutoReset, which would not reset it: make AutoReset the outermost "
                "wrapper."
            )
        for name in self._counts:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InputError(f"{type(self).__name__} got {name}={value!r}; it must be an integer of at least 1.")

    @property
    def _agents(self) -> tuple[int, ...]:
        """The shape of a reward: `()` for one agent, `(A,)` for several."""
        return () if self.num_agents == 1 else (self.num_agents,)

    @property
    def _is_masked(self) -> bool:
        """Whether the wrapped environment's observations have an action mask, which no wrapper may change."""
        return is_masked(self.env.observation_space, self.env.action_space)

    def _per_agent(self, function: Callable[[PyTree], PyTree], value: PyTree) -> PyTree:
        """Apply a function to each agent's value."""
        return (function if self.num_agents == 1 else jax.vmap(function))(value)


def _bounded_box(wrapper: Wrapper, space: Space) -> Box:
    if not isinstance(space, Box) or not space.bounded:
        raise InputError(
            f"{type(wrapper).__name__} needs a Box with finite bounds as the action space, but got {space}."
        )
    return space


class TimeLimitState(NamedTuple):
    """`elapsed`, int32 `[]`, counts the steps of this episode."""

    env_state: PyTree
    elapsed: jax.Array


@dataclass(frozen=True)
class TimeLimit(Wrapper):
    """Truncate episodes after `max_steps` steps. `terminated` is unchanged, so both flags may be set at that step."""

    _counts: ClassVar[tuple[str, ...]] = ("max_steps",)
    max_steps: int

    @property
    def truncation_gap(self) -> int:
        """The limit, or that of the wrapped environment if it is smaller."""
        return min(self.max_steps, self.env.truncation_gap)

    def reset(self, key: Key) -> tuple[TimeLimitState, PyTree]:
        """Start an episode and set the step count to 0."""
        env_state, obs = self.env.reset(key)
        return TimeLimitState(env_state, jnp.int32(0)), obs

    def step(self, key: Key, state: TimeLimitState, action: PyTree) -> tuple[TimeLimitState, Timestep]:
        """Take one step and count it; at the limit all agents are truncated."""
        env_state, timestep = self.env.step(key, state.env_state, action)
        elapsed = state.elapsed + 1
        truncated = timestep.truncated | (elapsed >= self.max_steps)
        return TimeLimitState(env_state, elapsed), timestep._replace(truncated=truncated)


class ResetPool(NamedTuple):
    """States that episodes start from, made in advance: a ring that is written in turn, and read in the same order.

    If more episodes end than states were made, the ones that were read longest ago are read again.
    """

    starts: PyTree
    """A state and its observation, leaves `[K, ...]`."""
    position: jax.Array
    """int32 `[]`: where the next states are written, a multiple of how many are made in a step."""
    unread: jax.Array
    """int32 `[]`: how many states before `position` no episode has started from."""

    def agreed(self) -> "ResetPool":
        """Return the pool with the same number of unread states on all devices; those that have more forget some."""
        return self._replace(unread=across.minimum(self.unread))

    def refilled(self, size: int, devices: int) -> "ResetPool":
        """Return a pool of `size` states on each of some devices, all unread, with the states of this one in turn."""
        rows = jnp.arange(devices * size) % len(jax.tree.leaves(self.starts)[0])
        return ResetPool(jax.tree.map(lambda x: x[rows], self.starts), jnp.int32(0), jnp.int32(size))


@dataclass(frozen=True)
class AutoReset(Wrapper):
    """Start the next episode in the step in which one ends, that is, when all agents are terminated or truncated.

    The reward and the flags of the timestep are those of the step. Its `obs` is the observation to act on next: the
    first one of the new episode if the old one ended. `info["final_obs"]` is always the observation before any reset,
    from which the value of a truncated episode is bootstrapped. The state is that of the wrapped environment.
    """

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Start the first episode."""
        return self.env.reset(key)

    def step(self, key: Key, state: PyTree, action: PyTree) -> tuple[PyTree, Timestep]:
        """Take one step. Both outcomes are computed and one is selected; `vmap` would evaluate both branches anyway."""
        next_state, timestep = self._advance(key, state, action)
        return self._select(next_state, timestep, self._fresh(key))

    def reset_batch(self, key: Key, num_envs: int) -> tuple[PyTree, PyTree, ResetPool | tuple[()]]:
        """Start an episode in each environment: their states, their observations, and the pool for `step_batch`.

        The first episodes of environments that share resets have random lengths: those that only a time limit ends
        would otherwise all end together, for ever.
        """
        states, obs = jax.vmap(self.env.reset)(jax.random.split(key, num_envs))
        if self.environments_per_reset == 1:
            return states, obs, ()
        size = self._resets_per_step(num_envs) * self.environments_per_reset
        pool_key, length_key = jax.random.split(jax.random.fold_in(key, 1))
        starts = jax.vmap(self.env.reset)(jax.random.split(pool_key, size))
        return self._staggered(states, length_key, num_envs), obs, ResetPool(starts, jnp.int32(0), jnp.int32(size))

    def step_batch(
        self, keys: Key, states: PyTree, actions: PyTree, pool: ResetPool | tuple[()] = ()
    ) -> tuple[PyTree, Timestep, ResetPool | tuple[()]]:
        """Step a batch of environments, with keys `[N]`; see `Environment.environments_per_reset`."""
        if isinstance(pool, tuple) and not isinstance(pool, ResetPool):
            return *jax.vmap(self.step)(keys, states, actions), ()
        next_states, timesteps = jax.vmap(self._advance)(keys, states, actions)
        made = self._resets_per_step(len(keys))
        fresh, size = jax.vmap(self._fresh)(keys[:made]), made * self.environments_per_reset
        write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=pool.position, axis=0)
        starts = jax.tree.map(write, pool.starts, fresh)
        position, unread = (pool.position + made) % size, jnp.minimum(pool.unread + made, size)
        done = timesteps.terminated | timesteps.truncated
        done = done if self.num_agents == 1 else done.all(axis=1)
        ended = jnp.cumsum(done, dtype=jnp.int32)
        turn = (position - unread + ended - 1) % size  # each that is done takes the next one
        given = jax.tree.map(lambda x: jnp.take(x, turn, axis=0, mode="clip"), starts)
        states, timesteps = jax.vmap(self._select)(next_states, timesteps, given)
        return states, timesteps, ResetPool(starts, position, jnp.maximum(unread - ended[-1], 0))

    def _resets_per_step(self, num_envs: int) -> int:
        return -(-num_envs // self.environments_per_reset)

    def _staggered(self, states: PyTree, key: Key, num_envs: int) -> PyTree:
        """Set the step count of the time limit, if there is one, to a random number in each environment."""
        limit: Any = self.env
        while isinstance(limit, Wrapper) and not isinstance(limit, TimeLimit):
            limit = limit.env
        if not isinstance(limit, TimeLimit):
            return states

        def stagger(state: Any) -> Any:
            if not isinstance(state, TimeLimitState):
                return state
            return state._replace(elapsed=jax.random.randint(key, (num_envs,), 0, limit.max_steps, jnp.int32))

        return jax.tree.map(stagger, states, is_leaf=lambda node: isinstance(node, TimeLimitState))

    # fold_in costs one hash per key that is used; split would compute both, and most tasks do not use their step key.

    def _advance(self, key: Key, state: PyTree, action: PyTree) -> tuple[PyTree, Timestep]:
        return self.env.step(jax.random.fold_in(key, 0), state, action)

    def _fresh(self, key: Key) -> tuple[PyTree, PyTree]:
        return self.env.reset(jax.random.fold_in(key, 1))

    def _select(self, state: PyTree, timestep: Timestep, fresh: tuple[PyTree, PyTree]) -> tuple[PyTree, Timestep]:
        """Select the fresh state and observation if the episode is over, otherwise those of the step."""
        done = jnp.all(timestep.terminated | timestep.truncated)
        state, obs = jax.tree.map(lambda new, old: jnp.where(done, new, old), fresh, (state, timestep.obs))
        return state, timestep._replace(obs=obs, info={**timestep.info, "final_obs": timestep.obs})


class EpisodeStatisticsState(NamedTuple):
    """Running totals of the episode, each `[]` or `[A]`; `ended` marks agents that are already done."""

    env_state: PyTree
    episode_return: jax.Array
    episode_length: jax.Array
    ended: jax.Array


@dataclass(frozen=True)
class EpisodeStatistics(Wrapper):
    """Add episode statistics to `info`, each `[]`, or `[A]` with several agents.

    `episode_return`, float32: the undiscounted sum of rewards so far, including this step.
    `episode_length`, int32: the number of calls of `step` so far, including this one.
    `episode_done`, bool: the agent's episode ends with this step, so the other two are final. It is set once per
    episode: the statistics of an agent that is done before the others no longer change.
    """

    def reset(self, key: Key) -> tuple[EpisodeStatisticsState, PyTree]:
        """Start an episode and set all statistics to 0."""
        env_state, obs = self.env.reset(key)
        shape = self._agents
        zeros = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)
        return EpisodeStatisticsState(env_state, *zeros), obs

    def step(self, key: Key, state: EpisodeStatisticsState, action: PyTree) -> tuple[EpisodeStatisticsState, Timestep]:
        """Take one step and update the statistics."""
        env_state, timestep = self.env.step(key, state.env_state, action)
        done = timestep.terminated | timestep.truncated
        statistics = {
            "episode_return": state.episode_return + jnp.where(state.ended, 0, timestep.reward),
            "episode_length": state.episode_length + jnp.where(state.ended, 0, 1),
            "episode_done": done & ~state.ended,
        }
        next_state = EpisodeStatisticsState(
            env_state, statistics["episode_return"], statistics["episode_length"], state.ended | done
        )
        return next_state, timestep._replace(info={**timestep.info, **statistics})


@dataclass(frozen=True)
class ClipAction(Wrapper):
    """Accept any real action and clip it to the bounds of the environment's action space."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _bounded_box(self, self.env.action_space)

    @property
    def action_space(self) -> Box:
        """An unbounded box of the same shape."""
        inner = _bounded_box(self, self.env.action_space)
        return Box(-np.inf, np.inf, inner.shape, inner.dtype)

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Start an episode."""
        return self.env.reset(key)

    def step(self, key: Key, state: PyTree, action: PyTree) -> tuple[PyTree, Timestep]:
        """Take one step with the clipped action."""
        inner = _bounded_box(self, self.env.action_space)
        return self.env.step(key, state, self._per_agent(lambda a: jnp.clip(a, inner.low, inner.high), action))


@dataclass(frozen=True)
class RescaleAction(Wrapper):
    """Map actions in `[low, high]` linearly to the bounds of the environment's action space.

    Actions outside of `[low, high]` are mapped outside of these bounds: wrap the environment in `ClipAction` first to
    clip them.
    """

    low: float = -1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _bounded_box(self, self.env.action_space)
        if not -np.inf < self.low < self.high < np.inf:
            raise InputError(
                f"RescaleAction got low={self.low} and high={self.high}; both must be finite, with low < high."
            )

    @property
    def action_space(self) -> Box:
        """A box of the same shape from `low` to `high`."""
        return Box(self.low, self.high, self.env.action_space.shape)

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Start an episode."""
        return self.env.reset(key)

    def step(self, key: Key, state: PyTree, action: PyTree) -> tuple[PyTree, Timestep]:
        """Take one step with the rescaled action."""
        inner = _bounded_box(self, self.env.action_space)
        slope = (inner.high - inner.low) / (self.high - self.low)
        return self.env.step(key, state, self._per_agent(lambda a: inner.low + slope * (a - self.low), action))


def _apart(given: Any, is_masked: bool) -> tuple[Any, dict[str, Any]]:
    """Split an observation, or the space of it, into all but the action mask, and a dict of the mask, if any."""
    if not is_masked:
        return given, {}
    if isinstance(given, Dict):
        rest, mask = _apart(given.spaces, is_masked)
        return Dict(rest), mask
    return {name: part for name, part in given.items() if name != MASK}, {MASK: given[MASK]}


def _together(given: Any, mask: dict[str, Any]) -> Any:
    """Put back what `_apart` split."""
    if not mask:
        return given
    return Dict({**given.spaces, **mask}) if isinstance(given, Dict) else {**given, **mask}


class FrameStackState(NamedTuple):
    """`frames`: the last `k` observations without masks, oldest first, each leaf `[k, ...]` or `[A, k, ...]`."""

    env_state: PyTree
    frames: PyTree


@dataclass(frozen=True)
class FrameStack(Wrapper):
    """Stack the last `k` observations, oldest first, along a new first axis; a reset fills it with the first one.

    An action mask is not stacked.
    """

    _counts: ClassVar[tuple[str, ...]] = ("k",)
    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.observation_space

    @property
    def observation_space(self) -> Space:
        """The environment's space with a leading axis of length `k` on every box."""
        frames, mask = _apart(self.env.observation_space, self._is_masked)
        return _together(self._stack(frames), mask)

    def _stack(self, space: Space) -> Space:
        match space:
            case Box():
                shape = (self.k, *space.shape)
                low, high = np.broadcast_to(space.low, shape), np.broadcast_to(space.high, shape)
                return Box(low, high, shape, space.dtype)
            case Dict():
                return Dict({name: self._stack(inner) for name, inner in space.spaces.items()})
        raise InputError(f"FrameStack needs a Box or a Dict of boxes, but got {space}: apply FlattenObservation first.")

    def reset(self, key: Key) -> tuple[FrameStackState, PyTree]:
        """Start an episode with `k` copies of its first observation."""
        env_state, obs = self.env.reset(key)
        fill = jax.vmap(lambda obs: obs, in_axes=None, out_axes=0, axis_size=self.k)
        obs, mask = _apart(obs, self._is_masked)
        frames = self._per_agent(fill, obs)
        return FrameStackState(env_state, frames), _together(frames, mask)

    def step(self, key: Key, state: FrameStackState, action: PyTree) -> tuple[FrameStackState, Timestep]:
        """Take one step, drop the oldest observation and append the new one."""
        env_state, timestep = self.env.step(key, state.env_state, action)

        def push(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
            frames, obs = pair
            return jnp.concatenate([frames[1:], obs[None]])

        obs, mask = _apart(timestep.obs, self._is_masked)
        frames = jax.tree.map(lambda *pair: self._per_agent(push, pair), state.frames, obs)
        return FrameStackState(env_state, frames), timestep._replace(obs=_together(frames, mask))


@dataclass(frozen=True)
class ActionRepeat(Wrapper):
    """Repeat each action `k` times and sum the rewards; stop repeating when the episode ends.

    With several agents, one that is done collects no more rewards and keeps its final observation while the others act.
    """

    _counts: ClassVar[tuple[str, ...]] = ("k",)
    k: int

    @property
    def env_steps_per_step(self) -> int:
        """`k` times that of the wrapped environment."""
        return self.k * self.env.env_steps_per_step

    @property
    def truncation_gap(self) -> int:
        """That of the wrapped environment, in steps of this one."""
        return max(1, self.env.truncation_gap // self.k)

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Start an episode."""
        return self.env.reset(key)

    def step(self, key: Key, state: PyTree, action: PyTree) -> tuple[PyTree, Timestep]:
        """Repeat the action `k` times; observation and flags are those of the last step that an agent took."""
        first_key, *other_keys = jax.random.split(key, self.k)
        carry = self.env.step(first_key, state, action)
        if not other_keys:
            return carry

        def repeat(carry: tuple[PyTree, Timestep], key: Key) -> tuple[tuple[PyTree, Timestep], None]:
            state, before = carry
            next_state, after = self.env.step(key, state, action)
            done = before.terminated | before.truncated

            def unless_done(old: jax.Array, new: jax.Array) -> jax.Array:
                return jnp.where(done.reshape(*done.shape, *[1] * (new.ndim - done.ndim)), old, new)

            after = after._replace(
                obs=jax.tree.map(unless_done, before.obs, after.obs),
                reward=before.reward + unless_done(jnp.zeros_like(after.reward), after.reward),
                terminated=unless_done(before.terminated, after.terminated),
                truncated=unless_done(before.truncated, after.truncated),
            )
            over = jnp.all(done)
            return jax.tree.map(lambda old, new: jnp.where(over, old, new), carry, (next_state, after)), None

        return jax.lax.scan(repeat, carry, jnp.stack(other_keys))[0]


@dataclass(frozen=True)
class StackChannels(Wrapper):
    """Stack the last `k` images along their channels, oldest first; a reset fills the stack with the first one.

    An image `[H, W]` becomes `[H, W, k]`, and `[H, W, C]` becomes `[H, W, k · C]`, in the same dtype.
    """

    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        space = self.env.observation_space
        if not isinstance(space, Box) or len(space.shape) not in (2, 3):
            raise InputError(f"StackChannels needs images, a Box of two or three axes, but got {space}.")
        _ = self._frames  # checks k

    @property
    def _frames(self) -> FrameStack:
        return FrameStack(self.env, self.k)

    @property
    def observation_space(self) -> Box:
        """The images with `k` times the channels."""
        space = self._frames.observation_space
        assert isinstance(space, Box)
        low, high = (np.asarray(self._channels(bound)) for bound in (space.low, space.high))
        return Box(low, high, low.shape, space.dtype)

    def reset(self, key: Key) -> tuple[FrameStackState, jax.Array]:
        """Start an episode with `k` copies of its first image."""
        state, frames = self._frames.reset(key)
        return state, self._per_agent(self._channels, frames)

    def step(self, key: Key, state: FrameStackState, action: PyTree) -> tuple[FrameStackState, Timestep]:
        """Take one step, drop the oldest image and append the new one."""
        state, timestep = self._frames.step(key, state, action)
        return state, timestep._replace(obs=self._per_agent(self._channels, timestep.obs))

    def _channels(self, frames: Any) -> Any:
        """`[k, H, W]` to `[H, W, k]`, or `[k, H, W, C]` to `[H, W, k · C]`."""
        moved = frames.transpose(1, 2, 0, *range(3, frames.ndim))
        return moved.reshape(*moved.shape[:2], -1)


@dataclass(frozen=True)
class FlattenObservation(Wrapper):
    """Flatten observations to one float32 vector: boxes ravelled, integers one-hot, dicts concatenated by name.

    With an action mask, which is not flattened, the vector is the entry `observation` beside it.
    """

    @property
    def observation_space(self) -> Space:
        """A one-dimensional box, or a `Dict` of it and the action mask."""
        space, mask = _apart(self.env.observation_space, self._is_masked)
        return _together(Dict({"observation": flatten_space(space)}) if mask else flatten_space(space), mask)

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Start an episode."""
        state, obs = self.env.reset(key)
        return state, self._flatten(obs)

    def step(self, key: Key, state: PyTree, action: PyTree) -> tuple[PyTree, Timestep]:
        """Take one step."""
        state, timestep = self.env.step(key, state, action)
        return state, timestep._replace(obs=self._flatten(timestep.obs))

    def _flatten(self, obs: PyTree) -> PyTree:
        space, _ = _apart(self.env.observation_space, self._is_masked)
        obs, mask = _apart(obs, self._is_masked)
        vector = self._per_agent(lambda one: flatten(space, one), obs)
        return _together({"observation": vector} if mask else vector, mask)


@dataclass(frozen=True)
class HideObservation(Wrapper):
    """Keep only some entries of a vector observation: `(0, 2)` keeps the first and the third."""

    indices_to_keep: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "indices_to_keep", tuple(self.indices_to_keep))
        space = self.env.observation_space
        if not isinstance(space, Box) or len(space.shape) != 1:
            raise InputError(
                f"HideObservation needs a one-dimensional Box, but got {space}: apply FlattenObservation first."
            )
        if not self.indices_to_keep or not all(0 <= i < space.shape[0] for i in self.indices_to_keep):
            raise InputError(
                f"HideObservation got indices_to_keep={self.indices_to_keep}; give at least one index, each from 0 to "
                f"{space.shape[0] - 1}."
            )

    @property
    def observation_space(self) -> Box:
        """A box of the entries that are kept."""
        space, kept = self.env.observation_space, np.array(self.indices_to_keep)
        assert isinstance(space, Box)
        return Box(space.low[kept], space.high[kept], dtype=space.dtype)

    def reset(self, key: Key) -> tuple[PyTree, jax.Array]:
        """Start an episode."""
        state, obs = self.env.reset(key)
        return state, obs[..., np.array(self.indices_to_keep)]

    def step(self, key: Key, state: PyTree, action: PyTree) -> tuple[PyTree, Timestep]:
        """Take one step."""
        state, timestep = self.env.step(key, state, action)
        return state, timestep._replace(obs=timestep.obs[..., np.array(self.indices_to_keep)])


@dataclass(frozen=True)
class Batch:
    """A batch of `N = num_envs` copies of an environment; every array has a leading axis `N`."""

    env: Environment
    num_envs: int

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Start an episode in every copy and return `(states, observations)`."""
        return jax.vmap(self.env.reset)(jax.random.split(key, self.num_envs))

    def step(self, key: Key, states: PyTree, actions: PyTree) -> tuple[PyTree, Timestep]:
        """Step every copy with `actions` `[N, ...]` and return `(states, timestep)`."""
        return jax.vmap(self.env.step)(jax.random.split(key, self.num_envs), states, actions)
