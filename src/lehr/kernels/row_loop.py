"""A loop over steps as one GPU kernel, for bodies that treat every row alike: policy and environments of a rollout.

In plain JAX, each step of a rollout launches a handful of kernels, and launching them takes longer than their work.
Here one program takes a block of environments through all steps: their states stay in registers, the weights of the
policy are loaded once, and only what the rollout keeps is written. What does not depend on the state, such as random
numbers, is computed before, for all steps at once; see `lehr.kernels.row_program`.

Any body whose operations have rules in `lehr.kernels.row_rules` can be such a loop: elementwise arithmetic on a few
columns, and products with weights. Results equal those of `jax.lax.scan` up to rounding.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lehr.kernels import lowered
from lehr.kernels.members import members
from lehr.kernels.mlp_programs import pl, triton
from lehr.kernels.row_program import CARRIED, FIXED, PER_STEP, STATIC, Program, Unsupported, Value
from lehr.kernels.row_rules import evaluate
from lehr.kernels.row_values import MOST_COLUMNS, Block, Columns, filled, without_rows
from lehr.types import PyTree

LEAST_ROWS = 512
"""Minimum number of rows times steps, of all members of a population, for which the kernel is used."""
MOST_CARRIED = 64
"""Columns of the carried state, at most: they stay in registers."""
MOST_OPERATIONS = 2000
"""Longer bodies are left to the compiler."""
LEAST_BLOCK, MOST_BLOCK = 16, 64
"""Rows per program; the matrix units take no fewer than 16."""
PROGRAMS = 264
"""Blocks are as small as that leads to this many programs, two for each of the 132 processors of an H200."""
NUM_WARPS, FEW_NUM_WARPS = 4, 2
"""Warps per program; the second for no more rows than the smallest block, as those of a member of a population."""
INTERPRET = False
"""Run the kernel in Pallas's interpreter, on any device, for tests."""

DTYPES = frozenset(map(jnp.dtype, ["float32", "int32", "uint32", "bool", "int8", "uint8", "int16", "uint16"]))


def is_able() -> bool:
    """Whether JAX has Pallas's Triton backend, and a GPU."""
    return triton is not None and (INTERPRET or jax.default_backend() == "gpu")


