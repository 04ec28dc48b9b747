"""Brax's environments, `brax:NAME`: rigid bodies on four physics backends.

Actions are in [-1, 1], as Brax's own training gives them; an environment scales them to its actuators by itself.
Rewards and observations are Brax's. Its training wrappers are not used: time limits, batches and resets are Lehr's.
"""

import contextlib
import functools
import inspect
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr.envs.base import NEVER, Environment
from lehr.envs.suites.foreign import by_their_rules, hashable
from lehr.envs.suites.lean_step import LeanStep, lean_step
from lehr.envs.wrappers import ActionRepeat, TimeLimit
from lehr.errors import InputError, closest
from lehr.plugins import require
from lehr.spaces import Box, Dict, Space
from lehr.types import Key, PyTree, Timestep

BACKENDS = ("generalized", "positional", "spring", "mjx")
"""The ways in which Brax computes physics, the parameter `backend`; each task has a default of its own."""

EPISODE_LENGTH = 1000
"""Steps after which an episode is truncated, unless the parameter `episode_length` says otherwise."""

_OURS = {"episode_length": EPISODE_LENGTH, "action_repeat": 1}


def names() -> list[str]:
    """What can follow the prefix `brax:`."""
    return sorted(_brax()._envs)


def make(name: str, **parameters: Any) -> Environment:
    """An environment by its name at Brax.

    Args:
        name: one of `names()`.
        parameters: `episode_length`, the time limit in steps of the task, `None` for none; `action_repeat`; and the
            arguments of the environment's class, such as `backend`.
    """
    known = names()
    if name not in known:
        raise InputError(f"There is no environment named 'brax:{name}'; {closest(name, known)}")
    of_class = {key: hashable(f"brax:{name}", key, value) for key, value in parameters.items() if key not in _OURS}
    _check_arguments(name, of_class)
    return _limited(Brax(name, tuple(sorted(of_class.items()))), parameters)


def adapt(env: Any, **parameters: Any) -> Environment:
    """An environment object of Brax's, with `episode_length` and `action_repeat` as for `make`.

    One in Brax's `EpisodeWrapper` keeps that wrapper's episode length and action repeat.
    """
    unknown = [key for key in parameters if key not in _OURS]
    if unknown:
        raise InputError(
            f"{type(env).__name__} exists already and takes no parameter {unknown[0]!r}; {closest(unknown[0], _OURS)}"
        )
    training = _brax().training
    for layer in _layers(env):
        if type(layer).__module__ == training.__name__ and not isinstance(layer, training.EpisodeWrapper):
            raise InputError(
                f"Brax's {type(layer).__name__} batches, resets or evaluates, which Lehr does by itself: give the "
                "environment inside it."
            )
    made = Brax(env)
    if not made._task.counts_episode:
        return _limited(made, parameters)
    if parameters:
        raise InputError(
            f"{', '.join(parameters)} came with an environment in Brax's EpisodeWrapper, which sets both already: give "
            "the environment inside it, or leave them out."
        )
    return made


def _limited(env: "Brax", parameters: dict[str, Any]) -> Environment:
    """The environment with its time limit and its action repeat."""
    settings = _OURS | parameters
    _ = env._task
    limit, repeat = settings["episode_length"], settings["action_repeat"]
    limited = env if limit is None else TimeLimit(env, limit)
    return limited if repeat == 1 else ActionRepeat(limited, repeat)


@dataclass(frozen=True)
class Brax(Environment):
    """One environment of Brax's. `info` stays empty.

    The state is what a step reads of Brax's `State`, a tuple of arrays: what a step computes anew, such as the
    observation, the metrics and most of the world frame, is left out.
    """

    environments_per_reset: ClassVar[int] = 16

    source: Any
    """The name at Brax, or an environment object of Brax's."""
    parameters: tuple[tuple[str, Any], ...] = ()
    """Arguments of the environment's class, sorted by name."""

    @property
    def observation_space(self) -> Space:
        """Unbounded boxes."""
        return self._task.observation_space

    @property
    def action_space(self) -> Box:
        """From -1 to 1."""
        return Box(-1, 1, (self._task.action_size,))

    @property
    def env_steps_per_step(self) -> int:
        """More than 1 only for an environment object in Brax's `EpisodeWrapper` with an action repeat."""
        return self._task.env_steps_per_step

    @property
    def truncation_gap(self) -> int:
        """Never, but for an environment object in Brax's `EpisodeWrapper`."""
        return self._task.truncation_gap

    @property
    def _task(self) -> "_Task":
        return _task(self.source, self.parameters)

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Begin an episode."""
        task = self._task
        with by_their_rules():
            state = task.env.reset(key)
        return task.physics.kept(state), _observation(state.obs)

    def step(self, key: Key, state: PyTree, action: PyTree) -> tuple[PyTree, Timestep]:
        """Act once; the key is not used, since Brax keeps its randomness in the state."""
        with by_their_rules():
            state, (obs, reward, done, truncated) = self._task.physics.step(state, action)
        done, truncated = jnp.asarray(done, bool), jnp.asarray(truncated, bool)
        reward = jnp.asarray(reward, jnp.float32)
        return state, Timestep(_observation(obs), reward, done & ~truncated, truncated, {})


class _Task(NamedTuple):
    """What is made once for a source and its parameters."""

    env: Any
    observation_space: Space
    action_size: int
    env_steps_per_step: int
    truncation_gap: int
    counts_episode: bool
    """Whether Brax's `EpisodeWrapper` is around it, which says in `info` what was truncated."""
    physics: LeanStep
    """Its step, on what a step reads of Brax's `State`; it sees (observation, reward, done, truncated)."""


