"""Add the partial sums of a gradient, and its squares, as one GPU kernel.

XLA adds the partial sums with one kernel, and computes the norm of the result with a second one, of one block, which
takes longer than the first. Here each program adds its columns, and the squares of its results; the few sums of squares
are added where the norm is used.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lehr.kernels.mlp_programs import pl, triton

MOST_BLOCKS = 36
"""The most programs: their sums of squares are read by all that uses the norm."""
LEAST_COLUMNS, MOST_THREADS = 64, 512
"""The fewest columns of a program, and the most threads."""


def added(parts: jax.Array, holes: Sequence[tuple[int, int]], interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Return Σ_p parts[p], `[size]`, and the sums of its squares in at most 36 blocks, `[blocks]`.

    Args:
        parts: float32 `[P, size]`.
        holes: begins and ends of what is undefined, and left out of the squares.
        interpret: run in Pallas's interpreter.
    """
    count, size = parts.shape
    block = max(LEAST_COLUMNS, pl.next_power_of_2(pl.cdiv(size, MOST_BLOCKS)))
    blocks = pl.cdiv(size, block)
    out_shape = [jax.ShapeDtypeStruct((length,), jnp.float32) for length in (size + interpret, blocks)]
    found, squares = pl.pallas_call(
        functools.partial(_program, count, size, block, tuple(holes), interpret),
        out_shape=out_shape,
        grid=(blocks,),
        compiler_params=triton.CompilerParams(num_warps=min(block, MOST_THREADS) // 32, num_stages=1),
        interpret=interpret,
        name="partial_sums",
    )(parts.reshape(-1))
    return found[:size], squares


def _program(
    count: int,
    size: int,
    block: int,
    holes: tuple[tuple[int, int], ...],
    interpret: bool,
    parts: Any,
    found: Any,
    squares: Any,
) -> None:
    at = pl.program_id(0) * block + jax.lax.broadcasted_iota(jnp.int32, (block,), 0)
    inside = at < size
    loaded = [triton.load(parts.at[part * size + at], mask=inside, other=0.0) for part in range(count)]
    total = functools.reduce(jnp.add, loaded)
    # The interpreter writes what was there, also where it is masked.
    triton.store(found.at[jnp.where(inside, at, size) if interpret else at], total, mask=inside)
    defined = inside
    for begin, end in holes:
        defined &= (at < begin) | (at >= end)
    triton.store(squares.at[pl.program_id(0)], jnp.sum(jnp.where(defined, total * total, 0.0)))
