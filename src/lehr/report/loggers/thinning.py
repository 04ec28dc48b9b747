"""Which updates have a row in the logs, so that a long run does not fill the disk.

The rule is a function of the update's number alone, so that a resumed run logs the same rows. By default, each of the
first 10,000 updates has a row, then every second one up to 20,000, every fourth up to 40,000, and so on: 10^6 updates
have 42,812 rows. A row stands for all updates since the one before:

    episode/count, environment/...      the sum over these updates
    episode/return, episode/length      the mean over the episodes that ended in them
    coef/..., update/..., time/...      the value at the row's own update, as are evolution/..., update and env_steps
    all others                          the mean over these updates, without those that are not finite

The last update of a run, and those with an evaluation, have a row in any case.
"""

import math
from collections.abc import Mapping
from typing import Any

EVERY_UPDATE = 10_000
"""By default, updates up to this one all have a row."""
_SUMS = ("episode/count", "environment/")
_PER_EPISODE = ("episode/return", "episode/length")
_LATEST = ("update", "env_steps", "coef/", "time/", "evaluate/", "evolution/")


def is_sum(name: str) -> bool:
    """Whether a row has the sum of a metric over its updates."""
    return name.startswith(_SUMS)


def is_per_episode(name: str) -> bool:
    """Whether a row has the mean of a metric over the episodes that ended in its updates."""
    return name in _PER_EPISODE


def is_latest(name: str) -> bool:
    """Whether a row has the value of a metric at its own update, the last one."""
    return name.startswith(_LATEST)


def is_logged(update: int, every: int | None = None) -> bool:
    """Whether an update has a row.

    Args:
        update: its number, from 1.
        every: the number of updates from row to row; `None` for the default rule.

    >>> [update for update in range(19_995, 20_010) if is_logged(update)]
    [19996, 19998, 20000, 20004, 20008]
    """
    interval = every or 1 << ((update - 1) // EVERY_UPDATE).bit_length()
    return update % interval == 0


class Thinning:
    """Combine the metrics of all updates into the rows that are logged.

    Args:
        every: as in `is_logged`.
        waiting: what `waiting` was when a run was saved that now goes on.
    """

    def __init__(self, every: int | None = None, waiting: Mapping[str, Any] | None = None) -> None:
        self._every = every
        self.waiting: dict[str, tuple[float, float]] = {name: (a, b) for name, (a, b) in (waiting or {}).items()}
        """The sum and the weight of each metric over the updates since the last row."""

    def add(self, row: Mapping[str, Any], always: bool = False) -> dict[str, Any] | None:
        """Take the metrics of one update; return the row to log, or `None` if there is none at this update."""
        logs = always or is_logged(row["update"], self._every)
        if logs and not self.waiting:
            return dict(row)
        for name, value in row.items():
            if isinstance(value, str) or is_latest(name) or not math.isfinite(value):
                continue
            weight = row.get("episode/count", 1.0) if is_per_episode(name) else 1.0
            total, weights = self.waiting.get(name, (0.0, 0.0))
            self.waiting[name] = (total + weight * value, weights + weight)
        if not logs:
            return None
        found = {name: self._combined(name, value) for name, value in row.items()}
        self.waiting = {}
        return found

    def _combined(self, name: str, latest: Any) -> Any:
        if isinstance(latest, str) or is_latest(name):
            return latest
        total, weight = self.waiting.get(name, (0.0, 0.0))
        if is_sum(name):
            return total
        return total / weight if weight else math.nan
