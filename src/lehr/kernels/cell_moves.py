"""Rules that move numbers, and gather and scatter them; see `lehr.kernels.cells`."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from lehr.kernels.cell_arithmetic import (
    Rule,
    aligned,
    arithmetic,
    chosen,
    converted,
    entries,
    shared,
)
from lehr.kernels.cells import Cells, Graph, Node, filled
from lehr.kernels.equations import type_of
from lehr.kernels.row_program import Unsupported

MOST_CHOICES = 64
"""Entries among which a place that is not known chooses, at most."""


def _same(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    return list(inputs)


def _squeeze(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    (x,), gone = inputs, tuple(equation.params["dimensions"])
    return [Cells(without_axes(x.axis, gone), x.array.squeeze(gone))]


def without_axes(axis: int | None, gone: Sequence[int]) -> int | None:
    """The batch axis after other axes are gone."""
    if axis in gone:
        raise Unsupported("an operation over the rows")
    return None if axis is None else axis - sum(one < axis for one in gone)


def _broadcast(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    if len(inputs) != 1:
        raise Unsupported("a shape that is not static")
    (x,), places, shape = inputs, equation.params["broadcast_dimensions"], list(equation.params["shape"])
    axis = None if x.axis is None else int(places[x.axis])
    if axis is not None:
        shape[axis] = 1
    return [Cells(axis, broadcast_in_dim(x.array, shape, equation.params))]


def broadcast_in_dim(x: np.ndarray, shape: Sequence[int], parameters: dict[str, Any]) -> np.ndarray:
    """As XLA's operation of this name."""
    aligned = [1] * len(shape)
    for place, size in zip(parameters["broadcast_dimensions"], x.shape, strict=True):
        aligned[place] = size
    return np.broadcast_to(x.reshape(aligned), tuple(shape))


