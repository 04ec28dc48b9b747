"""A small MLP as one GPU kernel: its activations never leave the chip.

In plain JAX, every layer of an MLP writes its activations to memory, and its gradient reads them back. With many rows
and layers of 64, that traffic takes nearly all the time. Here one kernel takes a block of rows through all layers, and
another recomputes the activations for the gradient, so that only inputs, outputs and weights are moved:

- forward: each program loads a block of rows and all weights, and stores the outputs;
- backward: each program processes many blocks, accumulates the gradients of the weights on chip, and stores one partial
  sum; the partial sums are then added in a fixed order, so that results are the same from run to run.

Several MLPs of equal sizes on the same input, such as an actor and a critic, are one launch. The kernels are written
with Pallas for its Triton backend; programs compiled for anything but CUDA use plain JAX instead.

Under `jax.vmap` over the members of a population, members are one more axis of the grid; `together` tells how many
there are, since a function that is vmapped cannot see it.

Only the first derivative in reverse mode is supported: `jax.jvp`, `jax.linearize` and Hessians need plain JAX.

>>> layers = [(jnp.ones((3, 8)), jnp.zeros(8)), (jnp.ones((8, 8)), jnp.zeros(8)), (jnp.ones((8, 2)), jnp.zeros(2))]
>>> fused_mlp(jnp.ones((5, 3)), layers, "relu").shape
(5, 2)
"""

import contextlib
import contextvars
import functools
import importlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
except ImportError:  # later JAX versions may drop this backend: use plain JAX
    pl = triton = None

Layer: TypeAlias = tuple[jax.Array, jax.Array]
"""A kernel `[i, o]` and a bias `[o]`; for N networks `[N, i, o]` and `[N, o]`."""

MIN_ROWS = 512
"""Minimum number of rows, of all members of a population, for which the kernels are used."""
FEWEST_ROWS = 16
"""Rows per block, at least: the matrix units take no fewer."""
MAX_IN, MAX_HIDDEN, MAX_OUT = 64, 64, 16
"""The largest layers whose weights and gradients fit on chip together."""

BLOCK_ROWS = 128
"""Rows per block of the forward kernel, a power of two; fewer if there are fewer."""
FEW_ROWS = 16_384
"""With fewer rows in total than this, blocks are half as large, so that more processors are busy."""
NUM_WARPS = 4
"""Warps per program of the forward kernel. Hopper's matrix units need a multiple of four, and 64 rows or more."""
BACKWARD_BLOCK_ROWS = 64
"""Rows per block of the backward kernel, which keeps more per row on chip."""
BACKWARD_NUM_WARPS = 4
"""Warps per program of the backward kernel."""
MEMBER_BLOCK_ROWS = 128
"""As `BLOCK_ROWS`, for each member of a population; fewer if there are fewer."""
MEMBER_NUM_WARPS = 4
MEMBER_FEW_NUM_WARPS = 1
"""Warps for blocks of `FEWEST_ROWS`, as in acting."""
MEMBER_BACKWARD_BLOCK_ROWS = 64
MEMBER_BACKWARD_NUM_WARPS = 4
PROGRAMS = 264
"""Programs of the backward kernel, over all networks: two for each of the 132 processors of an H200."""
NARROW = 64
"""The gradient of a layer with fewer inputs than this is computed transposed, to suit the matrix units."""
INTERPRET = False
"""Run the kernels in Pallas's interpreter, on any device, for tests."""


_members: contextvars.ContextVar[int] = contextvars.ContextVar("members", default=1)


@contextlib.contextmanager
def together(members: int) -> Iterator[None]:
    """Say that what is traced in this scope is vmapped over so many members."""
    token = _members.set(members)
    try:
        yield
    finally:
        _members.reset(token)


def _gelu_derivative(z: jax.Array, y: jax.Array) -> jax.Array:
    return jax.jvp(jax.nn.gelu, (z,), (jnp.ones_like(z),))[1]


def _silu_derivative(z: jax.Array, y: jax.Array) -> jax.Array:
    gate = jax.nn.sigmoid(z)
    return gate * (1.0 + z * (1.0 - gate))


_Activation: TypeAlias = tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array, jax.Array], jax.Array]]
"""y = f(z), and f'(z) from z and y. A derivative that only uses y keeps z out of the registers."""

