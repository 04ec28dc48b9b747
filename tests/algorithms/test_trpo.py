"""TRPO: its direction against a dense Fisher matrix, its line search by what it must do, its values apart from it all."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from lehr.algorithms import trpo
from lehr.errors import InputError
from lehr.networks import NetworkConfig, actor_critic
from lehr.spaces import Box, Discrete
from tests.algorithms.rollouts import (
    assert_steps_not_taken_teach_nothing,
    begun,
    learned_from,
    lived,
    made_up,
    network_of,
    numpy_gae,
    of_actions,
    outputs,
)

COEF = {
    "target_kl": 0.001,
    "damping": 0.05,
    "line_search_shrink": 0.5,
    "entropy_coef": 0.0,
    "value_learning_rate": 0.01,
    "discount": 0.9,
    "gae_lambda": 0.8,
}


def algorithm_of(network=None, torso="mlp", **settings):
    defaults = {"conjugate_steps": 80, "value_epochs": 1, "value_minibatches": 1}
    return trpo.Algorithm(trpo.Config(**{**defaults, **settings}), network or network_of(torso)[0])


def learn(algorithm, rollout, torso="mlp", params=None, **coef):
    return learned_from(algorithm, rollout, {**COEF, **coef}, torso, params)


def identical(one, other):
    return jax.tree.all(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), one, other))


def standardised(rollout):
    advantages, targets = numpy_gae(rollout, COEF["discount"], COEF["gae_lambda"])
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8), targets


# The direction -------------------------------------------------------------------------------------------------------


def numpy_fisher(policy):
    """The Fisher information `[B, K, K]` of each policy's K outputs, from the formulas of the distributions."""
    name = type(policy).__name__
    if name in ("Normal", "TanhNormal"):  # 1/σ² for a mean and 2 for a log σ; squashing changes neither
        diagonal = np.exp(-2 * np.float64(policy.log_std)), np.full(policy.log_std.shape, 2.0)
        return np.concatenate(diagonal, -1)[..., None] * np.eye(2 * policy.mean.shape[-1])
    sizes = getattr(policy, "nvec", policy.logits.shape[-1:])
    fisher = np.zeros((*policy.logits.shape, policy.logits.shape[-1]))
    for k, size in enumerate(sizes):  # diag(p) − p pᵀ for each choice
        part = slice(sum(sizes[:k]), sum(sizes[: k + 1]))
        probs = np.exp(np.float64(policy.logits[..., part]))
        probs /= probs.sum(-1, keepdims=True)
        fisher[..., part, part] = probs[..., None] * np.eye(size) - probs[..., None] * probs[..., None, :]
    return fisher


@cache
def dense(torso, actions, **settings):
    """The start `[P]`, the gradient `[P]` and the Fisher information `[P, P]` of a rollout, in float64."""
    network, params = network_of(torso, actions, **settings)
    rollout = lived(torso, actions, **settings)
    actor, critic = network.split(params)
    start, unravel = ravel_pytree(actor)

    def policy_of(parameters):
        params = network.merge(unravel(parameters), critic)
        policy = network.unroll(params, rollout.carry, rollout.obs, rollout.reset)[1]
        flat = [leaf.reshape(-1, leaf.shape[-1]) for leaf in jax.tree.leaves(policy)]
        return jnp.concatenate(flat, -1), policy.log_prob(rollout.action).ravel(), policy

    (jacobian, slopes, _), (_, _, policy) = jax.jit(lambda x: (jax.jacobian(policy_of)(x), policy_of(x)))(start)
    jacobian, slopes = np.float64(jacobian), np.float64(slopes)
    gradient = standardised(rollout)[0].ravel() @ slopes / len(slopes)
    outputs = numpy_fisher(jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), policy))
    fisher = np.einsum("bip,bij,bjq->pq", jacobian, outputs, jacobian) / len(jacobian)
    return np.float64(start), gradient, fisher


def natural_step(torso="mlp", actions="discrete", target_kl=COEF["target_kl"], damping=COEF["damping"], **settings):
    """The actor's parameters `[P]`, and the full step from them: F⁻¹ g, as long as the quadratic model allows."""
    start, gradient, fisher = dense(torso, actions, **settings)
    damped = fisher + damping * np.eye(len(start))
    direction = np.linalg.solve(damped, gradient)
    return start, np.sqrt(2 * target_kl / (direction @ damped @ direction)) * direction


