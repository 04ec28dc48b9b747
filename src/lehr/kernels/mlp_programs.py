"""The two GPU programs of the fused MLP, written with Pallas for its Triton backend; see `lehr.kernels.mlp`.

- forward: each program loads the weights of one network and evaluates it on a few blocks of rows;
- backward: each program processes many blocks, accumulates the gradients of the weights on chip, and stores one partial
  sum; the partial sums are then added in a fixed order, so that results are the same from run to run.

Weights are read where they are, unpadded: copying those of thousands of members into one array takes longer than
evaluating them. On chip, every layer is padded with zeros to sizes that the matrix units take.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from lehr.kernels.mlp_blocks import (
    ACTIVATIONS,
    Sums,
    Weights,
    backward_block,
    dot,
    forward_block,
    is_transposed,
    no_sums,
    totals,
)
from lehr.kernels.mlp_plan import Plan, padded, pl, triton

__all__ = [
    "ACTIVATIONS",
    "Layer",
    "Layers",
    "Plan",
    "backward",
    "bias_places",
    "filled_blocks",
    "forward",
    "kernel_places",
    "padded",
    "pl",
    "triton",
]

Layer: TypeAlias = tuple[jax.Array, jax.Array]
"""A kernel `[i, o]` and a bias `[o]`; for M networks `[M, i, o]` and `[M, o]`."""
Layers: TypeAlias = Sequence[Layer]


def forward(plan: Plan, x: jax.Array, hidden: Layers, heads: Layers) -> jax.Array:
    """Evaluate the networks: `[rows, F]` to `[networks, rows, O]`.

    Args:
        plan: sizes and tuning.
        x: the inputs of all networks.
        hidden: `[M, i, o]` and `[M, o]` each, of all M networks.
        heads: `[i, O]` and `[O]` for each network to evaluate, which is one of consecutive ones.
    """
    rows = plan.block_rows * plan.blocks_per_forward_program
    return pl.pallas_call(
        functools.partial(_forward_program, plan),
        out_shape=jax.ShapeDtypeStruct((plan.networks, plan.rows, plan.sizes[-1]), x.dtype),
        grid=(pl.cdiv(plan.rows, rows), plan.networks),
        in_specs=[
            pl.BlockSpec((rows, padded(plan.inputs)), lambda program, network: (program, 0)),
            *_weight_specs(plan, hidden, heads),
        ],
        out_specs=pl.BlockSpec((None, rows, padded(plan.sizes[-1])), lambda program, network: (network, program, 0)),
        compiler_params=triton.CompilerParams(num_warps=plan.num_warps, num_stages=1),
        interpret=plan.interpret,
        name="fused_mlp_forward",
    )(x, *_flat(hidden, heads))


def _forward_program(plan: Plan, x_ref: Any, *refs: Any) -> None:
    *weights, out_ref = refs
    rows, blocks = plan.block_rows, plan.blocks_per_forward_program
    first = pl.program_id(0) * (blocks * rows)
    inside = plan.rows % (blocks * rows) == 0
    network = Weights.of(plan, _layers(plan, weights))

    def block(index: jax.Array | int, _: None) -> None:
        begin = first + index * rows
        here = (pl.ds(index * rows, rows), slice(None))
        x = _load_rows(plan, x_ref.at[here], begin, plan.inputs, inside)
        y = forward_block(plan, network, x, is_alone=True).outputs
        triton.store(out_ref.at[here], y, mask=_mask(plan, begin, y.shape, plan.sizes[-1], inside))

    if blocks == 1:
        block(0, None)
    else:
        lax.fori_loop(0, blocks, block, None)


def backward(
    plan: Plan, x: jax.Array, hidden: Layers, heads: Layers, gradient: jax.Array, *, wants_dx: bool
) -> tuple[jax.Array | None, list[Layer]]:
    """Return the gradients of the inputs, if wanted, and of the weights.

    Args:
        plan: sizes and tuning.
        x: as in `forward`, like `hidden` and `heads`.
        hidden: of all networks.
        heads: of the networks to evaluate.
        gradient: of the outputs, `[networks, rows, O]`.
        wants_dx: whether the inputs need a gradient.

    Returns:
        `[rows, F]` or `None`, and `[networks, i, o]` and `[networks, o]` for each layer, the last one as wide as the
        widest head.
    """
    rows = plan.blocks_per_program * plan.backward_block_rows
    programs = plan.backward_programs
    out_shape = [jax.ShapeDtypeStruct((programs, plan.networks, size), x.dtype) for size in plan.gradient_sizes]
    out_specs = [
        pl.BlockSpec((None, None, size), lambda program, network: (program, network, 0)) for size in plan.gradient_sizes
    ]
    if wants_dx:
        out_shape.append(jax.ShapeDtypeStruct((plan.networks, *x.shape), x.dtype))
        out_specs.append(
            pl.BlockSpec((None, rows, padded(plan.inputs)), lambda program, network: (network, program, 0))
        )
    outputs = pl.pallas_call(
        functools.partial(_backward_program, plan),
        out_shape=out_shape,
        grid=(programs, plan.networks),
        in_specs=[
            pl.BlockSpec((rows, padded(plan.inputs)), lambda program, network: (program, 0)),
            pl.BlockSpec((None, rows, padded(plan.sizes[-1])), lambda program, network: (network, program, 0)),
            *_weight_specs(plan, hidden, heads),
        ],
        out_specs=out_specs,
        compiler_params=triton.CompilerParams(num_warps=plan.backward_num_warps, num_stages=1),
        interpret=plan.interpret,
        name="fused_mlp_backward",
    )(x, gradient, *_flat(hidden, heads))
    sums = [jnp.sum(partial, axis=0) for partial in outputs[: len(plan.gradient_sizes)]]
    found = []
    for (kernel, bias), n_in, n_out in zip(plan.gradient_places, plan.sizes, plan.sizes[1:], strict=False):
        wide_in, wide_out = padded(n_in), padded(n_out)
        flat = sums[kernel.array][:, kernel.begin : kernel.begin + wide_in * wide_out]
        dkernel = flat.reshape(plan.networks, wide_in, wide_out)[:, :n_in, :n_out]
        found.append((dkernel, sums[bias.array][:, bias.begin : bias.begin + n_out]))
    return (jnp.sum(outputs[-1], axis=0) if wants_dx else None), found


def _backward_program(plan: Plan, x_ref: Any, gradient_ref: Any, *refs: Any) -> None:
    count = 2 * (len(plan.hidden) + plan.networks)
    weights, outputs = refs[:count], refs[count:]
    partial_refs, dx_refs = outputs[: len(plan.gradient_sizes)], outputs[len(plan.gradient_sizes) :]
    rows, blocks = plan.backward_block_rows, plan.blocks_per_program
    first = pl.program_id(0) * (blocks * rows)
    inside = plan.rows % (blocks * rows) == 0
    network = Weights.of(plan, _layers(plan, weights))

    def block(index: jax.Array, sums: Sums) -> Sums:
        # Rows past the end are zeros with zero gradient, so they add nothing.
        begin = first + index * rows
        here = (pl.ds(index * rows, rows), slice(None))
        x = _load_rows(plan, x_ref.at[here], begin, plan.inputs, inside)
        d = _load_rows(plan, gradient_ref.at[here], begin, plan.sizes[-1], inside)
        sums, d = backward_block(plan, network, forward_block(plan, network, x, wants_outputs=False), d, sums)
        for dx_ref in dx_refs:
            dx = dot(plan, d, network.first, (1, 1))
            triton.store(dx_ref.at[here], dx, mask=_mask(plan, begin, dx.shape, plan.inputs, inside))
        return sums

    sums = lax.fori_loop(0, filled_blocks(plan, first), block, no_sums(plan, network))
    for size, after, (kernel_at, bias_at), (dkernel, dbias) in zip(
        plan.sizes, plan.sizes[1:], plan.gradient_places, totals(plan, network, sums), strict=False
    ):
        n_in, n_out = padded(size), padded(after)
        places, _ = kernel_places(n_in, n_out, transposed=is_transposed(n_in))
        triton.store(partial_refs[kernel_at.array].at[kernel_at.begin + places], dkernel)
        triton.store(partial_refs[bias_at.array].at[bias_at.begin + bias_places(n_out)[0]], dbias)


# --- shared by both programs


def filled_blocks(plan: Plan, first: jax.Array) -> jax.Array:
    """How many of a backward program's blocks have rows, the first of which is given.

    A number that is not known when the kernel is compiled: unrolled loops need more registers than there are.
    """
    rows = plan.backward_block_rows
    return jnp.minimum(plan.blocks_per_program, (plan.rows - first + (rows - 1)) // rows)


def _flat(hidden: Layers, heads: Layers) -> list[jax.Array]:
    """Every kernel with its inputs and outputs as one axis, and every bias, in the order of `_weight_specs`."""
    kernels = [kernel.reshape(*kernel.shape[:-2], -1) for kernel, _ in (*hidden, *heads)]
    biases = [bias for _, bias in (*hidden, *heads)]
    return [array for pair in zip(kernels, biases, strict=True) for array in pair]


def _weight_specs(plan: Plan, hidden: Layers, heads: Layers) -> list[Any]:
    """Where the weights of a program's network are: its slice of the hidden layers, and all heads."""
    own = len(hidden) * 2

    def spec(index: int, array: jax.Array) -> Any:
        if index < own:
            return pl.BlockSpec((None, array.shape[-1]), lambda block, network: (plan.first + network, 0))
        return pl.BlockSpec(array.shape, lambda block, network: (0,))

    return [spec(index, array) for index, array in enumerate(_flat(hidden, heads))]


