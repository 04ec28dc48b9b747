"""JaxDEM: `make("jaxdem:MultiNavigator", N=16)`, or `make(instance)`.

JaxDEM is not on PyPI. Its environments need the package itself and distrax:

    pip install "jaxdem @ git+https://github.com/cdelv/JaxDEM" distrax

A name is that of a class or the key it is registered under, in any spelling that JaxDEM accepts. Parameters are
arguments of the class's `Create`, and Lehr's own `max_action`, which bounds each component of an action; by default
actions are unbounded, as in JaxDEM. JaxDEM's trainer repeats actions with `skip_frames`; the equivalent here is
`ActionRepeat(env, 1 + skip_frames)`, which sums the rewards of the repeated steps.
"""

import functools
import importlib.util
import inspect
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.envs.base import NEVER, Environment
from lehr.envs.suites.foreign import by_their_rules, settled
from lehr.errors import InputError, closest
from lehr.plugins import require
from lehr.spaces import Box
from lehr.types import Key, PyTree, Timestep


class Template:
    """The environment that every reset starts from: a pytree of arrays, made hashable by comparing identity."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Template) and other.env is self.env

    def __hash__(self) -> int:
        return id(self.env)


@dataclass(frozen=True)
class JaxDEM(Environment):
    """A JaxDEM environment with one or many agents. Two are equal if they start from the same instance.

    An agent's observation and action are vectors. JaxDEM's `done` is shared by all agents: if it is only due to
    `max_steps` in `env_params`, the episode is truncated, otherwise terminated. The state is JaxDEM's environment
    itself, and `info` is the result of its method `info`.
    """

    template: Template = field(repr=False)
    name: str = field(compare=False)
    num_agents: int = field(compare=False)
    observation_space: Box = field(compare=False, repr=False)
    action_space: Box
    truncation_gap: int = field(compare=False, repr=False)

    def reset(self, key: Key) -> tuple[PyTree, jax.Array]:
        """Start an episode."""
        env = _copy(self.template.env)
        with by_their_rules():
            env = settled(env.reset(env, key))
            return env, self._agents(env.observation(env))

    def step(self, key: Key, state: PyTree, action: jax.Array) -> tuple[PyTree, Timestep]:
        """Take one step with all agents; the key is not used."""
        env = _copy(state)
        with by_their_rules():
            env = settled(env.step(env, action.reshape(self.num_agents, *self.action_space.shape)))
            done, terminated = (jnp.asarray(env.done(e), bool).reshape(()) for e in (env, _without_limit(env)))
            obs, reward, info = env.observation(env), env.reward(env), dict(env.info(env))
        ends = jnp.full(self.num_agents, terminated), jnp.full(self.num_agents, done & ~terminated)
        obs, reward, terminated, truncated = (self._agents(part) for part in (obs, reward, *ends))
        return env, Timestep(obs, reward, terminated, truncated, info)

    def _agents(self, value: jax.Array) -> jax.Array:
        """Convert values `[A, ...]`: drop the agent axis if there is one agent, and cast numbers to float32."""
        value = value if value.dtype == bool else value.astype(jnp.float32)
        return value if self.num_agents > 1 else value[0]


def names() -> list[str]:
    """Return the classes registered with JaxDEM."""
    return sorted(cls.__name__ for cls in _registered().values())


def make(name: str, **parameters: Any) -> Environment:
    """Create an environment by the name of its class or by its registered key.

    >>> make("SingleNavigator", max_steps=500)  # doctest: +SKIP
    JaxDEM(name='SingleNavigator', num_agents=1, action_space=Box(-inf, inf, shape=(2,), dtype=float32))
    """
    cls = _class(name)
    known = list(inspect.signature(cls.Create).parameters)
    max_action = parameters.pop("max_action", None)
    for parameter in parameters:
        if parameter not in known:
            known.append("max_action")
            raise InputError(f"jaxdem:{name} has no parameter {parameter!r}; {closest(parameter, known)}")
    frozen = ((key, tuple(value) if isinstance(value, list) else value) for key, value in parameters.items())
    try:
        instance = _instance(cls, tuple(sorted(frozen)))
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in parameters.items())
        raise InputError(f"jaxdem:{name} cannot be created with {given}: {error}") from error
    return adapt(instance, max_action=max_action)


def adapt(env: Any, max_action: float | None = None) -> Environment:
    """Adapt a single JaxDEM environment object, not a batch."""
    name, num_agents = type(env).__name__, int(env.max_num_agents)
    if env.num_envs != 1 or name.startswith("Vec"):
        raise InputError(
            f"The JaxDEM environment {name} is a batch of {env.num_envs}: give the environment before vectorise_env, "
            "since Lehr creates the batch itself."
        )
    try:
        with by_their_rules():
            obs = jax.eval_shape(_first_observation, env, jax.random.key(0))
    except Exception as error:
        raise InputError(f"The JaxDEM environment {name} failed in reset: {error}") from error
    if max_action is not None and not 0 < max_action < np.inf:
        raise InputError(f"max_action is {max_action}; it must be a finite number above 0, or None for no bound.")
    bound = np.inf if max_action is None else max_action
    return JaxDEM(
        Template(env),
        name=name,
        num_agents=num_agents,
        observation_space=Box(-np.inf, np.inf, obs.shape[1:]),
        action_space=Box(-bound, bound, (int(env.action_space_size),)),
        truncation_gap=_truncation_gap(env),
    )


def _first_observation(env: Any, key: Key) -> jax.Array:
    env = env.reset(env, key)
    return env.observation(env)


def _copy(env: Any) -> Any:
    """Copy the environment, because JaxDEM's methods modify it and its dicts."""
    return jax.tree.map(lambda x: x, env)


