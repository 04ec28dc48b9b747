"""Runs around environments on the host: time limits, lag, resume, and environments that fail."""

import logging
import multiprocessing
import os
import signal

import gymnasium
import jax
import numpy as np
import pytest

import lehr
from lehr.envs import make
from lehr.errors import InputError
from lehr.training.loop import RunFailed
from lehr.training.plan import make_plan
from lehr.training.runners.host import HostRunner
from tests.envs.gym_tasks import WrongBatch
from tests.small import SMALL

AS_THEY_ARE = {"normalise_observations": False, "normalise_rewards": False}

TASKS = "gym:tests.envs.gym_tasks:"


@pytest.fixture
def train(tmp_path):
    """`train(env, **settings)`: a small run in a directory of its own."""

    def run(env, name="run", **settings):
        return lehr.train("ppo", env=env, run_dir=tmp_path / name, **{**SMALL, **settings})

    return run


def same(one, other):
    """Whether two runs have learned the same, bit for bit, and logged the same but for the time it took."""
    leaves = zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True)
    names = [name for name in one.metrics if not name.startswith("time/")]
    return all(np.array_equal(x, y) for x, y in leaves) and all(
        np.array_equal(one.metrics[name], other.metrics[name], equal_nan=True) for name in names
    )


# Time limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autoreset", ["seeded", "same_step", "next_step"])
def test_what_is_only_ever_truncated_is_worth_its_exact_value(autoreset, train):
    """Reward 1 for ever at a discount of 0.7 is worth 1 / 0.3, although no episode lasts longer than 3 steps."""
    settings = {"num_envs": 16, "discount": 0.7, "learning_rate": "0.02 -> 0", "entropy_coef": 0.0}
    env = {"env_parameters": {"autoreset": autoreset}}
    result = train(TASKS + "Endless-v0", total_steps=150 * 16 * 8, **settings, **env)
    network, params = result.policy.program.agent.network, result.params
    value = network.value(params, network.initial_carry((1,)), np.zeros((1, 1), np.float32))
    assert float(value[0]) == pytest.approx(1 / 0.3, abs=0.08)
    assert result.metrics["episode/length"][-1] == 3
    # A step that is only a reset is in no episode: 16 · 8 steps are 32 episodes of 4 then, not 42.67 of 3.
    expected = 32 if autoreset == "next_step" else 16 * 8 / 3
    assert result.metrics["episode/count"][10:].mean() == pytest.approx(expected, rel=0.05)


# Lag -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lag", [0, 1])
def test_the_policy_that_acted_is_behind_by_exactly_what_is_said(lag, overlap):
    """The log probabilities of each rollout are those of the parameters it should have been made with."""
    settings = {**SMALL, **AS_THEY_ARE, "env": TASKS + "Walk-v0", "total_steps": 1000, "overlap": overlap}
    plan = make_plan("appo", {**settings, "lag": 1}) if lag else make_plan("ppo", settings)
    runner = HostRunner(plan.program, plan.state, overlap, warn=print)
    runner.compile(plan.state)
    rollouts = []
    collect = runner._collect

    def watched(*arguments):
        collected = collect(*arguments)
        rollouts.append(collected.rollout)
        return collected

    runner._collect = watched
    state = runner.begin(plan.state)
    states, lags = [state], []
    for _ in range(4):
        state, rows = runner.advance(state, 1)
        states.append(state)
        lags.append(rows[0, runner.names.index("rollout/lag")])
    runner.close()
    assert lags == [min(number, lag + overlap) for number in range(4)]
    network = plan.program.algorithm.network
    assert len(rollouts) == 4 + overlap
    for made, rollout in enumerate(rollouts):
        number = max(0, made - lag - overlap)
        errors = []
        for made_with in states[:4]:
            _, policy, _ = network.unroll(made_with.learner.params, rollout.carry, rollout.obs, rollout.reset)
            errors.append(np.abs(np.asarray(policy.log_prob(rollout.action) - rollout.log_prob)).max())
        assert np.argmin(errors) == number
        assert errors[number] < 1e-5
        assert sorted(errors)[1] > 1e-3


