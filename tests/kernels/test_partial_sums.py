"""Sums of partial gradients and of their squares, interpreted, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from lehr.kernels import partial_sums


@pytest.mark.parametrize(
    ("size", "holes"), [(40, ()), (45, ((3, 5), (30, 37))), (7, ((0, 1),))], ids=["whole", "holes", "one block"]
)
def test_columns_are_added_and_holes_do_not_count_in_the_squares(monkeypatch, size, holes):
    monkeypatch.setattr(partial_sums, "MOST_BLOCKS", 6)
    monkeypatch.setattr(partial_sums, "LEAST_COLUMNS", 8)
    parts = np.random.default_rng(0).normal(size=(3, size)).astype(np.float32)
    expected = parts.astype(np.float64).sum(0)
    defined = np.ones(size, bool)
    for begin, end in holes:
        defined[begin:end] = False
    found, squares = partial_sums.added(jnp.asarray(parts), holes, interpret=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert squares.shape == (-(-size // 8),)
    np.testing.assert_allclose(np.sum(squares), (expected[defined] ** 2).sum(), rtol=1e-5)
