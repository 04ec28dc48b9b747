"""A loop over steps as one GPU kernel, for bodies that treat every row alike: policy and environments of a rollout.

In plain JAX, each step of a rollout launches a handful of kernels, and launching them takes longer than their work.
Here one program takes a block of environments through all steps: their states stay in registers, the weights of the
policy are loaded once, as far as they fit on chip, and only what the rollout keeps is written. What does not depend on
the state, such as random numbers, is computed before, for all steps at once; see `lehr.kernels.row_program`.

Any body whose operations have rules in `lehr.kernels.row_rules` can be such a loop: elementwise arithmetic on a few
columns, and products with weights. Results equal those of `jax.lax.scan` up to rounding.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lehr.kernels import lowered, mlp_plan
from lehr.kernels.members import members
from lehr.kernels.mlp_programs import pl, triton
from lehr.kernels.row_program import CARRIED, FIXED, PER_STEP, STATIC, Program, Unsupported, Value
from lehr.kernels.row_rules import evaluate
from lehr.kernels.row_values import Block, Columns, Matrix, Span, filled, is_wide, spans, without_rows
from lehr.types import PyTree

LEAST_ROWS = 512
"""Minimum number of rows times steps, of all members of a population, for which the kernel is used."""
MOST_CARRIED = 64
"""Columns of the carried state, at most, besides wide arrays: they stay in registers."""
MOST_CARRIED_WIDE = 512
"""Columns of the wide arrays of the carried state, at most, such as the state of a recurrent network."""
MOST_OPERATIONS = 2000
"""Longer bodies are left to the compiler."""
LEAST_BLOCK, MOST_BLOCK = 16, 64
"""Rows per program; the matrix units take no fewer than 16."""
PROGRAMS, WIDE_PROGRAMS = 264, 132
"""Blocks are as small as that leads to this many programs, two for each of the 132 processors of an H200; the second
for more weights than `MOST_SHARED`."""
NUM_WARPS, FEW_NUM_WARPS, WIDE_NUM_WARPS = 4, 2, 8
"""Warps per program; the second for no more rows than the smallest block, as those of a member of a population, and the
third for more weights than `MOST_SHARED`."""
MOST_SHARED = 128 * 128
"""Weights that two programs of one processor can each keep on chip."""
MOST_KEPT = (2 * 128 * 128, 128 * 128, 0)
"""Weights that one program keeps on chip, if it has more; it loads the others in each step. The first of these numbers
with which the kernel fits, as far as there is a GPU to try it."""
INTERPRET = False
"""Run the kernel in Pallas's interpreter, on any device, for tests."""

DTYPES = frozenset(map(jnp.dtype, ["float32", "int32", "uint32", "bool", "int8", "uint8", "int16", "uint16"]))


def is_able() -> bool:
    """Whether JAX has Pallas's Triton backend, and a GPU."""
    return mlp_plan.has_triton(INTERPRET)


def fits(start: PyTree, rows: PyTree) -> bool:
    """Whether the carried state is small, and has the same number of rows everywhere; arguments as in `scan`."""
    leaves, given = jax.tree.leaves(start), jax.tree.leaves(rows)
    if not leaves or not given or any(leaf.shape[:1] != leaves[0].shape[:1] or not leaf.ndim for leaf in leaves):
        return False
    count, steps = leaves[0].shape[0], given[0].shape[0]
    wide, narrow = 0, 0
    for leaf in leaves:
        columns = math.prod(leaf.shape[1:])
        wide, narrow = (wide + columns, narrow) if is_wide(leaf.shape) else (wide, narrow + columns)
    small = narrow <= MOST_CARRIED and wide <= MOST_CARRIED_WIDE
    return small and count > 1 and count * steps * members() >= LEAST_ROWS