def test_only_environments_on_the_host_overlap(train):
    with pytest.raises(InputError, match="overlap is true, but CartPole-v1 is compiled and runs on the device"):
        train("CartPole-v1", overlap=True)


# Resume --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overlap", "torso"),
    [(False, "mlp"), (True, "mlp"), pytest.param(True, "gru", marks=pytest.mark.slow)],
    ids=["plain", "overlapping", "recurrent"],
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(overlap, torso, train, tmp_path):
    settings = {"total_steps": 40 * 32, "overlap": overlap, "torso": torso, "recurrent_size": 8}
    settings |= {"normalise_observations": True, "normalise_rewards": True}
    whole = train(TASKS + "Walk-v0", "whole", **settings)
    stopped = train(TASKS + "Walk-v0", progress_fn=lambda steps, _: steps >= 300, **settings)
    assert 300 <= stopped.final["env_steps"] < 40 * 32
    resumed = lehr.resume(tmp_path / "run", trust=True)
    assert resumed.final["env_steps"] == 40 * 32
    assert same(resumed, whole)


def test_environments_that_cannot_be_brought_back_restart_and_the_run_says_so(train, tmp_path, caplog):
    settings = {"total_steps": 20 * 32, "env_parameters": {"autoreset": "next_step"}}
    train(TASKS + "Walk-v0", progress_fn=lambda steps, _: steps >= 300, **settings)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "lehr"):
        resumed = lehr.resume(tmp_path / "run", trust=True)
    assert [record.message for record in caplog.records] == [
        "The environments of gym:tests.envs.gym_tasks:Walk-v0 restart, because their state cannot be restored."
    ]
    assert resumed.final["env_steps"] == 20 * 32


@pytest.mark.parametrize("overlap", [False, True])
def test_after_a_restart_acting_begins_with_what_the_environments_show(overlap, caplog):
    settings = {**SMALL, **AS_THEY_ARE, "env": TASKS + "Walk-v0", "total_steps": 1000, "overlap": overlap}
    plan = make_plan("ppo", settings | {"env_parameters": {"autoreset": "same_step"}, "normalise_rewards": True})

    def make_runner():
        runner = HostRunner(plan.program, plan.state, overlap, warn=lambda text: None)
        runner.compile(plan.state)
        return runner

    first = make_runner()
    stopped, _ = first.advance(first.begin(plan.state), 3)
    first.close()
    second = make_runner()
    begun = second.begin(stopped)
    assert not np.array_equal(begun.actor.obs, stopped.actor.obs)
    rollouts, collect = [], second._collect
    second._collect = lambda *arguments: rollouts.append(collect(*arguments)) or rollouts[-1]
    second.advance(begun, 1)
    second.close()
    np.testing.assert_array_equal(rollouts[0].rollout.obs[0], begun.actor.obs)
    assert np.asarray(rollouts[0].rollout.reset[0]).all()
    assert not np.asarray(begun.actor.episodes.lengths).any()
    assert not np.asarray(begun.reward_scaling.returns).any()


def test_an_environment_that_does_not_do_the_same_twice_restarts(train, tmp_path, caplog, monkeypatch):
    train(TASKS + "Walk-v0", progress_fn=lambda steps, _: steps >= 300, total_steps=20 * 32)
    monkeypatch.setattr("tests.envs.gym_tasks.Walk._obs", lambda self: (self.place + 1).astype(np.float32))
    lehr.resume(tmp_path / "run", trust=True)
    assert "restart, because their state cannot be restored: it is not deterministic." in caplog.text


