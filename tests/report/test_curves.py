"""The figure shows what the metrics say: the returns, and the coefficients that varied."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from PIL import Image

from lehr import InputError
from lehr.report.curves import band_figure, learning_curve, learning_figure


def metrics(rows=50, **columns):
    """The metrics of a run whose return grows from 1, and other columns, of which a number is a constant."""
    made = {"env_steps": 100 * np.arange(1, rows + 1), "episode/return": np.arange(1.0, rows + 1)}
    return made | {
        name.replace("__", "/"): np.broadcast_to(np.asarray(values, float), rows) for name, values in columns.items()
    }


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def lines(axes):
    return [np.column_stack(line.get_data()).tolist() for line in axes.lines if len(line.get_xdata())]


# The files ---------------------------------------------------------------------------------------------------------


def test_png_is_a_picture(tmp_path):
    learning_curve({"run": metrics(coef__entropy_coef=np.linspace(0.03, 0.001, 50))}, tmp_path / "curve.png")
    with Image.open(tmp_path / "curve.png") as picture:
        assert picture.format == "PNG"
        assert picture.width == 7 * 150


def test_svg_holds_the_words(tmp_path):
    learning_curve(
        {"first run": metrics(coef__entropy_coef=np.linspace(0.03, 0.001, 50))},
        tmp_path / "curve.svg",
        texts={"entropy_coef": "0.03 -> 0.001"},
    )
    text = " ".join(ElementTree.parse(tmp_path / "curve.svg").getroot().itertext())
    for words in ("first run", "episode return", "entropy_coef:  0.03 -> 0.001", "env steps", "5k"):
        assert words in text


# The coefficients --------------------------------------------------------------------------------------------------


def test_constants_are_left_out_also_in_long_runs():
    figure = learning_figure({"run": metrics(5000, coef__clip_range=0.2, coef__discount=0.99)})
    assert titles(figure) == ["episode return"]


def test_main_coefficients_come_first_and_four_at_most():
    varied = {f"coef__{name}": np.arange(50) for name in ("discount", "clip_range", "learning_rate", "a", "value_coef")}
    figure = learning_figure({"run": metrics(coef__gae_lambda=0.95, coef__entropy_coef=np.arange(50), **varied)})
    assert titles(figure) == ["episode return", "entropy_coef", "learning_rate", "clip_range", "a"]


def test_constants_that_differ_between_runs_are_drawn():
    figure = learning_figure({name: metrics(coef__entropy_coef=float(name)) for name in ("0.01", "0.03")})
    assert titles(figure) == ["episode return", "entropy_coef"]
    assert [line[0] for line in lines(figure.axes[1])] == [[100, 0.01], [100, 0.03]]


def test_what_changes_over_time_comes_before_constants_that_differ_between_runs():
    names = ("clip_range", "entropy_coef", "learning_rate", "value_coef")
    runs = {
        str(number): metrics(coef__own=np.arange(50), **{f"coef__{name}": 0.1 * number for name in names})
        for number in (1, 2)
    }
    assert titles(learning_figure(runs)) == ["episode return", "own", "entropy_coef", "learning_rate", "clip_range"]


def test_a_coefficient_that_one_run_lacks():
    runs = {"with": metrics(coef__entropy_coef=np.arange(50)), "without": metrics()}
    assert len(lines(learning_figure(runs).axes[1])) == 1


def test_what_is_asked_for_is_drawn():
    columns = metrics(coef__clip_range=0.2, coef__discount=np.nan, coef__entropy_coef=np.arange(50))
    figure = learning_figure({"run": columns}, ["discount", "clip_range"])
    assert titles(figure) == ["episode return", "discount", "clip_range"]


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        (np.geomspace(0.1, 1e-5, 50), "log"),
        (np.geomspace(0.03, 0.001, 50), "linear"),
        (np.linspace(0.1, 1e-5, 50), "linear"),
        (0.1 * np.exp(-np.arange(50.0)) * (np.arange(50) < 40), "linear"),  # ends in 0
    ],
)
def test_logarithmic_only_where_most_values_are_far_below_the_greatest(values, scale):
    assert learning_figure({"run": metrics(coef__entropy_coef=values)}).axes[1].get_yscale() == scale


# The returns -------------------------------------------------------------------------------------------------------


def test_lines_pass_over_updates_without_a_finished_episode():
    columns = metrics(4) | {"episode/return": np.array([np.nan, 10, np.nan, 30])}
    raw, smoothed = lines(learning_figure({"run": columns}).axes[0])
    assert raw == [[200, 10], [400, 30]]
    np.testing.assert_allclose(smoothed, raw)  # too far apart to be averaged


def test_smoothing_keeps_a_line_and_calms_noise():
    noise = np.random.default_rng(0).normal(size=1000)
    line, noisy = (
        np.array(lines(learning_figure({"run": metrics(1000) | {"episode/return": returns}}).axes[0])[1])[:, 1]
        for returns in (np.arange(1000.0), noise)
    )
    np.testing.assert_allclose(line[50:-50], np.arange(1000.0)[50:-50], rtol=1e-6)  # five widths from the ends
    # A normal kernel of width σ rows divides the standard deviation by sqrt(2 sqrt(π) σ), here σ = 10.
    assert np.std(noisy) == pytest.approx(1 / np.sqrt(2 * np.sqrt(np.pi) * 10), rel=0.25)


def test_a_long_run_is_drawn_by_its_averages():
    raw = lines(learning_figure({"run": metrics(5000)}).axes[0])[0]
    assert len(raw) == 1000
    assert raw[0] == [300, 3]  # of the first five


def test_evaluations_are_points_with_a_band():
    columns = metrics(3) | {
        "evaluate/return": np.array([5, np.nan, 9]),
        "evaluate/return_std": np.array([1, np.nan, 2]),
    }
    figure = learning_figure({"run": columns})
    assert lines(figure.axes[0])[2] == [[100, 5], [300, 9]]
    assert figure.axes[0].collections[0].get_datalim(figure.axes[0].transData).extents.tolist() == [100, 4, 300, 11]
    assert legend(figure) == ["run", "evaluation ± 1 standard deviation"]


def test_the_spread_of_a_single_evaluation_is_a_line():
    once = {"evaluate/return": np.array([np.nan, np.nan, 9]), "evaluate/return_std": np.array([np.nan, np.nan, 2])}
    _, line = learning_figure({"run": metrics(3) | once}).axes[0].collections
    assert line.get_segments()[0].tolist() == [[300, 7], [300, 11]]


def test_evaluations_without_a_spread():
    figure = learning_figure({"run": metrics(3) | {"evaluate/return": np.array([5, np.nan, 9])}})
    assert len(figure.axes[0].collections) == 0
    assert legend(figure) == ["run", "evaluation"]


def test_runs_differ_by_colour_and_share_the_axis():
    figure = learning_figure({"short": metrics(10), "long": metrics(30)})
    assert legend(figure) == ["short", "long"]
    assert len({line.get_color() for line in figure.axes[0].lines}) == 2
    assert figure.axes[0].get_xlim() == (0, 3000)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_run_that_has_hardly_begun(tmp_path, rows):
    learning_curve({"run": metrics(rows, evaluate__return=1, coef__entropy_coef=0.1)}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_no_finished_episode_is_said(tmp_path):
    columns = metrics(2) | {"episode/return": np.full(2, np.nan)}
    learning_curve({"run": columns}, tmp_path / "curve.svg")
    assert "no episode has ended" in (tmp_path / "curve.svg").read_text()


def test_without_a_finished_episode_the_reward_per_step_is_shown():
    unfinished = {"episode/return": np.full(3, np.nan), "rollout/reward": np.array([-3.0, -2.0, -1.0])}
    axes = learning_figure({"run": metrics(3) | unfinished}).axes[0]
    assert axes.get_title(loc="left") == "mean reward per step (no episode has ended)"
    assert axes.lines[0].get_ydata().tolist() == [-3.0, -2.0, -1.0]
    finished = metrics(3) | unfinished | {"episode/return": np.array([np.nan, 5.0, 7.0])}
    axes = learning_figure({"run": finished}).axes[0]
    assert axes.get_title(loc="left") == "episode return"
    assert axes.lines[0].get_ydata().tolist() == [5.0, 7.0]


def test_the_band_of_several_seeds_is_around_their_mean():
    """The third seed never ends an episode, and is left out."""
    steps = np.array([100.0, 200.0, 300.0])
    returns = np.stack([[1.0, 2.0, 3.0], [3.0, 4.0, 7.0], [np.nan] * 3], axis=-1)

    def interval(values):
        mean = values.mean(axis=-1)
        return mean, mean - 1.0, mean + 2.0

    axes = band_figure(steps, returns, interval, "the band").axes[0]
    *seeds, mean = (line.get_ydata() for line in axes.lines)
    np.testing.assert_allclose(seeds, returns.T[:2])  # the smoothing is narrower than a step
    np.testing.assert_allclose(mean, [2.0, 3.0, 5.0])
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    assert {(100.0, 1.0), (100.0, 4.0), (300.0, 4.0), (300.0, 7.0)} <= {tuple(corner) for corner in corners}
    assert legend(axes.figure) == ["mean of 2 seeds", "the band"]


def test_seeds_that_never_end_an_episode_have_no_band():
    axes = band_figure(np.array([1.0, 2.0]), np.full((2, 3), np.nan), lambda values: (), "the band").axes[0]
    assert [text.get_text() for text in axes.texts] == ["no episode has ended"]


# Errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "coefficients", "name", "message"),
    [
        ({}, None, "curve.png", "There is no run to plot; give at least one"),
        ({"new": {}}, None, "curve.png", "The run 'new' has no metrics yet; plot it after its first update"),
        ({"run": metrics(coef__entropy_coef=1)}, ["entropy"], "curve.png", "did you mean 'entropy_coef'"),
        ({"run": metrics()}, None, "curve.pdf", "must end in .png or .svg"),
    ],
)
def test_errors(tmp_path, runs, coefficients, name, message):
    with pytest.raises(InputError, match=message):
        learning_curve(runs, tmp_path / name, coefficients)
