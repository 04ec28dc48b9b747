"""A small MLP as one GPU kernel: its activations never leave the chip.

In plain JAX every layer of an MLP writes its activations to memory, and its gradient reads them back. With many rows
and layers of 64 that traffic is all the time there is. Here one kernel takes a block of rows through all layers, and
another computes the activations again for the gradient, so that only inputs, outputs and weights are moved:

- forward: each program loads a block of rows and all weights, and stores the outputs;
- backward: each program goes through many blocks, adds up the gradients of the weights on chip, and stores one partial
  sum; the partial sums are added afterwards, in a fixed order, so that results are the same from run to run.

Several MLPs of equal sizes on the same input, such as an actor and a critic, are one launch. The kernels are written
with Pallas for its Triton backend; where a program is compiled for anything but CUDA, plain JAX takes their place.

The first derivative in reverse mode is all there is: `jax.jvp`, `jax.linearize` and Hessians need plain JAX.

>>> layers = [(jnp.ones((3, 8)), jnp.zeros(8)), (jnp.ones((8, 8)), jnp.zeros(8)), (jnp.ones((8, 2)), jnp.zeros(2))]
>>> fused_mlp(jnp.ones((5, 3)), layers, "relu").shape
(5, 2)
"""

import functools
import importlib
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from lehr.errors import InputError, closest

pl: Any
triton: Any
try:
    pl, triton = map(importlib.import_module, ("jax.experimental.pallas", "jax.experimental.pallas.triton"))
except ImportError:  # a JAX without this backend, which later versions mean to drop: plain JAX it is
    pl = triton = None

Layer: TypeAlias = tuple[jax.Array, jax.Array]
"""A kernel `[i, o]` and a bias `[o]`; for N networks `[N, i, o]` and `[N, o]`."""

MIN_ROWS = 512
"""From so many rows on."""
MAX_IN, MAX_HIDDEN, MAX_OUT = 64, 64, 16
"""The largest layers whose weights and gradients fit on chip together."""

BLOCK_ROWS = 128
"""Rows that a program of the forward kernel takes at once, a power of two."""
FEW_ROWS = 16_384
"""With fewer rows in all than this, a program takes half as many, so that more processors have something to do."""
NUM_WARPS = 4
"""Warps of such a program. Four or a multiple, and 64 rows or more, for the matrix units of Hopper."""
BACKWARD_BLOCK_ROWS = 64
"""Rows that a program of the backward kernel takes at once: it keeps more of each on chip."""
BACKWARD_NUM_WARPS = 4
"""Warps of such a program."""
PROGRAMS = 264
"""Programs of the backward kernel, for all networks together: two for each of the 132 processors of an H200."""
NARROW = 64
"""The gradient of a kernel with fewer inputs than this is computed transposed, to suit the matrix units."""
INTERPRET = False
"""Whether the kernels are interpreted, on any device, to test them."""


def _gelu_derivative(z: jax.Array, y: jax.Array) -> jax.Array:
    return jax.jvp(jax.nn.gelu, (z,), (jnp.ones_like(z),))[1]


def _silu_derivative(z: jax.Array, y: jax.Array) -> jax.Array:
    gate = jax.nn.sigmoid(z)
    return gate * (1.0 + z * (1.0 - gate))


_Activation: TypeAlias = tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array, jax.Array], jax.Array]]
"""y = f(z), and f'(z) from z and y. One from y alone keeps z out of the registers."""

_ACTIVATIONS: dict[str, _Activation] = {
    "tanh": (jnp.tanh, lambda z, y: 1.0 - y * y),
    "relu": (lambda z: jnp.maximum(z, 0.0), lambda z, y: jnp.where(y > 0.0, 1.0, 0.0)),
    "gelu": (jax.nn.gelu, _gelu_derivative),
    "silu": (jax.nn.silu, _silu_derivative),
    "elu": (jax.nn.elu, lambda z, y: jnp.where(y > 0.0, 1.0, y + 1.0)),
}
"""All have f(0) = 0, see `_pack`."""


