"""The discriminator: its loss, its penalty and its rewards against closed forms, and what it is shown."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.acting.demonstrations import Demonstrations
from lehr.config import build
from lehr.errors import InputError
from lehr.maths.normalise import initial_statistics
from lehr.rewards.discriminator import (
    Discriminator,
    DiscriminatorSettings,
    Rows,
    absorbing,
    bernoulli_entropy,
    cross_entropy,
    gradient_penalty,
    imitation_reward,
    singular_vectors,
    spectrally_normalised,
)
from lehr.spaces import Box, Dict, Discrete, MultiDiscrete, Spaces
from lehr.training.iteration import iteration
from lehr.training.program import assemble
from lehr.types import Learner, Rollout

SPACES = Spaces(Box(-np.inf, np.inf, (2,)), Box(-2, 2, (1,)))
LOGITS = jnp.array([-3.0, -0.5, 0.0, 2.0])
D = 1 / (1 + np.exp(-np.float64(LOGITS)))


def made(spaces=SPACES, **settings):
    return Discriminator.build(spaces, DiscriminatorSettings(discriminator_sizes=(), **settings))


def linear(weights, bias=0.0):
    """Parameters of a discriminator without hidden layers: f(x) = w x + b."""
    return {"head": {"kernel": jnp.array(weights)[:, None], "bias": jnp.array([bias])}}


def rollout(**fields):
    blank = {"log_prob": (), "value": (), "next_value": (), "reset": (), "valid": (), "carry": (), "action": ()}
    given = {name: jnp.asarray(value) if name != "obs" else value for name, value in fields.items()}
    return Rollout(**{**blank, **given})


# Formulas ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "expected"),
    [("positive", -np.log(1 - D)), ("negative", np.log(D)), ("logit", np.log(D) - np.log(1 - D))],
)
def test_the_forms_of_the_reward(form, expected):
    np.testing.assert_allclose(imitation_reward(LOGITS, form), expected, rtol=1e-5)


def test_the_terms_of_the_loss():
    for target in (0.0, 0.1, 1.0):
        expected = -target * np.log(D) - (1 - target) * np.log(1 - D)
        np.testing.assert_allclose(cross_entropy(LOGITS, target), expected, rtol=1e-5)
    np.testing.assert_allclose(bernoulli_entropy(LOGITS), -D * np.log(D) - (1 - D) * np.log(1 - D), rtol=1e-5)


def test_the_loss_of_a_batch_by_hand():
    model = made()
    params = linear([1.0, -2.0, 0.5], 0.25)
    expert = Rows((jnp.array([[1.0, 0.0, 1.0], [0.0, 1.0, -1.0]]),), jnp.ones(2))
    policy = Rows((jnp.array([[2.0, 1.0, 0.0], [3.0, 3.0, 3.0]]),), jnp.array([1.0, 0.0]))  # the second does not count
    coef = {
        "label_smoothing": jnp.float32(0.2),
        "discriminator_entropy_coef": jnp.float32(0.3),
        "gradient_penalty_coef": jnp.float32(0.7),
        "gradient_norm": jnp.float32(1.0),
    }
    total, metrics = model.loss(params, (), expert, policy, coef, jax.random.key(0))

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    real, fake = sigmoid(np.array([1.75, -2.25])), sigmoid(0.25)
    expert_loss = np.mean(-0.9 * np.log(real) - 0.1 * np.log(1 - real))
    policy_loss = -0.1 * np.log(fake) - 0.9 * np.log(1 - fake)
    entropies = [np.mean(-p * np.log(p) - (1 - p) * np.log(1 - p)) for p in (real, fake)]
    penalty = (np.sqrt(1 + 4 + 0.25) - 1) ** 2  # the slope of a line is the same everywhere
    expected = expert_loss + policy_loss - 0.3 * np.mean(entropies) + 0.7 * penalty
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["discriminator/loss"], expert_loss + policy_loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["discriminator/gradient_penalty"], penalty, rtol=1e-5)
    assert metrics["discriminator/expert_right"] == 0.5
    assert metrics["discriminator/policy_right"] == 0.0
    del coef["gradient_penalty_coef"]
    without, _ = model.loss(params, (), expert, policy, coef, jax.random.key(0))
    np.testing.assert_allclose(without, expected - 0.7 * penalty, rtol=1e-5)


def test_the_gradient_penalty_is_taken_between_the_steps():
    """f(x) = x² has the slope 2x, so that the penalty shows the points: all between 1 and 3, and not all the same."""
    ones, threes = (jnp.ones((1000, 1)),), (jnp.full((1000, 1), 3.0),)
    found = gradient_penalty(lambda inputs: jnp.square(inputs[0][:, 0]), ones, threes, 0.0, jax.random.key(0))
    points = np.sqrt(found) / 2
    assert points.min() >= 1
    assert points.max() <= 3
    np.testing.assert_allclose([points.mean(), points.std()], [2.0, 2 / np.sqrt(12)], atol=0.05)


def test_spectral_normalisation_finds_the_largest_singular_value():
    key = jax.random.key(1)
    params = {"a": {"kernel": jax.random.normal(key, (5, 4)), "bias": jnp.ones(4)}}
    vectors = singular_vectors(params, key)
    for _ in range(100):
        normalised, vectors = spectrally_normalised(params, vectors)
    largest = np.linalg.svd(params["a"]["kernel"], compute_uv=False)[0]
    np.testing.assert_allclose(normalised["a"]["kernel"], params["a"]["kernel"] / largest, rtol=1e-4)
    np.testing.assert_array_equal(normalised["a"]["bias"], params["a"]["bias"])


# What it is shown ----------------------------------------------------------------------------------------------------


def test_rewards_of_a_rollout_by_hand():
    model = made(imitation_reward="logit")
    steps = rollout(
        obs=jnp.array([[[1.0, 2.0], [3.0, 4.0]]]),
        taken=[[[2.0], [-1.0]]],
        reward=[[10.0, 20.0]],
        terminated=[[False, True]],
        done=[[False, True]],
    )
    coef = {"task_coef": jnp.float32(0.1), "imitation_coef": jnp.float32(2.0), "discount": jnp.float32(0.9)}
    learner = Learner(linear([1.0, 1.0, 4.0]), ())
    # Actions of the box [−2, 2] are seen as 1 and −0.5.
    np.testing.assert_allclose(model.reward(learner, steps, coef), [[1 + 2 * (3 + 4), 2 + 2 * (7 - 2)]], rtol=1e-6)
    state = made(imitation_reward="logit", discriminator_input="state")
    found = state.reward(Learner(linear([1.0, 1.0]), ()), steps, coef)
    np.testing.assert_allclose(found, [[1 + 2 * 3, 2 + 2 * 7]], rtol=1e-6)
    transition = made(imitation_reward="logit", discriminator_input="transition")
    following = steps._replace(final_obs=jnp.array([[[5.0, 0.0], [0.0, 7.0]]]))
    found = transition.reward(Learner(linear([1.0, 1.0, 1.0, -1.0]), ()), following, coef)
    np.testing.assert_allclose(found, [[1 + 2 * (3 + 5), 2 + 2 * (7 - 7)]], rtol=1e-6)
    assert (made().needs, state.needs, transition.needs) == ({"taken"}, frozenset(), {"final_obs"})


def test_a_terminal_state_is_rewarded_for_what_follows_and_a_truncated_one_is_not():
    """The absorbing state's reward, here f = 3, counts γ / (1 − γ) times where an episode terminated."""
    model = made(imitation_reward="logit", discriminator_input="state", absorbing_states=True)
    learner = Learner(linear([1.0, 1.0, 3.0]), ())
    steps = rollout(
        obs=jnp.array([[[1.0, 0.0], [1.0, 0.0]]]),
        reward=[[0.0, 0.0]],
        terminated=[[False, True]],
        done=[[True, True]],
    )
    coef = {"task_coef": jnp.float32(0), "imitation_coef": jnp.float32(1), "discount": jnp.float32(0.9)}
    np.testing.assert_allclose(model.reward(learner, steps, coef), [[1.0, 1.0 + 3.0 * 9]], rtol=1e-5)
    given = {"obs": steps.obs[0], "terminated": steps.terminated[0]}
    rows = model.rows(given, jnp.array([0, 1, 1]))
    assert rows.weight.tolist() == [1, 1, 1, 0, 1, 1]
    assert rows.inputs[0].tolist() == [[1, 0, 0]] * 3 + [[0, 0, 1]] * 3
    assert absorbing((jnp.ones((1, 2)),))[0].tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("action", "expected"),
    [(Discrete(3), 3), (MultiDiscrete((2, 3)), 5), (Box(-1, 1, (2,)), 2)],
    ids=["discrete", "multi-discrete", "box"],
)
def test_every_kind_of_action_and_of_observation_is_judged(action, expected):
    space = Dict({"image": Box(0, 255, (8, 8, 3), np.uint8), "gear": Discrete(4), "speed": Box(-1, 1, (2,))})
    model = Discriminator.build(Spaces(space, action), DiscriminatorSettings(discriminator_sizes=(8,)))
    assert model.shapes.image == (8, 8, 3)
    assert model.shapes.vector == 4 + 2 + expected
    transition = replace(model, config=replace(model.config, discriminator_input="transition"))
    assert (transition.shapes.image, transition.shapes.vector) == ((8, 8, 6), 12)
    keys = jax.random.split(jax.random.key(0), 5)
    steps = {"obs": jax.vmap(space.sample)(keys), "taken": jax.vmap(action.sample)(keys)}
    learner = model.init(jax.random.key(1), None)
    logits = model.logits(learner.params, (), model.inputs(steps))
    assert logits.shape == (5,)
    assert len(np.unique(logits)) == 5


