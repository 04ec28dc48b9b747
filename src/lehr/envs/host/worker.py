"""Code that runs next to a single Gymnasium environment, also in worker processes: this file must not import JAX."""

import functools
import os
import signal
from typing import Any

import gymnasium
import numpy as np


def make_env(
    name: str, parameters: dict[str, Any], index: int, action_repeat: int, frame_stack: int, trainer: int
) -> gymnasium.Env:
    """Create environment `index` of a batch, in the training process (its ID is `trainer`) or in a worker process."""
    if os.getpid() != trainer:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; only the trainer handles it
    env = gymnasium.make(name, disable_env_checker=True, **parameters)
    if action_repeat > 1:
        env = GymActionRepeat(env, action_repeat)
    if frame_stack > 1:
        env = GymFrameStack(env, frame_stack)
    # An attribute can be called through the vector environment by name; a wrapper would slow down every step.
    attributes: Any = env
    attributes.replay = functools.partial(replay, env, index)
    return env


def replay(env: gymnasium.Env, index: int, seeds: np.ndarray, elapsed: np.ndarray, actions: np.ndarray) -> Any:
    """Restore an environment by replaying its episode, and return the last observation.

    Args:
        env: environment `index` of a batch.
        index: the environment's index in the arrays below.
        seeds: the seeds of the episodes, `[E]`.
        elapsed: the number of steps taken in each episode, `[E]`.
        actions: the actions taken, `[L, E, ...]`.
    """
    obs, _ = env.reset(seed=int(seeds[index]))
    for step in range(elapsed[index]):
        obs, *_ = env.step(actions[step, index])
    return obs


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
            total += float(reward)
            if terminated or truncated:
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