_ACTIVATIONS: dict[str, _Activation] = {
    "tanh": (jnp.tanh, lambda z, y: 1.0 - y * y),
    "relu": (lambda z: jnp.maximum(z, 0.0), lambda z, y: jnp.where(y > 0.0, 1.0, 0.0)),
    "gelu": (jax.nn.gelu, _gelu_derivative),
    "silu": (jax.nn.silu, _silu_derivative),
    "elu": (jax.nn.elu, lambda z, y: jnp.where(y > 0.0, 1.0, y + 1.0)),
}
"""All of them have f(0) = 0, which `_pack` relies on."""


def fused_mlp(
    x: jax.Array, layers: Sequence[Layer], activation: str, *, precision: lax.PrecisionLike = None
) -> jax.Array:
    """Apply dense layers with an activation between them and none after the last, in float32.

    Args:
        x: `[..., F]`; its gradient is only computed if needed.
        layers: kernels and biases of one network or of N; any number of layers that fit on chip together.
        activation: tanh, relu, gelu, silu or elu.
        precision: of the matrix products, as in `jax.lax.dot`; by default JAX's default, TF32 on a GPU.

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
    rows, members = math.prod(x.shape[:-1]), _members.get()
    plan = _Plan(
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
    if members == 1:
        return plan
    needed = max(FEWEST_ROWS, pl.next_power_of_2(rows))
    return replace(
        plan,
        block_rows=min(MEMBER_BLOCK_ROWS, needed),
        num_warps=MEMBER_FEW_NUM_WARPS if needed == FEWEST_ROWS else MEMBER_NUM_WARPS,
        backward_block_rows=min(MEMBER_BACKWARD_BLOCK_ROWS, needed),
        backward_num_warps=MEMBER_BACKWARD_NUM_WARPS,
        programs=max(1, PROGRAMS // members),
    )


def is_able() -> bool:
    """Whether JAX has Pallas's Triton backend, and a GPU."""
    return triton is not None and (INTERPRET or jax.default_backend() == "gpu")


def fits(x: jax.Array, layers: Sequence[Layer], heads: Mapping[int, Layer], activation: Any) -> bool:
    """Whether the kernels fit on chip and are faster than plain JAX for these MLPs; arguments as in `evaluate`."""
    hidden = [bias.shape[-1] for _, bias in layers]
    widest = max(bias.shape[-1] for _, bias in heads.values())
    small = x.shape[-1] <= MAX_IN and len(hidden) == 2 and max(hidden) <= MAX_HIDDEN and widest <= MAX_OUT
    known = isinstance(activation, str) and activation in _ACTIVATIONS
    return small and known and math.prod(x.shape[:-1]) * _members.get() >= MIN_ROWS


