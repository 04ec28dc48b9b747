"""The ranking of a sweep's configurations: how good each is, how sure that is, and what choosing the best cost.

The best of many configurations was in part the luckiest, so its score is too high. Where the best were trained again
with fresh seeds, their fresh scores decide, and the scores that they were selected by are shown next to them. Choosing
among a few fresh scores leaves a little of that luck, so a close second is worth a look.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lehr.sweeps.results import Results
from lehr.sweeps.statistics import (
    CONFIDENCE,
    RESAMPLES,
    Estimate,
    bootstrap,
    interquartile_mean,
    probability_of_improvement,
)


@dataclass(frozen=True)
class Ranking:
    """The configurations of a sweep in order. Axis: `C` configurations."""

    order: np.ndarray
    """int `[C]`: the configurations, the best first: those with fresh scores by these, then the others; last those
    whose members were all stopped early, from the one that came furthest."""
    selected: Estimate
    """`[C]` each: the statistic over the seeds of the sweep; NaN where no member of the whole sweep has a score, and
    for configurations whose members were all stopped early."""
    fresh: dict[int, Estimate]
    """By configuration that was trained again: the statistic over its fresh seeds."""
    runs: list[np.ndarray]
    """For each configuration, the scores it is judged by, fresh ones if there are any; a failed run's is NaN."""
    failed: np.ndarray
    """int `[C]`: the members of the sweep that have no finite score, although they were not stopped early."""
    worst: float
    """What a failed run counts as: the lowest finite score in the sweep; NaN if there is none."""

    def __repr__(self) -> str:
        return f"Ranking({len(self.order)} configurations, winner={self.winner})"

    @property
    def winner(self) -> int:
        """The best configuration."""
        return int(self.order[0])

    @property
    def runner_up(self) -> int | None:
        """The second-best configuration."""
        return int(self.order[1]) if len(self.order) > 1 else None

    @property
    def median(self) -> int | None:
        """The configuration in the middle of the order, the lower one of two."""
        return int(self.order[len(self.order) // 2]) if len(self.order) > 2 else None

    @cached_property
    def place(self) -> np.ndarray:
        """int `[C]`: the place of each configuration, from 1."""
        return np.argsort(self.order) + 1

    @property
    def optimism(self) -> float:
        """How much the selected scores promised too much: the mean of selected minus fresh; NaN without fresh scores.

        1 / k Σ_{c ∈ best k} ( selected_c − fresh_c )
        """
        if not self.fresh:
            return np.nan
        return float(np.mean([self.selected.value[c] - estimate.value for c, estimate in self.fresh.items()]))

    def estimate(self, configuration: int) -> Estimate:
        """The score that a configuration is judged by: the fresh one if there is one."""
        if configuration in self.fresh:
            return self.fresh[configuration]
        return Estimate(*(float(values[configuration]) for values in self.selected))

    def improvement(self, configuration: int, other: int, confidence: float = CONFIDENCE, seed: int = 0) -> Estimate:
        """The probability that a run of one configuration scores higher than a run of another; NaN if one has none."""
        runs = self.runs[configuration], self.runs[other]
        if not all(map(len, runs)):
            return Estimate(np.nan, np.nan, np.nan)
        return Estimate(*map(float, bootstrap(probability_of_improvement, *runs, confidence=confidence, seed=seed)))


def rank(
    results: Results,
    statistic: Callable[[np.ndarray], np.ndarray] = interquartile_mean,
    *,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Ranking:
    """Rank the configurations of a sweep by a statistic over seeds, with stratified bootstrap intervals.

    A member without a finite score failed; it counts as the lowest finite score of the sweep and is never left out. So
    does one that was stopped early, if another one of its configuration was not.
    A place without a member (a configuration with fewer seeds) is none of its runs.

    Args:
        results: of the sweep.
        statistic: `[..., S]` to `[...]`.
        resamples: of the bootstrap.
        confidence: of the intervals, between 0 and 1.
        seed: of the bootstrap.

    >>> results = Results(
    ...     "example", "CartPole-v1", "ppo", parameters={"discount": [0.9, 0.99, 0.5]}, texts=[{}] * 3,
    ...     members=np.arange(6).reshape(3, 2), env_steps=np.array([1e5]), returns=np.zeros((1, 3, 2)),
    ...     scores=np.array([[300.0, 420.0], [340.0, 380.0], [500.0, np.nan]]), again={0: np.array([310.0, 330.0])},
    ... )
    >>> ranking = rank(results)
    >>> ranking.order.tolist(), ranking.selected.value.tolist(), ranking.optimism
    ([0, 2, 1], [360.0, 360.0, 400.0], 40.0)
    """
    again = {int(c): _finite_or_nan(fresh) for c, fresh in results.again.items() if np.size(fresh)}
    scores = _finite_or_nan(results.scores)
    present = results.members >= 0
    known = np.concatenate([scores[present], *again.values()])
    worst = float(np.nanmin(known)) if np.isfinite(known).any() else np.nan

    def estimated(runs: np.ndarray) -> Estimate:
        counted = np.where(np.isnan(runs), worst, runs)
        return bootstrap(statistic, counted, resamples=resamples, confidence=confidence, seed=seed)

    selected = Estimate(np.full(len(scores), worst), *np.full((2, len(scores)), np.nan))
    seeds = present.sum(axis=1)
    for count in np.unique(seeds[seeds > 0]):  # configurations with equally many seeds make a rectangle
        same = np.flatnonzero(seeds == count)
        runs = scores[same][present[same]].reshape(len(same), count)
        for values, found in zip(selected, estimated(runs), strict=True):
            values[same] = found
    stopped = np.zeros(scores.shape, bool) if results.halved is None else results.halved.stopped
    for values in selected:
        values[(stopped.sum(axis=1) == seeds) & (seeds > 0)] = np.nan
    fresh = {c: Estimate(*map(float, estimated(runs))) for c, runs in again.items()}
    judged = selected.value.copy()
    for c, estimate in fresh.items():
        judged[c] = estimate.value
    is_fresh = np.isin(np.arange(len(judged)), list(fresh))
    return Ranking(
        order=np.lexsort((*_distance(results), -judged, ~is_fresh)),  # NaN comes last; equal ones keep their order
        selected=selected,
        fresh=fresh,
        runs=[again.get(c, scores[c][present[c]]) for c in range(len(scores))],
        failed=(present & np.isnan(scores) & ~stopped).sum(axis=1),
        worst=worst,
    )


def _distance(results: Results) -> tuple[np.ndarray, ...]:
    """Sort keys `[C]` for configurations without a score, the last one first: how far they came, the score there."""
    if results.halved is None:
        return ()
    steps, rungs, _ = results.halved
    scores = np.where(np.isnan(rungs), -np.inf, rungs)
    return -scores.max(axis=1), -np.where(np.isnan(steps), 0.0, steps).max(axis=1)


def _finite_or_nan(scores: np.ndarray) -> np.ndarray:
    scores = np.asarray(scores, dtype=float)
    return np.where(np.isfinite(scores), scores, np.nan)
