"""Render environments: a frame from a state or from an image that is observed, and a GIF from frames."""

import colorsys
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image, ImageDraw

from lehr.envs.base import Environment
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
from lehr.envs.suites.gymnax import Gymnax
from lehr.envs.wrappers import Wrapper
from lehr.errors import InputError
from lehr.files import replaced
from lehr.spaces import Box, Dict, Space
from lehr.types import PyTree

Point = tuple[float, float]
Colour = str | tuple[int, int, int]

_FINER = 4
"""Supersampling factor: frames are drawn this many times larger and scaled down, to smooth edges."""
_WIDEST_GIF = 400
_FASTEST_GIF = 50
"""Frames per second; viewers show frames shorter than 20 ms for 100 ms."""
_PALETTE_COLOURS = 128
_PALETTE_FRAMES = 8
"""The number of frames, evenly spaced, from which the palette of a GIF is computed."""

_SMALLEST_IMAGE = 180
"""Pixels of the longer side of an observation, which is enlarged by a whole number up to this."""
_LEAST_PIXELS = 5
"""An array with fewer rows or columns is not taken for an image."""
_FRAME = 6
"""Pixels around an observation."""

_INK, _GREY, _PALE = "#333333", "#aaaaaa", "#dddddd"
_BLUE, _ORANGE, _GREEN = "#0072b2", "#e69f00", "#009e73"


def frame(env: Environment, state: PyTree) -> np.ndarray:
    """Render a state, uint8 `[H, W, 3]`.

    Uses the method `render(state)` of the environment or of a wrapper if there is one; built-in tasks are drawn here.

    Args:
        env: an environment in any number of wrappers.
        state: a state of `env`, including the wrappers' parts, as NumPy or JAX arrays without a batch axis.
    """
    env, state = unwrapped(env, state)
    if not hasattr(env, "render"):
        return _draw(env, jax.tree.map(np.asarray, state)).pixels()
    pixels = np.asarray(env.render(state))
    if not _is_frame(pixels):
        raise InputError(
            f"{type(env).__name__}.render returned {pixels.dtype} {list(pixels.shape)}; "
            "it must return uint8 [height, width, 3]."
        )
    return pixels


def unwrapped(env: Environment, state: PyTree) -> tuple[Environment, PyTree]:
    """The layer of an environment that shows itself, or the innermost one, and its part of a state."""
    while isinstance(env, Wrapper) and not hasattr(env, "render"):
        state = state.env_state if _has_own_state(env) else state
        env = env.env
    return env, state


def can_draw(env: Environment) -> bool:
    """Whether `frame` draws an environment, in any number of wrappers."""
    while isinstance(env, Wrapper) and not hasattr(env, "render"):
        env = env.env
    known = _draw.dispatch(type(env)) is not _draw.dispatch(object)
    return hasattr(env, "render") or (env.can_show if isinstance(env, Gymnax) else known)


def observed_image(space: Space) -> tuple[str, ...] | None:
    """The place of the image in observations of a space: the names that lead to it, or `None` if there is none.

    An image is a box of `[H, W, C]`, or of `[H, W]` with bounds; of several, the one with the most numbers counts.

    >>> observed_image(Box(0, 1, (10, 10, 4))), observed_image(Box(-1, 1, (3,)))
    ((), None)
    """
    if isinstance(space, Dict):
        inner = {name: observed_image(part) for name, part in space.spaces.items()}
        found = [(name, *rest) for name, rest in inner.items() if rest is not None]
        return max(found, key=lambda path: math.prod(_part(space, path).shape), default=None)
    if not isinstance(space, Box) or len(space.shape) not in (2, 3) or min(space.shape[:2]) < _LEAST_PIXELS:
        return None
    is_bounded = bool(np.all(np.isfinite(space.low)) and np.all(np.isfinite(space.high)))
    return () if is_bounded or len(space.shape) == 3 else None


def observed_frames(space: Space, observations: Sequence[PyTree]) -> list[np.ndarray]:
    """Draw the images in observations, enlarged, each uint8 `[H', W', 3]`.

    Args:
        space: of the observations, with an image.
        observations: of one agent, without a batch axis.
    """
    path = observed_image(space)
    assert path is not None
    box = _part(space, path)
    images = np.stack([np.asarray(functools.reduce(lambda tree, name: tree[name], path, obs)) for obs in observations])
    low, high = (
        np.where(np.isfinite(bound), bound, end(images)) for bound, end in ((box.low, np.min), (box.high, np.max))
    )
    shares = (images - low) / np.where(high > low, high - low, 1)
    return [_enlarged(_coloured(image if image.ndim == 3 else image[..., None])) for image in shares]


