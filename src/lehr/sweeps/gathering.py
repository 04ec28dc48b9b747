"""Collect what the members of a sweep found into arrays."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lehr.sweeps.directory import Member, SweepDirectory, Wave
from lehr.sweeps.results import Halved, Results
from lehr.sweeps.wave_metrics import last_known, names_of, read_wave
from lehr.training.population_record import RUNG_SCORE

SCORE = "evaluate/return"
_MOST_ROWS = 500
_OF_FAILURES = ("update", "update/rejected", "update/frozen")


def scores(directory: SweepDirectory, members: Iterable[Member]) -> np.ndarray:
    """The score of each member: the return of its last evaluation, NaN if it diverged, was stopped or not trained."""
    found: dict[int, float] = {}
    for wave in _finished(directory):
        table = read_wave(directory, wave, [SCORE, *_OF_FAILURES])
        last = np.where(_failed(table), np.nan, last_known(table[SCORE]))
        found |= {member.number: float(last[index]) for index, member in enumerate(wave.members)}
    return np.array([found.get(member.number, np.nan) for member in members])


def fresh_of(members: Iterable[Member]) -> list[Member]:
    """The members with fresh seeds that judge a configuration: the first with each seed.

    With evolution, earlier versions trained several schedules of a configuration again. The first is that of its best
    member, and the others do not judge it.
    """
    first: dict[tuple[int, int], Member] = {}
    for member in sorted(members, key=lambda member: member.number):
        if member.fresh:
            first.setdefault((member.configuration, member.seed), member)
    return list(first.values())


def gather(
    directory: SweepDirectory,
    algorithm: str,
    env: str,
    coefficients: Sequence[str],
    settings: Mapping[str, Any],
    log_scaled: Sequence[str] = (),
    notes: dict[str, str] | None = None,
) -> Results:
    """Collect the results of a sweep.

    Args:
        directory: of the sweep.
        algorithm: its name.
        env: the name of the environment.
        coefficients: the swept coefficients, whose applied values are collected.
        settings: what all members share.
        log_scaled: the parameters that were sampled on a log scale.
        notes: other facts to show.
    """
    waves = _finished(directory)
    tables = {wave.number: _read(directory, wave, coefficients) for wave in waves if not wave.members[0].fresh}
    grid = _grid([table["env_steps"] for table in tables.values()])
    place = {member.number: (wave.number, index) for wave in waves for index, member in enumerate(wave.members)}
    members = [member for wave in waves for member in wave.members]
    swept = [member for member in members if not member.fresh]
    configurations = sorted({member.configuration for member in swept})
    width = max((sum(m.configuration == c for m in swept) for c in configurations), default=0)
    numbers = np.full((len(configurations), width), -1)
    row_of = {configuration: row for row, configuration in enumerate(configurations)}
    first: dict[int, Member] = {}
    for member in sorted(swept, key=lambda member: member.number):
        row = row_of[member.configuration]
        first.setdefault(row, member)
        numbers[row, int(np.argmax(numbers[row] < 0))] = member.number

    def of(number: int, name: str) -> np.ndarray:
        """A metric of a member on the common grid; NaN for a place without a member."""
        if number < 0:
            return np.full(len(grid), np.nan)
        wave, index = place[number]
        return _on_grid(grid, tables[wave]["env_steps"], tables[wave][name][:, index])

    def of_each(values: Mapping[int, np.ndarray]) -> np.ndarray:
        """A value of each member, from an array for each wave; NaN for a place without a member."""

        def one(number: int) -> float:
            if number < 0:
                return np.nan
            wave, index = place[number]
            return float(values[wave][index])

        return np.array([[one(number) for number in row] for row in numbers]).reshape(numbers.shape)

    def last(name: str) -> np.ndarray:
        return of_each({number: last_known(table[name]) for number, table in tables.items()})

    frozen = of_each({number: _failed(table) for number, table in tables.items()}) > 0
    halved = None
    if tables and all(wave.takes_turns for wave in waves if wave.number in tables):
        ages = of_each({number: _ages(table) for number, table in tables.items()})
        halved = Halved(ages, last(RUNG_SCORE), (numbers >= 0) & np.isnan(last(SCORE)))
    again: dict[int, list[float]] = {}
    for member, score in zip(fresh := fresh_of(members), scores(directory, fresh), strict=True):
        again.setdefault(row_of[member.configuration], []).append(score)
    shape = (len(configurations), width, len(grid))
    curves = np.array([[of(number, "episode/return") for number in row] for row in numbers]).reshape(shape)
    names = list(first[0].point) if first else []
    return Results(
        title=directory.path.name,
        env=env,
        algorithm=algorithm,
        parameters={name: [first[row].point.get(name) for row in range(len(configurations))] for name in names},
        texts=[_texts(first[row]) for row in range(len(configurations))],
        members=numbers,
        env_steps=grid,
        returns=np.moveaxis(curves, 2, 0),
        scores=np.where(frozen, np.nan, last(SCORE)),
        schedules={
            name: np.array([of(row[0], f"coef/{name}") for row in numbers]).reshape(len(configurations), len(grid)).T
            for name in coefficients
        },
        frozen=frozen,
        halved=halved,
        again={row: np.array(found) for row, found in again.items()},
        settings={name: text_of(value) for name, value in settings.items()},
        log_scaled=tuple(log_scaled),
        notes=notes or {},
    )


def text_of(value: Any) -> str:
    """A setting as the command line takes it."""
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _texts(member: Member) -> dict[str, str]:
    """The swept settings of a member, as text."""
    swept = {name.partition(".")[0] for name in member.point}
    return {name: text_of(value) for name, value in member.settings.items() if name in swept}


def _finished(directory: SweepDirectory) -> list[Wave]:
    return [wave for wave in directory.read_waves() if directory.is_finished(wave)]


def _read(directory: SweepDirectory, wave: Wave, coefficients: Sequence[str]) -> dict[str, Any]:
    """The metrics of a wave; NaN for a coefficient that its members do not have, because it is none or not used."""
    applied, known = [f"coef/{name}" for name in coefficients], names_of(directory, wave)
    names = ["env_steps", "episode/return", SCORE, *_OF_FAILURES, *(name for name in applied if name in known)]
    table = read_wave(directory, wave, names)
    nothing = np.full_like(table[SCORE], np.nan)
    return table | {name: nothing for name in applied if name not in known}


def _failed(table: Mapping[str, np.ndarray]) -> np.ndarray:
    """Whether each member was frozen, or none of its updates was applied, `[members]`."""
    applied = table["update"][:, None] - table["update/rejected"]
    return (last_known(table["update/frozen"]) > 0) | (last_known(applied) == 0)


def _ages(table: Mapping[str, np.ndarray]) -> np.ndarray:
    """The env steps that each member made, `[members]`."""
    return last_known(np.where(np.isnan(table["update/frozen"]), np.nan, table["env_steps"][:, None]))


def _grid(steps: list[np.ndarray]) -> np.ndarray:
    """The env steps at which curves are compared: the rows', or, if groups have different ones, evenly spaced ones."""
    if not steps:
        return np.zeros(0)
    if all(np.array_equal(steps[0], other) for other in steps):
        return steps[0].astype(float)
    rows = min(_MOST_ROWS, max(map(len, steps)))
    return np.linspace(max(one[0] for one in steps), min(one[-1] for one in steps), rows)


def _on_grid(grid: np.ndarray, steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values at the grid: themselves, or linear between known ones; NaN before the first and after the last."""
    if np.array_equal(grid, steps):
        return values.astype(float)
    known = ~np.isnan(values)
    if not known.any():
        return np.full(len(grid), np.nan)
    return np.interp(grid, steps[known], values[known], left=np.nan, right=np.nan)
