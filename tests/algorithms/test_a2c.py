"""A2C: its loss, its returns and its one gradient step against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.algorithms import a2c
from lehr.errors import InputError
from tests.algorithms.rollouts import (
    assert_params_close,
    assert_step_goes_down,
    assert_steps_not_taken_teach_nothing,
    begun,
    distance,
    learned_from,
    lived,
    made_up,
    network_of,
    numpy_gae,
    of_actions,
    outputs,
)

COEF = {"learning_rate": 0.1, "entropy_coef": 0.03, "value_coef": 0.7, "discount": 0.9, "gae_lambda": 0.8}


def algorithm_of(torso="mlp", **settings):
    defaults = {"optimiser": "sgd", "max_grad_norm": None, "standardise_advantages": False}
    return a2c.Algorithm(a2c.Config(**{**defaults, **settings}), network_of(torso)[0])


def learn(algorithm, rollout, torso="mlp", **coef):
    return learned_from(algorithm, rollout, {**COEF, **coef}, torso)


@pytest.mark.parametrize("standardised", [False, True])
@pytest.mark.parametrize("torso", ["mlp", "gru"])
def test_the_losses_are_those_of_their_formulas(torso, standardised):
    rollout = lived(torso)
    after, metrics = learn(algorithm_of(torso, standardise_advantages=standardised), rollout, torso)
    log_probs, values = outputs(torso)
    advantages, targets = numpy_gae(rollout, COEF["discount"], COEF["gae_lambda"])
    weighed = (advantages - advantages.mean()) / advantages.std() if standardised else advantages
    policy, value = -(weighed * of_actions(log_probs, rollout)).mean(), ((values - targets) ** 2).mean() / 2
    entropy = -(np.exp(log_probs) * log_probs).sum(-1).mean()
    log_ratio = of_actions(outputs(torso, after)[0] - log_probs, rollout)
    expected = {
        "loss/policy": policy,
        "loss/value": value,
        "loss/entropy": -COEF["entropy_coef"] * entropy,
        "loss/total": policy + COEF["value_coef"] * value - COEF["entropy_coef"] * entropy,
        "policy/entropy": entropy,
        "policy/approximate_kl": (np.exp(log_ratio) - 1 - log_ratio).mean(),  # of the policy after the step
        "advantage/mean": advantages.mean(),
        "return/mean": targets.mean(),
    }
    assert expected["policy/approximate_kl"] > 1e-5
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_with_lambda_1_the_targets_are_n_step_returns():
    """Rewards up to the end of the episode or the rollout, then the value of what followed if it did not terminate."""
    rollout = made_up()
    values = jnp.concatenate([rollout.value[1:], rollout.next_value[-1:]])
    rollout = rollout._replace(next_value=jnp.where(rollout.done, rollout.next_value, values))  # as in a real one
    reward, following, terminated, done = map(
        np.asarray, (rollout.reward, rollout.next_value, rollout.terminated, rollout.done)
    )
    targets = np.zeros(reward.shape)
    for start, env in np.ndindex(*reward.shape):
        for t in range(start, len(reward)):
            targets[start, env] += 0.9 ** (t - start) * reward[t, env]
            if done[t, env] or t == len(reward) - 1:
                targets[start, env] += 0.9 ** (t - start + 1) * following[t, env] * (1 - terminated[t, env])
                break
    _, metrics = learn(algorithm_of(), rollout, gae_lambda=1.0)
    assert metrics["return/mean"] == pytest.approx(targets.mean(), rel=1e-4)
    _, values = outputs()
    assert metrics["loss/value"] == pytest.approx(((values - targets) ** 2).mean() / 2, rel=1e-4)


def test_a_step_goes_down_the_gradient_of_the_loss_that_is_reported():
    assert_step_goes_down(algorithm_of(), made_up(), COEF)


def test_the_gradient_of_the_last_layer_is_that_of_the_formula():
    """Of its biases: ∂L/∂logit_i = −A (1[a = i] − p_i) + entropy_coef p_i (log p_i + H), ∂L/∂V = value_coef (V − R)."""
    rollout = made_up()
    params, _ = learn(algorithm_of(), rollout, learning_rate=1.0)
    before = network_of()[1]
    log_probs, values = outputs()
    advantages, targets = numpy_gae(rollout, COEF["discount"], COEF["gae_lambda"])
    probs, taken = np.exp(log_probs), np.eye(3)[np.asarray(rollout.action)]
    entropy = -(probs * log_probs).sum(-1, keepdims=True)
    logits = -advantages[..., None] * (taken - probs) + COEF["entropy_coef"] * probs * (log_probs + entropy)
    found = before["policy_head"]["logits"]["bias"] - params["policy_head"]["logits"]["bias"]
    np.testing.assert_allclose(found, logits.mean((0, 1)), rtol=1e-3, atol=1e-5)
    found = before["value_head"]["bias"] - params["value_head"]["bias"]
    np.testing.assert_allclose(found, [COEF["value_coef"] * (values - targets).mean()], rtol=1e-3)


def test_an_update_is_one_step_on_the_whole_rollout():
    """The order of the environments does not matter, and the optimiser has counted one step."""
    algorithm, rollout = algorithm_of(optimiser="adam"), made_up()
    backwards = jax.tree.map(lambda x: x[:, ::-1], rollout._replace(carry=()))._replace(carry=rollout.carry)
    assert_params_close(learn(algorithm, backwards)[0], learn(algorithm, rollout)[0], rtol=1e-3)
    learner = begun(algorithm, network_of()[1])
    learner, _ = jax.jit(algorithm.learn)(learner, rollout, COEF, jax.random.key(0))
    (count,) = [leaf for leaf in jax.tree.leaves(learner.optimiser) if leaf.dtype == "int32"]
    assert count == 1


def test_the_norm_of_the_gradient_is_limited():
    params, metrics = learn(algorithm_of(max_grad_norm=0.01), made_up(), max_grad_norm=0.01)
    assert metrics["gradient/norm"] > 0.1
    assert distance(params, network_of()[1]) == pytest.approx(COEF["learning_rate"] * 0.01, rel=1e-3)


@pytest.mark.parametrize("torso", ["mlp", "gru"])
def test_what_is_not_valid_teaches_nothing(torso):
    assert_steps_not_taken_teach_nothing(algorithm_of(torso, standardise_advantages=True), COEF, torso)


def test_a_rollout_without_steps_is_refused():
    with pytest.raises(InputError, match="horizon is 0; it must be 1 or more"):
        a2c.Config(horizon=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"optimiser": "muon", "shared": True}, {"distribution": "tanh_normal", "torso": "lstm", "critic_torso": "mlp"}],
    ids=["muon", "squashed actions"],
)
def test_options_run(settings, begin, advance):
    """At first, σ is half the width of Pendulum's Box, -2 to 2, unless actions are squashed into it."""
    run = advance(begin("a2c", "Pendulum-v1", **settings), 4)
    for name, column in run.metrics.items():
        assert name.startswith("episode/") or np.isfinite(column).all(), name
    assert run.metrics["policy/std"][0] == pytest.approx(1 if "distribution" in settings else 2, abs=0.1)
