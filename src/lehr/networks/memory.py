"""Recurrent layers.

All of them implement one protocol, for sequences of `T` steps in `N` environments:

- `initial_carry(batch_shape)`: zeros, `[*batch_shape, size]` for each part of the carry;
- `step(carry, x)`: one step, `[N, in_features]` to the next carry and features `[N, size]`;
- `unroll(carry, x, reset)`: `T` steps, `[T, N, in_features]` to the last carry and features `[T, N, size]`. Where
  `reset[t]` is true, `x[t]` is the first of an episode, and the carry is set to zero before step `t`.

Products with the input do not depend on the carry, so `unroll` computes them for all steps at once. The carry is always
float32, whatever the `dtype` of the computation.
"""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from lehr import kernels
from lehr.types import Key

Pair: TypeAlias = tuple[jax.Array, jax.Array]
Carry = TypeVar("Carry")


class LSTM(nnx.Module):
    """Long short-term memory, with a carry `(h, c)`.

    `i, f, g, o = x W + h U + b`; `c ← σ(f + 1) c + σ(i) tanh(g)`; `h ← σ(o) tanh(c)`. The 1 is a forget-gate bias: at
    initialisation, the cell keeps most of its state.
    """

    def __init__(self, in_features: int, size: int, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs) -> None:
        self.out_features = size
        self.input = _gates(4, in_features, size, dtype, rngs)
        self.recurrent = _gates(4, size, size, dtype, rngs, use_bias=False)

    def initial_carry(self, batch_shape: tuple[int, ...]) -> Pair:
        """Return zeros."""
        zeros = jnp.zeros((*batch_shape, self.out_features))
        return zeros, zeros

    def step(self, carry: Pair, x: jax.Array) -> tuple[Pair, jax.Array]:
        """Advance one step."""
        return self._advance(carry, self.input(x))

    def unroll(self, carry: Pair, x: jax.Array, reset: jax.Array) -> tuple[Pair, jax.Array]:
        """Advance `T` steps."""
        return _scan(self._advance, carry, self.input(x), reset)

    def _advance(self, carry: Pair, projected: jax.Array) -> tuple[Pair, jax.Array]:
        h, c = carry
        i, f, g, o = jnp.split((projected + self.recurrent(h)).astype(jnp.float32), 4, -1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h


class GRU(nnx.Module):
    """Gated recurrent unit, with a carry `h`.

    `r = σ(x W_r + h U_r + b_r)`; `z` likewise; `n = tanh(x W_n + b_n + r (h U_n + d_n))`; `h ← (1 − z) n + z h`.
    """

    def __init__(self, in_features: int, size: int, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs) -> None:
        self.out_features = size
        self.input = _gates(3, in_features, size, dtype, rngs)
        self.recurrent = _gates(3, size, size, dtype, rngs)

    def initial_carry(self, batch_shape: tuple[int, ...]) -> jax.Array:
        """Return zeros."""
        return jnp.zeros((*batch_shape, self.out_features))

    def step(self, carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Advance one step."""
        return self._advance(carry, self.input(x))

    def unroll(self, carry: jax.Array, x: jax.Array, reset: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Advance `T` steps."""
        return _scan(self._advance, carry, self.input(x), reset)

    def _advance(self, h: jax.Array, projected: jax.Array) -> tuple[jax.Array, jax.Array]:
        from_x = jnp.split(projected.astype(jnp.float32), 3, -1)
        from_h = jnp.split(self.recurrent(h).astype(jnp.float32), 3, -1)
        r = jax.nn.sigmoid(from_x[0] + from_h[0])
        z = jax.nn.sigmoid(from_x[1] + from_h[1])
        n = jnp.tanh(from_x[2] + r * from_h[2])
        h = (1 - z) * n + z * h
        return h, h


class MinGRU(nnx.Module):
    """Minimal gated recurrent unit, with a carry `h`; neither the gate nor the candidate depends on the carry.

    `z, h̃ = σ(x W_z + b_z), x W_h + b_h`; `h ← (1 − z) h + z h̃`. A step is affine in `h`, and affine maps compose
    associatively, so `T` steps take about log T rounds on parallel hardware.
    """

    def __init__(self, in_features: int, size: int, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs) -> None:
        self.out_features = size
        self.input = _gates(2, in_features, size, dtype, rngs)

    def initial_carry(self, batch_shape: tuple[int, ...]) -> jax.Array:
        """Return zeros."""
        return jnp.zeros((*batch_shape, self.out_features))

    def step(self, carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Advance one step."""
        keep, add = self._affine(x)
        h = keep * carry + add
        return h, h

    def unroll(self, carry: jax.Array, x: jax.Array, reset: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Advance `T` steps: `h_t = K_t h_0 + A_t`, where `K` and `A` are composed maps; a reset sets `keep` to 0."""
        h = kernels.gated(carry, *self._gates(x), reset)
        return h[-1], h

    def _affine(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return `keep` and `add` of the step `h ← keep h + add`."""
        gates, bias = self._gates(x)
        gate, candidate = jnp.split(gates + jnp.broadcast_to(bias, gates.shape), 2, -1)
        z = jax.nn.sigmoid(gate)
        return 1 - z, z * candidate

    def _gates(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return gates and candidates without their bias, and the bias: in float32, whatever the layer computes in.

        A step and an unroll round alike, so that the ratio to the policy that acted is 1 before the first update.
        """
        assert self.input.bias is not None
        dtype = self.input.dtype
        gates = (x.astype(dtype) @ self.input.kernel[...].astype(dtype)).astype(jnp.float32)
        return gates, self.input.bias[...].astype(jnp.float32)


def reset_carry(carry: Carry, reset: jax.Array) -> Carry:
    """Set the carry `[..., size]` to zero where `reset`, `[...]`, is true."""
    return jax.tree.map(lambda x: jnp.where(reset[..., None], 0, x), carry)


def _scan(advance: Callable, carry: Carry, projected: jax.Array, reset: jax.Array) -> tuple[Carry, jax.Array]:
    """Advance step by step over the projected inputs `[T, N, gates × size]`."""

    def body(carry: Carry, inputs: tuple[jax.Array, jax.Array]) -> tuple[Carry, jax.Array]:
        x, reset = inputs
        return advance(reset_carry(carry, reset), x)

    return jax.lax.scan(body, carry, (projected, reset))


def _gates(
    count: int, in_features: int, size: int, dtype: jnp.dtype, rngs: nnx.Rngs, use_bias: bool = True
) -> nnx.Linear:
    """Return all gates as one linear layer, each with orthogonal initialisation of gain 1."""
    orthogonal = nnx.initializers.orthogonal()

    def kernel_init(key: Key, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
        return jnp.concatenate([orthogonal(k, (shape[0], size), dtype) for k in jax.random.split(key, count)], -1)

    return nnx.Linear(in_features, count * size, kernel_init=kernel_init, use_bias=use_bias, dtype=dtype, rngs=rngs)


MEMORIES: dict[str, type[LSTM] | type[GRU] | type[MinGRU]] = {"lstm": LSTM, "gru": GRU, "mingru": MinGRU}
"""Recurrent layers by name."""
