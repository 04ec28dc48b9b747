"""A rollout holds what happened, against a NumPy loop that lives through the same actions again."""

from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.acting.rollout import RunningEpisodes, collect, follow_episodes, initial_actor, mean_reward, waiting
from lehr.algorithms import ppo
from lehr.envs import AutoReset, Environment, TimeLimit
from lehr.envs.base import NEVER
from lehr.maths.normalise import EPSILON, initial_statistics, update_statistics
from lehr.networks import NetworkConfig, actor_critic
from lehr.spaces import Box, Discrete
from lehr.types import Timestep

END, LIMIT, NUM_ENVS = 6, 4, 16
SHORT, LONG = 3, 9
"""Horizons below the time limit, where at most one truncation can happen, and above it."""


@dataclass(frozen=True)
class Counting(Environment):
    """Count by 1 or, with action 1, by 2. The count is observation and reward; from `END` on it is over."""

    observation_space: ClassVar[Box] = Box(0, 10, (1,))
    action_space: ClassVar[Discrete] = Discrete(2)
    truncation_gap: ClassVar[int] = NEVER

    def reset(self, key):
        return jnp.float32(0), jnp.zeros(1)

    def step(self, key, state, action):
        state = state + 1 + action
        return state, Timestep(state[None], state, state >= END, jnp.bool(False), {})


ENV = AutoReset(TimeLimit(Counting(), LIMIT))


def replay(actions, count, elapsed):
    """What `Counting` under its time limit answers to actions `[T, N]`, step by step; and where it ends."""
    rows = []
    for action in np.asarray(actions):
        obs = count
        count, elapsed = count + 1 + action, elapsed + 1
        terminated, truncated = count >= END, elapsed == LIMIT
        done = terminated | truncated
        rows.append(
            {"obs": obs, "final": count, "terminated": terminated, "truncated": truncated, "reset": elapsed == 1}
        )
        count, elapsed = np.where(done, 0, count), np.where(done, 0, elapsed)
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}, count, elapsed


@cache
def network_of(torso):
    """A small network; its critic is as recurrent as its actor, but for `gru+mlp`."""
    actor, _, critic = torso.partition("+")
    config = NetworkConfig(torso=actor, critic_torso=critic or None, hidden_sizes=(8,), recurrent_size=4)
    return actor_critic(ENV.observation_space, ENV.action_space, config, jax.random.key(1))


@cache
def rollouts(torso, horizon, count=3, normalised=False):
    """Some rollouts in a row, and the actor before the first."""
    network, params = network_of(torso)
    statistics = STATISTICS if normalised else ()
    first, act = compiled(ENV, network)
    actor = start = first(NUM_ENVS, jax.random.key(2))
    found = []
    for index in range(count):
        found.append(act(params, actor, statistics, horizon, jax.random.key(3 + index)))
        actor = found[-1].actor
    return start, found


@cache
def value_of(network):
    return jax.jit(network.value)


def compiled(env, network):
    """`initial_actor` and `collect` for an environment and a network."""
    agent = ppo.Algorithm(ppo.Config(), network)
    return (
        jax.jit(partial(initial_actor, env, agent), static_argnums=0),
        jax.jit(partial(collect, env, agent, needs=agent.needs), static_argnums=3),
    )


STATISTICS = update_statistics(initial_statistics(jnp.zeros(1)), jnp.array([[1.0], [5.0]]))
"""Mean 3 and variance 4."""


@pytest.mark.parametrize("horizon", [SHORT, LONG])
def test_a_rollout_holds_the_steps_that_were_made(horizon):
    count, elapsed = np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, int)
    seen = {"terminated": 0, "truncated": 0, "both": 0}
    for collected in rollouts("mlp", horizon)[1]:
        rollout = collected.rollout
        lived, count, elapsed = replay(rollout.action, count, elapsed)
        np.testing.assert_array_equal(rollout.obs[..., 0], lived["obs"])
        np.testing.assert_array_equal(collected.raw_obs, rollout.obs)
        np.testing.assert_array_equal(rollout.reward, lived["final"])
        np.testing.assert_array_equal(rollout.terminated, lived["terminated"])
        np.testing.assert_array_equal(rollout.done, lived["terminated"] | lived["truncated"])
        np.testing.assert_array_equal(rollout.reset, lived["reset"])
        np.testing.assert_array_equal(collected.actor.obs[:, 0], count)
        np.testing.assert_array_equal(collected.actor.reset, elapsed == 0)
        seen["terminated"] += (lived["terminated"] & ~lived["truncated"]).sum()
        seen["truncated"] += (lived["truncated"] & ~lived["terminated"]).sum()
        seen["both"] += (lived["truncated"] & lived["terminated"]).sum()
    assert min(seen.values()) > 0, f"the rollouts must hold every kind of end: {seen}"


