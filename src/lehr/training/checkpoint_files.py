"""The files of one checkpoint, written with checksums and read without trust: sizes and types are checked first."""

import hashlib
import json
import math
import re
import struct
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.errors import InputError, shortened
from lehr.files import sync, write_text
from lehr.training import chunks
from lehr.training.leaves import (
    PYTHON_NUMBERS,
    CheckpointError,
    Stored,
    describe,
    is_key,
    leaves_by_path,
    plain_bits,
    stored_dtype,
)
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

MEMORY = re.compile(r"(\.members)?\.(learner|reward_model)\.memory\b")
"""Paths of data, which may be gigabytes, as opposed to learned state."""

OF_ENVIRONMENT = re.compile(r"\.(actor|pending|reward_scaling|(learner|reward_model)\.memory)\b")
"""Paths of what depends on the environment of a run and not on its spaces alone; a policy does without."""

_MOST_META = 16 << 20
"""A larger `meta.json` is damaged; this is enough for a replay of a terabyte."""
_MOST_OVERHEAD = 1 << 10
"""Bytes of a `state.npz` for each array besides its content, at most."""


def write_files(directory: Path, state: PyTree, step: int, meta: Mapping[str, Any], memory: bool) -> None:
    """Write the files of a checkpoint and sync them to disk."""
    found = leaves_by_path(state)
    leaves = {path: leaf for path, leaf in found.items() if memory or not MEMORY.match(path)}
    described = [describe(path, leaf) for path, leaf in leaves.items()]
    plain: dict[str, Any] = {}
    for number, (path, leaf) in enumerate(leaves.items()):
        if MEMORY.match(path) and not is_key(leaf) and getattr(leaf, "nbytes", 0) >= chunks.LEAST:
            content = plain_bits(np.asarray(jax.device_get(leaf)))
            described[number]["chunks"] = chunks.write(directory.parent / "memory", content)
        else:
            plain[f"arr_{number}"] = jax.random.key_data(leaf) if is_key(leaf) else leaf
    arrays: dict[str, Any] = {name: plain_bits(np.asarray(array)) for name, array in jax.device_get(plain).items()}
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
    write_document(directory, document)


def write_document(directory: Path, document: dict[str, Any]) -> None:
    """Write `meta.json`, with its own checksum."""
    write_text(directory / "meta.json", json.dumps(document | {"sha256": checksum_of(document)}, indent=1))


def checksum_of(document: dict[str, Any]) -> str:
    """The checksum of what `meta.json` says."""
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def read_document(path: Path) -> dict[str, Any]:
    """Read the `meta.json` of a checkpoint; paths of older formats get their current names."""
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
    if checksum_of(document) != checksum:
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


def read_arrays(
    path: Path, document: dict[str, Any], wanted: Mapping[str, Any]
) -> list[tuple[dict[str, Any], np.ndarray]]:
    """Return the description and the array of each leaf in `state.npz` that is wanted; the others are not read."""
    name = path / "state.npz"
    stored = {f"arr_{number}": leaf for number, leaf in enumerate(document["leaves"]) if "chunks" not in leaf}
    read = {array: leaf for array, leaf in stored.items() if leaf["path"] in wanted}
    expected = {array: wanted[leaf["path"]] for array, leaf in read.items()}
    sizes = [Stored.of(leaf).nbytes + _MOST_OVERHEAD for leaf in expected.values()]
    most = sum(sizes) + _MOST_OVERHEAD if len(read) == len(stored) else math.inf
    try:
        with name.open("rb") as file:
            if (size := name.stat().st_size) > most:
                raise CheckpointError(f"The checkpoint file '{name}' is damaged: {size} bytes are too many.")
            if hashlib.file_digest(file, "sha256").hexdigest() != document["state_sha256"]:
                raise CheckpointError(f"The checkpoint file '{name}' is damaged: its checksum does not match.")
            file.seek(0)
            _check_headers(file, stored, expected)
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                return [(leaf, archive[array]) for array, leaf in read.items()]
    except OSError as error:
        raise CheckpointError(f"The checkpoint file '{name}' cannot be read: {error.strerror}.") from error
    except CheckpointError:
        raise
    except (ValueError, KeyError, RuntimeError, EOFError, struct.error, zipfile.BadZipFile) as error:
        raise CheckpointError(f"The checkpoint file '{name}' is damaged: it does not contain plain arrays.") from error


def _check_headers(file: IO[bytes], names: Collection[str], expected: Mapping[str, Any]) -> None:
    """Raise a `ValueError` unless an .npz has exactly these arrays, those of the leaves as expected, before reading."""
    with zipfile.ZipFile(file) as archive:
        if sorted(archive.namelist()) != sorted(f"{name}.npy" for name in names):
            raise ValueError("other arrays")
        for name, leaf in expected.items():
            info, stored = archive.getinfo(f"{name}.npy"), Stored.of(leaf)
            with archive.open(info) as member:
                version = np.lib.format.read_magic(member)
                read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                shape, _, dtype = read[version](member)
                size = member.tell() + stored.nbytes
            is_number = type(leaf) in PYTHON_NUMBERS and dtype.kind in "biufc"
            if shape != stored.shape or dtype.hasobject or not (dtype == stored.dtype or is_number):
                raise ValueError("another array")
            if info.compress_type != zipfile.ZIP_STORED or (info.file_size != size and not is_number):
                raise ValueError("another size")


def read_chunks(path: Path, document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Return the description and the array of each leaf in `memory/`, one at a time."""
    for leaf in document["leaves"]:
        if "chunks" in leaf:
            dtype = stored_dtype(jnp.dtype(leaf["dtype"]))
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