def fused_mlp(
    x: jax.Array, layers: Sequence[Layer], activation: str, *, precision: lax.PrecisionLike = None
) -> jax.Array:
    """Dense layers with an activation between them and none after the last, in float32.

    Args:
        x: `[..., F]`. It gets a gradient where one is asked for.
        layers: kernels and biases, of one network or of N; any number of layers that fit on chip together.
        activation: tanh, relu, gelu, silu or elu.
        precision: of the matrix products, as in `jax.lax.dot`; by default that of all products, TF32 on a GPU.

    Returns:
        `[..., O]`, or `[N, ..., O]` for N networks.
    """
    if activation not in _ACTIVATIONS:
        raise InputError(f"activation is {activation!r}; {closest(activation, _ACTIVATIONS)}")
    stacked = layers[0][0].ndim == 3
    if not stacked:
        layers = [(kernel[None], bias[None]) for kernel, bias in layers]
    plan = _plan(x, layers, activation, precision)
    outputs = _operation(plan)(x.reshape(plan.rows, plan.sizes[0]), _pack(plan, layers))
    outputs = outputs.reshape(plan.networks, *x.shape[:-1], plan.sizes[-1])
    return outputs if stacked else outputs[0]


def _plan(x: jax.Array, layers: Sequence[Layer], activation: str, precision: lax.PrecisionLike = None) -> "_Plan":
    rows = math.prod(x.shape[:-1])
    return _Plan(
        rows=rows,
        networks=layers[0][0].shape[0],
        sizes=(x.shape[-1], *(bias.shape[-1] for _, bias in layers)),
        activation=activation,
        precision=precision,
        block_rows=BLOCK_ROWS if rows >= FEW_ROWS else BLOCK_ROWS // 2,
        num_warps=NUM_WARPS,
        backward_block_rows=BACKWARD_BLOCK_ROWS,
        backward_num_warps=BACKWARD_NUM_WARPS,
        programs=PROGRAMS,
        interpret=INTERPRET,
    )


def is_able() -> bool:
    """Whether JAX has the backend that the kernels are written for, and a GPU for it."""
    return triton is not None and (INTERPRET or jax.default_backend() == "gpu")


def fits(x: jax.Array, layers: Sequence[Layer], heads: Mapping[int, Layer], activation: Any) -> bool:
    """Whether the kernels are faster than plain JAX for these MLPs, and fit on chip; arguments as in `evaluate`."""
    hidden = [bias.shape[-1] for _, bias in layers]
    widest = max(bias.shape[-1] for _, bias in heads.values())
    small = x.shape[-1] <= MAX_IN and len(hidden) == 2 and max(hidden) <= MAX_HIDDEN and widest <= MAX_OUT
    known = isinstance(activation, str) and activation in _ACTIVATIONS
    return small and known and math.prod(x.shape[:-1]) >= MIN_ROWS


def evaluate(
    x: jax.Array, layers: Sequence[Layer], heads: Mapping[int, Layer], activation: str
) -> tuple[jax.Array, ...]:
    """Some of several MLPs of equal hidden sizes, each with a last layer of its own; raises where JAX refuses.

    Args:
        x: `[..., F]`.
        layers: `[M, i, o]` and `[M, o]` each, of all M MLPs.
        heads: `[i, O]` and `[O]` for each MLP to evaluate, under its number; neighbours only.
        activation: its name.

    Returns:
        For each head its outputs, `[..., O]`.
    """
    used = slice(min(heads), max(heads) + 1)
    layers = [*((kernel[used], bias[used]) for kernel, bias in layers), stack_heads(list(heads.values()))]
    if refusal := _refusal(_plan(x, layers, activation).probe):
        raise NotImplementedError(refusal)
    outputs = fused_mlp(x, layers, activation)
    widths = (bias.shape[-1] for _, bias in heads.values())
    return tuple(output[..., :width] for output, width in zip(outputs, widths, strict=True))


@functools.cache
def _refusal(plan: "_Plan") -> str:
    """What JAX has against lowering both kernels for a GPU, found out before they are part of a larger program.

    Nothing, hence an empty text, where they are interpreted.
    """
    if plan.interpret:
        return ""
    shapes = (plan.rows, plan.sizes[0]), (plan.networks, plan.weights), (plan.networks, plan.rows, plan.sizes[-1])

    def both(x: jax.Array, weights: jax.Array, gradient: jax.Array) -> Any:
        return _forward(plan, x, weights), _backward(plan, x, weights, gradient, wants_dx=True)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the kernels themselves come with the program
            arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
            jax.jit(both).trace(*arrays).lower(lowering_platforms=("cuda",))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def stack_heads(heads: Sequence[Layer]) -> Layer:
    """The last layers of several networks as one, with zeros where one has fewer outputs than another."""
    width = max(bias.shape[-1] for _, bias in heads)
    kernels, biases = zip(*((_widen(kernel, width), _widen(bias, width)) for kernel, bias in heads), strict=True)
    return jnp.stack(kernels), jnp.stack(biases)


