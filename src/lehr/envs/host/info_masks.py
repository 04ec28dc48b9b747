"""Action masks that environments give in `info["action_mask"]`, as an entry of their observations.

A vector environment gives the masks of all its environments, `[N, ...]`, and in `info["_action_mask"]` which of them
are there.

An observation that is not a dict becomes the entry `observation` of one.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from lehr.envs.host.answers import WrongAnswer, checked
from lehr.masks import MASK

OBSERVATION = "observation"


def masked_space(space: spaces.Space, shape: tuple[int, ...]) -> spaces.Dict:
    """Return the space of observations with a mask of this shape."""
    parts = space.spaces if isinstance(space, spaces.Dict) else {OBSERVATION: space}
    return spaces.Dict({**parts, MASK: spaces.Box(0, 1, shape, np.int8)})


def masked_observation(obs: Any, mask: np.ndarray) -> dict[str, Any]:
    """Return an observation with its mask."""
    return {**(obs if isinstance(obs, dict) else {OBSERVATION: obs}), MASK: mask}


def can_be_masked(observation_space: spaces.Space, action_space: spaces.Space) -> bool:
    """Whether actions are discrete, and observations have no mask yet."""
    has_mask = isinstance(observation_space, spaces.Dict) and MASK in observation_space.spaces
    return isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete) and not has_mask


def find_mask(info: Any) -> np.ndarray | None:
    """Return the mask in an `info`, int8; one mask for each component of an action, in a tuple, is concatenated."""
    mask = info.get(MASK) if isinstance(info, dict) else None
    if isinstance(mask, tuple | list) and mask and np.ndim(mask[0]):
        mask = np.concatenate([np.ravel(part) for part in mask])
    return None if mask is None else (np.asarray(mask) != 0).astype(np.int8)


def mask_in(info: Any, shape: tuple[int, ...], is_over: bool) -> np.ndarray:
    """Return the mask in the `info` of a step; it may be missing after the last step of an episode."""
    mask = find_mask(info)
    if mask is None and is_over:
        return np.ones(shape, np.int8)
    if mask is None or mask.shape != shape:
        given = "nothing" if mask is None else f"an array of shape {mask.shape}"
        raise WrongAnswer("info['action_mask']", given, f"an array of shape {shape}, as in the first reset")
    return mask


def shape_in_reset(env: gymnasium.Env) -> tuple[int, ...] | None:
    """Reset an environment and return the shape of the mask in its `info`; `None` if there is none."""
    if not can_be_masked(env.observation_space, env.action_space):
        return None
    try:
        mask = find_mask(env.reset(seed=0)[1])
    except KeyboardInterrupt:
        raise
    except BaseException:  # the run will fail in the same way, and say so
        return None
    return None if mask is None else mask.shape


def shape_in_vector(envs: Any) -> tuple[int, ...] | None:
    """Reset a vector environment and return the shape of one environment's mask; `None` if there is none."""
    if not can_be_masked(envs.single_observation_space, envs.single_action_space):
        return None
    try:
        info = envs.reset(seed=0)[1]
    except KeyboardInterrupt:
        raise
    except BaseException:  # the run will fail in the same way, and say so
        return None
    found = _rows(info)
    return next((mask.shape for mask in found if mask is not None), None)


def batched_masks(info: Any, shape: tuple[int, ...], is_over: np.ndarray) -> np.ndarray:
    """Return the masks in the `info` of a vector environment, int8 `[N, *shape]`.

    Args:
        info: of a step or a reset; `info["_action_mask"]`, if it is there, says which environments gave a mask.
        shape: of one environment's mask.
        is_over: bool `[N]`, the environments whose episode has ended, whose mask may be missing.
    """
    rows = _rows(info) or [None] * len(is_over)
    given = [{} if mask is None else {MASK: mask} for mask in rows]
    return np.stack([mask_in(row, shape, bool(over)) for row, over in zip(given, is_over, strict=True)])


def _rows(info: Any) -> list[np.ndarray | None]:
    """Return the mask of each environment of a vector environment; an empty list if there is none at all."""
    masks = info.get(MASK) if isinstance(info, dict) else None
    if masks is None:
        return []
    present = info.get(f"_{MASK}", np.ones(len(masks), bool))
    return [find_mask({MASK: mask}) if there else None for mask, there in zip(masks, present, strict=True)]


class MaskFromInfo(gymnasium.Wrapper):
    """A Gymnasium environment whose observations have the mask of its `info`."""

    def __init__(self, env: gymnasium.Env, shape: tuple[int, ...]) -> None:
        super().__init__(env)
        self.mask_shape = shape
        self.observation_space = masked_space(env.observation_space, shape)

    def reset(self, **options: Any) -> Any:
        """Start an episode."""
        obs, info = self.env.reset(**options)
        return masked_observation(obs, mask_in(info, self.mask_shape, is_over=False)), info

    def step(self, action: Any) -> Any:
        """Take one step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        is_over = bool(checked("terminated", terminated) or checked("truncated", truncated))
        return masked_observation(obs, mask_in(info, self.mask_shape, is_over)), reward, terminated, truncated, info
