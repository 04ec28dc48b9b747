"""The display of waves that are trained at the same time."""

import io

import numpy as np
from rich.console import Console

from lehr.report.loggers.waves_progress import WavesProgress


def printed(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, color_system=None)
    with WavesProgress(1000, {0: 2, 2: 4}, 3, console=console) as shown:
        shown.begin(0, "first")
        shown.begin(2, "second")
        shown.update(0, 1000, 100.0, np.array([1.0, np.nan]))
        shown.update(2, 2000, 200.0, np.array([5.0, 7.0, 9.0, 11.0]))
        shown.message("a message")
    return out.getvalue()


OVERALL = (
    "waves running: 2   50%  6 members  3.00k/6.00k steps  300/s  0.3 members/s  0:10 left  returns 1 to 11, median 7"
)


def test_a_terminal_shows_all_waves_and_each_with_its_place():
    text = printed(terminal=True)
    last = text[text.rindex("waves running") :]
    lines = [line.rstrip() for line in last.splitlines()]
    assert lines[0] == OVERALL
    assert lines[1].startswith("wave 1 of 3 on first   50%  2 members  1.00k/2.00k steps  100/s")
    assert lines[2].startswith("wave 3 of 3 on second   50%  4 members  2.00k/4.00k steps  200/s")


def test_a_file_gets_a_line_at_the_beginning_and_at_the_end():
    lines = printed(terminal=False).splitlines()
    assert lines[0].startswith("waves running: 1    0%")
    assert lines[1:] == ["a message", OVERALL]
