"""The progress line: updated live on a terminal, printed periodically to a file."""

import math
from collections.abc import Mapping

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.text import Text

from lehr.report.loggers.display import Display

MAIN_COEFFICIENTS = ("learning_rate", "entropy_coef", "clip_range")
"""Shown first, if the run has them."""

_MOST_COEFFICIENTS = 3
_GAP = "  "
_BAR_WIDTHS = (10, 40)
_WIDE = 60
"""From this width on there is always a bar; on narrower terminals only if the text leaves room for one."""


class Progress:
    """Show percent, env steps, steps per second, time left, return and main coefficients, as far as they fit.

    Args:
        total_steps: the budget in env steps.
        enabled: if false, print nothing, not even messages.
        console: where to print, standard error by default. If it is not a terminal, a plain line is printed at most
            every 10 seconds, and one at the end.
    """

    def __init__(self, total_steps: int, enabled: bool = True, console: Console | None = None) -> None:
        self._total = total_steps
        self._display = Display(lambda: self, enabled, console, seconds=0.1)
        self._share = 0.0
        self._parts: list[str] = []

    def __enter__(self) -> "Progress":
        self._display.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._display.__exit__(*error)

    def update(self, env_steps: int, metrics: Mapping[str, float], rate: float) -> None:
        """Update the progress line.

        Args:
            env_steps: env steps taken so far.
            metrics: metrics of the last update; `episode/return` and some `coef/<name>` are shown.
            rate: env steps per second.
        """
        self._share = min(env_steps / self._total, 1.0) if self._total > 0 else 1.0
        self._parts = [
            f"{math.floor(100 * self._share):3d}%",
            f"{short_number(env_steps)}/{short_number(self._total)} steps",
            f"{short_number(rate)}/s",
            f"{duration((self._total - env_steps) / rate if rate > 0 else math.inf)} left",
            f"return {_value(metrics.get('episode/return', math.nan))}",
        ]
        names = [name.removeprefix("coef/") for name in metrics if name.startswith("coef/")]
        names.sort(key=lambda name: name not in MAIN_COEFFICIENTS)
        self._parts += [f"{name} {_value(metrics[f'coef/{name}'])}" for name in names[:_MOST_COEFFICIENTS]]
        self._display.update(_GAP.join(self._parts).strip())

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._display.message(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render one line: the percentage, a bar if there is room, and as many of the other parts as fit."""
        if not self._parts:
            return
        percent, *others = self._parts
        room = options.max_width - len(percent)
        reserved = len(_GAP) + _BAR_WIDTHS[0] if options.max_width >= _WIDE else 0
        words = ""
        for part in others:
            if cell_len(words + _GAP + part) > room - reserved:
                break
            words += _GAP + part
        bar = min(room - cell_len(words) - len(_GAP), _BAR_WIDTHS[1])
        if bar < _BAR_WIDTHS[0]:
            yield Text(percent + words, no_wrap=True, overflow="crop")
            return
        yield Text(percent + _GAP, end="")
        yield ProgressBar(total=1.0, completed=self._share, width=bar)
        yield Text(words, no_wrap=True, overflow="crop")


def short_number(number: float) -> str:
    """Format to three digits, with k, M or B.

    >>> [short_number(n) for n in (0, 42, 1_500, 999_600, 12_345_678, 3e11)]
    ['0', '42', '1.50k', '1.00M', '12.3M', '300B']
    """
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            scaled = number / size
            return (f"{scaled:#.3g}".rstrip(".") if scaled < 999.5 else f"{scaled:.0f}") + unit
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """Format as hours, minutes and seconds.

    >>> duration(75), duration(3600 * 30 + 5), duration(float("inf"))
    ('1:15', '30:00:05', '-:--')
    """
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _value(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"