@pytest.mark.parametrize(
    ("torso", "actions", "settings"),
    [
        ("mlp", "discrete", {}),
        ("gru", "discrete", {}),
        pytest.param("mlp", "multidiscrete", {}, marks=pytest.mark.slow),
        ("mlp", "box", {}),
        pytest.param(
            "mlp", "box", {"distribution": "tanh_normal", "state_dependent_std": True}, marks=pytest.mark.slow
        ),
        pytest.param("mingru", "box", {"critic_torso": "mlp"}, marks=pytest.mark.slow),
    ],
    ids=["discrete", "recurrent", "multidiscrete", "box", "squashed", "recurrent box"],
)
def test_the_step_is_the_natural_gradient_of_a_dense_fisher_matrix(torso, actions, settings):
    network, params = network_of(torso, actions, **settings)
    after, metrics = learn(algorithm_of(network), lived(torso, actions, **settings), params=params)
    start, step = natural_step(torso, actions, **settings)
    found = np.float64(ravel_pytree(network.split(after)[0])[0]) - start
    assert metrics["trust_region/accepted"] == 1
    assert metrics["trust_region/residual"] < 1e-3
    expected = step * COEF["line_search_shrink"] ** metrics["trust_region/backtracks"]
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)
    assert metrics["gradient/norm"] == pytest.approx(np.linalg.norm(dense(torso, actions, **settings)[1]), rel=1e-3)


def test_damping_turns_the_step_toward_the_plain_gradient():
    network, _ = network_of()
    start, gradient, _ = dense("mlp", "discrete")

    def alignment(damping):
        after, _ = learn(algorithm_of(), lived(), damping=damping)
        moved = np.float64(ravel_pytree(network.split(after)[0])[0]) - start
        return moved @ gradient / np.linalg.norm(moved) / np.linalg.norm(gradient)

    assert alignment(0.01) < 0.9
    assert alignment(100.0) > 0.999


def test_conjugate_gradients_solve_and_say_what_is_left():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(20, 20))
    matrix, target = jnp.float32(root @ root.T / 20 + np.eye(20)), jnp.float32(rng.normal(size=20))
    for steps in (3, 30):
        solution, residual = trpo.conjugate_gradients(lambda vector: matrix @ vector, target, steps)
        np.testing.assert_allclose(residual, target - matrix @ solution, atol=1e-5)
    np.testing.assert_allclose(solution, np.linalg.solve(matrix, target), rtol=1e-3, atol=1e-5)
    nothing, _ = trpo.conjugate_gradients(lambda vector: matrix @ vector, jnp.zeros(20), 5)
    assert identical(nothing, jnp.zeros(20))


# The line search -----------------------------------------------------------------------------------------------------


def test_a_step_that_is_too_large_is_shortened_until_the_divergence_allows_it():
    after, metrics = learn(algorithm_of(), lived(), target_kl=1.5, damping=1e-3)
    start, step = natural_step(target_kl=1.5, damping=1e-3)
    backtracks = metrics["trust_region/backtracks"]
    assert metrics["trust_region/accepted"] == 1
    assert backtracks >= 1
    assert metrics["trust_region/kl_full_step"] > 1.5
    found = np.float64(ravel_pytree(network_of()[0].split(after)[0])[0]) - start
    assert np.linalg.norm(found) == pytest.approx(0.5**backtracks * np.linalg.norm(step), rel=0.05)
    # What is reported is the divergence and the gain that NumPy finds between the policies before and after.
    before, now = outputs()[0], outputs(params=after)[0]
    divergence = (np.exp(before) * (before - now)).sum(-1).mean()
    advantages, _ = standardised(lived())
    gain = (np.exp(of_actions(now - before, lived())) * advantages).mean() - advantages.mean()
    assert metrics["trust_region/kl"] == pytest.approx(divergence, rel=1e-3)
    assert metrics["trust_region/kl"] <= 1.5
    assert metrics["trust_region/gain"] == pytest.approx(gain, rel=1e-3)
    assert gain > 0


def test_a_policy_for_which_nothing_is_found_stays_as_it_is_to_the_last_bit():
    network, params = network_of()
    actor, critic = network.split(params)
    after, metrics = learn(algorithm_of(line_search_steps=1), lived(), target_kl=1.5, damping=1e-3)
    assert metrics["trust_region/accepted"] == 0
    assert metrics["trust_region/backtracks"] == 1
    assert metrics["trust_region/kl"] == metrics["trust_region/gain"] == 0
    assert identical(network.split(after)[0], actor)
    assert not identical(network.split(after)[1], critic)


def test_without_a_gain_no_step_is_taken():
    """With no reward and perfect values there is nothing to gain anywhere; nothing is divided by 0."""
    zeros = jnp.zeros_like(lived().reward)
    rollout = lived()._replace(reward=zeros, value=zeros, next_value=zeros)
    after, metrics = learn(algorithm_of(), rollout)
    assert metrics["trust_region/accepted"] == 0
    assert all(np.isfinite(value) for value in metrics.values())
    assert identical(network_of()[0].split(after)[0], network_of()[0].split(network_of()[1])[0])


