"""Environments that share resets: which states their episodes start from, and when they end."""

import collections
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.envs import AutoReset, Environment, EpisodeStatistics, TimeLimit
from lehr.envs.wrappers import ResetPool
from lehr.spaces import Box, Discrete
from lehr.training import checkpoint
from lehr.training.plan import make_plan
from lehr.types import Timestep
from tests.small import SMALL

KEY = jax.random.key(0)


@dataclass(frozen=True)
class Costly(Environment):
    """Observes a number drawn at its reset, and ends by the action; three environments share a reset."""

    environments_per_reset: int = 3
    observation_space = Box(0, 1, (1,))
    action_space = Discrete(2)

    def reset(self, key):
        number = jax.random.uniform(key, (1,))
        return number, number

    def step(self, key, state, action):
        return state, Timestep(state, jnp.float32(0), action == 1, jnp.bool_(False), {})


def played(endings, num_envs=7):
    """The numbers that episodes start from, by step, and those of the pool before it; `endings[t]` end in step t."""
    env = AutoReset(Costly())
    states, obs, pool = env.reset_batch(KEY, num_envs)
    step, found = jax.jit(env.step_batch), []
    for t, ending in enumerate(endings):
        action = jnp.zeros(num_envs, jnp.int32).at[jnp.array(ending, int)].set(1)
        keys = jax.random.split(jax.random.key(1 + t), num_envs)
        fresh = jax.vmap(env.env.reset)(jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys[:3]))[1]
        before = obs
        states, timestep, pool = step(keys, states, action, pool)
        obs = timestep.obs
        np.testing.assert_array_equal(timestep.info["final_obs"], before)
        np.testing.assert_array_equal(states, obs)
        goes_on = np.setdiff1d(np.arange(num_envs), ending)
        np.testing.assert_array_equal(obs[goes_on], before[goes_on])
        found.append((np.asarray(obs)[list(ending), 0].tolist(), np.asarray(fresh)[:, 0].tolist()))
    return found


def test_episodes_take_the_states_of_a_queue_in_turn():
    """Against a queue of Python: 3 states are made per step, 9 are kept, and the longest unread is taken first."""
    draw = np.random.default_rng(0)
    endings = [sorted(draw.choice(7, draw.choice([0, 0, 1, 2, 3, 7]), replace=False)) for _ in range(60)]
    begun = np.asarray(AutoReset(Costly()).reset_batch(KEY, 7)[2].starts[1])[:, 0].tolist()
    ring, unread = collections.deque(begun, maxlen=9), 9
    for begins, fresh in played(endings):
        ring.extend(fresh)
        unread = min(9, unread + 3)
        expected = [ring[(9 - unread + i) % 9] for i in range(len(begins))]
        assert begins == expected
        unread = max(0, unread - len(begins))


def test_environments_that_end_together_start_apart():
    """All 7 end in every third step, in which 9 resets were made: no two of 140 episodes start alike."""
    endings = [range(7) if t % 3 == 2 else [] for t in range(60)]
    begins = [number for step in played(endings) for number in step[0]]
    assert len(begins) == 140
    assert len(set(begins)) == 140


def test_more_ends_than_resets_take_the_oldest_states_again():
    """All 7 end in every step, in which 3 resets are made: what is new is used, and of the old as many as there are."""
    begins = [step[0] for step in played([range(7)] * 20)]
    assert len(set(begins[0])) == 7
    for before, now in itertools.pairwise(begins[2:]):
        assert len(set(now)) == 7
        assert len(set(now) - set(before)) >= 3


def test_with_one_environment_per_reset_a_batch_is_the_single_step_many_times():
    env, keys = AutoReset(Costly(environments_per_reset=1)), jax.random.split(KEY, 5)
    states, obs, pool = env.reset_batch(KEY, 5)
    assert pool == ()
    jax.tree.map(np.testing.assert_array_equal, (states, obs), jax.vmap(env.reset)(keys))
    action = jnp.array([0, 1, 1, 0, 1])
    expected = jax.vmap(env.step)(keys, states, action)
    jax.tree.map(np.testing.assert_array_equal, env.step_batch(keys, states, action, pool)[:2], expected)


@pytest.mark.parametrize("wrap", [lambda env: env, EpisodeStatistics], ids=["alone", "inside another wrapper"])
def test_the_first_time_limits_of_environments_that_share_resets_are_spread(wrap):
    """Of 300 environments with a limit of 10, about 30 end in each step; later episodes have the full length."""
    env = AutoReset(wrap(TimeLimit(Costly(), 10)))
    states, _, pool = env.reset_batch(KEY, 300)

    def step(carried, key):
        states, pool = carried
        states, timestep, pool = env.step_batch(jax.random.split(key, 300), states, jnp.zeros(300, jnp.int32), pool)
        return (states, pool), timestep.truncated

    _, ends = jax.lax.scan(step, (states, pool), jax.random.split(KEY, 30))
    counts = np.asarray(ends).sum(1)
    assert counts.min() > 10
    assert counts.max() < 60
    assert counts.sum() == 900
    np.testing.assert_array_equal(ends[:10], ends[10:20])


def test_the_first_time_limits_of_others_are_not():
    env = AutoReset(TimeLimit(Costly(environments_per_reset=1), 10))
    assert not np.asarray(env.reset_batch(KEY, 5)[0].elapsed).any()


@pytest.mark.slow
def test_a_run_whose_environments_share_resets_is_resumed_bit_for_bit(tmp_path):
    settings = {**SMALL, "num_envs": 8, "total_steps": 64 * 12}
    env = TimeLimit(Costly(), 5)
    whole = lehr.train(env=env, run_dir=tmp_path / "whole", **settings)
    lehr.train(env=env, run_dir=tmp_path / "run", progress_fn=lambda steps, _: steps >= 300, **settings)
    resumed = lehr.resume(tmp_path / "run", env=env)
    assert isinstance(whole.state.actor.resets, ResetPool)
    jax.tree.map(np.testing.assert_array_equal, resumed.state.actor, whole.state.actor)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)


def test_a_run_saved_without_a_pool_goes_on_with_a_new_one(tmp_path):
    plan = make_plan("ppo", {**SMALL, "num_envs": 8}, TimeLimit(Costly(), 5))
    other = make_plan("ppo", {**SMALL, "num_envs": 8, "seed": 1}, TimeLimit(Costly(), 5))
    older = other.state.saved._replace(actor=other.state.actor._replace(resets=()))
    loaded, _ = checkpoint.load(checkpoint.save(tmp_path, older, 0, {}), plan.state.saved)
    jax.tree.map(np.testing.assert_array_equal, loaded.actor.resets, plan.state.actor.resets)
    np.testing.assert_array_equal(loaded.actor.obs, other.state.actor.obs)
