"""IMPALA: its loss against NumPy, and a policy that is really behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.acting.rollout import collect
from lehr.algorithms import impala
from lehr.envs import TimeLimit, make
from lehr.errors import InputError
from lehr.maths.advantages import advantages_of, vtrace_of
from lehr.training.iteration import iteration
from tests.algorithms.rollouts import (
    assert_steps_not_taken_teach_nothing,
    learned_from,
    lived,
    made_up,
    network_of,
    next_values,
    of_actions,
    outputs,
)

COEF = {
    "learning_rate": 0.1,
    "entropy_coef": 0.03,
    "value_coef": 0.7,
    "discount": 0.9,
    "gae_lambda": 0.8,
    "rho_clip": 1.2,
    "c_clip": 0.9,
    "policy_rho_clip": 1.1,
}
ENDLESS = {"rho_clip": 1e9, "c_clip": 1e9, "policy_rho_clip": 1e9}


def algorithm_of(torso="mlp", **settings):
    defaults = {"optimiser": "sgd", "max_grad_norm": None, "standardise_advantages": False}
    return impala.Algorithm(impala.Config(**{**defaults, **settings}), network_of(torso)[0])


def learn(algorithm, rollout, torso="mlp", **coef):
    return learned_from(algorithm, rollout, {**COEF, **coef}, torso)


def numpy_vtrace(rollout, values, ratio, coef):
    """Targets and advantages of V-trace by a loop from the end, as the paper writes them."""
    reward, cut, terminated, done = (
        np.asarray(x, np.float64) for x in (rollout.reward, rollout.next_value, rollout.terminated, rollout.done)
    )
    targets, advantages = np.zeros_like(values), np.zeros_like(values)
    steps = len(values)
    for t in reversed(range(steps)):
        is_last = t == steps - 1
        inside = (1 - done[t]) * (not is_last)
        follows = cut[t] if is_last else np.where(done[t], cut[t], values[t + 1])
        ahead = 0.0 if is_last else targets[t + 1] - values[t + 1]
        error = reward[t] + coef["discount"] * (1 - terminated[t]) * follows - values[t]
        trace = coef["discount"] * coef["gae_lambda"] * np.minimum(coef["c_clip"], ratio[t]) * inside
        targets[t] = values[t] + np.minimum(coef["rho_clip"], ratio[t]) * error + trace * ahead
        onward = follows + inside * ahead
        gain = reward[t] + coef["discount"] * (1 - terminated[t]) * onward - values[t]
        advantages[t] = np.minimum(coef["policy_rho_clip"], ratio[t]) * gain
    return targets, advantages


@pytest.mark.parametrize("torso", ["mlp", "gru"])
def test_the_losses_are_those_of_their_formulas(torso):
    rollout = made_up(torso)
    _, metrics = learn(algorithm_of(torso), rollout, torso)
    log_probs, values = outputs(torso)
    log_prob = of_actions(log_probs, rollout)
    ratio = np.exp(log_prob - np.asarray(rollout.log_prob))
    assert ratio.max() > 1.3
    targets, advantages = numpy_vtrace(rollout, values, ratio, COEF)
    policy, value = -(advantages * log_prob).mean(), ((values - targets) ** 2).mean() / 2
    entropy = -(np.exp(log_probs) * log_probs).sum(-1).mean()
    expected = {
        "loss/policy": policy,
        "loss/value": value,
        "loss/entropy": -COEF["entropy_coef"] * entropy,
        "loss/total": policy + COEF["value_coef"] * value - COEF["entropy_coef"] * entropy,
        "policy/approximate_kl": (ratio - 1 - np.log(ratio)).mean(),
        "vtrace/ratio": ratio.mean(),
        "vtrace/ratio_distance": np.abs(ratio - 1).mean(),
        "vtrace/clip_fraction": (ratio > COEF["rho_clip"]).mean(),
        "advantage/mean": advantages.mean(),
        "return/mean": targets.mean(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_the_step_is_the_gradient_of_a_loss_whose_advantages_and_targets_are_data():
    """By a loss of its own, written for the three parts, with the advantages and targets as numbers."""
    network, params = network_of()
    rollout, coef = made_up(), {name: jnp.float32(value) for name, value in COEF.items()}
    _, policy, values = network.unroll(params, rollout.carry, rollout.obs, rollout.reset)
    log_ratio = policy.log_prob(rollout.action) - rollout.log_prob
    follows = next_values(rollout, values)
    targets, advantages = (np.asarray(x) for x in vtrace_of(rollout, values, follows, log_ratio, coef))

    def loss(params):
        _, policy, values = network.unroll(params, rollout.carry, rollout.obs, rollout.reset)
        gain = jnp.mean(policy.log_prob(rollout.action) * advantages) + 0.03 * jnp.mean(policy.entropy())
        return 0.7 * 0.5 * jnp.mean((values - targets) ** 2) - gain

    after, _ = learn(algorithm_of(), rollout)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.jit(jax.grad(loss))(params))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), after, expected)


def test_without_lag_and_clips_it_is_gae_with_a_lambda_of_one():
    rollout = lived()
    coef = {**COEF, **ENDLESS, "gae_lambda": 1.0}
    # Inside a made-up rollout no value follows from the one before: the real next values are the values themselves.
    real = rollout._replace(next_value=next_values(rollout, rollout.value))
    zeros = jnp.zeros_like(rollout.value)
    targets, advantages = vtrace_of(rollout, rollout.value, real.next_value, zeros, coef)
    expected, returns = advantages_of(real, 0.9, 1.0)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(targets, returns, rtol=1e-5, atol=1e-5)


def test_advantages_may_be_standardised():
    _, metrics = learn(algorithm_of(standardise_advantages=True), lived(), entropy_coef=0.0)
    log_probs, _ = outputs()
    rollout = lived()
    values = jnp.float32(outputs()[1])
    coef = {name: jnp.float32(value) for name, value in COEF.items()}
    zeros = jnp.zeros_like(rollout.value)
    _, advantages = vtrace_of(rollout, values, next_values(rollout, values), zeros, coef)
    weighed = (advantages - advantages.mean()) / advantages.std()
    expected = -(weighed * of_actions(log_probs, rollout)).mean()
    assert metrics["loss/policy"] == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("torso", ["mlp", "gru"])
def test_steps_that_were_not_taken_teach_nothing(torso):
    assert_steps_not_taken_teach_nothing(algorithm_of(torso), COEF, torso)


# The lag -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 3])
def test_the_policy_that_acts_is_behind_by_exactly_the_lag(lag, begin, quickly):
    run = begin("impala", "CartPole-v1", lag=lag, learning_rate=0.01, num_envs=4, horizon=4)
    program, state = run.program, run.state
    advance = jax.jit(lambda state: iteration(program, state), compiler_options=quickly)
    seen, network = [], program.algorithm.network
    for number in range(6):
        seen.append(state.learner.params)
        expected = seen[max(0, number - lag)]
        same = jax.tree.map(lambda x, y: np.array_equal(x, y), state.acting, expected)
        assert all(jax.tree.leaves(same))
        state, metrics = advance(state)
        assert float(metrics.get("rollout/lag", 0)) == min(number, lag)
    # What is learned from was really made so: the log probabilities of a rollout are those of the older parameters.
    collected = collect(
        program.env, program.algorithm, state.acting, state.actor, (), 4, jax.random.key(0), program.needs
    )
    rollout = collected.rollout
    _, policy, _ = network.unroll(
        seen[6 - lag] if lag else state.learner.params, rollout.carry, rollout.obs, rollout.reset
    )
    np.testing.assert_allclose(policy.log_prob(rollout.action), rollout.log_prob, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["impala", pytest.param("appo", marks=pytest.mark.slow)])
def test_the_ratios_leave_one_by_more_the_longer_the_lag(algorithm, begin, advance):
    distances = []
    for lag in (0, 1, 4):
        run = advance(begin(algorithm, "CartPole-v1", lag=lag, learning_rate=0.003, optimiser="adam"), 60)
        distances.append(run.metrics["vtrace/ratio_distance"][10:].mean())
    assert distances[0] < 1e-6
    assert distances[1] > 1e-3
    assert distances[2] > 1.5 * distances[1]


def behind(algorithm, begin, quickly, lag, **settings):
    """A run after eight updates, in episodes that a time limit cuts, and its next rollout."""
    env = TimeLimit(make("CartPole-v1"), 5)
    run = begin(algorithm, env, lag=lag, learning_rate=0.02, num_envs=4, horizon=8, optimiser="adam", **settings)
    program, state = run.program, run.state
    advance = jax.jit(lambda state: iteration(program, state)[0], compiler_options=quickly)
    for _ in range(8):
        state = advance(state)
    found = collect(program.env, program.algorithm, state.acting, state.actor, (), 8, jax.random.key(3), program.needs)
    return program, state, found


def by_hand(network, params, collected):
    """The learner's log probabilities, values and next values, by single steps through the rollout."""
    rollout, step, value = collected.rollout, jax.jit(network.step), jax.jit(network.value)
    carry, log_probs, values, follows = rollout.carry, [], [], []
    for t in range(len(rollout.reward)):
        carry, policy, here = step(params, carry, rollout.obs[t], rollout.reset[t])
        log_probs.append(policy.log_prob(rollout.action[t]))
        values.append(here)
        follows.append(value(params, carry, rollout.final_obs[t]))
    # Where the last episode goes on, what follows is what the next rollout starts from.
    last = value(params, carry, collected.actor.obs)
    np.testing.assert_allclose(np.where(rollout.done[-1], 0, follows[-1] - last), 0, atol=1e-5)
    return (np.asarray(x, np.float64) for x in (log_probs, values, follows))


