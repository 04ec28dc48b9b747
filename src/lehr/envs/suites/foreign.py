"""Helpers for third-party environments: silence their warnings, fix their dtypes, make their parameters hashable."""

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lehr.envs.base import Environment, forwarded
from lehr.errors import InputError
from lehr.types import PyTree


@dataclass(frozen=True)
class FromSource(Environment):
    """Abstract base class of adapters that are a name or an object of their suite, and parameters.

    Whatever takes time to find out about an environment is its `task`, which the adapter caches by these two fields.
    """

    source: Any
    """The suite's name of the environment, or an environment object of the suite."""
    parameters: tuple[tuple[str, Any], ...] = ()
    """The parameters given, sorted by name."""

    @property
    @abstractmethod
    def task(self) -> Any:
        """The spaces, the truncation gap and what else the adapter needs, created once."""

    observation_space = forwarded("task.observation_space")
    action_space = forwarded("task.action_space")
    truncation_gap = forwarded("task.truncation_gap")  # the time limit; `NEVER` if it has none of its own


@contextlib.contextmanager
def by_their_rules() -> Iterator[None]:
    """Run third-party code: hide its warnings, and allow rank promotion."""
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        yield


def settled(state: PyTree) -> PyTree:
    """Convert numbers and weakly typed arrays to strongly typed arrays, so that the types of a state never change."""
    return jax.tree.map(lambda x: settle(x, None if _is_key(x) else jnp.asarray(x).dtype), state)


def settle(x: Any, dtype: Any) -> jax.Array:
    """Convert to a strongly typed array of this dtype; keys are unchanged."""
    return x if _is_key(x) else jnp.asarray(x, dtype)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended)


def hashable(env: str, name: str, value: Any) -> Any:
    """Return a hashable parameter value; lists become tuples."""
    value = tuple(value) if isinstance(value, list) else value
    try:
        hash(value)
    except TypeError:
        raise InputError(
            f"The parameter {name} of {env} is {value!r}; it must be a number, a string or a list of these."
        ) from None
    return value
