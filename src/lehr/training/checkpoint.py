"""Checkpoints: a pytree of arrays in one directory, written atomically and restored bit for bit.

    <directory>/000000409600/state.npz    the leaves as plain arrays
                             meta.json    paths, shapes and dtypes of the leaves, checksums, and the caller's metadata

Nothing is pickled, and loading runs no code. A process killed at any moment leaves the last complete checkpoint.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.errors import InputError
from lehr.types import PyTree

FORMAT = 2
"""Version of the file layout, increased when older code can no longer read new checkpoints."""

_RENAMED = (
    # Format 1 had one `memory`; format 2 separates learned state (`auxiliary`) from data (`memory`).
    (r"\.learner\.memory\.kept\.", ".learner.memory."),
    (r"\.learner\.memory\.(params|age|head|optimiser|filled|metrics)\b", r".learner.auxiliary.\1"),
)
"""Paths of format 1, and their current names."""

_ADDED = (".actor.resets",)
"""Begins of the paths of leaves that older checkpoints do not have; a state loaded from one keeps the template's."""

_PYTHON_NUMBERS = (bool, int, float, complex)
_MOST_DIFFERENCES = 5


class CheckpointError(RuntimeError):
    """A checkpoint is damaged or incomplete; the message names the file."""


def save(
    directory: Path, state: PyTree, step: int, meta: Mapping[str, Any], keep: int = 3, protect: Collection[int] = ()
) -> Path:
    """Write a checkpoint and return its directory.

    Earlier checkpoints are deleted except the latest `keep - 1` and those in `protect`. Checkpoints of later steps,
    left over when a run went back to an earlier step, are deleted too, so the highest step is always the one saved
    last.

    Args:
        directory: holds all checkpoints of a run, and nothing else.
        state: pytree of JAX or NumPy arrays (including typed PRNG keys and small floats) or Python numbers.
        step: names the checkpoint; saving the same step again replaces it.
        meta: any JSON-serialisable mapping; `load` returns it.
        keep: number of checkpoints to keep, at least 1.
        protect: steps to keep regardless of `keep`, the best one for example.
    """
    if keep < 1 or step < 0:
        raise InputError(f"keep is {keep} and step is {step}; keep must be at least 1 and step at least 0.")
    directory.mkdir(parents=True, exist_ok=True)
    _clean(directory)

    final = directory / f"{step:012d}"
    temporary = final.with_name(f"{final.name}.tmp")
    temporary.mkdir()
    _write(temporary, state, step, meta)
    if final.exists():
        # Directories cannot be swapped atomically: until the second rename, "<step>.replaced" counts as the step.
        final.rename(final.with_name(f"{final.name}.replaced"))
    temporary.rename(final)
    _sync_directory(directory)

    _clean(directory)
    found = _find(directory)
    earlier = [other for other in found if other <= step]
    for other in set(found) - set(earlier[-keep:]) - set(protect).intersection(earlier):
        _discard(found[other])
    return final


