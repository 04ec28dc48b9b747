"""EnvPool's environments: what a batch answers, against the pools themselves; and short runs on them."""

import logging

import numpy as np
import pytest

import lehr
from lehr import spaces
from lehr.envs import check_env, make
from lehr.envs.host import envpool as adapter
from lehr.errors import InputError
from tests.small import SMALL

envpool = pytest.importorskip("envpool")
gymnasium = pytest.importorskip("gymnasium")

# A pool rounds the bounds of its spaces, and Gymnasium says so: where a test makes a pool itself, it hears of it.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting to float32:UserWarning")

SEEDS = np.array([3, 4_000_000_000, 5], np.uint32)


def raw(name, **parameters):
    """A pool with `SEEDS`, whose sign EnvPool does not take."""
    seed = [3, 4_000_000_000 - 2**31, 5]
    return envpool.make(name, env_type="gymnasium", num_envs=3, seed=seed, **parameters)


def actions(env, count):
    rng = np.random.default_rng(0)
    if isinstance(env.action_space, spaces.Discrete):
        return rng.integers(0, env.action_space.n, (count, 3)).astype(np.int32)
    return rng.uniform(-1, 1, (count, 3, *env.action_space.shape)).astype(np.float32)


# Conversion ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "limit"), [("CartPole-v1", 12), ("Pendulum-v1", 5), ("FrozenLake-v1", 6), ("CartpoleBalance-v1", 4)]
)
def test_a_batch_answers_as_the_pool_does(name, limit):
    """By EnvPool's own clock: a step that leaves it at 0 was only a reset."""
    env = make(f"envpool:{name}", max_episode_steps=limit)
    assert env.masks
    batch, pool = env.start(3), raw(name, max_episode_steps=limit)
    first, _ = pool.reset()
    found = batch.reset(SEEDS)
    np.testing.assert_equal(found, first)
    resets = cuts = 0
    for action in actions(env, 50):
        obs, reward, terminated, truncated, info = pool.step(action)
        step, taken = batch.step(action), info["elapsed_step"] > 0
        np.testing.assert_equal(step.obs, obs)
        np.testing.assert_equal(step.final_obs, obs)
        np.testing.assert_array_equal(step.valid, taken)
        np.testing.assert_array_equal(step.reward, np.where(taken, reward, 0))
        np.testing.assert_array_equal(step.terminated, terminated | ~taken)
        np.testing.assert_array_equal(step.truncated, truncated)
        np.testing.assert_array_equal(truncated, info["elapsed_step"] == limit)
        assert not (step.truncated & ~step.valid).any()
        resets += (~taken).sum()
        cuts += truncated.sum()
    assert resets > 6
    assert cuts > 0


def test_the_reward_of_a_step_that_is_only_a_reset_is_nothing():
    """Some pools repeat the last reward of the episode then."""
    pool = raw("CartpoleBalance-v1", max_episode_steps=2)
    pool.reset()
    repeated = [pool.step(np.ones((3, 1)))[1] for _ in range(3)][2]
    assert (repeated != 0).all()
    batch = make("envpool:CartpoleBalance-v1", max_episode_steps=2).start(3)
    batch.reset(SEEDS)
    steps = [batch.step(np.ones((3, 1), np.float32)) for _ in range(3)]
    assert [bool(step.valid.all()) for step in steps] == [True, True, False]
    np.testing.assert_array_equal(steps[2].reward, 0)
    assert steps[2].terminated.all()


def test_a_pole_that_falls_is_terminated_where_gymnasium_says_so():
    """EnvPool begins elsewhere than Gymnasium; put there, Gymnasium's falls at the same step, with the same numbers."""
    env = make("envpool:CartPole-v1")
    batch = env.start(3)
    obs, single = batch.reset(SEEDS), gymnasium.make("CartPole-v1")
    single.reset(seed=0)
    single.unwrapped.state = obs[0].astype(np.float64)
    steps = 0
    for _ in range(30):
        steps += 1
        step = batch.step(np.ones(3, np.int32))
        expected, reward, terminated, truncated, _ = single.step(1)
        np.testing.assert_allclose(step.final_obs[0], expected, rtol=1e-4, atol=1e-5)
        assert (step.reward[0], step.terminated[0], step.truncated[0]) == (reward, terminated, truncated)
        if terminated:
            break
    assert 5 < steps < 15


