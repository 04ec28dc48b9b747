"""The path that population-based training found: the coefficients of the winner's ancestors, as a schedule.

The winner is a copy of a copy of a copy, each with other coefficients. Followed back to the first update, they are a
schedule, and written as text, anybody can train with it.
"""

import itertools
from typing import NamedTuple

import numpy as np

from lehr.schedules.phases import Phase, Position
from lehr.schedules.schedule import Schedule

PARENT = "evolution/parent"
"""The metric with the place whose member each place continues after a row."""
MOST_PHASES = 6
"""A fitted schedule has at most this many phases."""
CLOSE = 0.05
"""A fit that is this close to the path, as a root mean square of relative errors, needs no more phases."""


class Fit(NamedTuple):
    """A schedule of a few constant phases, and how far it is from the path that it was fitted to."""

    schedule: Schedule
    error: float
    """Root mean square of the relative errors."""


def ancestors(parents: np.ndarray) -> np.ndarray:
    """Return the place that the ancestor of each final member had in each row, int `[R, P]`.

    Args:
        parents: `[R, P]`: after row r, place p continues the member in place `parents[r, p]` of that row.

    >>> ancestors(np.array([[0, 1, 2], [0, 0, 2], [0, 1, 2]])).T.tolist()
    [[0, 0, 0], [0, 0, 1], [2, 2, 2]]
    """
    found = np.empty(parents.shape, int)
    places = np.arange(parents.shape[1])
    for row in range(len(parents) - 1, -1, -1):
        found[row] = places = parents[row, places].astype(int)
    return found


def fit(env_steps: np.ndarray, values: np.ndarray) -> Fit:
    """Fit a few constant phases to the path of a coefficient, by least squares of its logarithm.

    Args:
        env_steps: `[R]`: the env steps at the end of each row.
        values: `[R]`: the value that was applied in it; above 0.

    >>> path = fit(np.arange(1, 9) * 1000, np.array([0.03, 0.03, 0.03, 0.03, 0.01, 0.01, 0.01, 0.01]))
    >>> str(path.schedule), round(path.error, 6)
    ('0.03 until 4k, 0.01', 0.0)
    """
    logs = np.log(np.maximum(values, np.finfo(np.float32).tiny))
    count = len(logs)
    sums, squares = (np.concatenate([[0.0], np.cumsum(one)]) for one in (logs, logs**2))

    def cost(begin: np.ndarray | int, end: int) -> np.ndarray:
        """The squared error of a constant over rows begin to end."""
        length = end - begin
        return squares[end] - squares[begin] - (sums[end] - sums[begin]) ** 2 / np.maximum(length, 1)

    # best[k][e]: the least cost of the first e rows in k + 1 phases; cuts[k][e]: where the last of them begins.
    best = [np.array([cost(0, end) for end in range(count + 1)])]
    cuts: list[np.ndarray] = [np.zeros(count + 1, int)]
    most = min(MOST_PHASES, count)
    while len(best) < most and np.sqrt(max(best[-1][count], 0.0) / count) > CLOSE:
        costs, begins = np.full(count + 1, np.inf), np.zeros(count + 1, int)
        for end in range(1, count + 1):
            options = best[-1][:end] + cost(np.arange(end), end)
            begins[end] = int(np.argmin(options))
            costs[end] = options[begins[end]]
        best.append(costs)
        cuts.append(begins)
    bounds = [count]
    for begins in reversed(cuts[1:]):
        bounds.append(int(begins[bounds[-1]]))
    bounds = sorted({*bounds, 0})
    levels = [float(f"{np.exp(logs[a:b].mean()):.4g}") for a, b in itertools.pairwise(bounds)]
    fitted = np.repeat(levels, np.diff(bounds))
    return Fit(_schedule(env_steps, bounds, levels), float(np.sqrt(np.mean((fitted / values - 1.0) ** 2))))


def _schedule(env_steps: np.ndarray, bounds: list[int], levels: list[float]) -> Schedule:
    """Constant phases that begin where the rows begin."""
    begins = [0.0, *(float(env_steps[bound - 1]) for bound in bounds[1:-1])]
    phases = []
    for number, (begin, level) in enumerate(zip(begins, levels, strict=True)):
        length = begins[number + 1] - begin if number + 1 < len(begins) else 0.0
        phases.append(Phase(Position(begin), Position(length), level, level, "constant"))
    return Schedule(phases)