def _without_limit(env: Any) -> Any:
    """Return the environment without its time limit."""
    env = _copy(env)
    if (limit := _limit(env)) is not None:
        most = jnp.inf if jnp.issubdtype(limit.dtype, jnp.floating) else jnp.iinfo(limit.dtype).max
        env.env_params["max_steps"] = jnp.full_like(limit, most)
    return env


def _limit(env: Any) -> jax.Array | None:
    """Return the number of physics steps after which JaxDEM ends an episode, or `None`."""
    limit = getattr(env, "env_params", {}).get("max_steps")
    return None if limit is None else jnp.asarray(limit)


def _truncation_gap(env: Any) -> int:
    limit = _limit(env)
    if limit is None:
        return NEVER
    # JaxDEM's own environments take one physics step per env step; for others this is unknown.
    base = getattr(type(env), "_base_env_cls", type(env))
    return int(limit) + 1 if base.__module__.partition(".")[0] == "jaxdem" else 1


def _registered() -> dict[str, Any]:
    """Return the classes by JaxDEM's keys, without the base class, whose key is empty."""
    if importlib.util.find_spec("jaxdem") is None:
        raise InputError(
            "This environment needs the package jaxdem, which is not installed: "
            'pip install "jaxdem @ git+https://github.com/cdelv/JaxDEM" distrax.'
        )
    environments = require("jaxdem.rl.environments", extra="jaxdem")
    return {key: cls for key, cls in environments.Environment._registry.items() if key}


def _class(name: str) -> Any:
    def plain(text: str) -> str:
        return text.replace(" ", "").replace("_", "").replace("-", "").lower()

    registered = _registered()
    for key, cls in registered.items():
        if plain(name) in (plain(key), plain(cls.__name__)):
            return cls
    raise InputError(f"JaxDEM has no environment {name!r}; {closest(name, names(), 'jaxdem:')}")


@functools.cache
def _instance(cls: Any, parameters: tuple[tuple[str, Any], ...]) -> Any:
    """Create one instance per class and parameters, so that equal environments share compiled programs."""
    with by_their_rules():
        return cls.Create(**dict(parameters))
