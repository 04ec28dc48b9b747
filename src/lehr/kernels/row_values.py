"""Arrays on one block of rows inside a GPU kernel, see `lehr.kernels.row_loop`.

A small array with one row per environment, `[N, 4]` say, is kept as four vectors `[B]`, one per column, so that
slicing, stacking and transposing it costs nothing and everything else is elementwise. An array with more columns than
`MOST_COLUMNS`, such as the activations of a layer, is kept as matrices `[B, K]` for the matrix units, each as wide as a
power of two: 192 columns as 128 and 64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from lehr.kernels.row_program import Operation, Unsupported, Value

MOST_COLUMNS = 32
"""Arrays with more columns are matrices."""

LEAST_WIDTH, MOST_WIDTH = 16, 128
"""Columns of a tile of a matrix; the matrix units take no fewer than 16."""

Span: TypeAlias = tuple[int, int]
"""Where columns begin, and their number."""


@dataclass(frozen=True)
class Columns:
    """An array with a batch axis, in columns."""

    axis: int
    """The batch axis."""
    cells: np.ndarray
    """The array's shape, with 1 on the batch axis; each cell is a vector `[B]`."""


@dataclass(frozen=True)
class Matrix:
    """An array `[N, K]` as tiles `[B, W]` beside each other; see `spans`."""

    tiles: tuple[jax.Array, ...]


Block: TypeAlias = Columns | Matrix


class Loader(Protocol):
    """What the rules need of the kernel that they are part of; it loads values that were computed before the loop."""

    rows: int
    """The number of rows of all blocks, N."""
    block: int
    """The number of rows of this block, B."""

    def cell(self, value: Value, axis: int | None, index: tuple[int, ...]) -> jax.Array:
        """Load one entry, a scalar; if it has a batch axis, a vector `[B]`."""

    def part(self, value: Value, axis: int | None, index: tuple[int | Span, ...]) -> jax.Array:
        """Load all entries along the spans; if it has a batch axis, for each row: `[B, W]`."""


Given: TypeAlias = "Block | Value"
Rule: TypeAlias = Callable[[Operation, Sequence[Given], Loader], list[Block]]


def batch_axis(inputs: Sequence[Given]) -> int:
    """The batch axis, which all inputs with one have in common."""
    axes = {0 if isinstance(x, Matrix) else x.axis for x in inputs if not isinstance(x, Value)}
    if len(axes) != 1:
        raise Unsupported("batch axes in different places")
    return axes.pop()


def cells_of(given: Given, axis: int, loader: Loader) -> np.ndarray:
    """The cells of any input, for an operation whose other inputs have this batch axis."""
    if isinstance(given, Columns):
        return given.cells
    if isinstance(given, Matrix):
        raise Unsupported("a wide array where columns are needed")
    if not given.shape:
        return filled((), [scalar_of(given, loader)])
    is_batched = given.shape[axis] == loader.rows
    if not is_batched and given.shape[axis] != 1:
        raise Unsupported(f"an array {given.shape} beside rows on axis {axis}")
    shape = (*given.shape[:axis], 1, *given.shape[axis + 1 :])
    check_small(shape)
    if given.static is not None and (given.static == given.static.flat[0]).all():
        return filled(shape, [scalar_of(given, loader)] * math.prod(shape))
    batch_axis = axis if is_batched else None
    return filled(shape, [loader.cell(given, batch_axis, index) for index in np.ndindex(*shape)])


def scalar_of(given: Value, loader: Loader) -> jax.Array:
    """The number that a value is everywhere."""
    if given.static is not None:
        return jnp.asarray(given.static.flat[0], given.dtype)
    return loader.cell(given, None, ())


def spans(columns: int) -> list[Span]:
    """The tiles of a wide array, the widest first.

    >>> spans(64), spans(320)
    ([(0, 64)], [(0, 128), (128, 128), (256, 64)])
    """
    if columns % LEAST_WIDTH:
        raise Unsupported(f"a layer of {columns}, which is not a multiple of {LEAST_WIDTH}")
    found, begin, width = [], 0, MOST_WIDTH
    while begin < columns:
        while width > columns - begin:
            width //= 2
        found.append((begin, width))
        begin += width
    return found


def is_wide(shape: Sequence[int], axis: int = 0) -> bool:
    """Whether an array with this batch axis is kept in tiles."""
    return math.prod(without_rows(shape, axis)) > MOST_COLUMNS


def filled(shape: tuple[int, ...], items: Sequence[Any]) -> np.ndarray:
    """An array of objects; NumPy would look into them if it were given the list."""
    found = np.empty(len(items), object)
    for index, item in enumerate(items):
        found[index] = item
    return found.reshape(shape)


def check_small(shape: tuple[int, ...]) -> None:
    """Refuse too many columns."""
    if math.prod(shape) > MOST_COLUMNS:
        raise Unsupported(f"{math.prod(shape)} columns")


def without_rows(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """The shape of an array's columns: 1 on the batch axis."""
    return (*shape[:axis], 1, *shape[axis + 1 :])
