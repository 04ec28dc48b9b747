"""What the code of others needs around it: its warnings kept quiet, its types settled, its parameters hashable."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from lehr.errors import InputError
from lehr.types import PyTree


@contextlib.contextmanager
def by_their_rules() -> Iterator[None]:
    """What the code of others does is not the user's affair: neither its warnings nor its broadcasting."""
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        yield


def settled(state: PyTree) -> PyTree:
    """Numbers and weakly typed arrays as arrays, so that a state has one type from its first step on."""
    return jax.tree.map(lambda x: settle(x, None if _is_key(x) else jnp.asarray(x).dtype), state)


def settle(x: Any, dtype: Any) -> jax.Array:
    """An array of this dtype and of no weak type; keys stay as they are."""
    return x if _is_key(x) else jnp.asarray(x, dtype)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended)


def hashable(env: str, name: str, value: Any) -> Any:
    """A parameter as part of an environment's description; a list becomes a tuple."""
    value = tuple(value) if isinstance(value, list) else value
    try:
        hash(value)
    except TypeError:
        raise InputError(
            f"The parameter {name} of {env} is {value!r}, but must be a number, a text or a list of these."
        ) from None
    return value
