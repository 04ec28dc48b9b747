"""Brax's environments, `brax:NAME`: rigid bodies on four physics backends.

Actions are in [-1, 1], as in Brax's own training; the environments scale them to their actuators. Rewards and
observations are Brax's. Brax's training wrappers are not used: Lehr handles time limits, batches and resets.
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
from lehr.envs.suites.foreign import FromSource, by_their_rules, hashable
from lehr.envs.suites.lean_step import LeanStep, lean_step
from lehr.envs.suites.mujoco_scene import Pose, Scene
from lehr.envs.wrappers import ActionRepeat, TimeLimit
from lehr.errors import InputError, closest
from lehr.plugins import require
from lehr.spaces import Box, Dict, Space
from lehr.types import Key, PyTree, Timestep

BACKENDS = ("generalized", "positional", "spring", "mjx")
"""Brax's physics backends, values of the parameter `backend`; the default depends on the task."""

EPISODE_LENGTH = 1000
"""The default of the parameter `episode_length`: episodes are truncated after this many steps."""

_OURS = {"episode_length": EPISODE_LENGTH, "action_repeat": 1}


def names() -> list[str]:
    """Return the names that can follow the prefix `brax:`."""
    return sorted(_brax()._envs)


def make(name: str, **parameters: Any) -> Environment:
    """Create a Brax environment by name.

    Args:
        name: one of `names()`.
        parameters: `episode_length`, the time limit in steps of the task, `None` for no limit; `action_repeat`; and
            the arguments of the environment's class, such as `backend`.
    """
    known = names()
    if name not in known:
        raise InputError(f"There is no environment named 'brax:{name}'; {closest(name, known, 'brax:')}")
    of_class = {key: hashable(f"brax:{name}", key, value) for key, value in parameters.items() if key not in _OURS}
    _check_arguments(name, of_class)
    return _limited(Brax(name, tuple(sorted(of_class.items()))), parameters)


def adapt(env: Any, **parameters: Any) -> Environment:
    """Adapt a Brax environment object; `episode_length` and `action_repeat` are as in `make`.

    An environment in Brax's `EpisodeWrapper` keeps that wrapper's episode length and action repeat.
    """
    unknown = [key for key in parameters if key not in _OURS]
    if unknown:
        raise InputError(
            f"{type(env).__name__} is an existing object, so the parameter {unknown[0]!r} cannot be set; "
            f"{closest(unknown[0], _OURS)}"
        )
    training = _brax().training
    for layer in _layers(env):
        if type(layer).__module__ == training.__name__ and not isinstance(layer, training.EpisodeWrapper):
            raise InputError(
                f"Brax's {type(layer).__name__} batches, resets or evaluates, which Lehr does itself: give the "
                "environment that it wraps."
            )
    made = Brax(env)
    if not made.task.counts_episode:
        return _limited(made, parameters)
    if parameters:
        raise InputError(
            "Brax's EpisodeWrapper already sets the episode length and the action repeat: remove "
            f"{', '.join(parameters)}, or give the environment that it wraps."
        )
    return made


def _limited(env: "Brax", parameters: dict[str, Any]) -> Environment:
    """Apply the time limit and the action repeat."""
    settings = _OURS | parameters
    _ = env.task
    limit, repeat = settings["episode_length"], settings["action_repeat"]
    limited = env if limit is None else TimeLimit(env, limit)
    return limited if repeat == 1 else ActionRepeat(limited, repeat)


