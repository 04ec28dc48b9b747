"""Rules that evaluate operations on cells; see `lehr.kernels.cells`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from lehr.kernels.cell_arithmetic import (
    ARITHMETIC,
    ELEMENTWISE,
    Rule,
    aligned,
    chosen,
    elementwise,
    entries,
    is_equal,
    operation,
    shared,
)
from lehr.kernels.cell_moves import MOVES, as_objects, broadcast_in_dim, slices_of, without_axes
from lehr.kernels.cell_sums import SUMS
from lehr.kernels.cells import MOST_UNROLLED, Cells, Graph, Loop, filled, read
from lehr.kernels.equations import scan_counts, type_of
from lehr.kernels.row_program import Unsupported


def evaluate(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    """Evaluate an equation other than a call."""
    name = equation.primitive.name
    if name not in _LOOPS and all(x.is_known for x in inputs):
        return _at_once(equation, [x.array for x in inputs])
    if name in RULES:
        return RULES[name](graph, equation, inputs)
    if name in ELEMENTWISE:
        return [elementwise(graph, functools.partial(operation, graph, equation), inputs)]
    raise Unsupported(name)


def _at_once(equation: JaxprEqn, arrays: Sequence[np.ndarray]) -> list[Cells]:
    """Evaluate an equation whose inputs are known."""
    name, parameters = equation.primitive.name, equation.params
    if name in _NUMPY:
        found = [_NUMPY[name](parameters, *arrays)]
    else:
        with jax.ensure_compile_time_eval(), equation.ctx.manager:
            bound = equation.primitive.bind(*arrays, **equation.primitive.get_bind_params(parameters))
        found = [np.asarray(x) for x in (bound if equation.primitive.multiple_results else [bound])]
    kinds = [type_of(one) for one in equation.outvars]
    return [Cells(None, x if x.dtype == k.dtype else x.astype(k.dtype)) for x, k in zip(found, kinds, strict=True)]


_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda _, a, b: np.add(a, b),
    "sub": lambda _, a, b: np.subtract(a, b),
    "mul": lambda _, a, b: np.multiply(a, b),
    "neg": lambda _, a: np.negative(a),
    "lt": lambda _, a, b: np.less(a, b),
    "le": lambda _, a, b: np.less_equal(a, b),
    "gt": lambda _, a, b: np.greater(a, b),
    "ge": lambda _, a, b: np.greater_equal(a, b),
    "eq": lambda _, a, b: np.equal(a, b),
    "ne": lambda _, a, b: np.not_equal(a, b),
    "max": lambda _, a, b: np.maximum(a, b),
    "min": lambda _, a, b: np.minimum(a, b),
    "select_n": lambda _, which, *cases: np.choose(which.astype(int), cases),
    "convert_element_type": lambda parameters, x: x.astype(parameters["new_dtype"]),
    "iota": lambda parameters: np.broadcast_to(
        np.arange(parameters["shape"][parameters["dimension"]], dtype=parameters["dtype"]).reshape(
            [-1 if one == parameters["dimension"] else 1 for one in range(len(parameters["shape"]))]
        ),
        parameters["shape"],
    ),
    "concatenate": lambda parameters, *parts: np.concatenate(parts, parameters["dimension"]),
    "squeeze": lambda parameters, x: np.squeeze(x, tuple(parameters["dimensions"])),
    "reshape": lambda parameters, x: x.reshape(parameters["new_sizes"]),
    "transpose": lambda parameters, x: x.transpose(parameters["permutation"]),
    "slice": lambda parameters, x: x[slices_of(parameters)],
    "broadcast_in_dim": lambda parameters, x: broadcast_in_dim(x, parameters["shape"], parameters),
    "copy": lambda _, x: x,
    "copy_p": lambda _, x: x,
    "stop_gradient": lambda _, x: x,
}
"""Frequent operations, which NumPy evaluates faster than JAX compiles them."""


# --- branches and loops


def _branch(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    which, *arguments = inputs
    branches = equation.params["branches"]
    if platforms := equation.params.get("branches_platforms"):
        chosen = next(one for one, names in enumerate(platforms) if names is None or "cuda" in names)
        return read(graph, branches[chosen], arguments, evaluate)
    if not which.is_known:
        raise Unsupported("a branch that is not known")
    return read(graph, branches[min(max(int(which.array), 0), len(branches) - 1)], arguments, evaluate)


def _scan(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    parameters, body = equation.params, equation.params["jaxpr"]
    if (counts := scan_counts(parameters)) is None:
        raise Unsupported("a scan of an unknown kind")
    consts, carries = counts
    fixed, carry, rows = inputs[:consts], list(inputs[consts : consts + carries]), inputs[consts + carries :]
    length, is_plain = parameters["length"], not rows and len(body.jaxpr.outvars) == carries
    if is_plain and length > 1:
        return _loop(graph, functools.partial(_stepped, graph, body, fixed), carry, length)
    if length > MOST_UNROLLED or any(x.axis == 0 for x in rows):
        raise Unsupported(f"a loop of {length} steps with rows")
    outputs: list[list[Cells]] = []
    numbers = range(length)
    for number in reversed(numbers) if parameters["reverse"] else numbers:
        row = [Cells(without_axes(x.axis, (0,)), x.array[number]) for x in rows]
        found = read(graph, body, [*fixed, *carry, *row], evaluate)
        carry = found[:carries]
        outputs.append(found[carries:])
    if parameters["reverse"]:
        outputs.reverse()
    stacked = []
    for parts in zip(*outputs, strict=True):
        axis, arrays = aligned(graph, parts)
        stacked.append(Cells(None if axis is None else axis + 1, np.stack(list(map(as_objects, arrays)))))
    return [*carry, *stacked]


def _while(graph: Graph, equation: JaxprEqn, inputs: Sequence[Cells]) -> list[Cells]:
    """A loop that goes on until it is done in all rows; rows that are done stay as they are."""
    parameters = equation.params
    first, second = parameters["cond_nconsts"], parameters["cond_nconsts"] + parameters["body_nconsts"]
    asked, fixed, carry = inputs[:first], inputs[first:second], inputs[second:]

    def asks(carry: Sequence[Cells]) -> Cells:
        (found,) = read(graph, parameters["cond_jaxpr"], [*asked, *carry], evaluate)
        if found.array.size != 1:
            raise Unsupported("a loop with a condition that is no single number")
        return found

    def step(carry: Sequence[Cells]) -> list[Cells]:
        goes_on, after = asks(carry), read(graph, parameters["body_jaxpr"], [*fixed, *carry], evaluate)
        if goes_on.axis is None:
            return after
        (which,) = entries(goes_on.array)
        return [_kept_where_done(graph, which, old, new) for old, new in zip(carry, after, strict=True)]

    return _loop(graph, step, carry, None, lambda carry: entries(asks(carry).array)[0])


def _kept_where_done(graph: Graph, goes_on: Any, old: Cells, new: Cells) -> Cells:
    axis, (before, after) = aligned(graph, [old, new])
    if axis is None:
        raise Unsupported("a loop that carries a number without rows")
    pairs = zip(entries(np.broadcast_to(before, after.shape)), entries(after), strict=True)
    return Cells(axis, filled(after.shape, [chosen(graph, goes_on, b, a) for a, b in pairs]))


def _stepped(graph: Graph, body: Any, fixed: Sequence[Cells], carry: Sequence[Cells]) -> list[Cells]:
    return read(graph, body, [*fixed, *carry], evaluate)


def _loop(
    graph: Graph,
    step: Callable[[Sequence[Cells]], list[Cells]],
    carry: Sequence[Cells],
    length: int | None,
    condition: Callable[[Sequence[Cells]], Any] = lambda carry: None,
) -> list[Cells]:
    """A loop that carries all numbers which a step changes."""
    graph.depth += 1
    carry = [_with_rows(graph, x) for x in carry]
    depth, axes = graph.depth, [x.axis for x in carry]
    start = [as_objects(x.array) for x in carry]
    changes = [np.zeros(x.shape, bool) for x in start]
    while True:  # what a step does not change is known to be the same in all steps
        carried = [
            filled(
                x.shape,
                [
                    graph.fresh("carried", cell.dtype, (), depth) if changed else cell
                    for cell, changed in zip(x.reshape(-1), where.reshape(-1), strict=True)
                ],
            )
            for x, where in zip(start, changes, strict=True)
        ]
        found = step([Cells(axis, x) for axis, x in zip(axes, carried, strict=True)])
        if any(axis is not None and after.axis not in (None, axis) for axis, after in zip(axes, found, strict=True)):
            raise Unsupported("a loop that moves the rows")
        more = [axis if axis is not None else after.axis for axis, after in zip(axes, found, strict=True)]
        if more != axes:  # a start that all rows share
            start = [
                x if old == new or new is None else as_objects(shared(graph, Cells(None, x), new))
                for x, old, new in zip(start, axes, more, strict=True)
            ]
            changes = [np.zeros(x.shape, bool) for x in start]
            axes = more
            continue
        after = [
            as_objects(x.array if x.axis is not None or axis is None else shared(graph, x, axis))
            for x, axis in zip(found, axes, strict=True)
        ]
        fresh = [
            np.array([not is_equal(a, b) for a, b in zip(x.reshape(-1), y.reshape(-1), strict=True)], bool).reshape(
                x.shape
            )
            for x, y in zip(carried, after, strict=True)
        ]
        if not any((new & ~old).any() for new, old in zip(fresh, changes, strict=True)):
            break
        changes = [old | new for old, new in zip(changes, fresh, strict=True)]
    places = [
        (number, place) for number, where in enumerate(changes) for place in np.ndindex(*where.shape) if where[place]
    ]
    loop = Loop(
        length,
        condition([Cells(axis, x) for axis, x in zip(axes, carried, strict=True)]),
        [start[number][place] for number, place in places],
        [carried[number].item(*place) for number, place in places],
        [after[number][place] for number, place in places],
        depth,
    )
    graph.depth -= 1
    last = [x.copy() for x in start]
    for index, (number, place) in enumerate(places):
        last[number][place] = graph.after_loop(loop, index)
    return [Cells(axis, x) for axis, x in zip(axes, last, strict=True)]


def _with_rows(graph: Graph, cells: Cells) -> Cells:
    """A carry that is known and the same for all rows, such as a counter, as one with a batch axis."""
    array = cells.array
    if not cells.is_known or array.shape[:1] != (graph.rows,) or not (array == array[:1]).all():
        return cells
    return Cells(0, as_objects(array[:1]))


_LOOPS = frozenset({"scan", "while", "cond", "platform_index"})

RULES: dict[str, Rule] = {
    **ARITHMETIC,
    **MOVES,
    **SUMS,
    "cond": _branch,
    "platform_index": lambda graph, equation, inputs: [Cells(None, np.zeros((), np.int32))],
    "scan": _scan,
    "while": _while,
}
