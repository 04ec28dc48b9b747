"""Action masks: the policy over the possible actions, against the distribution renormalised by hand; and learning."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lehr
from lehr import masks
from lehr.envs import Environment, FlattenObservation, FrameStack
from lehr.errors import InputError
from lehr.networks import NetworkConfig, actor_critic
from lehr.spaces import Box, Dict, Discrete, MultiDiscrete
from lehr.types import Timestep
from tests.small import SMALL

ENVS = 64
SEEN = Box(-1, 1, (4,))
NVEC = (2, 4)
FORMS = {
    "discrete": (Discrete(6), (6,)),
    "multi-discrete, concatenated": (MultiDiscrete(NVEC), (6,)),
    "multi-discrete, by rows": (MultiDiscrete(NVEC), (2, 4)),
}


class Whole(nnx.Module):
    """A torso that fails if it sees more than `seen`."""

    def __init__(self, observation_space, rngs):
        assert observation_space == Dict({"seen": SEEN})
        self.out_features = 5
        self.layer = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, obs):
        assert set(obs) == {"seen"}
        return jnp.tanh(self.layer(obs["seen"]))


def masked(shape):
    return Dict({"action_mask": Box(0, 1, shape, np.int8), "seen": SEEN})


def make(form, **config):
    """A network whose logits differ, observations with random masks, and these masks by component."""
    action_space, shape = FORMS[form]
    network, params = actor_critic(masked(shape), action_space, NetworkConfig(**config), jax.random.key(0))
    head = jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(1), x.shape), params["policy_head"])
    rng = np.random.default_rng(0)
    mask = rng.integers(0, 2, (ENVS, *shape)).astype(np.int8)
    mask[..., 0] = 1
    if shape == (6,):
        mask[:, 2] = 1  # the first action of the second component
        parts = [mask] if isinstance(action_space, Discrete) else [mask[:, :2], mask[:, 2:]]
    else:
        parts = [mask[:, 0, :2], mask[:, 1]]
    obs = {"action_mask": jnp.asarray(mask), "seen": jnp.asarray(rng.normal(size=(ENVS, 4)), jnp.float32)}
    return network, {**params, "policy_head": head}, obs, [part != 0 for part in parts]


def by_hand(network, params, obs, parts):
    """The probabilities of each component: of the logits without a mask, 0 if forbidden, renormalised."""
    unmasked = {**obs, "action_mask": jnp.ones_like(obs["action_mask"])}
    logits = np.asarray(network.act(params, network.initial_carry((ENVS,)), unmasked, None)[1].logits, np.float64)
    stops = np.cumsum([part.shape[1] for part in parts])
    found = []
    for part, stop in zip(parts, stops, strict=True):
        weights = np.exp(logits[:, stop - part.shape[1] : stop]) * part
        found.append(weights / weights.sum(-1, keepdims=True))
    return found


@pytest.mark.parametrize("form", FORMS)
def test_the_policy_is_the_renormalised_one_over_possible_actions(form):
    network, params, obs, parts = make(form)
    expected = by_hand(network, params, obs, parts)
    carry, reset = network.initial_carry((ENVS,)), jnp.zeros(ENVS, bool)
    _, policy, _ = network.step(params, carry, obs, reset)
    components = getattr(policy, "components", lambda: policy)()
    probs = np.exp(components.log_probs).reshape(ENVS, len(parts), -1)
    for k, wanted in enumerate(expected):
        np.testing.assert_allclose(probs[:, k, : wanted.shape[1]], wanted, atol=1e-6)
        assert not probs[:, k, : wanted.shape[1]][~parts[k]].any(), "exactly 0"
    entropy = sum(-np.sum(np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0), -1) for p in expected)
    np.testing.assert_allclose(policy.entropy(), entropy, atol=1e-5)
    action, log_prob = policy.sample_and_log_prob(jax.random.key(2))
    for actions in (action, policy.mode()):
        chosen = np.asarray(actions).reshape(ENVS, len(parts))
        of_each = [p[np.arange(ENVS), chosen[:, k]] for k, p in enumerate(expected)]
        assert np.all(np.stack(of_each) > 0)
        np.testing.assert_allclose(policy.log_prob(actions), np.log(of_each).sum(0), atol=1e-4)
    np.testing.assert_array_equal(log_prob, policy.log_prob(action))
    # The policy from features, which TRPO and PPG use, is the same, and the critic does not see the mask.
    _, actor, critic = network.features(params, carry, obs, reset)
    assert (actor.shape[1], critic.shape[1]) == network.feature_sizes == (64 + 6, 64)
    np.testing.assert_allclose(network.policy(params, actor).logits, policy.logits, atol=1e-6)
    other = {**obs, "action_mask": 1 - obs["action_mask"]}
    np.testing.assert_array_equal(network.value(params, carry, other), network.value(params, carry, obs))


@pytest.mark.parametrize("form", ["discrete", "multi-discrete, by rows"])
def test_gradients_are_finite_with_one_possible_action_and_with_none(form):
    network, params, obs, _ = make(form)
    action_space, shape = FORMS[form]
    one = np.zeros((2, *shape), np.int8)
    one[0, ..., 0] = 1
    obs = {"action_mask": jnp.asarray(one), "seen": obs["seen"][:2]}
    action = jnp.zeros((2, *action_space.shape), jnp.int32)

    def loss(params):
        _, policy, _ = network.unroll(params, network.initial_carry((2,)), obs, jnp.zeros(2, bool))
        return jnp.sum(policy.log_prob(action) + policy.entropy() + policy.kl(policy)), policy

    (_, policy), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    np.testing.assert_allclose([policy.log_prob(action)[0], policy.entropy()[0]], [0, 0], atol=1e-6)
    assert np.isfinite(policy.log_prob(action)[1])
    draws = jax.vmap(policy.sample)(jax.random.split(jax.random.key(0), 200))[:, 1]
    assert all(action_space.contains(np.asarray(draw)) for draw in draws), "without a possible action, any is taken"


def test_a_torso_of_ones_own_does_not_see_the_mask_unless_it_is_named():
    make("discrete", torso=Whole)
    wide = make("discrete", actor_obs=("action_mask", "seen"))[1]["trunk"]
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(wide) if leaf.ndim == 2}
    assert 6 + 4 in sizes
    only, params = actor_critic(Dict({"action_mask": SIX}), Discrete(6), NetworkConfig(), jax.random.key(0))
    assert only.value(params, only.initial_carry(()), {"action_mask": jnp.ones(6, jnp.int8)}).shape == ()


SIX = Box(0, 1, (6,), np.int8)


@pytest.mark.parametrize(
    ("mask", "action", "sentence"),
    [
        (SIX, Box(-1, 1, (6,)), "has an action_mask, but actions are in Box.* only Discrete and MultiDiscrete actions"),
        (
            SIX,
            Discrete(5),
            r"must be a Box of integers or bools, such as np.int8, with the shape \(5,\): convert it, rename",
        ),
        (Box(0, 1, (6,)), Discrete(6), "must be a Box of integers"),
        (SIX, MultiDiscrete((2, 3)), r"with the shape \(5,\) or \(2, 3\)"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_and_can_be_ignored(mask, action, sentence):
    space = Dict({"action_mask": mask, "seen": SEEN})
    with pytest.raises(InputError, match=sentence):
        actor_critic(space, action, NetworkConfig(), jax.random.key(0))
    network, _ = actor_critic(space, action, NetworkConfig(action_mask=False), jax.random.key(0))
    assert network.feature_sizes == (64, 64)
    obs = {"action_mask": np.zeros(6, mask.dtype), "seen": np.zeros(4)}
    assert masks.without_action(space, action, obs) is None


def test_random_actions_are_possible_ones():
    space, action = masked((2, 4)), MultiDiscrete(NVEC)
    obs = {"action_mask": jnp.array([[1, 0, 1, 1], [0, 1, 0, 1]], jnp.int8), "seen": jnp.zeros(4)}
    drawn = jax.vmap(lambda key: masks.sample(space, action, obs, key))(jax.random.split(jax.random.key(0), 100))
    assert {tuple(row) for row in np.asarray(drawn).tolist()} == {(0, 1), (0, 3)}
    space, action = masked((3,)), Discrete(3, start=5)
    obs = {"action_mask": jnp.array([1, 0, 1], jnp.int8), "seen": jnp.zeros(4)}
    drawn = jax.vmap(lambda key: masks.sample(space, action, obs, key))(jax.random.split(jax.random.key(0), 100))
    assert set(np.asarray(drawn).tolist()) == {5, 7}


@dataclass(frozen=True)
class Bandit(Environment):
    """One step: action `i` earns `i`, but the last one, which earns 100, is forbidden, as is another one at random."""

    bools: bool = False
    action_space = Discrete(4)

    @property
    def observation_space(self):
        return Dict({"action_mask": Box(0, 1, (4,), bool if self.bools else np.int8), "seen": Box(-1, 1, (1,))})

    def _obs(self, key):
        forbidden = jax.random.randint(key, (), 0, 3)
        mask = (jnp.arange(4) != forbidden) & (jnp.arange(4) < 3)
        return {"action_mask": mask if self.bools else mask.astype(jnp.int8), "seen": jnp.zeros(1)}

    def reset(self, key):
        obs = self._obs(key)
        return obs["action_mask"], obs

    def step(self, key, state, action):
        earned = jnp.where(state[action] == 1, action.astype(jnp.float32), 100.0)
        return state, Timestep(self._obs(key), earned, jnp.bool_(True), jnp.bool_(False), {})


def test_a_mask_is_neither_stacked_nor_flattened():
    env = FlattenObservation(FrameStack(Bandit(), 3))
    assert env.observation_space == Dict({"action_mask": Box(0, 1, (4,), np.int8), "observation": Box(-1, 1, (3,))})
    state, obs = env.reset(jax.random.key(0))
    _, timestep = env.step(jax.random.key(1), state, jnp.int32(0))
    np.testing.assert_array_equal(obs["action_mask"], Bandit().reset(jax.random.key(0))[1]["action_mask"])
    np.testing.assert_array_equal(timestep.obs["action_mask"], Bandit()._obs(jax.random.key(1))["action_mask"])
    assert timestep.obs["observation"].shape == (3,)


@pytest.mark.parametrize("bools", [False, True])
def test_the_best_possible_action_is_learned_and_a_forbidden_one_never_taken(bools, tmp_path):
    """In one of three episodes the best action, 2, is forbidden, and 1 is the best: 5/3 on average."""
    settings = SMALL | {"num_envs": 32, "learning_rate": 0.02, "normalise_observations": True}
    result = lehr.train("ppo", env=Bandit(bools), run_dir=tmp_path / "run", total_steps=15_000, **settings)
    earned = result.metrics["episode/return"]
    assert earned.max() < 2, "a single forbidden action among 256 would add 0.38"
    assert earned[-5:].mean() > 1.55
    for forbidden, best in ((0, 2), (1, 2), (2, 1)):
        mask = np.array([1, 1, 1, 0], bool if bools else np.int8)
        mask[forbidden] = 0
        assert int(result.policy({"action_mask": mask, "seen": np.zeros(1, np.float32)})) == best


def test_what_cannot_follow_a_mask_is_refused():
    refused = [
        ("dreamer", {}, "Dreamer's imagination has none to enforce: train ppo"),
        ("ppo", {"action_repeat": 2}, "action_repeat is 2, but .*Bandit has an action mask"),
    ]
    for algorithm, settings, sentence in refused:
        with pytest.raises(InputError, match=sentence):
            lehr.train(algorithm, env=Bandit(), total_steps=64, num_envs=4, horizon=8, **settings)
