"""Rules that evaluate operations on one block of rows inside a GPU kernel; see `lehr.kernels.row_values`."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lehr.kernels import row_values
from lehr.kernels.row_program import Operation, Unsupported, Value
from lehr.kernels.row_shapes import SHAPE_RULES, shaped
from lehr.kernels.row_values import MOST_COLUMNS, Block, Columns, Given, Loader, Matrix, Rule

MOST_WEIGHTS = 512 * 512
"""Larger layers are left to the compiler: loading them in each step takes longer than launching more kernels."""

AHEAD = 2
"""Tiles of weights that are loaded ahead of their product."""


def evaluate(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    """Evaluate an operation on a block of rows; at least one of its inputs has a batch axis."""
    name = operation.primitive.name
    if name in RULES:
        return RULES[name](operation, inputs, loader)
    if name in ELEMENTWISE:
        function = functools.partial(operation.primitive.bind, **operation.parameters)
        return [_elementwise(function, operation, inputs, loader)]
    raise Unsupported(name)


# --- elementwise operations


def _elementwise(
    function: Callable[..., jax.Array], operation: Operation, inputs: Sequence[Given], loader: Loader
) -> Block:
    shape, axis = operation.outputs[0].shape, row_values.batch_axis(inputs)
    if any(isinstance(x, Matrix) for x in inputs) or row_values.is_wide(shape, axis):
        if len(shape) != 2 or axis != 0:
            raise Unsupported(f"a wide array {shape}")
        sizes = [(loader.block, width) for _, width in row_values.spans(shape[1])]
        tiles = zip(sizes, *(_wide(x, shape[1], loader) for x in inputs), strict=True)
        return Matrix(tuple(function(*(jnp.broadcast_to(x, size) for x in tile)) for size, *tile in tiles))
    out = row_values.without_rows(shape, axis)
    parts = [np.broadcast_to(row_values.cells_of(x, axis, loader), out) for x in inputs]
    cells = [function(*_vectors(loader, given)) for given in zip(*(part.flat for part in parts), strict=True)]
    return Columns(axis, row_values.filled(out, cells))


def _vectors(loader: Loader, cells: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.broadcast_to(cell, (loader.block,)) for cell in cells]


def _wide(given: Given, columns: int, loader: Loader) -> list[jax.Array]:
    """The tiles of any input of a wide elementwise operation, such that they broadcast to `[B, W]`."""
    if isinstance(given, Matrix):
        return list(given.tiles)
    places = row_values.spans(columns)
    if isinstance(given, Columns):
        if given.cells.size != 1:
            raise Unsupported("columns beside a wide array")
        return [given.cells.flat[0].reshape(-1, 1)] * len(places)
    if not given.shape or (given.static is not None and (given.static == given.static.flat[0]).all()):
        return [row_values.scalar_of(given, loader)] * len(places)
    if given.shape == (loader.rows, columns):
        return [loader.part(given, 0, (0, span)) for span in places]
    if given.shape == (loader.rows, 1):
        return [loader.cell(given, 0, (0, 0)).reshape(-1, 1)] * len(places)
    if given.shape != (1, columns):
        raise Unsupported(f"an array {given.shape} beside a wide array")
    return [loader.part(given, None, (0, span)).reshape(1, -1) for span in places]


def _select(which: jax.Array, *cases: jax.Array) -> jax.Array:
    if which.dtype == jnp.bool_:
        return jnp.where(which, cases[1], cases[0])
    found = cases[0]
    for number, case in enumerate(cases[1:], 1):
        found = jnp.where(which == number, case, found)
    return found


def _rounded(x: jax.Array) -> jax.Array:
    """Round to the nearest integer, halves to the even one.

    >>> _rounded(jnp.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.4, -0.6])).tolist()
    [0.0, 2.0, 2.0, 0.0, -2.0, 0.0, -1.0]
    """
    below = jnp.floor(x)
    rest, is_odd = x - below, below - 2.0 * jnp.floor(below / 2.0) != 0.0
    return below + jnp.where((rest > 0.5) | ((rest == 0.5) & is_odd), 1.0, 0.0)


def _round(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    if operation.parameters["rounding_method"] != lax.RoundingMethod.TO_NEAREST_EVEN:
        raise Unsupported("rounding away from zero")
    return [_elementwise(_rounded, operation, inputs, loader)]


def _by(function: Callable[..., jax.Array]) -> Rule:
    """The rule of an elementwise operation that is computed by another function."""
    return lambda operation, inputs, loader: [_elementwise(function, operation, inputs, loader)]


# --- reductions


def _reduction(combine: Callable[[Any, Any], Any], of_matrix: Callable[..., jax.Array] | None = None) -> Rule:
    """The rule of a reduction over columns."""

    def apply(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
        (given,), axes = inputs, operation.parameters["axes"]
        if isinstance(given, Matrix):
            if tuple(axes) != (1,) or of_matrix is None:
                raise Unsupported(f"{operation.primitive.name} of a wide array over {axes}")
            return [Columns(0, row_values.filled((1,), [_reduced(combine, of_matrix, given)]))]
        assert isinstance(given, Columns)
        if given.axis in axes:
            raise Unsupported(f"{operation.primitive.name} over the rows")
        cells = given.cells
        for axis in sorted(axes, reverse=True):
            parts = [cells.take(index, axis) for index in range(cells.shape[axis])]
            cells = functools.reduce(lambda a, b: _paired(combine, a, b), parts)
        return [Columns(given.axis - sum(one < given.axis for one in axes), cells)]

    return apply


def _reduced(combine: Callable[[Any, Any], Any], of_matrix: Callable[..., jax.Array], given: Matrix) -> jax.Array:
    """Reduce a wide array to `[B]`. Tiles of one width are combined first, so that fewer are reduced."""
    by_width: dict[int, jax.Array] = {}
    for tile in given.tiles:
        width = tile.shape[1]
        by_width[width] = combine(by_width[width], tile) if width in by_width else tile
    return functools.reduce(combine, [of_matrix(tile, axis=1) for tile in by_width.values()])


def _paired(combine: Callable[[Any, Any], Any], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return row_values.filled(first.shape, [combine(a, b) for a, b in zip(first.flat, second.flat, strict=True)])


def _extreme(better: Callable[[Any, Any], Any]) -> Rule:
    """The rule of argmax or argmin over one axis; the first of equal entries wins, and a NaN wins over all."""

    def apply(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
        (given,), (along,) = inputs, operation.parameters["axes"]
        if not isinstance(given, Columns) or given.axis == along:
            raise Unsupported(f"{operation.primitive.name} over the rows, or of a wide array")
        kind = operation.parameters["index_dtype"]
        parts = [given.cells.take(index, along) for index in range(given.cells.shape[along])]
        found = []
        for entries in zip(*(part.flat for part in parts), strict=True):
            best, where = entries[0], jnp.zeros((loader.block,), kind)
            for index, entry in enumerate(entries[1:], 1):
                wins = better(entry, best) | ((entry != entry) & (best == best))
                best, where = jnp.where(wins, entry, best), jnp.where(wins, jnp.asarray(index, kind), where)
            found.append(where)
        return [Columns(given.axis - (along < given.axis), row_values.filled(parts[0].shape, found))]

    return apply


def _cumulative_sum(operation: Operation, given: Columns, loader: Loader) -> Columns:
    along = operation.parameters["axis"]
    if given.axis == along or operation.parameters["reverse"]:
        raise Unsupported("cumsum of the rows, or in reverse")
    parts = [given.cells.take([index], along) for index in range(given.cells.shape[along])]
    sums = parts[:1]
    for part in parts[1:]:
        sums.append(_paired(operator.add, sums[-1], part))
    return Columns(given.axis, np.concatenate(sums, along))


# --- products


def _product(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    """The product of rows `[N, K]` with a matrix `[K, O]` that is the same for all of them."""
    rows, weights = inputs
    (over, batch) = operation.parameters["dimension_numbers"]
    if tuple(map(tuple, over)) != ((1,), (0,)) or any(map(tuple, batch)) or not isinstance(weights, Value):
        raise Unsupported("a product other than of rows with a matrix")
    if math.prod(weights.shape) > MOST_WEIGHTS:
        raise Unsupported(f"a layer of {weights.shape}")
    if isinstance(rows, Value) or weights.dtype != jnp.float32 or len(operation.outputs[0].shape) != 2:
        raise Unsupported("a product other than of rows with a matrix")
    if isinstance(rows, Columns):
        return [_product_of_columns(rows, weights, loader)]
    inner, outer = row_values.spans(weights.shape[0]), weights.shape[1]
    if outer > MOST_COLUMNS:
        multiply = functools.partial(
            lax.dot_general,
            dimension_numbers=(((1,), (0,)), ((), ())),
            precision=operation.parameters["precision"],
            preferred_element_type=jnp.float32,
        )
        places = [(span, columns) for columns in row_values.spans(outer) for span in inner]
        factors = [loader.part(weights, None, place) for place in places[:AHEAD]]
        tiles: list[jax.Array] = []
        for number, place in enumerate(places):
            if number + AHEAD < len(places):
                factors.append(loader.part(weights, None, places[number + AHEAD]))
            term = multiply(rows.tiles[number % len(inner)], factors[number])
            tiles = [*tiles, term] if place[0] == inner[0] else [*tiles[:-1], tiles[-1] + term]
        return [Matrix(tuple(tiles))]
    sums = []
    for index in range(outer):
        parts = [loader.part(weights, None, (span, index))[None, :] for span in inner]
        terms = Matrix(tuple(tile * part for tile, part in zip(rows.tiles, parts, strict=True)))
        sums.append(_reduced(operator.add, jnp.sum, terms))
    return [Columns(0, row_values.filled((1, outer), sums))]


def _product_of_columns(rows: Columns, weights: Value, loader: Loader) -> Block:
    outer = weights.shape[1]
    if rows.axis != 0:
        raise Unsupported("a product along the rows")
    entries = list(rows.cells.flat)
    if outer > MOST_COLUMNS:
        tiles = []
        for span in row_values.spans(outer):
            parts = [loader.part(weights, None, (index, span))[None, :] for index in range(len(entries))]
            terms = [entry[:, None] * part for entry, part in zip(entries, parts, strict=True)]
            tiles.append(functools.reduce(operator.add, terms))
        return Matrix(tuple(tiles))
    sums = [
        functools.reduce(
            operator.add, [entry * loader.cell(weights, None, (index, out)) for index, entry in enumerate(entries)]
        )
        for out in range(outer)
    ]
    return Columns(0, row_values.filled((1, outer), sums))


_NAMES = """
    abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clz convert_element_type
    cos cosh div eq erf_inv exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min
    mul ne neg nextafter not or population_count pow rem rsqrt shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh xor
"""
ELEMENTWISE = frozenset(_NAMES.split())
"""Operations that are applied to each column by themselves."""

RULES: dict[str, Rule] = {
    **SHAPE_RULES,
    "add_any": _by(operator.add),
    "select_n": _by(_select),
    "clamp": _by(lambda low, x, high: jnp.minimum(jnp.maximum(x, low), high)),
    "round": _round,
    "reduce_sum": _reduction(operator.add, jnp.sum),
    "reduce_max": _reduction(jnp.maximum, jnp.max),
    "reduce_min": _reduction(jnp.minimum, jnp.min),
    "reduce_and": _reduction(operator.and_),
    "reduce_or": _reduction(operator.or_),
    "reduce_prod": _reduction(operator.mul),
    "argmax": _extreme(lambda a, b: a > b),
    "argmin": _extreme(lambda a, b: a < b),
    "cumsum": shaped(_cumulative_sum),
    "dot_general": _product,
}
