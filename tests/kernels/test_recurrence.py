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

    def is_row_by_row(platform):
        """Whether a program for this platform has a loop."""
        traced = jax.jit(lambda *given: kernels.linear_recurrence(*given)).trace(decay, increment)
        return "stablehlo.while" in traced.lower(lowering_platforms=(platform,)).as_text()

    monkeypatch.setitem(kernels.KERNELS, "recurrence", replace(kernels.KERNELS["recurrence"], is_able=lambda: True))
    assert is_row_by_row("cpu")  # also on a machine with a GPU
    assert not is_row_by_row("cuda")
    monkeypatch.setenv("LEHR_KERNELS", "no-recurrence")
    assert is_row_by_row("cuda")


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="must have the same shape"):
        kernels.linear_recurrence(jnp.zeros((8, 1)), jnp.zeros(8))
