"""The zoo: tuned settings by algorithm and environment, with the returns that they reached.

Each algorithm has a file `<algorithm>.yaml` here, with the fields of `Entry` by environment.

>>> entry = find("ppo", "Pendulum-v1")
>>> entry.settings["total_steps"]
100000
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lehr import algorithms, config
from lehr.config.fields import fields_of
from lehr.errors import InputError, listed, quoted, shortened
from lehr.training.plan import RunConfig, settings_classes


@dataclass(frozen=True)
class Published:
    """A return that others report for the same env steps."""

    mean: float
    source: str
    deviation: float = 0.0
    """Its standard deviation over runs; 0 if there was one run only."""

    def __str__(self) -> str:
        return f"{self.mean:g}" + (f" ± {self.deviation:g}" if self.deviation else "") + f" ({self.source})"


@dataclass(frozen=True)
class Entry:
    """Tuned settings of an algorithm for an environment, and the returns that they reached."""

    algorithm: str
    env: str
    settings: dict[str, Any]
    """What `lehr train` takes, except the environment and the seed; every setting that matters, even if it is a
    default."""
    returns: dict[int, float] = field(default_factory=dict)
    """By seed, the mean return of `evaluate_episodes` episodes after training."""
    actions: Literal["most likely", "sampled"] = "most likely"
    """Which actions the evaluation takes."""
    machine: str = ""
    """What the returns were measured on."""
    chosen: str = ""
    """How the settings were chosen, and on which seeds."""
    published: Published | None = None
    shown_by: str = ""
    """The command that showed the returns, if it was not that of `lehr zoo check`."""

    @property
    def total_steps(self) -> int:
        """The budget in env steps."""
        return int(self.settings["total_steps"])

    @property
    def learning(self) -> dict[str, Any]:
        """The settings without those of the run: of the algorithm, its network and its reward model."""
        return {name: value for name, value in self.settings.items() if name not in fields_of([RunConfig])}

    @property
    def suite(self) -> str:
        """The prefix of the environment, or `built-in`."""
        return self.env.partition(":")[0] if ":" in self.env else "built-in"

    @property
    def metric(self) -> str:
        """The metric that `returns` has the values of."""
        return "evaluate/return" if self.actions == "most likely" else "evaluate/return_sampled"

    @property
    def seeds(self) -> list[int]:
        """The seeds of `returns`."""
        return list(self.returns)

    @property
    def mean(self) -> float:
        """The mean of `returns`."""
        return float(np.mean(list(self.returns.values())))

    @property
    def deviation(self) -> float:
        """The standard deviation of `returns` over seeds."""
        return float(np.std(list(self.returns.values())))

    @property
    def meets(self) -> bool | None:
        """Whether the mean is not below the published one minus its standard deviation; `None` without one."""
        return None if self.published is None else self.mean >= self.published.mean - self.published.deviation

    @property
    def command(self) -> str:
        """The command that showed the returns: it trains the entry with their seeds."""
        if self.shown_by:
            return self.shown_by
        seeds = f"--seeds {len(self.seeds)} --first-seed {min(self.seeds)}"
        return f"lehr zoo check {self.algorithm} {self.env} {seeds}"


@cache
def _all() -> tuple[Entry, ...]:
    """All entries, by algorithm and in the order of their files."""
    files = sorted(Path(__file__).parent.glob("*.yaml"))
    return tuple(_read(file.stem, env, given) for file in files for env, given in config.from_yaml(file).items())


def _read(algorithm: str, env: str, given: Mapping[str, Any]) -> Entry:
    published = {"published": Published(**given["published"])} if "published" in given else {}
    return Entry(algorithm, env, **{**given, **published})


def entries(algorithm: str | None = None, env: str | None = None) -> list[Entry]:
    """The entries of an algorithm, of an environment, of both, or all."""
    return [one for one in _all() if algorithm in (None, one.algorithm) and env in (None, one.env)]


def find(algorithm: str, env: str) -> Entry:
    """The entry of an algorithm and an environment, by their names."""
    for entry in entries(algorithm, env):
        return entry
    for_env, for_algorithm = entries(env=env), entries(algorithm)
    named, task = shortened(algorithm), shortened(env)
    if for_env:
        said = f"The zoo has no tuned settings of {named} for {task}, only of {listed([e.algorithm for e in for_env])}."
    else:
        said = f"The zoo has no tuned settings for {task}."
    if for_algorithm:
        raise InputError(
            f"{said} For {named} it has {listed([one.env for one in for_algorithm])}. Choose one of these, or train "
            "without tuned settings."
        )
    raise InputError(f"{said} It has none for {named}. Train without tuned settings.")


def with_tuned(algorithm: Any, env: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The tuned settings of an algorithm for an environment, overridden by those that are given by any of their names.

    If another reward model is given, the settings of the tuned one are left out.
    """
    tuned = find(algorithms.name_of(algorithm), env).settings
    if given.get("preset") is not None:
        raise InputError(
            f"preset is {quoted(given['preset'])}, but the tuned settings leave nothing for it to fill in; drop one of "
            "them."
        )
    classes = settings_classes(algorithm, {**tuned, **given})
    known = fields_of(classes)
    return config.merge(classes, {name: value for name, value in tuned.items() if name in known}, given)


def text(settings: Mapping[str, Any]) -> str:
    """Settings in one line."""
    return ", ".join(f"{name} {setting_text(value)}" for name, value in settings.items())


def setting_text(value: Any) -> str:
    """A setting as the command line takes it, in quotes where it has spaces.

    >>> setting_text([64, 64]), setting_text("1e-3 -> 0"), setting_text({"backend": "spring"}), setting_text(True)
    ('64,64', "'1e-3 -> 0'", 'backend=spring', 'true')
    >>> setting_text(None)
    'none'
    """
    if isinstance(value, dict):
        return ",".join(f"{name}={part}" for name, part in value.items())
    if isinstance(value, list):
        return ",".join(map(str, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if isinstance(value, str) and " " in value else str(value)


def write(algorithm: str, found: Iterable[Entry]) -> None:
    """Write the file of an algorithm again."""
    mapping = {one.env: _mapping(one) for one in found if one.algorithm == algorithm}
    config.to_yaml(Path(__file__).parent / f"{algorithm}.yaml", mapping)
    _all.cache_clear()


def _mapping(entry: Entry) -> dict[str, Any]:
    """What a file has of an entry: what is not empty, in the order of the fields."""
    found = {part.name: getattr(entry, part.name) for part in fields(entry) if part.name not in ("algorithm", "env")}
    if entry.published is not None:
        found["published"] = {name: value for name, value in vars(entry.published).items() if value}
    return {name: value for name, value in found.items() if value}
