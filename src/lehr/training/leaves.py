"""The leaves of a checkpoint: what may be one, how it is described and stored, and how it is restored bit for bit."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr.errors import InputError
from lehr.types import PyTree

PYTHON_NUMBERS = (bool, int, float, complex)
_MOST_DIFFERENCES = 5


class CheckpointError(RuntimeError):
    """A checkpoint is damaged or incomplete; the message names the file."""


class MisfitError(InputError):
    """A checkpoint has other leaves than the state that it is loaded into."""


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by path, such as `.params['actor'][0]`."""
    pairs = [(jax.tree_util.keystr(path) or ".", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    for path, leaf in pairs:
        if not is_key(leaf) and not _is_number_array(leaf):
            raise TypeError(f"Leaf {path} is a {type(leaf).__name__}; a checkpoint can only hold arrays of numbers.")
    leaves = dict(pairs)
    if len(leaves) < len(pairs):
        raise ValueError("Two leaves of the state have the same path; give the nodes of the pytree distinct keys.")
    return leaves


def is_key(leaf: Any) -> bool:
    """Whether it is a typed random key."""
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_number_array(leaf: Any) -> bool:
    dtype = np.asarray(leaf).dtype if type(leaf) in PYTHON_NUMBERS else getattr(leaf, "dtype", np.dtype(object))
    return dtype.kind in "biufc" or _is_extension(dtype)


def _is_extension(dtype: np.dtype) -> bool:
    """Whether the dtype (bfloat16, float8, int4, …) is a JAX extension that the .npz format does not support."""
    return dtype.isbuiltin == 2


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype, or for an extension, one of plain NumPy that holds its bits."""
    return np.dtype(f"u{dtype.itemsize}") if _is_extension(dtype) else dtype


def plain_bits(array: np.ndarray) -> np.ndarray:
    """Return the array's bits in a dtype that plain NumPy can read."""
    return array.view(stored_dtype(array.dtype))


def describe(path: str, leaf: Any) -> dict[str, Any]:
    """Its path, shape and dtype, as a checkpoint writes them down."""
    number = type(leaf) in PYTHON_NUMBERS
    described = {
        "path": path,
        "shape": [] if number else list(leaf.shape),
        "dtype": f"Python {type(leaf).__name__}" if number else str(leaf.dtype),
    }
    if is_key(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
        described["key_impl"] = str(jax.random.key_impl(leaf))
    return described


def restore(array: np.ndarray, described: dict[str, Any], like: Any) -> Any:
    """Convert a stored plain array back to the type of the template's leaf."""
    if type(like) in PYTHON_NUMBERS:
        return array.item()
    sharding = like.sharding if getattr(like, "committed", hasattr(like, "sharding")) else None
    if is_key(like):
        try:
            key = jax.random.wrap_key_data(jnp.asarray(array), impl=described["key_impl"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"Leaf {described['path']} of a checkpoint is not a random key.") from error
        return placed(key, sharding)
    if _is_extension(like.dtype):
        array = array.view(like.dtype)
    if isinstance(like, np.ndarray | np.generic):
        return array if isinstance(like, np.ndarray) else array[()]
    found = placed(array, sharding)
    return found if found.dtype == array.dtype else array  # keep an int64 in NumPy if JAX would cut it to int32


def placed(leaf: Any, sharding: Any) -> Any:
    """Return an array, which every process has, on devices, some of which may belong to other processes."""
    if sharding is None or sharding.is_fully_addressable or getattr(leaf, "sharding", None) == sharding:
        return jax.device_put(leaf, sharding)
    if is_key(leaf):
        return jax.random.wrap_key_data(placed(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, lambda place: whole[place])


def check_fits(path: Path, saved: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """Raise an error that names the leaves that differ between checkpoint and template, in presence, shape or dtype."""
    here = {name: _leaf_text(describe(name, leaf)) for name, leaf in wanted.items()}
    there = {described["path"]: _leaf_text(described) for described in saved}
    differences = [f"Leaf {name} ({text}) is missing." for name, text in here.items() if name not in there]
    differences += [f"Leaf {name} ({text}) is unexpected." for name, text in there.items() if name not in here]
    differences += [
        f"Leaf {name} is {there[name]}, expected {text}."
        for name, text in here.items()
        if there.get(name, text) != text
    ]
    if differences:
        more = len(differences) - _MOST_DIFFERENCES
        shown = [*differences[:_MOST_DIFFERENCES], *([f"{more} more leaves differ."] if more > 0 else [])]
        pairs = {(there.get(name, text).partition("[")[0], text.partition("[")[0]) for name, text in here.items()}
        cure = "Use the settings that it was saved with."
        for saved_with, pair in ((True, ("float64", "float32")), (False, ("float32", "float64"))):
            if pair in pairs:
                cure = f"It was saved {'with' if saved_with else 'without'} JAX_ENABLE_X64=1; use it likewise."
        raise MisfitError(f"The checkpoint '{path}' does not match. {' '.join(shown)} {cure}")


def _leaf_text(described: dict[str, Any]) -> str:
    return described["dtype"] + (str(described["shape"]) if not described["dtype"].startswith("Python") else "")


class Stored(NamedTuple):
    """The shape and dtype in which a leaf is stored."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, leaf: Any) -> "Stored":
        """How a leaf is stored."""
        if type(leaf) in PYTHON_NUMBERS:
            return cls((), np.asarray(leaf).dtype)
        found = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
        return cls(tuple(found.shape), stored_dtype(found.dtype))

    @property
    def nbytes(self) -> int:
        """Its size without a header."""
        return math.prod(self.shape) * self.dtype.itemsize
