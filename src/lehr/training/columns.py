"""The metrics of a population on disk: one array `[rows, members]` per metric, in a file per checkpoint.

    <directory>/000000000.npz    the rows after update 0: update [rows], episode/return [rows, members], ...
                000004096.npz    those after update 4096, and so on

A metric of 2,048 members over 10,000 updates is read in a moment, because the other ones are not read.
"""

import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from lehr.errors import InputError
from lehr.files import make_directory, replaced


def write(directory: Path, begin: int, columns: Mapping[str, np.ndarray]) -> None:
    """Write the rows after update `begin`: `update` `[rows]`, and any metrics `[rows, members]`."""
    make_directory(directory)
    with replaced(directory / f"{begin:012d}.npz") as file:
        np.savez(file, **dict(columns))  # type: ignore[arg-type]


def cut(directory: Path, update: int) -> None:
    """Remove the rows after an update, where a checkpoint was saved, and files that were not completed."""
    for path in directory.glob("*.tmp"):
        path.unlink()
    for begin, path in _files(directory):
        if begin >= update:
            path.unlink()


def read(directory: Path, wanted: Iterable[str]) -> dict[str, np.ndarray]:
    """Read some metrics: `[rows]` of `update`, `[rows, members]` of the others."""
    wanted = list(wanted)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    for _, path in _files(directory):
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                for name in wanted:
                    parts[name].append(file[name])
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise InputError(f"'{path}' has no readable metrics ({error}); restore it from a copy.") from None
    return {name: np.concatenate(found) if found else np.zeros((0,)) for name, found in parts.items()}


def read_all(directory: Path) -> dict[str, np.ndarray]:
    """Read all metrics."""
    return read(directory, names(directory))


def names(directory: Path) -> list[str]:
    """The names of the metrics."""
    files = _files(directory)
    if not files:
        raise InputError(f"There are no metrics in '{directory}'; restore them from a copy.")
    try:
        with files[0][1].open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return list(file)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"'{files[0][1]}' has no readable metrics ({error}); restore it from a copy.") from None


def _files(directory: Path) -> list[tuple[int, Path]]:
    found = ((re.fullmatch(r"(\d{12,})\.npz", path.name), path) for path in sorted(directory.glob("*.npz")))
    return [(int(match[1]), path) for match, path in found if match and not path.is_symlink()]