def _part(space: Space, path: tuple[str, ...]) -> Any:
    return functools.reduce(lambda part, name: part.spaces[name], path, space)


def save_gif(frames: Sequence[np.ndarray], path: str | Path, fps: float = 30) -> None:
    """Save frames as a GIF that loops forever.

    All frames share one palette. Frames wider than 400 pixels are scaled down, and consecutive equal frames are stored
    as one longer frame.

    Args:
        frames: each uint8 `[H, W, 3]`, all of the same size.
        path: the file to write; its name must end in `.gif`.
        fps: frames per second, at most 50, because GIF durations are in hundredths of a second.
    """
    path = Path(path)
    if path.suffix != ".gif":
        raise InputError(f"The GIF cannot be saved to '{path}'; the file name must end in .gif.")
    if not path.parent.is_dir():
        raise InputError(
            f"The GIF cannot be saved to '{path}', because there is no folder '{path.parent}'; create it first."
        )
    if not 0 < fps <= _FASTEST_GIF:
        raise InputError(f"fps is {fps:g}; it must be above 0 and at most {_FASTEST_GIF} for a GIF.")
    if not frames:
        raise InputError("There are no frames to save; give at least one.")
    for number, pixels in enumerate(frames):
        if not _is_frame(pixels) or pixels.shape != frames[0].shape:
            raise InputError(
                f"Frame {number} is {pixels.dtype} {list(pixels.shape)}; all frames must be uint8 [height, width, 3] "
                "of the same size."
            )
    sample = frames[:: math.ceil(len(frames) / _PALETTE_FRAMES)]
    # An octree palette has few near-whites, which Pillow's nearest-colour search would confuse with white.
    palette = Image.fromarray(np.concatenate(sample)).quantize(_PALETTE_COLOURS, Image.Quantize.FASTOCTREE)
    images = []
    for pixels in frames:
        image = Image.fromarray(pixels)
        image.thumbnail((_WIDEST_GIF, image.height))
        images.append(image.quantize(palette=palette, dither=Image.Dither.NONE))
    ends = np.rint(100 / fps * np.arange(len(frames) + 1)).astype(int)  # hundredths of a second, rounded without drift
    durations = (10 * np.diff(ends)).tolist()
    options = {"save_all": True, "append_images": images[1:], "duration": durations, "loop": 0, "optimize": True}
    with replaced(path) as file:
        images[0].save(file, "GIF", **options)


def side_by_side(happened: np.ndarray, imagined: np.ndarray, seen: int) -> list[np.ndarray]:
    """Return pictures of two framed images each, uint8 `[H', W', 3]`: what happened, and what was imagined.

    The second frame is grey as long as the model sees what happens, and orange from then on.

    Args:
        happened: images `[T, H, W, C]` with numbers from 0 to 1. One channel is grey, three are red, green and blue; of
            any other number, each is drawn in a colour of its own.
        imagined: images of the same shape.
        seen: number of images that the model sees.
    """
    frames = []
    for number, images in enumerate(zip(happened, imagined, strict=True)):
        left, right = (_enlarged(_coloured(image)) for image in images)
        right_frame = _GREY if number < seen else _ORANGE
        frames.append(np.concatenate([_framed(left, _GREY), _framed(right, right_frame)], axis=1))
    return frames


def _coloured(image: np.ndarray) -> np.ndarray:
    """Return an image `[H, W, C]` in red, green and blue."""
    image, channels = np.clip(image, 0, 1), image.shape[-1]
    if channels in (1, 3):
        return np.broadcast_to(image, (*image.shape[:2], 3))
    hues = np.array([colorsys.hls_to_rgb(channel / channels, 0.5, 1.0) for channel in range(channels)])
    return np.max(image[..., None] * hues, axis=-2)


