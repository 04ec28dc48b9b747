"""What runners do before the first update: they measure observations that are to be normalised."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.acting.rollout import collect
from lehr.envs import Environment, make
from lehr.envs.wrappers import Wrapper
from lehr.maths.normalise import normalise
from lehr.training.plan import make_plan
from lehr.training.runners import make_runner
from lehr.types import derive
from tests.small import SMALL

SETTINGS = SMALL | {"total_steps": 320, "normalise_observations": True, "num_envs": 4, "horizon": 8}
WALK = "gym:tests.envs.gym_tasks:Walk-v0"


@dataclass(frozen=True)
class Large(Wrapper):
    """The observations, in other units: a thousand times as large, and far from 0."""

    env: Environment

    def reset(self, key):
        state, obs = self.env.reset(key)
        return state, 1000 * obs + 5000

    def step(self, key, state, action):
        state, timestep = self.env.step(key, state, action)
        return state, timestep._replace(obs=1000 * timestep.obs + 5000)


def begun(algorithm="ppo", made=None, **settings):
    """The plan of a small run, its runner, and the state that the runner begins with."""
    plan = make_plan(algorithm, {**SETTINGS, **settings}, env=made)
    runner = make_runner(plan, warn=pytest.fail)
    runner.compile(plan.state)
    return plan, runner, runner.begin(plan.state)


def first_rollout(plan, state):
    program = plan.program
    key = derive(state.key, "rollout", state.updates)
    return collect(
        program.env, program.algorithm, state.acting, state.actor, state.observation_statistics, 8, key, program.needs
    )


def share_at_the_limit(obs):
    return float(np.mean(np.abs(np.asarray(obs)) >= 10))


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("ppg", marks=pytest.mark.slow)])
def test_observations_of_the_first_update_are_normalised(algorithm):
    plan, runner, state = begun(algorithm, Large(make("CartPole-v1")))
    before = first_rollout(plan, plan.state)
    assert share_at_the_limit(before.rollout.obs) > 0.9
    # As if the first rollout had been looked at beforehand.
    raw = np.asarray(before.raw_obs, np.float64).reshape(-1, 4)
    np.testing.assert_allclose(state.observation_statistics.mean, raw.mean(0), rtol=1e-4)
    np.testing.assert_allclose(state.observation_statistics.variance, raw.var(0), rtol=1e-2)
    after = first_rollout(plan, state)
    assert share_at_the_limit(after.rollout.obs) < 0.05
    assert abs(float(np.mean(after.rollout.obs))) < 1
    # Nothing else has happened yet.
    fresh = make_plan(algorithm, SETTINGS, env=Large(make("CartPole-v1"))).state
    learned = state.learner._replace(memory=()), state.actor, state.updates
    expected = fresh.learner._replace(memory=()), fresh.actor, fresh.updates
    jax.tree.map(np.testing.assert_array_equal, learned, expected)
    # A run that begins again from there does not measure again.
    again = runner.begin(state)
    assert again is state
    state, _ = runner.advance(state, 1)
    assert float(state.observation_statistics.samples) == 2 * 4 * 8


def test_runs_that_do_not_normalise_begin_as_they_are():
    plan, _, state = begun(normalise_observations=False)
    assert state is plan.state


@pytest.mark.parametrize("parameters", [{}, {"autoreset": "next_step"}], ids=["restored", "reset"])
def test_on_the_host_a_first_rollout_is_measured_and_episodes_start_again(parameters):
    pytest.importorskip("gymnasium")
    settings = {"env": WALK, "env_parameters": parameters}
    _, runner, state = begun(**settings)
    _, other, plain = begun(**settings, normalise_observations=False)
    try:
        assert float(state.observation_statistics.samples) > 0
        jax.tree.map(np.testing.assert_array_equal, state.actor.obs, plain.actor.obs)
        collected = other._collect(plain, plain.actor, 0)
        valid = np.ones((8, 4), bool) if isinstance(collected.rollout.valid, tuple) else collected.rollout.valid
        raw = np.asarray(collected.rollout.obs, np.float64)[np.asarray(valid)]
        np.testing.assert_allclose(state.observation_statistics.mean, raw.mean(0), rtol=1e-3, atol=1e-5)
        seen = normalise(state.observation_statistics, jnp.asarray(raw, jnp.float32))
        assert share_at_the_limit(seen) < 0.05
    finally:
        runner.close()
        other.close()


def test_actors_learn_from_nothing_that_was_collected_before():
    pytest.importorskip("gymnasium")
    given = {name: value for name, value in SETTINGS.items() if name not in ("epochs", "minibatches")}
    plan = make_plan("impala", {**given, "env": WALK, "actors": "threads"})
    runner = make_runner(plan, warn=pytest.fail)
    try:
        runner.compile(plan.state)
        state = runner.begin(plan.state)
        assert float(state.observation_statistics.samples) == 4 * 8
        state, rows = runner.advance(state, 4)
        lag = rows[:, runner.names.index("rollout/lag")]
        assert (lag >= 0).all()
        assert (lag <= np.arange(4)).all()
        assert float(state.observation_statistics.samples) == 5 * 4 * 8
    finally:
        runner.close()
