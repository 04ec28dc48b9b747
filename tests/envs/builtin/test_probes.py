"""The closed forms of the probes, against values computed from the transitions that the probes really make."""

import jax
import numpy as np
import pytest

from lehr.envs import AutoReset, TimeLimit, make
from lehr.envs.builtin.probes import PROBES, TIME_LIMIT, FinalObservation, Truncated

DISCOUNT = 0.9


def transitions(probe, num_steps=48):
    """Steps under the best actions, as arrays: observation before, and the timestep."""
    env = AutoReset(TimeLimit(probe, TIME_LIMIT))
    expected = probe.expected_values(DISCOUNT)
    step = jax.jit(env.step)
    state, obs = env.reset(jax.random.key(0))
    before, steps = [], []
    for key in jax.random.split(jax.random.key(1), num_steps):
        if expected.actions is None:
            action = env.action_space.sample(key)
        else:
            action = expected.actions[np.flatnonzero(expected.observations[:, 0] == obs[0])[0]]
        before.append(obs)
        state, timestep = step(key, state, action)
        obs = timestep.obs
        steps.append(timestep)
    return np.stack(before), jax.tree.map(lambda *leaves: np.stack(leaves), *steps)


def fixed_point(before, steps, observations, end="terminated", bootstrap="final"):
    """The table of values that one-step bootstrapping converges to on these transitions."""
    done = steps.terminated if end == "terminated" else steps.terminated | steps.truncated
    after = steps.info["final_obs"] if bootstrap == "final" else steps.obs
    here = (before == observations.T).argmax(axis=1)
    there = (after == observations.T).argmax(axis=1)
    values = np.zeros(len(observations))
    for _ in range(1000):
        targets = steps.reward + DISCOUNT * ~done * values[there]
        values = np.array([targets[here == i].mean() for i in range(len(observations))])
    return values


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("probe", PROBES)
def test_expected_values_are_those_of_the_transitions(probe, continuous):
    probe = probe(continuous=continuous)
    expected = probe.expected_values(DISCOUNT)
    np.testing.assert_allclose(fixed_point(*transitions(probe), expected.observations), expected.values, rtol=1e-5)


def test_merging_the_flags_is_visible():
    probe = Truncated()
    expected = probe.expected_values(DISCOUNT)
    merged = fixed_point(*transitions(probe), expected.observations, end="either")
    np.testing.assert_allclose(merged, probe.merged_value(DISCOUNT), rtol=1e-5)
    assert expected.values == pytest.approx([10])
    assert merged == pytest.approx([2.5])


def test_bootstrapping_from_the_reset_observation_is_visible():
    probe = FinalObservation()
    expected = probe.expected_values(DISCOUNT)
    wrong = fixed_point(*transitions(probe), expected.observations, bootstrap="reset")
    np.testing.assert_allclose(wrong[1], probe.reset_value(DISCOUNT), rtol=1e-5)
    assert expected.values[1] == pytest.approx(10)
    assert wrong[1] == pytest.approx(6.896552)


@pytest.mark.parametrize("name", ["Probe-PolicyReward-v0", "Probe-PolicyObservationReward-v0"])
def test_other_actions_are_worth_less(name):
    key = jax.random.key(0)
    for continuous, actions in ((False, np.arange(2)), (True, np.linspace(-1, 1, 21, dtype=np.float32)[:, None])):
        env = make(name, continuous=continuous)
        expected = env.env.expected_values(DISCOUNT)
        state, obs = env.reset(key)
        rewards = np.array([env.step(key, state, action)[1].reward for action in actions])
        best = expected.actions[np.flatnonzero(expected.observations[:, 0] == obs[0])[0]]
        np.testing.assert_allclose(actions[rewards.argmax()], best, atol=1e-6)
        assert np.sum(rewards == rewards.max()) == 1
