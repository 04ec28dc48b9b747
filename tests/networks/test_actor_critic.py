"""The actor-critic: every architecture against the same properties, and against parts evaluated by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.errors import InputError
from lehr.kernels import mlp, mlp_blocks
from lehr.maths.distributions import Categorical, MultiCategorical, Normal, TanhNormal
from lehr.networks import ActorCriticLike, NetworkConfig, actor_critic
from lehr.spaces import Box, Dict, Discrete, MultiDiscrete

VECTOR = Box(-1, 1, (4,))
MIXED = Dict({"image": Box(0, 255, (10, 10, 2), np.uint8), "speed": Box(-1, 1, (2,)), "gear": Discrete(3)})
SMALL = {"hidden_sizes": (8,), "recurrent_size": 8}
STEPS, ENVS = 5, 3

ARCHITECTURES = {
    "twin": NetworkConfig(**SMALL),
    "twin with layer norm": NetworkConfig(**SMALL, layer_norm=True, activation="silu"),
    "shared mlp": NetworkConfig(**SMALL, shared=True),
    "linear": NetworkConfig(hidden_sizes=()),
    "separate lstm": NetworkConfig(**SMALL, torso="lstm"),
    "shared gru": NetworkConfig(**SMALL, torso="gru", shared=True),
    "mingru actor, mlp critic": NetworkConfig(**SMALL, torso="mingru", critic_torso="mlp"),
    "mlp actor, mingru critic": NetworkConfig(**SMALL, torso="mlp", critic_torso="mingru"),
}
EVERY_ARCHITECTURE = pytest.mark.parametrize("config", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())


TWIN, TWO = NetworkConfig(**SMALL), Discrete(2)


def make(config=TWIN, observation=VECTOR, action=TWO, seed=0):
    return actor_critic(observation, action, config, jax.random.key(seed))


def stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def observations(space, *batch):
    """A batch of random members of a space."""
    rng = np.random.default_rng(0)
    match space:
        case Dict():
            return {key: observations(inner, *batch) for key, inner in space.spaces.items()}
        case Discrete():
            return jnp.asarray(rng.integers(space.n, size=batch), jnp.int32)
        case Box():
            return jnp.asarray(rng.uniform(space.low, space.high, (*batch, *space.shape)), space.dtype)


def assert_close(a, b, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance), a, b)


@EVERY_ARCHITECTURE
def test_step_act_and_value_agree_and_unroll_equals_a_loop_of_steps(config):
    network, params = make(config)
    obs = observations(VECTOR, STEPS, ENVS)
    reset = jax.random.bernoulli(jax.random.key(1), 0.3, (STEPS, ENVS))
    start = jax.tree.map(lambda x: x + 0.5, network.initial_carry((ENVS,)))

    @jax.jit
    def loop(params):
        carry, policies, values = start, [], []
        for t in range(STEPS):
            _, alone = network.act(params, carry, obs[t], reset[t])
            before = jax.tree.map(lambda x, t=t: jnp.where(reset[t][:, None], 0, x), carry)
            value_alone = network.value(params, before, obs[t])
            carry, policy, value = network.step(params, carry, obs[t], reset[t])
            policies.append((policy, alone))
            values.append((value, value_alone))
        return carry, stacked(policies), stacked(values)

    carry, (policy, alone), (value, value_alone) = loop(params)
    assert_close(policy, alone)
    assert_close(value, value_alone)
    assert value.shape == (STEPS, ENVS)
    assert policy.logits.shape == (STEPS, ENVS, 2)
    assert_close(jax.jit(network.unroll)(params, start, obs, reset), (carry, policy, value))


def test_recurrence_is_known_without_parameters():
    known = {name: make(config)[0] for name, config in ARCHITECTURES.items()}
    recurrent = [name for name, network in known.items() if network.is_recurrent]
    assert recurrent == ["separate lstm", "shared gru", "mingru actor, mlp critic", "mlp actor, mingru critic"]
    critic = [name for name, network in known.items() if network.critic_is_recurrent]
    assert critic == ["separate lstm", "shared gru", "mlp actor, mingru critic"]
    assert known["twin"].initial_carry((7,)) == {"actor": (), "critic": ()}
    h, c = known["separate lstm"].initial_carry((7,))["critic"]
    assert h.shape == c.shape == (7, 8)
    assert not h.any()


def test_a_feed_forward_critic_ignores_the_carry_of_a_recurrent_actor():
    network, params = make(ARCHITECTURES["mingru actor, mlp critic"])
    obs = observations(VECTOR, ENVS)
    carry = network.initial_carry((ENVS,))
    other = jax.tree.map(lambda x: x + 1, carry)
    no_reset = jnp.zeros(ENVS, bool)
    np.testing.assert_array_equal(network.value(params, carry, obs), network.value(params, other, obs))
    policies = [network.act(params, c, obs, no_reset)[1].logits for c in (carry, other)]
    assert np.abs(policies[0] - policies[1]).max() > 1e-4


def test_twin_equals_two_separately_evaluated_mlps():
    network, params = make(NetworkConfig(hidden_sizes=(8, 8)), seed=3)
    params = jax.tree.map(lambda x: x + 0.1, params)
    obs = observations(VECTOR, ENVS)
    _, policy, value = jax.jit(network.step)(params, network.initial_carry((ENVS,)), obs, jnp.zeros(ENVS, bool))

    def by_hand(index, head):
        x = np.asarray(obs)
        for layer in params["trunk"]["mlps"]["stack"]["layers"].values():
            x = np.tanh(x @ np.asarray(layer["kernel"][index]) + np.asarray(layer["bias"][index]))
        return x @ np.asarray(head["kernel"]) + np.asarray(head["bias"])

    np.testing.assert_allclose(policy.logits, by_hand(0, params["policy_head"]["logits"]), rtol=1e-4)
    np.testing.assert_allclose(value, by_hand(1, params["value_head"])[:, 0], rtol=1e-4)


def test_each_slice_of_the_twin_and_each_head_starts_orthogonal():
    _, params = make(NetworkConfig(hidden_sizes=(8, 8)))
    layers = params["trunk"]["mlps"]["stack"]["layers"]
    for kernel in layers["0"]["kernel"]:
        np.testing.assert_allclose(kernel @ kernel.T, 2 * np.eye(4), atol=1e-5)
    for kernel in layers["1"]["kernel"]:
        np.testing.assert_allclose(kernel.T @ kernel, 2 * np.eye(8), atol=1e-5)
    assert np.abs(layers["1"]["kernel"][0] - layers["1"]["kernel"][1]).max() > 0.1
    policy, value = params["policy_head"]["logits"]["kernel"], params["value_head"]["kernel"]
    np.testing.assert_allclose(policy.T @ policy, 1e-4 * np.eye(2), atol=1e-8)
    np.testing.assert_allclose(value.T @ value, np.eye(1), atol=1e-5)


def test_a_feed_forward_unroll_takes_any_leading_axes_and_no_reset():
    network, params = make()
    obs = observations(VECTOR, 2, 3, 4)
    _, policy, value = jax.jit(network.unroll)(params, network.initial_carry(()), obs, None)
    assert policy.logits.shape == (2, 3, 4, 2)
    assert value.shape == (2, 3, 4)


@EVERY_ARCHITECTURE
def test_features_and_both_heads_are_what_unroll_gives(config):
    network, params = make(config)
    params = jax.tree.map(lambda x: x + 0.1, params)
    obs, reset = observations(VECTOR, STEPS, ENVS), jax.random.bernoulli(jax.random.key(1), 0.3, (STEPS, ENVS))
    start = jax.tree.map(lambda x: x + 0.5, network.initial_carry((ENVS,)))
    carry, *features = jax.jit(network.features)(params, start, obs, reset)
    assert [x.shape for x in features] == [(STEPS, ENVS, size) for size in network.feature_sizes]
    policy, value = network.policy(params, features[0]), network.head_value(params, features[1])
    assert_close((carry, policy, value), jax.jit(network.unroll)(params, start, obs, reset))
    heads = params["policy_head"]["logits"], params["value_head"]
    logits, values = (
        np.asarray(x) @ np.asarray(head["kernel"]) + np.asarray(head["bias"])
        for x, head in zip(features, heads, strict=True)
    )
    np.testing.assert_allclose(policy.logits, logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(value, values[..., 0], rtol=1e-4, atol=1e-5)


@EVERY_ARCHITECTURE
def test_a_critic_alone_gives_the_same_values_without_the_actors_parameters(config):
    network, params = make(config)
    if network.is_shared or network.critic_is_recurrent:
        pytest.skip("not split, or not valued without the actor's carry")
    critic = network.split(params)[1]
    obs, carry = observations(VECTOR, STEPS, ENVS), network.initial_carry((ENVS,))
    alone = network.critic_alone(critic)
    for leaf, same in zip(jax.tree.leaves(alone), jax.tree.leaves(critic), strict=True):
        np.testing.assert_array_equal(leaf.ravel(), same.ravel())
    expected = jax.jit(network.value)(params, carry, obs)
    assert_close(jax.jit(network.value)(alone, carry, obs), expected)


@EVERY_ARCHITECTURE
def test_another_head_is_a_product_with_the_actors_features(config):
    network, params = make(config)
    obs, reset = observations(VECTOR, STEPS, ENVS), jax.random.bernoulli(jax.random.key(1), 0.3, (STEPS, ENVS))
    start = network.initial_carry((ENVS,))
    kernel = np.random.default_rng(0).normal(size=network.feature_sizes[0]).astype(np.float32)
    head = {"kernel": jnp.asarray(kernel), "bias": jnp.float32(0.5)}
    *found, other = jax.jit(network.unroll_with)(params, head, start, obs, reset)
    assert_close(tuple(found), jax.jit(network.unroll)(params, start, obs, reset))
    features = np.asarray(jax.jit(network.features)(params, start, obs, reset)[1])
    np.testing.assert_allclose(other, features @ kernel + 0.5, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["mlp", "mlp_cpu", "none"])
def test_another_head_sees_the_mask_which_is_part_of_the_features(monkeypatch, kernel):
    monkeypatch.setattr(mlp, "MIN_ROWS", 1)
    monkeypatch.setattr(mlp, "INTERPRET", kernel == "mlp")
    monkeypatch.setattr(mlp_blocks, "OPERAND", jnp.float32)  # what is scaled for float16, but not rounded
    if kernel == "none":
        monkeypatch.setenv("LEHR_KERNELS", "off")
    space = Dict({"vector": VECTOR, "action_mask": Box(0, 1, (2,), np.int8)})
    network, params = make(NetworkConfig(hidden_sizes=(8, 8)), space)
    obs = {"vector": observations(VECTOR, STEPS, ENVS), "action_mask": jnp.int8(np.arange(STEPS * ENVS * 2) % 3 > 0)}
    obs["action_mask"] = obs["action_mask"].reshape(STEPS, ENVS, 2)
    weights = np.random.default_rng(0).normal(size=network.feature_sizes[0]).astype(np.float32)
    head = {"kernel": jnp.asarray(weights), "bias": jnp.float32(0.5)}
    *found, other = jax.jit(network.unroll_with)(params, head, network.initial_carry((ENVS,)), obs, None)
    assert_close(tuple(found), jax.jit(network.unroll)(params, network.initial_carry((ENVS,)), obs, None))
    features = np.asarray(jax.jit(network.features)(params, network.initial_carry((ENVS,)), obs, None)[1])
    np.testing.assert_allclose(features[..., -2:], obs["action_mask"])
    np.testing.assert_allclose(other, features @ weights + 0.5, rtol=1e-4, atol=1e-5)


def test_features_take_any_leading_axes_and_are_float32():
    network, params = make(NetworkConfig(**SMALL, precision="bfloat16"))
    obs = observations(VECTOR, 2, 3, 4)
    for features in jax.jit(network.features)(params, network.initial_carry(()), obs, None)[1:]:
        assert features.shape == (2, 3, 4, 8)
        assert features.dtype == jnp.float32


@EVERY_ARCHITECTURE
def test_a_gradient_that_ends_at_the_features_trains_the_value_head_alone(config):
    network, params = make(config)
    obs, reset = observations(VECTOR, STEPS, ENVS), jnp.zeros((STEPS, ENVS), bool)
    start = network.initial_carry((ENVS,))
    assert network.is_shared == config.shared

    def value(params, stop):
        _, _, critic = network.features(params, start, obs, reset)
        return network.head_value(params, jax.lax.stop_gradient(critic) if stop else critic).sum()

    whole, alone = (jax.jit(jax.grad(lambda params, stop=stop: value(params, stop)))(params) for stop in (False, True))
    assert_close(alone["value_head"], whole["value_head"])
    sizes = [sum(np.abs(x).sum() for x in jax.tree.leaves(of.get("trunk", ()))) for of in (whole, alone)]
    assert sizes[1] == 0
    assert sizes[0] > 0 or config.hidden_sizes == ()


@EVERY_ARCHITECTURE
def test_what_is_split_is_of_one_head_each_and_merges_again(config):
    network, params = make(config)
    obs, reset = observations(VECTOR, STEPS, ENVS), jnp.zeros((STEPS, ENVS), bool)
    if config.shared:
        with pytest.raises(
            InputError, match=r"shared is True, but this algorithm trains actor and critic separately; set shared=False"
        ):
            network.split(params)
        with pytest.raises(InputError, match="shared is True, but this algorithm trains actor and critic separately"):
            network.merge(params, params)
        return
    actor, critic = network.split(params)
    jax.tree.map(np.testing.assert_array_equal, network.merge(actor, critic), params)
    assert sum(x.size for x in jax.tree.leaves((actor, critic))) == sum(x.size for x in jax.tree.leaves(params))

    def outputs(actor, critic):
        merged = network.merge(actor, critic)
        _, policy, value = network.unroll(merged, network.initial_carry((ENVS,)), obs, reset)
        return policy.logits, value

    changed = [jax.tree.map(lambda x: x + 0.1, part) for part in (actor, critic)]
    before, other_actor, other_critic = (
        jax.jit(outputs)(*parts) for parts in ((actor, critic), (changed[0], critic), (actor, changed[1]))
    )
    np.testing.assert_array_equal(other_actor[1], before[1])
    np.testing.assert_array_equal(other_critic[0], before[0])
    assert np.abs(other_actor[0] - before[0]).max() > 1e-3
    assert np.abs(other_critic[1] - before[1]).max() > 1e-3


@pytest.mark.parametrize("space", [VECTOR, MIXED, Discrete(3)], ids=["vector", "mixed", "discrete"])
def test_a_rollout_is_valued_some_steps_at_a_time(monkeypatch, space):
    """12 steps of 5 with room for 17 observations: 3 steps at a time, hence 4 times; with room for 4, step by step."""
    network, params = make(observation=space)
    obs, carry = observations(space, 12, 5), network.initial_carry((0,))

    def loops(obs):
        text = str(jax.make_jaxpr(lambda obs: network.value(params, carry, obs))(obs))
        return [line for line in (12, 6, 4, 3, 2) if f"length={line}\n" in text]

    whole = network.value(params, carry, obs)
    assert whole.shape == (12, 5)
    assert loops(obs) == []
    for rows, expected in ((17, 4), (4, 12)):
        monkeypatch.setattr("lehr.networks.observations.ROWS_AT_ONCE", rows)
        found = jax.jit(lambda obs: network.value(params, carry, obs))(obs)  # a function that no cache knows
        np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)
        assert loops(obs) == [expected]
        assert loops(jax.tree.map(lambda x: x[0], obs)) == []


def test_a_critic_with_memory_takes_a_single_step_whatever_its_size(monkeypatch):
    network, params = make(ARCHITECTURES["shared gru"])
    obs, carry = observations(VECTOR, ENVS), network.initial_carry((ENVS,))
    expected = network.value(params, carry, obs)
    monkeypatch.setattr("lehr.networks.observations.ROWS_AT_ONCE", 1)
    np.testing.assert_array_equal(network.value(params, carry, obs), expected)


@EVERY_ARCHITECTURE
def test_the_network_has_what_algorithms_ask_for(config):
    network, _ = make(config)
    assert isinstance(network, ActorCriticLike)
    hash(network)


def test_a_network_knows_what_it_was_built_for():
    assert make(observation=MIXED)[0].observation_space == MIXED


def test_actor_and_critic_see_only_their_own_observations():
    space = Dict({"seen by both": VECTOR, "actor": VECTOR, "critic": VECTOR})
    config = NetworkConfig(**SMALL, actor_obs=["seen by both", "actor"], critic_obs=["seen by both", "critic"])
    network, params = make(config, space)
    obs = observations(space, ENVS)

    def outputs(obs):
        _, policy, value = network.step(params, network.initial_carry((ENVS,)), obs, jnp.zeros(ENVS, bool))
        return policy.logits.sum(0)[0], value.sum()

    of_policy, of_value = jax.jit(jax.jacobian(outputs))(obs)
    assert not of_policy["critic"].any()
    assert not of_value["actor"].any()
    for gradient in (of_policy["actor"], of_policy["seen by both"], of_value["critic"], of_value["seen by both"]):
        assert np.abs(gradient).min() > 0


@pytest.mark.parametrize("torso", ["auto", "mlp", "mingru"])
def test_dict_observations_with_an_image(torso):
    network, params = make(NetworkConfig(**SMALL, torso=torso), MIXED)
    trunk = params["trunk"]
    kernel = (
        trunk["mlps"]["stack"]["layers"]["0"]["kernel"][0]
        if torso == "mlp"
        else trunk["actor_torso"]["encoder"]["dense"]["layers"]["0"]["kernel"]
    )
    image_features = 10 * 10 * 2 if torso == "mlp" else 8 * 8 * 16
    assert kernel.shape == (image_features + 2 + 3, 8)
    obs = observations(MIXED, ENVS)
    assert obs["image"].dtype == jnp.uint8
    _, _, value = jax.jit(network.step)(params, network.initial_carry((ENVS,)), obs, jnp.zeros(ENVS, bool))
    assert np.abs(value).max() < 20


def test_integers_are_seen_as_one_hot():
    network, params = make(observation=MultiDiscrete((2, 3)))
    same_as = make(observation=Box(0, 1, (5,)))[0]
    carry = network.initial_carry(())
    value = network.value(params, carry, jnp.array([[1, 0], [0, 2]]))
    expected = same_as.value(params, carry, jnp.array([[0.0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]))
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_every_action_space_gets_its_distribution():
    box = Box(np.array([-1.0, 0.0, -3.0]), np.array([1.0, 2.0, 3.0]))
    cases = [
        (Discrete(5), NetworkConfig(**SMALL), Categorical),
        (MultiDiscrete((2, 3)), NetworkConfig(**SMALL), MultiCategorical),
        (box, NetworkConfig(**SMALL, initial_log_std=-0.5), Normal),
        (box, NetworkConfig(**SMALL, distribution="tanh_normal"), TanhNormal),
        (box, NetworkConfig(**SMALL, state_dependent_std=True, initial_log_std=-0.5), Normal),
    ]
    for action, config, expected in cases:
        network, params = make(config, action=action)
        carry = network.initial_carry((ENVS,))
        _, policy = jax.jit(network.act)(params, carry, observations(VECTOR, ENVS), jnp.zeros(ENVS, bool))
        assert type(policy) is expected
        sample = policy.sample(jax.random.key(0))
        assert sample.shape == (ENVS, *action.shape)
        if expected is Normal:
            np.testing.assert_allclose(policy.std(), np.full((ENVS, 3), np.exp(-0.5)), atol=0.03)
        if expected is TanhNormal:
            action = np.asarray(policy.environment_action(sample))
            assert ((action >= box.low) & (action <= box.high)).all()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 3.0, 1.0, 1.0, 1.0]),
        ({"initial_log_std": -1.0}, [np.exp(-1.0)] * 5),
        ({"state_dependent_std": True}, [1.0] * 5),
    ],
)
def test_exploration_starts_with_half_the_width_of_the_box_unless_a_setting_says_otherwise(settings, expected):
    """The third action has one bound, the fourth only one possible value, and the last those of its type."""
    most = np.finfo(np.float32).max
    box = Box(np.array([0.0, -3.0, 0.0, 2.0, -most]), np.array([1.0, 3.0, np.inf, 2.0, most]))
    network, params = make(NetworkConfig(**{**SMALL, "initial_log_std": None, **settings}), action=box)
    obs, reset = observations(VECTOR, ENVS), jnp.zeros(ENVS, bool)
    _, policy = network.act(params, network.initial_carry((ENVS,)), obs, reset)
    np.testing.assert_allclose(policy.std(), np.broadcast_to(expected, (ENVS, 5)), rtol=0.03)


def test_state_dependent_std_depends_on_the_state_and_is_bounded():
    network, params = make(NetworkConfig(**SMALL, state_dependent_std=True), action=Box(-1, 1, (1,)))
    obs = observations(VECTOR, 2)
    carry, no_reset = network.initial_carry((2,)), jnp.zeros(2, bool)
    _, policy = network.act(params, carry, obs, no_reset)
    assert policy.log_std[0] != policy.log_std[1]
    _, policy = network.act(jax.tree.map(lambda x: 1e6 * x, params), carry, obs, no_reset)
    assert set(policy.log_std.ravel().tolist()) <= {-10.0, 2.0}


@pytest.mark.parametrize("torso", ["mlp", "lstm"])
def test_bfloat16_keeps_parameters_and_outputs_in_float32(torso):
    results = []
    for dtype in ("float32", "bfloat16"):
        network, params = make(NetworkConfig(**SMALL, torso=torso, precision=dtype))
        obs, reset = observations(VECTOR, STEPS, ENVS), jnp.zeros((STEPS, ENVS), bool)
        result = jax.jit(network.unroll)(params, network.initial_carry((ENVS,)), obs, reset)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((params, result)))
        results.append(result[2])
    assert 0 < np.abs(results[0] - results[1]).max() < 0.05


def test_vmap_over_a_population_of_parameters():
    network, _ = make()
    population = jax.vmap(lambda key: actor_critic(VECTOR, Discrete(2), NetworkConfig(**SMALL), key)[1])(
        jax.random.split(jax.random.key(0), 4)
    )
    obs, carry = observations(VECTOR, ENVS), network.initial_carry((ENVS,))
    together = jax.vmap(lambda params: network.value(params, carry, obs))(population)
    assert together.shape == (4, ENVS)
    for member in range(4):
        alone = network.value(jax.tree.map(lambda x, m=member: x[m], population), carry, obs)
        np.testing.assert_allclose(together[member], alone, rtol=1e-5)


def test_new_parameters_do_not_trace_again(count_traces):
    @count_traces
    def value(network, params, obs):
        return network.value(params, network.initial_carry((ENVS,)), obs)

    compiled = jax.jit(value, static_argnums=0)
    for seed in range(2):
        compiled(*make(seed=seed), observations(VECTOR, ENVS))
    assert value.traces == 1


@pytest.mark.parametrize(
    ("observation", "action", "options", "message"),
    [
        (VECTOR, Discrete(2), {"torso": "cnn"}, "exactly one image"),
        (VECTOR, Discrete(2), {"actor_obs": ("a",)}, "keys of a Dict"),
        (MIXED, Discrete(2), {"critic_obs": ("sped",)}, "no key 'sped'.*did you mean 'speed'"),
        (MIXED, Discrete(2), {"critic_obs": ()}, "is empty"),
        (VECTOR, Box(-np.inf, np.inf, (2,)), {"distribution": "tanh_normal"}, "bounded Box"),
        (VECTOR, Box(-1, 1, (2, 2)), {}, "flatten the action space"),
        (VECTOR, MIXED, {}, "needs Discrete, MultiDiscrete or Box"),
        (
            Box(-1, 1, (4,)),
            Box(0, 4, (2,), np.int32),
            {},
            "a Box of whole numbers, but a policy gives numbers with fractions",
        ),
    ],
)
def test_spaces_that_do_not_fit_are_explained(observation, action, options, message):
    with pytest.raises(InputError, match=message):
        make(NetworkConfig(**SMALL, **options), observation, action)
