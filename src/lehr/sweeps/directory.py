"""The directory of a sweep: its definition, its members, the populations they were trained in, and the report.

sweep.yaml            the definition
status.json           running, finished, stopped or failed
waves.json            the members of each population, in the order in which they are trained
waves/000/            a population: status.json, metrics/ in columns, checkpoints/
report.html           what was found
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lehr.errors import InputError
from lehr.files import refuse_link, write_json
from lehr.training.directory import RunDirectory

ROOT = Path("sweeps")
"""Default directory in which sweeps are created and looked up."""


@dataclass(frozen=True)
class Member:
    """One member of a sweep."""

    number: int
    configuration: int
    """Number of the configuration, which several seeds share."""
    seed: int
    point: dict[str, Any]
    """The value of each swept parameter."""
    settings: dict[str, Any]
    """What `lehr train` takes, without the seed."""
    fresh: bool = False
    """Whether it trains one of the best configurations again, with a fresh seed."""

    @property
    def label(self) -> str:
        """Number, swept values and seed, in one line."""
        values = ", ".join(f"{name} {_short(value)}" for name, value in self.point.items())
        return f"{self.number}: {values}{', ' if values else ''}seed {self.seed}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Wave:
    """Members that are trained together."""

    number: int
    members: tuple[Member, ...]
    size: int
    """How many members its population has; those beyond `members` only fill it up."""


class SweepDirectory:
    """The files of a sweep.

    Args:
        path: the directory.
        run: its lock and its status, if they are held already.
    """

    def __init__(self, path: Path, run: RunDirectory | None = None) -> None:
        self.path = path
        self.run = run or RunDirectory(path)
        """Its lock and its status."""
        self.definition = path / "sweep.yaml"
        self.report = path / "report.html"
        self._waves = path / "waves.json"

    @classmethod
    def create(cls, path: str | Path) -> "SweepDirectory":
        """Create a new sweep, and lock it; the directory must be empty or not exist."""
        run = RunDirectory.create(path)
        return cls(run.path, run)

    @classmethod
    def open(cls, path: str | Path) -> "SweepDirectory":
        """Find a sweep by its directory, or by its name under `sweeps/`."""
        for place in (Path(path), ROOT / path):
            if (place / "sweep.yaml").is_file():
                return cls(place)
        raise InputError(
            f"There is no sweep '{path}', neither as a directory nor under '{ROOT}'; give a directory written by "
            "'lehr sweep'."
        )

    def wave_path(self, number: int) -> Path:
        """The directory of a population."""
        return self.path / "waves" / f"{number:03d}"

    def is_finished(self, wave: Wave) -> bool:
        """Whether the members of a wave are trained."""
        path = self.wave_path(wave.number)
        return (path / "status.json").exists() and RunDirectory(path).read_status()["status"] == "finished"

    def write_waves(self, waves: list[Wave]) -> None:
        """Write which members are trained together."""
        write_json(
            self._waves,
            [{"size": wave.size, "members": [asdict(member) for member in wave.members]} for wave in waves],
        )

    def read_waves(self) -> list[Wave]:
        """Read which members are trained together; empty if the sweep has not begun."""
        refuse_link(self._waves)
        if not self._waves.exists():
            return []
        try:
            found = json.loads(self._waves.read_text())
            return [
                Wave(number, tuple(Member(**member) for member in wave["members"]), int(wave["size"]))
                for number, wave in enumerate(found)
            ]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"'{self._waves}' is damaged ({error}); restore it from a copy.") from None
