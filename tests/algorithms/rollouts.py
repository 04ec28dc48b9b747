"""Rollouts of random numbers, and what NumPy makes of them: what the tests of single algorithms share."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.maths.minibatches import prioritised, prioritised_draws
from lehr.networks import NetworkConfig, actor_critic
from lehr.spaces import Box, Discrete, MultiDiscrete
from lehr.types import Rollout

STEPS, SEGMENTS = 6, 8
COEF = {
    "learning_rate": 0.1,
    "entropy_coef": 0.03,
    "value_coef": 0.7,
    "clip_range": 0.1,
    "discount": 0.9,
    "gae_lambda": 0.8,
}
"""Of PPO."""
OBSERVATIONS = Box(-1, 1, (3,))
ACTIONS = {"discrete": Discrete(3), "multidiscrete": MultiDiscrete((2, 3)), "box": Box(-1, 1, (2,))}


@cache
def network_of(torso="mlp", actions="discrete", **settings):
    """A network, and parameters with a policy that is not uniform, as a new one's is."""
    config = NetworkConfig(torso=torso, hidden_sizes=(8,), recurrent_size=4, **settings)
    network, params = actor_critic(OBSERVATIONS, ACTIONS[actions], config, jax.random.key(0))
    head = {
        name: {**layer, "kernel": 100 * layer["kernel"]} if isinstance(layer, dict) else layer
        for name, layer in params["policy_head"].items()
    }
    return network, {**params, "policy_head": head}


@cache
def made_up(torso="mlp", scale=1.0):
    """A rollout of random numbers: every policy and value differs from that of the network."""
    rng = np.random.default_rng(0)
    shape = STEPS, SEGMENTS
    network, _ = network_of(torso)
    terminated = rng.random(shape) < 0.15
    done = terminated | (rng.random(shape) < 0.1)
    carry = jax.tree.map(lambda x: jnp.float32(rng.normal(size=x.shape)), network.initial_carry((SEGMENTS,)))
    return Rollout(
        obs=jnp.float32(rng.normal(size=(*shape, 3))),
        action=jnp.int32(rng.integers(3, size=shape)),
        log_prob=jnp.float32(np.log(rng.uniform(0.2, 0.5, size=shape))),
        reward=jnp.float32(scale * rng.normal(size=shape)),
        value=jnp.float32(rng.normal(size=shape)),
        next_value=jnp.float32(rng.normal(size=shape)),
        terminated=jnp.asarray(terminated),
        done=jnp.asarray(done),
        reset=jnp.asarray(np.concatenate([rng.random((1, SEGMENTS)) < 0.5, done[:-1]])),
        valid=(),
        carry=carry,
    )


@cache
def lived(torso="mlp", actions="discrete", **settings):
    """A rollout whose actions and log probabilities are the network's, as in the first minibatch of an update."""
    network, params = network_of(torso, actions, **settings)
    rollout = made_up(torso)

    @jax.jit
    def act():
        _, policy, _ = network.unroll(params, rollout.carry, rollout.obs, rollout.reset)
        action = rollout.action if actions == "discrete" else policy.sample(jax.random.key(1))
        return action, policy.log_prob(action)

    action, log_prob = act()
    return rollout._replace(action=action, log_prob=log_prob)


@cache
def compiled(algorithm):
    """How an algorithm learns, compiled quickly: it is run once or twice."""
    return jax.jit(algorithm.learn, compiler_options={"xla_backend_optimization_level": 0})


def begun(algorithm, params, rollout=None):
    """A learner with these parameters, for rollouts like this one."""
    example = jax.eval_shape(lambda x: x, made_up() if rollout is None else rollout)
    return algorithm.init(jax.random.key(0), params, example)


def learned_from(algorithm, rollout, coef, torso="mlp", params=None):
    """Parameters and metrics after one update."""
    values = {name: jnp.float32(value) for name, value in coef.items()}
    learner = begun(algorithm, network_of(torso)[1] if params is None else params, rollout)
    learner, metrics = compiled(algorithm)(learner, rollout, values, jax.random.key(0))
    return learner.params, {name: float(value) for name, value in metrics.items()}


def outputs(torso="mlp", params=None):
    """Log probabilities `[T, N, A]` and values `[T, N]` that the network gives for the made-up rollout, in float64."""
    network, initial = network_of(torso)
    rollout = made_up(torso)
    _, policy, value = jax.jit(network.unroll)(
        initial if params is None else params, rollout.carry, rollout.obs, rollout.reset
    )
    logits = np.asarray(policy.logits, np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True)), np.asarray(value, np.float64)


def of_actions(log_probs, rollout):
    """The log probabilities `[T, N]` of the actions that were taken."""
    return np.take_along_axis(log_probs, np.asarray(rollout.action)[..., None], -1)[..., 0]


