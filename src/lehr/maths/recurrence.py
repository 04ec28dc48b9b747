"""First-order linear recurrences over time, the basis of advantage estimators and of sums over episodes."""

import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from lehr.types import check_same_shape

MOST_ROWS = 12
"""Rows that the method "strides" combines in one pass."""


def linear_recurrence(
    decay: jax.Array,
    increment: jax.Array,
    *,
    reverse: bool = True,
    method: Literal["scan", "strides"] | None = None,
) -> jax.Array:
    """Solve x_t = decay_t · x_{t+1} + increment_t along the first axis, with x_T = 0.

    Args:
        decay: `[T, ...]`.
        increment: `[T, ...]`; the result has its dtype.
        reverse: solve from the last row to the first; `False` solves x_t = decay_t · x_{t−1} + increment_t from
            x_{−1} = 0.
        method: "scan" takes T small steps in one pass over the data; "strides" takes few passes over all of it, two
            for 13 to 144 rows. `None` uses "scan" on a CPU, where it is faster, and "strides" on an accelerator, where
            each step is a kernel launch.

    >>> linear_recurrence(jnp.array([0.5, 0.5, 0.5]), jnp.array([1.0, 0.0, 8.0])).tolist()
    [3.0, 4.0, 8.0]
    """

    def scan(decay: jax.Array, increment: jax.Array) -> jax.Array:
        def step(x: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x = row[0] * x + row[1]
            return x, x

        return lax.scan(step, jnp.zeros_like(increment[0]), (decay, increment), reverse=reverse)[1]

    strides = partial(_in_strides, reverse=reverse)
    check_same_shape(decay=decay, increment=increment)
    decay = decay.astype(increment.dtype)
    if method is None:
        return lax.platform_dependent(decay, increment, cpu=scan, default=strides)
    return (scan if method == "scan" else strides)(decay, increment)


def _in_strides(decay: jax.Array, increment: jax.Array, reverse: bool) -> jax.Array:
    """Solve the recurrence in passes: each combines rows that are a stride apart, and the next has a longer stride.

    After a pass with `count` rows, x_t depends on x_{t + count · stride}: as in a scan by doubling, which has a count
    of 2, but with fewer passes. An associative scan is as fast, but XLA makes it into few kernels so large that they
    take seconds to compile; the barriers keep passes apart.
    """
    length = len(increment)
    passes = max(1, math.ceil(math.log(length, MOST_ROWS) - 1e-9))
    count = math.ceil(length ** (1 / passes) - 1e-9)

    def later(x: jax.Array, steps: int) -> jax.Array:
        """Return x_{t + steps} at t, and 0 past the end."""
        nothing = jnp.zeros((steps, *x.shape[1:]), x.dtype)
        return jnp.concatenate([x[steps:], nothing] if reverse else [nothing, x[: len(x) - steps]])

    for number in range(passes):
        decay, increment = lax.optimization_barrier((decay, increment))
        distances = [row * count**number for row in range(count) if row * count**number < length]
        decays, increments = ([later(x, steps) for steps in distances] for x in (decay, increment))
        decay, increment = decays[-1], increments[-1]
        for nearer_decay, nearer_increment in zip(decays[-2::-1], increments[-2::-1], strict=True):
            decay, increment = nearer_decay * decay, nearer_decay * increment + nearer_increment
    return lax.optimization_barrier(increment)
