"""The derivative of a small MLP along a direction of its weights as one GPU kernel: `jax.jvp` for `lehr.kernels.mlp`.

Conjugate gradients need many products with the Jacobian of a policy. In plain JAX, `jax.linearize` keeps the
activations of all rows, and every product reads them and writes as many tangents, layer by layer. Here one program
takes a block of rows through all layers, activations and tangents side by side:

    y' = f(y W + b)
    t' = f'(y W + b) · (t W + y dW + db)

so that only inputs, weights and the tangents of the outputs are moved.
"""

import contextvars
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from lehr.kernels import lowered, mlp
from lehr.kernels.mlp import ACTIVATIONS
from lehr.kernels.mlp_programs import Layer, Layers, Plan, bias_places, kernel_places, padded, pl, triton
from lehr.types import PyTree, in_scope

BLOCK_ROWS = 128
"""Rows per block, a power of two."""
NUM_WARPS = 4


def fits(x: jax.Array, layers: Layers, heads: Mapping[int, Layer], activation: Any) -> bool:
    """Whether one MLP is evaluated, which `lehr.kernels.mlp` supports; arguments as there."""
    return len(heads) == 1 and mlp.fits(x, layers, heads, activation)


# --- which functions evaluate MLPs, and how

_noted: contextvars.ContextVar[list[bool] | None] = contextvars.ContextVar("noted", default=None)
_is_forward: contextvars.ContextVar[bool] = contextvars.ContextVar("is_forward", default=False)


def note(is_supported: bool) -> None:
    """Note that the function that `supports` traces evaluates MLPs with a kernel, and whether also in forward mode."""
    if (found := _noted.get()) is not None:
        found.append(is_supported)


def supports(function: Callable[[PyTree], PyTree], point: PyTree) -> bool:
    """Whether a function evaluates MLPs with kernels, and all of them can be differentiated in forward mode."""
    found: list[bool] = []
    with in_scope(_noted, found):
        jax.eval_shape(function, point)
    return bool(found) and all(found)


def is_forward_mode() -> bool:
    """Whether what is traced is differentiated in forward mode."""
    return _is_forward.get()


def forward_mode() -> AbstractContextManager[None]:
    """Trace a function to differentiate it in forward mode."""
    return in_scope(_is_forward, True)


# --- the operation


