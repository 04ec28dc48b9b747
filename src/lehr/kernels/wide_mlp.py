"""Wide MLPs on a GPU: few kernels instead of one for each product, activation and sum.

In plain JAX, the gradient of an actor and a critic with layers of 128 or more is a handful of products. Between them,
activations, their derivatives and the gradients of biases each read and write all activations once more. Here one
program evaluates all layers, and another one takes the gradient back through all of them; see
`lehr.kernels.wide_mlp_programs`. Only the gradients of the larger kernels are left to XLA's products.

Several MLPs of equal sizes on the same input, such as an actor and a critic, are one launch. Programs compiled for
anything but CUDA use plain JAX instead. Layers that stay on chip as a whole are left to `lehr.kernels.mlp`.

Only the first derivative in reverse mode is supported, as in `lehr.kernels.mlp`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from lehr.kernels import lowered, mlp
from lehr.kernels.members import members
from lehr.kernels.mlp_programs import ACTIVATIONS, Layer, Layers, triton
from lehr.kernels.wide_mlp_programs import Plan, backward, forward

CAPABILITIES = ((9, 0),)
"""Compute capabilities with the shared memory that the kernels take, and on which they were measured: Hopper."""
TRIED_BLOCKS = 16
"""Blocks of rows with which the kernels are tried."""
MIN_ROWS = 256
"""Minimum number of rows for which the kernels are used."""
MAX_IN, MAX_HIDDEN, MAX_OUT, MAX_DEPTH = 512, 256, 64, 5
"""The largest layers, and the most hidden ones, for which the kernels are used. (Measured: two hidden layers of 128 and
256, with 4 inputs, in float32. The programs take layers of up to 1024, too.)"""
DTYPES = (jnp.dtype(jnp.float32),)
"""The dtypes for which the kernels are used; they support bfloat16, in which they were not measured."""
MIN_HIDDEN = 32
"""The smallest hidden layer; at least one must be wider than those of `lehr.kernels.mlp`."""
MOST_ACTIVATIONS = 2**29
"""The most numbers to keep for the gradient; more are left to plain JAX, which can evaluate a few rows at a time."""

MANY_ROWS = 8192
"""From so many rows on, blocks are as large as Hopper's matrix units want them; with fewer rows, small blocks keep all
processors busy."""
BLOCK_ROWS, BLOCK_COLUMNS, NUM_WARPS, NUM_STAGES = 128, 256, 8, 3
BACKWARD_BLOCK_ROWS, BACKWARD_BLOCK_COLUMNS, BACKWARD_NUM_WARPS, BACKWARD_NUM_STAGES = 128, 128, 8, 3
FEW_BLOCK_ROWS, FEW_BLOCK_COLUMNS, FEW_NUM_WARPS, FEW_NUM_STAGES = 16, 256, 4, 3
FEW_BACKWARD_BLOCK_ROWS, FEW_BACKWARD_BLOCK_COLUMNS, FEW_BACKWARD_NUM_WARPS, FEW_BACKWARD_NUM_STAGES = 16, 256, 4, 3
DEPTH = 32
"""Inputs of a layer in one step of the loop over them."""


def plan_of(
    x: jax.Array, hidden: Layers, heads: Mapping[int, Layer], activation: str, dtype: Any = jnp.float32
) -> Plan:
    """Choose how the kernels evaluate these MLPs; arguments as in `evaluate`."""
    rows = math.prod(x.shape[:-1])
    many, is_float32 = rows >= MANY_ROWS, jnp.dtype(dtype) == jnp.float32
    blocks = (BLOCK_ROWS, BACKWARD_BLOCK_ROWS) if many else (FEW_BLOCK_ROWS, FEW_BACKWARD_BLOCK_ROWS)
    return Plan(
        rows=math.ceil(rows / max(blocks)) * max(blocks),
        first=min(heads),
        inputs=x.shape[-1],
        hidden=tuple(bias.shape[-1] for _, bias in hidden),
        widths=tuple(bias.shape[-1] for _, bias in heads.values()),
        activation=activation,
        dtype=jnp.dtype(dtype).name,
        block_rows=blocks[0],
        block_columns=BLOCK_COLUMNS if many else FEW_BLOCK_COLUMNS,
        num_warps=NUM_WARPS if many else FEW_NUM_WARPS,
        num_stages=NUM_STAGES if many else FEW_NUM_STAGES,
        backward_block_rows=blocks[1],
        backward_block_columns=BACKWARD_BLOCK_COLUMNS if many else FEW_BACKWARD_BLOCK_COLUMNS,
        backward_num_warps=BACKWARD_NUM_WARPS if many else FEW_BACKWARD_NUM_WARPS,
        backward_num_stages=BACKWARD_NUM_STAGES if many else FEW_BACKWARD_NUM_STAGES,
        depth=DEPTH if is_float32 else 2 * DEPTH,
        transposes=many and is_float32,  # Hopper's units take both layouts of 16-bit numbers
        interpret=mlp.INTERPRET,
    )


def is_able() -> bool:
    """Whether JAX has what the kernels use of Pallas's Triton backend, and a GPU."""
    has = all(hasattr(triton, name) for name in ("debug_barrier", "elementwise_inline_asm"))
    return mlp.is_able() and has and (mlp.INTERPRET or lowered.capability() in CAPABILITIES)