# Environments that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            "raises",
            "The environment gym:tests.envs.gym_tasks:Faulty-v0 failed in step (OSError: the simulator is gone)",
        ),
        ("nan obs", "The environment gym:tests.envs.gym_tasks:Faulty-v0 gave nan in obs; observations must be finite."),
        (
            "nan reward",
            "The environment gym:tests.envs.gym_tasks:Faulty-v0 gave nan as reward; rewards must be finite.",
        ),
    ],
)
def test_a_run_whose_environment_fails_stops_with_its_last_good_state(fault, sentence, overlap, train, tmp_path):
    with pytest.raises(RunFailed) as error:
        train(TASKS + "Faulty-v0", total_steps=10_000, env_parameters={"fault": fault}, overlap=overlap)
    assert str(error.value).startswith(sentence)
    assert str(error.value).endswith(f"The last good state is saved in '{tmp_path / 'run'}'.")
    # Of the 20 good steps 16 made two rollouts; while the second is learned from, the third fails.
    updates = 1 if overlap else 2
    loaded = lehr.load(tmp_path / "run", trust=True)
    assert int(loaded.state.updates) == updates
    assert loaded.metrics["update"].tolist() == list(range(1, updates + 1))
    assert jax.tree.all(jax.tree.map(lambda x: np.isfinite(x).all(), loaded.params))


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("shape", r"WrongBatch gave float32\[4, 1\] as obs, but its space requires float32\[4, 2\]"),
        ("dtype", "WrongBatch gave obs in complex128, but its space requires float32"),
        ("reward", r"WrongBatch gave float64\[4, 1\] as reward, but must give 4 numbers"),
        ("flag", r"WrongBatch gave float64\[4\] as terminated, but must give 4 bools"),
    ],
)
def test_an_answer_that_cannot_be_learned_from_is_named(fault, sentence, train):
    with pytest.raises(RunFailed, match=sentence):
        train(WrongBatch(fault), total_steps=10_000)


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_whose_worker_is_killed_stops_with_its_last_good_state(overlap, train, tmp_path):
    killed = []

    def kill(steps, _):
        if steps >= 96 and not killed:
            killed.append(min(multiprocessing.active_children(), key=lambda child: child.pid))
            os.kill(killed[0].pid, signal.SIGKILL)

    env = {"env_parameters": {"vectorization": "async"}, "overlap": overlap}
    with pytest.raises(RunFailed, match=r"Walk-v0 is gone: its worker \d \(process \d+\) ended with code -9") as error:
        train(TASKS + "Walk-v0", num_envs=2, horizon=16, total_steps=10**7, progress_fn=kill, **env)
    assert f"(process {killed[0].pid})" in str(error.value)
    assert str(error.value).endswith(f"The last good state is saved in '{tmp_path / 'run'}'.")
    loaded = lehr.load(tmp_path / "run", trust=True)
    assert loaded.metrics["update"].tolist() == list(range(1, int(loaded.state.updates) + 1))
    assert int(loaded.state.updates) >= 3


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("hangs", "The environment gym:tests.envs.gym_tasks:Breaking-v0 did not answer step within step_timeout=0.5 s"),
        ("exits", "The environment gym:tests.envs.gym_tasks:Breaking-v0 failed in step (SystemExit: 3)"),
        ("reward='5'", "The environment gym:tests.envs.gym_tasks:Breaking-v0 gave '5' (str) as reward, but must give"),
    ],
)
def test_a_step_that_hangs_or_exits_is_a_failure_like_any_other(fault, sentence, train, tmp_path):
    env = {"env_parameters": {"fault": fault, "every": True, "after": 20}}
    with pytest.raises(RunFailed) as error:
        train(TASKS + "Breaking-v0", total_steps=10_000, step_timeout=0.5, **env)
    assert str(error.value).startswith(sentence)
    assert int(lehr.load(tmp_path / "run", trust=True).state.updates) == 2


def test_a_time_limit_for_a_step_is_positive_and_for_the_host(train):
    with pytest.raises(InputError, match="step_timeout is 0; it must be positive, or none"):
        train(TASKS + "Walk-v0", step_timeout=0)
    with pytest.raises(InputError, match="step_timeout is 5, but CartPole-v1 is compiled and runs on the device"):
        train("CartPole-v1", step_timeout=5)


