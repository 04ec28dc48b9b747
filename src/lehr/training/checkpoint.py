"""Checkpoints: a pytree of arrays in one directory, written atomically and restored bit for bit.

    <directory>/000000409600/state.npz    the leaves as plain arrays
                             meta.json    paths, shapes and dtypes of the leaves, checksums, and the caller's metadata
                memory/                   large arrays of a learner's `memory`, see `lehr.training.chunks`

Nothing is pickled, and loading runs no code. A process killed at any moment leaves the last complete checkpoint.
"""

import contextlib
import hashlib
import json
import math
import re
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr.errors import InputError, shortened
from lehr.files import make_directory, refuse_link, sync, sync_directory, write_text
from lehr.training import chunks
from lehr.types import PyTree

FORMAT = 3
"""Version of the file layout, increased when older code can no longer read new checkpoints.

Format 3 has parts of `memory` in chunks, or leaves them out; without that, a checkpoint has format 2.
"""

_RENAMED = (
    # Format 1 had one `memory`; format 2 separates learned state (`auxiliary`) from data (`memory`).
    (r"\.learner\.memory\.kept\.", ".learner.memory."),
    (r"\.learner\.memory\.(params|age|head|optimiser|filled|metrics)\b", r".learner.auxiliary.\1"),
)
"""Paths of format 1, and their current names."""

_ADDED = (".actor.resets",)
"""Begins of the paths of leaves that older checkpoints do not have; a state loaded from one keeps the template's."""

_MEMORY = re.compile(r"(\.members)?\.(learner|reward_model)\.memory\b")
"""Paths of data, which may be gigabytes, as opposed to learned state."""

_PYTHON_NUMBERS = (bool, int, float, complex)
_MOST_DIFFERENCES = 5
_MOST_META = 16 << 20
"""A larger `meta.json` is damaged; this is enough for a replay of a terabyte."""
_MOST_OVERHEAD = 1 << 10
"""Bytes of a `state.npz` for each array besides its content, at most."""


class CheckpointError(RuntimeError):
    """A checkpoint is damaged or incomplete; the message names the file."""


