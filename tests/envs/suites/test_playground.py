"""Playground's adapter against Playground itself, on its smallest task, and on one task that is made up."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.envs import ActionRepeat, TimeLimit, check_env, make
from lehr.envs.suites import playground
from lehr.errors import InputError
from lehr.spaces import Box, Dict

if importlib.util.find_spec("mujoco_playground") is None:
    pytest.skip("MuJoCo Playground is not installed", allow_module_level=True)

KEY = jax.random.key(0)


@pytest.fixture(autouse=True, scope="module")
def compile_fast():
    """The programs are large, and are run for a few steps only."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
def test_the_same_keys_and_actions_give_what_playground_gives():
    env = make("playground:CartpoleBalance", episode_length=3)
    theirs = playground._load("CartpoleBalance", (("impl", "jax"),))
    assert env.env.env is theirs

    @jax.jit
    def step(state, action):
        with jax.numpy_rank_promotion("allow"):
            return env.step(KEY, state, action), theirs.step(state.env_state, action)

    @jax.jit
    def begin(key):
        with jax.numpy_rank_promotion("allow"):
            return env.reset(key), theirs.reset(key)

    (state, obs), their_state = begin(KEY)
    np.testing.assert_allclose(obs, their_state.obs, rtol=1e-6)
    for count, action in enumerate([0.5, -1.0, 0.2], start=1):
        before = obs
        (state, timestep), their_state = step(state, jnp.array([action]))
        obs = timestep.obs
        np.testing.assert_allclose(obs, their_state.obs, rtol=1e-6)
        np.testing.assert_allclose(timestep.reward, their_state.reward, rtol=1e-6)
        assert timestep.reward > 0.5  # the pole is still up
        assert obs[0] != before[0]  # and the cart has moved
        assert "reward/upright" in timestep.info
        assert not timestep.terminated
        assert bool(timestep.truncated) == (count == 3)


@pytest.mark.slow
def test_keeps_to_the_protocol():
    assert check_env(make("playground:CartpoleBalance", episode_length=8), num_envs=2, num_steps=20) == []


@pytest.mark.slow
def test_trains(tmp_path):
    result = lehr.train(
        "ppo",
        env="playground:CartpoleBalance",
        env_parameters={"episode_length": 8},
        total_steps=128,
        num_envs=4,
        horizon=16,
        epochs=1,
        minibatches=1,
        evaluate_episodes=0,
        progress=False,
        run_dir=tmp_path / "run",
    )
    assert result.final["episode/length"] == 8
    assert 0 < result.final["episode/return"] < 8


def test_attributes_and_equality():
    env = make("playground:CartpoleBalance")
    assert env == make("playground:CartpoleBalance", impl="jax")
    assert hash(env) == hash(make("playground:CartpoleBalance"))
    assert env != make("playground:CartpoleBalance", ctrl_dt=0.02)
    assert make(env.env.env) == env
    assert isinstance(env, TimeLimit)
    assert (env.max_steps, env.truncation_gap, env.environments_per_reset) == (1000, 1000, 16)
    assert env.observation_space == Box(-np.inf, np.inf, (5,))
    assert env.action_space == Box(-1, 1, (1,))
    assert "CartpoleBalance" in playground.names()


class Falling:
    """A made-up task: the height h falls by the action, and what is below 0 is no number any more."""

    action_size = 1

    def reset(self, rng: Any):
        obs = {"state": jnp.ones(1), "privileged_state": {"seed": jnp.ones((2, 2))}}
        return playground._playground().State(jnp.float32(1), obs, jnp.float32(0), jnp.float32(0), {"h": 1.0}, {})

    def step(self, state: Any, action: jax.Array):
        height = state.data - action[0]
        state.metrics["h"] = height
        root = jnp.sqrt(height)
        obs = {"state": root[None], "privileged_state": {"seed": jnp.full((2, 2), height)}}
        return state.replace(data=height, obs=obs, reward=root, done=jnp.isnan(root).astype(float))


def test_observations_with_parts_stay_apart_and_a_diverged_end_is_finite():
    env = playground.adapt(Falling())
    assert env.observation_space == Dict(
        {"state": Box(-np.inf, np.inf, (1,)), "privileged_state": Dict({"seed": Box(-np.inf, np.inf, (2, 2))})}
    )
    begun, obs = env.reset(KEY)
    assert obs["state"].tolist() == [1]
    state, timestep = env.step(KEY, begun, jnp.array([0.75]))
    assert begun.metrics == {"h": 1.0}
    assert (timestep.obs["state"].tolist(), float(timestep.reward), bool(timestep.terminated)) == ([0.5], 0.5, False)
    _, timestep = env.step(KEY, state, jnp.array([0.75]))
    assert (timestep.obs["state"].tolist(), float(timestep.reward), bool(timestep.terminated)) == ([0.0], 0.0, True)
    assert timestep.obs["privileged_state"]["seed"].tolist() == [[-0.5, -0.5]] * 2
    assert not timestep.truncated


def test_lengths_count_steps_of_the_task():
    env = playground.adapt(Falling(), episode_length=10, action_repeat=4)
    assert isinstance(env, TimeLimit)
    assert isinstance(env.env, ActionRepeat)
    assert (env.max_steps, env.env_steps_per_step) == (3, 4)


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        (
            "CartpoleBalanc",
            {},
            "Playground has no environment 'CartpoleBalanc'; did you mean 'playground:CartpoleBalance'",
        ),
        ("CartpoleBalance", {"ctrl": 1}, "has no parameter 'ctrl'; did you mean 'ctrl_dt'"),
        ("CartpoleBalance", {"ctrl_dt": "often"}, "cannot be created with ctrl_dt='often'"),
        ("CartpoleBalance", {"ctrl_dt": {}}, "The parameter ctrl_dt of playground:CartpoleBalance is {}"),
        ("CartpoleBalance", {"impl": "bullet"}, "cannot be created with impl='bullet'"),
    ],
)
def test_errors_say_what_is_wrong(name, parameters, sentence):
    with pytest.raises(InputError, match=sentence):
        playground.make(name, **parameters)


def test_a_download_is_asked_for_and_not_begun(monkeypatch, tmp_path):
    monkeypatch.setattr(playground, "_menagerie_path", lambda: tmp_path / "none")
    with pytest.raises(
        InputError,
        match=r"Go1Getup needs the robot models of MuJoCo Menagerie, which have not been downloaded: run .* once with internet access",
    ):
        playground.make("Go1Getup")


def test_a_task_that_does_not_fit_the_installed_mujoco_says_so(monkeypatch):
    def fail(*_, **__):
        raise AttributeError("no attribute 'find_body'")

    monkeypatch.setattr(playground._playground().registry, "load", fail)
    with pytest.raises(
        InputError, match=r"ReacherEasy does not work with the installed mujoco .* \(no attribute 'find_body'\)"
    ):
        playground.make("ReacherEasy", sim_dt=0.0025)


def test_what_resets_by_itself_is_refused():
    wrapped = playground._playground().wrapper.BraxAutoResetWrapper(Falling())
    with pytest.raises(InputError, match="resets or batches, which Lehr does itself: give the wrapped environment"):
        make(wrapped)
