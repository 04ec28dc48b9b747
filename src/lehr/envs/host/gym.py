"""Gymnasium's environments, `gym:NAME`, through its vector API.

By default the environments do not reset themselves: an episode begins with a seed that is derived from the run's, so
an environment is brought back after a stop by living through its episode again, whatever it is written in. Vector
environments that reset themselves, in the step that ends an episode or in the one after, work too, but begin new
episodes when a run is resumed.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lehr import spaces
from lehr.envs.host.base import HostBatch, HostEnvironment, HostStep, Journal, check_size, late_reset
from lehr.errors import InputError, closest
from lehr.plugins import require
from lehr.types import PyTree

VECTORIZATIONS = ("sync", "async", "vector")
AUTORESETS = ("seeded", "same_step", "next_step")

LONGEST_LOG = 10_000
"""Actions that are kept of an episode without a time limit: a longer one is not brought back."""


def names() -> list[str]:
    """The environments that are registered with Gymnasium."""
    return sorted(_gymnasium().registry)


def make(name: str, vectorization: str = "sync", autoreset: str = "seeded", **parameters: Any) -> "Gym":
    """An environment of Gymnasium's.

    Args:
        name: as `gymnasium.make` takes it, `module:Name` included.
        vectorization: `sync` steps one environment after the other, `async` each in its own process, `vector` uses the
            environment's own vectorised version.
        autoreset: `seeded`, or `same_step` or `next_step` for Gymnasium's own ways, which cannot be resumed exactly.
        parameters: of the environment.
    """
    for what, given, known in (
        ("vectorization", vectorization, VECTORIZATIONS),
        ("autoreset", autoreset, AUTORESETS),
    ):
        if given not in known:
            raise InputError(f"{what} is {given!r}; {closest(str(given), known)}")
    settings = tuple((key, _fixed(value)) for key, value in sorted(parameters.items()))
    _single(name, settings, 1, 1)  # to know now whether it can be made
    if vectorization == "vector" and _gymnasium().spec(name).vector_entry_point is None:
        raise InputError(f"gym:{name} has no vectorised version of its own: choose vectorization=sync or async.")
    return Gym(name, vectorization, autoreset, settings)


def _fixed(value: Any) -> Any:
    """A list as a tuple, so that it can be part of a name; a dict cannot."""
    if isinstance(value, dict):
        raise InputError(
            f"An environment's parameter is the dict {value}: register a variant that has it in Gymnasium."
        )
    return tuple(_fixed(item) for item in value) if isinstance(value, list | tuple) else value


def adapt(env: Any, **parameters: Any) -> HostEnvironment:
    """An environment, from which as many as needed are made by its `spec`, or a vector environment, used as it is."""
    gymnasium = _gymnasium()
    if isinstance(env, gymnasium.vector.VectorEnv):
        if parameters:
            raise InputError(
                f"The parameters {', '.join(parameters)} came with a vector environment that exists already: give them "
                "where it is made."
            )
        return GivenVector(env)
    if env.spec is None:
        raise InputError(
            f"{env!r} has no spec, so no more like it can be made: register it with gymnasium.register and give its "
            "name as 'gym:NAME', or give a gymnasium.vector.VectorEnv."
        )
    spec = env.spec
    if spec.additional_wrappers:
        wrappers = ", ".join(wrapper.name for wrapper in spec.additional_wrappers)
        raise InputError(
            f"{env!r} has wrappers of your own ({wrappers}): register a function that makes it with them by "
            "gymnasium.register and give its name as 'gym:NAME', or give a gymnasium.vector.VectorEnv."
        )
    changed = spec.max_episode_steps != gymnasium.spec(spec.id).max_episode_steps
    limit = {"max_episode_steps": spec.max_episode_steps} if changed else {}
    return make(spec.id, **{**spec.kwargs, **limit, **parameters})


@dataclass(frozen=True)
class Gym(HostEnvironment):
    """An environment of Gymnasium's by its name."""

    id: str
    vectorization: str = "sync"
    autoreset: str = "seeded"
    parameters: tuple[tuple[str, Any], ...] = ()
    action_repeat: int = 1
    frame_stack: int = 1

    @property
    def name(self) -> str:
        """`gym:` and the name in Gymnasium."""
        return f"gym:{self.id}"

    @property
    def env_steps_per_step(self) -> int:
        """How often each action is made."""
        return self.action_repeat

    @functools.cached_property
    def masks(self) -> bool:
        """Whether a step may be only a reset."""
        if self.vectorization == "vector":
            batch = self.start(1)
            batch.close()
            return isinstance(batch, SelfResetting) and batch.late
        return self.autoreset == "next_step"

    @functools.cached_property
    def observation_space(self) -> spaces.Space:
        """Gymnasium's, in 32 bits."""
        return lean(self._one.observation_space)

    @functools.cached_property
    def action_space(self) -> spaces.Space:
        """Gymnasium's."""
        return actions_of(self._one.action_space)

    @property
    def _one(self) -> Any:
        return _single(self.id, self.parameters, self.action_repeat, self.frame_stack)

    def with_wrappers(self, action_repeat: int, frame_stack: int) -> "Gym":
        """The same with each action held, and observations stacked along their last axis."""
        if self.vectorization == "vector":
            raise InputError(f"{self.name} with vectorization=vector takes neither action_repeat nor frame_stack.")
        wrapped = replace(self, action_repeat=action_repeat, frame_stack=frame_stack)
        try:
            _ = wrapped._one
        except ValueError as error:
            raise InputError(f"{self.name} cannot be wrapped: {error}.") from None
        return wrapped

    def start(self, num_envs: int, render: bool = False) -> HostBatch:
        """Make the environments."""
        gymnasium = _gymnasium()
        parameters = dict(self.parameters) | ({"render_mode": "rgb_array"} if render else {})
        if self.vectorization == "vector":
            made = gymnasium.make_vec(self.id, num_envs=num_envs, vectorization_mode="vector_entry_point", **parameters)
            return SelfResetting(made)
        from lehr.envs.host import worker

        functions = [
            functools.partial(
                worker.make_env, self.id, parameters, index, self.action_repeat, self.frame_stack, os.getpid()
            )
            for index in range(num_envs)
        ]
        modes = gymnasium.vector.AutoresetMode
        mode = {"seeded": modes.DISABLED, "same_step": modes.SAME_STEP, "next_step": modes.NEXT_STEP}[self.autoreset]
        if self.vectorization == "async":
            # A process that has used JAX must not be forked.
            made = gymnasium.vector.AsyncVectorEnv(functions, copy=False, context="forkserver", autoreset_mode=mode)
        else:
            made = gymnasium.vector.SyncVectorEnv(functions, copy=False, autoreset_mode=mode)
        if self.autoreset == "seeded":
            return Seeded(made, self.initial_state(np.zeros(num_envs, np.uint32)))
        return SelfResetting(made)

    def initial_state(self, seeds: np.ndarray) -> PyTree:
        """The seeds, and room for the actions of an episode."""
        if self.autoreset != "seeded" or self.vectorization == "vector":
            return ()
        limit = -(-(self._one.spec.max_episode_steps or LONGEST_LOG) // self.action_repeat)
        return Journal.blank(seeds, self.action_space, limit)


@dataclass(frozen=True, eq=False)
class GivenVector(HostEnvironment):
    """A vector environment that the user made."""

    env: Any

    @property
    def name(self) -> str:
        """Its class, or the name in Gymnasium."""
        spec = getattr(self.env, "spec", None)
        return type(self.env).__name__ if spec is None else f"gym:{spec.id}"

    @property
    def masks(self) -> bool:
        """Whether a step may be only a reset."""
        return SelfResetting(self.env).late

    @functools.cached_property
    def observation_space(self) -> spaces.Space:
        """Gymnasium's, in 32 bits."""
        return lean(self.env.single_observation_space)

    @functools.cached_property
    def action_space(self) -> spaces.Space:
        """Gymnasium's."""
        return actions_of(self.env.single_action_space)

    @property
    def fixed_size(self) -> int:
        """As many as the vector environment holds."""
        return self.env.num_envs

    def start(self, num_envs: int, render: bool = False) -> HostBatch:
        """The environments, which exist already, and which stay open for the user."""
        check_size(self, num_envs)
        return SelfResetting(self.env, stays_open=True)


class Seeded(HostBatch):
    """Environments whose episodes begin with seeds of ours, and which are brought back by their actions."""

    restores = True

    def __init__(self, envs: Any, state: dict[str, np.ndarray]) -> None:
        gymnasium = _gymnasium()
        self.envs, self.journal = envs, Journal(state)
        self.start = _first_action(envs.single_action_space)
        # What steps one environment after the other does so here without the detour, if it observes one array.
        is_sync = isinstance(envs, gymnasium.vector.SyncVectorEnv)
        self.singles = (
            envs.envs if is_sync and isinstance(envs.single_observation_space, gymnasium.spaces.Box) else None
        )

    def reset(self, seeds: np.ndarray) -> PyTree:
        """Begin an episode in each environment."""
        self.journal.begin(seeds)
        obs, _ = self.envs.reset(seed=self.journal.seeds.tolist())
        return obs

    def step(self, action: np.ndarray) -> HostStep:
        """Act, keep the actions, and begin the next episode where one is over."""
        # A copy, into which the environment may write: the journal keeps what it was given.
        obs, reward, terminated, truncated = self._answers(action + self.start)
        done = terminated | truncated
        self.journal.write(action, done)
        final_obs = obs
        if done.any():
            final_obs = _copied(obs)
            obs = self._begun(obs, done)
        return HostStep(obs, final_obs, reward, terminated, truncated)

    def _answers(self, action: np.ndarray) -> tuple[PyTree, np.ndarray, np.ndarray, np.ndarray]:
        if self.singles is None:
            obs, *others, _ = self.envs.step(action)
            reward, terminated, truncated = (part.copy() for part in others)  # it writes into the same arrays again
            return obs, reward, terminated, truncated
        answers = [env.step(one) for env, one in zip(self.singles, action, strict=True)]
        obs, reward, terminated, truncated, _ = zip(*answers, strict=True)
        return np.stack(obs), np.array(reward, float), np.array(terminated, bool), np.array(truncated, bool)

    def _begun(self, obs: PyTree, done: np.ndarray) -> PyTree:
        """The observations with those of new episodes where one is over."""
        seeds = self.journal.seeds.tolist()
        if self.singles is None:
            return self.envs.reset(seed=seeds, options={"reset_mask": done})[0]
        for index in np.flatnonzero(done):
            obs[index], _ = self.singles[index].reset(seed=seeds[index])
        return obs

    def state(self) -> PyTree:
        """The seeds of the episodes under way, and their actions so far."""
        return self.journal.state()

    def restore(self, state: PyTree) -> PyTree:
        """Live through the episodes again."""
        actions = self.journal.read(state)
        seeds, elapsed = self.journal.seeds, self.journal.elapsed
        self.envs.reset(seed=seeds.tolist())
        answers = self.envs.call("replay", seeds, elapsed, actions + self.start if self.start else actions)
        return _stacked(answers)

    def render(self) -> np.ndarray:
        """A picture of the first environment."""
        return np.asarray(self.envs.call("render")[0])

    def close(self) -> None:
        """End the environments, and their processes if they have any."""
        _close(self.envs)


class SelfResetting(HostBatch):
    """Environments that begin the next episode by themselves, in the step that ends one or in the one after."""

    def __init__(self, envs: Any, stays_open: bool = False) -> None:
        self.envs, self.size, self.stays_open = envs, envs.num_envs, stays_open
        modes = _gymnasium().vector.AutoresetMode
        mode = envs.metadata.get("autoreset_mode")
        if mode not in (modes.SAME_STEP, modes.NEXT_STEP):
            raise InputError(
                f"The metadata of the vector environment {type(envs).__name__} say autoreset_mode={mode!r}; it must be "
                "AutoresetMode.SAME_STEP or AutoresetMode.NEXT_STEP."
            )
        self.late = mode == modes.NEXT_STEP
        self.start = _first_action(envs.single_action_space)
        self.over = np.zeros(self.size, bool)

    def reset(self, seeds: np.ndarray) -> PyTree:
        """Begin an episode in each environment."""
        self.over = np.zeros(self.size, bool)
        vector = _gymnasium().vector
        each_its_own = isinstance(self.envs, vector.SyncVectorEnv | vector.AsyncVectorEnv)
        return self.envs.reset(seed=seeds.tolist() if each_its_own else int(seeds[0]))[0]

    def step(self, action: np.ndarray) -> HostStep:
        """Act; after an end, the step of an environment that resets late is only its reset."""
        obs, reward, terminated, truncated, info = self.envs.step(action + self.start if self.start else action)
        if not self.late:
            done = np.logical_or(terminated, truncated)
            final_obs = _with_final(obs, info, done) if done.any() else obs
            return HostStep(obs, final_obs, np.array(reward), np.array(terminated), np.array(truncated))
        over, self.over = self.over, np.logical_or(terminated, truncated) & ~self.over
        return late_reset(over, obs, reward, terminated, truncated)

    def render(self) -> np.ndarray:
        """A picture of the first environment."""
        frames = self.envs.render()
        if frames is None:
            raise InputError("This environment draws no pictures.")
        return np.asarray(frames[0])

    def close(self) -> None:
        """End the environments, and their processes if they have any, unless they are the user's."""
        if not self.stays_open:
            _close(self.envs)


def lean(space: Any) -> spaces.Space:
    """A space of Gymnasium's as the network sees it: numbers of 64 bits in 32."""
    return _lean(spaces.from_gymnasium(space))


def _lean(space: spaces.Space) -> spaces.Space:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _lean(inner) for name, inner in space.spaces.items()})
    if isinstance(space, spaces.Box) and space.dtype.itemsize == 8:
        kind: Any = np.float32
        low, high = space.low, space.high
        if space.dtype.kind != "f":
            limits = np.iinfo(np.int32)
            kind, low, high = np.int32, *(np.clip(bound, limits.min, limits.max) for bound in (low, high))
        with np.errstate(over="ignore"):  # a bound beyond float32 is infinite there
            return spaces.Box(low.astype(kind), high.astype(kind), space.shape, np.dtype(kind))
    return space