def test_channels_of_images_come_last():
    env = make("envpool:Pong-v5")
    assert env.observation_space == spaces.Box(0, 255, (84, 84, 4), np.uint8)
    batch, pool = env.start(3), raw("Pong-v5")
    first, _ = pool.reset()
    assert first.shape == (3, 4, 84, 84)
    np.testing.assert_array_equal(batch.reset(SEEDS), first.transpose(0, 2, 3, 1))
    for action in actions(env, 5):
        obs, *_ = pool.step(action)
        np.testing.assert_array_equal(batch.step(action).obs, obs.transpose(0, 2, 3, 1))
    # What has its channels last already stays as it is, also inside a dict.
    assert make("envpool:CarRacing-v3").observation_space.shape == (96, 96, 3)
    assert make("envpool:MiniGrid-Empty-5x5-v0").observation_space.spaces["image"].shape == (7, 7, 3)


def test_spaces_are_those_of_envpool_in_32_bits():
    ant = make("envpool:Ant-v4")
    assert ant.observation_space.dtype == np.float32
    assert ant.action_space == spaces.Box(-1, 1, (8,))
    assert make("envpool:FrozenLake-v1").observation_space == spaces.Discrete(16)
    assert set(make("envpool:WalkerRun-v1").observation_space.spaces) == {"height", "orientations", "velocity"}


@pytest.mark.parametrize("name", ["CartPole-v1", "Ant-v4", "WalkerRun-v1", "MiniGrid-Empty-5x5-v0"])
def test_an_environment_keeps_to_the_protocol(name):
    assert check_env(make(f"envpool:{name}"), num_envs=2, num_steps=20) == []


def test_seeds_say_how_episodes_begin():
    env = make("envpool:CartPole-v1")
    one, other = env.start(3), env.start(3)
    first = one.reset(SEEDS)
    np.testing.assert_array_equal(other.reset(SEEDS), first)
    for action in actions(env, 30):
        np.testing.assert_array_equal(one.step(action).obs, other.step(action).obs)
    assert (other.reset(SEEDS + np.uint32(1)) != first).any()
    np.testing.assert_array_equal(other.reset(SEEDS), first)
    np.testing.assert_array_equal(env.start(1).reset(SEEDS[2:]), first[2:])


def test_the_order_of_environments_does_not_depend_on_threads():
    env = make("envpool:Ant-v4", num_threads=4)
    batch, alone = env.start(3), [env.start(1) for _ in SEEDS]
    batch.reset(SEEDS)
    for i, single in enumerate(alone):
        single.reset(SEEDS[i : i + 1])
    for action in actions(env, 10):
        obs = batch.step(action).obs
        for i, single in enumerate(alone):
            np.testing.assert_array_equal(single.step(action[i : i + 1]).obs[0], obs[i])


def test_pictures_are_drawn():
    batch = make("envpool:CartPole-v1").start(2, render=True)
    batch.reset(SEEDS[:2])
    picture = batch.render()
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    assert picture.std() > 0
    unseen = make("envpool:CartPole-v1").start(2)
    unseen.reset(SEEDS[:2])
    with pytest.raises(InputError, match="This environment cannot be rendered: "):
        unseen.render()


# What is given -------------------------------------------------------------------------------------------------------


def test_a_pool_can_be_given_itself():
    pool = raw("CartPole-v1", max_episode_steps=7)
    env = make(pool)
    assert env.name == "CartPoleGymnasiumEnvPool"
    assert env.masks
    assert env.observation_space == make("envpool:CartPole-v1").observation_space
    batch, other = env.start(3), raw("CartPole-v1", max_episode_steps=7)
    np.testing.assert_array_equal(batch.reset(SEEDS + np.uint32(1)), other.reset()[0])  # its own seeds count
    for action in actions(env, 20):
        np.testing.assert_array_equal(batch.step(action).obs, other.step(action)[0])
    with pytest.raises(InputError, match="has 3 environments, but num_envs is 5: set num_envs=3"):
        env.start(5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"env_type": "dm", "num_envs": 2}, "does not follow Gymnasium's API: create it with env_type='gymnasium'."),
        ({"env_type": "gymnasium", "num_envs": 4, "batch_size": 2}, "steps 2 of its 4 environments at a time"),
    ],
)
def test_a_pool_of_another_kind_is_refused(settings, sentence):
    with pytest.raises(InputError) as error:
        make(envpool.make("CartPole-v1", **settings))
    assert sentence in str(error.value)


