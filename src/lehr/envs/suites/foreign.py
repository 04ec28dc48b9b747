"""Packages that only some environments need: imported when they are asked for, missed in one sentence, and tamed."""

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from lehr.errors import InputError
from lehr.types import PyTree


def load(package: str, extra: str, what: str = "This environment") -> ModuleType:
    """Import a package, or say how to get it.

    Args:
        package: what to import, `brax.envs` for example.
        extra: the extra of Lehr that installs it.
        what: what needs it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what others deprecate is not the user's affair
            return importlib.import_module(package)
    except ImportError as error:
        root = package.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == root:
            raise InputError(
                f"{what} needs the package {root}, which is not installed: pip install 'lehr[{extra}]'."
            ) from None
        raise InputError(
            f"The package {root} is installed but does not import ({error}): pip install 'lehr[{extra}]' brings "
            "versions that work together."
        ) from error


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
