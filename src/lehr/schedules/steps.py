"""Env-step counts that stay exact beyond the range of a single float32.

float32 counts exactly up to 2^24, about 17 million; a long run takes 10^11 steps. Inside a compiled program a count is
therefore the sum of two float32 numbers, `Steps(high, low)`, which is exact up to 2^48, about 2.8·10^14.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_LOW_BITS = 24


class Steps(NamedTuple):
    """A count of env steps as the sum of two arrays of the same shape."""

    high: Any
    low: Any


def split(step: Any) -> Steps:
    """Convert a step of any numeric type, traced or not, to `Steps`; `Steps` are returned unchanged."""
    if isinstance(step, Steps):
        return step
    if isinstance(step, int | np.integer):
        return Steps(jnp.float32(step >> _LOW_BITS << _LOW_BITS), jnp.float32(step & (2**_LOW_BITS - 1)))
    step = jnp.asarray(step)
    if jnp.issubdtype(step.dtype, jnp.integer) and step.dtype.itemsize >= 4:
        low = step & (2**_LOW_BITS - 1)
        number = jnp.float64 if step.dtype.itemsize == 8 else jnp.float32
        return Steps((step - low).astype(number), low.astype(number))
    return Steps(step if jnp.issubdtype(step.dtype, jnp.floating) else step.astype(jnp.float32), 0.0)


def env_steps(updates: jax.Array | int, steps_per_update: int) -> Steps:
    """Return `updates · steps_per_update` exactly, even where the product overflows the factors' types.

    Args:
        updates: number of updates so far, int32 or uint32, of any shape; may be traced.
        steps_per_update: env steps per update, a Python integer below 2^32.

    >>> high, low = env_steps(3_000_000, 65_536)
    >>> int(high) + int(low)
    196608000000
    """
    if not 0 < steps_per_update < 2**32:
        raise ValueError(f"steps_per_update is {steps_per_update}; it must be at least 1 and below 2^32.")
    # Schoolbook multiplication in 16-bit limbs: every partial product and carry fits into a uint32.
    count = jnp.asarray(updates).astype(jnp.uint32)
    a1, a0 = count >> 16, count & 0xFFFF
    b1, b0 = np.uint32(steps_per_update >> 16), np.uint32(steps_per_update & 0xFFFF)
    low, cross1, cross2, top = a0 * b0, a1 * b0, a0 * b1, a1 * b1
    middle = (low >> 16) + (cross1 & 0xFFFF) + (cross2 & 0xFFFF)
    low32 = (middle << 16) | (low & 0xFFFF)
    high32 = top + (cross1 >> 16) + (cross2 >> 16) + (middle >> 16)
    above = (high32 << (32 - _LOW_BITS)) | (low32 >> _LOW_BITS)
    return Steps(
        above.astype(jnp.float32) * np.float32(2**_LOW_BITS),
        (low32 & np.uint32(2**_LOW_BITS - 1)).astype(jnp.float32),
    )
