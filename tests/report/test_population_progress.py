"""The display of a population, on terminals and in files."""

import io
import math
import re

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from lehr.report.loggers import display
from lehr.report.loggers.population_progress import PopulationProgress

LABELS = [f"{number}: learning_rate {number / 1000:g}, seed 0" for number in range(8)]
RETURNS = np.array([10.0, math.nan, 70.0, 30.0, 50.0, 20.0, 40.0, 60.0])


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; `clock[0]` is its time."""
    now = [0.0]
    monkeypatch.setattr(display, "monotonic", lambda: now[0])
    return now


def terminal(width=150):
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, _environ={})


def plain_file():
    return Console(file=io.StringIO(), force_terminal=False, width=40, _environ={})


def drawn(console):
    """The lines that were printed, without the codes that move the cursor."""
    text = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", console.file.getvalue())
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def shown(console, **options):
    return PopulationProgress(1_000_000, labels=LABELS, console=console, **options)


def test_a_terminal_shows_the_line_a_bar_and_the_best_five():
    console = terminal()
    with shown(console, title="wave 1 of 2  ") as display:
        display.update(2_000_000, {"returns": RETURNS}, rate=500_000.0)
    lines = drawn(console)
    lines = lines[max(number for number, line in enumerate(lines) if line.startswith("wave")) :]
    words = ["wave 1 of 2", " 25%", "8 members", "2.00M/8.00M steps", "500k/s", "0.5 members/s", "0:12 left"]
    assert lines[0].split("  ") == words
    assert set(lines[1].removesuffix("  returns 10 to 70, median 40")) <= set("━╸╺ ")
    assert lines[2].split() == ["return", "best", "members", "now"]
    rows = [["70", "2:"], ["60", "7:"], ["50", "4:"], ["40", "6:"], ["30", "3:"]]
    assert [line.split()[:2] for line in lines[3:]] == rows


@pytest.mark.parametrize("width", [5, 20, 60, 200])
def test_no_line_is_wider_than_the_terminal(width):
    console = terminal(width)
    with shown(console) as display:
        display.update(2_000_000, {"returns": RETURNS}, rate=500_000.0)
    assert all(cell_len(line) <= width for line in drawn(console))


def test_a_terminal_is_redrawn_at_most_five_times_a_second(clock):
    console = terminal()
    with shown(console) as display:
        for step in range(1000):
            clock[0] = step / 1000
            display.update(step, {"returns": RETURNS}, rate=1000.0)
    assert 5 <= sum("members/s" in line for line in drawn(console)) <= 8


def test_a_file_gets_a_plain_line_every_ten_seconds_and_one_at_the_end(clock):
    console = plain_file()
    with shown(console) as display:
        for second in range(26):
            clock[0] = float(second)
            display.update(second * 80_000, {"returns": RETURNS}, rate=80_000.0)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["0%", "10%", "20%", "25%"]
    assert lines[-1] == (
        " 25%  8 members  2.00M/8.00M steps  80.0k/s  0.08 members/s  1:15 left  returns 10 to 70, median 40"
    )
    assert "\x1b" not in console.file.getvalue()


def test_a_message_is_printed_as_it_is():
    console = plain_file()
    with shown(console) as display:
        display.message("Member 3: [bold]x[/bold] is frozen by update 7, and this line is longer than the console")
    assert console.file.getvalue() == (
        "Member 3: [bold]x[/bold] is frozen by update 7, and this line is longer than the console\n"
    )


@pytest.mark.parametrize("console", [terminal(), plain_file()], ids=["terminal", "file"])
def test_silence_is_complete(console):
    with shown(console, enabled=False) as display:
        display.update(50, {"returns": RETURNS}, rate=1.0)
        display.message("nobody hears this")
    assert console.file.getvalue() == ""


@pytest.mark.parametrize("make", [terminal, plain_file])
@pytest.mark.parametrize("rate", [0.0, math.nan, math.inf])
def test_odd_numbers_do_no_harm(make, rate):
    console = make()
    with PopulationProgress(0, labels=["0: seed 0"], console=console) as display:
        display.update(0, {"returns": np.array([math.nan])}, rate)
    assert "100%" in drawn(console)[0]
    assert any(line.endswith("returns -") for line in drawn(console))


def test_rewards_stand_for_returns_until_an_episode_ends(clock):
    console = plain_file()
    with PopulationProgress(100, labels=["0", "1"], console=console) as display:
        display.update(50, {"returns": np.full(2, math.nan), "rewards": np.array([0.5, 1.5])}, rate=1.0)
        clock[0] = 20.0
        display.update(60, {"returns": np.array([math.nan, 3.0]), "rewards": np.array([0.5, 1.5])}, rate=1.0)
    first, second = drawn(console)
    assert first.endswith("rewards per step 0.5 to 1.5, median 1")
    assert second.endswith("returns 3 to 3, median 3")


@pytest.mark.parametrize("make", [terminal, plain_file])
def test_nothing_is_shown_before_the_first_update(make):
    console = make()
    with shown(console):
        pass
    assert drawn(console) == []
