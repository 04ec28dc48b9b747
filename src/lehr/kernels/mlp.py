"""A small MLP as one GPU kernel: its activations never leave the chip.

In plain JAX, every layer of an MLP writes its activations to memory, and its gradient reads them back. With many rows
and layers of 64, that traffic takes nearly all the time. Here one program takes a block of rows through all layers, and
another recomputes the activations for the gradient, so that only inputs, outputs and weights are moved; see
`lehr.kernels.mlp_programs`.

Several MLPs of equal sizes on the same input, such as an actor and a critic, are one launch. Programs compiled for
anything but CUDA use plain JAX instead.

Under `jax.vmap` over the members of a population, members are one more axis of the grid; see `lehr.kernels.members`.

Only the first derivative in reverse mode is supported: `jax.jvp`, `jax.linearize` and Hessians need plain JAX.

>>> layers = [(jnp.ones((3, 8)), jnp.zeros(8)), (jnp.ones((8, 8)), jnp.zeros(8)), (jnp.ones((8, 2)), jnp.zeros(2))]
>>> fused_mlp(jnp.ones((5, 3)), layers, "relu").shape
(5, 2)
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from lehr.errors import InputError, closest
from lehr.kernels import lowered, mlp_plan
from lehr.kernels.members import members
from lehr.kernels.mlp_blocks import ACTIVATIONS
from lehr.kernels.mlp_plan import NetworksPlan, Plan, pl
from lehr.kernels.mlp_programs import Layer, Layers, backward, forward

MIN_ROWS = 512
"""Minimum number of rows, of all members of a population, for which the kernels are used."""
FEWEST_ROWS = 16
"""Rows per block, at least: the matrix units take no fewer."""
MAX_IN, MAX_HIDDEN, MAX_OUT = 64, 64, 16
"""The largest layers whose weights and gradients fit on chip together."""

BLOCK_ROWS = 64
"""Rows per block of the forward kernel, a power of two."""
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
FORWARD_PROGRAMS = 1056
"""Programs of the forward kernel, over all networks: eight for each of the 132 processors of an H200."""
PROGRAMS = 264
"""Programs of the backward kernel, over all networks: two for each of the 132 processors of an H200."""
HALF = True
"""Round operands of a tanh network's products to float16 where TF32 is allowed; see `lehr.kernels.mlp_blocks`."""
INTERPRET = False
"""Run the kernels in Pallas's interpreter, on any device, for tests."""


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
    if activation not in ACTIVATIONS:
        raise InputError(f"activation is {activation!r}; {closest(activation, ACTIVATIONS)}")
    stacked = layers[0][0].ndim == 3
    if not stacked:
        layers = [(kernel[None], bias[None]) for kernel, bias in layers]
    *hidden, (kernels, biases) = layers
    outputs = _evaluate(x, hidden, dict(enumerate(zip(kernels, biases, strict=True))), activation, precision)
    return outputs if stacked else outputs[0]


def _evaluate(
    x: jax.Array, hidden: Layers, heads: Mapping[int, Layer], activation: str, precision: lax.PrecisionLike = None
) -> jax.Array:
    """`[N, ..., O]` of the N networks that have a head."""
    plan = plan_of(x, hidden, heads, activation, precision)
    outputs = _operation(plan)(x.reshape(plan.rows, plan.inputs), tuple(hidden), tuple(heads.values()))
    return outputs.reshape(plan.networks, *x.shape[:-1], plan.sizes[-1])


