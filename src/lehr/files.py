"""Files of a run: a kill or a power failure leaves them as they were or complete, and no link is written through.

A run directory may come from a stranger. A link in it could point to any file of the user's, so files are replaced by
new ones, and a file or directory that cannot be replaced must not be a link.
"""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lehr.errors import InputError


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of `path`, link or not, once it is complete and synced to disk."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:  # a new file: neither that of a killed process nor a link
            yield file
            sync(file)
        temporary.replace(path)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def open_in_place(path: Path, mode: str) -> IO[Any]:
    """Open a file to append to it or to change it; a link is refused. Text is UTF-8."""
    encoding, newline = (None, None) if "b" in mode else ("utf-8", "\n")

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    try:
        return open(path, mode, encoding=encoding, newline=newline, opener=opener)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        raise


def make_directory(path: Path) -> None:
    """Make a directory if there is none; a link is refused."""
    refuse_link(path)
    path.mkdir(parents=True, exist_ok=True)


def refuse_link(path: Path) -> None:
    """Refuse to write to a link."""
    if path.is_symlink():
        raise InputError(
            f"'{path}' is a link, and a run does not write through links; replace it by a copy of what it points to, "
            "or remove it."
        )


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
