"""Solve a first-order linear recurrence over time in few passes over all of it.

A scan takes one small step per row, in one pass over the data. It is the fastest on a CPU; on an accelerator, each step
is a kernel launch. There, `in_strides` takes few passes, two for 13 to 144 rows.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

MOST_ROWS = 12
"""Rows that one pass combines."""


def is_able() -> bool:
    """Whether launches cost time: everywhere but on a CPU."""
    return jax.default_backend() != "cpu"


def plain(decay: jax.Array, increment: jax.Array, reverse: bool) -> jax.Array:
    """Solve the recurrence row by row; arguments as in `lehr.kernels.linear_recurrence`."""

    def step(x: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = row[0] * x + row[1]
        return x, x

    return lax.scan(step, jnp.zeros_like(increment[0]), (decay, increment), reverse=reverse)[1]


def in_strides(decay: jax.Array, increment: jax.Array, reverse: bool) -> jax.Array:
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
