"""A draw of segments by priority, without replacement, as one GPU kernel.

In plain JAX, a draw (`lehr.maths.minibatches.prioritised`) is a sort, three cumulative sums and about ten small
kernels, for a few thousand numbers: most of the time goes to launches. Here one program keeps all of them on chip. It
does not sort to find the segments that are certain to be drawn: it marks those that are expected more than once as
certain, and repeats this with the others until there are no more; usually there are none, or one repetition suffices.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from lehr.kernels import lowered, mlp_plan
from lehr.kernels.mlp_programs import pl, triton

Drawn: TypeAlias = tuple[jax.Array, jax.Array]
"""Indices, int32, and importance weights, float32, `[size]` each."""

MOST_SEGMENTS = 2**14
"""More do not fit into the registers of one program."""
NUM_WARPS, MANY_NUM_WARPS = 8, 16
"""The second for more segments than half of that."""
INTERPRET = False
"""Run the kernel in Pallas's interpreter, on any device, for tests."""


def is_able() -> bool:
    """Whether JAX has Pallas's Triton backend, and a GPU."""
    return mlp_plan.has_triton(INTERPRET)


class Draw(NamedTuple):
    """What segments are drawn from, and how many."""

    permutation: jax.Array
    """int32 `[N]`: the segments in a random order."""
    offset: jax.Array
    """uint32 `[]`: a random fraction of 1, in 32 bits."""
    priorities: jax.Array
    """float32 `[N]`, at least 0."""
    exponents: tuple[Any, Any]
    """Of the priorities, and of the importance weights."""
    floor: float
    """The minimum priority, as a fraction of the largest."""
    least: float
    """The minimum of the exponent times the logarithm of that fraction."""
    size: int
    """The number of segments to draw."""


def fits(draw: Draw) -> bool:
    """Whether some of the segments are drawn, but not all."""
    is_vector = draw.priorities.ndim == 1 and draw.priorities.dtype == jnp.float32
    return is_vector and 0 < draw.size < len(draw.priorities) <= MOST_SEGMENTS


def draw_segments(draw: Draw, plain: Callable[[], Drawn]) -> Drawn:
    """Return the segments that are drawn; raise if JAX cannot lower the kernel.

    Args:
        draw: what to draw from, and how many.
        plain: computes the same in plain JAX, for programs that are not compiled for CUDA.
    """
    exponents = jnp.stack([jnp.asarray(x, jnp.float32) for x in draw.exponents])
    arrays = draw.permutation, draw.offset, draw.priorities, exponents
    kernel = functools.partial(_drawn, draw.size, (draw.floor, draw.least))
    if not INTERPRET:
        lowered.check(f"segment_draw {draw.size, draw.floor, draw.least}", kernel, *arrays)
    return lowered.on_platform(INTERPRET, kernel, lambda *_: plain(), *arrays)


def _drawn(
    size: int,
    limits: tuple[float, float],
    permutation: jax.Array,
    offset: jax.Array,
    priorities: jax.Array,
    exponents: jax.Array,
) -> Drawn:
    """The kernel; `limits` are those of `Draw`, its floor and its least."""
    length = len(priorities)
    warps = NUM_WARPS if length <= MOST_SEGMENTS // 2 else MANY_NUM_WARPS

    def kernel(order_ref: Any, offset_ref: Any, priorities_ref: Any, exponents_ref: Any, *out_refs: Any) -> None:
        number = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(length),), 0)
        is_real = number < length
        order = triton.load(order_ref.at[number], mask=is_real, other=0)
        priority = triton.load(priorities_ref.at[order], mask=is_real, other=0.0)
        probability = _probability(priority, limits, exponents_ref[0], is_real)
        certain, factor = _certain(probability, size)
        expected = jnp.where(certain, 1.0, jnp.minimum(probability * factor, 1.0))
        # As in `_systematic` of `lehr.maths.minibatches`: positions on a line are 32-bit fractions.
        share = jnp.where(certain, 0.0, expected) * 2.0**32
        steps = jnp.minimum(share, 2.0**32 - 256).astype(jnp.uint32)
        ends = jnp.cumsum(steps, dtype=jnp.uint32) + offset_ref[0]
        is_drawn = certain | (ends < steps)
        drawn = jnp.cumsum(is_drawn.astype(jnp.int32))
        others = number - drawn + jnp.sum(is_drawn.astype(jnp.int32))
        place = jnp.where(is_drawn, drawn - 1, others)
        is_kept = is_real & (place < size)
        weight = jnp.exp(exponents_ref[1] * (math.log(size / length) - jnp.log(expected)))
        for ref, values in zip(out_refs, (order, weight), strict=True):
            triton.store(ref.at[place], values, mask=is_kept)

    found = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((size,), dtype) for dtype in (jnp.int32, jnp.float32)],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=INTERPRET,
        name="segment_draw",
    )(permutation, offset.reshape(1), priorities, exponents)
    return found[0], found[1]


def _probability(
    priority: jax.Array, limits: tuple[float, float], exponent: jax.Array, is_real: jax.Array
) -> jax.Array:
    """Return P(i), 0 for what only fills the block up."""
    largest = jnp.max(priority)
    relative = jnp.where(largest == 0, 1.0, priority / jnp.where(largest == 0, 1.0, largest))
    floor, least = limits
    logarithm = jnp.maximum(exponent * jnp.log(jnp.maximum(relative, floor)), least)
    mass = jnp.where(is_real, jnp.exp(logarithm), 0.0)
    return mass / jnp.sum(mass)


def _certain(probability: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Return which segments are drawn for certain, and c of the others, which are drawn with probability c · P(i)."""

    def factor_of(count: jax.Array, certain: jax.Array) -> jax.Array:
        left = (size - jnp.minimum(count, size - 1)).astype(jnp.float32)
        return left / jnp.sum(jnp.where(certain, 0.0, probability))

    def is_left(carried: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        _, count, before = carried
        return count > before

    def repeat(carried: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        factor, count, _ = carried
        certain = probability * factor > 1.0
        found = jnp.maximum(count, jnp.sum(certain.astype(jnp.int32)))
        return jnp.where(found > count, factor_of(found, certain), factor), found, count

    start = jnp.float32(size), jnp.int32(0), jnp.int32(-1)
    factor, _, _ = lax.while_loop(is_left, repeat, start)
    return probability * factor > 1.0, factor
