"""MLPs with a gradient that is written by hand: the same numbers as what JAX derives."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr import kernels
from lehr.kernels import mlp_cpu
from tests.small import quick_first

KEYS = jax.random.split(jax.random.key(0), 8)


def weights(key, *shape):
    return 0.3 * jax.random.normal(key, shape)


LAYERS = [
    (weights(KEYS[0], 2, 4, 16), weights(KEYS[1], 2, 16)),
    (weights(KEYS[2], 2, 16, 8), weights(KEYS[3], 2, 8)),
]
HEADS = {0: (weights(KEYS[4], 8, 3), weights(KEYS[5], 3)), 1: (weights(KEYS[6], 8, 1), weights(KEYS[7], 1))}
X = jax.random.normal(jax.random.key(1), (5, 6, 4))


def derived(x, layers, heads, activation):
    """The same MLPs, differentiated by JAX."""
    outputs = []
    for index, (kernel, bias) in heads.items():
        y = x
        for kernels_, biases in layers:
            y = jnp.einsum("...i,io->...o", y, kernels_[index])
            y = mlp_cpu.ACTIVATIONS[activation](y + jnp.broadcast_to(biases[index], y.shape))
        y = jnp.einsum("...i,io->...o", y, kernel)
        outputs.append(y + jnp.broadcast_to(bias, y.shape))
    return tuple(outputs)


def total(function, activation):
    """A loss in which every output has a gradient of its own."""

    def loss(x, layers, heads):
        outputs = function(x, layers, heads, activation)
        return sum(jnp.sum(jnp.sin(output) * (1 + number)) for number, output in enumerate(outputs))

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


def assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)


@pytest.mark.parametrize("activation", quick_first(mlp_cpu.ACTIVATIONS, 2))
@pytest.mark.parametrize("rows", [(), (1,), (30,), (5, 6)])
def test_outputs_and_gradients_are_those_that_jax_derives(activation, rows):
    x = X.reshape(-1, 4)[: math.prod(rows)].reshape(*rows, 4)
    found, expected = (
        jax.jit(total(function, activation))(x, LAYERS, HEADS) for function in (mlp_cpu.evaluate, derived)
    )
    assert_close(found, expected)
    shapes = [output.shape for output in mlp_cpu.evaluate(x, LAYERS, HEADS, activation)]
    assert shapes == [(*rows, 3), (*rows, 1)]


def test_members_of_a_population_are_evaluated_apart():
    members = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, -leaf]), (LAYERS, HEADS))
    found = jax.vmap(lambda member: total(mlp_cpu.evaluate, "tanh")(X, *member))(members)
    for number in range(3):
        one = jax.tree.map(lambda leaf, number=number: leaf[number], members)
        assert_close(jax.tree.map(lambda leaf: leaf[number], found), total(derived, "tanh")(X, *one))  # noqa: B023


def products_over_rows(function):
    """Whether the rows are the last axis of the first argument, for each product that sums over all 30 of them."""
    found = []

    def go_through(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                ((axis,), _), _ = equation.params["dimension_numbers"]
                shape = equation.invars[0].aval.shape
                found.extend([axis == len(shape) - 1] if shape[axis] == 30 else [])
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    go_through(inner)

    go_through(jax.make_jaxpr(total(function, "tanh"))(X.reshape(30, 4), LAYERS, HEADS).jaxpr)
    return found


def test_products_over_rows_have_one_argument_transposed():
    assert products_over_rows(mlp_cpu.evaluate) == [True] * 4  # two heads, and two layers of both MLPs
    assert not any(products_over_rows(derived))


# --- the choice


def is_chosen(x=X, layers=LAYERS, heads=HEADS, activation="tanh"):
    return kernels.is_chosen("mlp_cpu", x, layers, heads, activation)


def test_only_a_cpu_uses_it(monkeypatch):
    assert is_chosen()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not is_chosen()


def test_what_needs_no_gradient_and_other_types_and_activations_are_left_to_plain_jax():
    assert not is_chosen(heads={0: HEADS[0]})
    assert not is_chosen(heads={1: HEADS[1]})
    assert not is_chosen(activation=jnp.sin)
    assert not is_chosen(activation="sine")
    assert not is_chosen(x=X.astype(jnp.bfloat16))


def test_it_can_be_turned_off(monkeypatch):
    assert kernels.evaluate_mlps(X, LAYERS, HEADS, "tanh") is not None
    monkeypatch.setenv("LEHR_KERNELS", "no-mlp_cpu")
    assert kernels.evaluate_mlps(X, LAYERS, HEADS, "tanh") is None
