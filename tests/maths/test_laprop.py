"""LaProp and adaptive clipping, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.maths.laprop import ROW, Parts, clip_adaptively, laprop
from lehr.maths.optimise import optimiser


def test_laprop_against_its_formula_and_by_its_name():
    random = np.random.default_rng(0)
    gradients = random.normal(size=(30, 7)) * 10.0 ** random.integers(-9, 3, size=7)
    params = random.normal(size=7)
    named = optimiser("laprop")
    packed, unpack = named.pack({"w": jnp.float32(params)})
    state, momentum, square = named.init({"w": jnp.float32(params)}), np.zeros(7), np.zeros(7)
    for number, gradient in enumerate(gradients, 1):
        packed, state, _ = named.step(packed, state, {"w": jnp.float32(gradient)}, 0.01, None)
        square = 0.999 * square + 0.001 * gradient**2
        scaled = gradient / (np.sqrt(square / (1 - 0.999**number)) + 1e-20)
        momentum = 0.9 * momentum + 0.1 * scaled
        params = params - 0.01 * momentum / (1 - 0.9**number)
        np.testing.assert_allclose(unpack(packed)["w"], params, rtol=1e-4, atol=1e-6)


def test_without_a_gradient_nothing_moves():
    one = laprop(1.0)
    change, _ = one.update(jnp.zeros(3), one.init(jnp.zeros(3)))
    assert not np.any(change)


def test_each_array_is_clipped_to_a_fraction_of_its_own_norm():
    random = np.random.default_rng(0)
    params = {"large": random.normal(size=(8, 4)) * 50, "small": random.normal(size=6) * 0.1, "zero": np.zeros(3)}
    gradients = {name: random.normal(size=value.shape) for name, value in params.items()}
    found = jax.jit(clip_adaptively)(jax.tree.map(jnp.float32, gradients), jax.tree.map(jnp.float32, params), 0.3)
    np.testing.assert_allclose(found["large"], gradients["large"], rtol=1e-5)
    assert np.linalg.norm(gradients["small"]) > 0.3 * np.linalg.norm(params["small"])
    for name, most in (("small", 0.3 * np.linalg.norm(params["small"])), ("zero", 0.3 * 1e-3)):
        scale = most / np.linalg.norm(gradients[name])
        np.testing.assert_allclose(found[name], scale * gradients[name], rtol=1e-5)


@pytest.mark.parametrize("sizes", [(5,), (1, 2, 3), (ROW, 1), (3, 2 * ROW + 7, 1, ROW, 2), (ROW + 1, 4 * ROW, ROW - 1)])
def test_the_sums_of_the_parts_of_a_vector(sizes):
    arrays = [np.random.default_rng(index).normal(size=size) for index, size in enumerate(sizes)]
    parts, whole = Parts.of([*arrays, np.zeros((0, 3))]), jnp.float32(np.concatenate(arrays))
    assert parts.sizes == sizes
    np.testing.assert_allclose(parts.sums(whole), [array.sum() for array in arrays], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(parts.owners(), np.repeat(np.arange(len(sizes)), sizes))
