"""EnvPool's environments, `envpool:NAME`: a pool steps its environments in C++ threads, with one call.

A pool takes its seeds when it is created, so it is created by the first reset. The step after the end of an episode is
only the reset: its action is ignored, and the step is invalid. A pool cannot be restored after a stop: its
environments start new episodes.

EnvPool detects time limits by the step count alone: an episode that terminates exactly at its limit counts as
truncated.
"""

import functools
import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lehr import spaces
from lehr.envs.host.base import HostBatch, HostEnvironment, HostStep, check_size, late_reset
from lehr.envs.host.gym_spaces import actions_of, as_32_bit
from lehr.errors import InputError, closest
from lehr.plugins import require
from lehr.types import PyTree

OURS = {
    "num_envs": "set num_envs of the run instead",
    "seed": "it is derived from the seed of the run",
    "env_seed": "it is derived from the seed of the run",
    "batch_size": "all environments must step together",
    "env_type": "it is always gymnasium",
}
"""Parameters of `envpool.make` that the user cannot set, and why."""


def names() -> list[str]:
    """Return the names of EnvPool's environments."""
    return sorted(_envpool().list_all_envs())


def make(name: str, **parameters: Any) -> "EnvPool":
    """Create an EnvPool environment.

    Args:
        name: the task ID that `envpool.make` takes.
        parameters: arguments of `envpool.make`, such as `num_threads`, `max_episode_steps` or `stack_num`.
    """
    for parameter, reason in OURS.items():
        if parameter in parameters:
            raise InputError(f"envpool:{name} does not take the parameter {parameter}: {reason}.")
    if name not in (known := names()):
        hint = closest(name, known, "envpool:")
        if hint.startswith("known"):  # too many to list
            hint = f"call envpool.list_all_envs() to list all {len(known)}."
        raise InputError(f"EnvPool has no environment {name!r}; {hint}")
    env = EnvPool(name, tuple(sorted(parameters.items())))
    _check_players(env.name, env.spec)  # raises an error now if it cannot be created
    return env


def adapt(env: Any, **parameters: Any) -> "GivenPool":
    """Use an existing pool."""
    if parameters:
        raise InputError(
            f"Got an existing pool together with the parameters {', '.join(parameters)}: pass them to envpool.make."
        )
    if not isinstance(env, require("gymnasium", extra="envpool").Env):
        raise InputError(f"{type(env).__name__} does not follow Gymnasium's API: create it with env_type='gymnasium'.")
    if env.is_async:
        raise InputError(
            f"{type(env).__name__} steps {env.config['batch_size']} of its {len(env)} environments at a time, but "
            "all must step together: remove batch_size."
        )
    _check_players(type(env).__name__, env.spec)
    return GivenPool(env)


class Pooled(HostEnvironment):
    """Base class of pools created by name and of existing pools."""

    masks = True

    @property
    @abstractmethod
    def spec(self) -> Any:
        """EnvPool's description of the environment."""

    @functools.cached_property
    def raw_observation_space(self) -> spaces.Space:
        """EnvPool's space, with 64-bit numbers in 32 bits."""
        return _quietly(lambda: as_32_bit(self.spec.gymnasium_observation_space))

    @functools.cached_property
    def observation_space(self) -> spaces.Space:
        """EnvPool's space, with 64-bit numbers in 32 bits and the channels of images last."""
        return _channels_last_space(self.raw_observation_space)

    @functools.cached_property
    def action_space(self) -> spaces.Space:
        """EnvPool's action space."""
        return _quietly(lambda: actions_of(self.spec.gymnasium_action_space))

    def _batch(self, make_pool: Callable[[np.ndarray], Any], size: int) -> "PoolBatch":
        return PoolBatch(make_pool, size, self.raw_observation_space)


@dataclass(frozen=True)
class EnvPool(Pooled):
    """An EnvPool environment, created by name."""

    id: str
    parameters: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """`envpool:` and EnvPool's task ID."""
        return f"envpool:{self.id}"

    @functools.cached_property
    def spec(self) -> Any:
        """EnvPool's description, available without a pool."""
        return _call(self.id, lambda: _envpool().make_spec(self.id, **dict(self.parameters)))

    def start(self, num_envs: int, render: bool = False) -> "PoolBatch":
        """Return a batch whose pool is created at the first reset, with its seeds."""
        settings = dict(self.parameters) | ({"render_mode": "rgb_array"} if render else {})

        def make_pool(seeds: np.ndarray) -> Any:
            # EnvPool takes signed seeds.
            seed = (seeds & 0x7FFFFFFF).tolist()
            return _envpool().make(self.id, env_type="gymnasium", num_envs=num_envs, seed=seed, **settings)

        return self._batch(make_pool, num_envs)


