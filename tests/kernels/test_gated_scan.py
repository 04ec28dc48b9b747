"""The recurrence of a minimal gated recurrent unit as one kernel, interpreted, against a loop over the steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr import kernels
from lehr.kernels import gated_scan

STEPS, ROWS, SIZE = 19, 12, 24  # neither whole blocks nor whole groups of steps


def arguments(seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    carry, gates = jax.random.normal(keys[0], (ROWS, SIZE)), jax.random.normal(keys[1], (STEPS, ROWS, 2 * SIZE))
    return carry, gates, jax.random.normal(keys[2], (2 * SIZE,)), jax.random.bernoulli(keys[3], 0.1, (STEPS, ROWS))


def by_loop(carry, gates, bias, reset):
    """h ← (1 − z) h + z h̃, step by step, as the class `MinGRU` states it."""
    states = []
    for gate, is_reset in zip(gates + bias[None, None], reset, strict=True):
        z, candidate = jax.nn.sigmoid(gate[:, :SIZE]), gate[:, SIZE:]
        carry = (1 - z) * jnp.where(is_reset[:, None], 0.0, carry) + z * candidate
        states.append(carry)
    return jnp.stack(states)


@pytest.fixture
def interpreted(monkeypatch):
    """Any backend is able, and small arrays fit; yields the names of the kernels that were called."""
    called = []
    call = gated_scan._call

    def spy(kernel, name, *rest):
        called.append(name)
        return call(kernel, name, *rest)

    gated_scan._operation.cache_clear()
    monkeypatch.setattr(gated_scan, "INTERPRET", True)
    monkeypatch.setattr(gated_scan, "LEAST_COLUMNS", 1)
    monkeypatch.setattr(gated_scan, "_call", spy)
    yield called
    gated_scan._operation.cache_clear()


def test_states_and_gradients_are_those_of_a_loop(interpreted):
    given, weights = arguments(), jax.random.normal(jax.random.key(9), (STEPS, ROWS, SIZE))

    def loss(unroll, carry, gates, bias):
        states = unroll(carry, gates, bias, given[3])
        return jnp.sum(weights * states) + jnp.sum(states[-1] ** 2), states

    def of(unroll):
        return jax.value_and_grad(lambda *x: loss(unroll, *x), argnums=(0, 1, 2), has_aux=True)(*given[:3])

    found, wanted = of(kernels.gated), of(by_loop)
    assert interpreted == ["gated_scan", "gated_scan_gradient"]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), found, wanted)


def test_plain_jax_computes_the_same():
    np.testing.assert_allclose(kernels.gated(*arguments()), by_loop(*arguments()), rtol=1e-5, atol=1e-5)


def test_members_of_a_population_have_gates_of_their_own(interpreted):
    stacked = jax.tree.map(lambda *x: jnp.stack(x), arguments(0), arguments(1))
    found = jax.vmap(kernels.gated)(*stacked)
    for index in range(2):
        np.testing.assert_allclose(found[index], by_loop(*arguments(index)), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("kernel", ["_forward", "_backward"])
def test_kernels_are_lowered_for_a_gpu(kernel, lowers_for_cuda):
    states = jnp.zeros((STEPS, ROWS, SIZE))
    given = (*arguments(), *([states, states] if kernel == "_backward" else []))
    function = lambda *x: getattr(gated_scan, kernel)(STEPS, ROWS, SIZE, *x)  # noqa: E731
    jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("carry", "gates"),
    [
        (jnp.zeros((4, 8)), jnp.zeros((16, 4, 16))),
        (jnp.zeros((1024, 64)), jnp.zeros((4, 1024, 128), jnp.bfloat16)),
    ],
    ids=["few columns", "another type"],
)
def test_small_arrays_and_other_types_do_not_fit(carry, gates):
    assert not gated_scan.fits(carry, gates, jnp.zeros(gates.shape[-1]), jnp.zeros(gates.shape[:2], bool))
