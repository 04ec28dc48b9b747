"""Torsos and activations of the user's own, given where the name of a built-in one would stand."""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lehr.config import build
from lehr.errors import InputError
from lehr.networks import CNN, GRU, NetworkConfig, actor_critic
from lehr.spaces import Box, Dict, Discrete

VECTOR = Box(-1, 1, (4,))
MIXED = Dict({"image": Box(0, 255, (6, 6, 2), np.uint8), "gear": Discrete(3), "speed": VECTOR})
STEPS, ENVS = 5, 3


class Squares(nnx.Module):
    """The squares of one dense layer. It takes one leading axis and no other."""

    def __init__(self, observation_space, rngs):
        self.out_features = 6
        self.layer = nnx.Linear(observation_space.shape[0], 6, rngs=rngs)

    def __call__(self, obs):
        assert obs.ndim == 2
        return jnp.square(self.layer(obs))


class Gears(nnx.Module):
    """An embedding of a whole number beside a mean of bytes: observations come as they are."""

    def __init__(self, observation_space, *, rngs):
        self.table = nnx.Embed(observation_space.spaces["gear"].n, 7, rngs=rngs)
        self.out_features = 8

    def __call__(self, obs):
        assert sorted(obs) == ["gear", "image"]
        assert obs["image"].dtype == jnp.uint8
        mean = obs["image"].reshape(len(obs["gear"]), -1).astype(jnp.float32).mean(-1, keepdims=True)
        return jnp.concatenate([self.table(obs["gear"]), mean], -1)


class Remembers(nnx.Module):
    """A memory of the user's own, which happens to be Lehr's GRU."""

    def __init__(self, observation_space, rngs):
        self.gru = GRU(observation_space.shape[0], 5, rngs=rngs)
        self.out_features = 5

    def initial_carry(self, batch_shape):
        return {"h": self.gru.initial_carry(batch_shape)}

    def step(self, carry, obs):
        h, features = self.gru.step(carry["h"], obs)
        return {"h": h}, features

    def unroll(self, carry, obs, reset):
        h, features = self.gru.unroll(carry["h"], obs, reset)
        return {"h": h}, features


def make(observation=VECTOR, **options):
    return actor_critic(observation, Discrete(2), NetworkConfig(**options), jax.random.key(0))


def rows(*batch):
    return jnp.asarray(np.random.default_rng(0).normal(size=(*batch, 4)), jnp.float32)


def test_features_are_those_of_the_users_module():
    network, params = make(torso=Squares)
    layers = [params["trunk"][f"{part}_torso"]["module"]["layer"] for part in ("actor", "critic")]
    obs = rows(STEPS, ENVS)
    carry, actor, critic = jax.jit(network.features)(params, network.initial_carry((ENVS,)), obs, None)
    assert carry == {"actor": (), "critic": ()}
    assert network.feature_sizes == (6, 6)
    for features, layer in zip((actor, critic), layers, strict=True):
        expected = np.square(np.asarray(obs) @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"]))
        np.testing.assert_allclose(features, expected, rtol=1e-4, atol=1e-6)
    assert np.abs(actor - critic).max() > 1e-3


TORSOS = {
    "one each": {"torso": Squares},
    "shared": {"torso": Squares, "shared": True},
    "a critic of Lehr's": {"torso": Squares, "critic_torso": "mlp", "hidden_sizes": (8,)},
    "an actor of Lehr's": {"torso": "mingru", "critic_torso": Squares, "recurrent_size": 4},
    "a memory": {"torso": Remembers},
    "a shared memory": {"torso": Remembers, "shared": True},
    "a function": {"torso": lambda space, rngs: Squares(space, rngs)},
    "with arguments": {"torso": functools.partial(Squares)},
}


@pytest.mark.parametrize("options", TORSOS.values(), ids=TORSOS.keys())
def test_unroll_equals_a_loop_of_steps(options):
    network, params = make(**options)
    obs, reset = rows(STEPS, ENVS), jax.random.bernoulli(jax.random.key(1), 0.3, (STEPS, ENVS))
    carry = start = jax.tree.map(lambda x: x + 0.5, network.initial_carry((ENVS,)))
    act, step, steps = jax.jit(network.act), jax.jit(network.step), []
    for t in range(STEPS):
        _, alone = act(params, carry, obs[t], reset[t])
        carry, policy, value = step(params, carry, obs[t], reset[t])
        np.testing.assert_allclose(alone.logits, policy.logits, rtol=1e-5, atol=1e-6)
        steps.append((policy, value))
    expected = carry, *jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps)
    found = jax.jit(network.unroll)(params, start, obs, reset)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    assert network.is_recurrent == ("Remembers" in str(options["torso"]) or options["torso"] == "mingru")


