"""Plots of schedules: as text in the terminal, or as a figure in a file."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from rich.text import Text

from lehr.errors import InputError
from lehr.files import replaced
from lehr.schedules import Controller, FunctionSchedule, Schedule
from lehr.schedules.schedule import check_total
from lehr.schedules.text import number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AnySchedule = Schedule | FunctionSchedule

STYLES = ("cyan", "magenta", "yellow", "green", "blue", "red")
"""Terminal colours of the curves, cycled."""
_MARKS = {"marks": "●○▲△◆◇", "ascii": "*o+x#@"}
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
)  # Okabe and Ito's colour-blind-safe palette
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot in a braille character, by row and column."""
_LARGEST_CHART = 1000
_FIGURE_SAMPLES = 1001
_LEGEND_WIDTH = 88
"""The number of characters that fit on one line of a figure's legend."""
_PNG = {"compress_level": 3}
"""For Pillow; its default level takes twice as long, for files a seventh smaller."""


class Span(NamedTuple):
    """The plotted part of the step axis, from 0 to `stop`."""

    stop: float
    in_percent: bool = False
    """Whether the axis is in percent, because there is no budget."""

    def text(self, step: float) -> str:
        """Format a position on the axis.

        >>> Span(1e6).text(250_000), Span(100, in_percent=True).text(25)
        ('250k', '25%')
        """
        return f"{step:.6g}%" if self.in_percent else steps_text(step)


def steps_text(steps: float) -> str:
    """Format a number of steps to two decimals, with k, M or B if that is shorter.

    >>> steps_text(0), steps_text(2_500_000), steps_text(1_234_567), steps_text(1e6 / 3)
    ('0', '2.5M', '1234567', '333333.33')
    """
    return number_text(round(steps, 2), multipliers=True)


def span(schedules: Sequence[Any], total_steps: float | None = None) -> Span:
    """Return what to plot: the budget; without one, 100% for schedules in shares, otherwise until the last one ends.

    >>> from lehr.schedules import parse
    >>> span([parse("1 -> 0 over 80%")]), span([parse("1 -> 0 over 2M")])
    (Span(stop=100.0, in_percent=True), Span(stop=2000000.0, in_percent=False))
    """
    if not schedules:
        raise InputError("There is no schedule to plot; give at least one.")
    for schedule in schedules:
        if isinstance(schedule, Controller):
            raise InputError(
                f"'{schedule}' depends on metrics and not on the step, so it cannot be plotted; give a schedule."
            )
    if total_steps is not None:
        return Span(check_total(total_steps))
    ask = "give the budget as total_steps, or --total on the command line."
    for schedule in schedules:
        if isinstance(schedule, FunctionSchedule):
            raise InputError(f"{schedule} is a function without an end; {ask}")
    phases = [phase for schedule in schedules for phase in schedule.phases]
    in_steps = any(place.steps for phase in phases for place in (phase.begin, phase.length))
    if not in_steps:
        return Span(100.0, in_percent=True)
    if not all(schedule.is_bound for schedule in schedules):
        named = ", ".join(f"'{schedule}'" for schedule in schedules)
        raise InputError(f"Both env steps and shares of the budget are used in {named}; {ask}")
    return Span(max(phase.stop.steps for phase in phases))


