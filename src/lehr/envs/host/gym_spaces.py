"""Gymnasium's spaces as the networks see them."""

from typing import Any

import numpy as np

from lehr import spaces
from lehr.errors import InputError


def as_32_bit(space: Any) -> spaces.Space:
    """Convert a Gymnasium space, with 64-bit numbers in 32 bits, as the network sees it."""
    return _as_32_bit(spaces.from_gymnasium(space))


def _as_32_bit(space: spaces.Space) -> spaces.Space:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _as_32_bit(inner) for name, inner in space.spaces.items()})
    if isinstance(space, spaces.Box) and space.dtype.itemsize == 8:
        dtype: Any = np.float32
        low, high = space.low, space.high
        if space.dtype.kind != "f":
            dtype, limits = np.int32, np.iinfo(np.int32)
            low, high = np.clip(low, limits.min, limits.max), np.clip(high, limits.min, limits.max)
        with np.errstate(over="ignore"):  # bounds beyond float32 become infinite
            return spaces.Box(low.astype(dtype), high.astype(dtype), space.shape, np.dtype(dtype))
    return space


def actions_of(space: Any) -> spaces.Space:
    """Convert a Gymnasium action space; a vector of bits is one of choices between 0 and 1."""
    if type(space).__name__ == "MultiBinary":
        if len(space.shape) != 1:
            raise InputError(
                f"The action space {space} has {len(space.shape)} axes, but a policy needs exactly one: wrap the "
                "environment so that it takes a vector."
            )
        return spaces.MultiDiscrete((2,) * space.shape[0])
    found = as_32_bit(space)
    if isinstance(found, spaces.Dict):
        raise InputError(
            f"The action space {space} is a dict, which is not supported: wrap the environment so that it takes one "
            "array."
        )
    spaces.check_actions(found)
    return found


def action_dtype(space: Any) -> Any:
    """Return the dtype in which an environment gets its actions; `None` if they stay as they are."""
    return space.dtype if type(space).__name__ == "MultiBinary" else None


def first_action(space: spaces.Space) -> int:
    """Return the first discrete action, usually 0, from which a `Journal` counts."""
    return space.start if isinstance(space, spaces.Discrete) else 0
