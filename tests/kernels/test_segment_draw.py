"""A draw of segments by priority as one kernel, interpreted, against the draw in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.kernels import segment_draw
from lehr.maths.minibatches import LEAST_LOGARITHM, PRIORITY_FLOOR, prioritised, prioritised_draws


@pytest.fixture
def interpreted(monkeypatch):
    """Any backend is able; yields the sizes of the draws that were made by the kernel."""
    made, drawn = [], segment_draw._drawn

    def spy(size, *rest):
        made.append(size)
        return drawn(size, *rest)

    monkeypatch.setattr(segment_draw, "INTERPRET", True)
    monkeypatch.setattr(segment_draw, "_drawn", spy)
    return made


def plainly(monkeypatch, *given):
    with monkeypatch.context() as patch:
        patch.setenv("LEHR_KERNELS", "no-segment_draw")
        return prioritised(*given)


def draw_of(seed, length):
    return jax.tree.map(lambda leaf: leaf[0], prioritised_draws(jax.random.key(seed), length, 1, replace=False))


PRIORITIES = {
    "alike": lambda x: 1.0 + 0.1 * x,
    "unequal": lambda x: jnp.exp(2.0 * x),
    "a few certain": lambda x: jnp.where(jnp.arange(len(x)) % 17 == 3, 50.0, 1.0) + x**2,
    "hardly any": lambda x: jnp.where(jnp.arange(len(x)) < 3, 1.0, 0.0),
    "none": jnp.zeros_like,
}


@pytest.mark.parametrize("kind", PRIORITIES)
@pytest.mark.parametrize(
    ("length", "size"),
    [
        (64, 8),
        pytest.param(100, 37, marks=pytest.mark.slow),
        pytest.param(256, 255, marks=pytest.mark.slow),
    ],
)
def test_segments_and_weights_are_those_of_plain_jax(interpreted, monkeypatch, kind, length, size):
    priorities = PRIORITIES[kind](jnp.abs(jax.random.normal(jax.random.key(length), (length,))))
    for seed in range(3):
        given = draw_of(seed, length), priorities, 0.8, 0.6, size
        indices, weights = prioritised(*given)
        expected, expected_weights = plainly(monkeypatch, *given)
        assert len(set(indices.tolist())) == size
        np.testing.assert_array_equal(indices, expected)
        np.testing.assert_allclose(weights, expected_weights, rtol=2e-4)
    assert interpreted == [size] * 3


def test_segments_are_drawn_as_often_as_their_weights_say(interpreted):
    priorities, size = jnp.array([1.0, 1.0, 2.0, 4.0, 40.0, 3.0]), 3
    draws = prioritised_draws(jax.random.key(0), len(priorities), 4000, replace=False)
    indices, weights = jax.vmap(lambda draw: prioritised(draw, priorities, 1.0, 1.0, size))(draws)
    often = np.bincount(np.asarray(indices).reshape(-1), minlength=len(priorities)) / 4000
    # One is certain, so that two of the others are drawn, whose priorities sum to 11.
    np.testing.assert_allclose(often, np.array([2 / 11, 2 / 11, 4 / 11, 8 / 11, 1.0, 6 / 11]), atol=0.03)
    np.testing.assert_allclose(
        weights, 0.5 / jnp.array([2 / 11, 2 / 11, 4 / 11, 8 / 11, 1.0, 6 / 11])[indices], rtol=1e-4
    )


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("exponent", [5.0, 7.0, 40.0])
def test_a_large_exponent_leaves_the_likeliest_certain_and_the_others_alike(
    interpreted, monkeypatch, is_plain, exponent
):
    if is_plain:
        monkeypatch.setenv("LEHR_KERNELS", "no-segment_draw")
    priorities = jnp.zeros(16).at[5].set(1.0)
    draws = prioritised_draws(jax.random.key(0), 16, 200, replace=False)
    indices, weights = jax.vmap(lambda draw: prioritised(draw, priorities, exponent, 0.5, 4))(draws)
    assert np.all(np.any(indices == 5, axis=1))
    assert np.isfinite(weights).all()
    often = np.bincount(np.asarray(indices).reshape(-1), minlength=16) / 200
    np.testing.assert_allclose(np.delete(often, 5), 3 / 15, atol=0.12)
    assert bool(interpreted) != is_plain


def test_a_draw_of_everything_or_with_replacement_is_left_to_plain_jax(interpreted, monkeypatch):
    priorities = jnp.arange(1.0, 9.0)
    for draw, size in ((draw_of(0, 8), 8), (jax.random.key(0), 4)):
        given = draw, priorities, 0.8, 0.6, size
        jax.tree.map(np.testing.assert_array_equal, prioritised(*given), plainly(monkeypatch, *given))
    assert not interpreted


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("length", [4096, 5000])
def test_it_is_lowered_for_a_gpu(length, lowers_for_cuda):
    draw = draw_of(0, length)
    given = draw.permutation, draw.offset, jnp.ones(length), jnp.ones(2)
    found = jax.jit(lambda *arrays: segment_draw._drawn(512, (PRIORITY_FLOOR, LEAST_LOGARITHM), *arrays)).trace(*given)
    assert "segment_draw" in found.lower(lowering_platforms=("cuda",)).as_text()
