"""The run directory: everything about one training run, in readable files."""

import datetime
import errno
import fcntl
import itertools
import json
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Literal

import jax

from lehr.errors import InputError, closest, quoted
from lehr.files import open_in_place, write_json
from lehr.training import checkpoint

ROOT = Path("runs")
"""Default directory in which runs are created and looked up."""

Status = Literal["running", "finished", "stopped", "failed"]

_PACKAGES = ("lehr", "jax", "jaxlib", "flax", "optax", "numpy")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks, as on some computing clusters."""
_locked: set[Path] = set()
"""Lock files held by this process. The system's locks only work between processes."""


class RunDirectory:
    """The files of a run. Reading needs no lock; as a context manager, it holds the write lock.

    Args:
        path: the directory; `create` makes a new one, `open` finds an existing one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        """Every setting, including defaults; another run can use it with `--config`."""
        self.versions = path / "versions.json"
        """Package versions and devices at the start of the run."""
        self.git = path / "git.json"
        """Commit of the working directory at the start of the run; only in a git repository."""
        self.status = path / "status.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.curve = path / "curve.png"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: str | Path) -> "RunDirectory":
        """Create a new run with status "running", and lock it.

        The directory must be empty or not exist, or hold what a run left that was killed before its first update.
        """
        run = cls(Path(path))
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise InputError(f"Cannot create a run at '{path}': it is a file; give another directory.") from None
        run.refuse_content()
        run.lock()
        try:
            run.refuse_content()  # another process may have written it in between
        except InputError:
            run.unlock()
            raise
        run.write_status("running")
        write_json(run.versions, versions())
        commit = git_state()
        if commit is not None:
            write_json(run.git, commit)
        return run

    def refuse_content(self) -> None:
        """Refuse a directory with files, except those of a run that was killed before it was ready to be resumed."""
        if not self.path.is_dir():
            return
        entries = {entry.name for entry in self.path.iterdir()}
        saved = checkpoint.steps(self.checkpoints)
        if self.config.exists() or (saved and not (len(saved) == 1 and self._has_only_begun(entries))):
            raise InputError(f"The directory '{self.path}' is not empty; resume its run, or give another directory.")
        if entries - {".lock", f"{self.status.name}.tmp"} and not self._has_only_begun(entries):
            raise InputError(f"The directory '{self.path}' is not empty; give another directory.")

    def _has_only_begun(self, entries: set[str]) -> bool:
        """Whether the entries of the directory are those that a run writes before its settings, which come last."""
        files = {path.name for path in (self.status, self.versions, self.git)}
        files |= {f"{name}.tmp" for name in files} | {".lock", self.metrics.name, self.config.with_suffix(".tmp").name}
        folders = {self.checkpoints: r".*\.tmp|memory|\d{12}", self.tensorboard: r"events\.out\..*"}
        try:
            return (
                self.read_status()["status"] == "running"
                and entries <= files | {path.name for path in folders}
                and (not self.metrics.exists() or self.metrics.stat().st_size == 0)
                and all(
                    re.fullmatch(pattern, entry.name)
                    for path, pattern in folders.items()
                    if path.exists()
                    for entry in path.iterdir()
                )
            )
        except (OSError, ValueError, KeyError, TypeError):  # a file with the name of one of ours
            return False

    @classmethod
    def open(cls, path: str | Path, root: Path = ROOT) -> "RunDirectory":
        """Find a run by its directory, or by its name under `root`."""
        places = [Path(path), root / path]
        try:
            found = [place for place in places if (place / "status.json").is_file()]
        except OSError as error:  # such as a name that is too long
            raise InputError(f"Cannot open the run {quoted(str(path))}: {error.strerror}; give another.") from None
        if found:
            return cls(found[0])
        for place in places:
            if place.exists():
                raise InputError(
                    f"'{place}' is not a run: it has no status.json; give a directory written by 'lehr train'."
                )
        raise InputError(f"There is no run '{path}', neither as a directory nor under '{root}'; {_others(path, root)}")

    def lock(self) -> None:
        """Prevent other processes from writing to this run until `unlock`, or until this process ends in any way."""
        if self._lock is not None:
            return
        path = self.path.resolve() / ".lock"
        if path in _locked:
            raise InputError(f"This process is already writing the run '{self.path}'; wait until it ends.")
        file = open_in_place(path, "a+")
        try:
            # Not flock: a forked worker would inherit the lock and hold it after this process died.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.seek(0)
                owner = file.read()
                file.close()
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise InputError(
                    f"Process {owner} is writing the run '{self.path}'; wait until it ends, or stop it."
                ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._lock = file
        _locked.add(path)

    def unlock(self) -> None:
        """Allow other processes to write to this run."""
        if self._lock is not None:
            self._lock.close()
            _locked.remove(Path(self._lock.name))
            self._lock = None

    def is_locked(self) -> bool:
        """Whether a process is writing to this run; on a file system without locks, always true."""
        path = self.path.resolve() / ".lock"
        if path in _locked:  # and closing the file below would give up this process's lock
            return True
        try:
            with open_in_place(path, "r") as file:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN, *_NO_LOCKS):
                raise
            return True
        return False

    def __enter__(self) -> "RunDirectory":
        self.lock()
        return self

    def __exit__(self, *_: object) -> None:
        self.unlock()

    def write_status(self, status: Status, reason: str = "") -> None:
        """Write the status of the run, and why it stopped or failed."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_json(self.status, {"status": status, "reason": reason, "time": now})

    def read_status(self) -> dict[str, str]:
        """Return the `status`, its `reason` and its `time`. The status of a killed run is still "running"."""
        return json.loads(self.status.read_text())