def load(path: Path, template: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """Load one checkpoint and return the state, and the caller's `meta` with the `step` added.

    The template gives the structure, shapes and dtypes; its leaves are arrays, or `jax.ShapeDtypeStruct` from
    `jax.eval_shape`. Each leaf is restored as the template's type: a NumPy array, a Python number, or a JAX array, on
    the template's devices if it specifies any. Weak types are not preserved.
    """
    document = _read_document(path)
    wanted = _leaves(template)
    saved = {described["path"] for described in document["leaves"]}
    added = {name: leaf for name, leaf in wanted.items() if name.startswith(_ADDED) and name not in saved}
    _check_fits(path, document["leaves"], {name: leaf for name, leaf in wanted.items() if name not in added})
    arrays = _read_arrays(path, document)
    restored = {
        described["path"]: _restore(array, described, wanted[described["path"]])
        for array, described in zip(arrays, document["leaves"], strict=True)
    }
    state = jax.tree.unflatten(jax.tree.structure(template), [(added | restored)[name] for name in wanted])
    return state, document["meta"] | {"step": document["step"]}


def newest(
    directory: Path, template: PyTree, report: Callable[[str], object] = warnings.warn
) -> tuple[PyTree, dict[str, Any], Path]:
    """Load the latest intact checkpoint and return its state, meta and path. Damaged ones are reported and skipped."""
    found = _find(directory)
    if not found:
        raise InputError(f"There is no checkpoint in '{directory}'; the run ended before its first; start it again.")
    for path in reversed(found.values()):
        try:
            return *load(path, template), path
        except CheckpointError as error:
            report(f"{error} Trying the one before.")
    raise CheckpointError(f"None of the {len(found)} checkpoints in '{directory}' can be read; start the run again.")


def steps(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in a directory, in order; an empty list if there are none."""
    return list(_find(directory))


# Leaves ------------------------------------------------------------------------------------------------------------


def _leaves(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by path, such as `.params['actor'][0]`."""
    pairs = [(jax.tree_util.keystr(path) or ".", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    for path, leaf in pairs:
        if not _is_key(leaf) and not _is_number_array(leaf):
            raise TypeError(f"Leaf {path} is a {type(leaf).__name__}; a checkpoint can only hold arrays of numbers.")
    leaves = dict(pairs)
    if len(leaves) < len(pairs):
        raise ValueError("Two leaves of the state have the same path; give the nodes of the pytree distinct keys.")
    return leaves


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_number_array(leaf: Any) -> bool:
    dtype = np.asarray(leaf).dtype if type(leaf) in _PYTHON_NUMBERS else getattr(leaf, "dtype", np.dtype(object))
    return dtype.kind in "biufc" or _is_extension(dtype)


def _is_extension(dtype: np.dtype) -> bool:
    """Whether the dtype (bfloat16, float8, int4, …) is a JAX extension that the .npz format does not support."""
    return dtype.isbuiltin == 2


def _plain(array: np.ndarray) -> np.ndarray:
    """Return the array's bits in a dtype that plain NumPy can read."""
    return array.view(f"u{array.dtype.itemsize}") if _is_extension(array.dtype) else array


def _describe(path: str, leaf: Any) -> dict[str, Any]:
    number = type(leaf) in _PYTHON_NUMBERS
    described = {
        "path": path,
        "shape": [] if number else list(leaf.shape),
        "dtype": f"Python {type(leaf).__name__}" if number else str(leaf.dtype),
    }
    if _is_key(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
        described["key_impl"] = str(jax.random.key_impl(leaf))
    return described


def _restore(array: np.ndarray, described: dict[str, Any], like: Any) -> Any:
    """Convert a stored plain array back to the type of the template's leaf."""
    if type(like) in _PYTHON_NUMBERS:
        return array.item()
    sharding = like.sharding if getattr(like, "committed", hasattr(like, "sharding")) else None
    if _is_key(like):
        return jax.device_put(jax.random.wrap_key_data(jnp.asarray(array), impl=described["key_impl"]), sharding)
    if _is_extension(like.dtype):
        array = array.view(like.dtype)
    if isinstance(like, np.ndarray | np.generic):
        return array if isinstance(like, np.ndarray) else array[()]
    placed = jax.device_put(array, sharding)
    return placed if placed.dtype == array.dtype else array  # keep an int64 in NumPy if JAX would cut it to int32


def _check_fits(path: Path, saved: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """Raise an error that names the leaves that differ between checkpoint and template, in presence, shape or dtype."""
    here = {name: _leaf_text(_describe(name, leaf)) for name, leaf in wanted.items()}
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
        raise InputError(
            f"The checkpoint '{path}' does not match. {' '.join(shown)} Use the settings that it was saved with."
        )


def _leaf_text(described: dict[str, Any]) -> str:
    return described["dtype"] + (str(described["shape"]) if not described["dtype"].startswith("Python") else "")


# Files -------------------------------------------------------------------------------------------------------------


def _find(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints by step, in order."""
    found: dict[int, Path] = {}
    for path in sorted(directory.glob("*")):  # "<step>" sorts before "<step>.replaced", which counts only if alone
        if match := re.fullmatch(r"(\d{12,})(\.replaced)?", path.name):
            found.setdefault(int(match[1]), path)
    return dict(sorted(found.items()))


def _clean(directory: Path) -> None:
    """Remove unfinished files of a killed process."""
    for path in directory.glob("*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob("*.replaced"):
        if path.with_suffix("").exists():
            _discard(path)


def _discard(path: Path) -> None:
    """Remove a checkpoint; if killed halfway, what remains does not look like a checkpoint."""
    shutil.rmtree(path.rename(path.with_name(f"{path.name}.tmp")), ignore_errors=True)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(directory: Path, state: PyTree, step: int, meta: Mapping[str, Any]) -> None:
    """Write both files of a checkpoint and sync them to disk."""
    leaves = _leaves(state)
    arrays = jax.device_get([jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in leaves.values()])
    with (directory / "state.npz").open("w+b") as file:
        np.savez(file, *(_plain(np.asarray(array)) for array in arrays))
        _sync(file)
        file.seek(0)
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    described = [_describe(path, leaf) for path, leaf in leaves.items()]
    document = {"format": FORMAT, "step": step, "meta": dict(meta), "leaves": described, "state_sha256": checksum}
    with (directory / "meta.json").open("w") as file:
        json.dump(document | {"sha256": _checksum(document)}, file, indent=1)
        _sync(file)
    _sync_directory(directory)


def _checksum(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def _read_document(path: Path) -> dict[str, Any]:
    file = path / "meta.json"
    try:
        document = json.loads(file.read_bytes())
        checksum = document.pop("sha256")
    except OSError as error:
        raise CheckpointError(f"The checkpoint file '{file}' cannot be read: {error.strerror}.") from error
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"The checkpoint file '{file}' is damaged: it is not valid JSON.") from error
    if _checksum(document) != checksum:
        raise CheckpointError(f"The checkpoint file '{file}' is damaged: its checksum does not match.")
    if document["format"] not in (1, FORMAT):
        raise InputError(
            f"The checkpoint '{path}' has format {document['format']}, but this version of Lehr reads formats up to "
            f"{FORMAT}; install the version that wrote it."
        )
    if document["format"] == 1:
        for leaf in document["leaves"]:
            for old, new in _RENAMED:
                leaf["path"] = re.sub(old, new, leaf["path"])
    return document


def _read_arrays(path: Path, document: dict[str, Any]) -> list[np.ndarray]:
    name = path / "state.npz"
    try:
        with name.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != document["state_sha256"]:
                raise CheckpointError(f"The checkpoint file '{name}' is damaged: its checksum does not match.")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                return [archive[f"arr_{number}"] for number in range(len(document["leaves"]))]
    except OSError as error:
        raise CheckpointError(f"The checkpoint file '{name}' cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"The checkpoint file '{name}' is damaged: it does not contain plain arrays.") from error
