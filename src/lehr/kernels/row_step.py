"""A step of many environments as one GPU kernel: each thread takes one environment through the whole step.

In plain JAX a step of rigid-body physics is hundreds of small kernels, one after the other, and launching them takes
longer than their work. Here a program of 128 threads takes 128 environments through a step, with all its substeps, and
keeps their states in registers. Between steps, the states of all environments are one array whose last axis is the
environment, so that threads read and write next to each other. See `lehr.kernels.cells` for how a step is taken apart
into numbers.

The kernel is written in Pallas for Mosaic GPU, whose compile time grows with the length of the program; that of Triton
grows with its square. Mosaic GPU needs a GPU of the Hopper generation or later.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval

from lehr.kernels import lowered
from lehr.kernels.cell_rules import evaluate
from lehr.kernels.cells import Cells, Graph, Loop, Node, read
from lehr.kernels.mlp_programs import pl
from lehr.kernels.row_program import Unsupported
from lehr.types import PyTree

HOPPER = (9, 0)
"""The first compute capability with what the kernel needs."""
BLOCK = 128
"""Rows per program, one for each thread of a warpgroup."""
LEAST_ROWS = 512
"""Minimum number of rows for which the kernel is used."""
LEAST_NODES = 500
"""Shorter steps are left to the compiler, which fuses them well by itself."""
CONDITIONAL_LOOPS = False
"""Whether a step may have loops whose length depends on the state, as MJX's solver has; not yet tried on a GPU."""
INTERPRET = False
"""Evaluate the same program in plain JAX, on any device, for tests."""

DTYPES = frozenset(map(jnp.dtype, ["float32", "int32", "uint32", "bool", "int8", "uint8", "int16", "uint16"]))


def is_able() -> bool:
    """Whether JAX has Pallas's Mosaic GPU backend, and a GPU that it supports."""
    return INTERPRET or (jax.default_backend() == "gpu" and lowered.capability() >= HOPPER and _mosaic() is not None)


@functools.cache
def _mosaic() -> Any:
    """Pallas's backend, imported on first use: it is slow to import."""
    try:
        return importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    except ImportError:  # an older JAX, or one without this backend
        return None


def fits(kept: PyTree, action: PyTree) -> bool:
    """Whether all arrays have the same number of rows, and enough of them."""
    leaves = jax.tree.leaves((kept, action))
    if not leaves or any(not leaf.ndim or leaf.shape[0] != leaves[0].shape[0] for leaf in leaves):
        return False
    rows = leaves[0].shape[0]
    return rows >= LEAST_ROWS and rows % BLOCK == 0 and all(leaf.dtype in DTYPES for leaf in leaves)


@dataclass(frozen=True)
class Stepper:
    """A step, and the form in which it keeps the states of all environments from one step to the next."""

    pack: Callable[[PyTree], PyTree]
    unpack: Callable[[PyTree], PyTree]
    step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    """A packed state and an action, to the next packed state and what is seen of it."""


