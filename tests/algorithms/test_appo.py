"""APPO: its ratios, its target network and its penalty, against PPO and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.algorithms import appo, ppo
from lehr.errors import InputError
from lehr.maths.advantages import vtrace_of
from lehr.training.iteration import iteration
from tests.algorithms.rollouts import (
    assert_params_close,
    assert_steps_not_taken_teach_nothing,
    begun,
    compiled,
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
    "clip_range": 0.2,
    "discount": 0.9,
    "gae_lambda": 0.8,
    "rho_clip": 1.2,
    "c_clip": 0.9,
    "policy_rho_clip": 1.1,
}


def algorithm_of(torso="mlp", **settings):
    defaults = {"optimiser": "sgd", "max_grad_norm": None, "epochs": 1, "minibatches": 1}
    return appo.Algorithm(appo.Config(**{**defaults, **settings}), network_of(torso)[0])


def values_of(coef):
    return {name: jnp.float32(value) for name, value in coef.items()}


def learn(algorithm, rollout, torso="mlp", target=None, **coef):
    """The learner and the metrics after one update; `target` stands for the parameters of the target network."""
    learner = begun(algorithm, network_of(torso)[1])
    if target is not None:
        learner = learner._replace(auxiliary=learner.auxiliary._replace(params=target))
    learner, metrics = compiled(algorithm)(learner, rollout, values_of({**COEF, **coef}), jax.random.key(0))
    return learner, {name: float(value) for name, value in metrics.items()}


def older(scale=0.3):
    """Parameters that differ from the network's."""
    rng = np.random.default_rng(7)
    return jax.tree.map(lambda x: x + scale * jnp.float32(rng.normal(size=x.shape)), network_of()[1])


def test_the_losses_are_those_of_their_formulas():
    rollout, target = made_up(), older()
    _, metrics = learn(algorithm_of(standardise_advantages=False), rollout, target=target, kl_coef=0.5)
    log_probs, values = outputs()
    target_log_probs, _ = outputs(params=target)
    log_prob, target_log_prob = of_actions(log_probs, rollout), of_actions(target_log_probs, rollout)
    behaviour = np.asarray(rollout.log_prob)
    # V-trace is tested against NumPy elsewhere; here it is what it is given that counts.
    known, log_ratio = jnp.float32(values), jnp.float32(target_log_prob - behaviour)
    found = vtrace_of(rollout, known, next_values(rollout, known), log_ratio, values_of(COEF))
    targets, advantages = (np.asarray(x) for x in found)
    ratio = np.exp(log_prob - target_log_prob)
    assert (np.abs(ratio - 1) > 0.2).mean() > 0.1
    clipped = np.clip(ratio, 0.8, 1.2)
    policy = -np.minimum(ratio * advantages, clipped * advantages).mean()
    value = ((values - targets) ** 2).mean() / 2
    entropy = -(np.exp(log_probs) * log_probs).sum(-1).mean()
    divergence = (np.exp(target_log_probs) * (target_log_probs - log_probs)).sum(-1).mean()
    corrected = np.exp(target_log_prob - behaviour)
    expected = {
        "loss/policy": policy,
        "loss/value": value,
        "loss/kl": 0.5 * divergence,
        "loss/total": policy + 0.7 * value - 0.03 * entropy + 0.5 * divergence,
        "policy/kl": divergence,
        "policy/ratio": ratio.mean(),
        "vtrace/ratio": corrected.mean(),
        "vtrace/ratio_distance": np.abs(corrected - 1).mean(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_without_lag_and_clips_it_is_ppo():
    """With the target network fresh, a lambda of 1 and the actor's own values, V-trace is GAE and APPO is PPO."""
    coef = {"rho_clip": 1e9, "c_clip": 1e9, "policy_rho_clip": 1e9, "gae_lambda": 1.0}
    sizes = {"epochs": 2, "minibatches": 2, "optimiser": "adam"}
    rollout = lived()
    values = jnp.float32(outputs()[1])
    rollout = rollout._replace(value=values, next_value=next_values(rollout, values))
    learner, _ = learn(algorithm_of(**sizes), rollout, **coef)
    other = ppo.Algorithm(ppo.Config(max_grad_norm=None, **sizes), network_of()[0])
    expected, _ = compiled(other)(
        begun(other, network_of()[1]), rollout, values_of({**COEF, "gae_lambda": 1.0}), jax.random.key(0)
    )
    assert_params_close(learner.params, expected.params, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("every", [1, 3])
def test_the_target_network_is_refreshed_every_so_many_updates_and_never_in_between(every, begin, quickly):
    run = begin("appo", "CartPole-v1", target_updates=every, num_envs=4, horizon=4, learning_rate=0.01)
    advance = jax.jit(lambda state: iteration(run.program, state), compiler_options=quickly)
    state, expected = run.state, run.state.learner.params
    for number in range(1, 8):
        state, metrics = advance(state)
        assert float(metrics["target/age"]) == (number - 1) % every
        if number % every == 0:
            expected = state.learner.params
        same = jax.tree.map(lambda x, y: np.array_equal(x, y), state.learner.auxiliary.params, expected)
        assert all(jax.tree.leaves(same))


def test_a_penalty_keeps_the_policy_near_the_target_network():
    settings = {"epochs": 20, "optimiser": "adam", "standardise_advantages": False}
    kept = [
        learn(algorithm_of(**settings), lived(), clip_range=1e9, learning_rate=0.02, kl_coef=coef)[1]["policy/kl"]
        for coef in (0.0, 30.0)
    ]
    assert kept[1] < 0.3 * kept[0]


def test_an_adaptive_penalty_grows_while_the_divergence_is_above_its_target(begin, advance):
    settings = {"kl_coef": "kl_penalty(1, target=1e-6)", "learning_rate": 0.01}
    metrics = advance(begin("appo", "CartPole-v1", **settings), 6).metrics
    assert (metrics["policy/kl"] > 1.5e-6).all()
    assert metrics["coef/kl_coef"].tolist() == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("torso", ["mlp", "gru"])
def test_steps_that_were_not_taken_teach_nothing(torso):
    assert_steps_not_taken_teach_nothing(algorithm_of(torso), COEF, torso)


def test_counts_are_checked():
    with pytest.raises(InputError, match="target_updates is 0; it must be 1 or more"):
        appo.Config(target_updates=0)
