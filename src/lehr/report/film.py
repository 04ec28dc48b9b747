"""Films of an episode: which files show an environment, and how they are written."""

import math
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from lehr.envs import AnyEnvironment, Environment, HostEnvironment, Wrapper
from lehr.envs.host.base import ask
from lehr.envs.suites.mujoco_scene import Scene
from lehr.errors import InputError
from lehr.files import replaced, write_text
from lehr.plugins import require
from lehr.report import render
from lehr.types import PyTree

PICTURES = (".gif", ".mp4")
SUFFIXES = (*PICTURES, ".html")
FPS = 30
"""Frames per second of what has no time of its own, and the most of what has."""


def can_show(env: AnyEnvironment) -> bool:
    """Whether an environment can be shown, as far as is known without running it."""
    if isinstance(env, HostEnvironment):
        return env.renders
    layer = _innermost(env)
    if hasattr(layer, "scene"):
        return layer.scene is not None
    return render.can_draw(env) or render.observed_image(env.observation_space) is not None


def formats(env: AnyEnvironment) -> tuple[str, ...]:
    """Suffixes of the files that show an environment, the best first; none if it cannot be shown."""
    if not can_show(env):
        return ()
    layer = env if isinstance(env, HostEnvironment) else _innermost(env)
    return layer.scene.formats if hasattr(layer, "scene") else PICTURES


def check_file(path: Path) -> None:
    """Refuse a file that no film can be written to."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"The episode cannot be saved to '{path}'; the file name must end in .gif, .mp4 or .html.")
    if not path.parent.is_dir():
        raise InputError(
            f"The episode cannot be saved to '{path}', because there is no folder '{path.parent}'; create it first."
        )
    if path.suffix == ".mp4":
        require("imageio_ffmpeg", extra="video", what="An MP4 file")


def check_environment(env: AnyEnvironment, name: str, suffix: str | None = None) -> None:
    """Refuse an environment that cannot be shown, or not in such a file.

    A host environment is started and rendered once, since many only say that they can.

    Args:
        env: the environment.
        name: its name, for the error message.
        suffix: of the file, if it is chosen.
    """
    if isinstance(env, HostEnvironment):
        _check_host(env, name)
    known = PICTURES if isinstance(env, HostEnvironment) else formats(env)
    if not known:
        raise InputError(
            f"{name} cannot be shown, because it has no renderer and observes no image; give its class a method "
            "render(state) that returns uint8 [height, width, 3]."
        )
    if suffix is None or suffix in known:
        return
    if suffix == ".html":
        raise InputError(
            f"{name} cannot be shown as a page, which is for Brax and Playground; give a .gif or .mp4 file."
        )
    raise InputError(
        f"{name} cannot be drawn here, because MuJoCo finds no OpenGL for pictures; install libegl1 or libosmesa6, or "
        "give a file that ends in .html."
    )


def save(env: Environment, states: Sequence[PyTree], observations: Sequence[PyTree], path: Path) -> None:
    """Save an episode of a compiled environment as a film.

    Args:
        env: the environment.
        states: `T + 1` of its states.
        observations: `T + 1` of the first agent's observations.
        path: the file to write; its suffix is one of `formats(env)`.
    """
    layer = _innermost(env)
    if not hasattr(layer, "scene"):
        if render.can_draw(env):
            save_frames([render.frame(env, state) for state in states], path)
        else:
            save_frames(render.observed_frames(env.observation_space, observations), path, fps=10)
        return
    seconds = layer.scene.seconds * env.env_steps_per_step
    every = math.ceil(1 / (FPS * seconds)) if path.suffix in PICTURES else 1
    drawn: Any = layer  # an environment of a suite that has a scene
    poses = [drawn.pose(render.unwrapped(env, state)[1]) for state in states[::every]]
    if path.suffix in PICTURES:
        save_frames(list(layer.scene.frames(poses)), path, fps=1 / (seconds * every))
    else:
        write_text(path, Scene(layer.scene.model, seconds).page(poses))


def save_frames(frames: Sequence[np.ndarray], path: Path, fps: float = FPS) -> None:
    """Save frames, uint8 `[H, W, 3]` each, as a GIF or an MP4, whichever the file's name says."""
    if path.suffix == ".gif":
        render.save_gif(frames, path, fps)
        return
    height, width, _ = frames[0].shape
    program = require("imageio_ffmpeg", extra="video", what="An MP4 file").get_ffmpeg_exe()
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:g}", "-i", "-"]
    even = "pad=ceil(iw/2)*2:ceil(ih/2)*2"  # which the codec needs
    coded = ["-vf", even, "-c:v", "libx264", "-pix_fmt", "yuv420p", "-movflags", "+faststart"]
    # The codec goes back in its file at the end, so it writes one of its own, which then takes the place of `path`.
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "film.mp4")
        command = [program, "-loglevel", "error", *raw, *coded, str(made)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as running:
            pipe = cast(IO[bytes], running.stdin)
            try:
                for pixels in frames:
                    pipe.write(np.ascontiguousarray(pixels).tobytes())
            except BrokenPipeError:
                pass  # its message is the error below
            _, error = running.communicate()
        if running.returncode:
            reason = error.decode().strip() or "no reason given"
            raise InputError(f"The MP4 file '{path}' could not be written ({reason}).")
        with replaced(path) as file:
            file.write(made.read_bytes())


def _innermost(env: Environment) -> Environment:
    """The environment inside of all wrappers, or the outermost that renders itself."""
    while isinstance(env, Wrapper) and not hasattr(env, "render"):
        env = env.env
    return env


def _check_host(env: HostEnvironment, name: str) -> None:
    """Start an environment on the host and render it once."""
    try:
        batch = ask(env.name, "its constructor", partial(env.start, 1, render=True))
        try:
            ask(env.name, "reset", partial(batch.reset, np.zeros(1, np.uint32)))
            frame = np.asarray(batch.render())
        finally:
            batch.close()
    except Exception as error:
        if isinstance(error.__cause__, InputError):  # what Lehr itself says about it
            raise error.__cause__ from None
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{name} cannot be shown: its render failed ({reason[0]}).") from error
    if frame.dtype != np.uint8 or frame.ndim != 3:
        raise InputError(
            f"{name} cannot be shown: its render returned {frame.dtype} {list(frame.shape)}; it must return uint8 "
            "[height, width, 3]."
        )
