"""Rules for reductions, products and linear systems; see `lehr.kernels.cells`."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from lehr.kernels.cell_arithmetic import (
    Rule,
    aligned,
    arithmetic,
    dtype_of,
    is_number,
    shared,
)
from lehr.kernels.cell_moves import as_objects, without_axes
from lehr.kernels.cells import Cells, Graph, filled
from lehr.kernels.equations import type_of
from lehr.kernels.row_program import Unsupported


def _reduction(combine: str) -> Rule:
    def apply(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
        (x,), axes = inputs, tuple(equation.params["axes"])
        axis, cells = without_axes(x.axis, axes), as_objects(x.array)
        for along in sorted(axes, reverse=True):
            parts = [cells.take(index, along) for index in range(cells.shape[along])]
            cells = functools.reduce(lambda a, b: _paired(graph, combine, a, b), parts)
        return [Cells(axis, np.asarray(cells, object))]

    return apply


def _paired(graph: Graph, name: str, first: Any, second: Any) -> np.ndarray:
    first, second = np.asarray(first, object), np.asarray(second, object)
    pairs = zip(first.reshape(-1), second.reshape(-1), strict=True)
    return filled(first.shape, [arithmetic(graph, name, a, b) for a, b in pairs])


def _extreme(comparison: str) -> Rule:
    """The rule of argmax or argmin over one axis; the first of equal entries wins."""

    def apply(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
        (x,), (along,), kind = inputs, equation.params["axes"], equation.params["index_dtype"]
        axis = without_axes(x.axis, (along,))
        cells = as_objects(x.array)
        parts = [np.asarray(cells.take(index, along), object) for index in range(cells.shape[along])]
        found = []
        for entries in zip(*(part.reshape(-1) for part in parts), strict=True):
            best: Any = entries[0]
            where: Any = np.zeros((), kind)[()]
            for index, entry in enumerate(entries[1:], 1):
                wins = arithmetic(graph, comparison, entry, best, dtype=np.bool_)
                best = graph.node("select_n", (wins, best, entry), dtype_of(best))
                where = graph.node("select_n", (wins, where, np.asarray(index, kind)[()]), np.dtype(kind))
            found.append(where)
        return [Cells(axis, filled(parts[0].shape, found))]

    return apply


def _product(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    (over, batch), out = equation.params["dimension_numbers"], type_of(equation.outvars[0])
    if any(kind.dtype != np.float32 for kind in (*map(type_of, equation.invars), out)):
        raise Unsupported("a product of other numbers than float32")
    sides, axes = [], []
    for x, gone, together in zip(inputs, over, batch, strict=True):
        free = [one for one in range(x.array.ndim) if one not in (*gone, *together)]
        order = [*together, *free, *gone]
        if x.axis is not None and x.axis in gone:
            raise Unsupported("a product over the rows")
        axes.append(None if x.axis is None else ("together" if x.axis in together else "free", order.index(x.axis)))
        sides.append((x, order, len(together), len(free)))
    if axes[0] is not None and axes[1] is not None and (axes[0][0], axes[1][0]) != ("together", "together"):
        raise Unsupported("a product of all rows with each other")
    arrays = []
    shared_axis = next((one[1] for one in axes if one is not None and one[0] == "together"), None)
    for x, order, _, _ in sides:
        array = as_objects(x.array.transpose(order))
        if shared_axis is not None and x.axis is None and array.shape[shared_axis] != 1:
            array = as_objects(shared(graph, Cells(None, array), shared_axis))
        arrays.append(array)
    count, terms = sides[0][2], math.prod(arrays[0].shape[sides[0][2] + sides[0][3] :])
    lead = np.broadcast_shapes(arrays[0].shape[:count], arrays[1].shape[:count])
    frees = [array.shape[count : count + side[3]] for array, side in zip(arrays, sides, strict=True)]
    first, second = (
        np.broadcast_to(
            array.reshape(*array.shape[:count], math.prod(free), terms), (*lead, math.prod(free), terms)
        ).reshape(math.prod(lead), math.prod(free), terms)
        for array, free in zip(arrays, frees, strict=True)
    )
    found = [
        _dot(graph, first[one, row], second[one, column])
        for one, row, column in itertools.product(range(len(first)), range(first.shape[1]), range(second.shape[1]))
    ]
    axis = None
    for number, one in enumerate(axes):
        if one is not None:
            axis = one[1] + (len(frees[0]) if number == 1 and one[0] == "free" else 0)
    return [Cells(axis, filled((*lead, *frees[0], *frees[1]), found))]


def _dot(graph: Graph, first: Any, second: Any) -> Any:
    """The sum of products; terms with a factor that is known to be 0 are left out."""
    terms = [
        arithmetic(graph, "mul", a, b)
        for a, b in zip(first, second, strict=True)
        if not (is_number(a, 0) or is_number(b, 0))
    ]
    if not terms:
        return np.float32(0)
    return functools.reduce(lambda a, b: arithmetic(graph, "add", a, b), terms)


def _matrices(cells: Cells) -> tuple[int | None, np.ndarray]:
    """Small matrices `[..., n, m]`, and their batch axis, which must come before the last two."""
    if cells.axis is not None and cells.axis >= cells.array.ndim - 2:
        raise Unsupported("matrices over the rows")
    return cells.axis, as_objects(cells.array)


def _cholesky(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    """The lower triangular L with L Lᵀ = A; of A, only the lower triangle is read."""
    axis, matrices = _matrices(inputs[0])
    found = np.full(matrices.shape, np.float32(0), object)
    size = matrices.shape[-1]
    for one in np.ndindex(*matrices.shape[:-2]):
        lower = found[one]
        for column in range(size):
            for row in range(column, size):
                rest = _less_products(graph, matrices[one][row, column], lower[row, :column], lower[column, :column])
                if row == column:
                    lower[row, row] = arithmetic(graph, "sqrt", rest)
                else:
                    lower[row, column] = arithmetic(graph, "div", rest, lower[column, column])
    return [Cells(axis, found)]


def _less_products(graph: Graph, start: Any, first: Any, second: Any) -> Any:
    """The number, minus the sum of products."""
    for a, b in zip(first, second, strict=True):
        start = arithmetic(graph, "sub", start, arithmetic(graph, "mul", a, b))
    return start


def _triangular_solve(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    """Solve A X = B, or X A = B, for a triangular A."""
    parameters = equation.params
    if parameters["conjugate_a"] and type_of(equation.outvars[0]).dtype != np.float32:
        raise Unsupported("complex numbers")
    axis, _ = aligned(graph, [Cells(x.axis, np.zeros((1,) * x.array.ndim)) for x in inputs])
    matrices, sides = (
        as_objects(x.array if x.axis is not None or axis is None else shared(graph, x, axis)) for x in inputs
    )
    if axis is not None and axis >= matrices.ndim - 2:
        raise Unsupported("matrices over the rows")
    is_lower = parameters["lower"]
    if parameters["transpose_a"] == parameters["left_side"]:  # X A = B is Aᵀ Xᵀ = Bᵀ
        matrices, is_lower = matrices.swapaxes(-1, -2), not is_lower
    if not parameters["left_side"]:
        sides = sides.swapaxes(-1, -2)
    lead = np.broadcast_shapes(matrices.shape[:-2], sides.shape[:-2])
    matrices = np.broadcast_to(matrices, (*lead, *matrices.shape[-2:]))
    sides = np.broadcast_to(sides, (*lead, *sides.shape[-2:]))
    found, size = np.empty(sides.shape, object), matrices.shape[-1]
    for one in np.ndindex(*lead):
        matrix, solution = matrices[one], found[one]
        for column in range(sides.shape[-1]):
            for row in range(size) if is_lower else reversed(range(size)):
                before = slice(0, row) if is_lower else slice(row + 1, size)
                rest = _less_products(graph, sides[one][row, column], matrix[row, before], solution[before, column])
                is_unit = parameters["unit_diagonal"]
                solution[row, column] = rest if is_unit else arithmetic(graph, "div", rest, matrix[row, row])
    return [Cells(axis, found if parameters["left_side"] else found.swapaxes(-1, -2))]


def _cumulative(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    (x,), along = inputs, equation.params["axis"]
    without_axes(x.axis, (along,))
    array = as_objects(x.array)
    parts = [array.take([index], along) for index in range(array.shape[along])]
    if equation.params["reverse"]:
        parts.reverse()
    sums = list(itertools.accumulate(parts, lambda a, b: _paired(graph, "add", a, b)))
    if equation.params["reverse"]:
        sums.reverse()
    return [Cells(x.axis, np.concatenate(sums, along))]


SUMS: dict[str, Rule] = {
    "reduce_sum": _reduction("add"),
    "reduce_max": _reduction("max"),
    "reduce_min": _reduction("min"),
    "reduce_and": _reduction("and"),
    "reduce_or": _reduction("or"),
    "reduce_prod": _reduction("mul"),
    "argmax": _extreme("gt"),
    "argmin": _extreme("lt"),
    "cumsum": _cumulative,
    "dot_general": _product,
    "cholesky": _cholesky,
    "triangular_solve": _triangular_solve,
}
