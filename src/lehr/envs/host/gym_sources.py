"""Where single Gymnasium environments come from if not from their ID: copies, specs, one object, classes, functions.

A source is a function that creates one environment. This file does not use JAX, since it runs in workers too.
"""

import copy
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import gymnasium
import numpy as np

from lehr import plugins

Source = str | Callable[..., Any]
"""The ID of an environment in Gymnasium, or what creates one."""


@dataclass(frozen=True, eq=False)
class Copies:
    """Copies of an environment that the user created, which itself is left alone."""

    env: Any

    def __call__(self) -> Any:
        """Copy the environment."""
        return copy.deepcopy(self.env)


@dataclass(frozen=True, eq=False)
class FromSpec:
    """Environments that Gymnasium creates from a spec, including additional wrappers."""

    spec: Any

    def __call__(self, **options: Any) -> Any:
        """Create the environment."""
        return gymnasium.make(copy.deepcopy(self.spec), disable_env_checker=True, **options)


@dataclass(frozen=True, eq=False)
class OnlyOne:
    """An environment that the user created, and that can be neither copied nor created again."""

    env: Any

    def __call__(self) -> Any:
        """Return the environment; closing it is left to the user."""
        return _KeptOpen(self.env)


class _KeptOpen(gymnasium.Wrapper):
    """The environment of a user, who closes it."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Limited:
    """Environments with a time limit."""

    source: Callable[..., Any]
    max_steps: int

    def __call__(self, **parameters: Any) -> Any:
        """Create an environment and limit its episodes."""
        return gymnasium.wrappers.TimeLimit(self.source(**parameters), self.max_steps)


def source_of(env: Any) -> Copies | FromSpec | OnlyOne:
    """Return how an environment that the user created is multiplied: the first way that works."""
    for source in (Copies(env), FromSpec(env.spec)):
        try:
            source()
        except Exception:  # whatever a user's class raises
            continue
        return source
    return OnlyOne(env)


def takes(source: Callable[..., Any], parameter: str) -> bool:
    """Whether a source accepts a parameter."""
    if isinstance(source, Limited):
        return takes(source.source, parameter)
    try:
        inspect.signature(source).bind_partial(**{parameter: None})
    except (TypeError, ValueError):
        return False
    return True


def importable_id(spec: Any) -> str | None:
    """Return the ID under which another process finds an environment, `module:ID` if a module has to register it.

    `None` if its class is in a script or a notebook.
    """
    entry = spec.entry_point
    module = entry.partition(":")[0] if isinstance(entry, str) else getattr(entry, "__module__", None)
    if not module or module == "__main__":
        return None
    return spec.id if module.partition(".")[0] in _installed() else f"{module}:{spec.id}"


def _installed() -> set[str]:
    """The packages whose environments Gymnasium registers by itself."""
    points = metadata.entry_points(group="gymnasium.envs")
    return {"gymnasium", *(point.value.partition(":")[0].partition(".")[0] for point in points)}


def parameters_of(spec: Any) -> dict[str, Any] | None:
    """Return the parameters with which `gymnasium.make` creates the environment of a spec; `None` if it cannot.

    How it is drawn is left out: training would open a window for each environment.
    """
    if spec is None or spec.id not in gymnasium.registry or spec.additional_wrappers:
        return None
    registered = gymnasium.spec(spec.id)
    if spec.entry_point != registered.entry_point:
        return None
    found = {name: value for name, value in spec.kwargs.items() if name != "render_mode"}
    if spec.max_episode_steps != registered.max_episode_steps:
        found["max_episode_steps"] = spec.max_episode_steps
    return found if plugins.is_plain(found) and not any(isinstance(value, dict) for value in found.values()) else None


def is_same(one: Any, other: Any) -> bool:
    """Whether two environments look alike after a reset with the same seed: observation and plain attributes."""
    try:
        seen = [_described(env.reset(seed=0)[0]) for env in (one, other)]
        inner = [vars(env.unwrapped) for env in (one, other)]
    except Exception:  # whatever a user's class raises
        return False
    if seen[0] != seen[1] or type(one.unwrapped) is not type(other.unwrapped):
        return False
    names = {name for name in inner[0] if not name.startswith("_")} - {"render_mode"}
    return all(name in inner[1] and _alike(inner[0][name], inner[1][name]) for name in names)


def _alike(one: Any, other: Any) -> bool:
    """Whether two attributes are equal, as far as they are numbers, texts or arrays."""
    kinds = bool | int | float | str | np.ndarray | np.generic
    if isinstance(one, kinds) or isinstance(other, kinds):
        return type(one) is type(other) and np.array_equal(one, other)
    return True


def _described(obs: Any) -> str:
    """An observation as a text that can be compared."""
    if isinstance(obs, dict):
        return json.dumps({str(name): _described(part) for name, part in obs.items()}, sort_keys=True)
    array = np.asarray(obs)
    return f"{array.dtype}{array.shape}{array.tolist()}"
