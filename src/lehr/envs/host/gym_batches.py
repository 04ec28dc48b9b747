"""Batches of Gymnasium's environments: reset by Lehr with seeds that can be replayed, or by themselves."""

from typing import Any

import numpy as np

from lehr.envs.host.answers import over, stacked
from lehr.envs.host.base import HostBatch, HostStep, Journal, late_reset
from lehr.envs.host.gym_spaces import action_dtype
from lehr.errors import InputError
from lehr.masks import MASK
from lehr.plugins import require
from lehr.types import PyTree


class Singles(HostBatch):
    """Single environments that reset themselves, in the step that ends an episode, or in the next one (`late`)."""

    def __init__(self, group: Any, dtype: Any, size: int, late: bool) -> None:
        self.group, self.dtype, self.size, self.late = group, dtype, size, late
        self.keeps_time = hasattr(group, "step_timeout")
        self.was_over = np.zeros(size, bool)

    def reset(self, seeds: np.ndarray) -> PyTree:
        """Start an episode in each environment."""
        self.was_over = np.zeros(self.size, bool)
        return self.group.reset(seeds)

    def step(self, action: np.ndarray) -> HostStep:
        """Take one step; if they reset late, the step after the end of an episode is only a reset."""
        obs, final, reward, terminated, truncated = self._step_all(action)
        was_over, done = self.was_over, terminated | truncated
        self.was_over = done & ~was_over
        if self.late:
            return late_reset(was_over, obs, reward, terminated, truncated)
        final_obs = _copied(obs) if done.any() else obs
        for index in np.flatnonzero(done).tolist():
            _put(final_obs, index, final[index])
        return HostStep(obs, final_obs, reward, terminated, truncated)

    def _step_all(self, action: np.ndarray) -> tuple[PyTree, tuple[Any, ...], np.ndarray, np.ndarray, np.ndarray]:
        # A copy, since the environment may write into it and a journal needs the original.
        answers = self.group.step(np.array(action, self.dtype))
        _, reward, terminated, truncated, final = zip(*answers, strict=True)
        flags = stacked("terminated", terminated), stacked("truncated", truncated)
        return self.group.observations(answers), final, stacked("reward", reward), *flags

    def render(self) -> np.ndarray:
        """Render the first environment."""
        return np.asarray(self.group.each("render", {0: ()})[0][0])

    def close(self) -> None:
        """Close the environments and their processes, if any."""
        self.group.close()


class Seeded(Singles):
    """Environments that are reset with our seeds, and restored by replaying their actions."""

    restores = True

    def __init__(self, group: Any, dtype: Any, state: dict[str, np.ndarray], first_action: int) -> None:
        super().__init__(group, dtype, len(state["seeds"]), late=False)
        self.journal = Journal(state, first_action)

    def reset(self, seeds: np.ndarray) -> PyTree:
        """Start an episode in each environment."""
        self.journal.begin(seeds)
        return self.group.reset(self.journal.seeds)

    def step(self, action: np.ndarray) -> HostStep:
        """Take one step, record the actions, and start the next episode where one has ended."""
        obs, _, reward, terminated, truncated = self._step_all(action)
        done = terminated | truncated
        self.journal.write(action, done)
        final_obs = obs
        if done.any():
            final_obs = _copied(obs)
            seeds = self.journal.seeds
            obs = self.group.reset_some(obs, {int(index): int(seeds[index]) for index in np.flatnonzero(done)})
        return HostStep(obs, final_obs, reward, terminated, truncated)

    def state(self) -> PyTree:
        """Return the seeds of the current episodes, and their actions so far."""
        return self.journal.state()

    def restore(self, state: PyTree) -> PyTree:
        """Replay the episodes."""
        actions = np.asarray(self.journal.read(state), self.dtype)
        seeds, elapsed = self.journal.seeds, self.journal.elapsed
        replays = {index: (int(seeds[index]), actions[: elapsed[index], index]) for index in range(self.size)}
        return self.group.observations(self.group.each("replay", replays))


