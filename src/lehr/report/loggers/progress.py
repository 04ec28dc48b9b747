"""The progress line: updated live on a terminal, printed periodically to a file."""

import math
from collections.abc import Mapping

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.text import Text

from lehr.report.curves import MAIN_COEFFICIENTS
from lehr.report.loggers.display import Display, Displayed

SHORT_NAMES = {
    "learning_rate": "lr",
    "entropy_coef": "ent",
    "clip_range": "clip",
    "value_clip_range": "v_clip",
    "value_coef": "vf",
    "discount": "gamma",
    "gae_lambda": "lambda",
    "max_grad_norm": "grad",
    "target_kl": "kl",
}
"""What a coefficient is called where there is no room for its name."""

_GAP = "  "
_BAR_WIDTHS = (10, 40)


class Progress(Displayed):
    """Show percent, env steps, steps per second, time left, return, and coefficients that change, as far as they fit.

    Where no episode has ended yet, the mean reward per step stands in the place of the return.

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
        self._coefficients: dict[str, str] = {}
        """The values of those that have changed, by name."""
        self._first: dict[str, float] = {}

    def update(self, env_steps: int, metrics: Mapping[str, float], rate: float) -> None:
        """Update the progress line.

        Args:
            env_steps: env steps taken so far.
            metrics: metrics of the last update; `episode/return` or `rollout/reward`, and every `coef/<name>` that has
                changed since the first call, are shown.
            rate: env steps per second.
        """
        self._share = min(env_steps / self._total, 1.0) if self._total > 0 else 1.0
        self._parts = [
            f"{math.floor(100 * self._share):3d}%",
            f"{short_number(env_steps)}/{short_number(self._total)} steps",
            f"{short_number(rate)}/s",
            f"{duration((self._total - env_steps) / rate if rate > 0 else math.inf)} left",
            _success(metrics),
        ]
        found = {name.removeprefix("coef/"): value for name, value in metrics.items() if name.startswith("coef/")}
        self._first = found | self._first
        changed = [name for name in found if name in self._coefficients or found[name] != self._first[name]]
        changed.sort(key=lambda name: name not in MAIN_COEFFICIENTS)
        self._coefficients = {name: f"{found[name]:.3g}" for name in changed}
        self._display.update(_GAP.join([*self._parts, *self._named(short=False)]).strip())

    def _named(self, short: bool) -> list[str]:
        """The coefficients that have changed, with their names or shorter ones."""
        return [
            f"{SHORT_NAMES.get(name, name) if short else name} {value}" for name, value in self._coefficients.items()
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render one line: the percentage, a bar if there is room, and as many of the other parts as fit.

        The coefficients are more important than the bar; where there is no room for both, names are abbreviated.
        """
        if not self._parts:
            return
        percent, *others = self._parts
        room = options.max_width - len(percent)
        with_bar = room - len(_GAP) - _BAR_WIDTHS[0]
        named = [*others, *self._named(short=False)]
        if cell_len(_joined(named)) > with_bar:
            named = [others[0].removesuffix(" steps"), *others[1:], *self._named(short=True)]
        words = ""
        for part in named:
            if cell_len(words + _GAP + part) > room:
                break
            words += _GAP + part
        bar = min(room - cell_len(words) - len(_GAP), _BAR_WIDTHS[1])
        if bar < _BAR_WIDTHS[0]:
            yield Text(percent + words, no_wrap=True, overflow="crop")
            return
        yield Text(percent + _GAP, end="")
        yield ProgressBar(total=1.0, completed=self._share, width=bar)
        yield Text(words, no_wrap=True, overflow="crop")


def _joined(parts: list[str]) -> str:
    return "".join(_GAP + part for part in parts)


def _success(metrics: Mapping[str, float]) -> str:
    """The mean return, or the mean reward per step if no episode has ended."""
    found = metrics.get("episode/return", math.nan)
    if math.isnan(found) and not math.isnan(reward := metrics.get("rollout/reward", math.nan)):
        return f"reward {reward:.4g}"
    return f"return {_value(found)}"


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
