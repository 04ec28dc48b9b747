"""Frames show where things are, through any wrappers, and a GIF plays them at the right pace."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
import pytest
from PIL import Image

from lehr import InputError
from lehr.envs import Batch, ClipAction, EpisodeStatistics, FrameStack, TimeLimit, make
from lehr.envs.builtin.classic import (
    Acrobot,
    AcrobotState,
    CartPole,
    CartPoleState,
    MountainCar,
    MountainCarContinuous,
    MountainCarState,
    Pendulum,
    PendulumState,
)
from lehr.envs.builtin.swarm import Swarm, SwarmState
from lehr.report.render import frame, save_gif, side_by_side

KEY = jax.random.key(0)
ORANGE = (230, 159, 0)


def centre(pixels, colour=ORANGE):
    """The mean place of a colour, as shares of width and height from the lower left corner."""
    rows, columns = np.nonzero(np.all(pixels == np.array(colour, np.uint8), axis=2))
    height, width, _ = pixels.shape
    return (np.mean(columns) + 0.5) / width, 1 - (np.mean(rows) + 0.5) / height


def moved(number):
    """A film of a black square that moves to the right over white."""
    frames = np.full((number, 20, 60, 3), 255, np.uint8)
    for place, pixels in enumerate(frames):
        pixels[5:15, place : place + 10] = 0
    return list(frames)


def played(path):
    """The frames of a GIF and their durations in milliseconds."""
    frames, durations = [], []
    with Image.open(path) as film:
        for number in range(film.n_frames):
            film.seek(number)
            frames.append(np.asarray(film.convert("RGB")))
            durations.append(film.info["duration"])
    return frames, durations


# Frames ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "CartPole-v1",
        "CartPole-Hidden-v1",
        "Pendulum-v1",
        "Acrobot-v1",
        "MountainCar-v0",
        "MountainCarContinuous-v0",
        "Swarm-v0",
    ],
)
def test_built_in_environments_are_drawn_by_name(name):
    env = make(name)
    state, _ = env.reset(KEY)
    pixels = frame(env, state)
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3
    assert 200 <= pixels.shape[1] <= 400
    assert np.mean(np.any(pixels != 255, axis=2)) > 0.01
    np.testing.assert_array_equal(pixels, frame(env, jax.tree.map(np.asarray, state)))


def test_cart_pole_leans_to_the_right_with_a_positive_angle():
    upright, leaning, left = (
        centre(frame(CartPole(), CartPoleState(position, 0.0, angle, 0.0)))
        for position, angle in ((0.0, 0.0), (0.0, 0.2), (-1.2, 0.0))
    )
    assert upright[0] == pytest.approx(0.5, abs=0.003)
    # The middle of a pole of 1 m moves by sin(0.2) / 2 of the 5.52 m that are shown, and the cart by 1.2 of them.
    assert leaning[0] - upright[0] == pytest.approx(np.sin(0.2) / 2 / 5.52, abs=0.003)
    assert left[0] - upright[0] == pytest.approx(-1.2 / 5.52, abs=0.003)


def test_pendulum_turns_counter_clockwise_from_upright():
    up, left, down = (centre(frame(Pendulum(), PendulumState(angle, 0.0))) for angle in (0.0, np.pi / 2, np.pi))
    assert up[1] > 0.6 > left[1] > 0.4 > down[1]
    assert left[0] < 0.4 < up[0] < 0.6


def test_acrobot_second_link_starts_where_the_first_ends():
    # The first link points right, the second up from its end: the middle of the latter is (1, 0.5) of ±2.2.
    x, y = centre(frame(Acrobot(), AcrobotState(np.pi / 2, np.pi / 2, 0.0, 0.0)))
    assert x == pytest.approx(0.5 + 1 / 4.4, abs=0.01)
    assert y == pytest.approx(0.5 + 0.5 / 4.4, abs=0.01)


@pytest.mark.parametrize("env", [MountainCar(), MountainCarContinuous()])
def test_mountain_car_is_lowest_in_the_valley(env):
    valley, slope, goal = (
        centre(frame(env, MountainCarState(position, 0.0))) for position in (-np.pi / 6, 0.0, env.goal_position)
    )
    assert valley[0] == pytest.approx((1.2 - np.pi / 6) / 1.8, abs=0.01)
    assert valley[1] < slope[1] < goal[1]


def test_swarm_shows_agents_where_they_are():
    # The colours of two agents are red and cyan; two units and four radii are shown.
    state = SwarmState(np.array([[0.5, -0.5], [-0.5, 0.5]]), np.zeros((2, 2)), np.array([[0.5, -0.5], [0.0, 0.9]]))
    pixels = frame(Swarm(num_agents=2), state)
    red = centre(pixels, (201, 29, 29))
    assert red == pytest.approx((0.5 + 0.5 / 2.2, 0.5 - 0.5 / 2.2), abs=0.01)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: TimeLimit(env, 5),
        lambda env: ClipAction(TimeLimit(env, 5)),
        lambda env: TimeLimit(ClipAction(env), 5),
        lambda env: EpisodeStatistics(FrameStack(ClipAction(TimeLimit(env, 5)), 2)),
    ],
)
def test_wrappers_show_what_is_inside(wrap):
    inside, _ = Pendulum().reset(KEY)
    env = wrap(Pendulum())
    state, _ = env.reset(KEY)
    np.testing.assert_array_equal(frame(env, state), frame(Pendulum(), inside))


class OwnState(NamedTuple):
    """A state that, as a wrapper's, has a field `env_state`."""

    env_state: jax.Array


