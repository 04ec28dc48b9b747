"""Rules of operations that only rearrange the columns of a block of rows; see `lehr.kernels.row_rules`."""

import itertools
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from lehr.kernels import row_values
from lehr.kernels.row_program import Operation, Unsupported, Value
from lehr.kernels.row_values import MOST_COLUMNS, Block, Columns, Given, Loader, Matrix, Rule


def same(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    """The rule of an operation that changes nothing."""
    return [x for x in inputs if not isinstance(x, Value)]


def shaped(rule: Callable[[Operation, Columns, Loader], Columns]) -> Rule:
    """The rule of an operation with one input that rearranges its columns."""

    def apply(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
        (given,) = inputs
        if isinstance(given, Matrix):
            if operation.outputs[0].shape == operation.inputs[0].shape and operation.primitive.name == "reshape":
                return [given]
            if operation.primitive.name == "slice":
                return [_slice_of_matrix(operation, given)]
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
    out = row_values.without_rows(shape, axis)
    if row_values.is_wide(shape, axis):
        if len(shape) != 2 or axis != 0 or given.cells.size != 1:
            raise Unsupported("broadcast_in_dim of a wide array")
        cell = given.cells.flat[0].reshape(-1, 1)
        return [Matrix(tuple(jnp.broadcast_to(cell, (loader.block, width)) for _, width in row_values.spans(shape[1])))]
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
            return Columns(axis, given.cells.reshape(row_values.without_rows(new, axis)))
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


def _slice_of_matrix(operation: Operation, given: Matrix) -> Matrix:
    begins, ends = operation.parameters["start_indices"], operation.parameters["limit_indices"]
    is_dense = set(operation.parameters["strides"] or (1,)) == {1}
    if (begins[0], ends[0]) != (0, operation.inputs[0].shape[0]) or not is_dense:
        raise Unsupported("a slice of the rows, or with strides, of a wide array")
    return _columns_of_matrix(given, begins[1], ends[1])


def _columns_of_matrix(given: Matrix, begin: int, end: int) -> Matrix:
    """Columns of a wide array: whole tiles, which are again the tiles of an array."""
    places = row_values.spans(sum(tile.shape[1] for tile in given.tiles))
    chosen = [(place, tile) for place, tile in zip(places, given.tiles, strict=True) if begin <= place[0] < end]
    moved = [(place[0] - begin, place[1]) for place, _ in chosen]
    if end - begin <= MOST_COLUMNS or moved != row_values.spans(end - begin):
        raise Unsupported(f"columns {begin} to {end} of a wide array, which are not whole tiles")
    return Matrix(tuple(tile for _, tile in chosen))


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
    return [Columns(axis, given.cells.take(places, along).reshape(row_values.without_rows(out, axis)))]


def _rev(operation: Operation, given: Columns, loader: Loader) -> Columns:
    if given.axis in operation.parameters["dimensions"]:
        raise Unsupported("rev of the rows")
    return Columns(given.axis, np.flip(given.cells, operation.parameters["dimensions"]))


def _concatenate(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    axis, along = row_values.batch_axis(inputs), operation.parameters["dimension"]
    if axis == along:
        raise Unsupported("concatenate along the rows")
    if all(isinstance(x, Matrix) for x in inputs):
        tiles = tuple(tile for x in inputs if isinstance(x, Matrix) for tile in x.tiles)
        if [tile.shape[1] for tile in tiles] != [width for _, width in row_values.spans(operation.outputs[0].shape[1])]:
            raise Unsupported("concatenate of wide arrays whose tiles are not those of the result")
        return [Matrix(tiles)]
    row_values.check_small(row_values.without_rows(operation.outputs[0].shape, axis))
    return [Columns(axis, np.concatenate([row_values.cells_of(x, axis, loader) for x in inputs], along))]


def _pad(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    """Pad columns with a number, as in the derivative of a slice."""
    given, number = inputs
    if not isinstance(given, Columns) or not isinstance(number, Value):
        raise Unsupported("pad of a wide array, or with numbers of rows")
    config = operation.parameters["padding_config"]
    if tuple(config[given.axis]) != (0, 0, 0) or any(low < 0 or high < 0 or between for low, high, between in config):
        raise Unsupported("pad of the rows, by a negative number, or between columns")
    out = row_values.without_rows(operation.outputs[0].shape, given.axis)
    row_values.check_small(out)
    fill = jnp.broadcast_to(row_values.scalar_of(number, loader), (loader.block,))
    cells = row_values.filled(out, [fill] * math.prod(out))
    cells[tuple(slice(low, low + size) for (low, _, _), size in zip(config, given.cells.shape, strict=True))] = (
        given.cells
    )
    return [Columns(given.axis, cells)]


def _stack(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    axis, along = row_values.batch_axis(inputs), operation.parameters["axis"]
    after = axis + (along <= axis)
    row_values.check_small(row_values.without_rows(operation.outputs[0].shape, after))
    return [Columns(after, np.stack([row_values.cells_of(x, axis, loader) for x in inputs], along))]


def _unstack(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    (given,), along = inputs, operation.parameters["axis"]
    if not isinstance(given, Columns) or given.axis == along:
        raise Unsupported("unstack of the rows, or of a wide array")
    axis = given.axis - (along < given.axis)
    return [Columns(axis, given.cells.take(index, along)) for index in range(given.cells.shape[along])]


def _split(operation: Operation, inputs: Sequence[Given], loader: Loader) -> list[Block]:
    (given,), along = inputs, operation.parameters["axis"]
    ends = np.cumsum(operation.parameters["sizes"])[:-1]
    if isinstance(given, Matrix) and along == 1:
        bounds = [0, *map(int, ends), operation.inputs[0].shape[1]]
        return [_columns_of_matrix(given, begin, end) for begin, end in itertools.pairwise(bounds)]
    if not isinstance(given, Columns) or given.axis == along:
        raise Unsupported("split of the rows")
    return [Columns(given.axis, part) for part in np.split(given.cells, ends, along)]


SHAPE_RULES: dict[str, Rule] = {
    "copy": same,
    "copy_p": same,
    "stop_gradient": same,
    "broadcast_in_dim": _broadcast,
    "reshape": shaped(_reshape),
    "squeeze": shaped(_squeeze),
    "transpose": shaped(_transpose),
    "slice": shaped(_slice),
    "gather": _gather,
    "rev": shaped(_rev),
    "concatenate": _concatenate,
    "pad": _pad,
    "stack": _stack,
    "unstack": _unstack,
    "split": _split,
}
