"""The classic tasks against Gymnasium itself."""

import functools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.envs import AutoReset, make
from lehr.envs.builtin.classic import CartPole
from lehr.spaces import Discrete, from_gymnasium

PUSH = {
    "CartPole-v1": [0.1, 0.3, 1, 1],  # balances until the time limit
    "Pendulum-v1": [0, 0, 1],  # the others push along a velocity, which swings up to the goal
    "Acrobot-v1": [0, 0, 0, 0, 0, 1],
    "MountainCar-v0": [0, 1],
    "MountainCarContinuous-v0": [0, 1],
}
STEPS = 10_000


def rollout(name, pushed):
    """10,000 steps as NumPy arrays: state before, action, timestep.

    Actions are random, except for a share `pushed` of them that go by the sign of a sum of the observation.
    """
    env = AutoReset(make(name))
    weights = jnp.array(PUSH[name], jnp.float32)

    def step(carry, key):
        state, obs = carry
        action_key, push_key, step_key = jax.random.split(key, 3)
        action = env.action_space.sample(action_key)
        onward = obs @ weights > 0
        if isinstance(env.action_space, Discrete):
            along = jnp.where(onward, env.action_space.n - 1, 0)
        else:
            along = jnp.where(onward, env.action_space.high, env.action_space.low)
        action = jnp.where(jax.random.uniform(push_key) < pushed, along, action).astype(action.dtype)
        next_state, timestep = env.step(step_key, state, action)
        return (next_state, timestep.obs), (state, action, timestep)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})  # as users have it
    def run(key):
        return jax.lax.scan(step, env.reset(key), jax.random.split(key, STEPS))[1]

    return jax.tree.map(np.asarray, run(jax.random.key(0)))


def compare(name, recorded, resync):
    """The largest differences to Gymnasium, which takes over our state every `resync` steps of an episode."""
    states, actions, steps = recorded
    theirs = gymnasium.make(name, disable_env_checker=True)
    obs_error = reward_error = 0.0
    for t, (elapsed, action) in enumerate(zip(states.elapsed, actions, strict=True)):
        if elapsed == 0:
            theirs.reset(seed=0)
        if elapsed % resync == 0:
            theirs.unwrapped.state = np.array([leaf[t] for leaf in states.env_state], np.float64)
        obs, reward, terminated, truncated, _ = theirs.step(action)
        assert (terminated, truncated) == (steps.terminated[t], steps.truncated[t]), f"flags at step {t}"
        obs_error = max(obs_error, np.abs(obs - steps.info["final_obs"][t]).max())
        reward_error = max(reward_error, abs(reward - steps.reward[t]))
    return obs_error, reward_error


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("CartPole-v1", {"terminated", "truncated"}),
        ("Pendulum-v1", {"truncated"}),
        ("Acrobot-v1", {"terminated"}),
        ("MountainCar-v0", {"terminated"}),
        ("MountainCarContinuous-v0", {"terminated"}),
    ],
)
def test_every_step_equals_gymnasium_in_single_precision(name, ends):
    recorded = rollout(name, pushed=0.8)
    assert {flag for flag in ("terminated", "truncated") if getattr(recorded[2], flag).any()} >= ends
    obs_error, reward_error = compare(name, recorded, resync=1)
    assert obs_error < 1e-5
    assert reward_error < 1e-5


@pytest.mark.parametrize(
    ("name", "resync", "tolerance"),
    [
        ("CartPole-v1", 500, 1e-5),
        ("Pendulum-v1", 200, 1e-5),
        ("Acrobot-v1", 100, 1e-5),  # chaotic: within 500 steps even double precision drifts by 1e-5
        ("MountainCar-v0", 200, 1e-5),
        ("MountainCarContinuous-v0", 999, 5e-5),  # Gymnasium itself rounds its state to single precision here
    ],
)
def test_whole_episodes_equal_gymnasium_in_double_precision(name, resync, tolerance):
    with jax.enable_x64(True):
        recorded = rollout(name, pushed=0.0)
    assert recorded[2].info["final_obs"].dtype == np.float32
    assert recorded[2].truncated.any() == (name != "CartPole-v1")
    obs_error, reward_error = compare(name, recorded, resync)
    assert obs_error < tolerance
    assert reward_error < tolerance


