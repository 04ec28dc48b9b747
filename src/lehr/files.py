"""Files that a kill or a power failure leaves either as they were or complete."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of `path` once it is complete and synced to disk."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        yield file
        sync(file)
    temporary.replace(path)
    sync_directory(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: readers, even after a kill, see either the old text or the new one."""
    with replaced(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically like `write_text`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def sync(file: IO[Any]) -> None:
    """Write what is buffered, and wait until it is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names of the files in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
