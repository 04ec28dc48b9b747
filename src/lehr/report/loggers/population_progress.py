"""The live display of a population: its progress, and the best members with their returns."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lehr.report.loggers.display import Display, Displayed
from lehr.report.loggers.progress import duration, short_number

_SHOWN = 5
_LEAST_BAR, _WIDEST_BAR = 10, 60


class PopulationProgress(Displayed):
    """Show how far a population is, the spread of its members' returns, and the best members.

    Args:
        total_steps: the budget of one member in env steps.
        enabled: if false, print nothing, not even messages.
        labels: the name of each member.
        title: what is trained, in front of the progress.
        share: of the budgets of all members, the share that is expected to be used.
        console: where to print, as for `Display`.
    """

    def __init__(
        self,
        total_steps: int,
        enabled: bool = True,
        labels: Sequence[str] = (),
        title: str = "",
        share: float = 1.0,
        console: Console | None = None,
    ) -> None:
        self._total = round(share * total_steps * max(len(labels), 1))
        self._labels, self._title = labels, title
        self._display = Display(self._render, enabled, console)
        self._share, self._pace, self._spread = 0.0, "", ""
        self._returns = np.full(len(labels), math.nan)

    def update(self, env_steps: int, metrics: Mapping[str, Any], rate: float) -> None:
        """Update the display.

        Args:
            env_steps: env steps of all members so far.
            metrics: `returns` has the latest mean episode return of each member, NaN if it has none; `rewards` the mean
                rewards per step, which are shown as long as no member has a return.
            rate: env steps per second, of all members.
        """
        self._share = min(env_steps / self._total, 1.0) if self._total else 1.0
        self._returns = np.asarray(metrics["returns"], float)
        self._pace = f"{self._title}{pace(len(self._labels), env_steps, self._total, rate)}"
        rewards = np.asarray(metrics.get("rewards", ()), float)
        known = self._returns if not np.all(np.isnan(self._returns)) or not len(rewards) else rewards
        self._spread = spread("returns" if known is self._returns else "rewards per step", known)
        self._display.update(f"{self._pace}  {self._spread}")

    def waiting(self, what: str, last: float | None = None, plain: bool = True) -> AbstractContextManager[None]:
        """Show what is waited for, and how many members wait for it."""
        members = len(self._labels)
        what = f"{self._title}{what}" + (f", {members} members at once" if members > 1 else "")
        return super().waiting(what, last, plain)

    def _render(self) -> Group:
        """The pace, a bar with the spread of the returns, and a table of the best; nothing before the first update."""
        if not self._pace:
            return Group()
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("return", justify="right")
        table.add_column("best members now", overflow="ellipsis", no_wrap=True)
        for index in best(self._returns, _SHOWN):
            table.add_row(f"{self._returns[index]:.4g}", Text(self._labels[index]))
        found = Text(f"  {self._spread}", no_wrap=True, overflow="ellipsis")
        width = max(self._display.console.width - found.cell_len, _LEAST_BAR)
        line = Table.grid()
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True, overflow="ellipsis")
        line.add_row(ProgressBar(total=1.0, completed=self._share, width=min(_WIDEST_BAR, width)), found)
        return Group(Text(self._pace, no_wrap=True, overflow="ellipsis"), line, table)


def progress_line(members: int, env_steps: int, total_steps: int, rate: float, returns: np.ndarray) -> str:
    """How far members are, how fast, and the spread of their returns; the arguments of `pace`, and `returns` `[P]`."""
    return f"{pace(members, env_steps, total_steps, rate)}  {spread('returns', returns)}"


def pace(members: int, env_steps: int, total_steps: int, rate: float) -> str:
    """How far members are, and how fast.

    Args:
        members: how many there are.
        env_steps: env steps of all members so far.
        total_steps: the budget of all members.
        rate: env steps per second, of all members.
    """
    share = min(env_steps / total_steps, 1.0) if total_steps else 1.0
    left = duration((total_steps - env_steps) / rate if rate > 0 else math.inf)
    return (
        f"{math.floor(100 * share):3d}%  {members} member{'s' if members != 1 else ''}  "
        f"{short_number(env_steps)}/{short_number(total_steps)} steps  {short_number(rate)}/s  "
        f"{rate * members / max(total_steps, 1):.3g} members/s  {left} left"
    )


def best(returns: np.ndarray, count: int) -> list[int]:
    """The members with the highest returns, best first; those without a return are left out.

    >>> best(np.array([3.0, np.nan, 7.0, 5.0]), 2)
    [2, 3]
    """
    known = np.flatnonzero(~np.isnan(returns))
    order = known[np.argsort(-returns[known], kind="stable")]
    return [int(index) for index in order[:count]]


def spread(name: str, values: np.ndarray) -> str:
    """The range and the median of the values that are known.

    >>> spread("returns", np.array([3.0, np.nan, 7.0])), spread("returns", np.array([np.nan]))
    ('returns 3 to 7, median 5', 'returns -')
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return f"{name} -"
    low, middle, high = np.quantile(known, [0.0, 0.5, 1.0])
    return f"{name} {low:.4g} to {high:.4g}, median {middle:.4g}"