def samples(schedule: AnySchedule, stop: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sample a bound schedule: at evenly spaced steps, and on both sides of the beginning and end of each phase.

    >>> from lehr.schedules import parse
    >>> samples(parse("1 until 6, 0"), stop=10, count=3)[1]
    array([1., 1., 1., 0., 0.])
    """
    steps = np.linspace(0, stop, count)
    if isinstance(schedule, Schedule):
        ends = np.array([place for phase in schedule.phases for place in (phase.begin.steps, phase.stop.steps)])
        ends = ends[(ends > 0) & (ends <= stop)]
        steps = np.unique(np.concatenate([steps, ends, np.nextafter(ends, 0)]))
    return steps, schedule(steps)


# In the terminal ---------------------------------------------------------------------------------------------------


def chart(
    schedules: Sequence[AnySchedule],
    total_steps: float | None = None,
    *,
    width: int = 80,
    height: int = 17,
    drawn_with: Literal["braille", "marks", "ascii"] | None = None,
) -> Text:
    """Plot schedules over env steps as text, in colour if `rich` prints it to a terminal.

    Args:
        schedules: one or more; where curves overlap, their marks alternate.
        total_steps: the budget; without one, see `span`.
        width: characters per line, including the numbers of the axis.
        height: number of lines, without the horizontal axis.
        drawn_with: braille dots have the finest resolution but differ only by colour; marks also differ without colour;
            ascii needs no Unicode. By default braille for one curve, marks for more.

    >>> from lehr.schedules import parse
    >>> print(chart([parse("8 -> 0")], width=26, height=5, drawn_with="ascii"))
    8 +***
      |   *****
    4 +        ******
      |              *****
    0 +                   ***
      +-----+----+-----+----+
       0%  25%  50%   75% 100%
    """
    drawn_with = drawn_with or ("braille" if len(schedules) == 1 else "marks")
    rows = min(max(height, 3), _LARGEST_CHART)
    area = span(schedules, total_steps)
    bound = [schedule.bind(area.stop) for schedule in schedules]
    low, high = _limits(bound, area.stop)
    ticks = {row: f"{high - (high - low) * row / (rows - 1):.4g}" for row in _ticks(rows, 4 if rows > 8 else 2)}
    margin = max(map(len, ticks.values())) + 2
    columns = width - margin - 1
    if not (10 <= columns <= _LARGEST_CHART and height == rows):
        limits = f"from {margin + 11} by 3 to {_LARGEST_CHART} by {_LARGEST_CHART}"
        raise InputError(f"The chart size is {width} by {height} characters; it must be {limits}.")
    across, down = (2, 4) if drawn_with == "braille" else (1, 1)
    cells: dict[tuple[int, int], dict[int, int]] = {}  # (row, column): the dots of each curve in this cell
    for number, schedule in enumerate(bound):
        for x, y in _trace(schedule, area.stop, low, high, columns * across, height * down):
            dots = cells.setdefault((y // down, x // across), {})
            dots[number] = dots.get(number, 0) | _BRAILLE[y % down][x % across]
    wall, cross, floor, corner = "|+-+" if drawn_with == "ascii" else "│┤─└"
    lines = []
    for row in range(height):
        line = Text(f"{ticks.get(row, ''):>{margin - 2}} {cross if row in ticks else wall}")
        for column in range(columns):
            line.append(*_cell(cells.get((row, column), {}), column, drawn_with))
        line.rstrip()
        lines.append(line)
    places = _ticks(columns, 4)
    notch = "+" if drawn_with == "ascii" else "┬"
    lines.append(
        Text(" " * (margin - 1) + corner + "".join(notch if c in places[1:] else floor for c in range(columns)))
    )
    lines.append(Text(" " * margin + _axis_numbers(area, places, columns)))
    return Text("\n").join(lines)


def mark(number: int, drawn_with: str) -> str:
    """Return the mark of a curve, for a legend."""
    return "━" if drawn_with == "braille" else _MARKS[drawn_with][number % len(_MARKS[drawn_with])]


def _cell(dots: dict[int, int], column: int, drawn_with: str) -> tuple[str, str]:
    """Return the character of a cell and its colour; curves that share cells alternate from column to column."""
    if not dots:
        return " ", ""
    number = list(dots)[column % len(dots)]
    style = STYLES[number % len(STYLES)]
    if drawn_with != "braille":
        return mark(number, drawn_with), style
    together = 0
    for bits in dots.values():
        together |= bits
    return chr(0x2800 + together), style


def _limits(bound: Sequence[AnySchedule], stop: float) -> tuple[float, float]:
    """Return the smallest and largest value to plot; the range of a constant includes 0."""
    values = [samples(schedule, stop, _FIGURE_SAMPLES)[1] for schedule in bound]
    low, high = float(min(map(np.min, values))), float(max(map(np.max, values)))
    if low < high:
        return low, high
    return min(low, 0.0), max(high, 0.0) or 1.0


def _trace(
    schedule: AnySchedule, stop: float, low: float, high: float, columns: int, rows: int
) -> Iterator[tuple[int, int]]:
    """Yield the dots of a curve as column and row, without vertical gaps."""
    steps, values = samples(schedule, stop, columns)
    x = np.rint(steps / stop * (columns - 1)).astype(int).tolist()
    y = np.rint((high - values) / (high - low) * (rows - 1)).astype(int).tolist()
    yield x[0], y[0]
    for (left, above), (right, below) in itertools.pairwise(zip(x, y, strict=True)):
        direction = 1 if below > above else -1
        for row in range(above, below, direction):
            yield (left if abs(row - above) <= abs(row - below) else right), row
        yield right, below


def _ticks(count: int, parts: int) -> list[int]:
    """Return tick positions that divide `count` characters into equal parts."""
    return [round(part * (count - 1) / parts) for part in range(parts + 1)]


def _axis_numbers(area: Span, places: Sequence[int], columns: int) -> str:
    """Return the numbers under the axis, each at its tick, leaving out those that would touch the previous one."""
    line = area.text(0)
    for quarter, place in enumerate(places[1:], 1):
        shown = area.text(area.stop * quarter / 4)
        begin = min(place - len(shown) // 2, columns + 1 - len(shown))
        if begin > len(line):
            line = line.ljust(begin) + shown
    return line


# In a file ---------------------------------------------------------------------------------------------------------


def figure(
    schedules: Sequence[AnySchedule], total_steps: float | None = None, *, labels: Sequence[str] | None = None
) -> "Figure":
    """Plot schedules over env steps as a matplotlib figure, without pyplot; save it with `save_figure`.

    Args:
        schedules: one or more.
        total_steps: the budget; without one, see `span`.
        labels: the labels of the legend; by default the schedules as strings.
    """
    from matplotlib.figure import Figure

    area = span(schedules, total_steps)
    made = Figure(figsize=(7, 3.2 + 0.2 * len(schedules)), layout="constrained")
    axes = made.add_subplot()
    for number, (schedule, label) in enumerate(zip(schedules, labels or map(str, schedules), strict=True)):
        steps, values = samples(schedule.bind(area.stop), area.stop, _FIGURE_SAMPLES)
        axes.plot(
            steps, values, color=COLOURS[number % len(COLOURS)], linewidth=2, label=plain(fill(label, _LEGEND_WIDTH))
        )
    low, high = axes.dataLim.intervaly
    if 0 < low < high / 2:  # close enough to 0 to include it in the axis
        axes.update_datalim([(0, 0)])
        axes.autoscale_view()
    axes.set_xlabel("share of the budget" if area.in_percent else "env steps")
    axes.set_ylabel("value")
    axes.set_xlim(0, area.stop)
    axes.xaxis.set_major_formatter(lambda step, _: area.text(step))
    tidy(axes)
    made.legend(loc="outside upper left", frameon=False)
    return made


def plain(text: str) -> str:
    """The text as matplotlib shows it unchanged: dollar signs do not begin a formula, and every character is valid.

    >>> plain("$5_vs_$10")
    '\\\\$5_vs_\\\\$10'
    """
    return text.encode("utf-8", "replace").decode().replace("$", r"\$")


def tidy(axes: "Axes") -> None:
    """Apply the common style: plain numbers, a faint grid, no box."""
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(made: "Figure", path: str | Path) -> None:
    """Save a figure as PNG or SVG, depending on the file extension. The same figure gives the same bytes."""
    import matplotlib

    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"The figure cannot be saved to '{path}'; the file name must end in .png or .svg.")
    if not path.parent.is_dir():
        raise InputError(
            f"The figure cannot be saved to '{path}', because there is no folder '{path.parent}'; create it first."
        )
    options: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {"pil_kwargs": _PNG}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lehr"}), replaced(path) as file:
        made.savefig(file, format=path.suffix[1:], dpi=150, **options)
