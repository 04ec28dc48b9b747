"""Rules that evaluate operations on one block of rows inside a GPU kernel.

A small array with one row per environment, `[N, 4]` say, is kept as four vectors `[B]`, one per column, so that
slicing, stacking and transposing it costs nothing and everything else is elementwise. An array with more columns than
`MOST_COLUMNS`, such as the activations of a layer, is kept as a matrix `[B, K]` for the matrix units.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lehr.kernels.row_program import Operation, Unsupported, Value

MOST_COLUMNS = 32
"""Arrays with more columns are matrices."""
MOST_WEIGHTS = 128 * 128
"""Larger layers do not fit on chip for all steps."""


@dataclass(frozen=True)
class Columns:
    """An array with a batch axis, in columns."""

    axis: int
    """The batch axis."""
    cells: np.ndarray
    """The array's shape, with 1 on the batch axis; each cell is a vector `[B]`."""


@dataclass(frozen=True)
class Matrix:
    """An array `[N, K]` as a block `[B, K]`."""

    block: jax.Array


Block: TypeAlias = Columns | Matrix


class Loader(Protocol):
    """What the rules need of the kernel that they are part of; it loads values that were computed before the loop."""

    rows: int
    """The number of rows of all blocks, N."""
    block: int
    """The number of rows of this block, B."""

    def cell(self, value: Value, axis: int | None, index: tuple[int, ...]) -> jax.Array:
        """Load one entry, a scalar; if it has a batch axis, a vector `[B]`."""

    def whole(self, value: Value) -> jax.Array:
        """Load all of a value that is the same for all rows."""

    def part(self, value: Value, *, row: int | None = None, column: int | None = None) -> jax.Array:
        """Load a row or a column of a matrix that is the same for all rows."""


Given: TypeAlias = "Block | Value"
Rule: TypeAlias = Callable[[Operation, Sequence[Given], Loader], list[Block]]


