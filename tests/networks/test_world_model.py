"""Dreamer's networks: blocks against units apart, latents, observations of all kinds, actions of all kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lehr.errors import InputError
from lehr.networks.block_gru import BlockGRU
from lehr.networks.images import ImageDecoder, ImageEncoder, halvings
from lehr.networks.world_model import Latent, WorldModelConfig, drawn, dreamer_network, mixed
from lehr.spaces import Box, Dict, Discrete, MultiDiscrete
from tests.small import quick_first

SMALL = WorldModelConfig(recurrent_size=8, hidden_sizes=(12,), latents=3, classes=4, bins=21, image_depth=2)
PLAIN = Box(-1, 1, (5,))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(h, x, hidden, hidden_bias, scale, gates, gates_bias):
    """One gated unit, written out."""
    y = np.concatenate([h, x]) @ hidden + hidden_bias
    y = y / np.sqrt(np.mean(y**2) + 1e-4) * scale
    reset, candidate, update = np.split(y * sigmoid(y) @ gates + gates_bias, 3)
    update = sigmoid(update - 1)
    return update * np.tanh(sigmoid(reset) * candidate) + (1 - update) * h


def test_a_block_gru_is_so_many_units_side_by_side():
    layer = BlockGRU(6, 12, 4, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    names = "hidden.kernel", "hidden.bias", "scale", "gates.kernel", "gates.bias"
    weights = []
    for name in names:
        owner, _, last = name.rpartition(".")
        parameter = getattr(getattr(layer, owner) if owner else layer, last)
        parameter[...] = jnp.float32(random.normal(size=parameter.shape))
        weights.append(np.asarray(parameter[...], float))
    h, x = random.normal(size=(2, 5, 12)), random.normal(size=(2, 5, 6))
    found = np.asarray(layer(jnp.float32(h), jnp.float32(x)))
    for place in np.ndindex(2, 5):
        apart = [gru(h[place].reshape(4, 3)[g], x[place], *(w[g] for w in weights)) for g in range(4)]
        np.testing.assert_allclose(found[place], np.concatenate(apart), rtol=1e-4, atol=1e-5)


def test_latents_are_drawn_by_their_probabilities_and_the_gradient_passes_through():
    logits = jnp.array([[2.0, 0.0, -1.0], [0.0, 0.0, 30.0]])
    log_probs = mixed(logits, 0.3)
    expected = 0.7 * np.asarray(jax.nn.softmax(logits)) + 0.1
    np.testing.assert_allclose(jnp.exp(log_probs), expected, rtol=1e-5)
    uniform = jax.random.uniform(jax.random.key(0), (20_000, 2))
    found = np.asarray(drawn(jnp.broadcast_to(log_probs, (20_000, 2, 3)), uniform)).reshape(-1, 2, 3)
    np.testing.assert_allclose(np.unique(found.round(5)), [0, 1])
    np.testing.assert_allclose(found.mean(0), expected, atol=0.02)
    weights = jnp.arange(6.0)
    gradient = jax.grad(lambda logits: drawn(mixed(logits, 0.3), uniform[0]) @ weights)(logits)
    through = jax.grad(lambda logits: jnp.exp(mixed(logits, 0.3)).ravel() @ weights)(logits)
    np.testing.assert_allclose(gradient, through, rtol=1e-5)


OBSERVATIONS = {
    "vector": PLAIN,
    "image": Box(0, 255, (12, 8, 3), np.uint8),
    "mixed": Dict({"map": Box(0, 1, (6, 6, 2)), "speed": Box(-9, 9, (2,)), "kind": Discrete(3)}),
}
ACTIONS = {"discrete": Discrete(3), "multi": MultiDiscrete((2, 3)), "box": Box(np.float32([0, -5]), np.float32([1, 5]))}


@pytest.mark.parametrize("kind", quick_first(reversed(OBSERVATIONS)))
def test_every_kind_of_observation_is_encoded_and_decoded(kind):
    space = OBSERVATIONS[kind]
    network, params = dreamer_network(space, Discrete(2), SMALL, jax.random.key(0))
    obs = jax.vmap(jax.vmap(space.sample))(jax.random.split(jax.random.key(1), (4, 3)))
    first = jnp.zeros((4, 3), bool).at[2, 1].set(True)
    actions = jax.nn.one_hot(jnp.zeros((4, 3), int), 2)
    start = jax.tree.map(lambda x: x + 0.1, Latent(jnp.zeros((3, 8)), jnp.zeros((3, 12))))

    @jax.jit
    def unrolled(params):
        model = network.bind(params)
        states, posterior = network.unroll(model, start, obs, actions, first, 0.01, jax.random.key(2))
        return states, posterior, model.decoder(states.features), model.decoder.targets(obs)

    @jax.jit
    def observed(params, *given):
        return network.observe(network.bind(params), *given)

    states, posterior, decoded, targets = unrolled(params)
    assert posterior.shape == (4, 3, 3, 4)
    assert [x.shape for x in decoded] == [x.shape for x in targets]
    if kind != "vector":
        assert targets[0].min() >= 0
        assert targets[0].max() <= 1
        assert ((decoded[0] > 0) & (decoded[0] < 1)).all()
    # One step at a time, as acting does, gives the same states, resets included.
    carry = {**start._asdict(), "action": actions[0]}
    uniform = jax.random.uniform(jax.random.key(2), (4, 3, 3))
    for t in range(4):
        latent = observed(params, carry, jax.tree.map(lambda x, t=t: x[t], obs), first[t], 0.01, uniform[t])
        jax.tree.map(lambda x, y, t=t: np.testing.assert_allclose(x, y[t], atol=1e-5), latent, states)
        carry = {**latent._asdict(), "action": actions[t]}


@pytest.mark.parametrize("kind", quick_first(ACTIONS))
def test_every_kind_of_action(kind):
    space = ACTIONS[kind]
    network, params = dreamer_network(PLAIN, space, SMALL, jax.random.key(0))
    features = jax.random.normal(jax.random.key(1), (50, 20))

    @jax.jit
    def acted(params, key):
        policy = network.policy(network.bind(params), features, 0.01)
        chosen = [policy.sample(key), network.random_action(key, (50,)), policy.mode()]
        found = [(policy.log_prob(x), network.environment_action(x), network.encoded(x)) for x in chosen]
        return policy, found

    policy, found = acted(params, jax.random.key(2))
    for log_prob, action, encoded in found:
        assert np.isfinite(log_prob).all()
        assert all(space.contains(one) for one in np.asarray(action))
        assert encoded.shape == (50, {"discrete": 3, "multi": 5, "box": 2}[kind])
        assert np.abs(encoded).max() <= 1
    if kind == "box":
        np.testing.assert_allclose(network.environment_action(jnp.array([[-1.0, 0.0], [3.0, 0.5]])), [[0, 0], [1, 2.5]])
        assert ((policy.std() > 0.1) & (policy.std() < 1)).all()
        np.testing.assert_allclose(policy.std(), np.exp(SMALL.initial_log_std), atol=0.02)
    if kind == "discrete":
        certain = jax.tree.map(lambda x: 1e6 * x, params)
        policy = jax.jit(lambda params: network.policy(network.bind(params), features, 0.3))(certain)
        np.testing.assert_allclose(np.exp(policy.log_probs).min(), 0.1, rtol=1e-4)


def test_the_first_rewards_and_values_are_exactly_zero():
    network, params = dreamer_network(PLAIN, Discrete(2), SMALL, jax.random.key(0))
    carry, _, value = network.step(params, network.initial_carry((3,)), jnp.ones((3, 5)), jnp.ones(3, bool))
    assert value.tolist() == [0, 0, 0]
    assert carry["deter"].shape == (3, 8)


def test_convolutions_halve_and_double_images():
    def made(image, features):
        encoder = ImageEncoder((24, 16, 3), 2, 5, rngs=nnx.Rngs(0))
        return encoder(image), ImageDecoder(7, (24, 16, 3), 2, 5, rngs=nnx.Rngs(0))(features)

    assert halvings(24, 16) == 2
    encoded, decoded = jax.eval_shape(made, jnp.ones((2, 5, 24, 16, 3)), jnp.ones((2, 5, 7)))
    assert encoded.shape == (2, 5, 6 * 4 * 2 * 3)
    assert decoded.shape == (2, 5, 24, 16, 3)


@pytest.mark.parametrize("shape", [(7, 7, 1), (84, 84, 3), (4, 64, 3), (20, 200, 1)])
def test_images_that_cannot_be_halved_are_refused(shape):
    with pytest.raises(InputError, match=rf"Images are {shape[0]} × {shape[1]} pixels .* resize or pad them"):
        dreamer_network(Box(0, 1, shape), Discrete(2), SMALL, jax.random.key(0))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"blocks": 3}, "blocks is 3, which does not divide recurrent_size=128; choose a divisor of 128"),
        ({"hidden_sizes": ()}, "hidden_sizes is (); give at least one size"),
        ({"classes": 300}, "classes is 300; it must be at most 256"),
        ({"initial_log_std": 0.5}, "initial_log_std is 0.5; it must be between -2.3 and 0"),
    ],
)
def test_sizes_that_do_not_fit(settings, sentence):
    with pytest.raises(InputError) as raised:
        WorldModelConfig(**settings)
    assert sentence in str(raised.value)


def test_actions_that_it_cannot_take():
    with pytest.raises(InputError, match="dreamer takes Discrete, MultiDiscrete, or Box with one axis"):
        dreamer_network(PLAIN, Box(-1, 1, (2, 2)), SMALL, jax.random.key(0))
    with pytest.raises(InputError, match="a Box of whole numbers, but a policy gives numbers with fractions"):
        dreamer_network(PLAIN, Box(0, 4, (2,), np.int32), SMALL, jax.random.key(0))


@pytest.mark.parametrize(("preset", "millions"), [("1m", 1), ("12m", 12), ("25m", 25)])
def test_presets_have_about_as_many_parameters_as_they_say(preset, millions):
    """The paper's sizes are for images of 64 × 64 pixels."""
    config = WorldModelConfig(**WorldModelConfig.PRESETS[preset])
    pixels = Box(0, 255, (64, 64, 3), np.uint8)
    shapes = jax.eval_shape(lambda key: dreamer_network(pixels, Discrete(18), config, key)[1], jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert 0.5 * millions * 1e6 < count < 1.5 * millions * 1e6