def _layers(plan: Plan, refs: Sequence[Any]) -> list[Layer]:
    """Load the kernel and the bias of each layer of a program's network, padded with zeros."""
    pairs = list(zip(refs[::2], refs[1::2], strict=True))
    depth = len(plan.hidden)
    found = [
        (_load_kernel(kernel, n_in, n_out), _load_bias(bias, n_out))
        for (kernel, bias), n_in, n_out in zip(pairs[:depth], plan.sizes, plan.hidden, strict=False)
    ]
    return [*found, (_own_head(plan, pairs[depth:], 0), _own_head(plan, pairs[depth:], 1))]


def _own_head(plan: Plan, heads: Sequence[tuple[Any, Any]], part: int) -> jax.Array:
    """The kernel (0) or the bias (1) of the head of a program's network; the others are masked, so nothing is read."""
    last, widest, network = plan.sizes[-2], padded(plan.sizes[-1]), pl.program_id(1)
    found = []
    for index, (refs, width) in enumerate(zip(heads, plan.widths, strict=True)):
        is_own = None if plan.networks == 1 else network == index
        if part == 0:
            found.append(_load_kernel(refs[0], last, width, widest, is_own))
        else:
            found.append(_load_bias(refs[1], width, widest, is_own))
    return functools.reduce(jnp.add, found)


