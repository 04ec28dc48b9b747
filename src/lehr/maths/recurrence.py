"""First-order linear recurrences over time, the basis of advantage estimators and of sums over episodes."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from lehr.types import check_same_shape


def linear_recurrence(
    decay: jax.Array,
    increment: jax.Array,
    *,
    reverse: bool = True,
    method: Literal["scan", "associative"] | None = None,
) -> jax.Array:
    """Solve x_t = decay_t · x_{t+1} + increment_t along the first axis, with x_T = 0.

    Args:
        decay: `[T, ...]`.
        increment: `[T, ...]`; the result has its dtype.
        reverse: solve from the last row to the first; `False` solves x_t = decay_t · x_{t−1} + increment_t from
            x_{−1} = 0.
        method: "scan" takes T small steps in one pass over the data; "associative" takes about 2·log₂(T) larger
            steps in several passes. `None` uses "scan" on a CPU, where it is faster, and "associative" on an
            accelerator, where each step is a kernel launch.

    >>> linear_recurrence(jnp.array([0.5, 0.5, 0.5]), jnp.array([1.0, 0.0, 8.0])).tolist()
    [3.0, 4.0, 8.0]
    """

    def scan(decay: jax.Array, increment: jax.Array) -> jax.Array:
        def step(x: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x = row[0] * x + row[1]
            return x, x

        return lax.scan(step, jnp.zeros_like(increment[0]), (decay, increment), reverse=reverse)[1]

    def associative(decay: jax.Array, increment: jax.Array) -> jax.Array:
        def compose(
            first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            return first[0] * second[0], second[0] * first[1] + second[1]

        return lax.associative_scan(compose, (decay, increment), reverse=reverse)[1]

    check_same_shape(decay=decay, increment=increment)
    decay = decay.astype(increment.dtype)
    if method is None:
        return lax.platform_dependent(decay, increment, cpu=scan, default=associative)
    return {"scan": scan, "associative": associative}[method](decay, increment)