def _widen(x: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


@dataclass(frozen=True)
class _Plan:
    """Everything static about a call, sizes and tuning."""

    rows: int
    networks: int
    sizes: tuple[int, ...]
    activation: str
    precision: Any
    block_rows: int
    num_warps: int
    backward_block_rows: int
    backward_num_warps: int
    programs: int
    interpret: bool

    @functools.cached_property
    def padded(self) -> tuple[int, ...]:
        """The sizes that the kernels compute with: powers of two, since matrix units know no others, from 16 on."""
        return tuple(max(16, pl.next_power_of_2(size)) for size in self.sizes)

    @functools.cached_property
    def spans(self) -> list[tuple[int, int, int, int]]:
        """For each layer its inputs and outputs, and where its kernel and its bias begin among all weights."""
        found, begin = [], 0
        for n_in, n_out in itertools.pairwise(self.padded):
            found.append((n_in, n_out, begin, begin + n_in * n_out))
            begin += (n_in + 1) * n_out
        return found

    @property
    def weights(self) -> int:
        """How many weights a network has, padding included."""
        return sum((n_in + 1) * n_out for n_in, n_out in itertools.pairwise(self.padded))

    @property
    def probe(self) -> "_Plan":
        """The smallest plan of the same kernels, masks included: one stands for any number of rows and networks."""
        return replace(self, rows=self.block_rows + 1, networks=1)

    @property
    def blocks_per_program(self) -> int:
        """Blocks of rows that a program of the backward kernel goes through."""
        return pl.cdiv(pl.cdiv(self.rows, self.backward_block_rows), max(1, self.programs // self.networks))


def _pack(plan: _Plan, layers: Sequence[Layer]) -> jax.Array:
    """All weights as one array, `[networks, weights]`, each layer widened with zeros to the sizes of the kernels.

    The units that this adds are zero after every activation, and the gradients of their weights are left out again
    when this function is differentiated.
    """
    parts = []
    for (kernel, bias), (n_in, n_out, _, _) in zip(layers, plan.spans, strict=True):
        kernel = jnp.pad(kernel, ((0, 0), (0, n_in - kernel.shape[1]), (0, n_out - kernel.shape[2])))
        parts += [kernel.reshape(plan.networks, n_in * n_out), _widen(bias, n_out)]
    return jnp.concatenate(parts, axis=1)


def _unpack(plan: _Plan, packed: jax.Array) -> list[Layer]:
    """The widened layers of one network from its row `[weights]`."""
    return [
        (packed[kernel:bias].reshape(n_in, n_out), packed[bias : bias + n_out])
        for n_in, n_out, kernel, bias in plan.spans
    ]


@functools.cache
def _operation(plan: _Plan) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Inputs `[rows, F]` and weights `[networks, weights]` to outputs `[networks, rows, O]`, with its derivative."""

    @jax.custom_vjp
    def apply(x: jax.Array, weights: jax.Array) -> jax.Array:
        return _on_platform(plan, _forward, _plain, x, weights)

    def forward(x: Any, weights: Any) -> tuple[jax.Array, Any]:
        # Whether the inputs need a gradient is known now and static: it is said by the structure of what is kept.
        wants_dx = ("yes",) if x.perturbed else ()
        return apply(x.value, weights.value), (x.value, weights.value, dict.fromkeys(wants_dx))

    def backward(kept: Any, gradient: Any) -> tuple[jax.Array | None, jax.Array]:
        x, weights, wants_dx = kept
        if isinstance(gradient, SymbolicZero):
            gradient = jnp.zeros(gradient.shape, gradient.dtype)
        kernels, plain = (functools.partial(f, wants_dx=bool(wants_dx)) for f in (_backward, _plain_backward))
        dx, dweights = _on_platform(plan, kernels, plain, x, weights, gradient)
        return dx, dweights

    apply.defvjp(forward, backward, symbolic_zeros=True)
    return apply


def _on_platform(plan: _Plan, kernel: Callable[..., Any], plain: Callable[..., Any], *arguments: jax.Array) -> Any:
    kernel, plain = functools.partial(kernel, plan), functools.partial(plain, plan)
    if plan.interpret:
        return kernel(*arguments)
    return lax.platform_dependent(*arguments, cuda=kernel, default=plain)


# --- plain JAX


def _plain(plan: _Plan, x: jax.Array, weights: jax.Array) -> jax.Array:
    x = _widen(x, plan.padded[0])

    def one(packed: jax.Array) -> jax.Array:
        layers, y = _unpack(plan, packed), x
        for index, (kernel, bias) in enumerate(layers):
            y = jnp.dot(y, kernel, precision=plan.precision) + bias[None, :]
            y = y if index == len(layers) - 1 else _ACTIVATIONS[plan.activation][0](y)
        return y[:, : plan.sizes[-1]]

    return jax.vmap(one)(weights)


def _plain_backward(
    plan: _Plan, x: jax.Array, weights: jax.Array, gradient: jax.Array, *, wants_dx: bool
) -> tuple[jax.Array | None, jax.Array]:
    if wants_dx:
        return jax.vjp(functools.partial(_plain, plan), x, weights)[1](gradient)
    return None, jax.vjp(functools.partial(_plain, plan, x), weights)[1](gradient)[0]


# --- the forward kernel


def _forward(plan: _Plan, x: jax.Array, weights: jax.Array) -> jax.Array:
    rows = plan.block_rows
    return pl.pallas_call(
        functools.partial(_forward_kernel, plan),
        out_shape=jax.ShapeDtypeStruct((plan.networks, plan.rows, plan.sizes[-1]), x.dtype),
        grid=(pl.cdiv(plan.rows, rows), plan.networks),
        in_specs=[
            pl.BlockSpec((rows, plan.padded[0]), lambda block, network: (block, 0)),
            pl.BlockSpec((None, plan.weights), lambda block, network: (network, 0)),
        ],
        out_specs=pl.BlockSpec((None, rows, plan.padded[-1]), lambda block, network: (network, block, 0)),
        compiler_params=triton.CompilerParams(num_warps=plan.num_warps, num_stages=1),
        interpret=plan.interpret,
        name="fused_mlp_forward",
    )(x, weights)


def _forward_kernel(plan: _Plan, x_ref: Any, weights_ref: Any, out_ref: Any) -> None:
    begin = pl.program_id(0) * plan.block_rows
    inside = plan.rows % plan.block_rows == 0
    y = _load_rows(plan, x_ref, begin, plan.sizes[0], inside)
    activate, _ = _ACTIVATIONS[plan.activation]
    for index, span in enumerate(plan.spans):
        kernel, bias = _load_layer(weights_ref, span)
        y = _dot(plan, y, kernel) + bias[None, :]
        y = y if index == len(plan.spans) - 1 else activate(y)
    triton.store(out_ref, y, mask=_mask(plan, begin, y.shape, plan.sizes[-1], inside))


# --- the backward kernel


def _backward(
    plan: _Plan, x: jax.Array, weights: jax.Array, gradient: jax.Array, *, wants_dx: bool
) -> tuple[jax.Array | None, jax.Array]:
    rows = plan.blocks_per_program * plan.backward_block_rows
    programs = pl.cdiv(plan.rows, rows)
    out_shape = [jax.ShapeDtypeStruct((programs, plan.networks, plan.weights), x.dtype)]
    out_specs = [pl.BlockSpec((None, None, plan.weights), lambda program, network: (program, network, 0))]
    if wants_dx:
        out_shape.append(jax.ShapeDtypeStruct((plan.networks, *x.shape), x.dtype))
        out_specs.append(pl.BlockSpec((None, rows, plan.padded[0]), lambda program, network: (network, program, 0)))
    partial_sums, *dx = pl.pallas_call(
        functools.partial(_backward_kernel, plan),
        out_shape=out_shape,
        grid=(programs, plan.networks),
        in_specs=[
            pl.BlockSpec((rows, plan.padded[0]), lambda program, network: (program, 0)),
            pl.BlockSpec((None, plan.weights), lambda program, network: (network, 0)),
            pl.BlockSpec((None, rows, plan.padded[-1]), lambda program, network: (network, program, 0)),
        ],
        out_specs=out_specs,
        compiler_params=triton.CompilerParams(num_warps=plan.backward_num_warps, num_stages=1),
        interpret=plan.interpret,
        name="fused_mlp_backward",
    )(x, weights, gradient)
    return (jnp.sum(dx[0], axis=0) if wants_dx else None), jnp.sum(partial_sums, axis=0)


def _backward_kernel(
    plan: _Plan, x_ref: Any, weights_ref: Any, gradient_ref: Any, partial_ref: Any, dx_ref: Any = None
) -> None:
    rows, count = plan.backward_block_rows, plan.blocks_per_program
    first = pl.program_id(0) * (count * rows)
    inside = plan.rows % (count * rows) == 0
    activate, derivative = _ACTIVATIONS[plan.activation]
    layers = [_load_layer(weights_ref, span) for span in plan.spans]

    def block(index: jax.Array, sums: list[Layer]) -> list[Layer]:
        # Rows past the end are zeros with a gradient of zero, and add nothing.
        begin = first + index * rows
        here = (pl.ds(index * rows, rows), slice(None))
        x = _load_rows(plan, x_ref.at[here], begin, plan.sizes[0], inside)
        d = _load_rows(plan, gradient_ref.at[here], begin, plan.sizes[-1], inside)
        before, inputs = [], [x]
        for kernel, bias in layers[:-1]:
            before.append(_dot(plan, inputs[-1], kernel) + bias[None, :])
            inputs.append(activate(before[-1]))
        new = []
        for number in reversed(range(len(layers))):
            dkernel, dbias = sums[number]
            new.append((dkernel + _kernel_gradient(plan, inputs[number], d), dbias + jnp.sum(d, axis=0)))
            if number > 0:
                d = _dot(plan, d, layers[number][0], (1, 1)) * derivative(before[number - 1], inputs[number])
        if dx_ref is not None:
            dx = _dot(plan, d, layers[0][0], (1, 1))
            triton.store(dx_ref.at[here], dx, mask=_mask(plan, begin, dx.shape, plan.sizes[0], inside))
        return new[::-1]

    zeros = [
        (jnp.zeros((n_out, n_in) if _is_transposed(n_in) else (n_in, n_out)), jnp.zeros(n_out))
        for n_in, n_out, _, _ in plan.spans
    ]
    for span, (dkernel, dbias) in zip(plan.spans, lax.fori_loop(0, count, block, zeros), strict=True):
        n_in, _, _, _ = span
        kernel_at, bias_at = _positions(span, transposed=_is_transposed(n_in))
        triton.store(partial_ref.at[kernel_at], dkernel)
        triton.store(partial_ref.at[bias_at], dbias)


def _is_transposed(n_in: int) -> bool:
    return n_in < NARROW


def _kernel_gradient(plan: _Plan, inputs: jax.Array, d: jax.Array) -> jax.Array:
    """The sum over rows of inputs ⊗ d, `[i, o]` or transposed."""
    if _is_transposed(inputs.shape[1]):
        return _dot(plan, d, inputs, (0, 0))
    return _dot(plan, inputs, d, (0, 0))


# --- what both share


def _dot(plan: _Plan, a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """The product of two matrices over one axis of each."""
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, axes, precision=plan.precision, preferred_element_type=jnp.float32)


def _load_rows(plan: _Plan, ref: Any, begin: jax.Array, width: int, inside: bool) -> jax.Array:
    """A block of rows, with zeros past the last row and past the last of `width` columns."""
    mask = _mask(plan, begin, ref.shape, width, inside)
    return triton.load(ref, mask=mask, other=None if mask is None else 0.0)


def _mask(plan: _Plan, begin: jax.Array, shape: tuple[int, ...], width: int, inside: bool) -> jax.Array | None:
    """Where a block is in the array, whose rows all blocks keep to if `inside`; `None` where it is everywhere."""
    masks = []
    if not inside:
        masks.append(begin + lax.broadcasted_iota(jnp.int32, shape, 0) < plan.rows)
    if width != shape[1]:
        masks.append(lax.broadcasted_iota(jnp.int32, shape, 1) < width)
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _load_layer(ref: Any, span: tuple[int, int, int, int]) -> Layer:
    kernel_at, bias_at = _positions(span)
    return triton.load(ref.at[kernel_at]), triton.load(ref.at[bias_at])


def _positions(span: tuple[int, int, int, int], *, transposed: bool = False) -> Layer:
    """Where the kernel, `[i, o]` or transposed, and the bias of a layer are among all weights."""
    n_in, n_out, kernel, bias = span
    shape, row, column = ((n_out, n_in), 1, 0) if transposed else ((n_in, n_out), 0, 1)
    inputs, outputs = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (row, column))
    return kernel + inputs * n_out + outputs, bias + lax.broadcasted_iota(jnp.int32, (n_out,), 0)