@pytest.mark.parametrize(
    ("algorithm", "torso"),
    [
        pytest.param("impala", "mlp", marks=pytest.mark.slow),
        ("impala", "lstm"),
        ("appo", "mlp"),
        pytest.param("appo", "gru", marks=pytest.mark.slow),
    ],
)
def test_all_values_are_those_of_the_learner(algorithm, torso, begin, quickly):
    """Also of the observations at which the rollout ends or a time limit cuts an episode, as in the paper."""
    settings = {"standardise_advantages": False} if algorithm == "impala" else {}  # for the loss below
    program, state, collected = behind(algorithm, begin, quickly, lag=4, torso=torso, **settings)
    rollout, network, params = collected.rollout, program.algorithm.network, state.learner.params
    assert np.any(rollout.done & ~rollout.terminated)
    assert np.any(~rollout.done[-1])
    log_prob, values, follows = by_hand(network, params, collected)
    ratio = np.exp(log_prob - np.asarray(rollout.log_prob))
    targets, advantages = numpy_vtrace(rollout._replace(next_value=follows), values, ratio, COEF)
    _, _, older_follows = by_hand(network, state.acting, collected)
    assert np.median(np.abs(older_follows - follows)) > 1e-3

    coef = {name: jnp.float32(value) for name, value in {**COEF, "clip_range": 0.2}.items()}
    if algorithm == "appo":  # whose target network is the learner's before the update
        samples, _ = jax.jit(program.algorithm.samples, compiler_options=quickly)(state.learner, rollout, coef)
        np.testing.assert_allclose(samples.advantage, advantages, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(samples.target, targets, rtol=1e-3, atol=1e-4)
        return
    loss = jax.jit(program.algorithm.loss, compiler_options=quickly)
    _, metrics = loss(params, rollout, coef, jax.random.key(0))
    expected = {
        "loss/policy": -(advantages * log_prob).mean(),
        "loss/value": ((values - targets) ** 2).mean() / 2,
        "advantage/mean": advantages.mean(),
        "return/mean": targets.mean(),
        "value/mean": values.mean(),
    }
    assert {name: float(metrics[name]) for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("algorithm", ["impala", "appo"])
def test_without_lag_the_values_are_those_of_the_rollout(algorithm, begin, quickly):
    """The policy that acted is the learner's: its values serve, bit for bit, and no final observations are stored."""
    program, state, collected = behind(algorithm, begin, quickly, lag=0)
    rollout, values = collected.rollout, collected.rollout.value
    assert program.needs == {"value"}
    assert rollout.final_obs == ()
    carry = program.algorithm.network.initial_carry((4,))
    found = program.algorithm.next_values(state.learner.params, rollout, carry, values)
    np.testing.assert_array_equal(found, rollout.next_value)


def test_a_lag_below_zero_is_refused():
    with pytest.raises(InputError, match="lag is -1; it must be 0 or more"):
        impala.Config(lag=-1)
