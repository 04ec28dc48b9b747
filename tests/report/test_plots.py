"""The chart puts dots where the curve is, and the files are what their endings say."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from lehr import InputError, schedule
from lehr.report.plots import Span, chart, figure, samples, save_figure, span, steps_text


def area_of(text, margin):
    """The lines of a chart's drawing area, without the axes."""
    return [line[margin:] for line in str(text).splitlines()[:-2]]


# What is drawn -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "total", "expected"),
    [
        (["1 -> 0"], 500, Span(500.0)),
        (["1 -> 0 over 20%", "0.01"], None, Span(100.0, in_percent=True)),
        (["0.01"], None, Span(100.0, in_percent=True)),
        (["1 -> 0 over 2M", "0.1 at 0, 0 at 3M", "0.01"], None, Span(3e6)),
        (["1 until 3M, 0"], None, Span(3e6)),
    ],
)
def test_span(texts, total, expected):
    assert span([schedule(text) for text in texts], total) == expected


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["1 -> 0 over 2M", "1 -> 0"], "give the budget"),
        (["1 until 500k, 1 -> 0"], "give the budget"),
        (["1 -> 0 until 100%-50k"], "give the budget"),
        ([lambda step: 0.1], "is a function without an end; give the budget"),
        (["plateau(0.03)"], "depends on metrics and not on the step, so it cannot be plotted; give a schedule"),
        ([], "There is no schedule to plot; give at least one"),
    ],
)
def test_span_says_what_is_missing(specs, message):
    with pytest.raises(InputError, match=message):
        span([schedule(spec) for spec in specs])


def test_samples_stand_on_both_sides_of_a_jump():
    steps, values = samples(schedule("1 until 333, 0.5 until 666, 0"), stop=1000, count=2)
    assert values.tolist() == [1, 1, 0.5, 0.5, 0, 0]
    assert steps.tolist() == [0, np.nextafter(333, 0), 333, np.nextafter(666, 0), 666, 1000]


@pytest.mark.parametrize(
    ("steps", "text"), [(0, "0"), (999, "999"), (1e11, "100B"), (1.5e6, "1.5M"), (123_456, "123456"), (2 / 3, "0.67")]
)
def test_steps_text(steps, text):
    assert steps_text(steps) == text


# In the terminal ---------------------------------------------------------------------------------------------------


def test_a_line_over_a_square_is_its_diagonal():
    drawn = area_of(chart([schedule("10 -> 0")], width=11 + 5, height=11, drawn_with="ascii"), margin=4)
    assert drawn == [" " * place + "*" for place in range(11)]


def test_braille_dots_of_a_line_are_a_diagonal_of_dots():
    # 20 columns by 10 rows of cells are 40 by 40 dots; a cell of the diagonal has two dots.
    drawn = area_of(chart([schedule("9 -> 0")], width=20 + 4, height=10, drawn_with="braille"), margin=3)
    assert drawn == [" " * (2 * row) + "⠑⢄" for row in range(10)]


def test_a_jump_is_joined_and_stands_at_its_step():
    drawn = area_of(chart([schedule("4 until 50%, 0")], width=21 + 4, height=5, drawn_with="ascii"), margin=3)
    assert [line.rfind("*") for line in drawn] == [10, 10, 10, 10, 20]
    assert drawn[0] == "*" * 11
    assert drawn[4] == " " * 10 + "*" * 11


def test_a_peak_between_two_columns_is_drawn():
    drawn = area_of(chart([schedule("0 -> 1 over 1%, 1 -> 0 over 1%")], width=30, height=5, drawn_with="ascii"), 5)
    assert drawn[0].startswith("*")


def test_curves_differ_by_mark_and_take_turns_where_they_meet():
    drawn = area_of(chart([schedule("1"), schedule("1"), schedule("0")], width=24, height=5), margin=5)
    assert set(drawn[0]) == {"●", "○"}
    assert set(drawn[4]) == {"▲"}


def test_curves_differ_by_colour():
    made = chart([schedule("1"), schedule("0")], width=24, height=5, drawn_with="braille")
    row_of = {mark.style: made.plain.count("\n", 0, mark.start) for mark in made.spans if mark.style}
    assert row_of == {"cyan": 0, "magenta": 4}


def test_axes_carry_the_numbers():
    lines = str(chart([schedule("0.04 -> 0")], total_steps=2_000_000, width=60, height=9)).splitlines()
    assert [line[:5].strip(" ┤│") for line in lines[:9]] == ["0.04", "", "0.03", "", "0.02", "", "0.01", "", "0"]
    assert lines[-1].split() == ["0", "500k", "1M", "1.5M", "2M"]
    ticks = [place for place, sign in enumerate(lines[-2]) if sign == "┬"]
    assert all(abs(lines[-1].find(number) - tick) <= 3 for number, tick in zip(["500k", "1M"], ticks, strict=False))