def scan(body: Callable[[PyTree, PyTree], Any], start: PyTree, rows: PyTree, otherwise: Callable[[], PyTree]) -> PyTree:
    """As `jax.lax.scan`; raise `Unsupported` if the body cannot be such a loop, or another error if JAX refuses it.

    Args:
        body: `(carry, row) -> (carry, outputs)`.
        start: the carry before the first step; leaves `[N, ...]`.
        rows: what the steps are given; leaves `[T, ...]`.
        otherwise: computes the same in plain JAX, for programs that are not compiled for CUDA.
    """
    leaves, given = jax.tree.leaves(start), jax.tree.leaves(rows)
    program, structure = Program.of(body, start, jax.eval_shape(functools.partial(jax.tree.map, lambda x: x[0]), rows))
    loop = _Loop(program, leaves[0].shape[0], given[0].shape[0])
    fixed, per_step = program.before_loop(given)
    arrays = [*leaves, *fixed.values(), *per_step.values()]
    if INTERPRET:
        found = loop.run(arrays)
    else:
        loop.check(arrays)
        places = [program.outputs.index(value) for value in loop.stored]

        def plain(*arrays: jax.Array) -> list[jax.Array]:
            every = jax.tree.leaves(otherwise())
            return [*every[: len(leaves)], *(every[len(leaves) + place] for place in places)]

        found = lax.platform_dependent(*arrays, cuda=lambda *arrays: loop.run(arrays), default=plain)
    last, in_loop = found[: len(leaves)], dict(zip(loop.stored, found[len(leaves) :], strict=True))

    def stacked(value: Value) -> jax.Array:
        """An output of all steps, `[T, ...]`."""
        if value.level == CARRIED:
            return in_loop[value]
        if value.level == PER_STEP:
            return per_step[value.number]
        once = value.static if value.level == STATIC else fixed[value.number]
        return jnp.broadcast_to(jnp.asarray(once, value.dtype), (loop.steps, *value.shape))

    return jax.tree.unflatten(structure, [*last, *map(stacked, program.outputs)])


