"""The novelty bonus: its formula by hand, that it wears off where the agent has been, and that it finds what is far."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from bench.imitation import train
from lehr.envs.builtin.chain import DeepChain
from lehr.errors import InputError
from lehr.rewards import find
from lehr.rewards.novelty import Novelty, NoveltySettings
from lehr.spaces import Box, Discrete, Spaces
from lehr.types import Rollout
from tests.small import SMALL

SPACES = Spaces(Box(-np.inf, np.inf, (2,)), Discrete(2))
COEF = {
    name: jnp.float32(value)
    for name, value in {
        "task_coef": 0.5,
        "novelty_coef": 2.0,
        "discount": 0.9,
        "novelty_learning_rate": 1e-2,
    }.items()
}


def rollout(final_obs, reward=None, valid=()):
    shape = final_obs.shape[:2]
    nothing = jnp.zeros(shape, bool)
    reward = jnp.zeros(shape) if reward is None else reward
    return Rollout(final_obs, (), (), reward, (), (), nothing, nothing, nothing, valid, (), final_obs)


def made(**settings):
    return Novelty.build(SPACES, NoveltySettings(novelty_sizes=(8,), novelty_outputs=3, **settings))


def test_the_bonus_by_hand():
    model = made()
    seen = np.random.default_rng(0).normal(3.0, 2.0, (6, 4, 2)).astype(np.float32)
    seen[0, 0] = 500.0  # clipped
    reward = jnp.arange(24.0).reshape(6, 4)
    given = rollout(jnp.array(seen), reward)
    learner = model.init(jax.random.key(0), given)
    found = model.reward(learner, given, COEF)

    # The networks by hand: one hidden layer with ReLU, then a linear one.
    rows = seen.reshape(24, 2)
    x = np.clip((rows - rows.mean(0)) / rows.std(0), -5, 5)

    def outputs(params):
        hidden = params["encoder"]["layers"]["0"]
        hidden = np.maximum(x @ hidden["kernel"] + hidden["bias"], 0)
        return hidden @ params["head"]["kernel"] + params["head"]["bias"]

    learner = jax.tree.map(np.asarray, learner)
    errors = np.mean((outputs(learner.params) - outputs(learner.auxiliary.target)) ** 2, axis=1).reshape(6, 4)
    sums, total = [], np.zeros(4)
    for row in errors:  # over the ends of episodes: the sum goes on
        total = 0.9 * total + row
        sums.append(total)
    bonus = np.minimum(errors / np.std(sums), 10)
    np.testing.assert_allclose(found, 0.5 * reward + 2.0 * bonus, rtol=1e-3)


def test_the_statistics_are_remembered_and_the_random_network_never_changes():
    model = made()
    given = rollout(jax.random.normal(jax.random.key(1), (6, 4, 2)) * 3 + 1)
    learner = model.init(jax.random.key(0), given)
    after, metrics = model.learn(learner, given, COEF, jax.random.key(2))
    np.testing.assert_allclose(after.auxiliary.observations.mean[0], given.obs.reshape(-1, 2).mean(0), rtol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, after.auxiliary.target, learner.auxiliary.target)
    assert after.auxiliary.bonus.statistics.samples == 24
    assert set(metrics) == {"novelty/error", "novelty/bonus"}


def test_steps_that_do_not_count_are_neither_learned_from_nor_rewarded():
    model = made()
    seen = jax.random.normal(jax.random.key(1), (6, 4, 2))
    valid = jnp.arange(24).reshape(6, 4) % 2 == 0
    one, other = rollout(seen, valid=valid), rollout(jnp.where(valid[..., None], seen, 99.0), valid=valid)
    learner = model.init(jax.random.key(0), one)
    (first, _), (second, _) = (model.learn(learner, given, COEF, jax.random.key(2)) for given in (one, other))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), first.params, second.params)
    assert not model.reward(learner, other, COEF)[~valid].any()


def test_what_was_seen_often_is_new_no_more():
    model = made(novelty_share=1.0, novelty_updates=8)
    known, new = jnp.tile(jnp.array([[[1.0, -1.0]]]), (8, 4, 1)), jnp.tile(jnp.array([[[-1.0, 1.0]]]), (1, 4, 1))
    learner = model.init(jax.random.key(0), rollout(known))
    once = jnp.concatenate([known, new])
    learn = jax.jit(model.learn)
    learner, _ = learn(learner, rollout(once), COEF, jax.random.key(0))
    for number in range(60):
        learner, _ = learn(learner, rollout(known), COEF, jax.random.key(number))
    bonus = model.reward(learner, rollout(once), COEF)
    assert bonus[:-1].max() < 0.2 * bonus[-1].min()


def test_its_settings_are_checked_and_its_name_is_known():
    assert find("novelty") is Novelty
    with pytest.raises(InputError, match=r"novelty_share is 0\.0; it must be above 0 and at most 1"):
        made(novelty_share=0.0)
    with pytest.raises(InputError, match="novelty_updates is 0; it must be 1 or more"):
        made(novelty_updates=0)


CHAIN = {"num_envs": 16, "horizon": 24, "minibatches": 2, "epochs": 4, "learning_rate": 2e-3, "hidden_sizes": (32,)}


@pytest.mark.slow
def test_a_far_reward_is_found_by_novelty_and_not_by_chance():
    """Chance finds the end of this chain once in 4,096 episodes, and a policy learns before that to stay."""
    env, steps = DeepChain(12), 60_000
    given = {**CHAIN, "entropy_coef": 0.01, "reward_model": "novelty", "novelty_sizes": (32,)}
    assert train("ppo", env, steps, [0], {**given, "novelty_coef": "1 -> 0"}).returns[0] > 0.85
    assert train("ppo", env, steps, [0], {**given, "novelty_coef": "0 -> 0"}).returns[0] < 0.05


@pytest.mark.slow
def test_a_run_with_it_is_resumed_to_the_last_bit(tmp_path):
    given = {**SMALL, "reward_model": "novelty", "novelty_coef": "1 -> 0 cosine", "novelty_sizes": (8,)}
    whole = lehr.train("a2c", "CartPole-v1", run_dir=tmp_path / "whole", total_steps=128, **_only(given))
    stopped = lehr.train(
        "a2c",
        "CartPole-v1",
        run_dir=tmp_path / "parts",
        total_steps=128,
        progress_fn=lambda steps, _: steps >= 64,
        **_only(given),
    )
    assert int(stopped.state.updates) < 4
    resumed = lehr.resume(tmp_path / "parts")
    for one, other in zip(*(jax.tree.leaves(run.state._replace(key=())) for run in (whole, resumed)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert resumed.final["coef/novelty_coef"] < 1


def _only(given):
    """Without what A2C does not have."""
    return {name: value for name, value in given.items() if name not in ("epochs", "minibatches")}


def test_images_are_new_too():
    space = Box(0, 255, (8, 8, 1), np.uint8)
    model = Novelty.build(Spaces(space, Discrete(2)), NoveltySettings(novelty_sizes=(8,)))
    assert model.shapes.image == (8, 8, 1)
    keys = jax.random.split(jax.random.key(0), (4, 2))
    given = rollout(jax.vmap(jax.vmap(space.sample))(keys))
    learner = model.init(jax.random.key(0), given)
    assert model.reward(learner, given, COEF).shape == (4, 2)
    assert np.isfinite(model.learn(learner, given, COEF, jax.random.key(0))[1]["novelty/error"])