def _enlarged(image: np.ndarray) -> np.ndarray:
    """Return an image as bytes, each of its pixels repeated until it is large enough to be looked at."""
    times = max(1, _SMALLEST_IMAGE // max(image.shape[:2]))
    return np.rint(255 * image).astype(np.uint8).repeat(times, 0).repeat(times, 1)


def _framed(image: np.ndarray, colour: str) -> np.ndarray:
    height, width, _ = image.shape
    canvas = Image.new("RGB", (width + 2 * _FRAME, height + 2 * _FRAME), colour)
    canvas.paste(Image.fromarray(image), (_FRAME, _FRAME))
    return np.asarray(canvas)


def _is_frame(pixels: np.ndarray) -> bool:
    return pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3


@functools.cache
def _has_own_state(wrapper: Wrapper) -> bool:
    """Whether a wrapper's state holds the wrapped environment's as `env_state`, instead of being the same."""
    outer, inner = (jax.eval_shape(env.reset, jax.random.key(0))[0] for env in (wrapper, wrapper.env))
    structures: list[Any] = [jax.tree.structure(outer), jax.tree.structure(inner)]
    return structures[0] != structures[1]


class _Figure:
    """A Matplotlib figure, drawn by others."""

    def __init__(self, figure: Any) -> None:
        self._figure = figure

    def pixels(self) -> np.ndarray:
        """Return the image, uint8 `[H, W, 3]`, and close the figure."""
        from matplotlib import pyplot
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(self._figure)
        canvas.draw()
        image = np.array(canvas.buffer_rgba())[..., :3]
        pyplot.close(self._figure)
        return image


class _Canvas:
    """A white image in the units of the task, with x to the right and y upwards."""

    def __init__(self, x: Point, y: Point, width: int) -> None:
        """Show `x` from left to right and `y` from bottom to top, `width` pixels wide."""
        self._left, self._top = x[0], y[1]
        self._scale = _FINER * width / (x[1] - x[0])
        size = _FINER * width, _FINER * round(width * (y[1] - y[0]) / (x[1] - x[0]))
        self._image = Image.new("RGB", size, "white")
        self._draw = ImageDraw.Draw(self._image)

    def _place(self, point: Point) -> Point:
        return (point[0] - self._left) * self._scale, (self._top - point[1]) * self._scale

    def polygon(self, points: Sequence[Point], colour: Colour) -> None:
        """Fill a polygon."""
        self._draw.polygon([self._place(point) for point in points], fill=colour)

    def disc(self, centre: Point, radius: float, colour: Colour) -> None:
        """Fill a disc."""
        self._draw.circle(self._place(centre), radius * self._scale, fill=colour)

    def ring(self, centre: Point, radius: float, width: float, colour: Colour) -> None:
        """Draw a circle whose outer radius is `radius`."""
        pixels = max(1, round(width * self._scale))
        self._draw.circle(self._place(centre), radius * self._scale, outline=colour, width=pixels)

    def line(self, points: Sequence[Point], width: float, colour: Colour) -> None:
        """Draw a line with round joints and ends."""
        pixels = max(1, round(width * self._scale))
        self._draw.line([self._place(point) for point in points], fill=colour, width=pixels)
        for point in points:
            self.disc(point, width / 2, colour)

    def pixels(self) -> np.ndarray:
        """Return the image, uint8 `[H, W, 3]`."""
        return np.asarray(self._image.reduce(_FINER))


@functools.singledispatch
def _draw(env: Any, state: PyTree) -> "_Canvas | _Figure":
    """Draw a built-in environment; dispatches on its type."""
    raise InputError(
        f"{type(env).__name__} cannot be rendered, because it is not a built-in task; add a method render(state) that "
        "returns uint8 [height, width, 3]."
    )


@_draw.register
def _(env: CartPole, state: CartPoleState) -> _Canvas:
    limit, length = env.position_limit, 2 * env.half_length
    canvas = _Canvas((-1.15 * limit, 1.15 * limit), (-0.4, 0.25 + 1.1 * length), 400)
    canvas.line([(-limit, -0.2), (limit, -0.2)], 0.02, _GREY)
    for end in (-limit, limit):
        canvas.line([(end, -0.28), (end, -0.12)], 0.02, _GREY)
    x, _, angle, _ = map(float, state)
    tip = x + length * math.sin(angle), length * math.cos(angle)
    canvas.polygon([(x - 0.3, -0.2), (x + 0.3, -0.2), (x + 0.3, 0.05), (x - 0.3, 0.05)], _INK)
    canvas.line([(x, 0), tip], 0.1, _ORANGE)
    canvas.disc((x, 0), 0.04, _INK)
    return canvas


@_draw.register
def _(env: Pendulum, state: PendulumState) -> _Canvas:
    reach = 1.25 * env.length
    canvas = _Canvas((-reach, reach), (-reach, reach), 240)
    canvas.ring((0, 0), 1.1 * env.length, 0.01 * env.length, _PALE)
    angle = float(state.angle)
    tip = -env.length * math.sin(angle), env.length * math.cos(angle)
    canvas.line([(0, 0), tip], 0.2 * env.length, _ORANGE)
    canvas.disc((0, 0), 0.05 * env.length, _INK)
    return canvas


@_draw.register
def _(env: Acrobot, state: AcrobotState) -> _Canvas:
    canvas = _Canvas((-2.2, 2.2), (-2.2, 2.2), 280)
    canvas.line([(-2.2, 1), (2.2, 1)], 0.03, _GREEN)
    first, second, _, _ = map(float, state)
    elbow = math.sin(first), -math.cos(first)
    tip = elbow[0] + math.sin(first + second), elbow[1] - math.cos(first + second)
    canvas.line([(0, 0), elbow], 0.18, _BLUE)
    canvas.line([elbow, tip], 0.18, _ORANGE)
    canvas.disc((0, 0), 0.05, _INK)
    canvas.disc(elbow, 0.05, _INK)
    return canvas


@_draw.register
def _(env: MountainCar | MountainCarContinuous, state: MountainCarState) -> _Canvas:
    def road(x: float) -> Point:
        return x, 0.45 * math.sin(3 * x)

    canvas = _Canvas((-1.2, 0.6), (-0.6, 0.65), 360)
    hill = [road(x) for x in np.linspace(-1.2, 0.6, 100)]
    canvas.polygon([(-1.2, -0.6), *hill, (0.6, -0.6)], _PALE)
    canvas.line(hill, 0.008, _GREY)
    foot = road(env.goal_position)
    pole = foot[0], foot[1] + 0.16
    canvas.line([foot, pole], 0.008, _INK)
    canvas.polygon([pole, (pole[0] + 0.08, pole[1] - 0.03), (pole[0], pole[1] - 0.06)], _GREEN)
    x, y = road(float(state.position))
    slope = math.atan(1.35 * math.cos(3 * x))

    def on_car(along: float, above: float) -> Point:
        return (
            x + along * math.cos(slope) - above * math.sin(slope),
            y + along * math.sin(slope) + above * math.cos(slope),
        )

    body = [(-0.07, 0.025), (0.07, 0.025), (0.07, 0.06), (0.035, 0.06), (0.02, 0.09), (-0.04, 0.09), (-0.07, 0.06)]
    canvas.polygon([on_car(*corner) for corner in body], _ORANGE)
    for wheel in (-0.04, 0.04):
        canvas.disc(on_car(wheel, 0.022), 0.022, _INK)
    return canvas


@_draw.register
def _(env: Swarm, state: SwarmState) -> _Canvas:
    reach = env.half_size + 2 * env.radius
    canvas = _Canvas((-reach, reach), (-reach, reach), 320)
    corner = env.half_size + env.radius
    wall = [(-corner, -corner), (corner, -corner), (corner, corner), (-corner, corner), (-corner, -corner)]
    thin = 0.006 * env.half_size
    canvas.line(wall, thin, _GREY)
    hues = [colorsys.hls_to_rgb(agent / env.num_agents, 0.45, 0.75) for agent in range(env.num_agents)]
    colours = [(round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in hues]
    for position, target in zip(state.position, state.target, strict=True):
        canvas.line([position, target], thin, _PALE)
    for target, colour in zip(state.target, colours, strict=True):
        canvas.ring(target, env.target_radius, 2 * thin, colour)
    for position, colour in zip(state.position, colours, strict=True):
        canvas.disc(position, env.radius, colour)
    return canvas


@_draw.register
def _(env: Gymnax, state: PyTree) -> _Canvas | _Figure:
    twin = env.twin(state)
    return _Figure(env.figure(state)) if twin is None else _draw(*twin)
