"""The progress line, on terminals of any width and in files."""

import contextlib
import io
import re
import time

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
FIRST = {"coef/discount": 0.99, "coef/entropy_coef": 0.02, "coef/value_coef": 0.5, "coef/learning_rate": 3e-4}
"""The coefficients of the first update: two of them change."""


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


def test_a_terminal_shows_everything_in_one_line(clock):
    console = terminal()
    with Progress(10_000_000, console=console) as bar:
        bar.update(4_000_000, FIRST, rate=1_230_000.0)
        clock[0] = 1.0
        bar.update(4_200_000, METRICS, rate=1_230_000.0)
    percent, bar_drawn, *words = last_line(console).split("  ")
    assert percent == " 42%"
    assert set(bar_drawn) <= set("━╸╺ ")
    assert words == [
        *("4.20M/10.0M steps", "1.23M/s", "0:05 left", "return 123.5"),
        *("entropy_coef 0.0125", "learning_rate 0.00025"),
    ]


def test_no_width_breaks_the_line_or_a_part_of_it(clock):
    wide = ["100%", "10.0M/10.0M steps", "1.00M/s", "0:00 left", "return 123.5"]
    narrow = ["100%", "10.0M/10.0M", *wide[2:], "ent 0.0125", "lr 0.00025"]
    wide += ["entropy_coef 0.0125", "learning_rate 0.00025"]
    for width in range(1, 130):
        console = terminal(width)
        with Progress(10_000_000, console=console) as bar:
            for clock[0], steps in enumerate((0, 5_000_000, 10_000_000)):
                bar.update(steps, METRICS if steps else FIRST, rate=1e6)
        lines = [line for line in re.split(r"[\r\n]+", output(console)) if line]
        assert all(cell_len(line) <= width for line in lines)
        parts = [part for part in lines[-1].split("  ") if set(part) != {"━"}]
        full = "steps" in lines[-1]
        everything = wide if full else narrow
        assert parts == (everything[: len(parts)] if width >= 4 else ["100%"[:width]])
        assert width < 80 or len(parts) == len(everything)
        assert full == ("entropy_coef" in lines[-1]) == (width >= len("  ".join(wide)) + len("  ") + 10)
        assert console.file.getvalue().count("\n") == 1  # all updates were drawn over each other


def test_the_mean_reward_stands_for_the_return_until_an_episode_ends(clock):
    console = plain_file()
    with Progress(100, console=console) as bar:
        bar.update(50, {"rollout/reward": 0.25}, rate=1.0)
        clock[0] = 20.0
        bar.update(60, {"rollout/reward": 0.25, "episode/return": 7.0}, rate=1.0)
    first, second = console.file.getvalue().splitlines()
    assert first.endswith("reward 0.25")
    assert second.endswith("return 7")


def test_waiting_is_counted_on_a_terminal_and_announced_in_a_file(clock):
    live, file = terminal(), plain_file()
    for console in (live, file):
        with Progress(100, console=console) as bar, bar.waiting("compiling ppo on Chain", 11.4):
            clock[0] += 6.0
            time.sleep(0.3 if console is live else 0)
    assert "compiling ppo on Chain, 6 s; 11 s the last time" in output(live)
    assert file.file.getvalue() == "compiling ppo on Chain (11 s the last time)\n"


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
            bar.update(second, METRICS if second else FIRST, rate=1.0)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["0%", "10%", "20%", "25%"]
    assert lines[-1] == ("25%  25/100 steps  1/s  1:15 left  return 123.5  entropy_coef 0.0125  learning_rate 0.00025")


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
        bar.update(5, {"coef/x": 1.0}, rate)
        bar.update(5, {"episode/return": float("nan"), "coef/x": float("inf")}, rate)
    assert last_line(console).endswith("return -  x inf")
    assert last_line(console).startswith("100%")


def test_a_failure_gives_the_terminal_back():
    console = terminal()
    with contextlib.suppress(KeyboardInterrupt), Progress(100, console=console) as bar:
        bar.update(50, METRICS, rate=1.0)
        raise KeyboardInterrupt
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again
