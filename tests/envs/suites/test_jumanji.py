"""Jumanji's adapter against Jumanji itself, on small instances of its environments."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.envs import check_env, make
from lehr.envs.base import NEVER
from lehr.envs.suites import jumanji
from lehr.errors import InputError
from lehr.masks import has_mask
from lehr.plugins import require
from lehr.spaces import Box, Discrete, MultiDiscrete
from tests.small import SMALL

if importlib.util.find_spec("jumanji") is None:
    pytest.skip("Jumanji is not installed", allow_module_level=True)

KEY = jax.random.key(0)
SNAKE = {"num_rows": 3, "num_cols": 3, "time_limit": 4}


@pytest.fixture(autouse=True, scope="module")
def compile_fast():
    """The programs are large, and are run for a few steps only."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def play(env, keys, steps):
    """Ours and Jumanji's side by side: random actions, no resets; leaves `[keys, steps + 1, ...]`."""
    theirs = env.env

    def step(carry, key):
        state, their_state = carry
        action = env.action_space.sample(key)
        state, timestep = env.step(key, state, action)
        spec = theirs.action_spec
        their_state, their_timestep = theirs.step(their_state, action.reshape(spec.shape).astype(spec.dtype))
        return (state, their_state), (timestep, their_timestep)

    def episode(key):
        (state, obs), (their_state, timestep) = env.reset(key), theirs.reset(key)
        return (obs, timestep.observation), jax.lax.scan(step, (state, their_state), jax.random.split(key, steps))[1]

    with jax.numpy_rank_promotion("allow"):
        return jax.jit(jax.vmap(episode))(keys)


@pytest.fixture(scope="module")
def snakes():
    env = make("jumanji:Snake-v1", **SNAKE)
    return env, play(env, jax.random.split(KEY, 256), 4)


def test_the_same_keys_and_actions_give_what_jumanji_gives(snakes):
    _, ((obs, their_obs), (timesteps, theirs)) = snakes
    for ours, other in ((obs, their_obs), (timesteps.obs, theirs.observation)):
        assert set(ours) == {"grid", "action_mask", "step_count"}
        for key, value in ours.items():
            np.testing.assert_array_equal(value, getattr(other, key))
    np.testing.assert_array_equal(timesteps.reward, theirs.reward)
    np.testing.assert_array_equal(timesteps.terminated | timesteps.truncated, theirs.step_type == 2)
    assert np.any(timesteps.reward > 0)


def test_the_end_of_the_time_is_a_truncation_unless_the_task_ends_too(snakes):
    env, (_, (timesteps, theirs)) = snakes
    longer = make("jumanji:Snake-v1", **{**SNAKE, "time_limit": 50})
    _, (_, unlimited) = play(longer, jax.random.split(KEY, 256), 4)
    died = np.asarray(unlimited.step_type == 2)
    np.testing.assert_array_equal(timesteps.terminated, died)
    cut = np.asarray(theirs.step_type == 2) & ~died
    np.testing.assert_array_equal(timesteps.truncated, cut)
    assert env.truncation_gap == 4
    assert cut[:, 3].any()
    assert died[:, 3].any()
    assert not cut[:, :3].any()


def test_what_agents_earn_is_summed():
    generator = require("jumanji.environments.routing.lbf.generator", extra="jumanji").RandomGenerator
    small = generator(grid_size=5, fov=5, num_agents=2, num_food=1)
    env = make("jumanji:LevelBasedForaging-v0", generator=small, time_limit=30)
    assert env.action_space == MultiDiscrete((6, 6))
    _, (timesteps, theirs) = play(env, jax.random.split(KEY, 64), 30)
    assert theirs.reward.shape == (64, 30, 2)
    np.testing.assert_allclose(timesteps.reward, theirs.reward.sum(-1), rtol=1e-6)
    assert np.any(timesteps.reward > 0)
    assert np.asarray(timesteps.truncated)[:, -1].any()
    assert timesteps.info["percent_eaten"].shape == (64, 30)


@pytest.mark.parametrize(("name", "parameters"), [("Snake-v1", SNAKE), ("TSP-v1", {})])
def test_keeps_to_the_protocol(name, parameters):
    assert check_env(make(f"jumanji:{name}", **parameters), num_steps=30) == []


def test_one_choice_out_of_many_is_one_hot_and_none_yet_is_zeros():
    env = make("jumanji:TSP-v1")
    state, obs = jax.jit(env.reset)(KEY)
    assert env.observation_space.spaces["position"] == Box(0, 1, (20,), np.int8)
    assert not np.any(obs["position"])
    _, timestep = jax.jit(env.step)(KEY, state, jnp.int32(7))
    assert timestep.obs["position"].tolist() == np.eye(20)[7].tolist()


