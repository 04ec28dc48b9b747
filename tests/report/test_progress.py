"""The progress line, on terminals of any width and in files."""

import contextlib
import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from lehr.report.loggers import display
from lehr.report.loggers.progress import Progress

METRICS = {
    "loss/total": 1.0,
    "episode/return": 123.456,
    "coef/discount": 0.99,
    "coef/entropy_coef": 0.0125,
    "coef/value_coef": 0.5,
    "coef/learning_rate": 2.5e-4,
}


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; `clock[0]` is its time."""
    now = [0.0]
    monkeypatch.setattr(display, "monotonic", lambda: now[0])
    return now


def terminal(width=150, **options):
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, _environ={}, **options)


def plain_file():
    return Console(file=io.StringIO(), force_terminal=False, width=40, _environ={})


def output(console):
    """What was printed, without the codes that move the cursor."""
    return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", console.file.getvalue())


def last_line(console):
    return re.split(r"[\r\n]+", output(console).strip("\r\n"))[-1]


def test_a_terminal_shows_everything_in_one_line():
    console = terminal()
    with Progress(10_000_000, console=console) as bar:
        bar.update(4_200_000, METRICS, rate=1_230_000.0)
    percent, bar_drawn, *words = last_line(console).split("  ")
    assert percent == " 42%"
    assert set(bar_drawn) <= set("━╸╺ ")
    assert words == [
        *("4.20M/10.0M steps", "1.23M/s", "0:05 left", "return 123.5"),
        *("entropy_coef 0.0125", "learning_rate 0.00025", "discount 0.99"),
    ]


def test_no_width_breaks_the_line_or_a_part_of_it(clock):
    everything = ["100%", "10.0M/10.0M steps", "1.00M/s", "0:00 left", "return 123.5", "entropy_coef 0.0125"]
    for width in range(1, 110):
        console = terminal(width)
        with Progress(10_000_000, console=console) as bar:
            for clock[0], steps in enumerate((0, 5_000_000, 10_000_000)):
                bar.update(steps, METRICS, rate=1e6)
        lines = [line for line in re.split(r"[\r\n]+", output(console)) if line]
        assert all(cell_len(line) <= width for line in lines)
        parts = [part for part in lines[-1].split("  ") if set(part) != {"━"}]
        assert parts == (everything[: len(parts)] if width >= 4 else ["100%"[:width]])
        assert width < 60 or "━" * 10 in lines[-1]
        assert console.file.getvalue().count("\n") == 1  # all updates were drawn over each other


def test_a_message_stands_above_the_bar():
    console = terminal()
    with Progress(100, console=console) as bar:
        bar.update(50, METRICS, rate=1.0)
        bar.message("the checkpoint [bold]1[/bold] is damaged")
        bar.update(100, METRICS, rate=1.0)
    lines = [line.strip() for line in re.split(r"[\r\n]+", output(console))]
    assert lines.index("the checkpoint [bold]1[/bold] is damaged") < next(
        number for number, line in enumerate(lines) if line.startswith("100%")
    )


def test_a_terminal_is_redrawn_at_most_ten_times_a_second(clock):
    console = terminal()
    with Progress(1000, console=console) as bar:
        for step in range(1000):
            clock[0] = step / 1000
            bar.update(step, METRICS, rate=1000.0)
    assert 9 <= output(console).count("steps") <= 12
    assert last_line(console).startswith(" 99%")


def test_a_file_gets_a_line_every_ten_seconds_and_one_at_the_end(clock):
    console = plain_file()
    with Progress(100, console=console) as bar:
        for second in range(26):
            clock[0] = float(second)
            bar.update(second, METRICS, rate=1.0)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["0%", "10%", "20%", "25%"]
    assert lines[-1] == (
        "25%  25/100 steps  1/s  1:15 left  return 123.5  entropy_coef 0.0125  learning_rate 0.00025  discount 0.99"
    )


def test_the_last_line_is_not_said_twice(clock):
    console = plain_file()
    with Progress(100, console=console) as bar:
        bar.update(100, {}, rate=1.0)
    assert console.file.getvalue() == "100%  100/100 steps  1/s  0:00 left  return -\n"


@pytest.mark.parametrize("console", [terminal(), plain_file()], ids=["terminal", "file"])
def test_silence_is_complete(console):
    with Progress(100, enabled=False, console=console) as bar:
        bar.update(50, METRICS, rate=1.0)
        bar.message("nobody hears this")
    assert console.file.getvalue() == ""


@pytest.mark.parametrize("make", [terminal, plain_file])
def test_nothing_is_shown_before_the_first_update(make):
    console = make()
    with Progress(100, console=console):
        pass
    assert output(console).strip() == ""


@pytest.mark.parametrize("make", [terminal, plain_file])
@pytest.mark.parametrize("rate", [0.0, float("nan"), float("inf")])
def test_odd_numbers_do_no_harm(make, rate):
    console = make()
    with Progress(0, console=console) as bar:
        bar.update(5, {"episode/return": float("nan"), "coef/x": float("inf")}, rate)
    assert last_line(console).endswith("return -  x inf")
    assert last_line(console).startswith("100%")


def test_a_failure_gives_the_terminal_back():
    console = terminal()
    with contextlib.suppress(KeyboardInterrupt), Progress(100, console=console) as bar:
        bar.update(50, METRICS, rate=1.0)
        raise KeyboardInterrupt
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again
