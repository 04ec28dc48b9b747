"""Dreamer: its losses against NumPy, its replay in an update, images, host environments, and what it refuses."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageSequence

import lehr
from lehr import cli
from lehr.acting.policy import Policy, PolicyParameters, PolicyProgram
from lehr.algorithms.dreamer import balanced, divergence
from lehr.envs import Environment, TimeLimit
from lehr.envs.builtin.probes import TwoStep
from lehr.errors import InputError
from lehr.networks.world_model import Latent
from lehr.spaces import Box, Discrete
from lehr.types import Timestep

# Losses --------------------------------------------------------------------------------------------------------------


def test_divergences_train_one_side_each_and_stop_at_the_free_nats():
    random = np.random.default_rng(0)
    logits = random.normal(size=(2, 6, 3, 4)) * np.array([0.1, 0.5, 1, 1, 2, 3])[:, None, None]
    posterior, prior = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in logits)
    expected = (posterior * (np.log(posterior) - np.log(prior))).sum((-2, -1))
    free = float(np.median(expected))
    arguments = jnp.log(jnp.float32(posterior)), jnp.log(jnp.float32(prior))
    dynamics, representation = balanced(*arguments, free)
    for found in (dynamics, representation):
        np.testing.assert_allclose(found, np.maximum(expected, free), rtol=1e-4)
    np.testing.assert_allclose(divergence(*arguments), expected, rtol=1e-4, atol=1e-6)

    def gradients(index):
        return jax.grad(lambda *given: balanced(*given, free)[index].sum(), argnums=(0, 1))(*arguments)

    above = (expected > free)[:, None, None]
    assert above.any()
    assert not above.all()
    to_posterior, to_prior = gradients(0)
    assert not np.any(to_posterior)
    np.testing.assert_allclose(to_prior, np.where(above, -posterior, 0), rtol=1e-4)
    to_posterior, to_prior = gradients(1)
    assert not np.any(to_prior)
    log_ratio = np.log(posterior) - np.log(prior)
    np.testing.assert_allclose(to_posterior, np.where(above, posterior * (log_ratio + 1), 0), rtol=1e-3, atol=1e-5)


# One update ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def probe():
    return TimeLimit(TwoStep(), 3)


def test_actions_are_random_until_the_replay_is_filled_and_states_are_refreshed(probe, begin, advance):
    run = begin("dreamer", probe, prefill=200)
    acting = run.state.learner.params["acting"]
    assert float(acting["random"]) == 1
    before = advance(run, 2)  # 128 steps, and an entry more for each episode of two steps
    assert before.metrics["replay/gradient_steps"].tolist() == [0, 0]
    assert before.metrics["replay/steps"].tolist() == [96, 192]
    assert float(before.state.learner.params["acting"]["random"]) == 1
    assert np.array_equal(before.state.learner.params["critic"]["output"]["bias"], np.zeros(63))
    after = advance(before, 1)
    assert after.metrics["replay/gradient_steps"].tolist() == [2]
    assert float(after.state.learner.params["acting"]["random"]) == 0
    old, new = (np.asarray(r.state.learner.memory.entries.extras["deter"][:, :24]) for r in (before, after))
    assert 0 < (old != new).any(-1).mean() < 1, "drawn states are replaced, others are not"


def test_a_learner_whose_replay_was_not_saved_fills_it_anew(probe, begin, advance):
    first = begin("dreamer", probe, prefill=200)
    trained = advance(first, 3)
    empty = first.state.learner
    learner = first.program.algorithm.forget(trained.state.learner._replace(memory=empty.memory))
    assert jax.tree.all(jax.tree.map(np.array_equal, learner.auxiliary.cursor, empty.auxiliary.cursor))
    again = advance(trained._replace(state=trained.state._replace(learner=learner)), 3)
    assert again.metrics["replay/steps"].tolist() == [96, 192, 288]
    assert again.metrics["replay/gradient_steps"].tolist() == [0, 0, 2]
    assert jax.tree.all(jax.tree.map(lambda x: bool(np.isfinite(x).all()), again.state.learner.params))


def test_the_final_observation_and_the_last_reward_are_in_the_replay(probe, begin, advance):
    run = advance(begin("dreamer", probe, prefill=200), 1)
    entries = jax.tree.map(lambda x: np.asarray(x)[0, :12], run.state.learner.memory.entries)
    np.testing.assert_array_equal(entries.obs[:, 0], [0, 1, 1] * 4)
    np.testing.assert_array_equal(entries.reward, [0, 0, 1] * 4)
    np.testing.assert_array_equal(entries.first, [True, False, False] * 4)
    np.testing.assert_array_equal(entries.last, [False, False, True] * 4)
    np.testing.assert_array_equal(entries.terminal, [False, False, True] * 4)


# Images --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dot(Environment):
    """A bright pixel on a line of eight, which two actions move; reward 1 at the right end; twelve steps."""

    observation_space: ClassVar[Box] = Box(0, 255, (8, 8, 1), np.uint8)
    action_space: ClassVar[Discrete] = Discrete(2)

    def _seen(self, place):
        return jnp.uint8(255) * jax.nn.one_hot(place, 8, dtype=jnp.uint8)[None, :, None].repeat(8, 0)

    def reset(self, key):
        place = jax.random.randint(key, (), 0, 8)
        return (place, jnp.int32(0)), self._seen(place)

    def step(self, key, state, action):
        place, count = jnp.clip(state[0] + 2 * action - 1, 0, 7), state[1] + 1
        reward = (place == 7).astype(jnp.float32)
        return (place, count), Timestep(self._seen(place), reward, jnp.bool(False), count >= 12, {})


def dreamt(run, seen, steps=6):
    """The images of an episode of Dot, those that the model expects, and all that it was given."""
    algorithm, params, env = run.program.algorithm, run.state.learner.params, Dot()
    state, obs = env.reset(jax.random.key(0))
    carry, observations, carries = algorithm.initial_carry((1,)), [obs], []
    act, step = jax.jit(algorithm.act), jax.jit(env.step)
    for number in range(steps):
        key = jax.random.key(number)
        carry, action, _ = act(params, carry, observations[-1][None], jnp.array([number == 0]), key)
        state, timestep = step(key, state, action[0])
        observations.append(timestep.obs)
        carries.append(jax.tree.map(lambda x: x[0], carry))
    obs, carries = (jax.tree.map(lambda *x: jnp.stack(x), *parts) for parts in (observations, carries))
    return algorithm.imagine(params, obs, carries, seen), (algorithm, params, obs, carries)


@pytest.mark.slow
def test_the_model_imagines_what_follows_from_the_actions(begin):
    seen = 2
    (happened, imagined), (algorithm, params, obs, carries) = dreamt(begin("dreamer", Dot()), seen)
    np.testing.assert_allclose(happened, np.asarray(obs) / 255)
    model, classes = algorithm.network.bind(params), algorithm.network.config.classes
    latent = Latent(carries["deter"][seen - 1], carries["stoch"][seen - 1])
    for number, image in enumerate(imagined):
        if number < seen:
            features = jnp.concatenate([carries["deter"][number], carries["stoch"][number]])
        else:
            deter = model.dynamics.advance(latent, model.dynamics.from_action(carries["action"][number - 1]))
            likely = np.argmax(model.dynamics.prior_log_probs(deter, 0.0), -1)
            latent = Latent(deter, jnp.asarray(np.eye(classes, dtype=np.float32)[likely].reshape(-1)))
            features = latent.features
        np.testing.assert_allclose(image, model.decoder(features)[0], atol=1e-5)


def test_what_the_model_no_longer_sees_does_not_change_what_it_imagines(begin):
    seen = 3
    (_, imagined), (algorithm, params, obs, carries) = dreamt(begin("dreamer", Dot()), seen)
    other = {**carries, **{name: carries[name].at[seen:].set(0.5) for name in ("deter", "stoch")}}
    np.testing.assert_array_equal(algorithm.imagine(params, obs.at[seen:].set(7), other, seen)[1], imagined)
    other = {**carries, "action": carries["action"][:, ::-1]}
    changed = np.abs(algorithm.imagine(params, obs, other, seen)[1] - imagined).max((1, 2, 3)) > 0
    np.testing.assert_array_equal(changed, np.arange(len(obs)) >= seen)


def test_play_shows_what_happened_beside_what_is_imagined(begin, tmp_path, monkeypatch):
    run = begin("dreamer", Dot())
    program = PolicyProgram(run.program.algorithm, Dot.observation_space, Dot.action_space)
    policy = Policy(program, PolicyParameters(run.state.learner.params, ()))
    result = SimpleNamespace(env=Dot(), policy=policy, run_dir=tmp_path)
    monkeypatch.setattr("lehr.cli.play.load_run", lambda arguments: result)
    assert cli.main(["play", "a run", "--imagine", "3"]) == 0
    with Image.open(tmp_path / "play.gif") as film:
        assert film.n_frames == 13
        height, width = 12 + 8 * 22, 2 * (12 + 8 * 22)
        assert film.size == (width, height)
        edges = [np.asarray(frame.convert("RGB"), int)[2, -3] for frame in ImageSequence.Iterator(film)]
    # The frame is grey while the model sees the observations, then orange.
    assert [bool(np.ptp(colour) < 20) for colour in edges] == [True] * 3 + [False] * 10


def test_vectors_are_imagined_but_not_shown(begin):
    algorithm = begin("dreamer", "CartPole-v1").program.algorithm
    with pytest.raises(InputError, match="have no image"):
        algorithm.imagine(begin("dreamer", "CartPole-v1").state.learner.params, jnp.zeros((2, 4)), {}, 1)


@pytest.mark.long
def test_images_are_reconstructed_and_acted_on(begin, advance):
    settings = {"train_ratio": 4.0, "learning_rate": "0.005 -> 0", "hidden_sizes": (32,), "image_depth": 4}
    run = advance(begin("dreamer", Dot(), total_steps=150 * 64, discount=0.9, **settings), 150)
    assert run.metrics["model/unexplained"][-10:].mean() < 0.2, "far below a constant predictor's"
    # Episodes of twelve steps end in two of three updates of eight. Random actions get about 1.5.
    assert np.nanmean(run.metrics["episode/return"][-30:]) > 7
    (happened, imagined), _ = dreamt(run, seen=2, steps=11)
    places = [np.asarray(images).sum((1, 3)).argmax(1) for images in (happened, imagined)]
    assert np.mean(places[0] == places[1]) > 0.8, "the model knows where the actions lead"


# Host environments, settings -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_quickly")
def test_host_environments_act_and_learn_apart(tmp_path):
    small = {"num_envs": 2, "horizon": 8, "batch_size": 2, "batch_length": 8, "train_ratio": 1.0, "prefill": 32}
    sizes = {"recurrent_size": 8, "hidden_sizes": (16,)}
    quiet = {"evaluate_episodes": 2, "tensorboard": False, "progress": False, "run_dir": tmp_path / "run"}
    result = lehr.train("dreamer", env="gym:CartPole-v1", total_steps=160, **small, **sizes, **quiet)
    assert result.metrics["replay/gradient_steps"].tolist() == [0, *[1] * 9]
    assert np.isfinite(result.metrics["loss/total"]).all()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"train_ratio": 0.1},
            "train_ratio is 0.1, but an update collects 64 env steps and a batch replays 64, so no batch fits; set "
            "train_ratio to 1 or more, or raise horizon.",
        ),
        (
            {"replay_size": 150},
            "replay_size is 150, which is 18 steps of each of 8 environments and too few for batch_length=8, "
            "horizon=8 and prefill=64; set replay_size to 200 or more.",
        ),
        ({"replay_size": 2 * 10**9, "recurrent_size": 512}, "GiB; lower replay_size."),
        ({"batch_length": 1}, "batch_length is 1; it must be 2 or more."),
    ],
    ids=["ratio", "replay", "memory", "length"],
)
def test_what_cannot_be_is_said_in_one_sentence(settings, sentence, begin):
    with pytest.raises(InputError) as raised:
        begin("dreamer", "CartPole-v1", **settings)
    assert sentence in str(raised.value)


# Learning ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_pendulum_is_learned_from_few_steps(tmp_path):
    """PPO's run of this task takes 300,000 steps. bench/dreamer.py learns CartPole too."""
    quiet = {"evaluate_episodes": 20, "tensorboard": False, "progress": False, "run_dir": tmp_path / "run"}
    result = lehr.train("dreamer", env="Pendulum-v1", total_steps=14_000, **quiet)
    assert result.final["evaluate/return"] >= -350


@pytest.mark.long
def test_the_model_remembers_what_was_shown_before(recall, begin, advance):
    """The shared test of memories has a model that is too small, and values whose noise hides what is to be learned."""
    sizes = {
        "recurrent_size": 128,
        "hidden_sizes": (64, 64),
        "batch_size": 16,
        "batch_length": 32,
        "replay_size": 10_000,
    }
    learning = {"train_ratio": 32.0, "learning_rate": 1e-3, "entropy_coef": 0.01, "uniform_mix": 0.01}
    rest = {"num_envs": 16, "horizon": 9, "discount": 0.7, "imagination_length": 3, "replay_value_coef": 0.0}
    run = advance(begin("dreamer", recall, **sizes, **learning, **rest), 140)
    assert run.metrics["episode/return"][-20:].mean() > 0.9
