"""What a checkpoint knows of `metrics.jsonl`: how many rows precede it, and their checksum.

A resumed run compares the file with it, so that rows that were lost or changed are noticed.
"""

import itertools
import json
import shutil
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lehr.files import open_in_place, replaced

_MOST_MARKS = 64
_MOST_RANGES = 5
_BLOCK = 1 << 20


class Mark(NamedTuple):
    """The beginning of the file, up to the last row of an update."""

    update: int
    rows: int = 0
    size: int = 0
    """In bytes."""
    crc32: int = 0

    def add(self, line: bytes) -> "Mark":
        """The mark after one more line."""
        return Mark(self.update, self.rows + 1, self.size + len(line), zlib.crc32(line, self.crc32))


class Ledger(NamedTuple):
    """The file at a checkpoint, and at some of the checkpoints before it, to say where damage is."""

    marks: tuple[Mark, ...]

    @classmethod
    def read(cls, path: Path, update: int) -> "Ledger":
        """The ledger of a file as it is."""
        mark = Mark(update)
        if path.exists():
            with path.open("rb") as file:
                for block in iter(lambda: file.read(_BLOCK), b""):
                    rows, size = mark.rows + block.count(b"\n"), mark.size + len(block)
                    mark = Mark(update, rows, size, zlib.crc32(block, mark.crc32))
        return cls((mark,))

    @classmethod
    def from_json(cls, found: Any) -> "Ledger | None":
        """The ledger in the metadata of a checkpoint; `None` if there is none."""
        try:
            marks = tuple(Mark(*map(int, mark)) for mark in found["marks"])
        except (KeyError, TypeError, ValueError):
            return None
        is_sound = list(marks) == sorted(marks) and all(number >= 0 for mark in marks for number in mark)
        return cls(marks) if marks and is_sound else None

    def to_json(self) -> dict[str, Any]:
        """The ledger as JSON."""
        return {"columns": list(Mark._fields), "marks": [list(mark) for mark in self.marks]}

    @property
    def now(self) -> Mark:
        """The file at the checkpoint."""
        return self.marks[-1]

    def add(self, mark: Mark) -> "Ledger":
        """The ledger with one more mark; about every second one is dropped if there are too many."""
        earlier = tuple(kept for kept in self.marks if kept.update < mark.update)
        return Ledger((*(earlier if len(earlier) < _MOST_MARKS else earlier[1::2]), mark))

    def until(self, update: int) -> "Ledger | None":
        """The ledger of an earlier checkpoint; `None` if its mark was dropped."""
        found = tuple(mark for mark in self.marks if mark.update <= update)
        return Ledger(found) if found and found[-1].update == update else None


def restore(path: Path, ledger: Ledger, report: Callable[[str], object]) -> Ledger:
    """Cut the file after the checkpoint's rows, and return its ledger.

    If rows are missing or damaged, report which, keep a copy of the file next to it as `metrics.damaged-1.jsonl`, and
    go on with the sound rows; the ledger returned is then a new one.
    """
    if path.exists():
        with open_in_place(path, "r+b") as file:
            if _checksum(file, ledger.now.size) == ledger.now.crc32:
                file.truncate(ledger.now.size)
                return ledger
    elif not ledger.now.rows:
        return ledger
    kept = _keep_aside(path)
    blocks = [_Block(before, after) for before, after in itertools.pairwise((Mark(-1), *ledger.marks))]
    mark, marks = Mark(-1), []
    with replaced(path) as file:
        ends = [block.after.update for block in blocks]
        place = 0
        for update, line in _sound_rows(path, ends[-1]):
            while update > ends[place]:
                marks.append(mark._replace(update=ends[place]))
                place += 1
            blocks[place].add(update, line)
            mark = mark.add(line)
            file.write(line)
    marks += [mark._replace(update=end) for end in ends[len(marks) :]]
    report(_sentence(path, kept, ledger.now, blocks))
    return Ledger(tuple(marks))


class _Block:
    """The rows between two marks, as far as they were found."""

    def __init__(self, before: Mark, after: Mark) -> None:
        self.before, self.after = before, after
        self.crc32 = before.crc32
        self.updates: list[int] = []

    def add(self, update: int, line: bytes) -> None:
        self.crc32 = zlib.crc32(line, self.crc32)
        self.updates.append(update)

    @property
    def missing(self) -> int:
        return max(self.after.rows - self.before.rows - len(self.updates), 0)

    @property
    def is_changed(self) -> bool:
        return not self.missing and self.crc32 != self.after.crc32

    @property
    def has_every_update(self) -> bool:
        return self.after.rows - self.before.rows == self.after.update - max(self.before.update, 0)

    @property
    def span(self) -> range:
        """All updates between the marks."""
        return range(max(self.before.update, 0) + 1, self.after.update + 1)

    @property
    def text(self) -> str:
        return f"{self.span.start}-{self.after.update}"


def _checksum(file: Any, size: int) -> int | None:
    """The checksum of the first bytes of a file; `None` if it is shorter."""
    crc32 = 0
    while size > 0:
        block = file.read(min(size, _BLOCK))
        if not block:
            return None
        crc32, size = zlib.crc32(block, crc32), size - len(block)
    return crc32


def _keep_aside(path: Path) -> Path | None:
    """Copy a damaged file; `None` if there is nothing in it."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    names = (path.with_name(f"{path.stem}.damaged-{number}{path.suffix}") for number in itertools.count(1))
    free = next(name for name in names if not name.exists())
    with replaced(free) as file, path.open("rb") as damaged:
        shutil.copyfileobj(damaged, file)
    return free


def _sound_rows(path: Path, last: int) -> Iterable[tuple[int, bytes]]:
    """The updates and the lines of the rows that can be read, in order, up to the last update."""
    before = 0
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            update = _update_of(line)
            if update is not None and before < update <= last:
                before = update
                yield update, line


def _update_of(line: bytes) -> int | None:
    """The update of a row; `None` if the line is not a whole row."""
    try:
        update = json.loads(line)["update"] if line.endswith(b"\n") else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return update if isinstance(update, int) else None


def _sentence(path: Path, kept: Path | None, now: Mark, blocks: list[_Block]) -> str:
    missing, whole = sum(block.missing for block in blocks), [block for block in blocks if block.has_every_update]
    found = []
    if missing:
        where = _ranges([update for block in whole for update in sorted(set(block.span).difference(block.updates))])
        where += [f"{b.missing} of {b.text}" for b in blocks if b.missing and b not in whole]
        verb = "is" if missing == 1 else "are"
        found.append(
            f"{missing} of its {now.rows} rows up to update {now.update} {verb} missing (updates {_listed(where)})"
        )
    if changed := [block.text for block in blocks if block.is_changed]:
        found.append(f"values in the rows of updates {_listed(changed)} were changed")
    what = " and ".join(found) or "it has lines that are not rows"
    aside = f", and the damaged file is kept as {kept.name}" if kept else ""
    return f"The file '{path}' is damaged: {what}. The run goes on with the rows that can be read{aside}."


def _ranges(numbers: list[int]) -> list[str]:
    """Whole numbers as ranges.

    >>> _ranges([3, 5, 6, 7])
    ['3', '5-7']
    """
    groups = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in group] for _, group in groups]
    return [f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]


def _listed(words: list[str]) -> str:
    more = len(words) - _MOST_RANGES
    return ", ".join(words[:_MOST_RANGES]) + (f" and {more} more" if more > 0 else "")
