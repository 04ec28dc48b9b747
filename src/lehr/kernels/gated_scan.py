"""The recurrence of a minimal gated recurrent unit over all steps as one GPU kernel, and its gradient as another.

    z = σ(g_t), h_t = (1 − z) h_{t−1} + z c_t

with gates g and candidates c that do not depend on h. In plain JAX, an associative scan passes over all data about
2 log T times, with a kernel for each pass. Here every column of every row is taken through all steps by one thread,
which reads the data once; the loads of several steps are in flight together, as they do not depend on h.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lehr.kernels import lowered, mlp_plan
from lehr.kernels.members import members
from lehr.kernels.mlp_programs import pl, triton

LEAST_COLUMNS = 2**13
"""Minimum number of columns of all rows and members: with fewer, most of the chip is idle."""
BLOCK, NUM_WARPS = 128, 4
"""Columns and warps per program."""
AHEAD = 8
"""Steps whose data is loaded together."""
INTERPRET = False
"""Run the kernels in Pallas's interpreter, on any device, for tests."""


def is_able() -> bool:
    """Whether JAX has Pallas's Triton backend, and a GPU."""
    return mlp_plan.has_triton(INTERPRET)


def fits(carry: jax.Array, gates: jax.Array, bias: jax.Array, reset: jax.Array) -> bool:
    """Whether these arrays are large enough, and not too large for 32-bit indices; arguments as in `unroll`."""
    rows = reset.ndim == 2 and gates.ndim == 3 and carry.ndim == 2
    small = math.prod(gates.shape) < 2**31
    return rows and small and gates.dtype == jnp.float32 and carry.size * members() >= LEAST_COLUMNS


def unroll(carry: jax.Array, gates: jax.Array, bias: jax.Array, reset: jax.Array) -> jax.Array:
    """Return the states `[T, N, S]` of all steps; raise if JAX cannot lower the kernels.

    Args:
        carry: float32 `[N, S]`, the state before the first step.
        gates: float32 `[T, N, 2 S]`: gates and candidates, without their bias.
        bias: float32 `[2 S]`.
        reset: bool `[T, N]`: where the state is set to zero before the step.
    """
    steps, rows, size = *reset.shape, carry.shape[-1]
    if not INTERPRET:
        forward, backward = (functools.partial(f, steps, rows, size) for f in (_forward, _backward))
        lowered.check(f"gated_scan {BLOCK, AHEAD}", forward, carry, gates, bias, reset)
        states = jax.ShapeDtypeStruct((steps, rows, size), jnp.float32)
        lowered.check(f"gated_scan {BLOCK, AHEAD} gradient", backward, carry, gates, bias, reset, states, states)
    return _operation(steps, rows, size)(carry, gates, bias, reset)