def test_spaces():
    actions = {
        "Game2048-v1": Discrete(4),
        "Minesweeper-v0": Discrete(100),
        "MultiCVRP-v0": MultiDiscrete((21, 21)),
        "SearchAndRescue-v0": Box(-1, 1, (4,)),
    }
    for name, space in actions.items():
        env = make(f"jumanji:{name}")
        assert env.action_space == space
        assert has_mask(env.observation_space, space) == (name != "SearchAndRescue-v0")
    board = make("jumanji:Game2048-v1").observation_space.spaces
    assert (board["board"], board["action_mask"]) == (Box(-np.inf, np.inf, (4, 4)), Box(0, 1, (4,), np.int8))
    mines = make("jumanji:Minesweeper-v0").observation_space.spaces
    assert (mines["board"], mines["step_count"]) == (Box(-1, 8, (10, 10), np.int32), Box(0, np.inf, ()))
    maze = make("jumanji:Maze-v0").observation_space.spaces
    assert maze["agent_position"].spaces["row"] == Box(0, 9, (), np.int32)


def test_attributes_and_equality():
    env = make("jumanji:Snake-v1", **SNAKE)
    assert env == make("jumanji:Snake-v1", **SNAKE)
    assert hash(env) == hash(make("jumanji:Snake-v1", **SNAKE))
    assert env != make("jumanji:Snake-v1")
    assert make(env.env) == env
    assert (env.truncation_gap, env.environments_per_reset) == (4, 1)
    assert make("jumanji:Game2048-v1").truncation_gap == NEVER
    assert make("jumanji:Maze-v0").environments_per_reset == 16


def test_an_action_is_a_combination_where_the_mask_is_one_of_combinations():
    env = make("jumanji:Minesweeper-v0")
    state, obs = jax.jit(env.reset)(KEY)
    assert obs["action_mask"].tolist() == [1] * 100
    _, timestep = jax.jit(env.step)(KEY, state, jnp.int32(37))
    hidden = timestep.obs["board"] == -1
    assert np.argwhere(~np.asarray(hidden)).tolist() == [[3, 7]]
    np.testing.assert_array_equal(timestep.obs["action_mask"], hidden.ravel())


def test_an_agent_with_nothing_left_to_do_can_only_do_nothing():
    mask = jnp.array([[0, 1, 1], [0, 0, 0]], jnp.int8)
    found = jumanji._with_choice({"action_mask": mask})["action_mask"]
    assert (found.tolist(), found.dtype) == ([[0, 1, 1], [1, 0, 0]], jnp.int8)


@pytest.mark.slow
def test_no_city_is_visited_twice(tmp_path):
    """A second visit is forbidden, and would end a tour of 20 cities early."""
    settings = SMALL | {"horizon": 20, "env": "jumanji:TSP-v1", "total_steps": 160}
    result = lehr.train("ppo", run_dir=tmp_path / "run", **settings)
    assert result.metrics["episode/length"].tolist() == [20, 20]


@pytest.mark.slow
def test_trains(tmp_path):
    result = lehr.train(
        "ppo",
        env="jumanji:Snake-v1",
        env_parameters=SNAKE,
        total_steps=256,
        num_envs=4,
        horizon=32,
        epochs=1,
        minibatches=1,
        torso="mlp",
        evaluate_episodes=0,
        progress=False,
        run_dir=tmp_path / "run",
    )
    assert 1 <= result.final["episode/length"] <= 4


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        ("Snake", {}, "Jumanji has no environment 'Snake'; did you mean 'jumanji:Snake-v1'"),
        ("Snake-v1", {"num_row": 3}, "has no parameter 'num_row'; did you mean 'num_rows'"),
        ("Snake-v1", {"num_rows": {}}, "jumanji:Snake-v1 cannot be created with num_rows="),
    ],
)
def test_errors_say_what_is_wrong(name, parameters, sentence):
    with pytest.raises(InputError, match=sentence):
        jumanji.make(name, **parameters)


def test_a_download_is_asked_for_and_not_begun(monkeypatch):
    hub = require("huggingface_hub", extra="jumanji")
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: None)
    with pytest.raises(InputError, match="Sokoban-v0 needs levels that have not been downloaded: run"):
        jumanji.make("Sokoban-v0")


def test_what_resets_by_itself_is_refused():
    wrapped = require("jumanji.wrappers", extra="jumanji").AutoResetWrapper(make("jumanji:Game2048-v1").env)
    with pytest.raises(InputError, match="resets or batches, which Lehr does itself: give the wrapped environment"):
        make(wrapped)
