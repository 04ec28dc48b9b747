"""Printing for all commands: plain lines and tables, limited to characters that the output can show."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 1000
"""Line width when the output is not a terminal: so wide that no table wraps."""
_ASCII = {"→": "->", "∞": "inf", "±": "+-", "×": "x"}
_LABEL_WIDTH = 12


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


def print_table(console: Console, header: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str]) -> None:
    """Print rows under a header; columns named in `words` are left-aligned, the others hold numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
    for name in header:
        table.add_column(name, justify="left" if name in words else "right")
    for row in rows:
        table.add_row(*(show(console, cell) for cell in row))
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.print(line.rstrip())
    console.print()


def print_facts(console: Console, facts: Mapping[str, str | Sequence[str]]) -> None:
    """Print each label with its line or lines beside it."""
    for label, said in facts.items():
        for number, line in enumerate([said] if isinstance(said, str) else said):
            console.print(show(console, f"{'' if number else label:<{_LABEL_WIDTH}} {line}"), soft_wrap=True)
