"""Products with the Jacobian of small MLPs, the kernels interpreted, against `jax.linearize` in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from lehr import kernels
from lehr.algorithms import trpo
from lehr.kernels import mlp, mlp_blocks, mlp_tangent
from lehr.networks import NetworkConfig, actor_critic
from lehr.spaces import Box, Discrete
from tests.kernels.test_mlp import assert_close, learning, rows


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    for name, value in {
        "INTERPRET": True,
        "BLOCK_ROWS": 32,
        "BACKWARD_BLOCK_ROWS": 16,
        "PROGRAMS": 4,
        "MIN_ROWS": 1,
    }.items():
        monkeypatch.setattr(mlp, name, value)
    monkeypatch.setattr(mlp_tangent, "BLOCK_ROWS", 16)
    monkeypatch.setattr(mlp_blocks, "OPERAND", jnp.float32)  # what is scaled for float16, but not rounded


@pytest.fixture
def launches(monkeypatch):
    """How often the kernel is part of a program that is traced from now on."""
    found = []
    kernel = mlp_tangent._by_kernel
    monkeypatch.setattr(mlp_tangent, "_by_kernel", lambda *given: (found.append(1), kernel(*given))[1])
    return found


def policy_at(action_space=None, lead=(3, 7), **changes):
    """A policy as a function of its actor's parameters `[P]`, and such parameters."""
    config = NetworkConfig(hidden_sizes=(16, 24), **changes)
    network, params = actor_critic(Box(-1, 1, (5,)), action_space or Discrete(3), config, jax.random.key(0))
    actor, critic = network.split(params)
    start, unravel = ravel_pytree(actor)
    carry, obs, reset = network.initial_carry(lead), rows(*lead, 5), jnp.zeros(lead, bool)
    start += 0.3 * rows(start.size, seed=4)  # so that no gradient is small
    return lambda parameters: network.act(network.merge(unravel(parameters), critic), carry, obs, reset)[1], start


def products(function, point):
    """The value, J v and Jᵀ u for some v and u."""

    def in_plain_jax(point):
        with kernels.plain():
            return function(point)

    value, forward, transposed, _ = kernels.linearise(function, point, in_plain_jax)
    return value, forward(rows(point.size, seed=2)), transposed(jax.tree.map(lambda x: rows(*x.shape, seed=3), value))


@pytest.mark.parametrize(
    ("action_space", "lead", "changes"),
    [
        (Discrete(3), (3, 7), {}),
        (Discrete(2), (32,), {"activation": "relu"}),
        pytest.param(Box(-1, 1, (2,)), (17,), {"activation": "gelu"}, marks=pytest.mark.slow),
        pytest.param(
            Box(-1, 1, (2,)),
            (4, 4),
            {"activation": "silu", "state_dependent_std": True, "distribution": "tanh_normal"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["discrete", "relu", "box", "squashed"],
)
def test_products_with_the_jacobian_are_those_of_plain_jax(monkeypatch, launches, action_space, lead, changes):
    function, point = policy_at(action_space, lead, **changes)
    found = jax.jit(lambda point: products(function, point))(point)
    assert launches
    launches.clear()
    monkeypatch.setenv("LEHR_KERNELS", "off")
    assert_close(found, jax.jit(lambda point: products(function, point))(point), 2e-5)
    assert not launches


def test_the_products_of_members_of_a_population_are_their_own(monkeypatch, launches):
    function, point = policy_at()
    points = jnp.stack([point, -point, 0.5 * point])
    found = jax.jit(jax.vmap(lambda point: products(function, point)))(points)
    assert launches
    monkeypatch.setenv("LEHR_KERNELS", "off")
    assert_close(found, jax.jit(jax.vmap(lambda point: products(function, point)))(points), 2e-5)


@pytest.mark.parametrize("changes", [{"layer_norm": True}, {"precision": "bfloat16"}, {"activation": jnp.sin}])
def test_other_networks_are_linearised_in_plain_jax(launches, changes):
    function, point = policy_at(**changes)
    jax.eval_shape(lambda point: products(function, point), point)
    assert not launches


def test_a_function_without_a_network_is_linearised(launches):
    value, forward, transposed, _ = kernels.linearise(jnp.sin, jnp.array([0.0, 1.0]), jnp.sin)
    np.testing.assert_allclose(forward(jnp.array([2.0, 3.0])), [2.0, 3.0 * np.cos(1.0)], rtol=1e-6)
    np.testing.assert_allclose(transposed(jnp.array([2.0, 3.0])), [2.0, 3.0 * np.cos(1.0)], rtol=1e-6)
    np.testing.assert_allclose(value, [0.0, np.sin(1.0)], rtol=1e-6)


def test_inputs_that_depend_on_the_parameters_are_left_to_plain_jax(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "_warned", set())
    config = NetworkConfig(hidden_sizes=(16, 16))
    network, params = actor_critic(Box(-1, 1, (4,)), Discrete(3), config, jax.random.key(0))
    carry, reset = network.initial_carry((5,)), jnp.zeros(5, bool)

    def function(scale):
        return network.act(params, carry, scale[0] * rows(5, 4), reset)[1]

    found = products(function, jnp.ones(1))
    assert "mlp_tangent" in caplog.text
    monkeypatch.setenv("LEHR_KERNELS", "off")
    assert_close(found, products(function, jnp.ones(1)))


@pytest.mark.slow
def test_an_update_of_trpo_is_the_same(monkeypatch, launches):
    coef = {"value_learning_rate": 0.01, "target_kl": 0.01, "damping": 0.1, "line_search_shrink": 0.5}
    update, params = learning(trpo, trpo.Config(value_epochs=1, value_minibatches=1, optimiser="sgd"), **coef)
    found = jax.jit(update)(params)
    assert launches
    monkeypatch.setenv("LEHR_KERNELS", "off")
    jax.clear_caches()
    expected = jax.jit(lambda params: update(params))(params)
    assert_close(jax.tree.map(jnp.subtract, found, params), jax.tree.map(jnp.subtract, expected, params), 1e-3)
