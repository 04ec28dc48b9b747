"""Jumanji: `make("jumanji:Snake-v1")`.

A parameter is an argument of the environment's class: `make("jumanji:Snake-v1", num_rows=6, num_cols=6)`.

Where Jumanji's agents act together, as in Connector or RobotWarehouse, one policy acts for all of them: the action is
the `MultiDiscrete` of all their actions, and rewards are summed. An action mask is an entry of the observation, which a
policy may learn from but is not held to; what follows an action that the mask forbids is up to the environment.

Sokoban needs a set of levels that Jumanji downloads; Lehr asks for that download instead of starting it.
"""

import copy
import functools
import inspect
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.envs.base import NEVER, Environment
from lehr.envs.suites.foreign import by_their_rules, settled
from lehr.errors import InputError, closest
from lehr.plugins import require
from lehr.spaces import Box, Dict, Discrete, MultiDiscrete, Space
from lehr.types import Key, PyTree, Timestep

STEP_COUNTS = ("step", "step_count")
"""The entries of an observation that say how much of an episode's time has passed."""
COSTLY_RESETS = ("Connector", "MMST", "Maze", "Minesweeper", "RubiksCube")
"""The classes whose resets take as long as seven steps or more, by measurement on a CPU."""
LEVELS_OF_SOKOBAN = ("InstaDeepAI/boxoban-levels", "unfiltered-train.npy")