def test_observations_come_as_they_are_and_only_the_selected_ones():
    network, params = make(MIXED, torso=Gears, actor_obs=("image", "gear"), critic_obs=("gear", "image"))
    obs = {
        "image": jnp.full((2, 3, 6, 6, 2), 51, jnp.uint8),
        "gear": jnp.array([[0, 1, 2], [2, 1, 0]]),
        "speed": rows(2, 3),
    }
    _, features, _ = network.features(params, network.initial_carry(()), obs, None)
    table = params["trunk"]["actor_torso"]["module"]["table"]["embedding"]
    np.testing.assert_allclose(features[..., :7], np.asarray(table)[np.asarray(obs["gear"])], rtol=1e-6)
    np.testing.assert_allclose(features[..., 7], 51, rtol=1e-6)
    single = network.value(params, network.initial_carry(()), jax.tree.map(lambda x: x[0, 0], obs))
    assert single.shape == ()


def test_a_name_is_imported_when_the_network_is_built(monkeypatch):
    config = NetworkConfig(torso="lehr_test_torsos:Squares")
    monkeypatch.setitem(sys.modules, "lehr_test_torsos", types.SimpleNamespace(Squares=Squares))
    network, _ = actor_critic(VECTOR, Discrete(2), config, jax.random.key(0))
    assert network.feature_sizes == (6, 6)
    assert network == make(torso=Squares)[0]
    for name, message in (("lehr_test_torsos:Cubes", "torso 'lehr_test_torsos:Cubes' could not be imported"),):
        with pytest.raises(InputError, match=message):
            make(torso=name)


def test_a_config_with_the_users_own_is_a_value():
    one, same = (NetworkConfig(torso=Squares, critic_torso=Squares) for _ in range(2))
    assert one == same
    assert hash(one) == hash(same)
    assert one != NetworkConfig(torso=Remembers)


def test_new_parameters_do_not_trace_again(count_traces):
    @count_traces
    def value(network, params, obs):
        return network.value(params, network.initial_carry((ENVS,)), obs)

    compiled = jax.jit(value, static_argnums=0)
    for options in ({"torso": Squares}, {"hidden_sizes": (8,), "activation": jnp.sin}):
        before = value.traces
        for seed in range(2):
            network, params = actor_critic(VECTOR, Discrete(2), NetworkConfig(**options), jax.random.key(seed))
            compiled(network, params, rows(ENVS))
        assert value.traces == before + 1


def test_an_activation_may_be_any_function():
    """tanh under another name gives what "tanh" gives, with the same parameters."""
    named, params = make(hidden_sizes=(8, 8), activation="tanh")
    own, same = make(hidden_sizes=(8, 8), activation=lambda x: jnp.tanh(x))
    jax.tree.map(np.testing.assert_array_equal, params, same)
    values = [network.value(params, network.initial_carry(()), rows(ENVS)) for network in (named, own)]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6)


def test_an_activation_may_be_named_as_a_torso_is():
    named, params = make(hidden_sizes=(8,), activation="jax.nn:relu")
    own, same = make(hidden_sizes=(8,), activation=jax.nn.relu)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, params, same))
    assert named == own
    with pytest.raises(InputError, match=r"activation is 'math:pi', which is 3\.14.*; name a function of an array"):
        make(hidden_sizes=(8,), activation="math:pi")


def test_settings_take_what_is_the_users_own():
    (config,) = build([NetworkConfig], {"torso": Squares, "critic_torso": "mlp", "activation": jnp.sin})
    assert (config.torso, config.activation) == (Squares, jnp.sin)


