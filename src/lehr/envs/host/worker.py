"""Code that runs next to a single Gymnasium environment, also in worker processes: this file does not use JAX."""

import contextlib
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import write_to_shared_memory

from lehr.envs.host.answers import WrongAnswer, beyond, checked


def make_env(
    source: str | Callable[..., gymnasium.Env],
    parameters: dict[str, Any],
    action_repeat: int,
    frame_stack: int,
    trainer: int,
) -> gymnasium.Env:
    """Create an environment by its name in Gymnasium or by a function, in a worker process or the trainer's own."""
    if os.getpid() != trainer:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; only the trainer handles it
    if isinstance(source, str):
        env = gymnasium.make(source, disable_env_checker=True, **parameters)
    else:
        env = source(**parameters)
    if action_repeat > 1:
        env = GymActionRepeat(env, action_repeat)
    if frame_stack > 1:
        env = GymFrameStack(env, frame_stack)
    return env


class Single:
    """One environment of a batch, which resets as `autoreset` says: `seeded`, `same_step` or `next_step`."""

    def __init__(self, env: gymnasium.Env, autoreset: str) -> None:
        self.env, self.autoreset, self.over = env, autoreset, False

    def reset(self, seed: int) -> tuple[Any]:
        """Start an episode and return its first observation."""
        self.over = False
        return (self.env.reset(seed=seed)[0],)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Take one step: observation, reward, terminated, truncated, and the final observation if it was reset."""
        if self.over:  # the step after the end of an episode, with next_step
            self.over = False
            return self.env.reset()[0], 0.0, False, False, None
        obs, reward, terminated, truncated, _ = self.env.step(action)
        final_obs = None
        if self.autoreset != "seeded" and (_is_set(terminated) or _is_set(truncated)):
            if self.autoreset == "same_step":
                obs, final_obs = self.env.reset()[0], obs
            else:
                self.over = True
        return obs, reward, terminated, truncated, final_obs

    def replay(self, seed: int, actions: np.ndarray) -> tuple[Any]:
        """Restore an episode from its seed and its actions, `[L, ...]`, and return the last observation."""
        obs, _ = self.env.reset(seed=seed)
        for action in actions:
            obs, *_ = self.env.step(action)
        return (obs,)

    def render(self) -> tuple[Any]:
        """Return a frame."""
        return (self.env.render(),)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def serve(index: int, make: Callable[[], Single], ours: Connection, theirs: Connection, memory: Any) -> None:
    """Serve environment `index` of a batch in a worker process, until the trainer ends it or is gone.

    An order is a method of `Single` and its arguments; `None` ends the process. The answer is `(True, result)`, or
    `(False, error)` and the end of the process. An observation is written to the shared memory; one that does not match
    its space is sent instead, for the trainer to report.
    """
    theirs.close()
    made: list[Single] = []

    def answer(method: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if not made:
            made.append(make())
        if method == "start":
            return ()
        obs, *others = getattr(made[0], method)(*arguments)
        space = made[0].env.observation_space
        if method != "render" and matches(space, obs):
            write_to_shared_memory(space, index, obs, memory)
            obs = None
        return obs, *others

    with contextlib.suppress(EOFError, OSError):  # the trainer is gone
        well = True
        while well and (order := ours.recv()) is not None:
            answered: Any
            try:
                answered = answer(*order)
            except BaseException as error:  # also SystemExit: the trainer must hear of it
                well, answered = False, error if isinstance(error, WrongAnswer) else as_text(error)
            _send(ours, (well, answered))
    with contextlib.suppress(Exception):  # the trainer has what it needs
        for single in made:
            single.close()


def _send(connection: Connection, answer: tuple[bool, Any]) -> None:
    """Send an answer, or why it cannot be pickled."""
    try:
        connection.send(answer)
    except OSError:
        raise
    except Exception as error:
        connection.send((False, as_text(error)))


def _is_set(flag: Any) -> bool:
    """Whether a flag is set; one of the wrong type is reported by the trainer."""
    try:
        return bool(checked("terminated", flag))
    except WrongAnswer:
        return False


def as_text(error: BaseException) -> str:
    """The name and the message of an error."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def matches(space: gymnasium.Space, obs: Any) -> bool:
    """Whether shared memory would hold an observation as it is."""
    if isinstance(space, gymnasium.spaces.Dict):
        parts = space.spaces.items()
        return isinstance(obs, dict) and all(name in obs and matches(part, obs[name]) for name, part in parts)
    array = np.asarray(obs)
    if space.dtype is None or array.shape != space.shape:
        return False
    if array.dtype == space.dtype:
        return True
    return np.can_cast(array.dtype, space.dtype, "same_kind") and beyond(array, space.dtype) is None


class GymActionRepeat(gymnasium.Wrapper):
    """Repeat each action `count` times and sum the rewards."""

    def __init__(self, env: gymnasium.Env, count: int) -> None:
        super().__init__(env)
        self.count = count

    def step(self, action: Any) -> Any:
        """Repeat the action until the count is reached or the episode ends."""
        total = 0.0
        for _ in range(self.count):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(checked("reward", reward))
            if checked("terminated", terminated) or checked("truncated", truncated):
                break
        return obs, total, terminated, truncated, info


class GymFrameStack(gymnasium.Wrapper):
    """Stack the last `count` observations along the last axis, oldest first; a reset fills it with the first one.

    An image `[H, W]` becomes `[H, W, count]`, and `[H, W, C]` becomes `[H, W, C · count]`.
    """

    def __init__(self, env: gymnasium.Env, count: int) -> None:
        super().__init__(env)
        box = env.observation_space
        if not isinstance(box, gymnasium.spaces.Box) or not box.shape:
            raise ValueError(f"frame_stack needs a Box with at least one axis as the observation space, but got {box}")
        self.count = count
        low, high = self._stack([box.low] * count), self._stack([box.high] * count)
        dtype: Any = low.dtype.type
        self.observation_space = gymnasium.spaces.Box(low, high, dtype=dtype)
        self.frames: list[np.ndarray] = []

    def reset(self, **options: Any) -> Any:
        """Start an episode."""
        obs, info = self.env.reset(**options)
        self.frames = [obs] * self.count
        return self._stack(self.frames), info

    def step(self, action: Any) -> Any:
        """Take one step."""
        obs, *rest = self.env.step(action)
        self.frames = [*self.frames[1:], obs]
        return self._stack(self.frames), *rest

    def _stack(self, frames: list[np.ndarray]) -> np.ndarray:
        if np.ndim(frames[0]) == 2:
            return np.stack(frames, axis=-1)
        return np.concatenate(frames, axis=-1)