def _others(path: str | Path, root: Path) -> str:
    """Say which run may be meant by a name that is none, or which are the newest."""
    places = dict.fromkeys([Path(path).parent, root] if Path(path).parent != Path() else [root])
    found = [entry.parent for place in places for entry in place.glob("*/status.json")]
    if not found:
        return f"and '{root}' contains no runs."
    found.sort(key=lambda run: (run / "status.json").lstat().st_mtime_ns, reverse=True)
    names = {run.name: str(run.name if run.parent == root else run) for run in reversed(found)}
    near = closest(Path(path).name, [run.name for run in found])
    if match := re.fullmatch(r"did you mean '(.*)'\?", near):
        return f"did you mean {names[match[1]]!r}?"
    beside = [run for run in found if run.parent == found[0].parent]
    newest = ", ".join(names[run.name] for run in beside[:_MOST_LISTED])
    if len(beside) <= _MOST_LISTED:
        return f"known: {newest}"
    option = "" if beside[0].parent == ROOT else f" --root {beside[0].parent}"
    return f"the newest are {newest}; 'lehr list runs{option}' shows all {len(beside)}."


_MOST_LISTED = 5
"""How many runs an error lists."""


def default_path(algorithm: str, env: str, seed: int, root: Path = ROOT) -> Path:
    """Return an unused path for a new run, such as `runs/ppo-CartPole-v1-s0-20260131-120000`."""
    return unused_path(f"{algorithm}-{env}-s{seed}", root)


def unused_path(name: str, root: Path) -> Path:
    """Return an unused path under `root`: the name, without odd characters, and the time."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = re.sub(r"[^\w.-]+", "-", f"{name}-{now}").lstrip("-.")
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(root / free for free in names if not (root / free).exists())


def versions() -> dict[str, Any]:
    """Return what results depend on besides the config: packages, Python, platform and devices."""
    found: dict[str, Any] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
    }


def git_state(directory: Path | None = None) -> dict[str, Any] | None:
    """Return the commit, and whether tracked files differ from it; None without git or outside a repository."""

    def git(*words: str) -> str:
        quiet = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
        answer = subprocess.run(["git", *words], capture_output=True, check=True, timeout=10, cwd=directory, env=quiet)
        return answer.stdout.decode(errors="replace").strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return None