def _load_kernel(ref: Any, n_in: int, n_out: int, wide: int | None = None, is_own: Any = None) -> jax.Array:
    places, mask = kernel_places(n_in, n_out, wide)
    return _load(ref, places, mask, is_own)


def _load_bias(ref: Any, n_out: int, wide: int | None = None, is_own: Any = None) -> jax.Array:
    places, mask = bias_places(n_out, wide)
    return _load(ref, places, mask, is_own)


def _load(ref: Any, places: jax.Array, mask: jax.Array | None, is_own: Any) -> jax.Array:
    if is_own is not None:
        mask = jnp.full(places.shape, is_own) if mask is None else mask & is_own
    return triton.load(ref.at[places], mask=mask, other=None if mask is None else 0.0)


def kernel_places(
    n_in: int, n_out: Any, wide: int | None = None, *, transposed: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Where the entries of a padded kernel, `[i, o]` or transposed, are in its flat array, and which of them exist.

    The number of outputs may be traced, if `wide` is given.
    """
    tall, wide = padded(n_in), wide or padded(n_out)
    shape, row, column = ((wide, tall), 1, 0) if transposed else ((tall, wide), 0, 1)
    inputs, outputs = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (row, column))
    masks = [*([inputs < n_in] if n_in < tall else []), *([outputs < n_out] if _is_padded(n_out, wide) else [])]
    return inputs * n_out + outputs, _all(masks)


def bias_places(n_out: Any, wide: int | None = None) -> tuple[jax.Array, jax.Array | None]:
    """The same for a bias."""
    wide = wide or padded(n_out)
    outputs = lax.broadcasted_iota(jnp.int32, (wide,), 0)
    return outputs, outputs < n_out if _is_padded(n_out, wide) else None


def _is_padded(n_out: Any, wide: int) -> bool:
    return not isinstance(n_out, int) or n_out < wide


def _load_rows(plan: Plan, ref: Any, begin: jax.Array, width: int, inside: bool) -> jax.Array:
    """Load a block of rows, with zeros past the last row and past column `width`."""
    mask = _mask(plan, begin, ref.shape, width, inside)
    return triton.load(ref, mask=mask, other=None if mask is None else 0.0)


def _mask(plan: Plan, begin: jax.Array, shape: tuple[int, ...], width: int, inside: bool) -> jax.Array | None:
    """Return where a block lies inside the array; `None` if everywhere. `inside` means that all its rows do."""
    masks = []
    if not inside:
        masks.append(begin + lax.broadcasted_iota(jnp.int32, shape, 0) < plan.rows)
    if width != shape[1]:
        masks.append(lax.broadcasted_iota(jnp.int32, shape, 1) < width)
    return _all(masks)


def _all(masks: list[jax.Array]) -> jax.Array | None:
    return functools.reduce(jnp.logical_and, masks) if masks else None
