"""Pgx's adapter against Pgx itself, and against the rules of the games."""

import importlib.util

import jax
import numpy as np
import pytest

import lehr
from lehr import masks
from lehr.envs import check_env, make
from lehr.envs.base import NEVER
from lehr.errors import InputError
from lehr.spaces import Box, Dict, Discrete

if importlib.util.find_spec("pgx") is None:
    pytest.skip("Pgx is not installed", allow_module_level=True)

KEY = jax.random.key(0)
PLANES = np.concatenate([np.eye(3)[:, :, None] * np.ones(3), np.eye(3)[:, None, :] * np.ones((3, 1))])
LINES = np.concatenate([PLANES, np.eye(3)[None], np.eye(3)[None, ::-1]])
"""The eight lines of a board of three by three, `[8, 3, 3]`."""


@pytest.fixture(autouse=True, scope="module")
def compile_fast():
    """The programs are run for a few steps only."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def play(env, keys, steps):
    """Random legal moves without resets: the observation at first, and states and timesteps `[keys, steps, ...]`."""
    spaces = env.observation_space, env.action_space
    agents = env.num_agents

    def choose(key, obs):
        if agents == 1:
            return masks.sample(*spaces, obs, key)
        return jax.vmap(lambda key, obs: masks.sample(*spaces, obs, key))(jax.random.split(key, agents), obs)

    def step(carry, key):
        state, obs = carry
        action = choose(key, obs)
        state, timestep = env.step(jax.random.fold_in(key, 1), state, action)
        return (state, timestep.obs), (state, action, timestep)

    def episode(key):
        state, obs = env.reset(key)
        return obs, jax.lax.scan(step, (state, obs), jax.random.split(key, steps))[1]

    return jax.jit(jax.vmap(episode))(keys)


def has_line(stones):
    """Whether stones `[..., 3, 3]` fill a line."""
    return (np.einsum("...ij,lij->...l", stones, LINES) == 3).any(-1)


def test_a_game_against_random_moves():
    env = make("pgx:tic_tac_toe")
    first, (states, _, timesteps) = play(env, jax.random.split(KEY, 512), 5)
    seen, moves = np.asarray(timesteps.obs["observation"]), np.asarray(timesteps.obs["action_mask"])
    mine, theirs = seen[..., 0], seen[..., 1]
    over = np.asarray(timesteps.terminated)
    began = np.asarray(first["observation"]).sum((1, 2, 3)) == 0
    assert 0.4 < began.mean() < 0.6, "the agent begins in half of the games"
    assert np.asarray(first["observation"])[~began].sum((1, 2, 3)).tolist() == [1] * int((~began).sum())
    # The agent is always on the move, and may play wherever there is no stone.
    assert np.all((np.asarray(states.current_player) == 0) | over)
    np.testing.assert_array_equal(moves[~over], (seen.sum(-1) == 0).reshape(*seen.shape[:2], 9)[~over])
    assert np.all(
        (mine.sum((-1, -2)) - theirs.sum((-1, -2)))[~over] == np.where(began, 0, -1)[:, None].repeat(5, 1)[~over]
    )
    # The one who has a line has won; the reward comes once.
    won, lost = has_line(mine), has_line(theirs)
    full = seen.sum((-1, -2, -3)) == 9
    np.testing.assert_array_equal(over, won | lost | full)
    ends = over & ~np.concatenate([np.zeros((512, 1), bool), over[:, :-1]], 1)
    np.testing.assert_array_equal(timesteps.reward, np.where(ends, won.astype(float) - lost, 0))
    assert {-1.0, 0.0, 1.0} == set(np.asarray(timesteps.reward)[ends].tolist())


def test_a_game_against_itself_is_the_one_of_pgx():
    env = make("pgx:tic_tac_toe", opponent="self")
    key = jax.random.split(KEY, 1)
    first, (states, actions, timesteps) = play(env, key, 9)
    theirs = env.env.init(jax.random.split(key[0])[0])
    begins = int(theirs.current_player)
    waiting = [1] + [0] * 8
    assert np.asarray(first["action_mask"])[0, 1 - begins].tolist() == waiting
    for move in range(9):
        turn = int(theirs.current_player)
        assert turn == (begins + move) % 2
        theirs = env.env.step(theirs, actions[0, move, turn])
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, move=move: x[0, move], states), theirs)
        np.testing.assert_array_equal(timesteps.reward[0, move], theirs.rewards)
        assert timesteps.terminated[0, move].tolist() == [bool(theirs.terminated)] * 2
        # Each sees its own stones first.
        views = np.asarray(timesteps.obs["observation"])[0, move]
        np.testing.assert_array_equal(views[0], views[1][..., ::-1])
        if theirs.terminated:
            break
        assert np.asarray(timesteps.obs["action_mask"])[0, move, turn].tolist() == waiting


def test_spaces_and_names():
    env = make("pgx:connect_four")
    board = Dict({"action_mask": Box(0, 1, (7,), np.int8), "observation": Box(0, 1, (6, 7, 2), np.int8)})
    assert (env.observation_space, env.action_space) == (board, Discrete(7))
    assert (env.num_agents, env.truncation_gap) == (1, NEVER)
    assert make("pgx:backgammon").observation_space.spaces["observation"] == Box(-np.inf, np.inf, (34,))
    assert (make("pgx:2048").num_agents, make("pgx:2048", opponent="self").num_agents) == (1, 1)
    assert env == make("pgx:connect_four") == make(env.env)
    assert env != make("pgx:connect_four", opponent="self")
    with pytest.raises(InputError, match="Pgx has no environment 'conect_four'; did you mean 'pgx:connect_four'"):
        make("pgx:conect_four")
    with pytest.raises(InputError, match="opponent is 'me'; known: random, self"):
        make("pgx:connect_four", opponent="me")
    with pytest.raises(InputError, match="pgx:hex has no parameter 'size': it takes opponent"):
        make("pgx:hex", size=5)


def test_keeps_to_the_protocol():
    assert check_env(make("pgx:kuhn_poker", opponent="self"), num_steps=20) == []


@pytest.mark.slow
def test_learns_the_best_answer_to_random_bets(tmp_path):
    """Kuhn poker has 12 decisions; against an opponent that decides by a coin the best policy earns 11/24 a game.

    With the lowest card it bets or folds, with the middle one it bets and calls, with the highest it bets and calls:
    -1/2, 1/2 and 3/2 as the first player, -3/4, 1/4 and 7/4 as the second. Its mean is 0.458; random play has 0.
    """
    result = lehr.train(
        "ppo",
        env="pgx:kuhn_poker",
        run_dir=tmp_path / "run",
        total_steps=25_000,
        num_envs=64,
        horizon=16,
        minibatches=4,
        learning_rate="1e-2 -> 0",
        entropy_coef="0.02 -> 0",
        hidden_sizes=(32,),
        evaluate_episodes=0,
        progress=False,
    )
    assert lehr.evaluate(result, episodes=4096).returns.mean() == pytest.approx(11 / 24, abs=0.07)