def test_a_failure_while_it_is_evaluated_loses_nothing(train, tmp_path):
    """Training makes 16 steps in each environment, the evaluation more."""
    with pytest.raises(RunFailed, match=r"The evaluation failed: The environment .* failed in step"):
        train(TASKS + "Faulty-v0", total_steps=64, evaluate_episodes=64, env_parameters={"fault": "raises"})
    loaded = lehr.load(tmp_path / "run", trust=True)
    assert int(loaded.state.updates) == 2
    assert loaded.metrics["update"].tolist() == [1, 2]


def test_what_never_ends_is_evaluated_as_it_stands(monkeypatch):
    monkeypatch.setattr("lehr.acting.evaluation.MOST_STEPS", 5)
    plan = make_plan("ppo", {**SMALL, "env": TASKS + "Walk-v0"})
    monkeypatch.setattr("tests.envs.gym_tasks.Walk.step", lambda self, action: (self._obs(), 1.0, False, False, {}))
    episodes = lehr.evaluate(plan.policy(plan.state), plan.env, episodes=3)
    assert episodes.lengths.tolist() == [5, 5, 5]
    assert episodes.returns.tolist() == [5, 5, 5]


def test_the_actions_that_are_kept_are_those_that_were_given():
    """Also if the environment writes into them."""
    env = make(TASKS + "Greedy-v0")
    batch, again = env.start(2), env.start(2)
    batch.reset(np.array([1, 2], np.uint32))
    for _ in range(3):
        last = batch.step(np.full((2, 1), 0.8, np.float32))
    np.testing.assert_array_equal(again.restore(batch.state()), last.obs)
    assert batch.state()["actions"][0, 0, 0] == np.float32(0.8)


# Observations and actions of all kinds -------------------------------------------------------------------------------


@pytest.mark.slow
def test_pictures_and_numbers_are_learned_from_together(train):
    result = train(
        TASKS + "Mixed-v0", total_steps=40 * 16 * 8, num_envs=16, learning_rate="3e-3 -> 0", discount=0.5, overlap=True
    )
    assert result.metrics["episode/return"][-5:].mean() > 4.5
    assert result.state.actor.obs["picture"].dtype == np.uint8


@pytest.mark.slow
def test_an_image_is_seen_by_convolutions(train):
    settings = {"num_envs": 16, "learning_rate": 1e-3, "hidden_sizes": (32,), "entropy_coef": 0.0}
    result = train(TASKS + "Picture-v0", total_steps=25 * 16 * 8, frame_stack=2, **settings)
    assert result.metrics["episode/return"][-3:].mean() > 0.95
    assert result.state.actor.obs.dtype == np.uint8
    assert result.state.actor.obs.shape == (16, 16, 16, 6)


# Whole runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trained_policy_is_evaluated_and_filmed(train, tmp_path):
    from lehr.cli import main

    result = train(TASKS + "Picture-v0", total_steps=320, evaluate_episodes=20, hidden_sizes=(32,))
    assert 0 <= result.final["evaluate/return"] <= 1
    episodes = lehr.evaluate(result.policy, make(TASKS + "Picture-v0"), episodes=37)
    assert episodes.returns.shape == (37,)
    assert episodes.lengths.tolist() == [1] * 37
    assert main(["play", str(tmp_path / "run"), "--trust", "--gif", str(tmp_path / "play.gif")]) in (0, None)
    assert (tmp_path / "play.gif").stat().st_size > 100


def test_a_vector_environment_that_was_given_is_trained_on(train):
    vector = gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="vector_entry_point")
    result = train(vector, total_steps=640, evaluate_episodes=3)
    assert result.final["env_steps"] == 640
    assert 1 <= result.final["evaluate/return"] <= 500
    assert not vector.closed
    assert result.config["env"] == "gym:CartPole-v1"
    assert lehr.load(result.run_dir).env.vectorization == "vector"
    with pytest.raises(InputError, match="has 4 environments, but num_envs is 5: set num_envs=4"):
        train(vector, "other", total_steps=640, num_envs=5)


