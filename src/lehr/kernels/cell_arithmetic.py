"""Rules that evaluate arithmetic on each number; see `lehr.kernels.cells`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from lehr.kernels.cells import Cells, Graph, Node, filled
from lehr.kernels.equations import BY_NUMPY, type_of
from lehr.kernels.row_program import Unsupported

Rule = Callable[[Graph, JaxprEqn, Sequence[Cells]], list[Cells]]
"""Evaluates an equation on its inputs."""

_NAMES = """
    abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil convert_element_type cos cosh div eq erf_inv exp exp2
    expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg nextafter not or pow rem rsqrt
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor
"""
ELEMENTWISE = frozenset(_NAMES.split())
"""Operations that are applied to each number by themselves."""


def aligned(graph: Graph, inputs: Sequence[Cells]) -> tuple[int | None, list[np.ndarray]]:
    """The batch axis that the inputs have in common, and their arrays with size 1 there."""
    axes = {x.axis for x in inputs if x.axis is not None}
    if len(axes) > 1:
        raise Unsupported("batch axes in different places")
    axis = axes.pop() if axes else None
    return axis, [x.array if axis is None or x.axis is not None else shared(graph, x, axis) for x in inputs]


def shared(graph: Graph, cells: Cells, axis: int) -> np.ndarray:
    """An array that all rows share, with size 1 on the axis where others have rows."""
    array = cells.array
    if array.ndim == 0 or array.shape[axis] == 1:
        return array
    first = array.take([0], axis)
    if array.strides[axis] != 0 and not (array == first).all():
        raise Unsupported("an array whose rows differ and are known")
    return first


def elementwise(graph: Graph, function: Callable[..., Any], inputs: Sequence[Cells]) -> Cells:
    """Apply a function to every number of aligned inputs."""
    axis, arrays = aligned(graph, inputs)
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    parts = [np.broadcast_to(x, shape) for x in arrays]
    return Cells(axis, filled(shape, [function(*cells) for cells in zip(*(entries(x) for x in parts), strict=True)]))


def entries(array: np.ndarray) -> list[Any]:
    """All entries; of an ordinary array, NumPy scalars."""
    return list(array.astype(array.dtype).reshape(-1)) if array.dtype != object else list(array.reshape(-1))


def operation(graph: Graph, equation: JaxprEqn, *cells: Any) -> Any:
    """Make the node of an elementwise operation, or its value if that is known."""
    name, parameters = equation.primitive.name, equation.params
    dtype = type_of(equation.outvars[0]).dtype
    if name == "convert_element_type":
        return converted(graph, cells[0], dtype)
    if name == "integer_pow":
        return _power(graph, cells[0], parameters["y"])
    if name == "square":
        return arithmetic(graph, "mul", cells[0], cells[0])
    return arithmetic(graph, name, *cells, dtype=dtype)


def arithmetic(graph: Graph, name: str, *cells: Any, dtype: Any = None) -> Any:
    """Make the node of an operation, simplified where that changes no result.

    A product with 0 is 0, even if the other factor is not finite, and the sign of a 0 may differ.
    """
    dtype = dtype_of(cells[0]) if dtype is None else dtype
    if not any(isinstance(x, Node) for x in cells):
        return np.asarray(_SCALARS[name](*cells), dtype)[()] if name in _SCALARS else graph.node(name, cells, dtype)
    if name == "mul" and any(is_number(x, 0) for x in cells):
        return np.asarray(0, dtype)[()]
    if name == "sub" and is_number(cells[0], 0):
        return graph.node("neg", cells[1:], dtype)
    if name in _NEUTRAL:
        first, second = cells
        neutral, is_commutative = _NEUTRAL[name]
        if is_number(second, neutral):
            return first
        if is_commutative and is_number(first, neutral):
            return second
        if is_commutative and not isinstance(first, Node):
            cells = second, first
    return graph.node(name, cells, dtype)


def is_number(cell: Any, number: float) -> bool:
    """Whether a cell is known to be this number."""
    return not isinstance(cell, Node) and bool(cell == number)


def dtype_of(cell: Any) -> Any:
    """The dtype of a cell."""
    return cell.dtype


_NEUTRAL = {"add": (0, True), "sub": (0, False), "mul": (1, True), "div": (1, False)}
"""The number that changes nothing, and whether the order of the operands matters."""

_SCALARS: dict[str, Callable[..., Any]] = {
    **BY_NUMPY,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "sign": np.sign,
    "sin": np.sin,
    "cos": np.cos,
}


def converted(graph: Graph, cell: Any, dtype: Any) -> Any:
    """Return a cell as another dtype."""
    if cell.dtype == dtype:
        return cell
    if not isinstance(cell, Node):
        return cell.astype(dtype)
    return graph.node("convert_element_type", (cell,), dtype)


def _power(graph: Graph, cell: Any, power: int) -> Any:
    if power <= 0:
        raise Unsupported(f"a power of {power}")
    found, squared = None, cell
    while power:
        if power & 1:
            found = squared if found is None else arithmetic(graph, "mul", found, squared)
        power >>= 1
        if power:
            squared = arithmetic(graph, "mul", squared, squared)
    return found


def _select(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    def one(which: Any, *cases: Any) -> Any:
        if not isinstance(which, Node):
            return cases[int(which)]
        if which.dtype == np.bool_:
            return chosen(graph, which, cases[1], cases[0])
        found = cases[-1]
        for number in reversed(range(len(cases) - 1)):
            is_here = arithmetic(graph, "le", which, np.asarray(number, which.dtype)[()], dtype=np.bool_)
            found = chosen(graph, is_here, cases[number], found)
        return found

    return [elementwise(graph, one, inputs)]


def _clamp(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    def one(low: Any, x: Any, high: Any) -> Any:
        return arithmetic(graph, "min", arithmetic(graph, "max", x, low), high)

    return [elementwise(graph, one, inputs)]


def chosen(graph: Graph, which: Any, yes: Any, no: Any) -> Any:
    """Return one of two cells, by a condition that may be known."""
    if not isinstance(which, Node):
        return yes if which else no
    return yes if is_equal(yes, no) else graph.node("select_n", (which, no, yes), dtype_of(yes))


def is_equal(first: Any, second: Any) -> bool:
    """Whether two cells are known to be the same."""
    if isinstance(first, Node) or isinstance(second, Node):
        return first is second
    return first.dtype == second.dtype and first.tobytes() == second.tobytes()


ARITHMETIC: dict[str, Rule] = {
    "select_n": _select,
    "clamp": _clamp,
}