def save(
    directory: Path,
    state: PyTree,
    step: int,
    meta: Mapping[str, Any],
    keep: int = 3,
    protect: Collection[int] = (),
    memory: bool = True,
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
        memory: whether to save the `memory` of the learner and the reward model.
    """
    if keep < 1 or step < 0:
        raise InputError(f"keep is {keep} and step is {step}; keep must be at least 1 and step at least 0.")
    with written(directory, step) as temporary:
        _write(temporary, state, step, meta, memory)
    earlier = [other for other in steps(directory) if other <= step]
    keep_only(directory, {*earlier[-keep:], *set(protect).intersection(earlier)})
    return directory / f"{step:012d}"


@contextlib.contextmanager
def written(directory: Path, step: int) -> Iterator[Path]:
    """Give a directory for the files of a checkpoint, which becomes the checkpoint of `step` once they are written."""
    make_directory(directory)
    _clean(directory)
    final = directory / f"{step:012d}"
    temporary = final.with_name(f"{final.name}.tmp")
    temporary.mkdir()
    yield temporary
    if final.exists():
        # Directories cannot be swapped atomically: until the second rename, "<step>.replaced" counts as the step.
        final.rename(final.with_name(f"{final.name}.replaced"))
    temporary.rename(final)
    sync_directory(directory)
    _clean(directory)


def keep_only(directory: Path, wanted: Collection[int]) -> None:
    """Delete the checkpoints of all other steps, and the chunks that only they have."""
    found = _find(directory)
    for step in set(found) - set(wanted):
        _discard(found[step])
    _discard_chunks(directory)


def load(
    path: Path, template: PyTree, memory_lost: Callable[[str], object] | None = None
) -> tuple[PyTree, dict[str, Any]]:
    """Load one checkpoint and return the state, and the caller's `meta` with the `step` added.

    The template gives the structure, shapes and dtypes; its leaves are arrays, or `jax.ShapeDtypeStruct` from
    `jax.eval_shape`. Each leaf is restored as the template's type: a NumPy array, a Python number, or a JAX array, on
    the template's devices if it specifies any. Weak types are not preserved.

    If the checkpoint was saved without `memory`, the template's is used, and `without_memory` is added to the metadata.
    The same holds if `memory` is damaged and `memory_lost` is given, which is called with the error.
    """
    document = _read_document(path)
    wanted = _leaves(template)
    saved = {described["path"] for described in document["leaves"]}
    added = {name: leaf for name, leaf in wanted.items() if name.startswith(_ADDED) and name not in saved}
    first = {name: leaf for name, leaf in wanted.items() if _MEMORY.match(name)}
    has_memory = not document.get("without_memory")
    left_out = {*added, *(() if has_memory else first)}
    _check_fits(path, document["leaves"], {name: leaf for name, leaf in wanted.items() if name not in left_out})
    restored = {
        described["path"]: _restore(array, described, wanted[described["path"]])
        for described, array in _read_arrays(path, document, wanted)
    }
    if has_memory:
        try:
            for described, array in _read_chunks(path, document):
                restored[described["path"]] = _restore(array, described, wanted[described["path"]])
        except CheckpointError as error:
            if memory_lost is None:
                raise
            memory_lost(str(error))
            has_memory = False
    if not has_memory:
        restored |= first
    state = jax.tree.unflatten(jax.tree.structure(template), [(added | restored)[name] for name in wanted])
    return state, document["meta"] | {"step": document["step"]} | ({} if has_memory else {"without_memory": True})


def newest(
    directory: Path,
    template: PyTree,
    report: Callable[[str], object] = warnings.warn,
    memory_lost: Callable[[str], object] | None = None,
) -> tuple[PyTree, dict[str, Any], Path]:
    """Load the latest intact checkpoint and return its state, meta and path. Damaged ones are reported and skipped."""
    found = _find(directory)
    if not found:
        raise InputError(f"There is no checkpoint in '{directory}'; the run ended before its first; start it again.")
    for path in reversed(found.values()):
        try:
            return *load(path, template, memory_lost), path
        except CheckpointError as error:
            report(f"{error} Trying the one before.")
    raise CheckpointError(f"None of the {len(found)} checkpoints in '{directory}' can be read; start the run again.")


def amend(directory: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Change the metadata of every intact checkpoint; `change` gets it as `load` returns it."""
    refuse_link(directory)
    for path in _find(directory).values():
        try:
            document = _read_document(path)
        except CheckpointError:
            continue
        changed = dict(change(document["meta"] | {"step": document["step"]}))
        changed.pop("step", None)
        if changed != document["meta"]:
            _write_document(path, document | {"format": max(document["format"], 2), "meta": changed})


def latest_meta(directory: Path) -> dict[str, Any]:
    """Return the metadata of the latest checkpoint whose metadata is intact; empty if there is none."""
    for path in reversed(_find(directory).values()):
        try:
            document = _read_document(path)
        except CheckpointError:
            continue
        return document["meta"] | {"step": document["step"]}
    return {}


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


def _stored_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype, or for an extension, one of plain NumPy that holds its bits."""
    return np.dtype(f"u{dtype.itemsize}") if _is_extension(dtype) else dtype


def _plain(array: np.ndarray) -> np.ndarray:
    """Return the array's bits in a dtype that plain NumPy can read."""
    return array.view(_stored_dtype(array.dtype))


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
        try:
            key = jax.random.wrap_key_data(jnp.asarray(array), impl=described["key_impl"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"Leaf {described['path']} of a checkpoint is not a random key.") from error
        return jax.device_put(key, sharding)
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
    """Return the complete checkpoints by step, in order. Links are ignored, since metadata is changed in place."""
    found: dict[int, Path] = {}
    for path in sorted(directory.glob("*")):  # "<step>" sorts before "<step>.replaced", which counts only if alone
        match = re.fullmatch(r"(\d{12,})(\.replaced)?", path.name)
        if match and not path.is_symlink():
            found.setdefault(int(match[1]), path)
    return dict(sorted(found.items()))


def _clean(directory: Path) -> None:
    """Remove unfinished files of a killed process."""
    for path in directory.glob("*.tmp"):
        _remove(path)
    for path in directory.glob("*.replaced"):
        if path.with_suffix("").exists():
            _discard(path)


def _discard(path: Path) -> None:
    """Remove a checkpoint; if killed halfway, what remains does not look like a checkpoint."""
    _remove(path.rename(path.with_name(f"{path.name}.tmp")))


def _remove(path: Path) -> None:
    """Remove a directory, or whatever has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def _write(directory: Path, state: PyTree, step: int, meta: Mapping[str, Any], memory: bool) -> None:
    """Write the files of a checkpoint and sync them to disk."""
    found = _leaves(state)
    leaves = {path: leaf for path, leaf in found.items() if memory or not _MEMORY.match(path)}
    described = [_describe(path, leaf) for path, leaf in leaves.items()]
    plain: dict[str, Any] = {}
    for number, (path, leaf) in enumerate(leaves.items()):
        if _MEMORY.match(path) and not _is_key(leaf) and getattr(leaf, "nbytes", 0) >= chunks.LEAST:
            content = _plain(np.asarray(jax.device_get(leaf)))
            described[number]["chunks"] = chunks.write(directory.parent / "memory", content)
        else:
            plain[f"arr_{number}"] = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    arrays: dict[str, Any] = {name: _plain(np.asarray(array)) for name, array in jax.device_get(plain).items()}
    with (directory / "state.npz").open("w+b") as file:
        np.savez(file, **arrays)
        sync(file)
        file.seek(0)
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    document = {"format": 2, "step": step, "meta": dict(meta), "leaves": described, "state_sha256": checksum}
    if len(plain) < len(leaves):
        document |= {"format": FORMAT, "chunk_size": chunks.CHUNK}
    if len(leaves) < len(found):
        document |= {"format": FORMAT, "without_memory": True}
    _write_document(directory, document)


def _write_document(directory: Path, document: dict[str, Any]) -> None:
    write_text(directory / "meta.json", json.dumps(document | {"sha256": _checksum(document)}, indent=1))


def _checksum(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def _read_document(path: Path) -> dict[str, Any]:
    file = path / "meta.json"
    try:
        if (size := file.stat().st_size) > _MOST_META:
            raise CheckpointError(f"The checkpoint file '{file}' is damaged: {size} bytes are too many.")
        document = json.loads(file.read_bytes())
        checksum = document.pop("sha256")
    except OSError as error:
        raise CheckpointError(f"The checkpoint file '{file}' cannot be read: {error.strerror}.") from error
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"The checkpoint file '{file}' is damaged: it is not valid JSON.") from error
    if _checksum(document) != checksum:
        raise CheckpointError(f"The checkpoint file '{file}' is damaged: its checksum does not match.")
    if isinstance(version := document.get("format"), int) and version not in range(1, FORMAT + 1):
        raise InputError(
            f"The checkpoint '{path}' has format {shortened(str(version))}, but this version of Lehr reads formats up "
            f"to {FORMAT}; install the version that wrote it."
        )
    if not _is_document(document):
        raise CheckpointError(f"The checkpoint file '{file}' is damaged: it does not describe a checkpoint.")
    if document["format"] == 1:
        for leaf in document["leaves"]:
            for old, new in _RENAMED:
                leaf["path"] = re.sub(old, new, leaf["path"])
    return document


def _is_document(document: dict[str, Any]) -> bool:
    """Whether all parts of a document are there, with the right types."""
    types = {"format": int, "step": int, "meta": dict, "leaves": list, "state_sha256": str}
    leaf_types = {"path": str, "shape": list, "dtype": str}
    if not all(isinstance(document.get(name), kind) for name, kind in types.items()):
        return False
    leaves = document["leaves"]
    return (
        all(isinstance(leaf, dict) for leaf in leaves)
        and all(isinstance(leaf.get(name), kind) for leaf in leaves for name, kind in leaf_types.items())
        and len({leaf["path"] for leaf in leaves}) == len(leaves)
        and all(isinstance(leaf.get("chunks", []), list) for leaf in leaves)
        and all(isinstance(name, str) for leaf in leaves for name in leaf.get("chunks", ()))
        and isinstance(document.get("chunk_size", 1), int)
    )


def _read_arrays(
    path: Path, document: dict[str, Any], wanted: Mapping[str, Any]
) -> list[tuple[dict[str, Any], np.ndarray]]:
    """Return the description and the array of each leaf in `state.npz`."""
    name = path / "state.npz"
    expected = {
        f"arr_{number}": wanted[leaf["path"]] for number, leaf in enumerate(document["leaves"]) if "chunks" not in leaf
    }
    most = sum(_Stored.of(leaf).nbytes + _MOST_OVERHEAD for leaf in expected.values()) + _MOST_OVERHEAD
    try:
        with name.open("rb") as file:
            if (size := name.stat().st_size) > most:
                raise CheckpointError(f"The checkpoint file '{name}' is damaged: {size} bytes are too many.")
            if hashlib.file_digest(file, "sha256").hexdigest() != document["state_sha256"]:
                raise CheckpointError(f"The checkpoint file '{name}' is damaged: its checksum does not match.")
            file.seek(0)
            _check_headers(file, expected)
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                return [
                    (leaf, archive[f"arr_{number}"])
                    for number, leaf in enumerate(document["leaves"])
                    if "chunks" not in leaf
                ]
    except OSError as error:
        raise CheckpointError(f"The checkpoint file '{name}' cannot be read: {error.strerror}.") from error
    except CheckpointError:
        raise
    except (ValueError, KeyError, RuntimeError, EOFError, struct.error, zipfile.BadZipFile) as error:
        raise CheckpointError(f"The checkpoint file '{name}' is damaged: it does not contain plain arrays.") from error


def _check_headers(file: IO[bytes], expected: Mapping[str, Any]) -> None:
    """Raise a `ValueError` unless an .npz has exactly the arrays of these leaves, before any of them is read."""
    with zipfile.ZipFile(file) as archive:
        if sorted(archive.namelist()) != sorted(f"{name}.npy" for name in expected):
            raise ValueError("other arrays")
        for name, leaf in expected.items():
            info, stored = archive.getinfo(f"{name}.npy"), _Stored.of(leaf)
            with archive.open(info) as member:
                version = np.lib.format.read_magic(member)
                read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                shape, _, dtype = read[version](member)
                size = member.tell() + stored.nbytes
            is_number = type(leaf) in _PYTHON_NUMBERS and dtype.kind in "biufc"
            if shape != stored.shape or dtype.hasobject or not (dtype == stored.dtype or is_number):
                raise ValueError("another array")
            if info.compress_type != zipfile.ZIP_STORED or (info.file_size != size and not is_number):
                raise ValueError("another size")


class _Stored(NamedTuple):
    """The shape and dtype in which a leaf is stored."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, leaf: Any) -> "_Stored":
        if type(leaf) in _PYTHON_NUMBERS:
            return cls((), np.asarray(leaf).dtype)
        found = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        return cls(tuple(found.shape), _stored_dtype(found.dtype))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _read_chunks(path: Path, document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Return the description and the array of each leaf in `memory/`, one at a time."""
    for leaf in document["leaves"]:
        if "chunks" in leaf:
            dtype = _stored_dtype(jnp.dtype(leaf["dtype"]))
            try:
                array = chunks.read(
                    path.parent / "memory", leaf["chunks"], document["chunk_size"], leaf["shape"], dtype
                )
            except (chunks.ChunkError, OSError) as error:
                raise CheckpointError(
                    f"The memory of the checkpoint '{path}' is damaged: {error}. To go on without it, resume with "
                    "checkpoint_replay off."
                ) from error
            yield leaf, array


def _discard_chunks(directory: Path) -> None:
    """Delete the chunks that no checkpoint has."""
    if not (directory / "memory").is_dir():
        return
    used: set[str] = set()
    for path in _find(directory).values():
        with contextlib.suppress(CheckpointError):  # a damaged checkpoint cannot be loaded, with or without its chunks
            used.update(name for leaf in _read_document(path)["leaves"] for name in leaf.get("chunks", ()))
    chunks.discard(directory / "memory", used)