def _reshape(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    (x, *others), new = inputs, equation.params["new_sizes"]
    if others or equation.params.get("dimensions") is not None:
        raise Unsupported("reshape with a permutation")
    if x.axis is None:
        return [Cells(None, x.array.reshape(new))]
    before = math.prod(x.array.shape[: x.axis])
    for axis, size in enumerate(new):
        if size == graph.rows and math.prod(new[:axis]) == before:
            return [Cells(axis, x.array.reshape((*new[:axis], 1, *new[axis + 1 :])))]
    raise Unsupported("reshape of the rows")


def _transpose(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    (x,), order = inputs, [int(one) for one in equation.params["permutation"]]
    return [Cells(None if x.axis is None else order.index(x.axis), x.array.transpose(order))]


def slices_of(parameters: dict[str, Any]) -> tuple[slice, ...]:
    """The slices of XLA's operation, one for each axis."""
    begins, ends = parameters["start_indices"], parameters["limit_indices"]
    strides = parameters["strides"] or (1,) * len(begins)
    return tuple(slice(*part) for part in zip(begins, ends, strides, strict=True))


def _slice(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    (x,), places = inputs, list(slices_of(equation.params))
    if x.axis is not None:
        if places[x.axis] != slice(0, graph.rows, 1):
            raise Unsupported("a slice of the rows")
        places[x.axis] = slice(None)
    return [Cells(x.axis, x.array[tuple(places)])]


def _rev(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    (x,) = inputs
    without_axes(x.axis, equation.params["dimensions"])
    return [Cells(x.axis, np.flip(x.array, equation.params["dimensions"]))]


def _concatenate(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    axis, arrays = aligned(graph, inputs)
    without_axes(axis, (equation.params["dimension"],))
    return [Cells(axis, np.concatenate(list(map(as_objects, arrays)), equation.params["dimension"]))]


def as_objects(array: np.ndarray) -> np.ndarray:
    """The cells of an array as an array of Python objects."""
    return filled(array.shape, entries(array))


def _pad(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    x, number = inputs
    config = [tuple(one) for one in equation.params["padding_config"]]
    if any(low < 0 or high < 0 or between for low, high, between in config):
        raise Unsupported("pad by a negative number, or between columns")
    if number.axis is not None or (x.axis is not None and config[x.axis] != (0, 0, 0)):
        raise Unsupported("pad of the rows")
    shape = [low + size + high for (low, high, _), size in zip(config, x.array.shape, strict=True)]
    found = filled(tuple(shape), entries(number.array) * math.prod(shape))
    places = tuple(slice(low, low + size) for (low, _, _), size in zip(config, x.array.shape, strict=True))
    found[places] = as_objects(x.array)
    return [Cells(x.axis, found)]


def _stack(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    (axis, arrays), along = aligned(graph, inputs), equation.params["axis"]
    after = None if axis is None else axis + (along <= axis)
    return [Cells(after, np.stack(list(map(as_objects, arrays)), along))]


def _unstack(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    (x,), along = inputs, equation.params["axis"]
    axis = without_axes(x.axis, (along,))
    return [Cells(axis, x.array.take(index, along)) for index in range(x.array.shape[along])]


def _split(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    (x,), along = inputs, equation.params["axis"]
    without_axes(x.axis, (along,))
    ends = np.cumsum(equation.params["sizes"])[:-1]
    return [Cells(x.axis, part) for part in np.split(x.array, ends, along)]


def _tile(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    (x,), reps = inputs, tuple(equation.params["reps"])
    if x.axis is not None and reps[x.axis] != 1:
        raise Unsupported("tile of the rows")
    return [Cells(x.axis, np.tile(x.array, reps))]


def _dynamic_slice(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    x, *begins = inputs
    if not all(one.is_known for one in begins):
        raise Unsupported("a slice at a place that is not known")
    sizes = list(equation.params["slice_sizes"])
    if x.axis is not None:
        if sizes[x.axis] != graph.rows:
            raise Unsupported("a slice of the rows")
        sizes[x.axis] = 1
    places = [
        min(max(int(one.array), 0), whole - size) for one, size, whole in zip(begins, sizes, x.array.shape, strict=True)
    ]
    found = tuple(slice(place, place + size) for place, size in zip(places, sizes, strict=True))
    return [Cells(x.axis, x.array[found])]


# --- gathers and scatters at places that are known


def _gather(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    x, indices = inputs
    numbers, out = equation.params["dimension_numbers"], list(type_of(equation.outvars[0]).shape)
    sizes, array, begins = list(equation.params["slice_sizes"]), x.array, indices.array
    batch = [one for one in range(len(out)) if one not in numbers.offset_dims]
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    gone = {*numbers.collapsed_slice_dims, *paired}
    left = [one for one in range(array.ndim) if one not in gone]
    axis = None
    if indices.axis is not None:
        axis = batch[indices.axis]
        partners = [one for one, other in paired.items() if other == indices.axis]
        if x.axis is None and partners:
            array = shared(graph, x, partners[0])
        elif x.axis is not None and partners != [x.axis]:
            raise Unsupported("a gather of the rows")
    elif x.axis is not None and x.axis in paired:
        begins, axis = shared(graph, indices, paired[x.axis]), batch[paired[x.axis]]
    elif x.axis is not None:
        if x.axis not in left or x.axis in numbers.start_index_map or sizes[x.axis] != graph.rows:
            raise Unsupported("a gather of the rows")
        axis = numbers.offset_dims[left.index(x.axis)]
        sizes[x.axis] = 1
    if axis is not None:
        out[axis] = 1
    filling: Any = None
    if equation.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP:
        filling = np.asarray(equation.params["fill_value"]).astype(type_of(equation.outvars[0]).dtype)[()]
    found = []
    for place in np.ndindex(*out):
        where = [place[one] for one in batch]
        at = [0] * array.ndim
        for along, other in paired.items():
            at[along] = where[other]
        for one, along in zip(numbers.offset_dims, left, strict=True):
            at[along] = place[one]
        begin = begins[tuple(where)]
        starts = [
            (along, begin[number], array.shape[along] - sizes[along])
            for number, along in enumerate(numbers.start_index_map)
        ]
        found.append(_picked(graph, array, at, starts, filling))
    return [Cells(axis, filled(tuple(out), found))]


def _picked(graph: Graph, array: np.ndarray, at: list[int], starts: Sequence[Any], filling: Any) -> Any:
    """The entry at a place plus starts `(axis, start, limit)`; one that is not known chooses between all entries.

    Outside the array it is `filling`; if that is `None`, the nearest entry.
    """
    if not starts:
        entry = array[tuple(at)]
        return entry if array.dtype == object else entry.astype(array.dtype)
    (along, start, limit), *rest = starts

    def entry_at(begin: int) -> Any:
        return _picked(graph, array, [one + begin * (place == along) for place, one in enumerate(at)], rest, filling)

    if not isinstance(start, Node):
        if not 0 <= start <= limit and filling is not None:
            return filling
        return entry_at(min(max(int(start), 0), limit))
    if limit >= MOST_CHOICES:
        raise Unsupported(f"a gather at one of {limit + 1} places that are not known")
    found = entry_at(limit)
    for begin in reversed(range(limit)):
        is_here = arithmetic(graph, "le", start, np.asarray(begin, start.dtype)[()], dtype=np.bool_)
        found = chosen(graph, is_here, entry_at(begin), found)
    if filling is not None:
        for name, edge in (("lt", 0), ("gt", limit)):
            is_outside = arithmetic(graph, name, start, np.asarray(edge, start.dtype)[()], dtype=np.bool_)
            found = chosen(graph, is_outside, filling, found)
    return found


def _top(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    """The largest entries of the last axis, in order, and their indices; of equal entries, the first comes first."""
    (x,), count = inputs, equation.params["k"]
    along = equation.params.get("axis", x.array.ndim - 1) % x.array.ndim
    if x.axis == along:
        raise Unsupported("top_k of the rows")
    entries = np.moveaxis(as_objects(x.array), along, -1)
    if entries.shape[-1] > MOST_CHOICES:
        raise Unsupported(f"the largest of {entries.shape[-1]}")
    kind = type_of(equation.outvars[1]).dtype
    values, places = (np.empty((*entries.shape[:-1], count), object) for _ in range(2))
    for one in np.ndindex(*entries.shape[:-1]):
        row = entries[one]
        ranks = []
        for number, entry in enumerate(row):
            rank: Any = np.int32(0)
            for other, rival in enumerate(row):
                if other != number:
                    wins = arithmetic(graph, "ge" if other < number else "gt", rival, entry, dtype=np.bool_)
                    rank = arithmetic(graph, "add", rank, converted(graph, wins, np.dtype(np.int32)))
            ranks.append(rank)
        for number in range(count):
            value, place = row[-1], np.asarray(len(row) - 1, kind)[()]
            for index in reversed(range(len(row) - 1)):
                is_here = arithmetic(graph, "eq", ranks[index], np.int32(number), dtype=np.bool_)
                value = chosen(graph, is_here, row[index], value)
                place = chosen(graph, is_here, np.asarray(index, kind)[()], place)
            values[one][number], places[one][number] = value, place
    return [Cells(x.axis, np.moveaxis(part, -1, along)) for part in (values, places)]


def _scatter(combine: Callable[[Graph, Any, Any], Any]) -> Rule:
    def apply(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
        x, indices, updates = inputs
        numbers = equation.params["dimension_numbers"]
        paired = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
        if not indices.is_known or (x.axis is not None and x.axis in paired):
            raise Unsupported("a scatter at places that are not known")
        window = [one for one in range(x.array.ndim) if one not in (*numbers.inserted_window_dims, *paired)]
        # Both have rows, on axes that belong together; one of them may be known.
        if x.axis is None and updates.axis not in numbers.update_window_dims:
            raise Unsupported("a scatter over the rows")
        axis = x.axis if x.axis is not None else window[numbers.update_window_dims.index(updates.axis)]
        if axis not in window or axis in numbers.scatter_dims_to_operand_dims:
            raise Unsupported("a scatter over the rows")
        update_axis = numbers.update_window_dims[window.index(axis)]
        if updates.axis not in (None, update_axis):
            raise Unsupported("batch axes in different places")
        old = x.array if x.axis is not None else shared(graph, x, axis)
        new = updates.array if updates.axis is not None else shared(graph, updates, update_axis)
        found = as_objects(old)
        batch = [one for one in range(new.ndim) if one not in numbers.update_window_dims]
        drops = equation.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
        sizes = {along: new.shape[one] for one, along in zip(numbers.update_window_dims, window, strict=True)}
        for place in np.ndindex(*new.shape):
            where, at, is_inside = [place[one] for one in batch], [0] * old.ndim, True
            begin = indices.array[tuple(where)]
            for along, other in paired.items():
                at[along] = where[other]
            for number, along in enumerate(numbers.scatter_dims_to_operand_dims):
                limit = old.shape[along] - sizes.get(along, 1)
                is_inside &= bool(0 <= begin[number] <= limit)
                at[along] = min(max(int(begin[number]), 0), limit)
            for one, along in zip(numbers.update_window_dims, window, strict=True):
                at[along] += place[one]
            if is_inside or not drops:
                entry = new[place] if new.dtype == object else new[place].astype(new.dtype)
                found[tuple(at)] = combine(graph, found[tuple(at)], entry)
        return [Cells(axis, found)]

    return apply


MOVES: dict[str, Rule] = {
    "copy": _same,
    "copy_p": _same,
    "stop_gradient": _same,
    "optimization_barrier": _same,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "rev": _rev,
    "concatenate": _concatenate,
    "pad": _pad,
    "stack": _stack,
    "unstack": _unstack,
    "split": _split,
    "tile": _tile,
    "gather": _gather,
    "scatter": _scatter(lambda graph, old, new: new),
    **{
        f"scatter-{name}": _scatter(
            functools.partial(lambda name, graph, old, new: arithmetic(graph, name, old, new), name)
        )
        for name in ("add", "mul", "min", "max")
    },
    "top_k": _top,
}
