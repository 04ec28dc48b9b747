"""Programs on rows as programs on numbers: each array with one row per environment is taken apart into its columns.

The physics of one environment is a long list of operations on tiny arrays: vectors, quaternions, 3 × 3 matrices. Here a
batched program is read into a graph whose nodes are single numbers of one environment. Slices, gathers and
concatenations disappear, what is known while tracing is computed, and equal numbers are computed once. See
`lehr.kernels.row_step` for the GPU kernel that evaluates the graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from lehr.kernels.row_program import CALLS, Unsupported

MOST_NODES = 200_000
"""Longer programs are left to the compiler."""

MOST_UNROLLED = 64
"""Steps of a loop that is unrolled, because each of its steps is given something else."""

MOST_CONST = 2**14
"""Entries of an array that is known while tracing."""


class Node:
    """A number of each row: an operation on others, an input, or a number that a loop carries or returns."""

    __slots__ = ("dtype", "inputs", "name", "parameters", "scope")

    def __init__(self, name: str, inputs: tuple[Any, ...], dtype: Any, parameters: Any, scope: int) -> None:
        self.name, self.inputs, self.dtype, self.parameters = name, inputs, dtype, parameters
        self.scope = scope
        """The depth of the innermost loop that it depends on."""


@dataclass(eq=False)
class Loop:
    """A loop over steps, in which the numbers `carried` become `after`."""

    length: int | None
    """The number of steps; `None` if a condition decides."""
    condition: Any
    """The loop goes on as long as this holds for any row."""
    start: list[Any]
    carried: list[Node]
    after: list[Any]
    depth: int


@dataclass(frozen=True)
class Cells:
    """An array of numbers."""

    axis: int | None
    """The batch axis, on which `array` has size 1; `None` if all rows share the array."""
    array: np.ndarray
    """Of `Node`s and NumPy scalars, dtype object; or, if everything is known, an ordinary array."""

    @property
    def is_known(self) -> bool:
        """Whether all entries are known while tracing."""
        return self.axis is None and self.array.dtype != object


class Graph:
    """Makes nodes; equal ones are made once."""

    def __init__(self, rows: int) -> None:
        self.rows, self.depth = rows, 0
        self._made: dict[Any, Node] = {}

    def node(self, name: str, inputs: Sequence[Any], dtype: Any, parameters: Any = ()) -> Node:
        """Make a node, or find the one that is equal."""
        key = (name, parameters, np.dtype(dtype).str, *(_identity(x) for x in inputs))
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= MOST_NODES:
                raise Unsupported(f"more than {MOST_NODES} operations")
            scope = max((x.scope for x in inputs if isinstance(x, Node)), default=0)
            found = self._made[key] = Node(name, tuple(inputs), np.dtype(dtype), parameters, scope)
        return found

    def fresh(self, name: str, dtype: Any, parameters: Any, scope: int) -> Node:
        """Make a node that equals no other."""
        return Node(name, (), np.dtype(dtype), parameters, scope)

    def inputs(self, number: int, shape: tuple[int, ...], dtype: Any) -> Cells:
        """The cells of an argument `[N, ...]`."""
        whole = (1, *shape[1:])
        nodes = [self.node("input", (), dtype, (number, place)) for place in range(int(np.prod(whole)))]
        return Cells(0, filled(whole, nodes))

    def after_loop(self, loop: Loop, index: int) -> Node:
        """A number that a loop carries, after its last step."""
        key = ("after", id(loop), index)
        if key not in self._made:
            self._made[key] = Node("after", (), loop.carried[index].dtype, (loop, index), loop.depth - 1)
        return self._made[key]


def _identity(x: Any) -> Any:
    return id(x) if isinstance(x, Node) else (x.dtype.str, x.tobytes())


def filled(shape: tuple[int, ...], items: Sequence[Any]) -> np.ndarray:
    """An array of objects; NumPy would look into them if it were given the list."""
    found = np.empty(len(items), object)
    for index, item in enumerate(items):
        found[index] = item
    return found.reshape(shape)


def read(
    graph: Graph, closed: ClosedJaxpr, arguments: Sequence[Cells], rules: Callable[..., list[Cells]]
) -> list[Cells]:
    """Evaluate a program on cells.

    Args:
        graph: makes the nodes.
        closed: the program.
        arguments: its arguments.
        rules: `(graph, equation, inputs) -> outputs` for all that is not a call.
    """
    values: dict[Any, Cells] = dict(zip(closed.jaxpr.invars, arguments, strict=True))
    for variable, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        values[variable] = known(const)

    def of(variable: Any) -> Cells:
        if isinstance(variable, Literal):
            return known(np.asarray(variable.val, getattr(variable.aval, "dtype", None)))
        return values[variable]

    for equation in closed.jaxpr.eqns:
        inputs, name = [of(variable) for variable in equation.invars], equation.primitive.name
        if name in CALLS:
            called = equation.params[CALLS[name]]
            called = called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ())
            outputs = read(graph, called, inputs, rules)
        else:
            outputs = rules(graph, equation, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [of(variable) for variable in closed.jaxpr.outvars]


def known(const: Any) -> Cells:
    """The cells of an array that is known while tracing."""
    if isinstance(const, jax.core.Tracer):
        raise Unsupported("an array from outside that is not known")
    if jax.dtypes.issubdtype(getattr(const, "dtype", np.float32), jax.dtypes.extended):
        raise Unsupported("a random key")
    if const.size > MOST_CONST:
        raise Unsupported(f"a constant of shape {const.shape}")
    return Cells(None, np.asarray(const))
