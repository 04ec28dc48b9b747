"""Recurrent torsos: the steps, the unrolled form, and the resets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lehr.networks import GRU, LSTM, MinGRU
from lehr.networks.memory import reset_carry

MEMORIES = pytest.mark.parametrize("memory_type", [LSTM, GRU, MinGRU])


def sequence(steps=13, envs=4):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps, envs, 3)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(rng.random((steps, envs)) < 0.2)


@MEMORIES
def test_unroll_equals_a_loop_of_steps(memory_type):
    memory = memory_type(3, 8, rngs=nnx.Rngs(0))
    x, reset = sequence()
    assert 0 < reset.sum() < reset.size
    start = jax.tree.map(lambda zeros: zeros + 0.7, memory.initial_carry((4,)))
    last, features = jax.jit(memory.unroll)(start, x, reset)

    carry, step = start, jax.jit(memory.step)
    for t in range(len(x)):
        carry, expected = step(reset_carry(carry, reset[t]), x[t])
        np.testing.assert_allclose(features[t], expected, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), last, carry)


@MEMORIES
def test_a_reset_forgets_what_was_before_and_only_that(memory_type):
    memory = memory_type(3, 8, rngs=nnx.Rngs(0))
    x, _ = sequence(steps=6, envs=2)
    reset = jnp.zeros((6, 2), bool).at[3, 0].set(True)

    def features_after_the_reset(before):
        x_changed = x.at[:3].set(before)
        return jax.jit(memory.unroll)(memory.initial_carry((2,)), x_changed, reset)[1][3:]

    one, other = (features_after_the_reset(jnp.full((3, 2, 3), value)) for value in (0.5, -2.0))
    np.testing.assert_allclose(one[:, 0], other[:, 0], atol=1e-6)
    assert np.abs(one[:, 1] - other[:, 1]).max() > 1e-3


def test_reset_carry_zeroes_only_the_marked_rows():
    carry = {"actor": (jnp.ones((3, 2)), jnp.full((3, 2), 5.0)), "critic": ()}
    h, c = reset_carry(carry, jnp.array([False, True, False]))["actor"]
    assert h.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert c.tolist() == [[5, 5], [0, 0], [5, 5]]


def test_mingru_by_hand():
    """One input, one unit: z = σ(0) = ½ always, candidate = x. h: 4/2; (2 + 2)/2; reset, 6/2; (3 + 1)/2."""
    memory = MinGRU(1, 1, rngs=nnx.Rngs(0))
    memory.input.kernel[...] = jnp.array([[0.0, 1.0]])
    x = jnp.array([4.0, 2.0, 6.0, 1.0]).reshape(4, 1, 1)
    reset = jnp.array([False, False, True, False])[:, None]
    last, features = memory.unroll(jnp.zeros((1, 1)), x, reset)
    assert features.ravel().tolist() == [2, 2, 3, 2]
    assert last.tolist() == [[2]]


def test_mingru_stays_exact_over_long_sequences():
    memory = MinGRU(3, 4, rngs=nnx.Rngs(0))
    x, reset = sequence(steps=300, envs=2)
    start = memory.initial_carry((2,))
    _, parallel = jax.jit(memory.unroll)(start, x, reset)
    _, sequential = jax.lax.scan(lambda h, xs: memory.step(reset_carry(h, xs[1]), xs[0]), start, (x, reset))
    np.testing.assert_allclose(parallel, sequential, atol=1e-5)


def test_lstm_equals_flax_with_its_forget_bias_at_one():
    ours = LSTM(3, 8, rngs=nnx.Rngs(0))
    theirs = nnx.OptimizedLSTMCell(3, 8, rngs=nnx.Rngs(1))
    theirs.dense_i.kernel[...] = ours.input.kernel[...]
    theirs.dense_h.kernel[...] = ours.recurrent.kernel[...]
    theirs.dense_h.bias[...] = jnp.zeros(32).at[8:16].set(1.0)
    h, c, x = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32)
    (h_ours, c_ours), _ = ours.step((h, c), x[:, :3])
    (c_theirs, h_theirs), _ = theirs((c, h), x[:, :3])
    np.testing.assert_allclose(h_ours, h_theirs, rtol=1e-5)
    np.testing.assert_allclose(c_ours, c_theirs, rtol=1e-5)


def test_gru_equals_flax():
    ours = GRU(3, 8, rngs=nnx.Rngs(0))
    theirs = nnx.GRUCell(3, 8, rngs=nnx.Rngs(1))
    theirs.dense_i.kernel[...] = ours.input.kernel[...]
    theirs.dense_h.kernel[...] = ours.recurrent.kernel[...]
    h, x = np.random.default_rng(0).normal(size=(2, 2, 8)).astype(np.float32)
    np.testing.assert_allclose(ours.step(h, x[:, :3])[0], theirs(h, x[:, :3])[0], rtol=1e-5)


@MEMORIES
def test_every_gate_starts_orthogonal(memory_type):
    memory = memory_type(8, 8, rngs=nnx.Rngs(0))
    kernels = [memory.input.kernel[...]]
    if memory_type is not MinGRU:
        kernels.append(memory.recurrent.kernel[...])
    for kernel in kernels:
        for gate in np.split(np.asarray(kernel), kernel.shape[1] // 8, -1):
            np.testing.assert_allclose(gate.T @ gate, np.eye(8), atol=1e-5)


@MEMORIES
def test_the_carry_stays_float32_in_bfloat16(memory_type):
    memory = memory_type(3, 8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x, reset = sequence()
    start = memory.initial_carry((4,))
    last, features = jax.jit(memory.unroll)(start, x, reset)
    exact = jax.jit(memory_type(3, 8, rngs=nnx.Rngs(0)).unroll)(start, x, reset)[1]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((last, features)))
    assert 0 < np.abs(features - exact).max() < 0.1


def test_steps_of_mingru_round_as_an_unroll_does_in_bfloat16():
    """Otherwise the ratio to the policy that acted would not be 1 before the first update."""
    memory = MinGRU(16, 32, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    memory.input.bias[...] = jax.random.normal(jax.random.key(3), (64,))
    x, carry, found = jax.random.normal(jax.random.key(1), (9, 4, 16)), memory.initial_carry((4,)), []
    for row in x:
        carry, h = memory.step(carry, row)
        found.append(h)
    _, unrolled = memory.unroll(memory.initial_carry((4,)), x, jnp.zeros((9, 4), bool))
    np.testing.assert_allclose(np.stack(found), unrolled, atol=1e-5)
