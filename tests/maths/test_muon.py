"""Muon with all matrices orthogonalised together, against optax's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lehr.maths import muon
from lehr.maths.optimise import _matrices


def params_of(shapes, seed):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        f"layer{index}": {"kernel": jax.random.normal(key, shape), "bias": jax.random.normal(key, shape[-1:])}
        for index, (key, shape) in enumerate(zip(keys, shapes, strict=True))
    }


@pytest.fixture
def batched(monkeypatch):
    """As on an accelerator; yields the shapes of the batches that were iterated."""
    shapes, iterate = [], muon._newton_schulz

    def spy(x, *rest):
        shapes.append(x.shape)
        return iterate(x, *rest)

    monkeypatch.setattr(muon, "launches_are_slow", lambda: True)
    monkeypatch.setattr(muon, "_newton_schulz", spy)
    return shapes


def steps_of(optimiser, shapes, count=3):
    params = params_of(shapes, 0)
    state = optimiser.init(params)
    found = []
    for seed in range(1, count + 1):
        updates, state = optimiser.update(params_of(shapes, seed), state, params)
        found.append(updates)
    return found, state


SHAPES = [(4, 32), (32, 64), (32, 2), (3, 32, 16), (2, 2, 3, 8)]


@pytest.mark.parametrize(("shapes", "batch"), [(SHAPES, (7, 32, 64)), (SHAPES[:3], (3, 32, 64))])
@pytest.mark.parametrize("options", [{}, {"ns_steps": 3, "beta": 0.8, "nesterov": False}])
def test_updates_and_state_are_those_of_optax(batched, shapes, batch, options):
    given = {"muon_weight_dimension_numbers": _matrices, **options}
    found = steps_of(muon.muon(learning_rate=1.0, **given), shapes)
    assert batched == [batch] * 3
    wanted = steps_of(optax.contrib.muon(learning_rate=1.0, **given), shapes)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), found, wanted)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (SHAPES, {"weight_decay": 0.1}),
        (SHAPES, {"consistent_rms": 0.2}),
        (SHAPES, {"preconditioning": "aol"}),
        (SHAPES, {"ns_coeffs": ((3.0, -4.0, 2.0), (2.0, -1.5, 0.5)), "ns_steps": 2}),
        (SHAPES[:1], {}),
        ([(1024, 1024), (4, 4)], {}),
    ],
    ids=["weight decay", "consistent rms", "preconditioning", "coefficients", "one matrix", "large"],
)
def test_other_options_and_large_matrices_are_left_to_optax(batched, shapes, options):
    given = {"muon_weight_dimension_numbers": _matrices, **options}
    found = steps_of(muon.muon(learning_rate=1.0, **given), shapes, count=1)
    assert batched == []
    wanted = steps_of(optax.contrib.muon(learning_rate=1.0, **given), shapes, count=1)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_zero_gradients_stay_zero(batched):
    optimiser = muon.muon(learning_rate=1.0, muon_weight_dimension_numbers=_matrices)
    params = params_of(SHAPES, 0)
    updates, _ = optimiser.update(jax.tree.map(jnp.zeros_like, params), optimiser.init(params), params)
    assert len(batched) == 1
    assert all(not leaf.any() for leaf in jax.tree.leaves(updates))
