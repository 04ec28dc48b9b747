"""What a sweep found, as arrays: the input of its statistics and of its report."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Results:
    """The results of a sweep, in memory.

    Axes: `C` configurations (what was sampled), `S` seeds of each, `R` rows of the metrics.
    """

    title: str
    """The name of the sweep."""
    env: str
    algorithm: str
    parameters: dict[str, list[Any]]
    """By swept parameter, such as `learning_rate` or `entropy_coef.start`: its value in each configuration, `C` numbers
    or texts."""
    texts: list[dict[str, str]]
    """For each configuration, the swept settings as `lehr train` takes them: `{"entropy_coef": "0.03 -> 0.001"}`."""
    members: np.ndarray
    """int `[C, S]`: the number of each member; −1 where a configuration has fewer seeds."""
    env_steps: np.ndarray
    """`[R]`: env steps at each row."""
    returns: np.ndarray
    """`[R, C, S]`: mean episode return of the training episodes that ended in each row; NaN if none did."""
    scores: np.ndarray
    """`[C, S]`: mean return of the evaluation at the end; NaN for a member that has none."""
    schedules: dict[str, np.ndarray] = field(default_factory=dict)
    """By swept coefficient, `[R, C]`: the applied value."""
    frozen: np.ndarray | None = None
    """bool `[C, S]`: the member had too many non-finite updates and was frozen."""
    again: dict[int, np.ndarray] = field(default_factory=dict)
    """By configuration, `[F]`: scores of the best ones, trained again with fresh seeds."""
    settings: dict[str, str] = field(default_factory=dict)
    """The settings that all configurations share, as `lehr train` takes them: `{"total_steps": "500k"}`."""
    notes: dict[str, str] = field(default_factory=dict)
    """Other facts to show, such as the time that it took, by name."""

    def __repr__(self) -> str:
        configurations, seeds = self.members.shape
        return f"Results({self.title!r}, {configurations} configurations of {seeds} seeds, {len(self.env_steps)} rows)"