def test_environments_that_exist_once_need_no_settings_of_their_own(train):
    """Their number is theirs, they are not evaluated, and the run says so."""
    vector = gymnasium.wrappers.vector.RecordEpisodeStatistics(gymnasium.make_vec("CartPole-v1", num_envs=2))
    settings = {name: value for name, value in SMALL.items() if name not in ("num_envs", "evaluate_episodes")}
    plan = make_plan("ppo", settings, vector)
    assert (plan.settings.num_envs, plan.run.evaluate_episodes) == (2, 0)
    later, off = plan.notes
    assert later.startswith("The files of this run cannot say how to create CartPoleVectorEnv, so resume, load")
    assert off.startswith("This run is not evaluated")
    with pytest.raises(InputError, match=r"target_return is 5, but the environments of .* remove target_return"):
        make_plan("ppo", settings | {"target_return": 5}, vector)
    result = train(vector, total_steps=32, num_envs=2)
    assert lehr.evaluate(result, episodes=3, env=vector).returns.shape == (3,)
    assert lehr.evaluate(result.run_dir, env="gym:CartPole-v1", episodes=2).returns.shape == (2,)


# Learning ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cartpole_is_learned_alike_on_the_host_and_on_the_device(tmp_path):
    """The mean return over the whole of training, three seeds each, differs by less than a quarter; most seeds solve it."""
    settings = {
        **SMALL,
        "total_steps": 75_000,
        "num_envs": 16,
        "horizon": 32,
        "epochs": 4,
        "minibatches": 4,
        "hidden_sizes": (64, 64),
        "learning_rate": "2e-3 -> 0",
        "discount": 0.98,
        "gae_lambda": 0.9,
    }
    means, ends = {}, {}
    for env in ("CartPole-v1", "gym:CartPole-v1"):
        runs = [lehr.train(env=env, seed=seed, run_dir=tmp_path / f"{env}{seed}", **settings) for seed in range(3)]
        curves = [run.metrics["episode/return"] for run in runs]
        means[env] = np.mean([np.nanmean(curve) for curve in curves])
        ends[env] = np.median([np.nanmean(curve[-15:]) for curve in curves])
    assert means["gym:CartPole-v1"] == pytest.approx(means["CartPole-v1"], rel=0.25)
    assert min(ends.values()) > 475


@pytest.mark.slow
def test_pendulum_is_learned_on_the_host(train):
    settings = {"num_envs": 32, "horizon": 64, "epochs": 10, "minibatches": 8, "hidden_sizes": (64, 64)}
    settings |= {"learning_rate": "1e-3 -> 0", "discount": 0.9, "entropy_coef": 0.0}
    settings |= {"normalise_observations": True, "normalise_rewards": True}
    result = train("gym:Pendulum-v1", total_steps=150_000, overlap=True, **settings)
    returns = result.metrics["episode/return"]
    assert np.nanmean(returns[:5]) < -1000
    assert np.nanmean(returns[-10:]) > -500


@pytest.mark.slow
def test_mujoco_is_learned_on_the_host(train):
    pytest.importorskip("mujoco")
    settings = {"num_envs": 16, "horizon": 64, "epochs": 8, "minibatches": 8, "hidden_sizes": (64, 64)}
    settings |= {"learning_rate": "1e-3 -> 0", "entropy_coef": 0.0, "initial_log_std": -1.0}
    settings |= {"evaluate_episodes": 4, "normalise_observations": True}
    result = train("gym:InvertedPendulum-v5", total_steps=50_000, **settings)
    assert np.nanmean(result.metrics["episode/return"][:3]) < 60
    assert result.final["evaluate/return"] > 900  # of 1000, the time limit


def test_overlap_is_refused_where_its_lag_is_not_corrected_for():
    with pytest.raises(InputError, match="overlap is true, but a2c would learn from rollouts of the policy before"):
        make_plan("a2c", {"env": "gym:CartPole-v1", "overlap": True})
    for algorithm in ("impala", "ppo"):
        assert make_plan(algorithm, {"env": "gym:CartPole-v1", "overlap": True, "num_envs": 2}).run.overlap
