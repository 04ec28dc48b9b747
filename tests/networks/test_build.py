"""The glue to nnx: what goes in is a module, what comes out is a static value and a plain dict."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lehr.errors import InputError
from lehr.networks import MLP, Stacked, build


def make(rngs):
    return MLP(3, (4, 5), layer_norm=True, rngs=rngs)


def test_params_are_plain_dicts_of_arrays_with_text_keys():
    _, params = build(make, jax.random.key(0))

    def check(tree):
        if isinstance(tree, jax.Array):
            return
        assert type(tree) is dict
        assert all(type(key) is str for key in tree)
        for inner in tree.values():
            check(inner)

    check(params)
    assert params["layers"]["1"]["kernel"].shape == (4, 5)


def test_apply_equals_the_module_itself():
    network, params = build(make, jax.random.key(0))
    module = make(nnx.Rngs(jax.random.key(0)))
    x = jnp.ones((2, 3))
    np.testing.assert_allclose(network.apply(params, "__call__", x), module(x), rtol=1e-5)


def test_equal_architectures_are_equal_networks_and_others_are_not():
    network, params = build(make, jax.random.key(0))
    same, other_params = build(make, jax.random.key(1))
    wider, _ = build(lambda rngs: MLP(3, (4, 6), layer_norm=True, rngs=rngs), jax.random.key(0))
    assert network == same
    assert hash(network) == hash(same)
    assert network != wider
    assert not np.allclose(params["layers"]["0"]["kernel"], other_params["layers"]["0"]["kernel"])


def test_one_trace_serves_all_parameters_of_an_architecture(count_traces):
    @count_traces
    def apply(network, params, x):
        return network.bind(params)(x)

    compiled = jax.jit(apply, static_argnums=0)
    for seed in range(3):
        network, params = build(make, jax.random.key(seed))
        compiled(network, params, jnp.ones((2, 3)))
    assert apply.traces == 1


@pytest.mark.parametrize(
    "stateful",
    [lambda rngs: nnx.Dropout(0.5, rngs=rngs), lambda rngs: nnx.BatchNorm(3, rngs=rngs)],
    ids=["random numbers", "statistics"],
)
def test_a_module_with_state_is_refused(stateful):
    with pytest.raises(InputError, match=r"not nnx\.Param.*arguments"):
        build(stateful, jax.random.key(0))


@pytest.mark.parametrize("together_rows", [0, 100])
def test_stacked_modules_equal_the_modules_one_by_one(monkeypatch, together_rows):
    monkeypatch.setattr(Stacked, "together_rows", together_rows)
    modules = [MLP(3, (8, 8), layer_norm=True, rngs=nnx.Rngs(seed)) for seed in range(2)]
    stacked = Stacked(*modules)
    x = jax.random.normal(jax.random.key(0), (4, 5, 3))
    together = stacked(x)
    assert [features.shape for features in together] == [(4, 5, 8)] * 2
    assert not np.allclose(together[0], together[1])
    for index, module in enumerate(modules):
        np.testing.assert_allclose(together[index], module(x), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(stacked.only(index, x), module(x), rtol=1e-5, atol=1e-6)


def test_stacked_layers_are_one_product_each_unless_the_input_is_large(monkeypatch):
    stacked = Stacked(*(MLP(3, (8, 8), rngs=nnx.Rngs(seed)) for seed in range(2)))
    x = jnp.ones((6, 3))
    assert str(jax.make_jaxpr(stacked)(x)).count("dot_general[") == 2
    monkeypatch.setattr(Stacked, "together_rows", 5)
    assert str(jax.make_jaxpr(stacked.__call__)(x)).count("dot_general[") == 4
