"""The GPU program of `lehr.kernels.mlp_loss`: forward pass, loss and backward pass on blocks of rows.

Each program evaluates one of the networks on its rows, block by block. It evaluates the loss with the outputs of its
own network and zeros for those of the others, and uses the terms and derivatives that are its own network's.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lehr.kernels.mlp_blocks import Weights, backward_block, forward_block, is_transposed, no_sums, totals
from lehr.kernels.mlp_plan import Plan, padded, pl, triton
from lehr.kernels.mlp_programs import Layer, bias_places, filled_blocks, kernel_places
from lehr.kernels.row_loss import RowLoss, Terms, WithoutMatrices
from lehr.kernels.row_program import Value


@dataclass(frozen=True)
class Layout:
    """Where layers are in the vector that holds all parameters: for each layer, the begins by network."""

    size: int
    kernels: tuple[tuple[int, ...], ...]
    biases: tuple[tuple[int, ...], ...]


class Sums(NamedTuple):
    """What a launch computes: sums over the rows of each program."""

    gradient: jax.Array
    """`[programs, size]`: of the layers; what belongs to no layer is undefined."""
    squares: jax.Array
    """`[programs, networks]`: the sums of the squares of the gradients of each network's layers."""
    terms: jax.Array
    """`[programs, networks, sums]`: the sums of the loss's terms, as each network's program computes them."""


def gradients(
    plan: Plan, layout: Layout, loss: RowLoss, x: jax.Array, vector: jax.Array, known: Mapping[int, Any]
) -> Sums:
    """Evaluate the networks and the loss on all rows, and return gradients and sums.

    Args:
        plan: sizes and tuning.
        layout: where layers are in the vector.
        loss: of the outputs of all networks.
        x: `[rows, F]`, the inputs of all networks.
        vector: `[size]`, all parameters.
        known: what the loss needs besides the outputs, by number.
    """
    programs, count = plan.backward_programs, len(loss.owners)
    given = [known[value.number] for value in loss.inputs]
    widths = layout.size + plan.interpret, plan.networks, plan.networks * max(1, count) + plan.interpret
    outputs = pl.pallas_call(
        functools.partial(_program, plan, layout, loss),
        out_shape=[jax.ShapeDtypeStruct((programs, width), jnp.float32) for width in widths],
        grid=(programs, plan.networks),
        out_specs=[pl.BlockSpec((None, width), lambda program, network: (program, 0)) for width in widths],
        compiler_params=triton.CompilerParams(num_warps=plan.backward_num_warps, num_stages=1),
        interpret=plan.interpret,
        name="mlp_loss",
    )(x.reshape(-1), vector, *(jnp.asarray(array).reshape(-1).astype(_held(array.dtype)) for array in given))
    gradient, squares, terms = outputs
    terms = terms[:, : plan.networks * max(1, count)].reshape(programs, plan.networks, -1)
    return Sums(gradient[:, : layout.size], squares, terms)


def _program(plan: Plan, layout: Layout, loss: RowLoss, x_ref: Any, vector_ref: Any, *refs: Any) -> None:
    given, (gradient_ref, squares_ref, terms_ref) = refs[:-3], refs[-3:]
    rows, blocks, network = plan.backward_block_rows, plan.blocks_per_program, pl.program_id(1)
    first = pl.program_id(0) * (blocks * rows)
    places = _Places(plan, layout, network)
    weights = Weights.of(plan, [places.load(vector_ref, number) for number in range(len(places.sizes))])
    refs_by_number = {value.number: ref for value, ref in zip(loss.inputs, given, strict=True)}

    def block(index: jax.Array, sums: Any) -> Any:
        begin = first + index * rows
        loader = _Loader(plan, refs_by_number, begin)
        forward = forward_block(plan, weights, _load_inputs(plan, x_ref, begin))
        terms = loss.terms(_cells(plan, forward.outputs, network), loader)
        d = _derivatives(plan, terms, forward.outputs.shape, network, loader.mask)
        new = [total + loader.masked(term) for total, term in zip(sums[1], terms.sums, strict=True)]
        return backward_block(plan, weights, forward, d, sums[0])[0], new

    start = no_sums(plan, weights), [jnp.zeros(rows)] * len(loss.owners)
    sums, terms = lax.fori_loop(0, filled_blocks(plan, first), block, start)
    found = totals(plan, weights, sums)
    for number, layer in enumerate(found):
        places.store(gradient_ref, number, layer)
    # Padding has no gradient, so it adds nothing.
    triton.store(squares_ref.at[network], _sum_of_squares(found))
    _store_terms(plan, terms_ref, network, terms)


def _store_terms(plan: Plan, ref: Any, network: jax.Array, terms: Sequence[jax.Array]) -> None:
    """Store the sum of each of the terms, which are columns of one matrix, as every sum over threads takes long."""
    if not terms:
        return
    at = lax.broadcasted_iota(jnp.int32, (plan.backward_block_rows, padded(len(terms))), 1)
    columns = jnp.zeros(at.shape)
    for number, term in enumerate(terms):
        columns = jnp.where(at == number, term[:, None], columns)
    index, inside = bias_places(len(terms), at.shape[1])
    place = network * len(terms) + index
    if plan.interpret:  # as in `_Places.store`
        place = jnp.where(index < len(terms), place, plan.networks * len(terms))
    triton.store(ref.at[place], jnp.sum(columns, axis=0), mask=inside)


