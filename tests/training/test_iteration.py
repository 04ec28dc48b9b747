"""The iteration: its clock, its keys, its metrics, and what it does with numbers that are not finite."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.acting.rollout import collect
from lehr.algorithms import ppo
from lehr.algorithms.base import ActorCriticAlgorithm
from lehr.algorithms.settings import Settings as Common
from lehr.envs import ActionRepeat, AutoReset, Environment, make
from lehr.maths.normalise import initial_statistics, update_statistics
from lehr.networks import NetworkConfig, actor_critic
from lehr.rewards import EnvironmentReward
from lehr.schedules import schedule
from lehr.schedules.bundle import bundle
from lehr.spaces import Box, Discrete
from lehr.training.guard import SMALL, is_finite
from lehr.training.iteration import iteration
from lehr.training.program import Program, assemble, initial_state
from lehr.training.runners.device import chunk, metric_names
from lehr.types import Learner, Timestep, derive

CONFIG = ppo.Config(num_envs=4, horizon=4, epochs=1, minibatches=1)
NETWORK = NetworkConfig(hidden_sizes=(8,))


# An algorithm of a few lines: what an iteration does is then easy to say ----------------------------------------


@dataclass(frozen=True)
class Settings(Common):
    num_envs: int = 4
    horizon: int = 4
    normalise_observations: bool = False
    normalise_rewards: bool = False


@dataclass(frozen=True)
class Adder(ActorCriticAlgorithm):
    """Add the mean reward to every parameter, and the bias to what an optimiser would remember."""

    Config: ClassVar[type] = Settings

    def init(self, key, params, example):
        return Learner(params, jnp.zeros(()))

    def learn(self, learner, rollout, coef, key):
        mean = jnp.mean(rollout.reward)
        params = jax.tree.map(lambda x: x + mean * coef["learning_rate"], learner.params)
        draw = jax.random.uniform(key)
        loss = jnp.mean(rollout.obs)
        return Learner(params, learner.optimiser + coef["value_coef"]), {"loss/total": loss, "draw": draw}


@dataclass(frozen=True)
class Clockwork(Environment):
    """Steps to 3 and terminates. The observation is 10 times the count; the reward is 1."""

    observation_space: ClassVar[Box] = Box(0, 30, (1,))
    action_space: ClassVar[Discrete] = Discrete(2)

    def reset(self, key):
        return jnp.float32(0), jnp.zeros(1)

    def step(self, key, state, action):
        state = state + 1
        return state, Timestep(10 * state[None], jnp.float32(1), state >= 3, jnp.bool(False), {})


DEFAULTS = Settings()


@cache
def adder(settings=DEFAULTS):
    env = AutoReset(Clockwork())
    network, params = actor_critic(env.observation_space, env.action_space, NETWORK, jax.random.key(0))
    program = Program(env, Adder(settings, network), EnvironmentReward())
    return program, params, jax.jit(partial(iteration, program))


def coefficients(learning_rate=0.5, value_coef=1.0, total=160):
    given = {"learning_rate": learning_rate, "value_coef": value_coef, "discount": 0.9}
    return bundle({name: schedule(value).bind(total) for name, value in given.items()})


def started(given=None, settings=DEFAULTS):
    program, params, step = adder(settings)
    given = given or coefficients()
    return initial_state(program, given, params, jax.random.key(7)), step


def test_the_learner_is_given_the_rollout_the_coefficients_and_keys_of_its_own():
    state, step = started()
    before = jax.tree.map(np.asarray, state.learner.params)
    draws = []
    for _ in range(3):
        state, metrics = step(state)
        draws.append(float(metrics["draw"]))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y + 3 * 0.5 * 1.0, rtol=1e-5), state.learner.params, before)
    assert float(state.learner.optimiser) == 3.0
    assert int(state.updates) == 3
    assert len(set(draws)) == 3


def test_coefficients_are_those_of_the_steps_before_the_rollout():
    state, step = started(coefficients(learning_rate="1 -> 0"))
    rates = []
    for _ in range(11):
        state, metrics = step(state)
        rates.append(float(metrics["coef/learning_rate"]))
    np.testing.assert_allclose(rates, [1 - update / 10 for update in range(11)], atol=1e-6)  # 16 of 160 steps each


def test_episodes_are_reported_as_means_and_as_nan_where_none_ended():
    state, step = started(settings=Settings(horizon=2))
    found = []
    for _ in range(3):
        state, metrics = step(state)
        found.append([float(metrics[f"episode/{name}"]) for name in ("count", "return", "length")])
    np.testing.assert_array_equal(found, [[0, np.nan, np.nan], [4, 3, 3], [4, 3, 3]])


def test_statistics_of_observations_take_effect_after_the_rollout_they_are_of():
    """A rollout is normalised by what was known before it: the first one not at all."""
    state, step = started(settings=Settings(normalise_observations=True))
    seen = [np.tile([0, 10, 20, 0], 4), np.tile([10, 20, 0, 10], 4), np.tile([20, 0, 10, 20], 4)]
    expected = initial_statistics(jnp.zeros(1))
    for raw in seen:
        state, metrics = step(state)
        normalised = (raw - expected.mean[0]) / np.sqrt(expected.variance[0] + 1e-8)
        assert float(metrics["loss/total"]) == pytest.approx(np.mean(np.clip(normalised, -10, 10)), rel=1e-3, abs=1e-5)
        expected = update_statistics(expected, jnp.float32(raw)[:, None])
        np.testing.assert_allclose(state.observation_statistics.mean, expected.mean, rtol=1e-5)
        np.testing.assert_allclose(state.observation_statistics.variance, expected.variance, rtol=1e-5)


def test_rewards_are_scaled_by_the_spread_of_the_discounted_return():
    state, step = started(settings=Settings(normalise_rewards=True))
    before = jax.tree.map(np.asarray, state.learner.params)
    state, metrics = step(state)
    returns = np.tile([1, 1.9, 2.71, 1], 4)
    scaled = 1 / np.sqrt(returns.var() + 1e-8)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y + 0.5 * scaled, rtol=1e-4), state.learner.params, before)
    assert float(metrics["episode/return"]) == 3, "what is reported is not scaled"


@pytest.mark.parametrize("broken", ["params", "loss", "optimiser"])
def test_an_update_that_is_not_finite_is_counted_and_not_applied(broken, monkeypatch):
    """Also when only what the optimiser remembers is broken: it would break the parameters later, or stall them."""

    def learn(self, learner, rollout, coef, key):
        learner, metrics = plain(self, learner, rollout, coef, key)
        factor = jnp.where(coef["learning_rate"] > 0.4, jnp.nan, 1.0)
        match broken:
            case "params":
                learner = learner._replace(params=jax.tree.map(lambda x: x * factor, learner.params))
            case "loss":
                metrics["loss/total"] = metrics["loss/total"] * factor
            case "optimiser":
                learner = learner._replace(optimiser=learner.optimiser * factor)
        return learner, metrics

    plain = Adder.learn
    monkeypatch.setattr(Adder, "learn", learn)
    program, params, _ = adder()
    step = jax.jit(partial(iteration, program))
    given = coefficients(learning_rate="0.1 until 16, 0.5 until 32, 0.2 until 160")
    state = initial_state(program, given, params, jax.random.key(0))
    learners, rejected = [], []
    for _ in range(3):
        state, metrics = step(state)
        learners.append(jax.tree.map(np.asarray, state.learner))
        rejected.append(int(metrics["update/rejected"]))
    assert rejected == [0, 1, 1]
    jax.tree.map(np.testing.assert_array_equal, learners[0], learners[1])
    assert float(learners[2].optimiser) == 2.0
    assert int(state.updates) == 3


# Chunks --------------------------------------------------------------------------------------------------------------


def test_a_chunk_is_its_updates_one_after_another_and_a_row_of_metrics_for_each():
    state, step = started(coefficients(learning_rate="1 -> 0"))
    program = adder()[0]
    names = metric_names(program, state)
    last, rows = jax.jit(partial(chunk, program, 5))(state, jnp.int32(3))
    assert rows.shape == (5, len(names))
    assert list(names) == sorted(names)
    for row in np.asarray(rows)[:3]:
        state, metrics = step(state)
        np.testing.assert_array_equal(row, [np.float32(metrics[name]) for name in names])
    np.testing.assert_array_equal(rows[3:], 0)
    jax.tree.map(np.testing.assert_array_equal, last.learner, state.learner)
    assert int(last.updates) == 3


# Names, keys, sizes --------------------------------------------------------------------------------------------------


def test_the_clock_counts_environments_agents_steps_and_action_repeats():
    network, _ = actor_critic(Clockwork.observation_space, Clockwork.action_space, NETWORK, jax.random.key(0))

    def steps(env):
        return Program(
            AutoReset(env), Adder(Settings(num_envs=5, horizon=7), network), EnvironmentReward()
        ).steps_per_update

    assert steps(Clockwork()) == 5 * 7
    assert steps(ActionRepeat(Clockwork(), 3)) == 5 * 7 * 3
    assert steps(make("Swarm-v0", num_agents=6)) == 5 * 7 * 6


def test_every_purpose_and_every_time_has_a_key_of_its_own():
    key = jax.random.key(0)
    purposes = ("rollout", "learn", "network", "environments", "evaluate", "evaluation", "a", "ab")
    keys = [derive(key, purpose, clock) for purpose in purposes for clock in (0, 1, 2**31)]
    data = np.stack([jax.random.key_data(one) for one in keys])
    assert len(np.unique(data, axis=0)) == len(keys)
    np.testing.assert_array_equal(data[0], jax.random.key_data(derive(key, "rollout", jnp.uint32(0))))


def test_is_finite_looks_at_every_float_and_at_nothing_else():
    tree = {"a": jnp.ones(3), "b": (jnp.int32(2), jnp.zeros((2, 2)))}
    assert bool(is_finite(tree))
    assert not bool(is_finite(tree | {"a": jnp.array([1.0, jnp.inf, 1.0])}))
    assert not bool(is_finite(tree | {"b": (jnp.int32(2), jnp.full((2, 2), jnp.nan))}))
    assert bool(is_finite(()))
    wide = {
        "large": jnp.ones((2, SMALL)),
        "half": jnp.ones(4, jnp.bfloat16),
        "scalar": jnp.float32(1),
        "none": jnp.ones(0),
    }
    assert bool(is_finite(tree | wide))
    for name, leaf in wide.items():
        if leaf.size:
            broken = tree | wide | {name: leaf.at[(-1,) * leaf.ndim].set(jnp.nan)}
            assert not bool(is_finite(broken)), name


def test_assembling_a_run_leaves_out_the_coefficients_its_settings_do_not_use():
    program, state = assemble("ppo", "CartPole-v1", CONFIG, NETWORK, total_steps=1000)
    values = state.coefficients.values(state.controllers, 0)
    assert not CONFIG.unused & set(values)
    assert "value_clip_range" not in values, "none clips nothing"
    assert int(state.updates) == int(state.rejected) == 0
    assert state.actor.reset.all()
    assert hash(program) == hash(replace(program))


def test_a_run_can_be_collected_from_by_hand():
    """The parts of an iteration are functions that anybody may call."""
    program, state = assemble("ppo", "CartPole-v1", CONFIG, NETWORK, total_steps=1000)
    act = jax.jit(partial(collect, program.env, program.algorithm, needs=program.needs), static_argnums=3)
    rollout = act(state.learner.params, state.actor, (), 4, jax.random.key(0)).rollout
    assert rollout.obs.shape == (4, 4, 4)