def plan_of(
    x: jax.Array, hidden: Layers, heads: Mapping[int, Layer], activation: str, precision: lax.PrecisionLike = None
) -> Plan:
    """Choose how the kernels evaluate these MLPs; arguments as in `evaluate`."""
    rows, together = math.prod(x.shape[:-1]), members()
    plan = Plan(
        rows=rows,
        first=min(heads),
        inputs=x.shape[-1],
        hidden=tuple(bias.shape[-1] for _, bias in hidden),
        widths=tuple(bias.shape[-1] for _, bias in heads.values()),
        activation=activation,
        precision=precision,
        is_half=HALF and activation == "tanh" and _is_default(precision) and _has_float16(),
        block_rows=BLOCK_ROWS,
        num_warps=NUM_WARPS,
        backward_block_rows=BACKWARD_BLOCK_ROWS,
        backward_num_warps=BACKWARD_NUM_WARPS,
        forward_programs=FORWARD_PROGRAMS,
        programs=PROGRAMS,
        interpret=INTERPRET,
    )
    if together == 1:
        return plan
    needed = max(FEWEST_ROWS, pl.next_power_of_2(rows))
    return replace(
        plan,
        block_rows=min(MEMBER_BLOCK_ROWS, needed),
        num_warps=MEMBER_FEW_NUM_WARPS if needed == FEWEST_ROWS else MEMBER_NUM_WARPS,
        backward_block_rows=min(MEMBER_BACKWARD_BLOCK_ROWS, needed),
        backward_num_warps=MEMBER_BACKWARD_NUM_WARPS,
        forward_programs=max(1, FORWARD_PROGRAMS // together),
        programs=max(1, PROGRAMS // together),
    )


def _is_default(precision: lax.PrecisionLike) -> bool:
    """Whether products may be in TF32."""
    config: Any = jax.config
    allowed = (None, "default", "tensorfloat32", "TF32_TF32_F32")
    return precision in (None, lax.Precision.DEFAULT) and config.jax_default_matmul_precision in allowed


def _has_float16() -> bool:
    """Whether the GPU has all instructions of the float16 programs: `min.NaN` came with compute capability 8.0."""
    return not lowered.capability() or lowered.capability() >= (8, 0)


def is_able() -> bool:
    """Whether JAX has Pallas's Triton backend, and a GPU."""
    return mlp_plan.has_triton(INTERPRET)


def fits(x: jax.Array, layers: Sequence[Layer], heads: Mapping[int, Layer], activation: Any) -> bool:
    """Whether the kernels fit on chip and are faster than plain JAX for these MLPs; arguments as in `evaluate`."""
    hidden = [bias.shape[-1] for _, bias in layers]
    widest = max(bias.shape[-1] for _, bias in heads.values())
    small = x.shape[-1] <= MAX_IN and len(hidden) == 2 and max(hidden) <= MAX_HIDDEN and widest <= MAX_OUT
    known = isinstance(activation, str) and activation in ACTIVATIONS
    return small and known and math.prod(x.shape[:-1]) * members() >= MIN_ROWS


def evaluate(
    x: jax.Array, layers: Sequence[Layer], heads: Mapping[int, Layer], activation: str
) -> tuple[jax.Array, ...]:
    """Evaluate some of M MLPs of equal hidden sizes, each with its own last layer; raise if JAX cannot compile it.

    Args:
        x: `[..., F]`.
        layers: `[M, i, o]` and `[M, o]` each, of all M MLPs.
        heads: `[i, O]` and `[O]` by the index of each MLP to evaluate; indices must be consecutive and ascending.
        activation: its name.

    Returns:
        The outputs of each head, `[..., O]`.
    """
    if refusal := _refusal(plan_of(x, layers, heads, activation).probe):
        raise NotImplementedError(refusal)
    outputs = _evaluate(x, layers, heads, activation)
    widths = (bias.shape[-1] for _, bias in heads.values())
    return tuple(output[..., :width] for output, width in zip(outputs, widths, strict=True))


def _refusal(plan: Plan) -> str:
    """Why JAX does not compile the programs of this plan with its present options, or ""."""
    return _refused(plan, lowered.settings())


@functools.cache
def _refused(plan: Plan, settings: str) -> str:
    """Try to lower both programs for a GPU, before they are part of a larger one; return the error, or "".

    Always "" in the interpreter.
    """
    if plan.interpret:
        return ""

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    held = plan.first + plan.networks
    hidden = [(array(held, n_in, n_out), array(held, n_out)) for n_in, n_out in itertools.pairwise(plan.sizes[:-1])]
    heads = [(array(plan.sizes[-2], width), array(width)) for width in plan.widths]
    gradient = array(plan.networks, plan.rows, plan.sizes[-1])

    def both(x: jax.Array, hidden: Layers, heads: Layers, gradient: jax.Array) -> Any:
        return forward(plan, x, hidden, heads), backward(plan, x, hidden, heads, gradient, wants_dx=True)

    try:
        lowered.check(f"mlp {plan}", both, array(plan.rows, plan.inputs), hidden, heads, gradient)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@functools.cache
def _operation(plan: Plan) -> Callable[[jax.Array, Layers, Layers], jax.Array]:
    """Return a differentiable map from `[rows, F]` inputs, hidden layers and heads to `[networks, rows, O]`."""

    @jax.custom_vjp
    def apply(x: jax.Array, hidden: Layers, heads: Layers) -> jax.Array:
        return on_platform(plan, forward, _plain, x, hidden, heads)

    def apply_forward(x: Any, hidden: Any, heads: Any) -> tuple[jax.Array, Any]:
        # Whether the inputs need a gradient is static and known here; the structure of the residuals passes it on.
        wants_dx = ("yes",) if x.perturbed else ()
        values = (x.value, *jax.tree.map(lambda leaf: leaf.value, (hidden, heads), is_leaf=has_value))
        return apply(*values), (*values, dict.fromkeys(wants_dx))

    def apply_backward(kept: Any, gradient: Any) -> tuple[jax.Array | None, Layers, Layers]:
        x, hidden, heads, wants_dx = kept
        if isinstance(gradient, SymbolicZero):
            gradient = jnp.zeros(gradient.shape, gradient.dtype)
        kernels, plain = (functools.partial(f, wants_dx=bool(wants_dx)) for f in (backward, _plain_backward))
        dx, layers = on_platform(plan, kernels, plain, x, hidden, heads, gradient)
        return dx, *of_all(plan, layers, hidden[0][0].shape[0] if hidden else plan.networks)

    apply.defvjp(apply_forward, apply_backward, symbolic_zeros=True)
    return apply


def has_value(leaf: Any) -> bool:
    """Whether a leaf is an argument with its perturbation, as `custom_vjp` passes it with symbolic zeros."""
    return hasattr(leaf, "perturbed")


def of_all(plan: NetworksPlan, layers: Layers, held: int) -> tuple[Layers, Layers]:
    """Return the gradients of the hidden layers of all `held` networks, and of the heads, each in its own shape."""
    *hidden, (kernels, biases) = layers
    others = (plan.first, held - plan.first - plan.networks)
    if any(others):  # networks that were not evaluated have no gradient
        hidden = [
            (jnp.pad(kernel, (others, (0, 0), (0, 0))), jnp.pad(bias, (others, (0, 0)))) for kernel, bias in hidden
        ]
    heads = [(kernels[index, :, :width], biases[index, :width]) for index, width in enumerate(plan.widths)]
    return tuple(hidden), tuple(heads)


def on_platform(plan: NetworksPlan, kernel: Callable[..., Any], plain: Callable[..., Any], *arguments: Any) -> Any:
    """Call a kernel in a program for CUDA, or in the interpreter, and plain JAX elsewhere; both with the plan first."""
    kernel, plain = functools.partial(kernel, plan), functools.partial(plain, plan)
    return lowered.on_platform(plan.interpret, kernel, plain, *arguments)


def _plain(plan: Plan, x: jax.Array, hidden: Layers, heads: Layers) -> jax.Array:
    """The same in plain JAX."""
    used = slice(plan.first, plan.first + plan.networks)
    activate, _ = ACTIVATIONS[plan.activation]
    kernels, biases = (
        jnp.stack([_widen(part, plan.sizes[-1]) for part in parts]) for parts in zip(*heads, strict=True)
    )

    def one(layers: Layers, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        y = x
        for inner, inner_bias in layers:
            y = activate(jnp.dot(y, inner, precision=plan.precision) + inner_bias[None, :])
        return jnp.dot(y, kernel, precision=plan.precision) + bias[None, :]

    return jax.vmap(one)([(kernel[used], bias[used]) for kernel, bias in hidden], kernels, biases)


def _widen(x: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def _plain_backward(
    plan: Plan, x: jax.Array, hidden: Layers, heads: Layers, gradient: jax.Array, *, wants_dx: bool
) -> tuple[jax.Array | None, list[Layer]]:
    """The gradients in plain JAX, in the shapes of the kernel's."""
    _, pull = jax.vjp(functools.partial(_plain, plan), x, hidden, heads)
    dx, dhidden, dheads = pull(gradient)
    used = slice(plan.first, plan.first + plan.networks)
    kernels, biases = ([_widen(part, plan.sizes[-1]) for part in parts] for parts in zip(*dheads, strict=True))
    layers = [(kernel[used], bias[used]) for kernel, bias in dhidden]
    return (dx if wants_dx else None), [*layers, (jnp.stack(kernels), jnp.stack(biases))]