@pytest.mark.parametrize(("env", "target_kl"), [("CartPole-v1", 0.01), ("CartPole-v1", 1.0), ("Pendulum-v1", 0.3)])
def test_no_accepted_step_leaves_the_trust_region(env, target_kl, begin, advance):
    run = advance(begin("trpo", env, target_kl=target_kl, damping=0.01), 30)
    kl, gain, accepted, backtracks = (
        run.metrics[f"trust_region/{name}"] for name in ("kl", "gain", "accepted", "backtracks")
    )
    still_learns = run.metrics["policy/entropy"] > 0.01  # after large steps, some seeds take one action for ever
    assert still_learns.sum() >= 5
    assert accepted[still_learns].mean() > 0.8
    assert (kl <= np.float32(target_kl)).all()
    assert (kl[accepted == 1] > 0).all()
    assert (gain[accepted == 1] > 0).all()
    assert (kl[accepted == 0] == 0).all()
    assert backtracks.max() > 0


# The losses and the values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torso", ["mlp", "gru"])
def test_the_losses_are_those_of_their_formulas(torso):
    """At the policy and the values that acted: with a rate of 0, all minibatches see the same values."""
    settings = {"value_epochs": 2, "value_minibatches": 4}
    rollout, coef = made_up(torso), {"entropy_coef": 0.03, "value_learning_rate": 0.0}
    after, metrics = learn(algorithm_of(torso=torso, **settings), rollout, torso, **coef)
    log_probs, values = outputs(torso)
    advantages, targets = standardised(rollout)
    acted = np.asarray(rollout.log_prob, np.float64)
    policy = -(np.exp(of_actions(log_probs, rollout) - acted) * advantages).mean()
    value, entropy = ((values - targets) ** 2).mean() / 2, -(np.exp(log_probs) * log_probs).sum(-1).mean()
    log_ratio = of_actions(outputs(torso, after)[0], rollout) - acted
    expected = {
        "loss/policy": policy,
        "loss/value": value,
        "loss/entropy": -0.03 * entropy,
        "loss/total": policy + value - 0.03 * entropy,
        "policy/entropy": entropy,
        "policy/approximate_kl": (np.exp(log_ratio) - 1 - log_ratio).mean(),
        "return/mean": targets.mean(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_the_entropy_bonus_keeps_the_policy_open():
    entropies = [learn(algorithm_of(), lived(), target_kl=0.05, entropy_coef=coef)[0] for coef in (0.0, 10.0)]
    closed, opened = (
        -(np.exp(log_probs) * log_probs).sum(-1).mean() for log_probs in (outputs(params=p)[0] for p in entropies)
    )
    assert opened > closed + 0.05


@pytest.mark.parametrize(
    ("torso", "settings"),
    [("mlp", {}), ("gru", {}), pytest.param("gru", {"critic_torso": "mlp"}, marks=pytest.mark.slow)],
    ids=["mlp", "recurrent", "recurrent actor"],
)
def test_values_are_fitted_without_touching_the_policy_and_the_other_way_round(torso, settings):
    """Also by an optimiser that pulls every parameter it knows toward 0."""
    network, params = network_of(torso, **settings)
    actor, critic = network.split(params)
    refused = algorithm_of(network, optimiser="adamw", line_search_steps=1, value_epochs=20)
    after, metrics = learn(refused, lived(torso, **settings), params=params, target_kl=3.0, damping=1e-3)
    found = network.split(after)
    assert metrics["trust_region/accepted"] == 0
    assert identical(found[0], actor)
    assert not identical(found[1], critic)
    after, metrics = learn(algorithm_of(network), lived(torso, **settings), params=params, value_learning_rate=0.0)
    found = network.split(after)
    assert metrics["trust_region/accepted"] == 1
    assert not identical(found[0], actor)
    assert identical(found[1], critic)


def test_actor_and_critic_must_not_share_a_torso():
    network, params = actor_critic(Box(-1, 1, (3,)), Discrete(3), NetworkConfig(shared=True), jax.random.key(0))
    with pytest.raises(InputError, match="shared is True, but this algorithm trains actor and critic separately; set"):
        begun(algorithm_of(network), params)


@pytest.mark.parametrize("torso", ["mlp", "gru"])
def test_what_is_not_valid_teaches_nothing(torso):
    assert_steps_not_taken_teach_nothing(algorithm_of(torso=torso), {**COEF, "target_kl": 0.05}, torso)


@pytest.mark.slow
def test_options_run(begin, advance):
    settings = {"distribution": "tanh_normal", "state_dependent_std": True, "optimiser": "muon"}
    run = advance(begin("trpo", "Pendulum-v1", entropy_coef=0.01, **settings), 4)
    for name, column in run.metrics.items():
        assert name.startswith("episode/") or np.isfinite(column).all(), name