class CountingFrom7(Counting):
    """Its actions are 7 and 8."""

    action_space = Discrete(2, start=7)

    def step(self, key, state, action):
        return super().step(key, state, action - 7)


def test_an_environment_gets_actions_from_where_its_space_starts():
    env = AutoReset(TimeLimit(CountingFrom7(), LIMIT))
    network, params = network_of("mlp")
    agent = ppo.Algorithm(ppo.Config(), network)
    actor = initial_actor(env, agent, NUM_ENVS, jax.random.key(2))
    collected = collect(env, agent, params, actor, (), horizon=LONG, key=jax.random.key(3), needs=frozenset({"taken"}))
    rollout = collected.rollout
    lived, _, _ = replay(
        rollout.action, np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, int)
    )  # what is learned from counts from 0
    np.testing.assert_array_equal(rollout.reward, lived["final"])
    np.testing.assert_array_equal(rollout.taken, rollout.action + 7)
    assert set(np.asarray(rollout.taken).ravel().tolist()) == {7, 8}


@pytest.mark.parametrize("torso", ["mlp", "gru+mlp"])
@pytest.mark.parametrize("horizon", [SHORT, LONG])
def test_the_next_value_is_of_the_observation_that_followed(torso, horizon):
    """Also at a time limit, where the observation after the reset, 0, would be another one."""
    network, params = network_of(torso)
    count, elapsed = np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, int)
    truncated = 0
    for collected in rollouts(torso, horizon)[1]:
        rollout = collected.rollout
        lived, count, elapsed = replay(rollout.action, count, elapsed)
        values = value_of(network)(params, rollout.carry, jnp.float32(np.arange(12.0))[:, None])
        assert len(np.unique(values)) == 12
        np.testing.assert_allclose(rollout.value, values[lived["obs"].astype(int)], rtol=1e-5)
        # The value after a termination is never looked at: it need not be known.
        matters = ~lived["terminated"]
        expected = values[lived["final"].astype(int)]
        np.testing.assert_allclose(rollout.next_value[matters], expected[matters], rtol=1e-5)
        truncated += (lived["truncated"] & matters).sum()
    assert truncated > 0


@pytest.mark.parametrize("torso", [pytest.param("lstm", marks=pytest.mark.slow), "gru", "mingru"])
def test_a_memory_is_carried_through_an_episode_and_cleared_after_it(torso):
    """Log probability, value and next value come from a memory that has seen this episode alone."""
    network, params = network_of(torso)
    step, value = jax.jit(network.step), value_of(network)
    log_prob = jax.jit(lambda policy, action: policy.log_prob(action))
    never = jnp.zeros(NUM_ENVS, bool)
    actor, found = rollouts(torso, SHORT)
    carry, truncated = network.initial_carry((NUM_ENVS,)), 0
    for collected in found:
        rollout = collected.rollout
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), rollout.carry, actor.carry)
        for t in range(SHORT):
            kept = ~np.asarray(rollout.reset)[t, :, None]
            carry = jax.tree.map(lambda x, kept=kept: np.asarray(x) * kept, carry)
            carry, policy, expected = step(params, carry, rollout.obs[t], never)
            np.testing.assert_allclose(rollout.log_prob[t], log_prob(policy, rollout.action[t]), rtol=1e-4)
            np.testing.assert_allclose(rollout.value[t], expected, rtol=1e-4)
            following = value(params, carry, rollout.reward[t][:, None])  # the reward is the final observation
            matters = ~np.asarray(rollout.terminated[t])  # the value after a termination need not be known
            np.testing.assert_allclose(rollout.next_value[t][matters], following[matters], rtol=1e-4)
            truncated += (np.asarray(rollout.done[t]) & matters).sum()
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), collected.actor.carry, carry)
        actor = collected.actor
    assert truncated > 0


def test_the_log_probability_is_that_of_the_policy_that_acted():
    network, params = network_of("mlp")
    for collected in rollouts("mlp", LONG)[1]:
        rollout = collected.rollout
        _, policy = jax.jit(network.act)(params, rollout.carry, rollout.obs, rollout.reset)
        probability = np.exp(policy.logits) / np.exp(policy.logits).sum(-1, keepdims=True)
        drawn = np.take_along_axis(probability, np.asarray(rollout.action)[..., None], -1)[..., 0]
        np.testing.assert_allclose(np.exp(rollout.log_prob), drawn, rtol=1e-5)


