"""The command line. A mistake in the input is one line and exit code 2; a failure at run time is exit code 1."""

import argparse
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

import lehr
from lehr import plots
from lehr.errors import InputError, closest
from lehr.schedules import COEFFICIENTS, Phase, Schedule
from lehr.schedules.phases import number_text
from lehr.schedules.text import parse_number, parse_position

_PIPE_WIDTH = 200
"""Characters of a line where the output is no terminal: wide enough that no table wraps."""
_CHART_WIDTH = 80
"""Characters of the chart's lines, unless the terminal is narrower or the user says."""
_MOST_ROWS = 20
"""Phases that are listed one by one; of more, the first and the last."""


class Command(NamedTuple):
    """A subcommand: one line of help, what adds its arguments, and what runs it."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        arguments = _parse(words)
        arguments.run(arguments)
    except Exception as error:
        mistake = isinstance(error, InputError)
        if "--debug" in words:
            traceback.print_exc()
        else:
            message = " ".join(str(error).splitlines())
            print("lehr:", message if mistake else f"{type(error).__name__}: {message}", file=sys.stderr)
        return 2 if mistake else 1
    return 0


# Arguments ---------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors as ours."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see '{self.prog} --help'.")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    everywhere = _Parser(add_help=False)
    everywhere.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = _Parser(prog="lehr", description=lehr.__doc__, parents=[everywhere], allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"lehr {lehr.__version__}")
    parser.set_defaults(run=lambda arguments: parser.print_help())
    parsers = {"": parser}
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    for name, command in COMMANDS.items():
        added = commands.add_parser(
            name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            parents=[everywhere],
            allow_abbrev=False,
        )
        command.add_arguments(added)
        added.set_defaults(run=command.run)
        parsers[name] = added
    called = next((word for word in words if not word.startswith("-")), "")
    if called not in parsers:
        raise InputError(f"There is no command {called!r}; {closest(called, COMMANDS)}")
    arguments, unknown = parser.parse_known_args(words)
    for word in unknown:
        if word.startswith("-"):
            flags = dict.fromkeys(re.findall(r"--[a-z-]+", parsers[called].format_usage()))
            raise InputError(f"There is no option {word.partition('=')[0]!r}; {closest(word.partition('=')[0], flags)}")
        raise InputError(f"{word!r} is one argument too many; see '{parsers[called].prog} --help'.")
    return arguments


# Output ------------------------------------------------------------------------------------------------------------


def _console() -> Console:
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def _show(console: Console, words: str, style: str = "") -> Text:
    """Words in what the output can encode."""
    if console.options.ascii_only:
        words = words.replace("→", "->").replace("∞", "inf").encode("ascii", "replace").decode()
    return Text(words, style)


def _print_table(console: Console, header: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str]) -> None:
    """Print rows under a header; the columns named in `words` are flush left, the others hold numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
    for name in header:
        table.add_column(name, justify="left" if name in words else "right")
    for row in rows:
        table.add_row(*(_show(console, cell) for cell in row))
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.print(line.rstrip())
    console.print()


# lehr schedule -----------------------------------------------------------------------------------------------------


def _add_schedule_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="for example '0.03 -> 0.001 cosine'")
    parser.add_argument("--total", metavar="STEPS", help="the budget in env steps, for example 1M")
    parser.add_argument("--at", nargs="+", default=[], metavar="STEP", help="more places to tell the value at")
    parser.add_argument("--plot", metavar="FILE", help="also write a picture, .png or .svg")
    parser.add_argument("--width", type=int, help="characters of the chart's lines")
    parser.add_argument("--height", type=int, default=17, help="lines of the chart")


def _schedule(arguments: argparse.Namespace) -> None:
    schedules: list[Any] = [lehr.schedule(text) for text in arguments.texts]
    total = None if arguments.total is None else _total(arguments.total)
    area = plots.span(schedules, total)
    bound = [schedule.bind(area.stop) for schedule in schedules]
    quarters = {area.stop * quarter / 4 for quarter in range(5)}
    places = sorted(quarters | {_place(text, area, total) for text in arguments.at})
    console = _console()
    drawn_with = _drawn_with(console, len(bound))
    width = min(console.width, _CHART_WIDTH) if arguments.width is None else arguments.width
    chart = plots.chart(schedules, total, width=width, height=arguments.height, drawn_with=drawn_with)
    if arguments.plot:
        plots.save_figure(plots.figure(schedules, total, labels=arguments.texts), arguments.plot)

    names = [_show(console, text, "bold") for text in arguments.texts]
    if len(bound) > 1:
        for number, name in enumerate(names):
            style = plots.STYLES[number % len(plots.STYLES)]
            names[number] = Text.assemble((plots.mark(number, drawn_with), style), f" {number + 1}  ", name)
    for name, schedule in zip(names, bound, strict=True):
        console.print(name, soft_wrap=True)
        _print_table(console, _PHASE_COLUMNS, _phase_rows(schedule, area), words=("shape",))
        note = _end_note(schedule, area) if total is not None or area.in_percent else None
        if note:
            console.print(f"Note: it {note}.\n", soft_wrap=True)
    columns = ["value"] if len(bound) == 1 else [f"value {number}" for number in range(1, len(bound) + 1)]
    rows = [[area.text(place), _percent(place / area.stop), *(_value(s(place)) for s in bound)] for place in places]
    _print_table(console, ["at", "share", *columns], rows, words=())
    for name in names if len(names) > 1 else ():
        console.print(name, soft_wrap=True)
    console.print(chart, soft_wrap=True)
    if arguments.plot:
        console.print(_show(console, f"\nThe picture is in {arguments.plot}."), soft_wrap=True)


def _value(value: float) -> str:
    """A value in nine digits, which tell any two numbers of a float32 program apart."""
    return f"{value:.9g}"


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"


_PHASE_COLUMNS = ("phase", "from", "to", "start", "end", "shape", "share")


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


# lehr list ---------------------------------------------------------------------------------------------------------


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", metavar="WHAT", help=f"one of: {', '.join(LISTS)}")


def _list(arguments: argparse.Namespace) -> None:
    console = _console()
    if arguments.what is None:
        rows = [[f"lehr list {name}", summary] for name, (summary, _) in LISTS.items()]
        _print_table(console, ("command", "what it lists"), rows, words=("command", "what it lists"))
    elif arguments.what not in LISTS:
        raise InputError(f"There is no list of {arguments.what!r}; {closest(arguments.what, LISTS)}")
    else:
        LISTS[arguments.what][1](console)


def _list_coefficients(console: Console) -> None:
    header = ("name", "other names", "range", "what it does")
    rows = [
        [entry.name, ", ".join(entry.aliases), entry.range_text, entry.description] for entry in COEFFICIENTS.values()
    ]
    _print_table(console, header, rows, words=header)


LISTS: dict[str, tuple[str, Callable[[Console], None]]] = {
    "coefficients": ("what can be scheduled: names, ranges and meaning", _list_coefficients),
}
"""What `lehr list` knows: a line of help, and what prints it."""

COMMANDS: dict[str, Command] = {
    "schedule": Command("show schedules: phases, values and curves", _add_schedule_arguments, _schedule),
    "list": Command("list what there is", _add_list_arguments, _list),
}
"""The subcommands, in the order of the help."""
