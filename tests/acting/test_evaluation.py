"""An evaluation gives the returns and lengths of whole episodes, as a loop over single steps does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr import envs
from lehr.acting.evaluation import EpisodeResults
from lehr.envs import TimeLimit
from lehr.envs.builtin.probes import FinalObservation, Truncated
from lehr.training.plan import make_plan

SMALL = {"num_envs": 2, "horizon": 4, "minibatches": 1, "hidden_sizes": (8,), "recurrent_size": 8, "total_steps": 8}


def policy_of(env, scale=30.0, **settings):
    """An untrained policy with large weights, so that it has preferences, and its environment."""
    plan = make_plan("ppo", SMALL | settings, envs.make(env))
    learner = plan.state.learner
    params = jax.tree.map(lambda x: scale * x, learner.params)
    return plan.policy(plan.state._replace(learner=learner._replace(params=params))), plan.env


def by_hand(policy, env, episodes, seed):
    """Greedy episodes, one step of one environment at a time."""
    reset_key, _ = jax.random.split(jax.random.key(seed))
    step, found = jax.jit(env.step), []
    for key in jax.random.split(reset_key, episodes):
        state, obs = env.reset(key)
        carry, total, length, done = policy.initial_carry(1), 0.0, 0, False
        while not done:
            carry, action = policy.step(carry, obs[None], np.array([length == 0]))
            state, timestep = step(key, state, action[0])
            obs, total, length = timestep.obs, total + float(timestep.reward), length + 1
            done = bool(timestep.terminated | timestep.truncated)
        found.append((total, length))
    return found


@pytest.mark.parametrize(("env", "torso"), [("CartPole-v1", "auto"), ("CartPole-Hidden-v1", "mingru")])
def test_episodes_equal_those_stepped_one_by_one(env, torso):
    policy, made = policy_of(env, torso=torso)
    episodes = lehr.evaluate(policy, made, episodes=6, seed=3)
    expected = by_hand(policy, made, 6, seed=3)
    assert list(zip(episodes.returns.tolist(), episodes.lengths.tolist(), strict=True)) == expected
    assert len(set(episodes.lengths.tolist())) > 1  # they end at different steps, and each keeps its own numbers


@pytest.mark.parametrize(("probe", "value"), [(Truncated(), 7.0), (FinalObservation(), 6.0)])
def test_an_episode_ends_at_its_time_limit(probe, value):
    policy, env = policy_of(TimeLimit(probe, 7))
    episodes = lehr.evaluate(policy, env, episodes=3)
    assert (episodes.returns.tolist(), episodes.lengths.tolist()) == ([value] * 3, [7] * 3)


def test_an_episode_without_an_end_counts_as_it_stands(monkeypatch):
    monkeypatch.setattr("lehr.acting.evaluation.MOST_STEPS", 11)
    policy, env = policy_of(Truncated())
    assert lehr.evaluate(policy, env, episodes=2).lengths.tolist() == [11, 11]


def test_greedy_actions_are_all_alike_and_sampled_ones_are_drawn():
    policy, env = policy_of("Probe-PolicyReward-v0", scale=1.0)
    greedy = lehr.evaluate(policy, env, episodes=1000)
    sampled = lehr.evaluate(policy, env, episodes=1000, greedy=False)
    assert len(np.unique(greedy.returns)) == 1
    assert np.unique(sampled.returns).tolist() == [-1, 1]
    _, found = policy.program.agent.network.act(
        policy.learned.params, policy.initial_carry(1), jnp.zeros((1, 1)), jnp.ones(1, bool)
    )
    probability = float(np.exp(found.log_prob(jnp.ones(1, jnp.int32))[0]))
    spread = 2 * np.sqrt(probability * (1 - probability) / 1000)
    assert abs(sampled.returns.mean() - (2 * probability - 1)) < 4 * spread


def test_a_seed_gives_the_same_episodes_and_another_gives_others():
    policy, env = policy_of("CartPole-v1", scale=1.0)
    for greedy in (True, False):
        one, same, other = (lehr.evaluate(policy, env, 8, seed, greedy) for seed in (1, 1, 2))
        assert one.lengths.tolist() == same.lengths.tolist()
        assert one.lengths.tolist() != other.lengths.tolist()


def test_every_agent_of_an_environment_has_its_return():
    policy, env = policy_of("Swarm-v0")
    episodes = lehr.evaluate(policy, env, episodes=3)
    assert episodes.returns.shape == episodes.lengths.shape == (3 * env.num_agents,)
    assert np.isfinite(episodes.returns).all()
    assert len(np.unique(episodes.returns)) > 3


def test_greedy_and_sampled_share_one_compiled_program(count_traces, monkeypatch):
    policy, env = policy_of(TimeLimit(Truncated(), 5))
    counted = count_traces(lehr.acting.policy.PolicyProgram.act)
    monkeypatch.setattr(lehr.acting.policy.PolicyProgram, "act", lambda *arguments: counted(*arguments))
    for greedy in (True, False):
        lehr.evaluate(policy, env, episodes=2, greedy=greedy)
    traces = counted.traces
    for greedy in (True, False):
        lehr.evaluate(policy, env, episodes=2, seed=5, greedy=greedy)
    assert traces == counted.traces <= 2


def test_what_is_no_number_of_episodes_or_seed_is_refused():
    policy, env = policy_of("CartPole-v1")
    for given, sentence in (
        ({"episodes": 0}, "episodes is 0; give a whole number, 1 or more"),
        ({"episodes": -1}, "episodes is -1; give a whole number"),
        ({"episodes": 2.5}, "episodes is 2.5; give a whole number"),
        ({"episodes": True}, "episodes is True; give a whole number"),
        ({"seed": 2**64}, "seed is 18446744073709551616; give a whole number, of at most 64 bits"),
    ):
        for call in (lehr.evaluate, lehr.record):
            with pytest.raises(lehr.InputError, match=sentence):
                call(policy, env, **given)


def test_an_environment_is_given_by_its_name_too():
    policy, env = policy_of("CartPole-v1")
    assert lehr.evaluate(policy, "CartPole-v1", 4).lengths.tolist() == lehr.evaluate(policy, env, 4).lengths.tolist()
    with pytest.raises(lehr.InputError, match=r"The observations of this environment are in Box.*trained for Box"):
        lehr.evaluate(policy, "Pendulum-v1")


def test_results_of_an_evaluation_are_shown_in_one_line():
    found = EpisodeResults(np.array([1.0, 3.0], np.float32), np.array([10, 20], np.int32))
    assert repr(found) == "EpisodeResults(2 episodes, return 2 ± 1 (std), length 15)"


def test_rounding_is_not_shown_as_a_spread():
    returns = np.full(100, -1.316, np.float32)
    returns[0] = np.nextafter(returns[0], np.float32(0))
    assert 0 < returns.std() < 2e-7
    assert "return -1.316 ± 0 (std)" in repr(EpisodeResults(returns, np.full(100, 7, np.int32)))