@pytest.mark.parametrize("name", PUSH)
def test_spaces_and_time_limit_equal_gymnasium(name):
    ours, theirs = make(name), gymnasium.make(name)
    assert ours.observation_space == from_gymnasium(theirs.observation_space)
    assert ours.action_space == from_gymnasium(theirs.action_space)
    assert ours.max_steps == theirs.spec.max_episode_steps


@functools.cache
def resets(name):
    """4,096 initial states `[4096, D]`."""
    states, _ = jax.jit(jax.vmap(make(name).reset))(jax.random.split(jax.random.key(0), 4096))
    return np.stack(states.env_state, axis=1)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("CartPole-v1", [-0.05] * 4, [0.05] * 4),
        ("Pendulum-v1", [-np.pi, -1], [np.pi, 1]),
        ("Acrobot-v1", [-0.1] * 4, [0.1] * 4),
        ("MountainCar-v0", [-0.6, 0], [-0.4, 0]),
        ("MountainCarContinuous-v0", [-0.6, 0], [-0.4, 0]),
    ],
)
def test_initial_states_are_uniform_as_in_gymnasium(name, low, high):
    states, low, high = resets(name), np.array(low), np.array(high)
    width = high - low
    assert np.all(states >= low - 1e-6)
    assert np.all(states <= high + 1e-6)
    np.testing.assert_allclose(states.mean(axis=0), (low + high) / 2, atol=0.03 * width.max())
    np.testing.assert_allclose(states.std(axis=0), width / np.sqrt(12), atol=0.02 * width.max())


def test_out_of_range_actions_are_clipped_as_in_gymnasium():
    for name in ("Pendulum-v1", "MountainCarContinuous-v0"):
        env, theirs = make(name), gymnasium.make(name, disable_env_checker=True)
        state, _ = env.reset(jax.random.key(3))
        theirs.reset(seed=0)
        theirs.unwrapped.state = np.array(state.env_state, np.float64)
        action = np.array([5.0], np.float32)
        _, timestep = env.step(jax.random.key(0), state, action)
        obs, reward, *_ = theirs.step(action)
        np.testing.assert_allclose(timestep.obs, obs, atol=1e-6)
        np.testing.assert_allclose(timestep.reward, reward, rtol=1e-6)


def test_hidden_cart_pole_shows_position_and_angle():
    env, full = make("CartPole-Hidden-v1"), make("CartPole-v1")
    state, obs = env.reset(jax.random.key(0))
    full_state, full_obs = full.reset(jax.random.key(0))
    np.testing.assert_array_equal(obs, full_obs[np.array([0, 2])])
    _, timestep = env.step(jax.random.key(0), state, 1)
    _, full_timestep = full.step(jax.random.key(0), full_state, 1)
    np.testing.assert_array_equal(timestep.obs, full_timestep.obs[np.array([0, 2])])
    assert env.observation_space.shape == (2,)
    assert env.max_steps == 500


def test_cart_pole_that_runs_its_full_length():
    """Within the limits it is CartPole; beyond them it earns nothing, and stops at twice the limits."""
    endless, plain = CartPole(terminates=False), CartPole()
    key = jax.random.key(0)
    state, _ = endless.reset(key)
    step, limits = jax.jit(endless.step), np.array([2.4, 12 * np.pi / 180])
    fell = False
    for _ in range(300):
        _, timestep = plain.step(key, state, jnp.int32(1))
        state, found = step(key, state, jnp.int32(1))
        assert not found.terminated
        inside = not timestep.terminated
        assert found.reward == float(inside)
        fell |= not inside
        if inside:
            np.testing.assert_allclose(found.obs, timestep.obs, rtol=1e-5)
        assert endless.observation_space.contains(np.asarray(found.obs))
        assert np.all(np.abs(found.obs[::2]) <= 2 * limits + 1e-6)
    assert fell
    assert state.position == np.float32(4.8)
    assert state.velocity == 0
