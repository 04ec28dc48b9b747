"""The live display of a population: its progress, and the best members with their returns."""

import math
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lehr.report.loggers.progress import duration, short_number

_LIVE_SECONDS = 0.2
_PLAIN_SECONDS = 10.0
_SHOWN = 5


class PopulationProgress:
    """Show how far a population is, the spread of its members' returns, and the best members.

    Args:
        total_steps: the budget of one member in env steps.
        enabled: if false, print nothing, not even messages.
        labels: the name of each member.
        title: what is trained, in front of the progress.
        console: where to print, standard error by default. If it is not a terminal, a plain line is printed at most
            every 10 seconds, and one at the end.
    """

    def __init__(
        self,
        total_steps: int,
        enabled: bool = True,
        labels: Sequence[str] = (),
        title: str = "",
        console: Console | None = None,
    ) -> None:
        self._budget, self._total = total_steps, total_steps * max(len(labels), 1)
        self._members = f"{len(labels)} member{'s' if len(labels) != 1 else ''}"
        self._enabled, self._labels, self._title = enabled, labels, title
        self._console = console or Console(stderr=True)
        self._live: Live | None = None
        self._share, self._line = 0.0, ""
        self._returns = np.full(len(labels), math.nan)
        self._shown_at, self._shown = -math.inf, ""

    def __enter__(self) -> "PopulationProgress":
        if self._enabled and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._line != self._shown:
            self._show()

    def update(self, env_steps: int, metrics: Mapping[str, Any], rate: float) -> None:
        """Update the display.

        Args:
            env_steps: env steps of all members so far.
            metrics: `returns` has the latest mean episode return of each member, NaN if it has none.
            rate: env steps per second, of all members.
        """
        self._share = min(env_steps / self._total, 1.0) if self._total else 1.0
        self._returns = np.asarray(metrics["returns"], float)
        left = duration((self._total - env_steps) / rate if rate > 0 else math.inf)
        self._line = (
            f"{self._title}{math.floor(100 * self._share):3d}%  {self._members}  "
            f"{short_number(env_steps)}/{short_number(self._total)} steps  {short_number(rate)}/s  "
            f"{rate / max(self._budget, 1):.3g} members/s  {left} left  {_spread(self._returns)}"
        )
        if monotonic() - self._shown_at >= (_PLAIN_SECONDS if self._live is None else _LIVE_SECONDS):
            self._show()

    def message(self, text: str) -> None:
        """Print a line above the display."""
        if self._enabled:
            self._console.print(Text(text), soft_wrap=True)

    def _show(self) -> None:
        if self._live is not None:
            self._live.refresh()
        elif self._line:
            self.message(self._line)
        self._shown_at, self._shown = monotonic(), self._line

    def _render(self) -> Group:
        """The progress line, a bar, and a table of the best members; nothing before the first update."""
        if not self._line:
            return Group()
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("return", justify="right")
        table.add_column("best members now", overflow="ellipsis", no_wrap=True)
        for index in best(self._returns, _SHOWN):
            table.add_row(f"{self._returns[index]:.4g}", Text(self._labels[index]))
        bar = ProgressBar(total=1.0, completed=self._share, width=min(60, self._console.width))
        end_of_line = Text()  # a bar has none of its own
        return Group(Text(self._line, no_wrap=True, overflow="ellipsis"), bar, end_of_line, table)


def best(returns: np.ndarray, count: int) -> list[int]:
    """The members with the highest returns, best first; those without a return are left out.

    >>> best(np.array([3.0, np.nan, 7.0, 5.0]), 2)
    [2, 3]
    """
    known = np.flatnonzero(~np.isnan(returns))
    order = known[np.argsort(-returns[known], kind="stable")]
    return [int(index) for index in order[:count]]


def _spread(returns: np.ndarray) -> str:
    known = returns[~np.isnan(returns)]
    if not len(known):
        return "returns -"
    low, middle, high = np.quantile(known, [0.0, 0.5, 1.0])
    return f"returns {low:.4g} to {high:.4g}, median {middle:.4g}"
