"""Large arrays of checkpoints, in chunks that are named by their content and shared between checkpoints.

    <directory>/<sha256>    the bytes of a chunk

A replay of gigabytes is written once; after that, each checkpoint writes only the chunks that changed. An array is cut
along its first axes, so a ring buffer whose first axis is the ring changes in few chunks. A chunk never changes, and is
deleted when no checkpoint has it any more, so a kill at any moment leaves every checkpoint complete.
"""

import hashlib
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from lehr.files import make_directory, replaced, sync_directory

CHUNK = 4 << 20
"""Size of a chunk in bytes; the last one of an array may be smaller."""

LEAST = 1 << 20
"""Arrays of fewer bytes are not worth a chunk."""


class ChunkError(ValueError):
    """A chunk is missing or damaged; the message says which."""


def write(directory: Path, array: np.ndarray) -> list[str]:
    """Write the chunks of an array that are not there yet, and return the names of all."""
    make_directory(directory)
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    names = []
    for start in range(0, len(content), CHUNK):
        chunk = content[start : start + CHUNK]
        names.append(hashlib.sha256(chunk).hexdigest())
        path = directory / names[-1]
        if not path.is_file() or path.stat().st_size != len(chunk):
            with replaced(path) as file:
                file.write(chunk)
    sync_directory(directory)
    return names


def read(directory: Path, names: Sequence[str], size: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Read an array that was written in chunks of `size` bytes. Nothing is read before all sizes are checked."""
    array = np.empty(shape, dtype)
    if size < 1 or len(names) != -(-array.nbytes // size):
        raise ChunkError(f"its {len(names)} chunks of {size} bytes are not the {array.nbytes} bytes of the array")
    for number, name in enumerate(names):
        if not re.fullmatch("[0-9a-f]{64}", name):
            raise ChunkError("the name of a chunk is not a checksum")
        path, expected = directory / name, min(size, array.nbytes - number * size)
        if not path.is_file() or path.stat().st_size != expected:
            raise ChunkError(f"the chunk '{path}' is missing or incomplete")
    content = array.reshape(-1).view(np.uint8).data
    for number, name in enumerate(names):
        part = content[number * size : (number + 1) * size]
        with (directory / name).open("rb") as file:
            complete = file.readinto(part) == len(part)
        if not complete or hashlib.sha256(part).hexdigest() != name:
            raise ChunkError(f"the checksum of the chunk '{directory / name}' does not match")
    return array


def discard(directory: Path, used: Collection[str]) -> None:
    """Delete the chunks that are not used any more, and what a killed process has left."""
    kept = set(used)
    for path in directory.iterdir():
        if path.name not in kept:
            path.unlink()