def fits(start: PyTree, rows: PyTree) -> bool:
    """Whether the carried state is small, and has the same number of rows everywhere; arguments as in `scan`."""
    leaves, given = jax.tree.leaves(start), jax.tree.leaves(rows)
    if not leaves or not given or any(leaf.shape[:1] != leaves[0].shape[:1] or not leaf.ndim for leaf in leaves):
        return False
    count, steps = leaves[0].shape[0], given[0].shape[0]
    columns = [math.prod(leaf.shape[1:]) for leaf in leaves]
    small = sum(columns) <= MOST_CARRIED and max(columns) <= MOST_COLUMNS
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
        programs = pl.next_power_of_2(pl.cdiv(rows * members(), PROGRAMS))
        self.block = min(max(LEAST_BLOCK, min(MOST_BLOCK, programs)), max(LEAST_BLOCK, pl.next_power_of_2(rows)))
        # What is loaded before the loop is known once the body has been traced.
        recorder = _Loader(self, {})
        vectors = [jax.ShapeDtypeStruct((self.block,), one.dtype) for one in program.carry for _ in _places(one)]
        jax.eval_shape(lambda cells: self._step(recorder, cells)[0], vectors)
        self.requests = list(recorder.loaded)

    def check(self, arrays: Sequence[Any]) -> None:
        """Raise if JAX cannot lower the kernel for a GPU, before it is part of a larger program."""
        description = f"row_loop {members()} {(self.program.text, self.rows, self.steps, self.block)}"
        lowered.check(description, lambda *arrays: self.run(arrays), *arrays)

    def run(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the carry after the last step, and what is stored in each, `[T, ...]`."""
        outputs = [(value.shape, value.dtype) for value in self.program.carry]
        outputs += [((self.steps, *value.shape), value.dtype) for value in self.stored]
        warps = FEW_NUM_WARPS if self.rows <= LEAST_BLOCK else NUM_WARPS
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
        cells = [loader.load(_Request(value, 0, place)) for value in carry for place in _places(value)]
        for request in self.requests:
            loader.loaded[request] = loader.load(request)

        def step(number: jax.Array, cells: list[jax.Array]) -> list[jax.Array]:
            loader.step = number
            cells, stored = self._step(loader, cells)
            for value, ref, block in zip(self.stored, stored_refs, stored, strict=True):
                loader.store(ref, value, block, number)
            return cells

        cells = lax.fori_loop(0, self.steps, step, cells)
        for value, ref in zip(carry, last_refs, strict=True):
            shape = without_rows(value.shape, 0)
            loader.store(ref, value, Columns(0, filled(shape, cells[: math.prod(shape)])), 0)
            cells = cells[math.prod(shape) :]

    def _step(self, loader: "_Loader", cells: list[jax.Array]) -> tuple[list[jax.Array], list[Columns]]:
        """Evaluate the body on the columns of the carry; return those of the next one, and what is stored."""
        values: dict[int, Block] = {}
        for value in self.program.carry:
            shape = without_rows(value.shape, 0)
            values[value.number] = Columns(0, filled(shape, cells[: math.prod(shape)]))
            cells = cells[math.prod(shape) :]
        for operation in self.program.in_loop:
            inputs = [values.get(value.number, value) for value in operation.inputs]
            found = evaluate(operation, inputs, loader)
            values.update(zip((value.number for value in operation.outputs), found, strict=True))
        after = [_as_columns(values[value.number]) for value in self.program.next_carry]
        if any(block.axis != 0 for block in after):
            raise Unsupported("a carry whose rows are not its first axis")
        stored = [_as_columns(values[value.number]) for value in self.stored]
        return [_vector(cell, self.block) for block in after for cell in block.cells.flat], stored


@dataclass(frozen=True)
class _Request:
    """A part of a value to load: a cell, or all along the axes whose index is `None`."""

    value: Value
    axis: int | None
    """The batch axis; `None` if the value is the same for all rows."""
    index: tuple[int | None, ...]


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

    def whole(self, value: Value) -> jax.Array:
        """Load all of a value that is the same for all rows."""
        return self._get(_Request(value, None, (None,) * len(value.shape)))

    def part(self, value: Value, *, row: int | None = None, column: int | None = None) -> jax.Array:
        """Load a row or a column of a matrix that is the same for all rows."""
        return self._get(_Request(value, None, (row, column)))

    def _get(self, request: _Request) -> jax.Array:
        if request in self.loaded:
            return self.loaded[request]
        found = self.load(request) if self.refs else self._zeros(request)
        if request.value.level == FIXED:
            self.loaded[request] = found
        return found

    def _zeros(self, request: _Request) -> jax.Array:
        if request.axis is not None:
            return jnp.zeros(self.block, request.value.dtype)
        sizes = zip(request.value.shape, request.index, strict=True)
        return jnp.zeros([size for size, place in sizes if place is None], request.value.dtype)

    def load(self, request: _Request) -> jax.Array:
        """Load a part of a value."""
        value, axis, index = request.value, request.axis, request.index
        places, mask = self._places(value.shape, axis, index), None if axis is None else self._mask
        if value.level == PER_STEP:
            places = places + self.step * math.prod(value.shape)
        found = triton.load(self.refs[value.number].at[places], mask=mask, other=None if mask is None else 0)
        return found != 0 if value.dtype == jnp.bool_ else found.astype(value.dtype)

    def store(self, ref: Any, value: Value, block: Columns, step: Any) -> None:
        """Store an array of this block of rows and of one step."""
        for index, cell in np.ndenumerate(block.cells):
            places = self._places(value.shape, block.axis, index) + step * math.prod(value.shape)
            triton.store(ref.at[places], _vector(cell, self.block).astype(_held(value.dtype)), mask=self._mask)

    def _places(self, shape: tuple[int, ...], axis: int | None, index: tuple[int | None, ...]) -> Any:
        """Where the entries of a part are in the flat array."""
        strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        along = [place for place, one in enumerate(index) if one is None]
        sizes = [shape[place] for place in along]
        found: Any = sum(one * stride for one, stride in zip(index, strides, strict=True) if one is not None)
        for number, place in enumerate(along):
            found = found + lax.broadcasted_iota(jnp.int32, sizes, number) * strides[place]
        return jnp.asarray(found, jnp.int32) if axis is None else found + self._row * strides[axis]


def _places(value: Value) -> list[tuple[int, ...]]:
    """The indices of the columns of a carry."""
    return list(np.ndindex(*without_rows(value.shape, 0)))


def _vector(cell: jax.Array, size: int) -> jax.Array:
    return jnp.broadcast_to(cell, (size,))


def _as_columns(block: Block) -> Columns:
    if not isinstance(block, Columns):
        raise Unsupported("a wide array in the carry or among the outputs")
    return block


def _held(dtype: Any) -> Any:
    """The type in which an array is passed to the kernel: small integers and booleans as 32-bit integers."""
    return jnp.int32 if jnp.dtype(dtype).itemsize < 4 else jnp.dtype(dtype)
