"""The metrics of each member, also where members take turns in the places of a population or become copies of others.

A file has a column for each place. With successive halving, a place goes from member to member, and each has its own
clock. With population-based training, a place goes on with a copy of another member, so the column of a place begins
with members that were given up; the rows of a member are those of its ancestors.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lehr.sweeps.directory import SweepDirectory, Wave
from lehr.sweeps.lineage import PARENT, ancestors
from lehr.training import columns
from lehr.training.population_record import MEMBER, RUNG_SCORE

CLOCK = ("update", "env_steps")
"""The columns that all members share, `[rows]`."""


def read_wave(directory: SweepDirectory, wave: Wave, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Read metrics of a wave, all by default: `[rows, members]`, and `[rows]` of `update` and `env_steps`.

    Where members took turns, each has its rows from its own beginning to its end, then NaN; `evolution/member` and
    `evolution/score` are then read as well. Where members became copies of others, each has the rows of its ancestors.
    """
    path = _metrics(directory, wave)
    known = columns.names(path)
    wanted = known if names is None else list(names)
    if not wave.takes_turns:
        if PARENT not in known:
            return columns.read(path, wanted)
        return by_lineage(columns.read(path, dict.fromkeys([*wanted, PARENT])))
    table = columns.read(path, dict.fromkeys([*wanted, *CLOCK, MEMBER, RUNG_SCORE]))
    return by_member(table, len(wave.members))


def names_of(directory: SweepDirectory, wave: Wave) -> list[str]:
    """The names of the metrics of a wave."""
    return columns.names(_metrics(directory, wave))


def _metrics(directory: SweepDirectory, wave: Wave) -> Path:
    return directory.wave_path(wave.number) / "metrics"


def by_lineage(table: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return metrics by final member and its ancestors instead of by place.

    Args:
        table: `[rows, P]` each, with the place that each place continues in `evolution/parent`; `[rows]` of the clock.

    >>> by_lineage({
    ...     "update": np.array([2, 4]), PARENT: np.array([[0, 0], [0, 1]]), "loss": np.array([[5.0, 8.0], [4.0, 3.0]]),
    ... })["loss"].T.tolist()
    [[5.0, 4.0], [5.0, 3.0]]
    """
    line = ancestors(table[PARENT])
    is_own = {*CLOCK, PARENT}
    return {
        name: column if name in is_own else np.take_along_axis(column, line, axis=1) for name, column in table.items()
    }


def by_member(table: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Return metrics by member instead of by place.

    Args:
        table: `[rows, P]` each, with the member of each place in `evolution/member`; `[rows]` of the clock.
        count: number of members.

    >>> found = by_member({
    ...     "update": np.array([2, 4, 6]), "env_steps": np.array([20, 40, 60]),
    ...     MEMBER: np.array([[0, 1], [0, 2], [0, -1]]), "loss": np.array([[5.0, 8.0], [4.0, 7.0], [3.0, 6.0]]),
    ... }, 3)
    >>> found["update"].tolist(), found["env_steps"].tolist()
    ([2, 4, 6], [20, 40, 60])
    >>> found["loss"].T.tolist()
    [[5.0, 4.0, 3.0], [8.0, nan, nan], [7.0, nan, nan]]
    """
    owners, update = table[MEMBER].astype(int), table["update"]
    spans = [span for place in range(owners.shape[1]) for span in _spans(owners[:, place], place)]
    longest = max((rows for _, _, rows in spans), key=len)
    clock = update[longest] - (update[longest[0] - 1] if longest[0] else 0)
    found = {"update": clock, "env_steps": clock * (table["env_steps"][0] // update[0])}
    for name, column in table.items():
        if name not in CLOCK:
            found[name] = np.full((len(longest), count), np.nan)
            for member, place, rows in spans:
                found[name][: len(rows), member] = column[rows, place]
    return found


def _spans(owners: np.ndarray, place: int) -> list[tuple[int, int, np.ndarray]]:
    """The members that were in a place, and the rows of each."""
    parts = np.split(np.arange(len(owners)), np.flatnonzero(np.diff(owners)) + 1)
    return [(int(owners[rows[0]]), place, rows) for rows in parts if owners[rows[0]] >= 0]


def last_known(column: np.ndarray) -> np.ndarray:
    """The last value of each member that is not NaN, `[rows, members]` to `[members]`; NaN if there is none.

    >>> last_known(np.array([[1.0, np.nan], [2.0, np.nan], [np.nan, np.nan]])).tolist()
    [2.0, nan]
    """
    known = ~np.isnan(column)
    rows = len(column) - 1 - np.argmax(known[::-1], axis=0)
    return np.where(known.any(axis=0), column[rows, np.arange(column.shape[1])], np.nan)
