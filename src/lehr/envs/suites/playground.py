"""MuJoCo Playground: `make("playground:CartpoleBalance")`.

Parameters are entries of the task's configuration, with dots for nested entries: `make("playground:CartpoleBalance",
ctrl_dt=0.02, **{"vision_config.nworld": 64})`. Lehr applies two of them itself: `episode_length`, in steps of the task,
becomes a `TimeLimit`, and `action_repeat` an `ActionRepeat`. `impl` defaults to "jax", which runs on every device;
Playground's own default, "warp", needs an NVIDIA GPU.

The DeepMind Control suite comes with the package. The locomotion and manipulation tasks need the robot models of MuJoCo
Menagerie, which Playground downloads on first use; Lehr never starts that download, but tells the user how to.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from lehr.envs.base import NEVER, Environment
from lehr.envs.suites.foreign import by_their_rules, hashable, settled
from lehr.envs.suites.mujoco_scene import Pose, Scene
from lehr.envs.wrappers import ActionRepeat, TimeLimit
from lehr.errors import InputError, closest
from lehr.plugins import require
from lehr.spaces import Box, Dict, Space
from lehr.types import Key, PyTree, Timestep


@dataclass(frozen=True)
class Playground(Environment):
    """A Playground task. Two are equal if they hold the same instance; `make` caches instances.

    The observation is Playground's, a vector or a `Dict` with entries such as `state` and `privileged_state`. The
    action is in [-1, 1]. `done` is a termination. If the simulation diverged, non-finite values in the last observation
    and reward become 0. The metrics of the task are in `info`. The state is Playground's `State`.
    """

    truncation_gap: ClassVar[int] = NEVER
    environments_per_reset: ClassVar[int] = 16
    env: Any = field(repr=False)
    name: str = field(compare=False)
    observation_space: Space = field(compare=False, repr=False)
    action_space: Box = field(compare=False, repr=False)

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Start an episode."""
        with by_their_rules():
            state = settled(self.env.reset(key))
        return state, _plain(state.obs)

    def step(self, key: Key, state: PyTree, action: jax.Array) -> tuple[PyTree, Timestep]:
        """Take one step; the key is not used, since Playground keeps its own in the state."""
        state = jax.tree.map(lambda x: x, state)  # tasks modify the dicts of the state they are given
        with by_their_rules():
            state = settled(self.env.step(state, action))
        done = state.done > 0.5
        obs, reward = jax.tree.map(
            lambda x: jnp.where(done & ~jnp.isfinite(x), 0, x) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            (_plain(state.obs), state.reward.astype(jnp.float32)),
        )
        return state, Timestep(obs, reward, done, jnp.zeros_like(done), dict(state.metrics))

    @property
    def scene(self) -> Scene:
        """What there is to see."""
        return _scene(self.env)

    def pose(self, state: PyTree) -> Pose:
        """Where the bodies are."""
        return Pose(state.data.qpos, state.data.mocap_pos, state.data.mocap_quat)


@functools.cache
def _scene(env: Any) -> Scene:
    return Scene(env.mj_model, float(env.dt))


def names() -> list[str]:
    """Return the names of all tasks, including those that need a download."""
    return sorted(_playground().registry.ALL_ENVS)


def make(name: str, **parameters: Any) -> Environment:
    """Create a task by name, with its standard action repeat and time limit.

    >>> make("CartpoleBalance", episode_length=250)  # doctest: +SKIP
    TimeLimit(env=Playground(name='CartpoleBalance'), max_steps=250)
    """
    if name not in names():
        raise InputError(f"Playground has no environment {name!r}; {closest(name, names(), 'playground:')}")
    playground = _playground()
    if name not in playground.dm_control_suite.ALL_ENVS and not _menagerie_path().exists():
        raise InputError(
            f"playground:{name} needs the robot models of MuJoCo Menagerie, which have not been downloaded: run "
            f"python -c \"from mujoco_playground import registry; registry.load('{name}')\" once with internet access."
        )
    config = playground.registry.get_default_config(name)
    known = dict(_entries(config))
    for parameter in parameters:
        if parameter not in known:
            raise InputError(f"playground:{name} has no parameter {parameter!r}; {closest(parameter, known)}")
    if "impl" in known:
        parameters = {"impl": "jax", **parameters}
    if parameters.get("impl") == "warp":
        require("warp", extra="playground")
    limits = {limit: parameters.pop(limit, known.get(limit)) for limit in ("episode_length", "action_repeat")}
    overrides = tuple(sorted((key, hashable(f"playground:{name}", key, value)) for key, value in parameters.items()))
    return adapt(_load(name, overrides), name=name, **limits)


def adapt(
    env: Any, episode_length: int | None = None, action_repeat: int | None = None, name: str | None = None
) -> Environment:
    """Adapt a Playground environment, an `MjxEnv`; the defaults are those of its configuration."""
    wrapper = _playground().wrapper
    if isinstance(env, wrapper.BraxAutoResetWrapper | wrapper.BraxDomainRandomizationVmapWrapper):
        raise InputError(
            f"{type(env).__name__} resets or batches, which Lehr does itself: give the wrapped environment, "
            "env.unwrapped."
        )
    config = getattr(env, "_config", {})
    episode_length = config.get("episode_length") if episode_length is None else episode_length
    action_repeat = config.get("action_repeat", 1) if action_repeat is None else action_repeat
    space = _observation_space(env)
    made: Environment = Playground(env, name or type(env).__name__, space, Box(-1, 1, (env.action_size,)))
    if action_repeat != 1:
        made = ActionRepeat(made, action_repeat)
    # The length is in steps of the task; as in Playground, the last action may be repeated beyond it.
    return made if episode_length is None else TimeLimit(made, -(-episode_length // made.env_steps_per_step))


def _playground() -> ModuleType:
    return require("mujoco_playground", extra="playground")


def _menagerie_path() -> Any:
    return require("mujoco_playground._src.mjx_env", extra="playground").MENAGERIE_PATH


@functools.cache
def _load(name: str, overrides: tuple[tuple[str, Any], ...]) -> Any:
    """Create one instance per name and configuration, so that equal environments share compiled programs."""
    try:
        with by_their_rules():
            return _playground().registry.load(name, config_overrides=dict(overrides))
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in overrides)
        raise InputError(f"playground:{name} cannot be created with {given}: {error}") from error
    except AttributeError as error:
        version = require("mujoco", extra="playground").__version__
        raise InputError(
            f"playground:{name} does not work with the installed mujoco {version} ({error}): choose another task, or "
            "install other versions of mujoco, mujoco-mjx and playground."
        ) from error


@functools.cache
def _observation_space(env: Any) -> Space:
    """Return the space of the observations, found by tracing a reset."""

    def space(obs: Any) -> Space:
        if isinstance(obs, Mapping):
            return Dict({key: space(part) for key, part in obs.items()})
        if np.issubdtype(obs.dtype, np.integer):
            limits = np.iinfo(obs.dtype)
            return Box(limits.min, limits.max, obs.shape, obs.dtype)
        return Box(-np.inf, np.inf, obs.shape, obs.dtype)

    with by_their_rules():
        return space(jax.eval_shape(lambda key: env.reset(key).obs, jax.random.key(0)))


def _plain(obs: PyTree) -> PyTree:
    """Convert the mappings of an observation to plain dicts."""
    return {key: _plain(part) for key, part in obs.items()} if isinstance(obs, Mapping) else obs


def _entries(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of a nested configuration, with dots in their names."""
    for key, value in config.items():
        if isinstance(value, Mapping) or hasattr(value, "items"):
            yield from _entries(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
