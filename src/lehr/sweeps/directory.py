"""The directory of a sweep: its definition, its members, the populations they were trained in, and the report.

sweep.yaml            the definition
status.json           running, finished, stopped or failed
settings.json         all settings of the first member, with the defaults of the version that began the sweep
waves.json            the members of each population, in the order in which they are trained
waves/000/            a population: status.json, metrics/ in columns, checkpoints/
report.html           what was found
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lehr.errors import InputError, shortened
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

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Member":
        """Read a member as JSON stores it; what no sweep writes is a `ValueError`."""
        member = cls(**given)
        for name, kind in _KINDS.items():
            if type(getattr(member, name)) is not kind:
                raise ValueError(f"the {name} of a member is not of type {kind.__name__}")
        return member

    @property
    def label(self) -> str:
        """Number, swept values and seed, in one line."""
        values = ", ".join(f"{name} {_short(value)}" for name, value in self.point.items())
        return f"{self.number}: {values}{', ' if values else ''}seed {self.seed}"


_KINDS = {"number": int, "configuration": int, "seed": int, "point": dict, "settings": dict, "fresh": bool}
"""The types of the fields of a member."""


def _short(value: Any) -> str:
    return "none" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Wave:
    """Members that are trained together, or that take turns in the places of one population."""

    number: int
    members: tuple[Member, ...]
    size: int
    """How many places its population has; those beyond `members` only fill it up."""
    takes_turns: bool = False
    """Whether there may be more members than places: those that wait begin in the places of others."""


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
        self._settings = path / "settings.json"

    @classmethod
    def create(cls, path: str | Path) -> "SweepDirectory":
        """Create a new sweep, and lock it; the directory must be empty or not exist."""
        if (Path(path) / "sweep.yaml").exists():
            raise InputError(f"There is a sweep in '{path}' already; add --resume, or give another directory.")
        run = RunDirectory.create(path)
        return cls(run.path, run)

    @classmethod
    def open(cls, path: str | Path) -> "SweepDirectory":
        """Find a sweep by its directory, or by its name under `sweeps/`."""
        for place in (Path(path), ROOT / path):
            if (place / "sweep.yaml").is_file():
                return cls(place)
        if Path(path).is_dir():
            raise InputError(f"'{path}' has no sweep.yaml; give a directory written by 'lehr sweep'.")
        raise InputError(
            f"There is no sweep '{path}', neither as a directory nor under '{ROOT}'; give a directory written by "
            "'lehr sweep'."
        )

    def wave_path(self, number: int) -> Path:
        """The directory of a population."""
        return self.path / "waves" / f"{number:03d}"

    @property
    def is_complete(self) -> bool:
        """Whether all members are trained."""
        return _is_finished(self.run)

    def is_finished(self, wave: Wave) -> bool:
        """Whether the members of a wave are trained."""
        return _is_finished(RunDirectory(self.wave_path(wave.number)))

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Write the settings of the first member, defaults too; if a sweep is resumed, refuse others.

        The definition states only what the user gave, and a later version of Lehr may have other defaults.
        """
        refuse_link(self._settings)
        now = json.loads(json.dumps(settings, default=str))
        if not self._settings.exists():
            if not self._waves.exists():  # an earlier version wrote none
                write_json(self._settings, now)
            return
        try:
            before = dict(json.loads(self._settings.read_text()))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise InputError(f"'{self._settings}' is damaged ({error}); restore it from a copy.") from None
        changed = [name for name in before.keys() & now.keys() if before[name] != now[name]]
        if changed:
            told = ", ".join(f"{name} was {before[name]} and is {now[name]}" for name in sorted(changed))
            raise InputError(
                f"'{self.path}' began with other settings than those of now, defaults included: "
                f"{shortened(told, 400)}; write the earlier ones under settings in '{self.definition}'."
            )

    def write_waves(self, waves: list[Wave]) -> None:
        """Write which members are trained together."""
        turns: dict[str, Any] = {"takes_turns": True}
        write_json(
            self._waves,
            [
                {"size": wave.size, "members": [vars(member) for member in wave.members]}
                | (turns if wave.takes_turns else {})
                for wave in waves
            ],
        )

    def read_waves(self) -> list[Wave]:
        """Read which members are trained together; empty if the sweep has not begun."""
        refuse_link(self._waves)
        if not self._waves.exists():
            return []
        try:
            waves = [
                Wave(
                    number,
                    tuple(Member.read(member) for member in wave["members"]),
                    wave["size"],
                    wave.get("takes_turns") is True,
                )
                for number, wave in enumerate(json.loads(self._waves.read_text()))
            ]
            total = sum(len(wave.members) for wave in waves)
            for wave in waves:
                most = wave.size if wave.takes_turns else len(wave.members)
                if type(wave.size) is not int or not wave.members or not 1 <= most <= wave.size < 2 * total:
                    raise ValueError(f"wave {wave.number} has {len(wave.members)} members, but its size is {wave.size}")
            return waves
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(f"'{self._waves}' is damaged ({error}); restore it from a copy.") from None


def _is_finished(directory: RunDirectory) -> bool:
    """Whether a status says so; one that cannot be read does not."""
    try:
        return directory.read_status()["status"] == "finished"
    except (OSError, ValueError, KeyError, TypeError):
        return False
