"""EnvPool's environments, `envpool:NAME`: a pool of them steps in threads of C++, behind one call.

A pool takes its seeds when it is made, so it is made when its first episodes begin. The step after the end of an
episode is only the reset: its action is ignored, and it does not count. A pool cannot be brought back after a stop: its
environments begin new episodes.

EnvPool tells a time limit from an end by the clock alone: an episode that ends in the very step of its limit counts as
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
from lehr.envs.host.gym import actions_of, lean
from lehr.errors import InputError, closest
from lehr.plugins import require
from lehr.types import PyTree

OURS = {
    "num_envs": "it is num_envs of the run",
    "seed": "it comes from the seed of the run",
    "env_seed": "it comes from the seed of the run",
    "batch_size": "all environments step together",
    "env_type": "it is always gymnasium",
}
"""Parameters of `envpool.make` that are not the user's here, and why."""


def names() -> list[str]:
    """The environments that EnvPool has."""
    return sorted(_envpool().list_all_envs())


def make(name: str, **parameters: Any) -> "EnvPool":
    """An environment of EnvPool's.

    Args:
        name: as `envpool.make` takes it.
        parameters: of `envpool.make`, such as `num_threads`, `max_episode_steps` or `stack_num`.
    """
    for parameter, reason in OURS.items():
        if parameter in parameters:
            raise InputError(f"envpool:{name} does not take the parameter {parameter}: {reason}.")
    if name not in (known := names()):
        near = closest(name, known)
        if near.startswith("known"):  # too many to be named
            near = f"envpool.list_all_envs() names the {len(known)} that it has."
        raise InputError(f"EnvPool has no environment {name!r}; {near}")
    env = EnvPool(name, tuple(sorted(parameters.items())))
    _check_players(env.name, env.spec)  # to know now whether it can be made
    return env


def adapt(env: Any, **parameters: Any) -> "GivenPool":
    """A pool that exists already, used as it is."""
    if parameters:
        raise InputError(
            f"The parameters {', '.join(parameters)} came with a pool that exists already: give them to envpool.make."
        )
    if not isinstance(env, require("gymnasium", extra="envpool").Env):
        raise InputError(f"{type(env).__name__} is not a pool of Gymnasium's kind: make it with env_type='gymnasium'.")
    if env.is_async:
        raise InputError(
            f"{type(env).__name__} steps {env.config['batch_size']} of its {len(env)} environments at a time, but "
            "all must step together: leave out batch_size."
        )
    _check_players(type(env).__name__, env.spec)
    return GivenPool(env)


class Pooled(HostEnvironment):
    """What a pool that is made by name and one that is given have in common."""

    masks = True

    @property
    @abstractmethod
    def spec(self) -> Any:
        """EnvPool's description of the environment."""

    @functools.cached_property
    def raw_observation_space(self) -> spaces.Space:
        """EnvPool's, in 32 bits."""
        return _quietly(lambda: lean(self.spec.gymnasium_observation_space))

    @functools.cached_property
    def observation_space(self) -> spaces.Space:
        """EnvPool's, in 32 bits, and with the channels of images last."""
        return _channels_last_space(self.raw_observation_space)

    @functools.cached_property
    def action_space(self) -> spaces.Space:
        """EnvPool's."""
        return _quietly(lambda: actions_of(self._raw_action_space))

    @functools.cached_property
    def _raw_action_space(self) -> Any:
        return _quietly(lambda: self.spec.gymnasium_action_space)

    def _batch(self, make_pool: Callable[[np.ndarray], Any], size: int) -> "Pool":
        first_action = int(getattr(self._raw_action_space, "start", 0))
        return Pool(make_pool, size, self.raw_observation_space, first_action)


@dataclass(frozen=True)
class EnvPool(Pooled):
    """An environment of EnvPool's by its name."""

    id: str
    parameters: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """`envpool:` and the name in EnvPool."""
        return f"envpool:{self.id}"

    @functools.cached_property
    def spec(self) -> Any:
        """EnvPool's description, which is known without a pool."""
        return _tried(self.id, lambda: _envpool().make_spec(self.id, **dict(self.parameters)))

    def start(self, num_envs: int, render: bool = False) -> "Pool":
        """A pool, which is made with the seeds of its first episodes."""
        settings = dict(self.parameters) | ({"render_mode": "rgb_array"} if render else {})

        def make_pool(seeds: np.ndarray) -> Any:
            # EnvPool's seeds are signed.
            seed = (seeds & 0x7FFFFFFF).tolist()
            return _envpool().make(self.id, env_type="gymnasium", num_envs=num_envs, seed=seed, **settings)

        return self._batch(make_pool, num_envs)


