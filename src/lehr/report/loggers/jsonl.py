"""`metrics.jsonl`: one row per line, each a JSON object.

Floats are written with full precision, so that they read back as the same float32 or float64. JSON has no NaN or
infinity; they are the strings "NaN", "Infinity" and "-Infinity", as in the JSON format of protocol buffers.
"""

import json
import math
import mmap
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lehr.errors import InputError
from lehr.files import open_in_place, sync
from lehr.report.loggers.ledger import Mark

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonLines:
    """Append rows to a file. They are buffered until `flush`.

    Args:
        path: the file.
        mark: number, size and checksum of the rows that it has already.
    """

    def __init__(self, path: Path, mark: Mark | None = None) -> None:
        self._file = open_in_place(path, "a")
        self.mark = mark or Mark(0)
        """Number, size and checksum of all rows, including those still buffered."""

    def log(self, row: Mapping[str, float | str]) -> None:
        """Append one row."""
        line = json.dumps({name: _to_json(value) for name, value in row.items()}, allow_nan=False) + "\n"
        self._file.write(line)
        self.mark = self.mark.add(line.encode())

    def flush(self) -> None:
        """Write all rows to the operating system."""
        self._file.flush()

    def sync(self) -> None:
        """Write all rows to the disk."""
        sync(self._file)

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


def truncate_after(path: Path, update: int) -> None:
    """Remove all rows after this `update`, and an incomplete last line, before a run is resumed.

    Rows are sorted by update, so only the part that is removed is read, from the end of the file.
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    with open_in_place(path, "r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            end = len(text)
            while end > 0:
                start = text.rfind(b"\n", 0, end - 1) + 1
                row = _parse(text[start:end])
                if row is not None and row.get("update", math.inf) <= update:
                    break
                end = start
        file.truncate(end)


def read(path: Path) -> dict[str, np.ndarray]:
    """Read a file into columns by name, each with one entry per row; an incomplete last line is ignored.

    A column is int64 if every row has an integer for it (exact to 2^53), otherwise float64, with NaN for missing
    values. A column that contains strings has dtype object, with "" for missing values.
    """
    numbers: dict[str, array[float]] = {}
    strings: dict[str, dict[int, str]] = {}
    fractional = set()
    rows = 0
    with path.open("rb") as file:
        for line in file:
            row = _parse(line)
            if row is None and not file.read(1):
                break
            if row is None:
                raise InputError(f"Line {rows + 1} of '{path}' is not a JSON object; remove that line.")
            for name, value in row.items():
                value = _NON_FINITE.get(value, value) if isinstance(value, str) else value
                if isinstance(value, str):
                    strings.setdefault(name, {})[rows] = value
                    continue
                column = numbers.setdefault(name, array("d"))
                if not isinstance(value, int) or len(column) < rows:
                    fractional.add(name)
                column.extend([math.nan] * (rows - len(column)))
                column.append(value)
            rows += 1
    columns: dict[str, np.ndarray] = {}
    for name, column in numbers.items():
        short = rows - len(column)
        column.extend([math.nan] * short)
        columns[name] = np.array(column, np.float64 if short or name in fractional else np.int64)
    for name, places in strings.items():
        mixed = columns[name].astype(object) if name in columns else np.full(rows, "", object)
        mixed[list(places)] = list(places.values())
        columns[name] = mixed
    return columns


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parse a complete line; return `None` if it is incomplete or not a JSON object."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _to_json(value: Any) -> int | float | str:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
