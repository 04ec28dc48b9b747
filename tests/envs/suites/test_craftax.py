"""Craftax's adapter against Craftax itself, on the Classic game, whose programs are smaller."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.envs import TimeLimit, check_env, make
from lehr.envs.base import NEVER
from lehr.envs.suites import craftax
from lehr.errors import InputError
from lehr.spaces import Box, Discrete

if importlib.util.find_spec("craftax") is None:
    pytest.skip("Craftax is not installed", allow_module_level=True)

KEY = jax.random.key(0)
CLASSIC = "Craftax-Classic-Symbolic-v1"
SMALL = {"map_size": (16, 16)}
"""A smaller map than the standard one, generated faster."""


@pytest.fixture(autouse=True, scope="module")
def compile_fast():
    """The programs are large, and are run for a few steps only."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def game():
    """`begin(key)` and `step(key, state, action)`: ours and Craftax's, from the same key and state."""
    env = make(f"craftax:{CLASSIC}", max_timesteps=4, **SMALL)
    theirs = env.env.env
    params = theirs.default_params.replace(max_timesteps=4)

    @jax.jit
    def begin(key):
        with jax.numpy_rank_promotion("allow"):
            return env.reset(key), theirs.reset(key, params)

    @jax.jit
    def step(key, state, action):
        with jax.numpy_rank_promotion("allow"):
            return env.step(key, state, action), theirs.step(key, state.env_state, action, params)

    return begin, step


@pytest.mark.slow
def test_the_same_keys_and_actions_give_what_craftax_gives_until_the_time_is_over(game):
    begin, step = game
    (state, obs), (their_obs, _) = begin(KEY)
    np.testing.assert_allclose(obs, their_obs, rtol=1e-6)
    for count, action in enumerate([1, 5, 3, 0], start=1):
        (state, timestep), (their_obs, their_state, their_reward, their_done, _) = step(KEY, state, jnp.int32(action))
        np.testing.assert_array_equal(state.env_state.map, their_state.map)
        np.testing.assert_allclose(timestep.obs, their_obs, rtol=1e-6)
        np.testing.assert_allclose(timestep.reward, their_reward, rtol=1e-6)
        assert timestep.info["achievements"].shape == (22,)
        assert not timestep.terminated
        assert bool(timestep.truncated) == bool(their_done) == (count == 4)


@pytest.mark.slow
def test_a_death_is_a_termination(game):
    begin, step = game
    state = begin(KEY)[0][0]
    state = state._replace(env_state=state.env_state.replace(player_health=jnp.int32(-3)))
    (_, timestep), _ = step(KEY, state, jnp.int32(0))
    assert timestep.terminated
    assert not timestep.truncated


@pytest.mark.slow
def test_keeps_to_the_protocol():
    assert check_env(make(f"craftax:{CLASSIC}", max_timesteps=30, **SMALL), num_envs=2, num_steps=40) == []


@pytest.mark.slow
def test_trains(tmp_path):
    result = lehr.train(
        "ppo",
        env=f"craftax:{CLASSIC}",
        env_parameters={"max_timesteps": 8, **SMALL},
        total_steps=128,
        num_envs=4,
        horizon=16,
        epochs=1,
        minibatches=1,
        evaluate_episodes=0,
        progress=False,
        run_dir=tmp_path / "run",
    )
    assert 0 < result.final["episode/length"] <= 8


def test_attributes_and_equality():
    env = make(f"craftax:{CLASSIC}", day_length=200)
    assert env == make(f"craftax:{CLASSIC}", day_length=200)
    assert hash(env) == hash(make(f"craftax:{CLASSIC}", day_length=200))
    assert env != make(f"craftax:{CLASSIC}")
    assert make(f"craftax:{CLASSIC}", map_size=[16, 16]) == make(f"craftax:{CLASSIC}", **SMALL) != env
    assert make(env.env.env, day_length=200) == env
    assert isinstance(env, TimeLimit)
    assert (env.max_steps, env.env.truncation_gap, env.environments_per_reset) == (10_000, NEVER, 16)
    assert env.observation_space == Box(-np.inf, np.inf, (1345,))
    assert env.action_space == Discrete(17)


def test_the_full_game_has_its_own_spaces_and_limit():
    env = make("craftax:Craftax-Symbolic-v1")
    assert env.max_steps == 100_000
    assert env.action_space == Discrete(43)
    assert jax.eval_shape(env.reset, KEY)[1].shape == env.observation_space.shape == (8268,)


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        (
            "Craftax-Symbolic",
            {},
            "Craftax has no environment 'Craftax-Symbolic'; did you mean 'craftax:Craftax-Symbolic-v1'",
        ),
        (CLASSIC, {"max_timestep": 5}, "has no parameter 'max_timestep'; did you mean 'max_timesteps'"),
        (CLASSIC, {"map": 5}, "has no parameter 'map'; did you mean 'map_size'"),
        (CLASSIC, {"day_length": {}}, "The parameter day_length of craftax:Craftax-Classic-Symbolic-v1 is {}"),
        (CLASSIC, {"max_timesteps": 0}, "TimeLimit got max_steps=0; it must be an integer of at least 1"),
    ],
)
def test_errors_say_what_is_wrong(name, parameters, sentence):
    with pytest.raises(InputError, match=sentence):
        craftax.make(name, **parameters)