@pytest.mark.parametrize(("width", "height"), [(20, 3), (33, 8), (80, 17), (140, 40)])
@pytest.mark.parametrize("drawn_with", ["braille", "marks", "ascii"])
def test_a_chart_keeps_its_size(width, height, drawn_with):
    lines = str(chart([schedule("0.03 -> 0.001 cosine")], 333_333, width=width, height=height, drawn_with=drawn_with))
    assert len(lines.splitlines()) == height + 2
    assert max(map(len, lines.splitlines())) <= width


@pytest.mark.parametrize("text", ["0.01", "0", "-1", "-1 -> 1", "0.03 -> 0.003 cosine repeat 500"])
def test_every_column_has_a_dot(text):
    drawn = area_of(chart([schedule(text)], width=60, height=9, drawn_with="ascii"), margin=0)
    columns = range(max(map(len, drawn)) - 1, 0, -1)
    assert sum(any(line[column : column + 1] == "*" for line in drawn) for column in columns) >= 50


def test_a_function_is_drawn():
    drawn = area_of(chart([schedule(lambda step: 10 - step)], 10, width=16, height=11, drawn_with="ascii"), margin=4)
    assert drawn == [" " * place + "*" for place in range(11)]


@pytest.mark.parametrize("size", [{"width": 5}, {"height": 2}, {"height": 1}, {"height": -1}, {"width": 10**7}])
def test_a_size_that_cannot_be_drawn(size):
    with pytest.raises(
        InputError, match=r"The chart size is -?\d+ by -?\d+ characters; it must be from \d+ by 3 to 1000 by 1000"
    ):
        chart([schedule("1 -> 0")], **size)


# In a file ---------------------------------------------------------------------------------------------------------


def test_figure_draws_the_schedule_itself():
    texts = ["warmup 5%, 0.03 -> 0.001 cosine", "0.03 until 300k, 0.01"]
    axes = figure([schedule(text) for text in texts], total_steps=1_000_000).axes[0]
    assert axes.get_xlabel() == "env steps"
    for line, text in zip(axes.lines, texts, strict=True):
        steps, values = line.get_data()
        assert steps[0] == 0
        assert steps[-1] == 1_000_000
        np.testing.assert_array_equal(values, [schedule(text, 1_000_000)(step) for step in steps.tolist()])


def test_figure_without_a_budget_is_in_percent():
    axes = figure([schedule("1 -> 0")]).axes[0]
    assert axes.get_xlabel() == "share of the budget"
    assert axes.xaxis.get_major_formatter()(20, 0) == "20%"


def test_png(tmp_path):
    from matplotlib.image import imread

    save_figure(figure([schedule("1 -> 0"), schedule("0 -> 1")]), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    picture = imread(tmp_path / "a.png")
    assert picture.shape[1] == 7 * 150
    for colour in ("#0072b2", "#d55e00"):
        rgb = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
        assert (abs(picture[..., :3] - rgb).max(axis=-1) < 0.01).sum() > 500


def test_svg_has_the_texts_and_the_numbers(tmp_path):
    texts = ["0.03 -> 0.001 cosine", "0.1 at 0, 0.01 at 500k step"]
    save_figure(figure([schedule(text) for text in texts], 1_000_000, labels=texts), tmp_path / "a.svg")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = ["".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert set(words) >= {*texts, "env steps", "value", "200k", "1M"}


def test_same_figure_same_bytes(tmp_path):
    for name in ("a", "b"):
        for ending in (".svg", ".png"):
            save_figure(figure([schedule("1 -> 0 cosine")]), tmp_path / (name + ending))
    for ending in (".svg", ".png"):
        assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()


@pytest.mark.parametrize(
    ("name", "message"), [("a.jpg", "must end in .png or .svg"), ("none/a.png", "there is no folder")]
)
def test_a_path_that_cannot_be_written(tmp_path, name, message):
    with pytest.raises(InputError, match=message):
        save_figure(figure([schedule("1 -> 0")]), tmp_path / name)


def test_matplotlib_is_imported_only_for_a_figure():
    program = "import sys, lehr.cli; lehr.cli.main(['schedule', '1 -> 0']); assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_pyplot_is_never_imported(tmp_path):
    program = (
        "import sys; from lehr import schedule; from lehr.report import plots; "
        f"plots.save_figure(plots.figure([schedule('1 -> 0')]), {str(tmp_path / 'a.png')!r}); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