class _Loop:
    """The kernel of a loop: `steps` steps of a program on `rows` rows."""

    def __init__(self, program: Program, rows: int, steps: int) -> None:
        self.program, self.rows, self.steps = program, rows, steps
        self.stored = [value for value in dict.fromkeys(program.outputs) if value.level == CARRIED]
        self.inputs = [*program.carry, *program.needed(FIXED), *program.needed(PER_STEP)]
        if len(program.in_loop) > MOST_OPERATIONS:
            raise Unsupported(f"{len(program.in_loop)} operations")
        if any(value.level != CARRIED for value in program.next_carry):
            raise Unsupported("a carry that does not depend on the one before")
        if any(value.dtype not in DTYPES for value in (*self.inputs, *self.stored)):
            raise Unsupported("an array of another type than 32-bit numbers")
        if any(steps * math.prod(value.shape) >= 2**31 for value in (*self.inputs, *self.stored)):
            raise Unsupported("arrays too large for 32-bit indices")
        # What is loaded, and so how many weights there are, is known once the body has been traced.
        self._size(PROGRAMS)
        self.requests = self._trace()
        self.weights = [request for request in self.requests if request.is_tile]
        self.is_large = sum(request.size for request in self.weights) > MOST_SHARED
        if self.is_large:
            self._size(WIDE_PROGRAMS)
            self._keep(MOST_KEPT[0])

    def _keep(self, most: int) -> None:
        """Keep no more than so many weights on chip."""
        sums = itertools.accumulate(request.size for request in self.weights)
        self.requests = [request for request, total in zip(self.weights, sums, strict=True) if total <= most]

    def _size(self, programs: int) -> None:
        """Choose the rows per program."""
        rows = pl.next_power_of_2(pl.cdiv(self.rows * members(), programs))
        most = max(LEAST_BLOCK, pl.next_power_of_2(self.rows))
        self.block = min(max(LEAST_BLOCK, min(MOST_BLOCK, rows)), most)

    def _trace(self) -> "list[_Request]":
        """Return what is loaded of values that are the same in all steps."""
        recorder = _Loader(self, {})
        parts = [part for value in self.program.carry for part in _parts(value)]
        blocks = [jax.ShapeDtypeStruct(_shape(part, self.block), part.value.dtype) for part in parts]
        jax.eval_shape(lambda cells: self._step(recorder, cells)[0], blocks)
        return list(recorder.loaded)

    def check(self, arrays: Sequence[Any]) -> None:
        """Raise if JAX cannot lower the kernel for a GPU, before it is part of a larger program.

        A large one is also compiled, with fewer and fewer weights on chip, until it fits there.
        """
        if not self.is_large:
            return self._lower(arrays)
        for most in MOST_KEPT:
            self._keep(most)
            try:
                return self._lower(arrays)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
        raise Unsupported("more memory than there is on chip")

    def _lower(self, arrays: Sequence[Any]) -> None:
        kept = self.rows, self.steps, self.block, len(self.requests)
        description = f"row_loop {members()} {(self.program.text, *kept)}"
        lowered.check(description, lambda *arrays: self.run(arrays), *arrays, compiles=self.is_large)

    def run(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the carry after the last step, and what is stored in each, `[T, ...]`."""
        outputs = [(value.shape, value.dtype) for value in self.program.carry]
        outputs += [((self.steps, *value.shape), value.dtype) for value in self.stored]
        few = FEW_NUM_WARPS if self.rows <= LEAST_BLOCK else NUM_WARPS
        warps = WIDE_NUM_WARPS if self.is_large else few
        found = pl.pallas_call(
            self._kernel,
            out_shape=[jax.ShapeDtypeStruct((math.prod(shape),), _held(dtype)) for shape, dtype in outputs],
            grid=(pl.cdiv(self.rows, self.block),),
            compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
            interpret=INTERPRET,
            name="row_loop",
        )(*(x.reshape(-1).astype(_held(x.dtype)) for x in arrays))
        return [x.reshape(shape).astype(dtype) for x, (shape, dtype) in zip(found, outputs, strict=True)]

    def _kernel(self, *refs: Any) -> None:
        carry, given = self.program.carry, refs[: len(self.inputs)]
        last_refs, stored_refs = refs[len(given) : len(given) + len(carry)], refs[len(given) + len(carry) :]
        loader = _Loader(self, {value.number: ref for value, ref in zip(self.inputs, given, strict=True)})
        cells = [loader.load(part) for value in carry for part in _parts(value)]
        for request in self.requests:
            loader.loaded[request] = loader.load(request)

        def step(number: jax.Array, cells: list[jax.Array]) -> list[jax.Array]:
            loader.step = number
            cells, stored = self._step(loader, cells)
            for value, ref, block in zip(self.stored, stored_refs, stored, strict=True):
                loader.store(ref, value, block, number)
            return cells

        cells = lax.fori_loop(0, self.steps, step, cells)
        for value, ref, block in zip(carry, last_refs, _blocks(carry, cells), strict=True):
            loader.store(ref, value, block, 0)

    def _step(self, loader: "_Loader", cells: list[jax.Array]) -> tuple[list[jax.Array], list[Block]]:
        """Evaluate the body on the parts of the carry; return those of the next one, and what is stored."""
        blocks = zip(self.program.carry, _blocks(self.program.carry, cells), strict=True)
        values: dict[int, Block] = {value.number: block for value, block in blocks}
        for operation in self.program.in_loop:
            inputs = [values.get(value.number, value) for value in operation.inputs]
            found = evaluate(operation, inputs, loader)
            values.update(zip((value.number for value in operation.outputs), found, strict=True))
        after = [values[value.number] for value in self.program.next_carry]
        if any(isinstance(block, Columns) and block.axis != 0 for block in after):
            raise Unsupported("a carry whose rows are not its first axis")
        cells = [cell for block in after for cell in _cells(block, self.block)]
        return cells, [values[value.number] for value in self.stored]


@dataclass(frozen=True)
class _Request:
    """A part of a value to load: a cell, or all along the axes that have a span instead of an index."""

    value: Value
    axis: int | None
    """The batch axis; `None` if the value is the same for all rows."""
    index: tuple[int | Span, ...]

    @property
    def sizes(self) -> list[int]:
        """Its shape, without the batch axis."""
        return [one[1] for one in self.index if isinstance(one, tuple)]

    @property
    def size(self) -> int:
        """The number of entries, for each row."""
        return math.prod(self.sizes)

    @property
    def is_tile(self) -> bool:
        """Whether it is a factor of a product."""
        return self.axis is None and len(self.sizes) == 2


class _Loader:
    """Loads what was computed before the loop, see `lehr.kernels.row_values.Loader`, and stores the results.

    Without references, it only records what is needed before the loop.
    """

    def __init__(self, loop: _Loop, refs: Mapping[int, Any]) -> None:
        self.loop, self.refs, self.rows, self.block = loop, refs, loop.rows, loop.block
        self.loaded: dict[_Request, Any] = {}
        self.step: Any = 0
        if refs:
            self._row = pl.program_id(0) * self.block + lax.broadcasted_iota(jnp.int32, (self.block,), 0)
            self._mask = None if self.rows % self.block == 0 else self._row < self.rows

    def cell(self, value: Value, axis: int | None, index: tuple[int, ...]) -> jax.Array:
        """Load one entry, a scalar; if it has a batch axis, a vector `[B]`."""
        return self._get(_Request(value, axis, index))

    def part(self, value: Value, axis: int | None, index: tuple[int | Span, ...]) -> jax.Array:
        """Load all entries along the spans; if it has a batch axis, for each row: `[B, W]`."""
        return self._get(_Request(value, axis, index))

    def _get(self, request: _Request) -> jax.Array:
        if request in self.loaded:
            return self.loaded[request]
        if self.refs:
            return self.load(request)
        found = jnp.zeros(_shape(request, self.block), request.value.dtype)
        if request.value.level == FIXED:
            self.loaded[request] = found
        return found

    def load(self, request: _Request) -> jax.Array:
        """Load a part of a value."""
        value, axis = request.value, request.axis
        places, mask = self._places(request), None if axis is None else self._mask
        if value.level == PER_STEP:
            places = places + self.step * math.prod(value.shape)
        if mask is not None and request.sizes:
            mask = jnp.broadcast_to(mask[:, None], places.shape)
        found = triton.load(self.refs[value.number].at[places], mask=mask, other=None if mask is None else 0)
        return found != 0 if value.dtype == jnp.bool_ else found.astype(value.dtype)

    def store(self, ref: Any, value: Value, block: Block, step: Any) -> None:
        """Store an array of this block of rows and of one step."""
        axis = block.axis if isinstance(block, Columns) else 0
        parts = _parts(value, axis)
        for part, cell in zip(parts, _cells(block, self.block), strict=True):
            places = self._places(part) + step * math.prod(value.shape)
            mask = self._mask
            if mask is not None and part.sizes:
                mask = jnp.broadcast_to(mask[:, None], places.shape)
            triton.store(ref.at[places], cell.astype(_held(value.dtype)), mask=mask)

    def _places(self, request: _Request) -> Any:
        """Where the entries of a part are in the flat array."""
        shape, axis = request.value.shape, request.axis
        strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        sizes = _shape(request, self.block)
        found: Any = 0
        along = len(sizes) - len(request.sizes)
        for one, stride in zip(request.index, strides, strict=True):
            if isinstance(one, tuple):
                found = found + (one[0] + lax.broadcasted_iota(jnp.int32, sizes, along)) * stride
                along += 1
            else:
                found = found + one * stride
        if axis is None:
            return jnp.asarray(found, jnp.int32)
        rows = self._row * strides[axis]
        return found + (rows[:, None] if request.sizes else rows)


def _shape(request: _Request, block: int) -> tuple[int, ...]:
    """The shape of what is loaded."""
    return (*([] if request.axis is None else [block]), *request.sizes)


def _parts(value: Value, axis: int = 0) -> list[_Request]:
    """The columns or tiles of a value with rows on this axis."""
    if not is_wide(value.shape, axis):
        return [_Request(value, axis, place) for place in np.ndindex(*without_rows(value.shape, axis))]
    if len(value.shape) != 2 or axis != 0:
        raise Unsupported(f"a wide array {value.shape} in the carry or among the outputs")
    return [_Request(value, 0, (0, span)) for span in spans(value.shape[1])]


def _cells(block: Block, rows: int) -> list[jax.Array]:
    """The columns or tiles of a block of rows, in the order of `_parts`."""
    if isinstance(block, Matrix):
        return list(block.tiles)
    return [jnp.broadcast_to(cell, (rows,)) for cell in block.cells.flat]


def _blocks(values: Sequence[Value], cells: Sequence[jax.Array]) -> list[Block]:
    """The inverse of `_cells`, for several values with rows on the first axis."""
    found: list[Block] = []
    for value in values:
        count = len(_parts(value))
        if is_wide(value.shape):
            found.append(Matrix(tuple(cells[:count])))
        else:
            found.append(Columns(0, filled(without_rows(value.shape, 0), cells[:count])))
        cells = cells[count:]
    return found


def _held(dtype: Any) -> Any:
    """The type in which an array is passed to the kernel: small integers and booleans as 32-bit integers."""
    return jnp.int32 if jnp.dtype(dtype).itemsize < 4 else jnp.dtype(dtype)