def test_every_rollout_draws_its_own_actions():
    first, second, _ = (collected.rollout.action for collected in rollouts("mlp", LONG)[1])
    assert (first != second).any()
    assert len(np.unique(np.asarray(first), axis=1).T) > 1, "all environments drew the same actions"


def test_observations_are_normalised_by_the_statistics_given_and_kept_raw_beside():
    network, params = network_of("mlp")
    for collected in rollouts("mlp", SHORT, normalised=True)[1]:
        raw, rollout = np.asarray(collected.raw_obs), collected.rollout
        np.testing.assert_allclose(rollout.obs, (raw - 3) / np.sqrt(4 + EPSILON), rtol=1e-6)
        np.testing.assert_allclose(rollout.value, value_of(network)(params, rollout.carry, rollout.obs), rtol=1e-5)
        following = (jnp.asarray(rollout.reward)[..., None] - 3) / np.sqrt(4 + EPSILON)
        expected = value_of(network)(params, rollout.carry, following)
        matters = ~np.asarray(rollout.terminated)
        np.testing.assert_allclose(rollout.next_value[matters], expected[matters], rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(collected.actor.obs, np.round(collected.actor.obs))


@dataclass(frozen=True)
class Echo(Environment):
    """One step, rewarded with the first of two actions, of which each has its own bounds. It needs no state."""

    observation_space: ClassVar[Box] = Box(0, 1, (1,))
    action_space: ClassVar[Box] = Box(np.array([-0.25, -1.0]), np.array([0.5, 1.0]))

    def reset(self, key):
        return (), jnp.zeros(1)

    def step(self, key, state, action):
        return (), Timestep(jnp.zeros(1), action[0], jnp.bool(True), jnp.bool(False), {})


def test_the_environment_gets_clipped_actions_and_the_rollout_keeps_them_as_drawn():
    env = AutoReset(Echo())
    network, params = actor_critic(env.observation_space, env.action_space, NetworkConfig(), jax.random.key(0))
    first, act = compiled(env, network)
    rollout = act(params, first(64, jax.random.key(0)), (), 4, jax.random.key(1)).rollout
    drawn = np.asarray(rollout.action)
    assert drawn[..., 0].min() < -0.25
    assert drawn[..., 0].max() > 0.5
    np.testing.assert_array_equal(rollout.reward, np.clip(drawn[..., 0], -0.25, 0.5))
    np.testing.assert_allclose(
        rollout.log_prob, (-0.5 * drawn**2 - 0.5 * np.log(2 * np.pi)).sum(-1), rtol=1e-3, atol=1e-3
    )  # σ is 1 and the mean nearly 0


# Many agents ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relay(Environment):
    """Three agents; agent i is done after i + 2 steps of its own and waits. Rewards are 1, 10 and 100 at every step."""

    observation_space: ClassVar[Box] = Box(0, 10, (2,))
    action_space: ClassVar[Discrete] = Discrete(2)
    num_agents: ClassVar[int] = 3

    def _obs(self, count):
        return jnp.stack([jnp.arange(3.0), jnp.full(3, count, jnp.float32)], axis=1)

    def reset(self, key):
        return jnp.int32(0), self._obs(jnp.int32(0))

    def step(self, key, state, action):
        state = state + 1
        done = state >= jnp.arange(3) + 2
        return state, Timestep(self._obs(state), jnp.array([1.0, 10.0, 100.0]), done, jnp.zeros(3, bool), {})


def test_agents_are_neighbours_in_the_batch_and_wait_for_each_other():
    env = AutoReset(Relay())
    network, params = actor_critic(env.observation_space, env.action_space, NetworkConfig(), jax.random.key(0))
    first, act = compiled(env, network)
    actor, numbers = first(2, jax.random.key(0)), []
    for index in range(4):
        collected = act(params, actor, (), 3, jax.random.key(index))
        actor = collected.actor
        numbers.append([float(x) for x in collected.finished])
        times = np.arange(3 * index, 3 * index + 3) % 4  # an episode lasts 4 steps
        np.testing.assert_array_equal(collected.rollout.obs[..., 0], np.tile(np.arange(3), (3, 2)))
        np.testing.assert_array_equal(collected.rollout.obs[..., 1], np.tile(times[:, None], 6))
        np.testing.assert_array_equal(collected.rollout.done, np.tile(times[:, None] + 1 >= np.arange(3) + 2, 2))
    # Of steps 0 to 11 in three rows of three episodes: agents end at steps 1, 2, 3, then 5, 6, 7, then 9, 10, 11.
    one, ten, hundred = (1, 2 * 1, 2), (1, 3 * 10, 3), (1, 4 * 100, 4)
    ends = [one, ten], [hundred, one], [ten, hundred], [one, ten, hundred]
    np.testing.assert_array_equal(numbers, [2 * np.sum(agents, axis=0) for agents in ends])


def follow(rewards, dones, agents):
    """Returns and lengths of all episodes that end in `[T, N]`, by a loop; a done agent waits for its neighbours."""
    total, length, over = np.zeros(rewards.shape[1]), np.zeros(rewards.shape[1]), np.zeros(rewards.shape[1], bool)
    found = []
    for reward, done in zip(rewards, dones, strict=True):
        total += np.where(over, 0, reward)
        length += ~over
        ended = done & ~over
        found.append((ended.sum(), total[ended].sum(), length[ended].sum()))
        over = done.reshape(-1, agents)
        everyone = np.repeat(over.all(1), agents)
        total, length, over = np.where(everyone, 0, total), np.where(everyone, 0, length), done & ~everyone
    return np.array(found)


def random_dones(rng, steps, size, agents):
    """Dones where an agent that is done stays done until all of its environment are."""
    dones, over = [], np.zeros((size // agents, agents), bool)
    for _ in range(steps):
        over = over | (rng.random(over.shape) < 0.3)
        dones.append(over.reshape(-1))
        over = np.where(over.all(1, keepdims=True), False, over)
    return np.stack(dones)


@pytest.mark.parametrize("agents", [1, 3])
def test_episodes_are_followed_across_rollouts(agents):
    rng = np.random.default_rng(0)
    steps, size, pieces = 40, 6, 5
    rewards, dones = rng.normal(size=(steps, size)), random_dones(rng, steps, size, agents)
    expected = follow(rewards, dones, agents).reshape(pieces, -1, 3).sum(1)
    assert expected[:, 0].min() > 0
    episodes = RunningEpisodes(jnp.zeros(size), jnp.zeros(size), jnp.zeros(size, bool))

    @jax.jit
    def step(episodes, rewards, dones):
        valid = ~waiting(episodes.over, dones, agents) if agents > 1 else ()
        return follow_episodes(episodes, rewards, dones, valid, agents)

    for piece, row in enumerate(expected):
        part = slice(piece * steps // pieces, (piece + 1) * steps // pieces)
        episodes, finished = step(episodes, jnp.float32(rewards[part]), jnp.asarray(dones[part]))
        np.testing.assert_allclose(finished, row, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_does_not_outlive_its_episode(bad):
    episodes = RunningEpisodes(jnp.zeros(1), jnp.zeros(1), jnp.zeros(1, bool))
    reward, done = jnp.array([[1.0], [bad], [1.0], [1.0]]), jnp.array([[False], [False], [True], [False]])
    episodes, _ = follow_episodes(episodes, reward, done)
    episodes, finished = follow_episodes(episodes, jnp.ones((2, 1)), jnp.array([[True], [True]]))
    assert [float(x) for x in finished] == [2.0, 3.0, 3.0]


@pytest.mark.parametrize("torso", ["mlp", "gru"])
def test_final_observations_are_kept_for_whom_needs_them(torso):
    """What each step led to before any reset; values and random numbers are as without them."""
    network, params = network_of(torso)
    agent = ppo.Algorithm(ppo.Config(), network)
    first, act = compiled(ENV, network)
    actor = first(NUM_ENVS, jax.random.key(0))
    act_and_keep = jax.jit(partial(collect, ENV, agent, needs=agent.needs | {"final_obs"}), static_argnums=3)
    arguments = params, actor, (), 2 * LIMIT, jax.random.key(2)
    plain, rollout = act(*arguments).rollout, act_and_keep(*arguments).rollout
    assert plain.final_obs == ()
    for name in ("obs", "action", "reward", "done"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(plain, name), err_msg=name)
    np.testing.assert_allclose(rollout.next_value, plain.next_value, rtol=1e-5, atol=1e-6)
    done = np.asarray(rollout.done)
    assert done.any()
    following = np.asarray(rollout.obs)[1:]
    np.testing.assert_array_equal(np.asarray(rollout.final_obs)[:-1][~done[:-1]], following[~done[:-1]])
    assert (np.asarray(rollout.final_obs)[:-1][done[:-1]] != following[done[:-1]]).any()
    without = jax.jit(partial(collect, ENV, agent, needs=frozenset()), static_argnums=3)(*arguments).rollout
    if torso == "mlp":
        assert without.value == without.next_value == ()


def test_the_mean_reward_is_over_the_steps_that_count():
    rollout = SimpleNamespace(reward=jnp.array([[1.0, 2.0], [30.0, 3.0]]), valid=())
    assert mean_reward(rollout) == 9.0
    rollout.valid = jnp.array([[True, True], [False, True]])
    assert mean_reward(rollout) == 2.0
