"""What a sweep found, as arrays: the input of its statistics and of its report."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Halved(NamedTuple):
    """How far the members of a sweep with successive halving came, `[C, S]` each."""

    env_steps: np.ndarray
    """What each member was trained for; NaN for a place without a member."""
    rung_scores: np.ndarray
    """The score at its last rung; NaN if it reached none."""
    stopped: np.ndarray
    """bool: it was not trained to its end, because it was not among the best there, or because it diverged."""


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
    """`[C, S]`: mean return of the evaluation at the end; NaN for a member that has none: frozen, or stopped."""
    schedules: dict[str, np.ndarray] = field(default_factory=dict)
    """By swept coefficient, `[R, C]`: the applied value."""
    frozen: np.ndarray | None = None
    """bool `[C, S]`: the member had too many non-finite updates and was frozen, or none of its updates was applied."""
    halved: Halved | None = None
    """With successive halving: how far each member came."""
    again: dict[int, np.ndarray] = field(default_factory=dict)
    """By configuration, `[F]`: scores of the best ones, trained again with fresh seeds."""
    settings: dict[str, str] = field(default_factory=dict)
    """The settings that all configurations share, as `lehr train` takes them: `{"total_steps": "500k"}`."""
    log_scaled: tuple[str, ...] = ()
    """The names of the parameters that were sampled on a log scale."""
    notes: dict[str, str] = field(default_factory=dict)
    """Other facts to show, such as the time that it took, by name."""

    def __repr__(self) -> str:
        configurations, seeds = self.members.shape
        return f"Results({self.title!r}, {configurations} configurations of {seeds} seeds, {len(self.env_steps)} rows)"