def _sum_of_squares(layers: Sequence[Sequence[jax.Array]]) -> jax.Array:
    """Of all gradients; those of one shape are added first, as in `_store_terms`."""
    by_shape: dict[tuple[int, ...], jax.Array] = {}
    for part in (part for layer in layers for part in layer):
        by_shape[part.shape] = by_shape.get(part.shape, 0.0) + jnp.square(part)
    for shape in [shape for shape in by_shape if len(shape) == 2]:
        by_row = jnp.sum(by_shape.pop(shape), axis=1)
        by_shape[by_row.shape] = by_shape.get(by_row.shape, 0.0) + by_row
    return functools.reduce(operator.add, (jnp.sum(part) for part in by_shape.values()))


class _Places:
    """Where the layers of a program's network are in a vector of all parameters."""

    def __init__(self, plan: Plan, layout: Layout, network: jax.Array) -> None:
        self.layout, self.network, self.interpret = layout, network, plan.interpret
        depth = len(plan.hidden)
        widths = [*((width,) * plan.networks for width in plan.hidden), plan.widths]
        self.sizes = [(plan.sizes[number], self._own(widths[number])) for number in range(depth + 1)]
        self.wide = [padded(size) for size in plan.sizes[1:]]

    def _own(self, numbers: Sequence[int]) -> Any:
        """This network's of one number for each network."""
        if len(set(numbers)) == 1:
            return numbers[0]
        found: Any = jnp.int32(numbers[0])
        for index, number in enumerate(numbers[1:], 1):
            found = jnp.where(self.network == index, jnp.int32(number), found)
        return found

    def _of(self, number: int, *, transposed: bool) -> list[tuple[jax.Array, jax.Array | None]]:
        """The places of a layer's kernel and bias, padded, and which of them exist."""
        (n_in, n_out), wide = self.sizes[number], self.wide[number]
        kernel, kernel_mask = kernel_places(n_in, n_out, wide, transposed=transposed)
        bias, bias_mask = bias_places(n_out, wide)
        begins = self._own(self.layout.kernels[number]), self._own(self.layout.biases[number])
        return [(begins[0] + kernel, kernel_mask), (begins[1] + bias, bias_mask)]

    def load(self, ref: Any, number: int) -> Layer:
        """Load a layer, padded with zeros."""
        parts = self._of(number, transposed=False)
        kernel, bias = (triton.load(ref.at[at], mask=mask, other=None if mask is None else 0.0) for at, mask in parts)
        return kernel, bias

    def store(self, ref: Any, number: int, layer: Sequence[jax.Array]) -> None:
        """Store the gradients of a layer."""
        parts = self._of(number, transposed=is_transposed(padded(self.sizes[number][0])))
        for (at, mask), part in zip(parts, layer, strict=True):
            if self.interpret and mask is not None:  # the interpreter writes what was there, also where it is masked
                at = jnp.where(mask, at, self.layout.size)
            triton.store(ref.at[at], part, mask=mask)


class _Loader(WithoutMatrices):
    """Loads what the loss needs, see `lehr.kernels.row_values.Loader`."""

    def __init__(self, plan: Plan, refs: Mapping[int, Any], begin: Any) -> None:
        self.refs, self.rows, self.block = refs, plan.rows, plan.backward_block_rows
        self.row = begin + lax.broadcasted_iota(jnp.int32, (self.block,), 0)
        covered = plan.backward_programs * plan.blocks_per_program * self.block
        self.mask = None if covered == plan.rows else self.row < plan.rows

    def cell(self, value: Value, axis: int | None, index: tuple[int, ...]) -> jax.Array:
        """Load one entry, a scalar; if it has a batch axis, a vector `[B]`."""
        place, stride, row_stride = 0, 1, 0
        for number in reversed(range(len(value.shape))):
            if number == axis:
                row_stride = stride
            else:
                place += index[number] * stride
            stride *= value.shape[number]
        ref, mask = self.refs[value.number], None if axis is None else self.mask
        at = jnp.int32(place) if axis is None else place + self.row * row_stride
        found = triton.load(ref.at[at], mask=mask, other=None if mask is None else 0)
        return found != 0 if value.dtype == jnp.bool_ else found.astype(value.dtype)

    def masked(self, vector: jax.Array) -> jax.Array:
        """Zeros past the last row."""
        return vector if self.mask is None else jnp.where(self.mask, vector, 0.0)


def _load_inputs(plan: Plan, ref: Any, begin: Any) -> jax.Array:
    """Load a block of inputs, with zeros past the last row and column."""
    shape = (plan.backward_block_rows, padded(plan.inputs))
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    inside = (begin + row < plan.rows) & (column < plan.inputs)
    return triton.load(ref.at[(begin + row) * plan.inputs + column], mask=inside, other=0.0)


def _cells(plan: Plan, outputs: jax.Array, network: jax.Array) -> list[jax.Array]:
    """The outputs of all networks, `[B]` each: zeros but for those of this program's network."""
    at = lax.broadcasted_iota(jnp.int32, outputs.shape, 1)
    columns = [jnp.sum(jnp.where(at == index, outputs, 0.0), axis=1) for index in range(max(plan.widths))]
    return [
        jnp.where(network == number, columns[index], 0.0)
        for number, width in enumerate(plan.widths)
        for index in range(width)
    ]


def _derivatives(
    plan: Plan, terms: Terms, shape: tuple[int, ...], network: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """The derivatives by the outputs of this program's network, `[B, O]`, with zeros past the last row and output."""
    at = lax.broadcasted_iota(jnp.int32, shape, 1)
    found = jnp.zeros(shape)
    for number, columns in enumerate(terms.derivatives):
        for index, column in enumerate(columns):
            own = (network == number) if mask is None else (network == number) & mask
            found = jnp.where(at == index, found + jnp.where(own, column, 0.0)[:, None], found)
    return found


def _held(dtype: Any) -> Any:
    """The type in which an array is passed to the kernel: small integers and booleans as 32-bit integers."""
    return jnp.int32 if jnp.dtype(dtype).itemsize < 4 else jnp.dtype(dtype)
