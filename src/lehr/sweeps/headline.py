"""The headline of a sweep's report: what won, how good it is and how sure that is, in sentences."""

import math
from typing import NamedTuple

import numpy as np

from lehr.sweeps.ranking import Ranking
from lehr.sweeps.results import Results

_CHANCE = 40
"""A lead is clear only if equally good configurations would differ as much in fewer than one of so many cases."""


class Fact(NamedTuple):
    """One number of the headline: its name, the number, and what it means."""

    name: str
    number: str
    meaning: str


def verdict(ranking: Ranking) -> str:
    """Say what won and whether it is sure, in one to three sentences."""
    if np.isnan(ranking.worst):
        return "No run has a score, so there is nothing to rank."
    winner = ranking.winner
    value, low, high = ranking.estimate(winner)
    interval = "" if np.isnan(low) else f" (95% interval {span(low, high)})"
    if ranking.runner_up is None:
        return f"The only configuration has a score of {number(value)}{interval}."
    said = [f"Configuration {winner} is the best, with a score of {number(value)}{interval}."]
    said.append(_lead(ranking, ranking.runner_up))
    if winner not in ranking.fresh:
        said.append(
            f"It is the best of {len(ranking.order):,} and was not trained again with fresh seeds, so its score is "
            "likely to be too high."
        )
    return " ".join(said)


def facts(results: Results, ranking: Ranking) -> list[Fact]:
    """The numbers next to the verdict."""
    configurations, members = len(results.scores), int((results.members >= 0).sum())
    seeds = np.unique((results.members >= 0).sum(axis=1))
    times = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]}–{seeds[-1]}"
    failed = int(ranking.failed.sum())
    stopped = 0 if results.halved is None else int(results.halved.stopped.sum())
    worst = "" if np.isnan(ranking.worst) else f", counted as the worst score, {number(ranking.worst)}"
    said = [f"{stopped:,} of {members:,} runs were stopped early"] if stopped else []
    said += [f"{failed:,} of {members:,} runs failed{worst}"] if failed else []
    size = Fact(
        "Configurations × seeds",
        f"{configurations:,} × {times}",
        "; ".join(said) or f"all {members:,} runs have a score",
    )
    if np.isnan(ranking.worst):
        return [size]
    winner = ranking.winner
    found = [_score(ranking)]
    if winner in ranking.fresh:
        found.append(
            Fact(
                "Score when selected",
                number(float(ranking.selected.value[winner])),
                f"retrained with fresh seeds, the best {len(ranking.fresh)} lost {number(ranking.optimism)} on average"
                if ranking.optimism > 0
                else f"retrained with fresh seeds, the best {len(ranking.fresh)} held their scores",
            )
        )
    found.append(size)
    if ranking.runner_up is not None:
        found.append(_beats(ranking, "Beats the runner-up", ranking.runner_up))
    if ranking.median not in (None, ranking.runner_up):
        found.append(_beats(ranking, "Beats the median", ranking.median))
    return found


def number(value: float) -> str:
    """A score with four digits.

    >>> number(481.237), number(-0.00123456), number(1234567.8), number(float("nan"))
    ('481.2', '−0.001235', '1,234,568', '–')
    """
    if np.isnan(value):
        return "–"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", "−")


def span(low: float, high: float) -> str:
    """The ends of an interval.

    >>> span(-470.31, 491)
    '−470.3 to 491'
    """
    return f"{number(low)} to {number(high)}"


def _score(ranking: Ranking) -> Fact:
    winner = ranking.winner
    value, low, high = ranking.estimate(winner)
    runs, kind = len(ranking.runs[winner]), "fresh seed" if winner in ranking.fresh else "seed"
    failed = int(np.isnan(ranking.runs[winner]).sum())
    failures = f" ({failed} failed)" if failed else ""
    many = f"interquartile mean of {runs} {kind}s{failures}, 95% interval {span(low, high)}"
    return Fact("Score", number(value), many if runs > 1 else f"one {kind}: its spread is unknown")


def _beats(ranking: Ranking, name: str, other: int) -> Fact:
    probability, low, high = ranking.improvement(ranking.winner, other)
    pairs = len(ranking.runs[ranking.winner]) * len(ranking.runs[other])
    # Where one wins every pair, every resample does too: an interval of no width would promise too much.
    interval = f", 95% interval {100 * low:.0f} to {100 * high:.0f}%" if low < high else ""
    compared = f"of {pairs} pairs of runs" if pairs > 1 else "of one pair of runs"
    shown = "–" if np.isnan(probability) else f"{100 * probability:.0f}%"
    # The best of 1,000 that are all the same beats the median in five of six pairs.
    selected = "" if ranking.winner in ranking.fresh else "; likely too high, as these runs selected it"
    return Fact(name, shown, f"{compared} with configuration {other}{interval}{selected}")


def _lead(ranking: Ranking, other: int) -> str:
    """Say whether the winner is ahead of another for sure.

    Of n and m runs of equally good configurations, all n are above all m in one of C(n + m, n) cases: with few runs
    even that shows nothing, whatever the bootstrap says.
    """
    n, m = len(ranking.runs[ranking.winner]), len(ranking.runs[other])
    if math.comb(n + m, n) < _CHANCE:
        return f"With {n} and {m} seeds, its lead over configuration {other}, the runner-up, may be chance."
    probability, low, _ = ranking.improvement(ranking.winner, other, confidence=0.99)  # few seeds: 95% is too narrow
    if low > 0.5:
        return f"Its lead over configuration {other}, the runner-up, is clear."
    likely = f"a run of it scores higher than one of configuration {other}, the runner-up, {100 * probability:.0f}%"
    return f"Its lead is not clear: {likely} of the time."