def next_values(rollout, values):
    """The values that follow: inside an episode those of the learner, else those in the rollout."""
    follows = jnp.concatenate([values[1:], rollout.next_value[-1:]])
    return jnp.where(rollout.done, rollout.next_value, follows)


def numpy_gae(rollout, discount, gae_lambda, rho=None, c=None):
    """Advantages and value targets by a loop from the end; with ratios, those of V-trace."""
    reward, value, next_value, terminated, done = (
        np.asarray(x, np.float64)
        for x in (rollout.reward, rollout.value, rollout.next_value, rollout.terminated, rollout.done)
    )
    rho, c = (np.ones_like(reward) if ratio is None else ratio for ratio in (rho, c))
    advantages, following = np.zeros_like(reward), np.zeros(reward.shape[1])
    for t in reversed(range(len(reward))):
        error = rho[t] * (reward[t] + discount * (1 - terminated[t]) * next_value[t] - value[t])
        following = error + discount * gae_lambda * c[t] * (1 - done[t]) * following
        advantages[t] = following
    return advantages, advantages + value


def inclusion(p: np.ndarray, size: int) -> np.ndarray:
    """min(1, c p), with c found by bisection, so that they sum to the size."""
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * p).sum() < size else (low, middle)
    return np.minimum(1, high * p)


def drawn(step, steps, priorities, exponent, beta, size):
    """The segments of one of an update's minibatches, as the key decides, and their weights, from their formula."""
    draw_key, _ = jax.random.split(jax.random.key(0))  # the key of `learned_from`
    draw = jax.tree.map(lambda leaf: leaf[step], prioritised_draws(draw_key, len(priorities), steps, False))
    indices = np.asarray(prioritised(draw, jnp.float32(priorities), exponent, beta, size)[0])
    powers = priorities**exponent
    return indices, (size / len(powers) / inclusion(powers / powers.sum(), size))[indices] ** beta


# What must hold ------------------------------------------------------------------------------------------------------


def assert_params_close(found, expected, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), found, expected)


def distance(one, other):
    """‖θ − θ'‖ of two sets of parameters."""
    squares = jax.tree.map(lambda x, y: float(jnp.sum((x - y) ** 2)), one, other)
    return np.sqrt(sum(jax.tree.leaves(squares)))


def assert_step_goes_down(algorithm, rollout, coef):
    """One step of sgd is the gradient of the loss that is reported, by its difference along a random direction."""
    params = network_of()[1]
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    direction = structure.unflatten([jnp.float32(rng.normal(size=leaf.shape)) for leaf in leaves])
    after, metrics = learned_from(algorithm, rollout, {**coef, "learning_rate": 1.0})
    slope = -sum(jax.tree.leaves(jax.tree.map(lambda a, p, d: float(jnp.vdot(a - p, d)), after, params, direction)))
    moved = [jax.tree.map(lambda p, d, s=sign: p + s * 3e-3 * d, params, direction) for sign in (1, -1)]
    losses = [learned_from(algorithm, rollout, coef, params=place)[1]["loss/total"] for place in moved]
    assert slope == pytest.approx((losses[0] - losses[1]) / 6e-3, rel=0.02)
    assert metrics["gradient/norm"] == pytest.approx(distance(after, params), rel=1e-3)


def assert_steps_not_taken_teach_nothing(algorithm, coef, torso):
    """Whatever stands in steps that were not taken, the update is the same; in others it is not."""
    # As in a run, a step that was not taken ends an episode, and nothing before it looks behind it.
    valid = np.random.default_rng(5).random((STEPS, SEGMENTS)) < 0.8
    rollout = lived(torso)
    ends = rollout.done | ~valid | jnp.concatenate([~jnp.asarray(valid[1:]), jnp.zeros((1, SEGMENTS), bool)])
    reset = jnp.concatenate([rollout.reset[:1], ends[:-1]])
    rollout = rollout._replace(valid=jnp.asarray(valid), done=ends, reset=reset)
    other = rollout._replace(
        reward=jnp.where(valid, rollout.reward, 100.0),
        value=jnp.where(valid, rollout.value, -50.0),
        action=jnp.where(valid, rollout.action, 2),
        log_prob=jnp.where(valid, rollout.log_prob, -3.0),
    )
    params, metrics = learned_from(algorithm, rollout, coef, torso)
    found, found_metrics = learned_from(algorithm, other, coef, torso)
    assert_params_close(found, params)
    assert found_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5)
    counted, _ = learned_from(algorithm, other._replace(valid=()), coef, torso)
    assert any(jax.tree.leaves(jax.tree.map(lambda x, y: bool(jnp.abs(x - y).max() > 1e-3), counted, params)))
