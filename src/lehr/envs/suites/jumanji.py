"""Jumanji: `make("jumanji:Snake-v1")`.

A parameter is an argument of the environment's class: `make("jumanji:Snake-v1", num_rows=6, num_cols=6)`.

In multi-agent environments such as Connector or RobotWarehouse, one policy acts for all agents: the action is a
`MultiDiscrete` of all their actions, and rewards are summed.

An action mask is the entry `action_mask` of the observation, which policies follow. The mask of an agent that has
nothing left to do, as in MMST, allows action 0 alone, which is ignored, so that it does not change the policy. In
BinPack, FlatPack, Minesweeper, Sudoku and Tetris, the mask says which *combinations* of the parts of an action are
possible. There the action is one `Discrete` choice among all combinations, numbered in row-major order, and the mask is
flattened.

Sokoban needs levels that Jumanji downloads; Lehr never starts that download, but tells the user how to.
"""

import copy
import functools
import inspect
import math
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.envs.base import NEVER, Environment
from lehr.envs.suites.foreign import by_their_rules, settled
from lehr.errors import InputError, closest
from lehr.masks import MASK
from lehr.plugins import require
from lehr.spaces import Box, Dict, Discrete, MultiDiscrete, Space
from lehr.types import Key, PyTree, Timestep

STEP_COUNTS = ("step", "step_count")
"""The entries of an observation that count the steps of the episode."""
COSTLY_RESETS = ("Connector", "MMST", "Maze", "Minesweeper", "RubiksCube")
"""The classes whose resets take as long as seven or more steps, measured on a CPU."""
LEVELS_OF_SOKOBAN = ("InstaDeepAI/boxoban-levels", "unfiltered-train.npy")