class SelfResetting(HostBatch):
    """Environments that reset themselves, in the step that ends an episode or in the next one."""

    def __init__(self, envs: Any, stays_open: bool = False, mask_shape: tuple[int, ...] | None = None) -> None:
        self.envs, self.size, self.stays_open, self.mask_shape = envs, envs.num_envs, stays_open, mask_shape
        modes = require("gymnasium", extra="gym").vector.AutoresetMode
        mode = envs.metadata.get("autoreset_mode")
        if mode not in (modes.SAME_STEP, modes.NEXT_STEP):
            raise InputError(
                f"The vector environment {type(envs).__name__} has autoreset_mode={mode!r} in its metadata; it must be "
                "AutoresetMode.SAME_STEP or AutoresetMode.NEXT_STEP."
            )
        self.late = mode == modes.NEXT_STEP
        self.dtype = action_dtype(envs.single_action_space)
        self.over = np.zeros(self.size, bool)

    def reset(self, seeds: np.ndarray) -> PyTree:
        """Start an episode in each environment."""
        self.over = np.zeros(self.size, bool)
        vector = require("gymnasium", extra="gym").vector
        per_env_seeds = isinstance(self.envs, vector.SyncVectorEnv | vector.AsyncVectorEnv)
        obs, info = self.envs.reset(seed=seeds.tolist() if per_env_seeds else int(seeds[0]))
        return self._masked(obs, info, self.over)

    def step(self, action: np.ndarray) -> HostStep:
        """Take one step; in next-step mode, the step after the end of an episode is only a reset."""
        obs, reward, terminated, truncated, info = self.envs.step(np.asarray(action, self.dtype))
        done = over(terminated, truncated, self.size)
        if not self.late:
            obs, before = self._masked(obs, info, np.zeros(self.size, bool)), obs
            final_obs = self._final(before, obs, info, done) if done.any() else obs
            return HostStep(obs, final_obs, np.array(reward), np.array(terminated), np.array(truncated))
        was_over = self.over
        self.over = done & ~was_over
        obs = self._masked(obs, info, self.over)
        return late_reset(was_over, obs, reward, terminated, truncated)

    def _masked(self, obs: PyTree, info: Any, is_over: np.ndarray) -> PyTree:
        """Return the observations with the masks in `info`, if there are any."""
        from lehr.envs.host import info_masks

        if self.mask_shape is None:
            return obs
        return info_masks.masked_observation(obs, info_masks.batched_masks(info, self.mask_shape, is_over))

    def _final(self, before: PyTree, obs: PyTree, info: Any, done: np.ndarray) -> PyTree:
        """Return the last observations of the episodes that are over, with their masks, and the others as they are."""
        from lehr.envs.host import info_masks

        final = _with_final(before, info, done)
        if self.mask_shape is None:
            return final
        masks = info_masks.batched_masks(info.get("final_info", {}), self.mask_shape, np.ones(self.size, bool))
        masks[~done] = obs[MASK][~done]
        return info_masks.masked_observation(final, masks)

    def render(self) -> np.ndarray:
        """Render the first environment."""
        frames = self.envs.render()
        if frames is None:
            raise InputError("This environment cannot be rendered.")
        return np.asarray(frames[0])

    def close(self) -> None:
        """Close the environments and their processes, if any, unless the user created them."""
        if not self.stays_open:
            _close(self.envs)


def _close(envs: Any) -> None:
    """Close the environments, even if a process has died: its error is reported elsewhere."""
    try:
        envs.close()
    except (OSError, EOFError):
        for process in getattr(envs, "processes", ()):
            process.terminate()
        envs.closed = True


def _copied(obs: PyTree) -> PyTree:
    if isinstance(obs, dict):
        return {name: _copied(part) for name, part in obs.items()}
    return np.array(obs)


def _put(into: PyTree, index: int, value: PyTree) -> None:
    from lehr.envs.host.group import put

    put(into, index, value)


def _with_final(obs: PyTree, info: dict[str, Any], done: np.ndarray) -> PyTree:
    """Return the observations before the resets, which Gymnasium puts into `info`."""
    if "final_obs" not in info:
        raise KeyError("info['final_obs'] is missing, but is required from environments that reset in the same step")
    final, copied = info["final_obs"], _copied(obs)

    for index in np.flatnonzero(done).tolist():
        _put(copied, index, {k: v[index] for k, v in final.items()} if isinstance(final, dict) else final[index])
    return copied
