"""Printing for all commands: plain lines and tables, limited to characters that the output can show."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 1000
"""Line width when the output is not a terminal: so wide that no table wraps."""
_ASCII = {"→": "->", "∞": "inf", "±": "+-", "×": "x"}
_LABEL_WIDTH = 12
_GAP = 3
"""Spaces between the columns of a table."""


def console() -> Console:
    """A console on standard output, without markup or highlighting."""
    made = Console(markup=False, highlight=False, emoji=False)
    if not made.is_terminal:
        made.width = _PIPE_WIDTH
    return made


def show(console: Console, words: str, style: str = "") -> Text:
    """Text with characters replaced that the output cannot encode."""
    if console.options.ascii_only:
        for sign, plain in _ASCII.items():
            words = words.replace(sign, plain)
        words = words.encode("ascii", "replace").decode()
    return Text(words, style)


def plural(word: str, count: int) -> str:
    """The word, with an s unless it is of one thing."""
    return word if count == 1 else f"{word}s"


def print_table(
    console: Console,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    words: Sequence[str],
    optional: Sequence[str] = (),
) -> None:
    """Print rows under a header.

    Args:
        console: where to print.
        header: the names of the columns.
        rows: the cells.
        words: the columns that are left-aligned; the others hold numbers.
        optional: the columns to leave out in a narrow terminal, in this order, so that the others are not cut.
    """
    rows = list(rows)
    left_out: list[str] = []
    columns = dict(zip(header, zip(*rows, strict=True), strict=False))
    for name in optional:
        widths = [max(map(len, (title, *cells))) + _GAP for title, cells in columns.items()]
        if sum(widths) - _GAP > console.width:
            del columns[name]
            left_out.append(name)
    if left_out:
        header, rows = list(columns), list(zip(*columns.values(), strict=True))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="")
    for number, name in enumerate(header):
        is_first = number == 0  # it has what a command takes, which should not be broken
        table.add_column(name, justify="left" if name in words else "right", no_wrap=is_first, overflow="fold")
    for row in rows:
        table.add_row(*(show(console, cell) for cell in row))
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.print(line.rstrip())
    console.print(f"\nIn a wider terminal: {', '.join(left_out)}." if left_out else "")


def print_facts(console: Console, facts: Mapping[str, str | Sequence[str]]) -> None:
    """Print each label with its line or lines beside it."""
    for label, said in facts.items():
        for number, line in enumerate([said] if isinstance(said, str) else said):
            console.print(show(console, f"{'' if number else label:<{_LABEL_WIDTH}} {line}"), soft_wrap=True)