@dataclass(frozen=True)
class Brax(FromSource):
    """A Brax environment. `info` is empty.

    The state is a tuple with the arrays of Brax's `State` that a step reads. What every step recomputes, such as the
    observation, the metrics and most of the world frame, is left out.
    """

    environments_per_reset: ClassVar[int] = 16

    @property
    def env_steps_per_step(self) -> int:
        """1, except for objects in Brax's `EpisodeWrapper` with an action repeat."""
        return self.task.env_steps_per_step

    @property
    def task(self) -> "_Task":
        """Brax's environment, with unbounded observations and actions from -1 to 1."""
        return _task(self.source, self.parameters)

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Start an episode."""
        with by_their_rules():
            state = self.task.env.reset(key)
        return self.task.physics.kept(state), _observation(state.obs)

    def step(self, key: Key, state: PyTree, action: PyTree) -> tuple[PyTree, Timestep]:
        """Take one step; the key is not used, since Brax keeps its own in the state."""
        with by_their_rules():
            state, (obs, reward, done, truncated) = self.task.physics.step(state, action)
        done, truncated = jnp.asarray(done, bool), jnp.asarray(truncated, bool)
        reward = jnp.asarray(reward, jnp.float32)
        return state, Timestep(_observation(obs), reward, done & ~truncated, truncated, {})

    @property
    def scene(self) -> Scene | None:
        """What there is to see; `None` if a state does not tell where the bodies are."""
        env = self.task.env.unwrapped
        if "q" not in _positions(self.task) or getattr(getattr(env, "sys", None), "mj_model", None) is None:
            return None
        return _scene(env)

    def pose(self, state: PyTree) -> Pose:
        """Where the bodies are."""
        found = self.task.physics.whole(state).pipeline_state
        moved = {name: getattr(found, name) for name in _positions(self.task) if name != "q"}
        return Pose(found.q, **moved)


def _positions(task: "_Task") -> list[str]:
    """Which of the fields that place the bodies a step keeps."""
    return [name for name in ("q", "mocap_pos", "mocap_quat") if f".pipeline_state.{name}" in task.physics.names]


@functools.cache
def _scene(env: Any) -> Scene:
    return Scene(env.sys.mj_model, float(env.dt))


class _Task(NamedTuple):
    """Everything that is created once per source and parameters."""

    env: Any
    observation_space: Space
    action_space: Box
    env_steps_per_step: int
    truncation_gap: int
    counts_episode: bool
    """Whether it is in Brax's `EpisodeWrapper`, which reports truncation in `info`."""
    physics: LeanStep
    """Its step, on the part of Brax's `State` that a step reads; returns (observation, reward, done, truncated)."""


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
                f"{described} could not be created with the installed versions of brax and jax "
                f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''})."
            ) from error
    repeat = episodes[0].action_repeat if episodes else 1
    return _Task(
        env=env,
        observation_space=_space(begun.obs),
        action_space=Box(-1, 1, (action_size,)),
        env_steps_per_step=repeat,
        truncation_gap=max(1, episodes[0].episode_length // repeat) if episodes else NEVER,
        counts_episode=bool(episodes),
        physics=physics,
    )


def _build(source: Any, parameters: tuple[tuple[str, Any], ...]) -> Any:
    """Create the Brax environment, or return it if it is an object."""
    if not isinstance(source, str):
        return source
    # The first call may come from a traced function, but the arrays of the environment must not be tracers.
    with jax.ensure_compile_time_eval(), _quiet_mujoco():
        return _brax().get_environment(source, **dict(parameters))


def _seen(counts_episode: bool, state: Any) -> tuple[PyTree, jax.Array, jax.Array, jax.Array]:
    """Return the observation, the reward, whether the episode is done, and whether it was truncated."""
    truncated = state.info["truncation"] if counts_episode else jnp.zeros_like(state.done)
    return state.obs, state.reward, state.done, truncated


def _layers(env: Any) -> Iterator[Any]:
    """Yield an environment and all that it wraps, from the outside in."""
    wrapper = _brax().Wrapper
    while isinstance(env, wrapper):
        yield env
        env = env.env
    yield env


def _check_arguments(name: str, given: dict[str, Any]) -> None:
    """Raise an error for arguments that the class does not take."""
    maker, pipeline = _brax()._envs[name], _brax().PipelineEnv
    arguments = inspect.signature(maker).parameters.values()
    known = {argument.name for argument in arguments if argument.kind is not argument.VAR_KEYWORD}
    accepts_any = len(known) < len(arguments)
    if accepts_any and inspect.isclass(maker) and issubclass(maker, pipeline):
        known |= set(inspect.signature(pipeline).parameters) - {"sys"}
        accepts_any = False
    for key in given:
        if key not in known and not accepts_any:
            raise InputError(f"brax:{name} has no parameter {key!r}; {closest(key, sorted(known | set(_OURS)))}")
    backend = given.get("backend", BACKENDS[0])
    if backend not in BACKENDS:
        raise InputError(f"brax:{name} has no backend {backend!r}; {closest(str(backend), BACKENDS)}")


def _space(obs: PyTree) -> Space:
    """Build the space of an observation: unbounded boxes for arrays, dicts for mappings."""
    if isinstance(obs, Mapping):
        return Dict({name: _space(part) for name, part in obs.items()})
    return Box(-np.inf, np.inf, obs.shape)


def _observation(obs: PyTree) -> PyTree:
    """Convert an observation to float32 arrays in plain dicts."""
    if isinstance(obs, Mapping):
        return {name: _observation(part) for name, part in obs.items()}
    return jnp.asarray(obs, jnp.float32)


@contextlib.contextmanager
def _quiet_mujoco() -> Iterator[None]:
    """Silence MuJoCo's warnings about a model, which it also writes to a file in the working directory."""
    mujoco = require("mujoco", extra="brax")
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda text: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


@functools.cache
def _brax() -> ModuleType:
    with contextlib.redirect_stdout(io.StringIO()):  # MJX prints that Warp is not installed
        return require("brax.envs", extra="brax")