@dataclass(frozen=True)
class Jumanji(Environment):
    """An environment of Jumanji's: equal to another if it holds the same instance, and `make` keeps one for each.

    The observation is a `Dict` with the fields of Jumanji's. What is true or false is int8. One choice out of n is a
    one-hot vector, int8 `[n]`, and all zeros for the -1 by which Jumanji says "none yet". Integers without bounds and
    counts of steps are float32, so that they can be normalised. Other integers are int32.

    Jumanji keeps its own time limit, since most observations count its steps. An episode that ends by it and by nothing
    else is truncated, whichever discount Jumanji gives to its last step. `info` holds Jumanji's `extras`, and the state
    is Jumanji's.
    """

    env: Any = field(repr=False)
    unlimited: Any = field(repr=False)
    """The same without a time limit, to see whether an end is more than that; the environment itself if it has none."""
    name: str = field(compare=False)
    observation_space: Space = field(compare=False, repr=False)
    action_space: Discrete | MultiDiscrete | Box = field(compare=False, repr=False)
    truncation_gap: int = field(compare=False, repr=False)
    environments_per_reset: int = field(compare=False, repr=False)

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Begin an episode."""
        with by_their_rules():
            state, timestep = self.env.reset(key)
        return settled(state), _observation(self.observation_space, timestep.observation)

    def step(self, key: Key, state: PyTree, action: jax.Array) -> tuple[PyTree, Timestep]:
        """Act once; the key is not used, for Jumanji carries its own in the state."""
        spec = self.env.action_spec
        action = action.reshape(spec.shape).astype(spec.dtype)
        with by_their_rules():
            next_state, timestep = self.env.step(state, action)
            # Of the second step no more is computed than what its two flags depend on.
            unlimited = timestep if self.unlimited is self.env else self.unlimited.step(state, action)[1]
        terminated = unlimited.last() & jnp.all(unlimited.discount == 0)
        obs = _observation(self.observation_space, timestep.observation)
        reward = jnp.sum(timestep.reward).astype(jnp.float32)
        truncated = timestep.last() & ~terminated
        return settled(next_state), Timestep(obs, reward, terminated, truncated, settled(dict(timestep.extras)))


def names() -> list[str]:
    """The names that Jumanji has registered."""
    return sorted(_jumanji().registered_environments())


def make(name: str, **parameters: Any) -> Environment:
    """An environment by its name.

    >>> make("Snake-v1", time_limit=500)  # doctest: +SKIP
    Jumanji(name='Snake-v1')
    """
    if name not in names():
        raise InputError(f"Jumanji has no environment {name!r}; {closest(name, names())}")
    registered = require("jumanji.registration", extra="jumanji")
    signature = inspect.signature(registered.load(registered._REGISTRY[name].entry_point))
    for parameter in parameters:
        if parameter not in signature.parameters:
            raise InputError(
                f"jumanji:{name} has no parameter {parameter!r}; {closest(parameter, signature.parameters)}"
            )
    if name.startswith("Sokoban") and "generator" not in parameters:
        _require_levels(name)
    try:
        instance = _instance(name, tuple(sorted(parameters.items())))
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in parameters.items())
        raise InputError(f"jumanji:{name} cannot be made with {given}: {error}") from error
    return adapt(instance, name=name)


def adapt(env: Any, name: str | None = None) -> Environment:
    """An instance of a Jumanji environment."""
    wrappers = require("jumanji.wrappers", extra="jumanji")
    batched = wrappers.AutoResetWrapper | wrappers.VmapWrapper | wrappers.VmapAutoResetWrapper
    if isinstance(env, batched):
        raise InputError(
            f"{type(env).__name__} resets or batches by itself: give the environment inside it, env.unwrapped."
        )
    name = name or type(env).__name__
    limit = getattr(env, "time_limit", None)
    # Of Jumanji's own environments, those without a time limit never truncate.
    gap = limit or (NEVER if type(env).__module__.startswith("jumanji.environments.") else 1)
    return Jumanji(
        env,
        unlimited=_without_limit(env),
        name=name,
        observation_space=_observation_space(env.observation_spec),
        action_space=_action_space(name, env.action_spec),
        truncation_gap=int(gap),
        environments_per_reset=16 if type(env).__name__ in COSTLY_RESETS else 1,
    )


def _jumanji() -> ModuleType:
    return require("jumanji", extra="jumanji")


def _specs() -> ModuleType:
    return require("jumanji.specs", extra="jumanji")


@functools.cache
def _instance(name: str, parameters: tuple[tuple[str, Any], ...]) -> Any:
    """One instance for each name and parameters, so that equal environments share their compiled programs."""
    with by_their_rules():
        return _jumanji().make(name, **dict(parameters))


@functools.cache
def _without_limit(env: Any) -> Any:
    """A copy that ends only where the task does, or the environment itself if it has no time limit."""
    if getattr(env, "time_limit", None) is None:
        return env
    unlimited = copy.copy(env)
    unlimited.time_limit = NEVER
    return unlimited


def _require_levels(name: str) -> None:
    hub = require("huggingface_hub", extra="jumanji")
    if not isinstance(hub.try_to_load_from_cache(*LEVELS_OF_SOKOBAN), str):
        raise InputError(
            f"jumanji:{name} needs a set of levels, which is not here yet: with a network, run "
            f"python -c \"import jumanji; jumanji.make('{name}')\" once to download it, or give a generator."
        )


def _action_space(name: str, spec: Any) -> Discrete | MultiDiscrete | Box:
    specs = _specs()
    if isinstance(spec, specs.DiscreteArray):
        return Discrete(int(spec.num_values))
    if isinstance(spec, specs.BoundedArray):
        low, high = (np.broadcast_to(np.asarray(bound), spec.shape).ravel() for bound in (spec.minimum, spec.maximum))
        if np.issubdtype(spec.dtype, np.floating):
            return Box(low, high, dtype=spec.dtype)
        if len(spec.shape) == 1 and not low.any():
            return MultiDiscrete(tuple(high + 1))
    raise InputError(
        f"The actions of jumanji:{name} are {spec}, but a policy needs one integer, a vector of integers from 0, or "
        "numbers within bounds: wrap the environment so that it takes these."
    )


def _observation_space(spec: Any, name: str = "") -> Space:
    """The space of what `_observation` makes of an observation of Jumanji's."""
    specs = _specs()
    if not isinstance(spec, specs.Array):
        return Dict({key: _observation_space(part, key) for key, part in spec._specs.items()})
    if spec.dtype == bool:
        return Box(0, 1, spec.shape, np.int8)
    if name in STEP_COUNTS:
        return Box(0, np.inf, spec.shape)
    if isinstance(spec, specs.DiscreteArray):
        return Box(0, 1, (int(spec.num_values),), np.int8)
    if isinstance(spec, specs.BoundedArray):
        # Bytes are pixels to a network, and here they are not.
        dtype = np.int32 if np.issubdtype(spec.dtype, np.integer) else spec.dtype
        return Box(np.asarray(spec.minimum), np.asarray(spec.maximum), spec.shape, dtype)
    return Box(-np.inf, np.inf, spec.shape)


def _observation(space: Space, obs: Any) -> PyTree:
    """The same observation as dicts of arrays with the dtypes of the space."""
    if isinstance(space, Dict):
        return {key: _observation(part, getattr(obs, key)) for key, part in space.spaces.items()}
    obs = jnp.asarray(obs)
    if obs.shape != space.shape:
        return jax.nn.one_hot(obs, space.shape[0], dtype=space.dtype)
    return obs.astype(space.dtype)
