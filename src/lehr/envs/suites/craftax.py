"""Craftax and Craftax-Classic: `make("craftax:Craftax-Classic-Symbolic-v1")`.

A parameter is a field of Craftax's `EnvParams` or `StaticEnvParams`: `make("craftax:Craftax-Symbolic-v1",
max_timesteps=5000, map_size=(32, 32))`. `max_timesteps` becomes a `TimeLimit`, so that running out of time is a
truncation, while death and victory are terminations.
"""

import functools
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from lehr.envs.base import NEVER, Environment
from lehr.envs.suites.foreign import by_their_rules, hashable, settled
from lehr.envs.wrappers import TimeLimit
from lehr.errors import InputError, closest
from lehr.plugins import require
from lehr.spaces import Box, Discrete
from lehr.types import Key, PyTree, Timestep

NAMES = (
    "Craftax-Classic-Pixels-v1",
    "Craftax-Classic-Symbolic-v1",
    "Craftax-Pixels-v1",
    "Craftax-Symbolic-v1",
)


@dataclass(frozen=True)
class Craftax(Environment):
    """A Craftax game without its time limit.

    The observation is Craftax's: a vector with the surroundings and the inventory, or an image. `info["achievements"]`,
    bool, marks the achievements unlocked so far in this episode, in the order of Craftax's `Achievement`. The state is
    Craftax's `EnvState`.
    """

    truncation_gap: ClassVar[int] = NEVER
    environments_per_reset: ClassVar[int] = 16
    env: Any = field(repr=False)
    """Craftax's own environment; only its methods without automatic reset are used."""
    name: str = field(compare=False)
    parameters: tuple[tuple[str, Any], ...] = ()
    """The fields of `EnvParams` that differ from their defaults, sorted by name."""

    @property
    def observation_space(self) -> Box:
        """Craftax's shape without bounds: at death, health leaves the bounds 0 and 1 that Craftax declares."""
        return Box(-np.inf, np.inf, self.env.observation_space(self._params).shape)

    @property
    def action_space(self) -> Discrete:
        """The actions of the game."""
        return Discrete(self.env.num_actions)

    @property
    def _params(self) -> Any:
        return self.env.default_params.replace(**{**dict(self.parameters), "max_timesteps": NEVER})

    def reset(self, key: Key) -> tuple[PyTree, jax.Array]:
        """Generate a world."""
        with by_their_rules():
            obs, state = self.env.reset_env(key, self._params)
        return settled(state), obs.astype(jnp.float32)

    def step(self, key: Key, state: PyTree, action: jax.Array) -> tuple[PyTree, Timestep]:
        """Take one step; without a time limit, Craftax's `done` is always a termination."""
        with by_their_rules():
            obs, state, reward, done, _ = self.env.step_env(key, state, action, self._params)
        done, reward = jnp.asarray(done, bool), jnp.asarray(reward, jnp.float32)
        info = {"achievements": state.achievements}
        return settled(state), Timestep(obs.astype(jnp.float32), reward, done, jnp.zeros_like(done), info)


def names() -> list[str]:
    """Return Craftax's names of the four games."""
    require("craftax", extra="craftax")
    return list(NAMES)


def make(name: str, **parameters: Any) -> Environment:
    """Create a game by name, with its standard time limit.

    >>> make("Craftax-Classic-Symbolic-v1", max_timesteps=500)  # doctest: +SKIP
    TimeLimit(env=Craftax(name='Craftax-Classic-Symbolic-v1', parameters=()), max_steps=500)
    """
    if name not in NAMES:
        raise InputError(f"Craftax has no environment {name!r}; {closest(name, NAMES, 'craftax:')}")
    static = {field.name for field in fields(_instance(name, ()).static_env_params)}
    given = tuple(
        sorted((key, hashable(f"craftax:{name}", key, value)) for key, value in parameters.items() if key in static)
    )
    others = {key: value for key, value in parameters.items() if key not in static}
    return adapt(_instance(name, given), name=name, **others)


def adapt(env: Any, name: str | None = None, **parameters: Any) -> Environment:
    """Adapt a Craftax environment object; the parameters override fields of its default `EnvParams`."""
    name = name or env.name
    known = [field.name for field in fields(env.default_params)]
    for parameter in parameters:
        if parameter not in known:
            known += [field.name for field in fields(env.static_env_params)]
            raise InputError(f"craftax:{name} has no parameter {parameter!r}; {closest(parameter, known)}")
    max_timesteps = parameters.pop("max_timesteps", env.default_params.max_timesteps)
    given = tuple(sorted((key, hashable(f"craftax:{name}", key, value)) for key, value in parameters.items()))
    return TimeLimit(Craftax(env, name, given), max_timesteps)


@functools.cache
def _instance(name: str, static: tuple[tuple[str, Any], ...]) -> Any:
    """Create one instance per name and static parameters, so that equal environments share compiled programs."""
    env = require("craftax.craftax_env", extra="craftax").make_craftax_env_from_name(name, auto_reset=False)
    return type(env)(env.static_env_params.replace(**dict(static))) if static else env