@dataclass(frozen=True, eq=False)
class GivenPool(Pooled):
    """A pool that the user made, with seeds of the user's."""

    env: Any

    @property
    def name(self) -> str:
        """Its class."""
        return type(self.env).__name__

    @property
    def spec(self) -> Any:
        """The pool's."""
        return self.env.spec

    @property
    def fixed_size(self) -> int:
        """As many as the pool holds."""
        return len(self.env)

    def start(self, num_envs: int, render: bool = False) -> "Pool":
        """The pool, which exists already."""
        check_size(self, num_envs)
        return self._batch(lambda seeds: self.env, num_envs)


class Pool(HostBatch):
    """Environments that step together, and begin the next episode in the step after the end of one."""

    def __init__(
        self, make_pool: Callable[[np.ndarray], Any], size: int, space: spaces.Space, first_action: int
    ) -> None:
        self.make_pool, self.size, self.space, self.first_action = make_pool, size, space, first_action
        self.pool: Any = None
        self.over = np.zeros(size, bool)

    def reset(self, seeds: np.ndarray) -> PyTree:
        """Begin an episode in each environment."""
        self.pool, self.over = self.make_pool(seeds), np.zeros(self.size, bool)
        obs, _ = _quietly(self.pool.reset)
        return _channels_last(self.space, obs)

    def step(self, action: np.ndarray) -> HostStep:
        """Act; after an end, the step is only a reset, whatever reward EnvPool gives for it."""
        taken = action + self.first_action if self.first_action else action
        obs, reward, terminated, truncated, _ = self.pool.step(taken)
        obs = _channels_last(self.space, obs)
        over, self.over = self.over, (terminated | truncated) & ~self.over
        return late_reset(over, obs, reward, terminated, truncated)

    def render(self) -> np.ndarray:
        """A picture of the first environment."""
        try:
            return np.asarray(self.pool.render()[0])
        except RuntimeError as error:
            raise InputError(f"This environment draws no pictures: {error}.") from None

    def close(self) -> None:
        """Let go of the pool: its threads end with it, unless the user holds it too."""
        self.pool = None


def _channels_last_space(space: spaces.Space) -> spaces.Space:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _channels_last_space(inner) for name, inner in space.spaces.items()})
    if not _is_channels_first(space):
        return space
    assert isinstance(space, spaces.Box)
    return spaces.Box(np.moveaxis(space.low, 0, -1), np.moveaxis(space.high, 0, -1), dtype=space.dtype)


def _channels_last(space: spaces.Space, obs: PyTree) -> PyTree:
    """Observations `[N, ...]` in which an image `[C, H, W]` is `[H, W, C]`."""
    if isinstance(space, spaces.Dict):
        return {name: _channels_last(inner, obs[name]) for name, inner in space.spaces.items()}
    return np.moveaxis(obs, 1, -1) if _is_channels_first(space) else obs


def _is_channels_first(space: spaces.Space) -> bool:
    """Whether this is an image whose first axis, shorter than the two others, holds its channels."""
    return isinstance(space, spaces.Box) and len(space.shape) == 3 and space.shape[0] < min(space.shape[1:])


def _check_players(name: str, spec: Any) -> None:
    players = int(getattr(spec.config, "max_num_players", 1))
    if players > 1:
        raise InputError(f"{name} has {players} players in each environment; a pool here has one: choose another.")


def _tried(name: str, call: Callable[[], Any]) -> Any:
    """What EnvPool makes, or one sentence about why it does not."""
    try:
        return _quietly(call)
    except ImportError as error:
        raise InputError(f"envpool:{name} needs something that is not installed: {_first_line(error)}.") from None
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"envpool:{name} cannot be made like this: {_first_line(error)}.") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _quietly(call: Callable[[], Any]) -> Any:
    """The answer of a call whose warnings, of rounded bounds for example, are not the user's affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def _envpool() -> Any:
    return require("envpool", extra="envpool")
