"""`metrics.jsonl`: one row per line, each a JSON object.

Floats are written with full precision, so that they read back as the same float32 or float64. JSON has no NaN or
infinity; they are the strings "NaN", "Infinity" and "-Infinity", as in the JSON format of protocol buffers.
"""

import itertools
import json
import math
import mmap
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lehr.errors import InputError, quoted
from lehr.files import open_in_place, sync
from lehr.report.loggers.ledger import Mark

_BLOCK = 2**22
"""Bytes that are parsed at once."""
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
                number = math.inf if row is None else row.get("update")
                if isinstance(number, int | float) and number <= update:
                    break
                end = start
        file.truncate(end)


def read(path: Path) -> dict[str, np.ndarray]:
    """Read a file into columns by name, each with one entry per row; an incomplete last line is ignored.

    A column is int64 if every row has an integer for it (exact to 2^53), otherwise float64, with NaN for missing
    values. A column that contains strings has dtype object, with "" for missing values, or NaN among numbers.
    """
    blocks: list[tuple[int, dict[str, np.ndarray]]] = []
    count = 0
    try:
        with path.open("rb") as file:
            while lines := file.readlines(_BLOCK):
                rows = _rows(path, lines, count, is_last=not file.peek(1))
                blocks.append((len(rows), _columns(path, rows, count)))
                count += len(rows)
    except OSError as error:
        raise InputError(f"The metrics '{path}' cannot be read: {error.strerror}; give a run with metrics.") from None
    names = dict.fromkeys(name for _, block in blocks for name in block)
    return {name: _joined([block.get(name, np.full(size, None)) for size, block in blocks]) for name in names}


def _rows(path: Path, lines: list[bytes], before: int, is_last: bool) -> list[dict[str, Any]]:
    """Parse lines, all at once because that is much faster; if one is broken, find out which."""
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
        if len(rows) == len(lines) and lines[-1].endswith(b"\n") and all(type(row) is dict for row in rows):
            return rows
    except (ValueError, RecursionError):
        pass
    rows = []
    for number, line in enumerate(lines, 1):
        row = _parse(line)
        if row is None and is_last and number == len(lines):
            break
        if row is None:
            raise InputError(f"Line {before + number} of '{path}' is not a JSON object; remove that line.")
        rows.append(row)
    return rows


def _columns(path: Path, rows: list[dict[str, Any]], before: int) -> dict[str, np.ndarray]:
    """The columns of some rows: int64, float64, or objects with `None` for missing values."""
    names = dict.fromkeys(itertools.chain.from_iterable(rows))
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        kinds = set(map(type, values))
        if str in kinds:
            values = [_NON_FINITE.get(value, value) if isinstance(value, str) else value for value in values]
            kinds = set(map(type, values))
        absent = type(None) in kinds and any(name in row and row[name] is None for row in rows)
        if absent or not kinds <= {int, float, bool, str, type(None)}:
            _refuse(path, name, rows, before)
        try:
            plain = kinds <= {int, float, bool}
            kind: Any = object if not plain else np.float64 if float in kinds else np.int64
            columns[name] = np.array(values, kind)
        except OverflowError:  # a whole number beyond 64 bits
            try:
                columns[name] = np.array([np.nan if value is None else float(value) for value in values])
            except (OverflowError, ValueError):
                _refuse(path, name, rows, before)
    return columns


def _refuse(path: Path, name: str, rows: list[dict[str, Any]], before: int) -> NoReturn:
    """Raise an error for the first row whose value is neither a string nor a number that fits into a float."""
    for number, row in enumerate(rows, before + 1):
        value = row.get(name, "")
        is_number = isinstance(value, int | float) and abs(value) <= sys.float_info.max
        if not isinstance(value, str) and not is_number:
            raise InputError(
                f"Line {number} of '{path}' has {quoted(value)} for {quoted(name)}; it must be a number or a text: "
                "remove that line."
            )
    raise InputError(f"The column {quoted(name)} of '{path}' mixes texts with numbers beyond 64 bits; remove it.")


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    """The pieces of a column as one, with missing values filled in."""
    column = np.concatenate(pieces)
    if column.dtype != object:
        return column
    missing = column == None  # noqa: E711, elementwise
    kinds = set(map(type, column[~missing]))
    column[missing] = "" if kinds == {str} else math.nan
    return column if str in kinds else column.astype(np.float64)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parse a complete line; return `None` if it is incomplete or not a JSON object."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _to_json(value: Any) -> int | float | str:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
