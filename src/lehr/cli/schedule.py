"""`lehr schedule`: look at schedules before a long run."""

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
"""Characters of the chart's lines, unless the terminal is narrower or the user says."""
_MOST_ROWS = 20
"""Phases that are listed one by one; of more, the first and the last."""
_PHASE_COLUMNS = ("phase", "from", "to", "start", "end", "shape", "share")


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The texts, and how to show them."""
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="for example '0.03 -> 0.001 cosine'")
    parser.add_argument("--total", metavar="STEPS", help="the budget in env steps, for example 1M")
    parser.add_argument("--at", nargs="+", default=[], metavar="STEP", help="more places to tell the value at")
    parser.add_argument("--plot", metavar="FILE", help="also write a picture, .png or .svg")
    parser.add_argument("--width", type=int, help="characters of the chart's lines")
    parser.add_argument("--height", type=int, default=17, help="lines of the chart")


def run(arguments: argparse.Namespace) -> None:
    """Print phases, values and the chart; write the picture if it is asked for."""
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
            console.print(f"Note: it {note}.\n", soft_wrap=True)
    columns = ["value"] if len(bound) == 1 else [f"value {number}" for number in range(1, len(bound) + 1)]
    rows = [[area.text(place), _percent(place / area.stop), *(_value(s(place)) for s in bound)] for place in places]
    output.print_table(console, ["at", "share", *columns], rows, words=())
    for name in names if len(names) > 1 else ():
        console.print(name, soft_wrap=True)
    console.print(chart, soft_wrap=True)
    if arguments.plot:
        console.print(output.show(console, f"\nThe picture is in {arguments.plot}."), soft_wrap=True)


def _value(value: float) -> str:
    """A value in nine digits, which tell any two numbers of a float32 program apart."""
    return f"{value:.9g}"


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def _total(text: str) -> float:
    try:
        return parse_number(text)
    except InputError:
        raise InputError(f"--total is {text!r}; give a number of env steps, for example 500k, 1M or 1e6.") from None


def _place(text: str, area: plots.Span, total: float | None) -> float:
    """The step that a text of `--at` means."""
    try:
        place = parse_position(text)
    except InputError:
        raise InputError(
            f"--at is {text!r}; give env steps or a share of the budget, for example 500k or 20%."
        ) from None
    if total is None and (place.steps if area.in_percent else place.share):
        known = "shares of the budget" if area.in_percent else "env steps"
        raise InputError(f"--at is {text!r}, but the schedule counts in {known} alone; give the budget with --total.")
    return place.bound(area.stop)


def _drawn_with(console: Console, curves: int) -> Any:
    """Braille where curves can differ by colour, or where there is one; marks elsewhere."""
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
    """What a bound schedule does, from, to, start, end and shape, with the times in which it just holds a value."""
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
    """What to know about a schedule that does not end with the budget."""
    last = schedule.phases[-1]
    end = last.stop.steps
    budget = "the end of the budget" if area.in_percent else f"the budget of {area.text(area.stop)}"
    if math.isclose(end, area.stop) or (end < area.stop and not last.needs_length):
        return None
    if end > area.stop:
        return f"ends at {area.text(end)}, after {budget}; its last value is {_value(schedule(area.stop))}"
    return f"ends at {area.text(end)}, before {budget}, and holds {_value(last.end)} from there"