def evaluate(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    """Evaluate an operation on a block of rows; at least one of its inputs has a batch axis."""
    name = operation.primitive.name
    if name in RULES:
        return RULES[name](operation, inputs, loader)
    if name in ELEMENTWISE:
        function = functools.partial(operation.primitive.bind, **operation.parameters)
        return [_elementwise(function, operation, inputs, loader)]
    raise Unsupported(name)


def _axis(inputs: Sequence[Given]) -> int:
    """The batch axis, which all inputs with one have in common."""
    axes = {0 if isinstance(x, Matrix) else x.axis for x in inputs if not isinstance(x, Value)}
    if len(axes) != 1:
        raise Unsupported("batch axes in different places")
    return axes.pop()


def _cells(given: Given, axis: int, loader: Loader) -> np.ndarray:
    """The cells of any input, for an operation whose other inputs have this batch axis."""
    if isinstance(given, Columns):
        return given.cells
    if isinstance(given, Matrix):
        raise Unsupported("a wide array where columns are needed")
    if not given.shape:
        return filled((), [_scalar(given, loader)])
    is_batched = given.shape[axis] == loader.rows
    if not is_batched and given.shape[axis] != 1:
        raise Unsupported(f"an array {given.shape} beside rows on axis {axis}")
    shape = (*given.shape[:axis], 1, *given.shape[axis + 1 :])
    _check_small(shape)
    if given.static is not None and (given.static == given.static.flat[0]).all():
        return filled(shape, [_scalar(given, loader)] * math.prod(shape))
    batch_axis = axis if is_batched else None
    return filled(shape, [loader.cell(given, batch_axis, index) for index in np.ndindex(*shape)])


def _scalar(given: Value, loader: Loader) -> jax.Array:
    if given.static is not None:
        return jnp.asarray(given.static.flat[0], given.dtype)
    return loader.cell(given, None, ())


def filled(shape: tuple[int, ...], items: Sequence[Any]) -> np.ndarray:
    """An array of objects; NumPy would look into them if it were given the list."""
    found = np.empty(len(items), object)
    for index, item in enumerate(items):
        found[index] = item
    return found.reshape(shape)


def _check_small(shape: tuple[int, ...]) -> None:
    if math.prod(shape) > MOST_COLUMNS:
        raise Unsupported(f"{math.prod(shape)} columns")


def without_rows(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """The shape of an array's columns: 1 on the batch axis."""
    return (*shape[:axis], 1, *shape[axis + 1 :])


# --- elementwise operations


def _elementwise(
    function: Callable[..., jax.Array], operation: Operation, inputs: Sequence[Given], loader: Loader
) -> Block:
    shape, axis = operation.outputs[0].shape, _axis(inputs)
    if any(isinstance(x, Matrix) for x in inputs) or math.prod(without_rows(shape, axis)) > MOST_COLUMNS:
        if len(shape) != 2 or axis != 0:
            raise Unsupported(f"a wide array {shape}")
        size = (loader.block, shape[1])
        return Matrix(function(*(jnp.broadcast_to(_wide(x, loader), size) for x in inputs)))
    out = without_rows(shape, axis)
    parts = [np.broadcast_to(_cells(x, axis, loader), out) for x in inputs]
    return Columns(
        axis, filled(out, [function(*_vectors(loader, cells)) for cells in zip(*(p.flat for p in parts), strict=True)])
    )


def _vectors(loader: Loader, cells: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.broadcast_to(cell, (loader.block,)) for cell in cells]


def _wide(given: Given, loader: Loader) -> jax.Array:
    """Any input of a wide elementwise operation, such that it broadcasts to `[B, K]`."""
    if isinstance(given, Matrix):
        return given.block
    if isinstance(given, Columns):
        if given.cells.size != 1:
            raise Unsupported("columns beside a wide array")
        return given.cells.flat[0].reshape(-1, 1)
    if given.static is not None and (given.static == given.static.flat[0]).all():
        return _scalar(given, loader)
    if not given.shape:
        return _scalar(given, loader)
    if len(given.shape) != 2 or given.shape[0] != 1:
        raise Unsupported(f"an array {given.shape} beside a wide array")
    return loader.whole(given).reshape(1, -1)


def _select(which: jax.Array, *cases: jax.Array) -> jax.Array:
    if which.dtype == jnp.bool_:
        return jnp.where(which, cases[1], cases[0])
    found = cases[0]
    for number, case in enumerate(cases[1:], 1):
        found = jnp.where(which == number, case, found)
    return found


def _rounded(x: jax.Array) -> jax.Array:
    """Round to the nearest integer, halves to the even one."""
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


# --- shapes


def _same(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    return [x for x in inputs if not isinstance(x, Value)]


def _shaped(rule: Callable[[Operation, Columns, Loader], Columns]) -> Rule:
    """The rule of an operation with one input that rearranges its columns."""

    def apply(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
        (given,) = inputs
        if isinstance(given, Matrix):
            if operation.outputs[0].shape == operation.inputs[0].shape and operation.primitive.name == "reshape":
                return [given]
            raise Unsupported(f"{operation.primitive.name} of a wide array")
        assert isinstance(given, Columns)
        return [rule(operation, given, loader)]

    return apply


def _broadcast(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    (given,), shape = inputs[:1], operation.outputs[0].shape
    places = [int(place) for place in operation.parameters["broadcast_dimensions"]]
    if len(inputs) != 1:
        raise Unsupported("a shape that is not static")
    if isinstance(given, Matrix):
        if shape != operation.inputs[0].shape:
            raise Unsupported("broadcast_in_dim of a wide array")
        return [given]
    assert isinstance(given, Columns)
    axis = places[given.axis]
    if shape[axis] != loader.rows:
        raise Unsupported("broadcast_in_dim along the rows")
    out = without_rows(shape, axis)
    if math.prod(out) > MOST_COLUMNS:
        if len(shape) != 2 or axis != 0 or given.cells.size != 1:
            raise Unsupported("broadcast_in_dim of a wide array")
        return [Matrix(jnp.broadcast_to(given.cells.flat[0].reshape(-1, 1), (loader.block, shape[1])))]
    aligned = [1] * len(shape)
    for place, size in zip(places, given.cells.shape, strict=True):
        aligned[place] = size
    return [Columns(axis, np.broadcast_to(given.cells.reshape(aligned), out))]


def _reshape(operation: Operation, given: Columns, loader: Loader) -> Columns:
    old, new = operation.inputs[0].shape, operation.outputs[0].shape
    if operation.parameters.get("dimensions") is not None:
        raise Unsupported("reshape with a permutation")
    before = math.prod(old[: given.axis])
    for axis, size in enumerate(new):
        if size == loader.rows and math.prod(new[:axis]) == before:
            return Columns(axis, given.cells.reshape(without_rows(new, axis)))
    raise Unsupported("reshape of the rows")


def _squeeze(operation: Operation, given: Columns, loader: Loader) -> Columns:
    gone = operation.parameters["dimensions"]
    if given.axis in gone:
        raise Unsupported("squeeze of the rows")
    return Columns(given.axis - sum(one < given.axis for one in gone), given.cells.squeeze(tuple(gone)))


def _transpose(operation: Operation, given: Columns, loader: Loader) -> Columns:
    order = [int(one) for one in operation.parameters["permutation"]]
    return Columns(order.index(given.axis), given.cells.transpose(order))


def _slice(operation: Operation, given: Columns, loader: Loader) -> Columns:
    begins, ends = operation.parameters["start_indices"], operation.parameters["limit_indices"]
    strides = operation.parameters["strides"] or (1,) * len(begins)
    if (begins[given.axis], ends[given.axis], strides[given.axis]) != (0, loader.rows, 1):
        raise Unsupported("a slice of the rows")
    places = [
        slice(None) if axis == given.axis else slice(*part)
        for axis, part in enumerate(zip(begins, ends, strides, strict=True))
    ]
    return Columns(given.axis, given.cells[tuple(places)])


def _gather(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    """`x[..., indices, ...]` on one axis, with indices that are known while tracing."""
    given, numbers = inputs[0], operation.parameters["dimension_numbers"]
    indices = operation.inputs[1].static
    if not isinstance(given, Columns) or indices is None or numbers.operand_batching_dims:
        raise Unsupported("a gather with indices that are not static, or of a wide array")
    shape, out = operation.inputs[0].shape, operation.outputs[0].shape
    (along,) = numbers.start_index_map if len(numbers.start_index_map) == 1 else (given.axis,)
    sizes = tuple(1 if place == along else size for place, size in enumerate(shape))
    batch = [place for place in range(len(out)) if place not in numbers.offset_dims]
    is_plain = batch == list(range(along, along + len(batch))) and numbers.collapsed_slice_dims == (along,)
    if along == given.axis or not is_plain or operation.parameters["slice_sizes"] != sizes:
        raise Unsupported("a gather of the rows, or of slices")
    places = indices.ravel()
    if not ((places >= 0) & (places < shape[along])).all():
        raise Unsupported("a gather outside the array")
    axis = given.axis + (len(batch) - 1 if along < given.axis else 0)
    return [Columns(axis, given.cells.take(places, along).reshape(without_rows(out, axis)))]


def _rev(operation: Operation, given: Columns, loader: Loader) -> Columns:
    if given.axis in operation.parameters["dimensions"]:
        raise Unsupported("rev of the rows")
    return Columns(given.axis, np.flip(given.cells, operation.parameters["dimensions"]))


def _concatenate(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    axis, along = _axis(inputs), operation.parameters["dimension"]
    if axis == along:
        raise Unsupported("concatenate along the rows")
    _check_small(without_rows(operation.outputs[0].shape, axis))
    return [Columns(axis, np.concatenate([_cells(x, axis, loader) for x in inputs], along))]


def _stack(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    axis, along = _axis(inputs), operation.parameters["axis"]
    after = axis + (along <= axis)
    _check_small(without_rows(operation.outputs[0].shape, after))
    return [Columns(after, np.stack([_cells(x, axis, loader) for x in inputs], along))]


def _unstack(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    (given,), along = inputs, operation.parameters["axis"]
    if not isinstance(given, Columns) or given.axis == along:
        raise Unsupported("unstack of the rows, or of a wide array")
    axis = given.axis - (along < given.axis)
    return [Columns(axis, given.cells.take(index, along)) for index in range(given.cells.shape[along])]


def _split(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    (given,), along = inputs, operation.parameters["axis"]
    if not isinstance(given, Columns) or given.axis == along:
        raise Unsupported("split of the rows, or of a wide array")
    ends = np.cumsum(operation.parameters["sizes"])[:-1]
    return [Columns(given.axis, part) for part in np.split(given.cells, ends, along)]


# --- reductions


def _reduction(combine: Callable[[Any, Any], Any], of_matrix: Callable[..., jax.Array] | None = None) -> Rule:
    """The rule of a reduction over columns."""

    def apply(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
        (given,), axes = inputs, operation.parameters["axes"]
        if isinstance(given, Matrix):
            if tuple(axes) != (1,) or of_matrix is None:
                raise Unsupported(f"{operation.primitive.name} of a wide array over {axes}")
            return [Columns(0, filled((1,), [of_matrix(given.block, axis=1)]))]
        assert isinstance(given, Columns)
        if given.axis in axes:
            raise Unsupported(f"{operation.primitive.name} over the rows")
        cells = given.cells
        for axis in sorted(axes, reverse=True):
            parts = [cells.take(index, axis) for index in range(cells.shape[axis])]
            cells = functools.reduce(lambda a, b: _paired(combine, a, b), parts)
        return [Columns(given.axis - sum(one < given.axis for one in axes), cells)]

    return apply


def _paired(combine: Callable[[Any, Any], Any], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return filled(first.shape, [combine(a, b) for a, b in zip(first.flat, second.flat, strict=True)])


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
        return [Columns(given.axis - (along < given.axis), filled(parts[0].shape, found))]

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
    outer = weights.shape[1]
    if math.prod(weights.shape) > MOST_WEIGHTS:
        raise Unsupported(f"a layer of {weights.shape}")
    if isinstance(rows, Value) or weights.dtype != jnp.float32 or len(operation.outputs[0].shape) != 2:
        raise Unsupported("a product other than of rows with a matrix")
    if outer > MOST_COLUMNS:
        _check_power_of_two(outer)
    if isinstance(rows, Columns):
        return [_product_of_columns(rows, weights, loader)]
    if outer > MOST_COLUMNS:
        precision = operation.parameters["precision"]
        axes = (((1,), (0,)), ((), ()))
        return [Matrix(lax.dot_general(rows.block, loader.whole(weights), axes, precision, jnp.float32))]
    by_column = [jnp.sum(rows.block * loader.part(weights, column=index)[None, :], axis=1) for index in range(outer)]
    return [Columns(0, filled((1, outer), by_column))]


def _product_of_columns(rows: Columns, weights: Value, loader: Loader) -> Block:
    outer = weights.shape[1]
    if rows.axis != 0:
        raise Unsupported("a product along the rows")
    entries = list(rows.cells.flat)
    if outer > MOST_COLUMNS:
        terms = [entry[:, None] * loader.part(weights, row=index)[None, :] for index, entry in enumerate(entries)]
        return Matrix(functools.reduce(operator.add, terms))
    sums = [
        functools.reduce(
            operator.add, [entry * loader.cell(weights, None, (index, out)) for index, entry in enumerate(entries)]
        )
        for out in range(outer)
    ]
    return Columns(0, filled((1, outer), sums))


def _check_power_of_two(size: int) -> None:
    if size & (size - 1):
        raise Unsupported(f"a layer of {size}, which is not a power of two")


ELEMENTWISE = frozenset(
    [
        "abs",
        "acos",
        "acosh",
        "add",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "bitcast_convert_type",
        "cbrt",
        "ceil",
        "convert_element_type",
        "cos",
        "cosh",
        "div",
        "eq",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "is_finite",
        "le",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "or",
        "pow",
        "rem",
        "rsqrt",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "sub",
        "tan",
        "tanh",
        "xor",
        "erf_inv",
        "nextafter",
        "population_count",
        "clz",
    ]
)

RULES: dict[str, Rule] = {
    "select_n": _by(_select),
    "clamp": _by(lambda low, x, high: jnp.minimum(jnp.maximum(x, low), high)),
    "round": _round,
    "copy": _same,
    "copy_p": _same,
    "stop_gradient": _same,
    "broadcast_in_dim": _broadcast,
    "reshape": _shaped(_reshape),
    "squeeze": _shaped(_squeeze),
    "transpose": _shaped(_transpose),
    "slice": _shaped(_slice),
    "gather": _gather,
    "rev": _shaped(_rev),
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "split": _split,
    "reduce_sum": _reduction(operator.add, jnp.sum),
    "reduce_max": _reduction(jnp.maximum, jnp.max),
    "reduce_min": _reduction(jnp.minimum, jnp.min),
    "reduce_and": _reduction(jnp.logical_and),
    "reduce_or": _reduction(jnp.logical_or),
    "reduce_prod": _reduction(operator.mul),
    "argmax": _extreme(lambda a, b: a > b),
    "argmin": _extreme(lambda a, b: a < b),
    "cumsum": _shaped(_cumulative_sum),
    "dot_general": _product,
}