def stepper(function: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], kept: PyTree, action: PyTree) -> Stepper:
    """Return the kernel of a step that treats all rows alike; raise `Unsupported` if it cannot be one.

    Args:
        function: a state and an action, to the next state and what is seen of it; leaves `[N, ...]`.
        kept: the shapes of a state.
        action: the shapes of an action.
    """
    kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves((kept, action))]
    structure = jax.tree.structure((kept, action))
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(structure, kinds))
    if closed.jaxpr.effects:
        raise Unsupported("side effects")
    eliminate = getattr(partial_eval, "dce_jaxpr", None)
    if eliminate is not None:  # what nothing needs may have no rule
        used, _ = eliminate(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
        closed = ClosedJaxpr(used, closed.consts)
    if not CONDITIONAL_LOOPS and "while[" in str(closed.jaxpr):
        raise Unsupported("a loop with a condition")
    after, seen = shape
    count = len(jax.tree.leaves(kept))
    if [(x.shape, x.dtype) for x in jax.tree.leaves(after)] != [(x.shape, x.dtype) for x in kinds[:count]]:
        raise Unsupported("a state that changes its type")
    rows = kinds[0].shape[0]
    if any(x.shape[:1] != (rows,) or x.dtype not in DTYPES for x in jax.tree.leaves(seen)):
        raise Unsupported("a result without rows, or of another type than 32-bit numbers and small integers")
    # What no step changes, such as the state to reset to, is packed apart.
    graph = Graph(rows)
    arguments = [graph.inputs(number, x.shape, x.dtype) for number, x in enumerate(kinds)]
    results = read(graph, closed, arguments, evaluate)
    moves = [not _is_same(old, new) for old, new in zip(arguments[:count], results[:count], strict=True)]
    moving = [number for number in range(count) if moves[number]]
    fixed = [number for number in range(count) if not moves[number]]
    states, resets = (_Layout([kinds[number] for number in part]) for part in (moving, fixed))
    actions, views = _Layout(kinds[count:]), _Layout(jax.tree.leaves(seen))
    inputs = _placed([(moving, states), (fixed, resets), (range(count, len(kinds)), actions)])
    outputs = _placed([(moving, states), (range(count, len(results)), views)])
    kernel = _Kernel(graph.rows, inputs, results, outputs, [*states.packed, *views.packed])

    def pack(kept: PyTree) -> tuple[list[jax.Array], list[jax.Array]]:
        leaves = jax.tree.leaves(kept)
        return states.pack([leaves[number] for number in moving]), resets.pack([leaves[number] for number in fixed])

    def unpack(packed: tuple[list[jax.Array], list[jax.Array]]) -> PyTree:
        leaves = dict(zip([*moving, *fixed], [*states.unpack(packed[0]), *resets.unpack(packed[1])], strict=True))
        return jax.tree.unflatten(jax.tree.structure(kept), [leaves[number] for number in range(count)])

    def plain(*packed: jax.Array) -> list[jax.Array]:
        first, second = len(states.groups), len(states.groups) + len(resets.groups)
        acted = jax.tree.unflatten(jax.tree.structure(action), actions.unpack(packed[second:]))
        state, found = function(unpack((list(packed[:first]), list(packed[first:second]))), acted)
        return [*pack(state)[0], *views.pack(jax.tree.leaves(found))]

    if not INTERPRET:
        given = [*states.packed, *resets.packed, *actions.packed]
        lowered.check(f"row_step {closed.jaxpr}", lambda *arrays: kernel.run(arrays), *given, compiles=True)

    @jax.jit
    def run(*packed: jax.Array) -> list[jax.Array]:
        if INTERPRET:
            return kernel.run(packed)
        return lax.platform_dependent(*packed, cuda=lambda *arrays: kernel.run(arrays), default=plain)

    def step(packed: tuple[list[jax.Array], list[jax.Array]], action: PyTree) -> tuple[Any, PyTree]:
        found = run(*packed[0], *packed[1], *actions.pack(jax.tree.leaves(action)))
        after, rest = found[: len(states.groups)], found[len(states.groups) :]
        return (after, packed[1]), jax.tree.unflatten(jax.tree.structure(seen), views.unpack(rest))

    return Stepper(pack, unpack, step)


def _is_same(old: Cells, new: Cells) -> bool:
    """Whether a step returns an array as it was given."""
    if new.axis != 0 or old.array.shape != new.array.shape:
        return False
    return all(a is b for a, b in zip(old.array.flat, new.array.flat, strict=True))


def _placed(parts: Sequence[tuple[Sequence[int], "_Layout"]]) -> dict[int, tuple[int, int]]:
    """The packed array and the first column of each array, by its number, for several layouts one after the other."""
    found, before = {}, 0
    for numbers, layout in parts:
        for local, number in enumerate(numbers):
            if layout.kinds[local].size:
                found[number] = before + layout.group(local), layout.begins[local]
        before += len(layout.groups)
    return found


class _Layout:
    """Arrays `[N, ...]` packed into one array `[columns, N]` for each of two types."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        self.groups: list[Any] = sorted({_held(x.dtype) for x in self.kinds if x.size}, key=str)
        widths = dict.fromkeys(self.groups, 0)
        self.begins: list[int] = []
        """The first column of each array in its group."""
        for kind in self.kinds:
            self.begins.append(widths.get(_held(kind.dtype), 0))
            if kind.size:
                widths[_held(kind.dtype)] += math.prod(kind.shape[1:])
        rows = self.kinds[0].shape[0] if self.kinds else 0
        self.packed = [jax.ShapeDtypeStruct((widths[group], rows), group) for group in self.groups]

    def pack(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Pack arrays."""
        columns: dict[Any, list[jax.Array]] = {group: [] for group in self.groups}
        for x, kind in zip(leaves, self.kinds, strict=True):
            if kind.size:
                columns[_held(kind.dtype)].append(x.astype(_held(kind.dtype)).reshape(kind.shape[0], -1).T)
        return [jnp.concatenate(parts) for parts in columns.values()]

    def unpack(self, packed: Sequence[jax.Array]) -> list[jax.Array]:
        """Invert `pack`."""
        by_group = dict(zip(self.groups, packed, strict=True))
        found = []
        for kind, begin in zip(self.kinds, self.begins, strict=True):
            if not kind.size:
                found.append(jnp.zeros(kind.shape, kind.dtype))
                continue
            part = by_group[_held(kind.dtype)][begin : begin + math.prod(kind.shape[1:])]
            found.append(part.T.reshape(kind.shape).astype(kind.dtype))
        return found

    def group(self, number: int) -> int:
        """The packed array that holds an array."""
        return self.groups.index(_held(self.kinds[number].dtype))


def _held(dtype: Any) -> Any:
    """The type in which an array is packed: float32, or int32 for all others."""
    return np.dtype(np.float32) if dtype == jnp.float32 else np.dtype(np.int32)


class _Kernel:
    """The kernel of a program on rows, from packed arrays to packed arrays.

    Args:
        rows: N.
        inputs: the packed array and the first column of each argument.
        results: the cells of all results.
        outputs: the packed array and the first column of each result that is wanted.
        kinds: the shapes of the packed outputs.
    """

    def __init__(
        self,
        rows: int,
        inputs: dict[int, tuple[int, int]],
        results: Sequence[Cells],
        outputs: dict[int, tuple[int, int]],
        kinds: Sequence[jax.ShapeDtypeStruct],
    ) -> None:
        self.rows, self.inputs, self.kinds = rows, inputs, list(kinds)
        self.wanted: list[tuple[int, int, Any]] = []
        """The array and the column of each output, and its cell."""
        for number, (array, begin) in outputs.items():
            cells = results[number]
            if cells.axis not in (None, 0):
                raise Unsupported("an output whose rows are not its first axis")
            entries = cells.array if cells.axis == 0 else cells.array[:1]
            if not (cells.array == entries).all():
                raise Unsupported("an output whose rows differ and are known")
            self.wanted += [(array, begin + column, cell) for column, cell in enumerate(entries.reshape(-1))]
        self.needed = _Needed([cell for _, _, cell in self.wanted])
        if len(self.needed.nodes) < LEAST_NODES:
            raise Unsupported("a short step")

    def run(self, packed: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the packed outputs."""
        if INTERPRET:
            return self._interpret(packed)
        mosaic = _mosaic()
        named = {"out_type" if "out_type" in _options() else "out_shape": self.kinds}
        return mosaic.kernel(
            self._kernel,
            grid=(self.rows // BLOCK,),
            grid_names=("block",),
            compiler_params=mosaic.CompilerParams(
                lowering_semantics=mosaic.LoweringSemantics.Lane,
                unsafe_no_auto_barriers=True,  # safe, since no memory is both read and written
            ),
            **named,
        )(*packed)

    def _interpret(self, packed: Sequence[jax.Array]) -> list[jax.Array]:
        evaluator = _Evaluator(
            lambda node: self._typed(packed[self._at(node)[0]][self._at(node)[1]], node), self.needed, self.rows
        )
        columns = [[jnp.zeros(self.rows, kind.dtype)] * kind.shape[0] for kind in self.kinds]
        for array, column, cell in self.wanted:
            columns[array][column] = evaluator.value(cell).astype(self.kinds[array].dtype)
        return [jnp.stack(one) for one in columns]

    def _at(self, node: Node) -> tuple[int, int]:
        """The array and the column of an input."""
        number, column = node.parameters
        array, begin = self.inputs[number]
        return array, begin + column

    def _typed(self, x: jax.Array, node: Node) -> jax.Array:
        return x != 0 if node.dtype == np.bool_ else x.astype(node.dtype)

    def _kernel(self, *refs: Any) -> None:
        mosaic, rows = _mosaic(), pl.ds(lax.axis_index("block") * BLOCK, BLOCK)
        count = len(refs) - len(self.kinds)
        layout = mosaic.Layout.WG_STRIDED((BLOCK,), 1)

        def load(node: Node) -> jax.Array:
            array, column = self._at(node)
            return self._typed(mosaic.load(refs[array], (column, rows), layout=layout, optimized=False), node)

        evaluator = _Evaluator(load, self.needed, BLOCK, lambda x: mosaic.layout_cast(x, layout))
        for array, column, cell in self.wanted:
            ref = refs[count + array]
            ref[column, rows] = evaluator.value(cell).astype(ref.dtype)


def _options() -> frozenset[str]:
    """The names of the options of `mosaic.kernel`, which differ between versions of JAX."""
    return frozenset(inspect.signature(_mosaic().kernel).parameters)


class _Needed:
    """The nodes that the wanted ones are computed from, in an order in which they can be, per loop."""

    def __init__(self, wanted: Sequence[Any]) -> None:
        self.nodes: dict[Node, None] = {}
        self.carried: dict[int, list[int]] = {}
        """Which of the numbers that a loop carries are needed, by the identity of the loop."""
        self._loops: dict[int, Loop] = {}
        self._visit(wanted)

    def _visit(self, wanted: Sequence[Any]) -> None:
        stack = [cell for cell in wanted if isinstance(cell, Node)]
        while stack:
            node = stack.pop()
            if node in self.nodes:
                continue
            self.nodes[node] = None
            if node.name == "after":
                loop, index = node.parameters
                stack.extend(self._need(loop, index))
            elif node.name == "carried":
                for loop in list(self._loops.values()):
                    if node in loop.carried:
                        stack.extend(self._need(loop, loop.carried.index(node)))
            stack.extend(x for x in node.inputs if isinstance(x, Node))

    def _need(self, loop: Loop, index: int) -> list[Node]:
        is_first = id(loop) not in self._loops
        self._loops[id(loop)] = loop
        found = self.carried.setdefault(id(loop), [])
        if index in found:
            return []
        found.append(index)
        used = loop.start[index], loop.after[index], *([loop.condition] if is_first else [])
        return [x for x in used if isinstance(x, Node)]


class _Evaluator:
    """Evaluates nodes inside a kernel, each once, in the loop where it belongs."""

    def __init__(
        self,
        load: Callable[[Node], jax.Array],
        needed: _Needed,
        size: int,
        spread: Callable[[jax.Array], jax.Array] = lambda x: x,
    ) -> None:
        self.load, self.needed, self.size, self.spread = load, needed, size, spread
        self.values: dict[Any, jax.Array] = {}
        self.after: dict[int, dict[int, jax.Array]] = {}

    def value(self, cell: Any) -> jax.Array:
        """The value of a cell, one number per row."""
        if not isinstance(cell, Node):
            return self._constant(cell)
        if cell not in self.values:
            self._evaluate(cell)
        return self.values[cell]

    def _spread(self, cell: Any) -> jax.Array:
        """The value of a cell that a loop carries: a number for each row, even if it is the same for all."""
        return self.value(cell) if isinstance(cell, Node) else self.spread(self._constant(cell))

    def _constant(self, cell: Any) -> jax.Array:
        return jnp.full((self.size,), cell, cell.dtype)

    def _evaluate(self, wanted: Node) -> None:
        stack = [wanted]
        while stack:
            node = stack[-1]
            if node in self.values:
                stack.pop()
                continue
            missing = [x for x in self._before(node) if isinstance(x, Node) and x not in self.values]
            if missing:
                stack.extend(reversed(missing))
                continue
            self.values[node] = self._apply(node)
            stack.pop()

    def _before(self, node: Node) -> Sequence[Any]:
        if node.name != "after":
            return node.inputs
        loop, _ = node.parameters
        if id(loop) in self.after:
            return ()
        carried = self.needed.carried[id(loop)]
        return [loop.start[index] for index in carried] + self._from_outside(loop)

    def _from_outside(self, loop: Loop) -> list[Node]:
        """What a loop reads and does not change: computed before it."""
        found: dict[Node, None] = {}
        seen: set[Node] = set()
        used = [loop.condition, *(loop.after[index] for index in self.needed.carried[id(loop)])]
        stack = [x for x in used if isinstance(x, Node)]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.scope < loop.depth:
                found[node] = None
            else:
                stack.extend(x for x in node.inputs if isinstance(x, Node))
                if node.name == "after":
                    inner, _ = node.parameters
                    used = [inner.condition]
                    for index in self.needed.carried[id(inner)]:
                        used += [inner.start[index], inner.after[index]]
                    stack.extend(x for x in used if isinstance(x, Node))
        return list(found)

    def _apply(self, node: Node) -> jax.Array:
        if node.name == "input":
            return self.load(node)
        if node.name == "after":
            loop, index = node.parameters
            if id(loop) not in self.after:
                self._run(loop)
            return self.after[id(loop)][index]
        return _computed(node, [self.value(x) for x in node.inputs])

    def _run(self, loop: Loop) -> None:
        carried = self.needed.carried[id(loop)]
        outside, after = self.values, self.after

        def enter(cells: Sequence[jax.Array]) -> None:
            """Forget what an earlier trace of the loop computed."""
            self.values = {**outside, **{loop.carried[i]: x for i, x in zip(carried, cells, strict=True)}}
            self.after = dict(after)

        def step(cells: list[jax.Array]) -> list[jax.Array]:
            enter(cells)
            return [self._spread(loop.after[index]) for index in carried]

        def goes_on(cells: list[jax.Array]) -> jax.Array:
            enter(cells)
            return jnp.max(jnp.where(self._spread(loop.condition), 1.0, 0.0)) > 0.0

        start = [self._spread(loop.start[index]) for index in carried]
        if loop.length is None:
            last = lax.while_loop(goes_on, step, start)
        else:
            last = lax.fori_loop(0, loop.length, lambda _, cells: step(cells), start)
        self.values, self.after = outside, after
        self.after[id(loop)] = dict(zip(carried, last, strict=True))


def _computed(node: Node, inputs: list[jax.Array]) -> jax.Array:
    name = node.name
    if name == "convert_element_type":
        return inputs[0] != 0 if node.dtype == np.bool_ else inputs[0].astype(node.dtype)
    if name == "select_n":
        return jnp.where(inputs[0], inputs[2], inputs[1])
    function: Any = _FUNCTIONS[name] if name in _FUNCTIONS else getattr(lax, name)
    return function(*inputs)


def _power(x: jax.Array, y: jax.Array) -> jax.Array:
    """x ** y by exp and log; a negative x has a power if y is a whole number."""
    y = y.astype(x.dtype)
    size = jnp.where(y == 0, 1.0, lax.exp(y * lax.log(jnp.abs(x))))
    is_odd = y - 2.0 * lax.floor(0.5 * y) == 1.0
    of_negative = jnp.where(lax.floor(y) == y, jnp.where(is_odd, -size, size), jnp.nan)
    return jnp.where(x < 0, of_negative, size)


_FUNCTIONS: dict[str, Callable[..., jax.Array]] = {
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "not": lax.bitwise_not,
    "xor": lax.bitwise_xor,
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
    # Mosaic GPU lacks these.
    "acos": lambda x: lax.atan2(lax.sqrt((1.0 - x) * (1.0 + x)), x),
    "asin": lambda x: lax.atan2(x, lax.sqrt((1.0 - x) * (1.0 + x))),
    "atan": lambda x: lax.atan2(x, jnp.ones_like(x)),
    "tan": lambda x: lax.sin(x) / lax.cos(x),
    "logistic": lambda x: 1.0 / (1.0 + lax.exp(-x)),
    "pow": _power,
}