def test_parameters_come_too_late_for_a_pool():
    with pytest.raises(
        InputError, match="Got an existing pool together with the parameters max_episode_steps: pass them to"
    ):
        make(raw("CartPole-v1"), max_episode_steps=3)


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        ("CartPol-v1", {}, "EnvPool has no environment 'CartPol-v1'; did you mean 'envpool:CartPole-v1'?"),
        ("xyzzy", {}, "call envpool.list_all_envs() to list all "),
        ("CartPole-v1", {"colour": "red"}, "envpool:CartPole-v1 cannot be created with these parameters"),
        ("CartPole-v1", {"num_envs": 3}, "does not take the parameter num_envs: set num_envs of the run instead."),
        ("CartPole-v1", {"seed": 3}, "does not take the parameter seed: it is derived from the seed of the run."),
        (
            "CartPole-v1",
            {"max_num_players": 2},
            "envpool:CartPole-v1 has 2 players in each environment, but only one is supported",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_sentence(name, parameters, sentence):
    with pytest.raises(InputError) as error:
        make(f"envpool:{name}", **parameters)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


def test_names_are_those_of_envpool():
    assert {"CartPole-v1", "Pong-v5", "Ant-v4"} <= set(adapter.names())


def test_descriptions_are_values():
    assert make("envpool:CartPole-v1", num_threads=1) == make("envpool:CartPole-v1", num_threads=1)
    assert hash(make("envpool:CartPole-v1")) == hash(make("envpool:CartPole-v1"))
    assert make("envpool:CartPole-v1") != make("envpool:CartPole-v0")


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_only_ever_truncated_is_worth_its_exact_value(tmp_path):
    """No pole falls in 3 steps: reward 1 for ever at a discount of 0.7 is worth 1 / 0.3, wherever the pole is."""
    settings = {"num_envs": 16, "discount": 0.7, "learning_rate": "0.02 -> 0", "entropy_coef": 0.0}
    result = lehr.train(
        "ppo",
        env="envpool:CartPole-v1",
        env_parameters={"max_episode_steps": 3},
        total_steps=150 * 16 * 8,
        run_dir=tmp_path / "run",
        **{**SMALL, **settings},
    )
    network = result.policy.program.agent.network
    obs = make("envpool:CartPole-v1").start(8).reset(np.arange(8, dtype=np.uint32))
    value = network.value(result.params, network.initial_carry((8,)), obs)
    np.testing.assert_allclose(value, 1 / 0.3, atol=0.08)
    assert result.metrics["episode/length"][-1] == 3
    assert result.metrics["episode/return"][-1] == 3
    # Every fourth step is only a reset.
    assert result.metrics["episode/count"][10:].mean() == pytest.approx(32, rel=0.05)


@pytest.mark.slow
def test_a_run_learns_and_is_evaluated(tmp_path):
    settings = {"num_envs": 8, "horizon": 32, "epochs": 4, "learning_rate": "5e-3 -> 0", "evaluate_episodes": 8}
    result = lehr.train(
        "ppo", env="envpool:CartPole-v1", total_steps=16_000, run_dir=tmp_path / "run", **{**SMALL, **settings}
    )
    assert result.metrics["episode/return"][:5].mean() < 50
    assert result.final["evaluate/return"] > 120


def test_a_run_on_a_pool_that_is_given(tmp_path):
    pool = envpool.make("Pendulum-v1", env_type="gymnasium", num_envs=4, seed=0)
    result = lehr.train("ppo", env=pool, total_steps=8 * 32, run_dir=tmp_path / "run", **SMALL)
    assert result.final["env_steps"] == 8 * 32


def test_environments_restart_when_a_run_is_resumed_and_it_says_so(tmp_path, caplog):
    lehr.train(
        "ppo",
        env="envpool:CartPole-v1",
        total_steps=20 * 32,
        run_dir=tmp_path / "run",
        progress_fn=lambda steps, _: steps >= 300,
        **SMALL,
    )
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "lehr"):
        resumed = lehr.resume(tmp_path / "run")
    assert [record.message for record in caplog.records] == [
        "The environments of envpool:CartPole-v1 restart, because their state cannot be restored."
    ]
    assert resumed.final["env_steps"] == 20 * 32
