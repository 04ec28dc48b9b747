"""A policy acts: on one observation or many, by its best guess or by chance, with its statistics and its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.acting.agent import member_of
from lehr.maths.normalise import RunningStatistics, update_statistics
from lehr.spaces import Box, Discrete
from lehr.training.plan import make_plan

SMALL = {"num_envs": 2, "horizon": 4, "minibatches": 1, "hidden_sizes": (8,), "recurrent_size": 8, "total_steps": 8}


def policy_of(env, scale=30.0, **settings):
    """An untrained policy with large weights, so that it has preferences."""
    plan = make_plan("ppo", SMALL | {"env": env} | settings)
    learner = plan.state.learner
    params = jax.tree.map(lambda x: scale * x, learner.params)
    return plan.policy(plan.state._replace(learner=learner._replace(params=params)))


@pytest.fixture(scope="module")
def policy():
    return policy_of("CartPole-v1")


@pytest.fixture(scope="module")
def observations():
    return np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def distribution(policy, obs):
    carry = policy.initial_carry(len(obs))
    _, found = policy.program.agent.network.act(policy.learned.params, carry, obs, jnp.zeros(len(obs), bool))
    return found


def test_a_batch_gives_the_action_of_each_observation(policy, observations):
    together = policy(observations)
    assert together.shape == (16,)
    alone = [policy(obs) for obs in observations]
    assert all(action.shape == () for action in alone)
    assert [int(action) for action in alone] == together.tolist()
    assert len(set(together.tolist())) == 2


def test_without_a_key_the_most_probable_action_is_taken(policy, observations):
    probabilities = np.exp(distribution(policy, observations).log_prob(jnp.ones(16, jnp.int32)))
    assert policy(observations).tolist() == (probabilities > 0.5).astype(int).tolist()


def test_with_a_key_actions_are_drawn_by_their_probabilities(observations):
    policy = policy_of("CartPole-v1", scale=3.0)
    obs = np.repeat(observations[:1], 4000, axis=0)
    probability = float(np.exp(distribution(policy, obs[:1]).log_prob(jnp.ones(1, jnp.int32))[0]))
    assert 0.05 < probability < 0.95
    drawn = np.asarray(policy(obs, jax.random.key(1)))
    assert abs(drawn.mean() - probability) < 4 * np.sqrt(probability * (1 - probability) / 4000)
    assert policy(obs, jax.random.key(1)).tolist() == drawn.tolist()
    assert policy(obs, jax.random.key(2)).tolist() != drawn.tolist()
    assert policy(obs[0], jax.random.key(1)).shape == ()


def test_numbers_of_numpy_and_of_jax_are_the_same(policy, observations):
    expected = policy(observations).tolist()
    assert policy(jnp.asarray(observations)).tolist() == expected
    assert policy(observations.astype(np.float64)).tolist() == expected


def test_actions_are_legal(observations):
    policy = policy_of("Pendulum-v1", scale=1.0, initial_log_std=0.7)
    drawn = np.asarray(policy(observations[:, :3], jax.random.key(0)))
    assert drawn.shape == (16, 1)
    assert np.abs(drawn).max() == 2.0
    assert len(np.unique(drawn)) > 2


def test_an_action_is_clipped_to_a_box_alone():
    space = Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 3.0], np.float32))
    assert member_of(space, jnp.array([[-5.0, -5.0], [0.5, 2.0], [5.0, 5.0]])).tolist() == [[-1, 0], [0.5, 2], [1, 3]]
    assert member_of(Discrete(2), jnp.array([1])).tolist() == [1]
    assert member_of(Discrete(2, start=-3), jnp.array([0, 1])).tolist() == [-3, -2]


def test_observations_are_normalised_by_the_statistics_of_the_run(observations):
    plan = make_plan("ppo", SMALL | {"normalise_observations": True})
    statistics = plan.state.observation_statistics
    assert isinstance(statistics, RunningStatistics)
    learned_from = 5 + 3 * observations
    state = plan.state._replace(
        observation_statistics=update_statistics(statistics, jnp.asarray(learned_from)),
        learner=plan.state.learner._replace(params=jax.tree.map(lambda x: 30 * x, plan.state.learner.params)),
    )
    policy = plan.policy(state)
    plain = lehr.acting.policy.Policy(policy.program, lehr.acting.policy.PolicyParameters(policy.learned.params, ()))
    expected = plain((learned_from - learned_from.mean(0)) / learned_from.std(0)).tolist()
    assert policy(learned_from).tolist() == expected
    assert plain(learned_from).tolist() != expected


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 2, 4), ()])
def test_an_observation_of_another_shape_is_refused(shape, policy):
    with pytest.raises(
        lehr.InputError, match=r"The observation has shapes .* this policy expects \[\(4,\)\], or a batch"
    ):
        policy(np.zeros(shape, np.float32))


def test_an_empty_batch_has_no_actions(policy):
    assert policy(np.zeros((0, 4), np.float32)).shape == (0,)


# Where actions go ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [("CartPole-v1", np.int64), ("Pendulum-v1", np.ndarray)])
def test_gymnasium_takes_the_actions(name, kind):
    gymnasium = pytest.importorskip("gymnasium")
    policy, env = policy_of(name, scale=1.0), gymnasium.make(name)
    rng = np.random.default_rng(0)
    obs, _ = env.reset(seed=0)
    for source in (None, rng, jax.random.key(0)):
        action = policy(obs, source)
        assert type(action) is kind
        assert env.action_space.contains(action)
        obs, *_ = env.step(action)
    assert policy(np.tile(obs, (3, 1))).dtype == env.action_space.dtype


def test_jax_arrays_give_jax_arrays_also_while_tracing(policy, observations):
    expected = policy(observations).tolist()
    batch = jnp.asarray(observations)
    assert isinstance(policy(batch), jax.Array)
    assert policy(batch[0]).dtype == jnp.int32
    assert jax.jit(policy)(batch).tolist() == jax.vmap(policy)(batch).tolist() == expected


def test_a_generator_of_numpy_draws_another_action_each_time(observations):
    policy = policy_of("CartPole-v1", scale=3.0)
    batch, rng = np.repeat(observations[:1], 64, axis=0), np.random.default_rng(7)
    first, second = policy(batch, rng), policy(batch, rng)
    assert first.tolist() != second.tolist()
    assert policy(batch, np.random.default_rng(7)).tolist() == first.tolist()


def test_a_policy_is_traced_once_for_single_observations_and_once_for_a_batch(count_traces, monkeypatch, observations):
    counted = count_traces(lehr.acting.policy.PolicyProgram.act)
    monkeypatch.setattr(lehr.acting.policy.PolicyProgram, "act", lambda *arguments: counted(*arguments))
    policy = policy_of("CartPole-v1", hidden_sizes=(5,))
    for obs in observations:
        policy(obs), policy(obs.astype(np.float64)), policy(observations)
    assert counted.traces == 2


def test_whole_numbers_are_normalised_as_floats_are():
    plan = make_plan("ppo", SMALL | {"normalise_observations": True})
    statistics = update_statistics(plan.state.observation_statistics, jnp.arange(8.0).reshape(2, 4))
    params = jax.tree.map(lambda x: 30 * x, plan.state.learner.params)
    learner = plan.state.learner._replace(params=params)
    policy = plan.policy(plan.state._replace(observation_statistics=statistics, learner=learner))
    whole = np.random.default_rng(0).integers(-5, 9, (32, 4))
    assert policy(whole).tolist() == policy(whole.astype(np.float32)).tolist()


def test_a_policy_is_shown_in_one_line(policy):
    assert "4.800000190734863" in repr(policy)
    assert repr(policy).endswith("-> Discrete(n=2), 107 parameters)")


# Memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recurrent():
    return policy_of("CartPole-Hidden-v1", torso="mingru")


def test_a_policy_with_a_memory_says_how_it_is_used(recurrent):
    with pytest.raises(lehr.InputError, match=r"is recurrent; use carry = policy.initial_carry\(n\)"):
        recurrent(np.zeros(2, np.float32))


def test_a_memory_is_carried_and_cleared_at_the_begin_of_an_episode(recurrent, observations):
    obs, fresh = observations[:, :2], recurrent.initial_carry(16)
    no, some = np.zeros(16, bool), np.arange(16) < 8
    carry, action = recurrent.step(fresh, obs, no)
    assert (action.shape, action.dtype) == ((16,), np.int64)
    assert recurrent.step(fresh, jnp.asarray(obs), no)[1].dtype == jnp.int32
    again, _ = recurrent.step(carry, obs, no)
    mixed, _ = recurrent.step(carry, obs, some)
    changed = []
    for first, later, cut in zip(*map(jax.tree.leaves, (carry, again, mixed)), strict=True):
        changed.append(not np.array_equal(first, later))  # the critic's does not: a policy acts without it
        np.testing.assert_array_equal(cut[:8], first[:8])
        np.testing.assert_array_equal(cut[8:], later[8:])
    assert any(changed)