@functools.cache
def _task(source: Any, parameters: tuple[tuple[str, Any], ...]) -> _Task:
    with by_their_rules():
        try:
            env = _build(source, parameters)
            action_size = int(env.action_size)
            begun = jax.eval_shape(env.reset, jax.random.key(0))
            action = jax.ShapeDtypeStruct((action_size,), jnp.float32)
            episodes = [layer for layer in _layers(env) if isinstance(layer, _brax().training.EpisodeWrapper)]
            seen = functools.partial(_seen, bool(episodes))
            physics = lean_step(f"Brax's {type(env.unwrapped).__name__}", env.step, begun, action, seen)
        except InputError:
            raise
        except Exception as error:
            described = f"brax:{source}" if isinstance(source, str) else type(source).__name__
            raise InputError(
                f"{described} could not be made with these versions of brax and jax ({type(error).__name__}: "
                f"{str(error).strip().splitlines()[0] if str(error).strip() else ''})."
            ) from error
    repeat = episodes[0].action_repeat if episodes else 1
    return _Task(
        env=env,
        observation_space=_space(begun.obs),
        action_size=action_size,
        env_steps_per_step=repeat,
        truncation_gap=max(1, episodes[0].episode_length // repeat) if episodes else NEVER,
        counts_episode=bool(episodes),
        physics=physics,
    )


def _build(source: Any, parameters: tuple[tuple[str, Any], ...]) -> Any:
    """Brax's environment."""
    if not isinstance(source, str):
        return source
    # Made for good even if a traced function asks first: the arrays inside must not belong to its trace.
    with jax.ensure_compile_time_eval(), _quiet_mujoco():
        return _brax().get_environment(source, **dict(parameters))


def _seen(counts_episode: bool, state: Any) -> tuple[PyTree, jax.Array, jax.Array, jax.Array]:
    """The observation, the reward, whether the episode is done, and whether a time limit did it."""
    truncated = state.info["truncation"] if counts_episode else jnp.zeros_like(state.done)
    return state.obs, state.reward, state.done, truncated


def _layers(env: Any) -> Iterator[Any]:
    """An environment and all inside it, from the outside."""
    wrapper = _brax().Wrapper
    while isinstance(env, wrapper):
        yield env
        env = env.env
    yield env


def _check_arguments(name: str, given: dict[str, Any]) -> None:
    """Say which argument the class does not take, before it is made."""
    maker, pipeline = _brax()._envs[name], _brax().PipelineEnv
    arguments = inspect.signature(maker).parameters.values()
    known = {argument.name for argument in arguments if argument.kind is not argument.VAR_KEYWORD}
    passes_on = len(known) < len(arguments)
    if passes_on and inspect.isclass(maker) and issubclass(maker, pipeline):
        known |= set(inspect.signature(pipeline).parameters) - {"sys"}
        passes_on = False
    for key in given:
        if key not in known and not passes_on:
            raise InputError(f"brax:{name} has no parameter {key!r}; {closest(key, sorted(known | set(_OURS)))}")
    backend = given.get("backend", BACKENDS[0])
    if backend not in BACKENDS:
        raise InputError(f"brax:{name} has no backend {backend!r}; {closest(str(backend), BACKENDS)}")


def _space(obs: PyTree) -> Space:
    """Boxes without bounds for arrays, dicts for mappings."""
    if isinstance(obs, Mapping):
        return Dict({name: _space(part) for name, part in obs.items()})
    return Box(-np.inf, np.inf, obs.shape)


def _observation(obs: PyTree) -> PyTree:
    """Arrays of float32, in plain dicts."""
    if isinstance(obs, Mapping):
        return {name: _observation(part) for name, part in obs.items()}
    return jnp.asarray(obs, jnp.float32)


@contextlib.contextmanager
def _quiet_mujoco() -> Iterator[None]:
    """MuJoCo prints what it thinks of a model, and writes it to a file in the working directory."""
    mujoco = require("mujoco", extra="brax")
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda text: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


@functools.cache
def _brax() -> ModuleType:
    with contextlib.redirect_stdout(io.StringIO()):  # MJX prints that it does without Warp
        return require("brax.envs", extra="brax")