def demonstrations(folder, obs, actions, terminated=True):
    """Two episodes of equal length."""
    steps = len(obs)
    last = np.arange(steps) % (steps // 2) == steps // 2 - 1
    end = (
        {"terminated": last, "truncated": ~last & last}
        if terminated
        else {"terminated": ~last & last, "truncated": last}
    )
    given = Demonstrations(
        obs=np.float32(obs),
        actions=actions,
        rewards=np.ones(steps, np.float32),
        final_obs=np.float32(obs)[:2],
        lengths=np.array([steps // 2] * 2),
        **end,
    )
    return str(given.save(folder / "demos.npz"))


def test_the_experts_observations_are_normalised_as_the_policys_are(tmp_path):
    obs = np.arange(8.0).reshape(4, 2)
    path = demonstrations(tmp_path, obs, np.zeros((4, 1), np.float32))
    model = made(demonstrations=path)
    loaded = model.load()
    assert loaded.sources[0][0] == path
    assert len(loaded.sources[0][1]) == 64
    assert loaded.summary == (
        f"Demonstrations from '{path}': 2 episodes of 2 to 2 steps (2 terminated), mean return 2 (2 to 2)."
    )
    learner = Learner((), (), data=loaded.data)
    statistics = replace(initial_statistics(jnp.zeros(2)), mean=jnp.array([1.0, 2.0]), variance=jnp.array([4.0, 1.0]))
    seen = model.normalised(learner, statistics).data
    np.testing.assert_allclose(seen["obs"], (obs - [1, 2]) / [2, 1], rtol=1e-6)
    np.testing.assert_array_equal(model.normalised(learner, ()).data["obs"], obs)
    np.testing.assert_array_equal(seen["taken"], np.zeros((4, 1)))


def test_without_demonstrations_there_is_an_error_and_never_a_guess(tmp_path):
    with pytest.raises(InputError, match=r"demonstrations is none, .* record some with 'lehr record RUN --out"):
        made().load()
    path = demonstrations(tmp_path, np.zeros((4, 2)), np.zeros((4, 1), np.float32))
    with pytest.raises(InputError, match=r"demonstration_episodes is 3, but '.*' has 2 episodes"):
        made(demonstrations=path, demonstration_episodes=3).load()
    assert len(made(demonstrations=path, demonstration_episodes=1).load().data["obs"]) == 2
    with pytest.raises(InputError, match="discriminator_batch is 0; it must be 1 or more"):
        made(discriminator_batch=0)


# Learning ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"spectral_normalisation": True, "absorbing_states": True}, id="all", marks=pytest.mark.slow),
    ],
)
def test_it_learns_to_tell_the_experts_actions_from_others(settings, tmp_path):
    """The expert always does what a policy at random does half of the time."""
    env = lehr.envs.make("CartPole-v1")
    obs = np.random.default_rng(0).normal(0, 0.02, (64, 4))
    path = demonstrations(tmp_path, obs, np.ones(64, int), terminated=False)
    given = {"num_envs": 8, "horizon": 16, "epochs": 1, "minibatches": 1, "hidden_sizes": (8,), "learning_rate": 0.0}
    given |= {"demonstrations": path, "discriminator_sizes": (16,), "discriminator_input": "state-action", **settings}
    given |= {"discriminator_updates": 16, "discriminator_learning_rate": 3e-3, "gradient_penalty_coef": 0.01}
    config, network = build(lehr.algorithms.settings_of("gail"), given)
    program, state = assemble("gail", env, config, network, 10_000)
    update = jax.jit(partial(iteration, program))
    for _ in range(20):
        state, metrics = update(state)
    model = program.reward_model
    logits = [
        model.logits(
            state.reward_model.params,
            state.reward_model.auxiliary,
            model.inputs({"obs": jnp.float32(obs), "taken": jnp.full(64, action)}),
        )
        for action in (0, 1)
    ]
    assert np.mean(logits[1] > logits[0] + 1) > 0.95
    assert metrics["discriminator/expert_right"] > 0.9
    assert int(state.rejected) == 0