@dataclass(frozen=True, eq=False)
class GivenPool(Pooled):
    """A pool that the user created, with the user's seeds."""

    env: Any

    @property
    def name(self) -> str:
        """The name of its class."""
        return type(self.env).__name__

    @property
    def spec(self) -> Any:
        """EnvPool's description of the pool."""
        return self.env.spec

    @property
    def fixed_size(self) -> int:
        """The number of environments in the pool."""
        return len(self.env)

    def start(self, num_envs: int, render: bool = False) -> "PoolBatch":
        """Return a batch that uses the existing pool."""
        check_size(self, num_envs)
        return self._batch(lambda seeds: self.env, num_envs)


class PoolBatch(HostBatch):
    """Environments that step together and reset in the step after the end of an episode."""

    def __init__(self, make_pool: Callable[[np.ndarray], Any], size: int, space: spaces.Space) -> None:
        self.make_pool, self.size, self.space = make_pool, size, space
        self.pool: Any = None
        self.over = np.zeros(size, bool)

    def reset(self, seeds: np.ndarray) -> PyTree:
        """Start an episode in each environment."""
        self.pool, self.over = self.make_pool(seeds), np.zeros(self.size, bool)
        obs, _ = _quietly(self.pool.reset)
        return _channels_last(self.space, obs)

    def step(self, action: np.ndarray) -> HostStep:
        """Take one step; after the end of an episode it is only a reset, and EnvPool's reward for it is ignored."""
        obs, reward, terminated, truncated, _ = self.pool.step(action)
        obs = _channels_last(self.space, obs)
        was_over = self.over
        self.over = (terminated | truncated) & ~was_over
        return late_reset(was_over, obs, reward, terminated, truncated)

    def render(self) -> np.ndarray:
        """Render the first environment."""
        try:
            return np.asarray(self.pool.render()[0])
        except RuntimeError as error:
            raise InputError(f"This environment cannot be rendered: {error}.") from None

    def close(self) -> None:
        """Release the pool; its threads end with it, unless the user also holds a reference."""
        self.pool = None


def _channels_last_space(space: spaces.Space) -> spaces.Space:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _channels_last_space(inner) for name, inner in space.spaces.items()})
    if not _is_channels_first(space):
        return space
    assert isinstance(space, spaces.Box)
    return spaces.Box(np.moveaxis(space.low, 0, -1), np.moveaxis(space.high, 0, -1), dtype=space.dtype)


def _channels_last(space: spaces.Space, obs: PyTree) -> PyTree:
    """Convert images in observations `[N, ...]` from `[C, H, W]` to `[H, W, C]`."""
    if isinstance(space, spaces.Dict):
        return {name: _channels_last(inner, obs[name]) for name, inner in space.spaces.items()}
    return np.moveaxis(obs, 1, -1) if _is_channels_first(space) else obs


def _is_channels_first(space: spaces.Space) -> bool:
    """Whether this is an image with channels first, judged by the first axis being shorter than the other two."""
    return isinstance(space, spaces.Box) and len(space.shape) == 3 and space.shape[0] < min(space.shape[1:])


def _check_players(name: str, spec: Any) -> None:
    players = int(getattr(spec.config, "max_num_players", 1))
    if players > 1:
        raise InputError(
            f"{name} has {players} players in each environment, but only one is supported: choose another environment."
        )


def _call(name: str, call: Callable[[], Any]) -> Any:
    """Call EnvPool, and turn its exceptions into one-sentence errors."""
    try:
        return _quietly(call)
    except ImportError as error:
        raise InputError(f"envpool:{name} needs a package that is not installed: {_first_line(error)}.") from None
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"envpool:{name} cannot be created with these parameters: {_first_line(error)}.") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _quietly(call: Callable[[], Any]) -> Any:
    """Call a function without showing its warnings, for example about rounded bounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def _envpool() -> Any:
    return require("envpool", extra="envpool")