def evaluate(
    x: jax.Array, layers: Sequence[Layer], heads: Mapping[int, Layer], activation: str
) -> tuple[jax.Array, ...]:
    """Evaluate some of M MLPs of equal hidden sizes, each with its own last layer; raise if JAX cannot compile it.

    Args:
        x: `[..., F]`.
        layers: `[M, i, o]` and `[M, o]` each, of all M MLPs.
        heads: `[i, O]` and `[O]` by the index of each MLP to evaluate; indices must be consecutive.
        activation: its name.

    Returns:
        The outputs of each head, `[..., O]`.
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
    """Try to lower both kernels for a GPU, before they are part of a larger program; return the error, or "".

    Always "" in the interpreter.
    """
    if plan.interpret:
        return ""
    shapes = (plan.rows, plan.sizes[0]), (plan.networks, plan.weights), (plan.networks, plan.rows, plan.sizes[-1])

    def both(x: jax.Array, weights: jax.Array, gradient: jax.Array) -> Any:
        return _forward(plan, x, weights), _backward(plan, x, weights, gradient, wants_dx=True)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # compiling the program will repeat them
            arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
            jax.jit(both).trace(*arrays).lower(lowering_platforms=("cuda",))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def stack_heads(heads: Sequence[Layer]) -> Layer:
    """Stack the last layers of several networks, padded with zeros to the same number of outputs."""
    width = max(bias.shape[-1] for _, bias in heads)
    kernels, biases = zip(*((_widen(kernel, width), _widen(bias, width)) for kernel, bias in heads), strict=True)
    return jnp.stack(kernels), jnp.stack(biases)


def _widen(x: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


@dataclass(frozen=True)
class _Plan:
    """Everything static about a call: sizes and tuning."""

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
    """Of the backward kernel, for each member of a population."""
    interpret: bool

    @functools.cached_property
    def padded(self) -> tuple[int, ...]:
        """The sizes that the kernels compute with: powers of two from 16 on, as the matrix units require."""
        return tuple(max(16, pl.next_power_of_2(size)) for size in self.sizes)

    @functools.cached_property
    def spans(self) -> list[tuple[int, int, int, int]]:
        """For each layer: its inputs and outputs, and the offsets of its kernel and its bias in the packed weights."""
        found, begin = [], 0
        for n_in, n_out in itertools.pairwise(self.padded):
            found.append((n_in, n_out, begin, begin + n_in * n_out))
            begin += (n_in + 1) * n_out
        return found

    @property
    def weights(self) -> int:
        """Number of weights of a network, including padding."""
        return sum((n_in + 1) * n_out for n_in, n_out in itertools.pairwise(self.padded))

    @property
    def probe(self) -> "_Plan":
        """The smallest plan with the same kernels and masks, valid for any number of rows and networks."""
        return replace(self, rows=self.block_rows + 1, networks=1)

    @property
    def blocks_per_program(self) -> int:
        """Blocks of rows per program of the backward kernel."""
        return pl.cdiv(pl.cdiv(self.rows, self.backward_block_rows), max(1, self.programs // self.networks))


def _pack(plan: _Plan, layers: Sequence[Layer]) -> jax.Array:
    """Pack all weights into one array, `[networks, weights]`, with each layer padded with zeros to the kernels' sizes.

    The added units are zero after every activation, and differentiating this function drops the gradients of their
    weights.
    """
    parts = []
    for (kernel, bias), (n_in, n_out, _, _) in zip(layers, plan.spans, strict=True):
        kernel = jnp.pad(kernel, ((0, 0), (0, n_in - kernel.shape[1]), (0, n_out - kernel.shape[2])))
        parts += [kernel.reshape(plan.networks, n_in * n_out), _widen(bias, n_out)]
    return jnp.concatenate(parts, axis=1)


def _unpack(plan: _Plan, packed: jax.Array) -> list[Layer]:
    """Return the padded layers of one network from its row `[weights]`."""
    return [
        (packed[kernel:bias].reshape(n_in, n_out), packed[bias : bias + n_out])
        for n_in, n_out, kernel, bias in plan.spans
    ]


@functools.cache
def _operation(plan: _Plan) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a differentiable map from `[rows, F]` inputs and `[networks, weights]` to `[networks, rows, O]`."""

    @jax.custom_vjp
    def apply(x: jax.Array, weights: jax.Array) -> jax.Array:
        return _on_platform(plan, _forward, _plain, x, weights)

    def forward(x: Any, weights: Any) -> tuple[jax.Array, Any]:
        # Whether the inputs need a gradient is static and known here; the structure of the residuals passes it on.
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
        # Rows past the end are zeros with zero gradient, so they add nothing.
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
    """Return the sum over rows of inputs ⊗ d, `[i, o]` or transposed."""
    if _is_transposed(inputs.shape[1]):
        return _dot(plan, d, inputs, (0, 0))
    return _dot(plan, inputs, d, (0, 0))


# --- shared by both kernels


def _dot(plan: _Plan, a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Multiply two matrices over one axis of each."""
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, axes, precision=plan.precision, preferred_element_type=jnp.float32)


def _load_rows(plan: _Plan, ref: Any, begin: jax.Array, width: int, inside: bool) -> jax.Array:
    """Load a block of rows, with zeros past the last row and past column `width`."""
    mask = _mask(plan, begin, ref.shape, width, inside)
    return triton.load(ref, mask=mask, other=None if mask is None else 0.0)


def _mask(plan: _Plan, begin: jax.Array, shape: tuple[int, ...], width: int, inside: bool) -> jax.Array | None:
    """Return where a block lies inside the array; `None` if everywhere. `inside` means that all its rows do."""
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
    """Return the positions of a layer's kernel, `[i, o]` or transposed, and bias in the packed weights."""
    n_in, n_out, kernel, bias = span
    shape, row, column = ((n_out, n_in), 1, 0) if transposed else ((n_in, n_out), 0, 1)
    inputs, outputs = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (row, column))
    return kernel + inputs * n_out + outputs, bias + lax.broadcasted_iota(jnp.int32, (n_out,), 0)
