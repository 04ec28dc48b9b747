"""The run directory: everything about one training, in files that anybody can read."""

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
from typing import Any, Literal, TextIO

import jax

from lehr.errors import InputError, closest

ROOT = Path("runs")
"""Where runs are made and looked for unless the user says otherwise."""

Status = Literal["running", "finished", "stopped", "failed"]

_PACKAGES = ("lehr", "jax", "jaxlib", "flax", "optax", "numpy")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system answers that knows no locks, as some of computing clusters."""
_locked: set[Path] = set()
"""The lock files that this process holds. The system's locks are between processes alone."""


class RunDirectory:
    """The files of a run. Reading needs no lock; as a context manager it holds the lock of the one who writes.

    Args:
        path: the directory; `create` makes a new one and `open` finds an old one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        """Everything the user chose and every default, resolved; can be given to another run."""
        self.versions = path / "versions.json"
        """The versions of the packages, and the devices, that the run began with."""
        self.git = path / "git.json"
        """The commit of the directory where the run began; absent where that is no git repository."""
        self.status = path / "status.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.curve = path / "curve.png"
        self.policy = path / "policy"
        self._lock: TextIO | None = None

    @classmethod
    def create(cls, path: str | Path) -> "RunDirectory":
        """Make a new run, with its status "running", and lock it. A directory with anything in it is refused."""
        run = cls(Path(path))
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise InputError(f"The run cannot be made at '{path}', which is a file; give another directory.") from None
        if any(entry.name != ".lock" for entry in run.path.iterdir()):
            raise InputError(f"The directory '{path}' is not empty; resume the run in it, or give another directory.")
        run.lock()
        run.write_status("running")
        write_json(run.versions, versions())
        commit = git_state()
        if commit is not None:
            write_json(run.git, commit)
        return run

    @classmethod
    def open(cls, path: str | Path, root: Path = ROOT) -> "RunDirectory":
        """Find a run by its directory or by its name under `root`."""
        places = [Path(path), root / path]
        for place in places:
            if (place / "status.json").is_file():
                return cls(place)
        for place in places:
            if place.exists():
                raise InputError(
                    f"'{place}' is not a run, for it has no status.json; give a directory of 'lehr train'."
                )
        names = [entry.parent.name for entry in sorted(root.glob("*/status.json"))]
        near = closest(str(path), names) if names else f"and '{root}' holds no runs."
        raise InputError(f"There is no run '{path}', neither as a directory nor under '{root}'; {near}")

    def lock(self) -> None:
        """Keep others from writing this run until `unlock`, or until this process dies in whatever way."""
        if self._lock is not None:
            return
        path = self.path.resolve() / ".lock"
        if path in _locked:
            raise InputError(f"The run '{self.path}' is being written by this process already; wait until it ends.")
        file = path.open("a+")
        try:
            # Not flock: a worker that was forked would inherit it and hold it after this process died.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.seek(0)
                owner = file.read()
                file.close()
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise InputError(
                    f"The run '{self.path}' is being written by process {owner}; wait until it ends, or stop it."
                ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._lock = file
        _locked.add(path)

    def unlock(self) -> None:
        """Let others write this run."""
        if self._lock is not None:
            self._lock.close()
            _locked.remove(Path(self._lock.name))
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        self.lock()
        return self

    def __exit__(self, *_: object) -> None:
        self.unlock()

    def write_status(self, status: Status, reason: str = "") -> None:
        """Say how the run is, and why it stopped or failed."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_json(self.status, {"status": status, "reason": reason, "time": now})

    def read_status(self) -> dict[str, str]:
        """The `status`, its `reason` and its `time`. A run that was killed still says "running"."""
        return json.loads(self.status.read_text())


def default_path(algorithm: str, env: str, seed: int, root: Path = ROOT) -> Path:
    """A free name for a new run, as in `runs/ppo-CartPole-v1-s0-20260131-120000`."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = re.sub(r"[^\w.-]+", "-", f"{algorithm}-{env}-s{seed}-{now}")
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(root / free for free in names if not (root / free).exists())


def versions() -> dict[str, Any]:
    """What the results of a run depend on besides its config: packages, Python, platform and devices."""
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
    """The commit, and whether tracked files differ from it; None where git or a repository is missing."""

    def git(*words: str) -> str:
        quiet = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
        answer = subprocess.run(["git", *words], capture_output=True, check=True, timeout=10, cwd=directory, env=quiet)
        return answer.stdout.decode(errors="replace").strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return None


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole: a reader, or a process killed meanwhile, sees the old text or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, like `write_text`."""
    write_text(path, json.dumps(value, indent=2) + "\n")
