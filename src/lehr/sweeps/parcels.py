"""Copy the directory of a wave to another machine, and then only what changed.

A copy can be resumed from at any moment, even after a kill: a checkpoint appears only when all of it is there, after
the metrics of the updates before it.
"""

from pathlib import Path
from typing import NamedTuple

from lehr.files import make_directory, replaced
from lehr.training import checkpoint

Marks = dict[str, tuple[int, int, int]]
"""By the path of a file in a directory: its time, size and inode, which change when the file is replaced."""


class Parcel(NamedTuple):
    """What changed in a directory."""

    files: dict[str, bytes]
    """The content of new and changed files, by their path in the directory."""
    names: frozenset[str]
    """The paths of all files."""

    def followed_by(self, later: "Parcel") -> "Parcel":
        """Both as one."""
        files = {name: content for name, content in self.files.items() if name in later.names}
        return Parcel(files | later.files, later.names)


def marks(path: Path) -> Marks:
    """The files of a directory, without locks and what is not complete."""
    found: Marks = {}
    for file in path.rglob("*"):
        name = file.relative_to(path)
        unfinished = any(part.endswith((".tmp", ".replaced")) for part in name.parts)
        if file.is_file() and not file.is_symlink() and not unfinished and name.name != ".lock":
            status = file.stat()
            found[name.as_posix()] = status.st_mtime_ns, status.st_size, status.st_ino
    return found


def pack(path: Path, before: Marks) -> Parcel:
    """What changed in a directory, which nobody is writing, since it had these marks."""
    now = marks(path)
    return Parcel(
        {name: (path / name).read_bytes() for name, mark in now.items() if before.get(name) != mark}, frozenset(now)
    )


def unpack(path: Path, parcel: Parcel) -> None:
    """Make the directory of a wave a copy of the one that the parcel comes from."""
    checkpoints, metrics = path / "checkpoints", path / "metrics"
    steps: dict[int, dict[str, bytes]] = {}  # the files of each new checkpoint, which never change
    last: dict[str, bytes] = {}
    make_directory(path)
    for file in metrics.glob("*"):  # rows after the checkpoint that training went on from
        if f"metrics/{file.name}" not in parcel.names:
            file.unlink()
    for name, content in parcel.files.items():
        match name.split("/"):
            case ["metrics", _] | ["checkpoints", "memory", _]:
                _write(path / name, content)
            case ["checkpoints", number, part]:
                steps.setdefault(int(number), {})[part] = content
            case _:
                last[name] = content
    for step, parts in sorted(steps.items()):
        with checkpoint.written(checkpoints, step) as directory:
            for part, content in parts.items():
                _write(directory / part, content)
    if checkpoints.exists():
        names = [name.split("/") for name in parcel.names]
        kept = {int(parts[1]) for parts in names if parts[0] == "checkpoints" and parts[1].isdigit()}
        checkpoint.keep_only(checkpoints, kept)
    for name, content in last.items():
        _write(path / name, content)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        file.write(content)