def actions_of(space: Any) -> spaces.Space:
    """The action space, counted from 0."""
    if type(space).__name__ == "Discrete":
        return spaces.Discrete(int(space.n))
    found = lean(space)
    if isinstance(found, spaces.Dict):
        raise InputError(f"The action space {space} is a dict: wrap the environment so that it takes one array.")
    return found


def _first_action(space: Any) -> int:
    """The number of the first action, from which Gymnasium counts."""
    return int(space.start) if type(space).__name__ == "Discrete" else 0


def _close(envs: Any) -> None:
    """Close, also where a process is gone already: what ended it is the error to hear of."""
    try:
        envs.close()
    except (OSError, EOFError):
        for process in getattr(envs, "processes", ()):
            process.terminate()
        envs.closed = True


def _gymnasium() -> Any:
    return require("gymnasium", extra="gym")


@functools.lru_cache(maxsize=8)
def _single(name: str, parameters: tuple[tuple[str, Any], ...], action_repeat: int, frame_stack: int) -> Any:
    """One environment, to look at its spaces."""
    gymnasium = _gymnasium()
    from lehr.envs.host import worker

    try:
        return worker.make_env(name, dict(parameters), 0, action_repeat, frame_stack, os.getpid())
    except gymnasium.error.NameNotFound:
        raise InputError(f"Gymnasium has no environment {name!r}; {closest(name, names())}") from None
    except gymnasium.error.Error as error:
        raise InputError(f"Gymnasium does not make {name!r}: {str(error).splitlines()[0]}") from None
    except TypeError as error:
        raise InputError(f"gym:{name} cannot be made like this: {error}.") from None
    except ImportError as error:
        raise InputError(f"gym:{name} needs a package that is not installed: {error}.") from None


def _copied(obs: PyTree) -> PyTree:
    if isinstance(obs, dict):
        return {name: _copied(part) for name, part in obs.items()}
    return np.array(obs)


def _stacked(observations: Sequence[PyTree]) -> PyTree:
    """Observations of single environments as one batch."""
    if isinstance(observations[0], dict):
        return {name: _stacked([obs[name] for obs in observations]) for name in observations[0]}
    return np.stack([np.asarray(obs) for obs in observations])


def _with_final(obs: PyTree, info: dict[str, Any], done: np.ndarray) -> PyTree:
    """The observations before the resets, which Gymnasium puts into `info`."""
    if "final_obs" not in info:
        raise KeyError("info['final_obs'], which an environment that resets in the same step must give")
    final, copied = info["final_obs"], _copied(obs)

    def put(into: PyTree, index: int, value: PyTree) -> None:
        if isinstance(into, dict):
            for name, part in into.items():
                put(part, index, value[name])
        else:
            into[index] = value

    for index in np.flatnonzero(done):
        put(copied, int(index), {k: v[index] for k, v in final.items()} if isinstance(final, dict) else final[index])
    return copied