def evaluate(x: jax.Array, layers: Layers, heads: Mapping[int, Layer], activation: str) -> tuple[jax.Array, ...]:
    """As `lehr.kernels.mlp.evaluate` for one head, to be differentiated in forward mode by the weights."""
    ((index, head),) = heads.items()
    plan = mlp.plan_of(x, layers, heads, activation)
    hidden = [(kernel[index], bias[index]) for kernel, bias in layers]
    _check(plan, x, hidden, head)

    @jax.custom_jvp
    def apply(x: jax.Array, hidden: Layers, head: Layer) -> jax.Array:
        stacked = [(kernel[None], bias[None]) for kernel, bias in hidden]
        return mlp.evaluate(x, stacked, {0: head}, activation)[0]

    def differentiate(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        if not isinstance(tangents[0], SymbolicZero):
            raise NotImplementedError("inputs that depend on what is differentiated by")
        moves = jax.tree.map(_as_array, tangents[1:], is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
        return apply(*primals), _tangents(plan, *primals, *moves)

    apply.defjvp(differentiate, symbolic_zeros=True)
    return (apply(x, hidden, head),)


def _as_array(leaf: Any) -> jax.Array:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, SymbolicZero) else leaf


def _check(plan: Plan, x: jax.Array, hidden: Layers, head: Layer) -> None:
    if not plan.interpret:
        given = x, hidden, head, hidden, head
        lowered.check(f"mlp_tangent {plan}", functools.partial(_by_kernel, plan), *given)


def _tangents(plan: Plan, x: jax.Array, hidden: Layers, head: Layer, dhidden: Layers, dhead: Layer) -> jax.Array:
    """Return the derivative of the outputs, `[..., O]`, along the given change of the weights."""
    kernel = functools.partial(_by_kernel, plan)
    if plan.interpret:
        return kernel(x, hidden, head, dhidden, dhead)
    plain = functools.partial(_in_plain_jax, plan)
    return lax.platform_dependent(x, hidden, head, dhidden, dhead, cuda=kernel, default=plain)


def _in_plain_jax(plan: Plan, x: jax.Array, hidden: Layers, head: Layer, dhidden: Layers, dhead: Layer) -> jax.Array:
    activate, _ = ACTIVATIONS[plan.activation]

    def outputs(layers: Layers) -> jax.Array:
        y = x.reshape(-1, x.shape[-1])
        for number, (kernel, bias) in enumerate(layers):
            y = jnp.dot(y, kernel, precision=plan.precision) + bias[None, :]
            y = y if number == len(layers) - 1 else activate(y)
        return y.reshape(*x.shape[:-1], -1)

    return jax.jvp(outputs, ([*hidden, head],), ([*dhidden, dhead],))[1]


def _by_kernel(plan: Plan, x: jax.Array, hidden: Layers, head: Layer, dhidden: Layers, dhead: Layer) -> jax.Array:
    rows, width = math.prod(x.shape[:-1]), plan.sizes[-1]
    layers, moves = [*hidden, head], [*dhidden, dhead]
    weights = [part.reshape(-1) for pair in zip(layers, moves, strict=True) for layer in pair for part in layer]
    found = pl.pallas_call(
        functools.partial(_program, plan, rows),
        out_shape=jax.ShapeDtypeStruct((rows, width), x.dtype),
        grid=(pl.cdiv(rows, BLOCK_ROWS),),
        in_specs=[
            pl.BlockSpec((BLOCK_ROWS, padded(plan.inputs)), lambda block: (block, 0)),
            *(pl.BlockSpec(part.shape, lambda block: (0,)) for part in weights),
        ],
        out_specs=pl.BlockSpec((BLOCK_ROWS, padded(width)), lambda block: (block, 0)),
        compiler_params=triton.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=plan.interpret,
        name="mlp_tangent",
    )(x.reshape(rows, -1), *weights)
    return found.reshape(*x.shape[:-1], width)


def _program(plan: Plan, rows: int, x_ref: Any, *refs: Any) -> None:
    *weights, out_ref = refs
    activate, derivative = ACTIVATIONS[plan.activation]
    begin, tangent = pl.program_id(0) * BLOCK_ROWS, None
    y = triton.load(x_ref, mask=_mask(rows, begin, x_ref.shape, plan.inputs), other=0.0)
    for number, (n_in, n_out) in enumerate(zip(plan.sizes, plan.sizes[1:], strict=False)):
        kernel, bias, dkernel, dbias = _load(weights[4 * number : 4 * number + 4], n_in, n_out)
        before = _dot(plan, y, kernel) + bias[None, :]
        moved = _dot(plan, y, dkernel) + dbias[None, :]
        if tangent is not None:
            moved += _dot(plan, tangent, kernel)
        if number < len(plan.hidden):
            y = activate(before)
            moved *= derivative(before, y)
        tangent = moved
    triton.store(out_ref, tangent, mask=_mask(rows, begin, out_ref.shape, plan.sizes[-1]))


def _load(refs: Sequence[Any], n_in: int, n_out: int) -> list[jax.Array]:
    """Load a layer and its change, padded with zeros."""
    places = [kernel_places(n_in, n_out), bias_places(n_out)] * 2
    return [
        triton.load(ref.at[at], mask=mask, other=None if mask is None else 0.0)
        for ref, (at, mask) in zip(refs, places, strict=True)
    ]


def _mask(rows: int, begin: Any, shape: tuple[int, ...], width: int) -> jax.Array:
    """Where a block lies inside an array `[rows, width]`."""
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return (begin + row < rows) & (column < width)


def _dot(plan: Plan, a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=plan.precision, preferred_element_type=jnp.float32)
