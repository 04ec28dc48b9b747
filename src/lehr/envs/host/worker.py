"""What runs beside a single Gymnasium environment, in worker processes too: so this file imports no JAX."""

import functools
import os
import signal
from typing import Any

import gymnasium
import numpy as np


def make_env(
    name: str, parameters: dict[str, Any], index: int, action_repeat: int, frame_stack: int, trainer: int
) -> gymnasium.Env:
    """Number `index` of a batch of environments, for the process `trainer`, here or in a process of its own."""
    if os.getpid() != trainer:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the trainer decides what it means
    env = gymnasium.make(name, disable_env_checker=True, **parameters)
    if action_repeat > 1:
        env = ActionRepeat(env, action_repeat)
    if frame_stack > 1:
        env = FrameStack(env, frame_stack)
    # An attribute, which a vector environment can call by its name: a wrapper would cost time at every step.
    attributes: Any = env
    attributes.replay = functools.partial(replay, env, index)
    return env


def replay(env: gymnasium.Env, index: int, seeds: np.ndarray, elapsed: np.ndarray, actions: np.ndarray) -> Any:
    """Bring an environment back, by living through its episode again: the observation then.

    Args:
        env: number `index` of a batch.
        index: which of the seeds `[E]`, of the numbers of steps `[E]` and of the actions `[L, E, ...]` are its own.
        seeds: that the episodes began with.
        elapsed: how many actions each has seen.
        actions: the actions.
    """
    obs, _ = env.reset(seed=int(seeds[index]))
    for step in range(elapsed[index]):
        obs, *_ = env.step(actions[step, index])
    return obs


class ActionRepeat(gymnasium.Wrapper):
    """Make each action several times and sum the rewards."""

    def __init__(self, env: gymnasium.Env, count: int) -> None:
        super().__init__(env)
        self.count = count

    def step(self, action: Any) -> Any:
        """Act until the count is reached, or the episode is over."""
        total = 0.0
        for _ in range(self.count):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


class FrameStack(gymnasium.Wrapper):
    """Observe the newest observations side by side along the last axis, oldest first; a reset fills all with its own.

    A picture `[H, W]` becomes `[H, W, count]`, one of `[H, W, C]` becomes `[H, W, C · count]`.
    """

    def __init__(self, env: gymnasium.Env, count: int) -> None:
        super().__init__(env)
        box = env.observation_space
        if not isinstance(box, gymnasium.spaces.Box) or not box.shape:
            raise ValueError(f"frame_stack needs observations in a Box, not in {box}")
        self.count = count
        low, high = self._side_by_side([box.low] * count), self._side_by_side([box.high] * count)
        dtype: Any = low.dtype.type
        self.observation_space = gymnasium.spaces.Box(low, high, dtype=dtype)
        self.frames: list[np.ndarray] = []

    def reset(self, **options: Any) -> Any:
        """Begin an episode."""
        obs, info = self.env.reset(**options)
        self.frames = [obs] * self.count
        return self._side_by_side(self.frames), info

    def step(self, action: Any) -> Any:
        """Act once."""
        obs, *rest = self.env.step(action)
        self.frames = [*self.frames[1:], obs]
        return self._side_by_side(self.frames), *rest

    def _side_by_side(self, frames: list[np.ndarray]) -> np.ndarray:
        if np.ndim(frames[0]) == 2:
            return np.stack(frames, axis=-1)
        return np.concatenate(frames, axis=-1)