@dataclass(frozen=True)
class OwnPicture(Pendulum):
    """A task that draws itself, all in the shade that its state says."""

    def reset(self, key):
        state, obs = super().reset(key)
        return OwnState(state.angle), obs

    def render(self, state):
        return np.full((4, 6, 3), 7 if isinstance(state, OwnState) else 0, np.uint8)


@pytest.mark.parametrize("wrap", [lambda env: env, ClipAction, lambda env: ClipAction(TimeLimit(env, 5))])
def test_an_environment_of_ones_own_draws_itself(wrap):
    env = wrap(OwnPicture())
    state, _ = env.reset(KEY)
    np.testing.assert_array_equal(frame(env, state), np.full((4, 6, 3), 7))


@dataclass(frozen=True)
class WrongPicture(Pendulum):
    def render(self, state):
        return np.zeros((4, 6))


@dataclass(frozen=True)
class NoPicture:
    """A task of one's own that nobody has drawn."""


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (WrongPicture(), r"WrongPicture.render returned float64 \[4, 6\]; it must return uint8"),
        (NoPicture(), r"NoPicture cannot be rendered, because .*; add a method render\(state\)"),
        (Batch(CartPole(), 2), "Batch cannot be rendered"),
    ],
)
def test_what_cannot_be_drawn(env, message):
    with pytest.raises(InputError, match=message):
        frame(env, ())


# Films -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fps", "first"), [(30, [30, 40, 30]), (50, [20, 20, 20]), (12.5, [80, 80, 80])])
def test_gif_has_all_frames_and_lasts_as_long(tmp_path, fps, first):
    given = moved(31)
    save_gif(given, tmp_path / "film.gif", fps)
    frames, durations = played(tmp_path / "film.gif")
    assert len(frames) == 31
    assert durations[:3] == first
    assert sum(durations) == pytest.approx(1000 * 31 / fps, abs=5)
    np.testing.assert_allclose(np.array(frames, int), np.array(given, int), atol=3)


def test_gif_of_a_task_is_small_and_keeps_its_colours(tmp_path):
    angles = np.linspace(-0.2, 0.2, 50)
    given = [frame(CartPole(), CartPoleState(angle, 0.0, angle, 0.0)) for angle in angles]
    save_gif(given, tmp_path / "film.gif")
    frames, _ = played(tmp_path / "film.gif")
    assert np.mean(np.abs(np.array(frames, int) - np.array(given, int))) < 1.5
    assert (tmp_path / "film.gif").stat().st_size < 1000 * len(given)


def test_equal_frames_are_one_that_lasts_longer(tmp_path):
    first, second = moved(2)
    save_gif([first, first, first, second], tmp_path / "film.gif", fps=10)
    assert played(tmp_path / "film.gif")[1] == [300, 100]


def test_a_wide_film_is_made_smaller(tmp_path):
    save_gif([np.zeros((300, 1000, 3), np.uint8)], tmp_path / "film.gif")
    with Image.open(tmp_path / "film.gif") as film:
        assert film.size == (400, 120)


@pytest.mark.parametrize(
    ("frames", "name", "fps", "message"),
    [
        ([], "film.gif", 30, "There are no frames to save; give at least one"),
        (moved(2), "film.mp4", 30, "must end in .gif"),
        (moved(2), "none/film.gif", 30, "there is no folder"),
        (moved(2), "film.gif", 60, "fps is 60; it must be above 0 and at most 50"),
        (moved(2), "film.gif", 0, "fps is 0; it must be above 0 and at most 50"),
        (
            [moved(1)[0], np.zeros((4, 6, 3), np.uint8)],
            "film.gif",
            30,
            r"Frame 1 is uint8 \[4, 6, 3\]; all frames must",
        ),
        ([np.zeros((4, 6, 3))], "film.gif", 30, "Frame 0 is float64"),
    ],
)
def test_errors(tmp_path, frames, name, fps, message):
    with pytest.raises(InputError, match=message):
        save_gif(frames, tmp_path / name, fps)


# Two images --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "channel", "colour"),
    [(1, 0, [255, 255, 255]), (3, 1, [0, 255, 0]), (4, 0, [255, 0, 0]), (4, 2, [0, 255, 255])],
)
def test_images_of_any_number_of_channels_are_shown_in_colour(channels, channel, colour):
    happened, imagined = np.zeros((2, 1, 10, 5, channels))
    happened[0, 0, 0, channel] = imagined[0, 9, 4, channel] = 1.0
    (pixels,) = side_by_side(happened, imagined, seen=0)
    edge, side = 6, 18  # each pixel becomes 18 by 18, so that ten of them are 180
    assert pixels.shape == (2 * edge + 10 * side, 2 * (2 * edge + 5 * side), 3)
    left, right = np.split(pixels, 2, axis=1)
    np.testing.assert_array_equal(left[edge, edge], colour)
    np.testing.assert_array_equal(left[edge + side, edge], [0, 0, 0])
    np.testing.assert_array_equal(right[-edge - 1, -edge - 1], colour)
    np.testing.assert_array_equal(right[-1, -1], ORANGE)


def test_the_frame_tells_until_when_the_model_sees_what_happens():
    images = np.linspace(0, 1, 5 * 4).reshape(5, 2, 2, 1)
    frames = side_by_side(images, images[::-1], seen=2)
    assert [tuple(pixels[0, -1]) for pixels in frames] == [(170, 170, 170)] * 2 + [ORANGE] * 3
    assert [tuple(pixels[0, 0]) for pixels in frames] == [(170, 170, 170)] * 5
