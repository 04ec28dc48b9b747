"""The two GPU programs of wide MLPs, written with Pallas for its Triton backend; see `lehr.kernels.wide_mlp`.

- forward: each program takes a block of rows of one network through all layers, and stores the activations, which the
  gradient needs;
- backward: each program takes a block of rows through all layers backwards, and stores the gradient before the
  activation of each layer, and sums over its rows for the smaller gradients: of the biases, of the last layer, and of
  the first one if it has few inputs.

A layer is too wide to stay on chip, so each one is a loop of products of tiles. Its input is what the same program has
stored just before, and is still in the cache. A barrier separates the layers: threads read what others have stored.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lehr.kernels.mlp_plan import NetworksPlan
from lehr.kernels.mlp_programs import ACTIVATIONS, Layers, padded, pl, triton

FEW_INPUTS = 64
"""Up to so many inputs, the gradient of the first layer is summed by the backward program."""


TANH = """{
    .reg .f32 t;
    mul.f32 t, $1, 0f4038AA3B;
    ex2.approx.ftz.f32 t, t;
    add.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 t, t;
    fma.rn.f32 $0, t, 0fC0000000, 0f3F800000;
}"""
"""1 - 2 / (1 + 2^(z 2 log2 e)), with an error below 3e-7, in a quarter of the instructions of the library's tanh."""


def _activate(plan: "Plan", z: jax.Array) -> jax.Array:
    if plan.activation != "tanh" or plan.interpret:
        return ACTIVATIONS[plan.activation][0](z)
    shape = [jax.ShapeDtypeStruct(z.shape, z.dtype)]
    (y,) = triton.elementwise_inline_asm(TANH, args=[z], constraints="=f,f", pack=1, result_shape_dtypes=shape)
    return y


BY_INPUTS = frozenset(("gelu", "silu"))
"""Activations whose derivative needs z; that of the others follows from y."""