def fits(
    x: jax.Array, layers: Sequence[Layer], heads: Mapping[int, Layer], activation: Any, dtype: Any = jnp.float32
) -> bool:
    """Whether the kernels support these MLPs, and are faster than plain JAX; arguments as in `evaluate`."""
    hidden, rows = [bias.shape[-1] for _, bias in layers], math.prod(x.shape[:-1])
    widest = max(bias.shape[-1] for _, bias in heads.values())
    is_known = isinstance(activation, str) and activation in ACTIVATIONS and jnp.dtype(dtype) in DTYPES
    is_sized = 0 < len(hidden) <= MAX_DEPTH and all(
        MIN_HIDDEN <= size <= MAX_HIDDEN and size.bit_count() == 1 for size in hidden
    )
    is_wide = is_sized and max(hidden) > mlp.MAX_HIDDEN and x.shape[-1] <= MAX_IN and widest <= MAX_OUT
    kept = len(heads) * rows * sum(hidden)
    return is_known and is_wide and members() == 1 and rows >= MIN_ROWS and kept <= MOST_ACTIVATIONS


def evaluate(
    x: jax.Array, layers: Sequence[Layer], heads: Mapping[int, Layer], activation: str, dtype: Any = jnp.float32
) -> tuple[jax.Array, ...]:
    """As `lehr.kernels.mlp.evaluate`, for wider layers; the outputs are float32.

    The dtype is float32, or bfloat16 for the factors of the hidden layers' products, which are summed in float32.
    """
    plan = plan_of(x, layers, heads, activation, dtype)
    if refusal := _refusal(replace(plan, rows=TRIED_BLOCKS * max(plan.block_rows, plan.backward_block_rows))):
        raise NotImplementedError(refusal)
    rows = x.reshape(-1, x.shape[-1])
    outputs = _operation(plan)(_lengthen(rows, plan.rows), tuple(layers), tuple(heads.values()))
    widths = (bias.shape[-1] for _, bias in heads.values())
    return tuple(
        output[: len(rows), :width].reshape(*x.shape[:-1], width) for output, width in zip(outputs, widths, strict=True)
    )


def _lengthen(x: jax.Array, rows: int) -> jax.Array:
    return x if len(x) == rows else jnp.pad(x, ((0, rows - len(x)), (0, 0)))


def _refusal(plan: Plan) -> str:
    """Why JAX does not compile the programs of this plan with its present options, or ""."""
    return _refused(plan, lowered.settings())


@functools.cache
def _refused(plan: Plan, settings: str) -> str:
    """Try both programs before they are part of a larger one; return the error, or "".

    On a GPU, their results for random numbers are compared with those of plain JAX: the layers of a block exchange
    activations through memory, which the interpreter does in another way. Always "" in the interpreter.
    """
    if plan.interpret:
        return ""
    both, in_plain_jax, arguments = _trial(plan)
    try:
        lowered.check(f"wide_mlp {plan}", both, *arguments, plain=in_plain_jax)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _trial(plan: Plan) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
    """Return both programs as one function, the same in plain JAX, and random arguments for which they agree."""
    rng = np.random.default_rng(0)

    def array(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / math.sqrt(shape[-2] if len(shape) > 1 else 4)).astype(np.float32)

    held = plan.first + plan.networks
    sizes = itertools.pairwise((plan.inputs, *plan.hidden))
    hidden = [(array(held, n_in, n_out), array(held, n_out)) for n_in, n_out in sizes]
    heads = [(array(plan.hidden[-1], width), array(width)) for width in plan.widths]
    x = rng.normal(size=(plan.rows, plan.inputs)).astype(np.float32)
    gradient = rng.normal(size=(plan.networks, plan.rows, plan.outputs)).astype(np.float32)
    for network, width in enumerate(plan.widths):
        gradient[network, :, width:] = 0.0  # what only fills a head up is not used

    def in_plain_jax(x: jax.Array, hidden: Layers, heads: Layers, gradient: jax.Array) -> Any:
        outputs, _, _ = _plain(plan, x, hidden, heads, keeps=False)
        return outputs, _plain_backward(plan, x, hidden, heads, gradient, wants_dx=True)

    def both(x: jax.Array, hidden: Layers, heads: Layers, gradient: jax.Array) -> Any:
        outputs, kept, kept_inputs = forward(plan, x, hidden, heads, keeps=True)
        return outputs, backward(plan, x, hidden, heads, kept, kept_inputs, gradient, wants_dx=True)

    return both, in_plain_jax, (x, hidden, heads, gradient)


