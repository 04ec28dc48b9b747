"""Linear recurrences over time: in few passes, row by row, and against a loop."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr import kernels
from lehr.kernels import recurrence


@pytest.mark.parametrize("solve", [recurrence.plain, recurrence.in_strides])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 13])
def test_a_recurrence_equals_a_loop(solve, reverse, steps):
    rng = np.random.default_rng(steps)
    decay, increment = rng.uniform(size=(2, steps, 2)).astype(np.float32)
    expected, x = np.zeros((steps, 2)), np.zeros(2)
    for t in reversed(range(steps)) if reverse else range(steps):
        x = decay[t] * x + increment[t]
        expected[t] = x
    np.testing.assert_allclose(solve(jnp.asarray(decay), jnp.asarray(increment), reverse), expected, rtol=1e-6)


def test_both_ways_agree_over_a_long_rollout_and_the_switch_chooses(monkeypatch):
    rng = np.random.default_rng(0)
    decay = jnp.asarray(np.where(rng.uniform(size=(500, 2)) < 0.01, 0.0, 0.99), jnp.float32)
    increment = jnp.asarray(rng.normal(size=(500, 2)), jnp.float32)
    row_by_row = jax.jit(recurrence.plain, static_argnums=2)(decay, increment, True)
    in_strides = jax.jit(recurrence.in_strides, static_argnums=2)(decay, increment, True)
    np.testing.assert_allclose(row_by_row, in_strides, atol=1e-5)
    assert (row_by_row != in_strides).any()  # rounded differently, so it shows which one was chosen

    def chosen():
        return jax.jit(lambda *given: kernels.linear_recurrence(*given))(decay, increment)

    np.testing.assert_array_equal(chosen(), row_by_row if jax.default_backend() == "cpu" else in_strides)
    monkeypatch.setitem(kernels.KERNELS, "recurrence", replace(kernels.KERNELS["recurrence"], is_able=lambda: True))
    np.testing.assert_array_equal(chosen(), in_strides)
    monkeypatch.setenv("LEHR_KERNELS", "no-recurrence")
    np.testing.assert_array_equal(chosen(), row_by_row)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="must have the same shape"):
        kernels.linear_recurrence(jnp.zeros((8, 1)), jnp.zeros(8))