@dataclass(frozen=True)
class Jumanji(Environment):
    """A Jumanji environment. Two are equal if they hold the same instance; `make` caches instances.

    The observation is a `Dict` with Jumanji's fields. Booleans are int8. A choice out of n is a one-hot vector, int8
    `[n]`, which is all zeros for Jumanji's -1, "none yet". Unbounded integers and step counts are float32, so that they
    can be normalised. Other integers are int32.

    Jumanji's own time limit is kept, since most observations count its steps. An episode that ends only because of the
    limit is truncated, whatever discount Jumanji gives its last step. `info` holds Jumanji's `extras`; the state is
    Jumanji's.
    """

    env: Any = field(repr=False)
    unlimited: Any = field(repr=False)
    """The environment without its time limit, to tell termination from truncation; `env` itself if it has no limit."""
    name: str = field(compare=False)
    observation_space: Space = field(compare=False, repr=False)
    action_space: Discrete | MultiDiscrete | Box = field(compare=False, repr=False)
    combinations: tuple[int, ...] | None = field(compare=False, repr=False)
    """How many values each part of an action has, if an action is one of their combinations; otherwise `None`."""
    truncation_gap: int = field(compare=False, repr=False)
    environments_per_reset: int = field(compare=False, repr=False)

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Start an episode."""
        with by_their_rules():
            state, timestep = self.env.reset(key)
        return settled(state), _with_choice(_observation(self.observation_space, timestep.observation))

    def step(self, key: Key, state: PyTree, action: jax.Array) -> tuple[PyTree, Timestep]:
        """Take one step; the key is not used, since Jumanji keeps its own in the state."""
        spec = self.env.action_spec
        if self.combinations is not None:
            action = jnp.stack(jnp.unravel_index(action, self.combinations))
        action = action.reshape(spec.shape).astype(spec.dtype)
        with by_their_rules():
            next_state, timestep = self.env.step(state, action)
            # Of this second step, XLA only computes what the two flags depend on.
            unlimited = timestep if self.unlimited is self.env else self.unlimited.step(state, action)[1]
        terminated = unlimited.last() & jnp.all(unlimited.discount == 0)
        obs = _with_choice(_observation(self.observation_space, timestep.observation))
        reward = jnp.sum(timestep.reward).astype(jnp.float32)
        truncated = timestep.last() & ~terminated
        return settled(next_state), Timestep(obs, reward, terminated, truncated, settled(dict(timestep.extras)))


def names() -> list[str]:
    """Return the names registered with Jumanji."""
    return sorted(_jumanji().registered_environments())


def make(name: str, **parameters: Any) -> Environment:
    """Create an environment by name.

    >>> make("Snake-v1", time_limit=500)  # doctest: +SKIP
    Jumanji(name='Snake-v1')
    """
    if name not in names():
        raise InputError(f"Jumanji has no environment {name!r}; {closest(name, names(), 'jumanji:')}")
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
        raise InputError(f"jumanji:{name} cannot be created with {given}: {error}") from error
    return adapt(instance, name=name)


def adapt(env: Any, name: str | None = None) -> Environment:
    """Adapt a Jumanji environment object."""
    wrappers = require("jumanji.wrappers", extra="jumanji")
    batched = wrappers.AutoResetWrapper | wrappers.VmapWrapper | wrappers.VmapAutoResetWrapper
    if isinstance(env, batched):
        raise InputError(
            f"{type(env).__name__} resets or batches, which Lehr does itself: give the wrapped environment, "
            "env.unwrapped."
        )
    name = name or type(env).__name__
    limit = getattr(env, "time_limit", None)
    # Of Jumanji's own environments, those without a time limit never truncate.
    gap = limit or (NEVER if type(env).__module__.startswith("jumanji.environments.") else 1)
    observation_space, action_space = _observation_space(env.observation_spec), _action_space(name, env.action_spec)
    observation_space, action_space, combinations = _masked(observation_space, action_space)
    return Jumanji(
        env,
        unlimited=_without_limit(env),
        name=name,
        observation_space=observation_space,
        action_space=action_space,
        combinations=combinations,
        truncation_gap=int(gap),
        environments_per_reset=16 if type(env).__name__ in COSTLY_RESETS else 1,
    )


def _jumanji() -> ModuleType:
    return require("jumanji", extra="jumanji")


def _specs() -> ModuleType:
    return require("jumanji.specs", extra="jumanji")


@functools.cache
def _instance(name: str, parameters: tuple[tuple[str, Any], ...]) -> Any:
    """Create one instance per name and parameters, so that equal environments share compiled programs."""
    with by_their_rules():
        return _jumanji().make(name, **dict(parameters))


@functools.cache
def _without_limit(env: Any) -> Any:
    """Return a copy without the time limit, or the environment itself if it has none."""
    if getattr(env, "time_limit", None) is None:
        return env
    unlimited = copy.copy(env)
    unlimited.time_limit = NEVER
    return unlimited


def _require_levels(name: str) -> None:
    hub = require("huggingface_hub", extra="jumanji")
    if not isinstance(hub.try_to_load_from_cache(*LEVELS_OF_SOKOBAN), str):
        raise InputError(
            f"jumanji:{name} needs levels that have not been downloaded: run "
            f"python -c \"import jumanji; jumanji.make('{name}')\" once with internet access, or give a generator."
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
        f"The actions of jumanji:{name} are {spec}, but must be one integer, a vector of integers from 0, or bounded "
        "numbers: wrap the environment so that it takes one of these."
    )


def _masked(
    observation_space: Space, action_space: Discrete | MultiDiscrete | Box
) -> tuple[Space, Discrete | MultiDiscrete | Box, tuple[int, ...] | None]:
    """Return the spaces such that the mask, if there is one, fits the actions, and the combinations of an action."""
    mask = observation_space.spaces.get(MASK) if isinstance(observation_space, Dict) else None
    if not isinstance(action_space, MultiDiscrete) or not isinstance(mask, Box):
        return observation_space, action_space, None
    assert isinstance(observation_space, Dict)
    if mask.shape == action_space.nvec:
        flat = Box(0, 1, (math.prod(mask.shape),), mask.dtype)
        return Dict({**observation_space.spaces, MASK: flat}), Discrete(flat.shape[0]), action_space.nvec
    # MultiCVRP declares one more action for each vehicle than there are places to go to.
    rows, places = len(action_space.nvec), mask.shape[-1]
    if mask.shape == (rows, places) and places < min(action_space.nvec):
        return observation_space, MultiDiscrete((places,) * rows), None
    return observation_space, action_space, None


def _observation_space(spec: Any, name: str = "") -> Space:
    """Build the space of the observations that `_observation` returns."""
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
        # uint8 would be treated as pixels by the network.
        dtype = np.int32 if np.issubdtype(spec.dtype, np.integer) else spec.dtype
        return Box(np.asarray(spec.minimum), np.asarray(spec.maximum), spec.shape, dtype)
    return Box(-np.inf, np.inf, spec.shape)


def _observation(space: Space, obs: Any) -> PyTree:
    """Convert an observation to dicts of arrays with the dtypes of the space."""
    if isinstance(space, Dict):
        return {key: _observation(part, getattr(obs, key)) for key, part in space.spaces.items()}
    obs = jnp.asarray(obs)
    if obs.ndim > 1 and obs.size == math.prod(space.shape):  # a mask of combinations is flattened
        return obs.reshape(space.shape).astype(space.dtype)
    if obs.shape != space.shape:
        return jax.nn.one_hot(obs, space.shape[0], dtype=space.dtype)
    return obs.astype(space.dtype)


def _with_choice(obs: PyTree) -> PyTree:
    """Allow action 0 to agents that can do nothing, in a mask with a row for each agent."""
    mask = obs.get(MASK) if isinstance(obs, dict) else None
    if mask is None or mask.ndim != 2:
        return obs
    first = jnp.broadcast_to(jnp.arange(mask.shape[1]) == 0, mask.shape)
    return {**obs, MASK: jnp.where(first & ~mask.any(1, keepdims=True), 1, mask).astype(mask.dtype)}