@functools.cache
def _operation(plan: Plan) -> Callable[[jax.Array, Layers, Layers], jax.Array]:
    """Return a differentiable map from `[rows, F]` inputs, hidden layers and heads to `[networks, rows, O]`."""

    def evaluated(x: jax.Array, hidden: Layers, heads: Layers, *, keeps: bool) -> Any:
        by_kernel, plain = (functools.partial(f, keeps=keeps) for f in (forward, _plain))
        return mlp.on_platform(plan, by_kernel, plain, x, hidden, heads)

    @jax.custom_vjp
    def apply(x: jax.Array, hidden: Layers, heads: Layers) -> jax.Array:
        return evaluated(x, hidden, heads, keeps=False)[0]

    def apply_forward(x: Any, hidden: Any, heads: Any) -> tuple[jax.Array, Any]:
        # Whether the inputs need a gradient is static and known here; the structure of the residuals passes it on.
        wants_dx = ("yes",) if x.perturbed else ()
        values = (x.value, *jax.tree.map(lambda leaf: leaf.value, (hidden, heads), is_leaf=mlp.has_value))
        outputs, *kept = evaluated(*values, keeps=True)
        return outputs, (*values, *kept, dict.fromkeys(wants_dx))

    def apply_backward(saved: Any, gradient: Any) -> tuple[jax.Array | None, Layers, Layers]:
        x, hidden, heads, *kept, wants_dx = saved
        if isinstance(gradient, SymbolicZero):
            gradient = jnp.zeros(gradient.shape, gradient.dtype)
        by_kernel, plain = (functools.partial(f, wants_dx=bool(wants_dx)) for f in (backward, _plain_backward))
        dx, layers = mlp.on_platform(plan, by_kernel, plain, x, hidden, heads, *kept, gradient)
        return dx, *mlp.of_all(plan, layers, len(hidden[0][0]))

    apply.defvjp(apply_forward, apply_backward, symbolic_zeros=True)
    return apply


def _plain(
    plan: Plan, x: jax.Array, hidden: Layers, heads: Layers, *, keeps: bool
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """`forward` in plain JAX."""
    used = slice(plan.first, plan.first + plan.networks)
    activate, _ = ACTIVATIONS[plan.activation]
    y, kept, kept_inputs = jnp.broadcast_to(x, (plan.networks, *x.shape)).astype(plan.dtype), [], []
    multiply = jax.vmap(functools.partial(jnp.dot, preferred_element_type=jnp.float32))
    for kernel, bias in hidden:
        z = multiply(y, kernel[used].astype(plan.dtype)) + bias[used][:, None, :]
        y = activate(z).astype(plan.dtype)
        kept.append(y)
        kept_inputs.append(z.astype(plan.dtype))
    outputs = [
        jnp.pad(jnp.dot(y, kernel) + bias[None, :], ((0, 0), (0, plan.outputs - len(bias))))
        for y, (kernel, bias) in zip(y.astype(jnp.float32), heads, strict=True)
    ]
    return jnp.stack(outputs), kept if keeps else [], kept_inputs if keeps and plan.keeps_inputs else []


def _plain_backward(
    plan: Plan, x: jax.Array, hidden: Layers, heads: Layers, *kept_and_gradient: Any, wants_dx: bool
) -> tuple[jax.Array | None, list[Layer]]:
    """`backward` in plain JAX."""
    *_, gradient = kept_and_gradient
    _, pull = jax.vjp(lambda *given: _plain(plan, *given, keeps=False)[0], x, hidden, heads)
    dx, dhidden, dheads = pull(gradient)
    used = slice(plan.first, plan.first + plan.networks)
    last = [
        jnp.stack([jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, plan.outputs - part.shape[-1])]) for part in parts])
        for parts in zip(*dheads, strict=True)
    ]
    layers = [(kernel[used], bias[used]) for kernel, bias in dhidden]
    return (dx if wants_dx else None), [*layers, (last[0], last[1])]