def plain(carry: jax.Array, gates: jax.Array, bias: jax.Array, reset: jax.Array) -> jax.Array:
    """The same in plain JAX: affine maps compose associatively; a reset sets `keep` to 0."""
    gate, candidate = jnp.split(gates + bias[None, None], 2, -1)
    z = jax.nn.sigmoid(gate)
    keep, add = jnp.where(reset[..., None], 0, 1 - z), z * candidate

    def compose(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    keep, add = lax.associative_scan(compose, (keep, add))
    return keep * carry[None] + add


@functools.cache
def _operation(steps: int, rows: int, size: int) -> Callable[..., jax.Array]:
    """Return `unroll` for these sizes, with its gradient."""

    @jax.custom_vjp
    def apply(carry: jax.Array, gates: jax.Array, bias: jax.Array, reset: jax.Array) -> jax.Array:
        kernel = functools.partial(_forward, steps, rows, size)
        return lowered.on_platform(INTERPRET, kernel, plain, carry, gates, bias, reset)

    def apply_forward(*given: jax.Array) -> tuple[jax.Array, Any]:
        states = apply(*given)
        return states, (*given, states)

    def apply_backward(kept: Any, gradient: jax.Array) -> tuple[Any, ...]:
        kernel = functools.partial(_backward, steps, rows, size)
        d_carry, d_gates = lowered.on_platform(INTERPRET, kernel, _plain_backward, *kept, gradient)
        return d_carry, d_gates, jnp.sum(d_gates, axis=(0, 1)), None

    apply.defvjp(apply_forward, apply_backward)
    return apply


def _plain_backward(carry: Any, gates: Any, bias: Any, reset: Any, states: Any, gradient: Any) -> tuple[Any, Any]:
    _, pull = jax.vjp(lambda carry, gates: plain(carry, gates, bias, reset), carry, gates)
    return pull(gradient)


def _forward(
    steps: int, rows: int, size: int, carry: jax.Array, gates: jax.Array, bias: jax.Array, reset: jax.Array
) -> jax.Array:
    def kernel(carry_ref: Any, gates_ref: Any, bias_ref: Any, reset_ref: Any, states_ref: Any) -> None:
        at = _Places(rows, size)
        gate_bias, candidate_bias = at.load(bias_ref, at.column), at.load(bias_ref, at.column + size)

        def load(step: Any) -> tuple[jax.Array, ...]:
            place = step * (2 * rows * size) + at.gate
            is_reset = at.load(reset_ref, step * rows + at.row)
            return at.load(gates_ref, place), at.load(gates_ref, place + size), is_reset

        def advance(step: Any, state: jax.Array, given: tuple[jax.Array, ...]) -> jax.Array:
            gate, candidate, is_reset = given
            z = jax.nn.sigmoid(gate + gate_bias)
            state = jnp.where(is_reset != 0, 0.0, state)
            state = state + z * (candidate + candidate_bias - state)
            at.store(states_ref, step * (rows * size) + at.state, state)
            return state

        _in_order(steps, load, advance, at.load(carry_ref, at.state))

    found = _call(kernel, "gated_scan", rows * size, [steps * rows * size], carry, gates, bias, reset.astype(jnp.int32))
    return found[0].reshape(steps, rows, size)


def _backward(
    steps: int,
    rows: int,
    size: int,
    carry: jax.Array,
    gates: jax.Array,
    bias: jax.Array,
    reset: jax.Array,
    states: jax.Array,
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of the carry and of the gates."""

    def kernel(*refs: Any) -> None:
        carry_ref, gates_ref, bias_ref, reset_ref, states_ref, gradient_ref, d_carry_ref, d_gates_ref = refs
        at = _Places(rows, size)
        gate_bias, candidate_bias = at.load(bias_ref, at.column), at.load(bias_ref, at.column + size)
        first = at.load(carry_ref, at.state)

        def load(number: Any) -> tuple[jax.Array, ...]:
            step = steps - 1 - number
            place = step * (2 * rows * size) + at.gate
            before = at.load(states_ref, jnp.maximum(step - 1, 0) * (rows * size) + at.state)
            is_reset = at.load(reset_ref, step * rows + at.row)
            own = at.load(gradient_ref, step * (rows * size) + at.state)
            return at.load(gates_ref, place), at.load(gates_ref, place + size), is_reset, before, own

        def advance(number: Any, later: jax.Array, given: tuple[jax.Array, ...]) -> jax.Array:
            step = steps - 1 - number
            gate, candidate, is_reset, before, own = given
            z, total = jax.nn.sigmoid(gate + gate_bias), own + later
            before = jnp.where(is_reset != 0, 0.0, jnp.where(step == 0, first, before))
            place = step * (2 * rows * size) + at.gate
            at.store(d_gates_ref, place, total * (candidate + candidate_bias - before) * z * (1.0 - z))
            at.store(d_gates_ref, place + size, total * z)
            return jnp.where(is_reset != 0, 0.0, total * (1.0 - z))

        at.store(d_carry_ref, at.state, _in_order(steps, load, advance, jnp.zeros_like(first)))

    sizes = [rows * size, 2 * steps * rows * size]
    given = (carry, gates, bias, reset.astype(jnp.int32), states, gradient)
    d_carry, d_gates = _call(kernel, "gated_scan_gradient", rows * size, sizes, *given)
    return d_carry.reshape(rows, size), d_gates.reshape(steps, rows, 2 * size)


def _call(kernel: Callable[..., None], name: str, columns: int, sizes: list[int], *arrays: jax.Array) -> Any:
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes],
        grid=(pl.cdiv(columns, BLOCK),),
        compiler_params=triton.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=INTERPRET,
        name=name,
    )(*(x.reshape(-1) for x in arrays))


class _Places:
    """Where the columns of this program are in arrays of one step: `[N, S]`, `[N, 2 S]` and `[N]`."""

    def __init__(self, rows: int, size: int) -> None:
        number = pl.program_id(0) * BLOCK + lax.broadcasted_iota(jnp.int32, (BLOCK,), 0)
        self.mask = None if rows * size % BLOCK == 0 else number < rows * size
        self.state, self.row = number, lax.div(number, jnp.int32(size))
        self.column = number - self.row * size
        self.gate = number + self.row * size

    def load(self, ref: Any, places: Any) -> jax.Array:
        return triton.load(ref.at[places], mask=self.mask, other=None if self.mask is None else 0)

    def store(self, ref: Any, places: Any, values: jax.Array) -> None:
        triton.store(ref.at[places], values, mask=self.mask)


def _in_order(
    steps: int, load: Callable[[Any], Any], advance: Callable[[Any, jax.Array, Any], jax.Array], start: jax.Array
) -> jax.Array:
    """Take all steps; the data of several of them is loaded before the first of these."""

    def some(begin: Any, count: int, carried: jax.Array) -> jax.Array:
        given = [load(begin + number) for number in range(count)]
        for number in range(count):
            carried = advance(begin + number, carried, given[number])
        return carried

    whole, rest = divmod(steps, AHEAD)
    carried = lax.fori_loop(0, whole, lambda number, carried: some(number * AHEAD, AHEAD, carried), start)
    return some(whole * AHEAD, rest, carried)