def test_an_activation_of_the_users_own_follows_convolutions_too():
    cnn = CNN((4, 4, 1), (), convolutions=((2, 3, 1),), activation=lambda x: x + 100, rngs=nnx.Rngs(0))
    assert (np.asarray(cnn(jnp.zeros((4, 4, 1)))) == 100).all()


class Unnamed(nnx.Module):
    def __init__(self, observation_space, rngs):
        self.layer = nnx.Linear(4, 6, rngs=rngs)

    def __call__(self, obs):
        return self.layer(obs)


class Wide(Squares):
    def __init__(self, observation_space, rngs):
        super().__init__(observation_space, rngs)
        self.out_features = 64


class Flat(Squares):
    def __call__(self, obs):
        return super().__call__(obs).reshape(-1)


class Pairs(Squares):
    def __call__(self, obs):
        return super().__call__(obs), ()


class Whole(Squares):
    def __call__(self, obs):
        return super().__call__(obs).astype(jnp.int32)


class NoCall(nnx.Module):
    def __init__(self, observation_space, rngs):
        self.out_features = 3


class HalfAMemory(Squares):
    def initial_carry(self, batch_shape):
        return jnp.zeros((*batch_shape, 3))


class Grows(Remembers):
    def step(self, carry, obs):
        carry, features = super().step(carry, obs)
        return {**carry, "more": features}, features


class Alone(Remembers):
    def unroll(self, carry, obs, reset):
        return super().unroll(carry, obs, reset)[1]


class Stateful(Squares):
    def __init__(self, observation_space, rngs):
        super().__init__(observation_space, rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


class Unhashable:
    __hash__ = None

    def __call__(self, observation_space, rngs):
        return Squares(observation_space, rngs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torso": Unnamed}, "torso Unnamed has no out_features: set self.out_features"),
        ({"torso": Wide}, r"Wide returned features of shape \(2, 6\) from __call__, expected \(2, 64\)"),
        ({"torso": Flat}, r"Flat returned features of shape \(12,\)"),
        ({"torso": Pairs}, "Pairs returned a tuple from __call__: return one array"),
        ({"torso": Whole}, "Whole returned features of type int32 from __call__: return floats"),
        ({"torso": NoCall}, "NoCall has no __call__"),
        ({"torso": HalfAMemory}, "HalfAMemory has initial_carry but not step and unroll"),
        ({"torso": Grows}, r"Grows starts with the carry .*, but step returns"),
        ({"torso": Alone}, "Alone must return two values from unroll: the next carry and the features"),
        ({"torso": Stateful}, r"not nnx\.Param"),
        ({"torso": nnx.Linear}, r"called as Linear\(observation_space, rngs=rngs\), but missing a required argument"),
        ({"torso": lambda space, rngs: 3}, "returned a int, but a torso must be an nnx.Module"),
        ({"torso": int}, "torso int is a class, but not a subclass of nnx.Module: give one, or a function"),
        ({"torso": "math:pi"}, "is not a callable object"),
        ({"torso": Unhashable()}, "is not hashable"),
        ({"torso": 3}, "torso is 3; known: auto, mlp"),
        ({"activation": 3}, "activation is 3; known: auto, tanh"),
        (
            {"torso": Squares, "hidden_sizes": (64,)},
            r"hidden_sizes is \(64,\), but the torso Squares is not built in and creates",
        ),
        ({"torso": "math:pi", "layer_norm": True}, "layer_norm is True, but the torso math:pi"),
        ({"torso": Squares, "shared": True, "critic_torso": "mlp"}, "shared is True, but critic_torso"),
    ],
)
def test_mistakes_are_explained(options, message):
    with pytest.raises(InputError, match=message):
        make(**options)


def test_an_empty_selection_and_an_unknown_key_are_explained():
    for keys, message in (((), "is empty"), (("gera",), "no key 'gera'.*did you mean 'gear'")):
        with pytest.raises(InputError, match=message):
            make(MIXED, torso=Gears, actor_obs=keys)