@dataclass(frozen=True)
class Plan(NetworksPlan):
    """Everything static about a call: sizes and tuning.

    The number of rows is a multiple of both numbers of rows per block, and the hidden sizes are powers of two.
    """

    dtype: str
    """That of the factors of the hidden layers' products, and of what is kept; heads are in float32."""
    block_columns: int
    """Outputs of a hidden layer that the forward program computes at once, at most."""
    num_stages: int
    """Steps of the forward program's loops that are loaded ahead."""
    backward_block_columns: int
    backward_num_stages: int
    depth: int
    """Inputs of a layer in a tile of its weights, at most; a power of two."""
    transposes: bool
    """Whether the forward program reads its weights transposed, as Hopper's matrix units take them."""

    @property
    def first_depth(self) -> int:
        """`depth` of the first layer."""
        return min(self.depth, padded(self.inputs))

    @property
    def wide_inputs(self) -> int:
        """The inputs that are read, a multiple of `first_depth`."""
        return pl.cdiv(self.inputs, self.first_depth) * self.first_depth

    @property
    def sums_first(self) -> bool:
        """Whether the backward program sums the gradient of the first kernel."""
        return self.inputs <= FEW_INPUTS

    @property
    def keeps_inputs(self) -> bool:
        """Whether the inputs of the activations are kept, besides their outputs."""
        return self.activation in BY_INPUTS

    @functools.cached_property
    def sums(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Where each sum begins in the array of sums, and its shape."""
        shapes: dict[str, tuple[int, ...]] = {f"bias {index}": (size,) for index, size in enumerate(self.hidden)}
        shapes["head bias"] = (padded(self.outputs),)
        shapes["head"] = (self.hidden[-1], padded(self.outputs))
        if self.sums_first:
            shapes["first"] = (self.hidden[0], padded(self.inputs))
        sizes = (functools.reduce(int.__mul__, shape) for shape in shapes.values())
        return dict(
            zip(shapes, zip(itertools.accumulate(sizes, initial=0), shapes.values(), strict=False), strict=True)
        )

    @property
    def sums_size(self) -> int:
        """The length of the array of sums."""
        begin, shape = list(self.sums.values())[-1]
        return begin + functools.reduce(int.__mul__, shape)


def forward(
    plan: Plan, x: jax.Array, hidden: Layers, heads: Layers, *, keeps: bool
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """Evaluate the networks: `[rows, F]` to `[networks, rows, O]`.

    Args:
        plan: sizes and tuning.
        x: the inputs of all networks.
        hidden: `[M, i, o]` and `[M, o]` each, of all M networks.
        heads: `[i, O]` and `[O]` for each network to evaluate, which is one of consecutive ones.
        keeps: whether the gradient will be needed.

    Returns:
        The outputs, and if `keeps`, the outputs and the inputs of the activation of each hidden layer, `[networks,
        rows, o]`. The inputs are an empty list for an activation whose derivative does not need them.
    """
    rows, dtype = plan.block_rows, jnp.dtype(plan.dtype)
    kept = len(plan.hidden) if keeps else len(plan.hidden) - 1
    kept_inputs = len(plan.hidden) if keeps and plan.keeps_inputs else 0
    sizes = [*plan.hidden[:kept], *plan.hidden[:kept_inputs]]
    kernels = [kernel.astype(dtype) for kernel, _ in hidden]
    kernels = [kernel.mT for kernel in kernels] if plan.transposes else kernels
    found = pl.pallas_call(
        functools.partial(_forward_program, plan, kept),
        out_shape=[
            jax.ShapeDtypeStruct((plan.networks, plan.rows, plan.outputs), jnp.float32),
            *(jax.ShapeDtypeStruct((plan.networks, plan.rows, size), dtype) for size in sizes),
        ],
        grid=(plan.rows // rows, plan.networks),
        in_specs=[_rows_spec(rows, plan.wide_inputs), *_weight_specs(plan, transposed=plan.transposes)],
        out_specs=[
            _own_rows_spec(rows, padded(plan.outputs)),
            *(_own_rows_spec(rows, size) for size in sizes),
        ],
        compiler_params=triton.CompilerParams(num_warps=plan.num_warps, num_stages=plan.num_stages),
        interpret=plan.interpret,
        name="wide_mlp_forward",
    )(x.astype(dtype), *kernels, *(bias for _, bias in hidden), *_stacked_heads(plan, heads))
    outputs, *others = found
    return (outputs, others[:kept], others[kept:]) if keeps else (outputs, [], [])


def _forward_program(plan: Plan, kept: int, x_ref: Any, *refs: Any) -> None:
    depth = len(plan.hidden)
    kernels, biases, (head, head_bias) = refs[:depth], refs[depth : 2 * depth], refs[2 * depth : 2 * depth + 2]
    out_ref, *others = refs[2 * depth + 2 :]
    kept_refs, input_refs = others[:kept], others[kept:]
    out = jnp.zeros((plan.block_rows, padded(plan.outputs)), jnp.float32)
    for layer, size in enumerate(plan.hidden):
        wide = min(plan.block_columns, size)
        for begin in range(0, size, wide):
            columns = pl.ds(begin, wide)
            z = _product(
                plan,
                _input(plan, x_ref) if layer == 0 else _tiles(plan, kept_refs[layer - 1]),
                _weights(plan, kernels[layer], layer, columns),
                (plan.block_rows, wide),
                _steps(plan, layer),
                (1, 1) if plan.transposes else (1, 0),
            )
            z = z + biases[layer][columns][None, :]
            if input_refs:
                triton.store(input_refs[layer].at[:, columns], z.astype(plan.dtype))
            y = _activate(plan, z).astype(plan.dtype)
            if layer < kept:
                triton.store(kept_refs[layer].at[:, columns], y)
            if layer == depth - 1:
                out += _dot(y.astype(jnp.float32), head[:, columns], (1, 1))
        _barrier(plan)
    out += head_bias[...][None, :]
    triton.store(out_ref, out, mask=_is_column(out.shape, plan.outputs))


def backward(
    plan: Plan,
    x: jax.Array,
    hidden: Layers,
    heads: Layers,
    kept: Sequence[jax.Array],
    kept_inputs: Sequence[jax.Array],
    gradient: jax.Array,
    *,
    wants_dx: bool,
) -> tuple[jax.Array | None, list[tuple[jax.Array, jax.Array]]]:
    """Return the gradients of the inputs, if wanted, and of the weights.

    Args:
        plan: sizes and tuning.
        x: as in `forward`, like `hidden` and `heads`.
        hidden: of all networks.
        heads: of the networks to evaluate.
        kept: what `forward` returns.
        kept_inputs: what `forward` returns, too.
        gradient: of the outputs, `[networks, rows, O]`.
        wants_dx: whether the inputs need a gradient.

    Returns:
        `[rows, F]` or `None`, and `[networks, i, o]` and `[networks, o]` for each layer, the last one as wide as the
        widest head.
    """
    rows, dtype, networks = plan.backward_block_rows, jnp.dtype(plan.dtype), plan.networks
    stores_first = wants_dx or not plan.sums_first
    stored = plan.hidden if stores_first else plan.hidden[1:]
    used = slice(plan.first, plan.first + networks)
    kernels = [kernel.astype(dtype) for kernel, _ in hidden]
    x = x.astype(dtype)
    sums, *stored_gradients = pl.pallas_call(
        functools.partial(_backward_program, plan, stores_first),
        out_shape=[
            jax.ShapeDtypeStruct((plan.rows // rows, networks, plan.sums_size), jnp.float32),
            *(jax.ShapeDtypeStruct((networks, plan.rows, size), dtype) for size in stored),
        ],
        grid=(plan.rows // rows, networks),
        in_specs=[
            _rows_spec(rows, padded(plan.inputs)),
            _own_rows_spec(rows, padded(plan.outputs)),
            *(_own_rows_spec(rows, array.shape[-1]) for array in (*kept, *kept_inputs)),
            *(_own_spec(plan, kernel.shape[1:]) for kernel in kernels[1:]),
            pl.BlockSpec((None, padded(plan.outputs), plan.hidden[-1]), lambda block, network: (network, 0, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, plan.sums_size), lambda block, network: (block, network, 0)),
            *(_own_rows_spec(rows, size) for size in stored),
        ],
        compiler_params=triton.CompilerParams(num_warps=plan.backward_num_warps, num_stages=plan.backward_num_stages),
        interpret=plan.interpret,
        name="wide_mlp_backward",
    )(x, gradient, *kept, *kept_inputs, *kernels[1:], _stacked_heads(plan, heads)[0])
    found = jnp.sum(sums, 0)

    def sum_of(name: str) -> jax.Array:
        begin, shape = plan.sums[name]
        return lax.slice_in_dim(found, begin, begin + functools.reduce(int.__mul__, shape), axis=1).reshape(
            networks, *shape
        )

    layers = []
    for index in range(len(plan.hidden)):
        if index == 0 and plan.sums_first:
            kernel = sum_of("first").mT[:, : plan.inputs]
        elif index == 0:
            kernel = jnp.stack([_over_rows(x, d) for d in stored_gradients[0]])
        else:
            d = stored_gradients[index - (not stores_first)]
            kernel = jax.vmap(_over_rows)(kept[index - 1], d)
        layers.append((kernel, sum_of(f"bias {index}")))
    layers.append((sum_of("head")[..., : plan.outputs], sum_of("head bias")[:, : plan.outputs]))
    if not wants_dx:
        return None, layers
    by_network = zip(stored_gradients[0], kernels[0][used], strict=True)
    return functools.reduce(jnp.add, [_dot(d, kernel, (1, 1)) for d, kernel in by_network]), layers


def _backward_program(plan: Plan, stores_first: bool, x_ref: Any, gradient_ref: Any, *refs: Any) -> None:
    depth, rows, last = len(plan.hidden), plan.backward_block_rows, len(plan.hidden) - 1
    given, refs = refs[:depth], refs[depth:]
    given_inputs, refs = (refs[:depth], refs[depth:]) if plan.keeps_inputs else ((), refs)
    kernels, (head, sums_ref, *stored) = refs[: depth - 1], refs[depth - 1 :]
    stored = stored if stores_first else [None, *stored]
    _, derivative = ACTIVATIONS[plan.activation]

    def store_sum(name: str, value: jax.Array, begin: int = 0) -> None:
        """Store a part of a sum, rows from `begin` on."""
        start, shape = plan.sums[name]
        width = shape[1] if len(shape) > 1 else 1
        places = lax.broadcasted_iota(jnp.int32, value.shape, 0)
        if value.ndim > 1:
            places = places * width + lax.broadcasted_iota(jnp.int32, value.shape, 1)
        triton.store(sums_ref.at[start + begin * width + places], value)

    gradient = _load_columns(gradient_ref, (slice(None), pl.ds(0, padded(plan.outputs))), 0, plan.outputs)
    store_sum("head bias", jnp.sum(gradient, 0))
    for layer in reversed(range(depth)):
        size = plan.hidden[layer]
        wide = min(plan.backward_block_columns, size)
        for begin in range(0, size, wide):
            columns = pl.ds(begin, wide)
            if layer == last:
                d = _dot(gradient, head[:, columns], (1, 0))
            else:
                d = _product(
                    plan,
                    _tiles(plan, stored[layer + 1]),
                    _tiles(plan, kernels[layer], columns),
                    (rows, wide),
                    _steps(plan, layer + 2),
                    (1, 1),
                )
            y = triton.load(given[layer].at[:, columns]).astype(jnp.float32)
            if layer == last:
                store_sum("head", _dot(y, gradient, (0, 0)), begin)
            before = triton.load(given_inputs[layer].at[:, columns]) if given_inputs else y
            d = d * derivative(before.astype(jnp.float32), y)
            store_sum(f"bias {layer}", jnp.sum(d, 0), begin)
            d = d.astype(plan.dtype)
            if stored[layer] is not None:
                triton.store(stored[layer].at[:, columns], d)
            if layer == 0 and plan.sums_first:
                x = _load_columns(x_ref, (slice(None), pl.ds(0, padded(plan.inputs))), 0, plan.inputs)
                store_sum("first", _dot(d, x, (0, 0)), begin)
        _barrier(plan)


# --- shared by both programs


def _product(
    plan: Plan,
    left: Callable[[Any], jax.Array],
    right: Callable[[Any], jax.Array],
    shape: tuple[int, int],
    steps: int,
    contract: tuple[int, int],
) -> jax.Array:
    """Return the sum of the products of so many tiles, float32."""
    start = jnp.zeros(shape, jnp.float32)
    if steps == 1:
        return start + _dot(left(0), right(0), contract)
    return lax.fori_loop(0, steps, lambda step, sums: sums + _dot(left(step), right(step), contract), start)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Multiply two matrices over one axis of each, and sum in float32."""
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def _over_rows(x: jax.Array, d: jax.Array) -> jax.Array:
    """Return the sum over rows of x ⊗ d."""
    return _dot(x, d, (0, 0))


def _steps(plan: Plan, layer: int) -> int:
    """The number of tiles of the inputs of a layer."""
    if layer == 0:
        return plan.wide_inputs // plan.first_depth
    return plan.hidden[layer - 1] // min(plan.depth, plan.hidden[layer - 1])


def _input(plan: Plan, x_ref: Any) -> Callable[[Any], jax.Array]:
    depth = plan.first_depth
    return lambda step: _load_columns(x_ref, (slice(None), pl.ds(step * depth, depth)), step * depth, plan.inputs)


def _tiles(plan: Plan, ref: Any, rows: Any = slice(None)) -> Callable[[Any], jax.Array]:
    depth = min(plan.depth, ref.shape[1])
    return lambda step: triton.load(ref.at[rows, pl.ds(step * depth, depth)])


def _weights(plan: Plan, ref: Any, layer: int, columns: Any) -> Callable[[Any], jax.Array]:
    """What loads tiles of a layer's weights, `[i, o]` or, if they are transposed, `[o, i]`."""
    inputs = plan.inputs if layer == 0 else plan.hidden[layer - 1]
    depth = plan.first_depth if layer == 0 else min(plan.depth, inputs)

    def load(step: Any) -> jax.Array:
        here = pl.ds(step * depth, depth)
        if plan.transposes:
            return _load_columns(ref, (columns, here), step * depth, inputs)
        return _load_rows(ref, (here, columns), step * depth, inputs)

    return load


def _load_columns(ref: Any, where: Any, begin: Any, width: int) -> jax.Array:
    """Load a block whose columns begin at `begin`, with zeros from column `width` on."""
    part = ref.at[where]
    if width % part.shape[1] == 0:
        return triton.load(part)
    return triton.load(part, mask=begin + lax.broadcasted_iota(jnp.int32, part.shape, 1) < width, other=0.0)


def _load_rows(ref: Any, where: Any, begin: Any, count: int) -> jax.Array:
    """Load a block whose rows begin at `begin`, with zeros from row `count` on."""
    part = ref.at[where]
    if count % part.shape[0] == 0:
        return triton.load(part)
    return triton.load(part, mask=begin + lax.broadcasted_iota(jnp.int32, part.shape, 0) < count, other=0.0)


def _is_column(shape: tuple[int, ...], width: int) -> jax.Array | None:
    return None if shape[1] == width else lax.broadcasted_iota(jnp.int32, shape, 1) < width


def _barrier(plan: Plan) -> None:
    if not plan.interpret:
        triton.debug_barrier()


def _rows_spec(rows: int, width: int) -> Any:
    return pl.BlockSpec((rows, width), lambda block, network: (block, 0))


def _own_rows_spec(rows: int, width: int) -> Any:
    return pl.BlockSpec((None, rows, width), lambda block, network: (network, block, 0))


def _own_spec(plan: Plan, shape: Sequence[int]) -> Any:
    """A network's part of an array with one for each of all networks."""
    zeros = (0,) * len(shape)
    return pl.BlockSpec((None, *shape), lambda block, network: (plan.first + network, *zeros))


def _weight_specs(plan: Plan, *, transposed: bool) -> list[Any]:
    sizes = itertools.pairwise((plan.wide_inputs, *plan.hidden))
    return [
        *(_own_spec(plan, (n_out, n_in) if transposed else (n_in, n_out)) for n_in, n_out in sizes),
        *(_own_spec(plan, (size,)) for size in plan.hidden),
        pl.BlockSpec((None, padded(plan.outputs), plan.hidden[-1]), lambda block, network: (network, 0, 0)),
        pl.BlockSpec((None, padded(plan.outputs)), lambda block, network: (network, 0)),
    ]


def _stacked_heads(plan: Plan, heads: Layers) -> tuple[jax.Array, jax.Array]:
    """The heads' kernels `[networks, O, i]` and biases `[networks, O]`, padded with zeros."""
    wide = padded(plan.outputs)
    kernels = [jnp.pad(kernel.T, ((0, wide - kernel.shape[1]), (0, 0))) for kernel, _ in heads]
    biases = [jnp.pad(bias, (0, wide - len(bias))) for _, bias in heads]
    return jnp.stack(kernels), jnp.stack(biases)
