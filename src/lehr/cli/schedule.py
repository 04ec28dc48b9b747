"""`lehr schedule`: preview schedules before a long run."""

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

import lehr
from lehr.cli import output
from lehr.errors import InputError
from lehr.report import plots
from lehr.schedules import Phase, Schedule
from lehr.schedules.phases import number_text
from lehr.schedules.text import parse_number, parse_position

_CHART_WIDTH = 80
"""Width of the chart, unless the terminal is narrower or `--width` is given."""
_MOST_ROWS = 20
"""Phases to list; of a longer schedule, only the first ones and the last are shown."""
_PHASE_COLUMNS = ("phase", "from", "to", "start", "end", "shape", "share")


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the schedules, and how to show them."""
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="schedule, for example '0.03 -> 0.001 cosine'")
    parser.add_argument("--total", metavar="STEPS", help="budget in env steps, for example 1M")
    parser.add_argument(
        "--at",
        nargs="+",
        default=[],
        metavar="STEP",
        help="also show the values at these steps, for example 500k or 20%%",
    )
    parser.add_argument("--plot", metavar="FILE", help="also save a figure, .png or .svg")
    parser.add_argument(
        "--width", type=int, metavar="INTEGER", help="width of the chart in characters (default: at most 80)"
    )
    parser.add_argument(
        "--height", type=int, default=17, metavar="INTEGER", help="height of the chart in lines (default: 17)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print phases, values and the chart; save the figure if requested."""
    schedules: list[Any] = [lehr.schedule(text) for text in arguments.texts]
    total = None if arguments.total is None else _total(arguments.total)
    area = plots.span(schedules, total)
    bound = [schedule.bind(area.stop) for schedule in schedules]
    quarters = {area.stop * quarter / 4 for quarter in range(5)}
    places = sorted(quarters | {_place(text, area, total) for text in arguments.at})
    console = output.console()
    drawn_with = _drawn_with(console, len(bound))
    width = min(console.width, _CHART_WIDTH) if arguments.width is None else arguments.width
    chart = plots.chart(schedules, total, width=width, height=arguments.height, drawn_with=drawn_with)
    if arguments.plot:
        plots.save_figure(plots.figure(schedules, total, labels=arguments.texts), arguments.plot)

    names = [output.show(console, text, "bold") for text in arguments.texts]
    if len(bound) > 1:
        for number, name in enumerate(names):
            style = plots.STYLES[number % len(plots.STYLES)]
            names[number] = Text.assemble((plots.mark(number, drawn_with), style), f" {number + 1}  ", name)
    for name, schedule in zip(names, bound, strict=True):
        console.print(name, soft_wrap=True)
        output.print_table(console, _PHASE_COLUMNS, _phase_rows(schedule, area), words=("shape",))
        note = _end_note(schedule, area) if total is not None or area.in_percent else None
        if note:
            console.print(f"Note: the schedule {note}.\n", soft_wrap=True)
    columns = ["value"] if len(bound) == 1 else [f"value {number}" for number in range(1, len(bound) + 1)]
    rows = [[area.text(place), _percent(place / area.stop), *(_value(s(place)) for s in bound)] for place in places]
    output.print_table(console, ["at", "share", *columns], rows, words=())
    for name in names if len(names) > 1 else ():
        console.print(name, soft_wrap=True)
    console.print(chart, soft_wrap=True)
    if arguments.plot:
        console.print(output.show(console, f"\nSaved the figure to {arguments.plot}."), soft_wrap=True)


def _value(value: float) -> str:
    """A value with nine digits, enough to distinguish any two float32 numbers."""
    return f"{value:.9g}"


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def _total(text: str) -> float:
    try:
        return parse_number(text)
    except InputError:
        raise InputError(f"--total is {text!r}; give a number of env steps, for example 500k, 1M or 1e6.") from None


def _place(text: str, area: plots.Span, total: float | None) -> float:
    """The step that one argument of `--at` stands for."""
    try:
        place = parse_position(text)
    except InputError:
        raise InputError(
            f"--at is {text!r}; give env steps or a share of the budget, for example 500k or 20%."
        ) from None
    if total is None and (place.steps if area.in_percent else place.share):
        known = "shares of the budget" if area.in_percent else "env steps"
        raise InputError(f"--at is {text!r}, but the schedule is in {known} only; give the budget with --total.")
    return place.bound(area.stop)


def _drawn_with(console: Console, curves: int) -> Any:
    """Braille if colours tell the curves apart or there is only one; otherwise a mark per curve."""
    if console.options.ascii_only:
        return "ascii"
    coloured = console.color_system is not None and not console.no_color
    return "braille" if coloured or curves == 1 else "marks"


def _phase_rows(schedule: Schedule, area: plots.Span) -> list[list[str]]:
    rows = []
    for number, (begin, finish, start, end, shape) in enumerate(_pieces(schedule, area.stop), 1):
        share = (min(finish, area.stop) - min(begin, area.stop)) / area.stop
        where = [area.text(begin), area.text(finish)]
        rows.append([str(number), *where, _value(start), _value(end), shape, _percent(share)])
    if len(rows) <= _MOST_ROWS:
        return rows
    return [*rows[: _MOST_ROWS - 2], ["...", *[""] * (len(_PHASE_COLUMNS) - 1)], rows[-1]]


def _pieces(schedule: Schedule, stop: float) -> Iterator[tuple[float, float, float, float, str]]:
    """The pieces of a bound schedule as (from, to, start, end, shape), including those that hold a value."""
    phases = schedule.phases
    following = [*(phase.begin.steps for phase in phases[1:]), math.inf]
    first = phases[0]
    if first.begin.steps > 0:
        yield 0.0, first.begin.steps, first.start, first.start, "holds"
    for phase, limit in zip(phases, following, strict=True):
        begin = phase.begin.steps
        rest = min(limit, max(stop, begin))
        finish = min(phase.stop.steps, limit) if phase.needs_length else rest
        cut = phase.stop.steps > finish and not math.isclose(phase.stop.steps, finish)
        end = schedule(math.nextafter(finish, 0)) if phase.needs_length and cut else phase.end
        yield begin, finish, phase.start, end, _shape_text(phase)
        if finish < rest and not math.isclose(finish, rest):
            yield finish, rest, phase.end, phase.end, "holds"


def _shape_text(phase: Phase) -> str:
    has_power = phase.shape == "polynomial" or phase.power != 1
    return f"{phase.shape}({number_text(phase.power)})" if has_power else phase.shape


def _end_note(schedule: Schedule, area: plots.Span) -> str | None:
    """A note on a schedule that ends before or after the budget."""
    last = schedule.phases[-1]
    end = last.stop.steps
    budget = "the end of the budget" if area.in_percent else f"the budget of {area.text(area.stop)}"
    if math.isclose(end, area.stop) or (end < area.stop and not last.needs_length):
        return None
    if end > area.stop:
        value = _value(schedule(area.stop))
        return f"ends at {area.text(end)}, after {budget}; its value at {area.text(area.stop)} is {value}"
    return f"ends at {area.text(end)}, before {budget}, and holds {_value(last.end)} from then on"
