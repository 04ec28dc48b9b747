"""Swarm against a plain-Python account of the rules in its docstring, and cases worked out by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.envs import make
from lehr.envs.builtin.swarm import Swarm, SwarmState

KEY = jax.random.key(0)


@functools.cache
def step(env):
    return jax.jit(functools.partial(env.step, KEY))


def reference(env, position, velocity, target, action):
    """One step with loops over agents and pairs: position, velocity, reward, observation."""
    agents = range(env.num_agents)
    velocity = velocity + np.clip(action, -1, 1) * env.max_acceleration * env.time_step
    moved = position + velocity * env.time_step
    new_position, new_velocity, touched = moved.copy(), velocity.copy(), np.zeros(env.num_agents)
    for i in agents:
        for j in agents:
            distance = math.dist(moved[i], moved[j])
            if i == j or distance >= 2 * env.radius:
                continue
            touched[i] += 1
            normal = (moved[j] - moved[i]) / distance
            new_position[i] -= normal * (2 * env.radius - distance) / 2
            approach = (velocity[j] - velocity[i]) @ normal
            if approach < 0:
                new_velocity[i] += approach * normal
    for i in agents:
        for axis in range(2):
            if abs(new_position[i, axis]) > env.half_size:
                inward = -math.copysign(1, new_position[i, axis])
                new_velocity[i, axis] = inward * abs(new_velocity[i, axis])
                new_position[i, axis] = -inward * env.half_size
    new_velocity = np.clip(new_velocity, -env.max_speed, env.max_speed)
    reward, obs = np.zeros(env.num_agents), np.zeros((env.num_agents, 4 + env.sectors))
    for i in agents:
        distance = math.dist(new_position[i], target[i])
        reward[i] = math.dist(position[i], target[i]) - distance - env.collision_penalty * touched[i]
        reward[i] += env.target_bonus * (distance < env.target_radius)
        lidar = np.full(env.sectors, env.lidar_range)
        for j in set(agents) - {i}:
            dx, dy = new_position[j] - new_position[i]
            sector = int(math.degrees(math.atan2(dy, dx)) % 360 // (360 / env.sectors))
            lidar[sector] = min(lidar[sector], max(0, math.hypot(dx, dy) - 2 * env.radius))
        obs[i] = [*new_velocity[i], *(target[i] - new_position[i]), *lidar]
    return new_position, new_velocity, reward, obs


def test_steps_follow_the_rules():
    env, rng, collisions = Swarm(num_agents=6, radius=0.15), np.random.default_rng(0), 0
    for _ in range(50):
        position, target = rng.uniform(-1, 1, (2, 6, 2))
        velocity, action = rng.uniform(-0.5, 0.5, (6, 2)), rng.uniform(-2, 2, (6, 2))
        state = SwarmState(*(jnp.asarray(x, jnp.float32) for x in (position, velocity, target)))
        state, timestep = step(env)(state, jnp.asarray(action, jnp.float32))
        expected = reference(env, position, velocity, target, action)
        found = state.position, state.velocity, timestep.reward, timestep.obs
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        collisions += np.sum(timestep.reward < -0.2)
    assert collisions > 20, "the random states no longer collide"


def test_head_on_agents_swap_their_velocities():
    env = Swarm(num_agents=2)
    position = jnp.array([[-0.05, 0.0], [0.05, 0.0]])
    velocity = jnp.array([[0.3, 0.1], [-0.1, 0.1]])
    state, timestep = step(env)(SwarmState(position, velocity, position), jnp.zeros((2, 2)))
    np.testing.assert_allclose(state.velocity, [[-0.1, 0.1], [0.3, 0.1]], atol=1e-6)
    # Moved to x = -0.02 and 0.04, then apart by half of the overlap of 0.04 each.
    np.testing.assert_allclose(state.position, [[-0.04, 0.01], [0.06, 0.01]], atol=1e-6)
    away = math.hypot(0.01, 0.01)
    np.testing.assert_allclose(timestep.reward, [-away - 0.25 + 0.05] * 2, atol=1e-6)


def test_lidar_sees_the_nearest_in_each_sector():
    env = Swarm(num_agents=4, sectors=4, lidar_range=0.5)
    position = jnp.array([[0, 0], [0.2, 0.1], [0.4, 0.3], [-0.5, -0.6]])
    zeros = jnp.zeros((4, 2))
    _, timestep = step(env)(SwarmState(position, zeros, zeros), zeros)
    np.testing.assert_allclose(timestep.obs[0, 4:], [math.hypot(0.2, 0.1) - 0.1, 0.5, 0.5, 0.5], atol=1e-6)
    near, far = math.hypot(0.2, 0.1) - 0.1, math.hypot(0.2, 0.2) - 0.1
    np.testing.assert_allclose(timestep.obs[1, 4:], [far, 0.5, near, 0.5], atol=1e-6)


@pytest.mark.parametrize("num_agents", [2, 8, 16])
def test_everything_begins_apart(num_agents):
    env = Swarm(num_agents=num_agents)
    states, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(KEY, 64))
    for points in (states.position, states.target):
        points = np.asarray(points)
        gaps = np.linalg.norm(points[:, :, None] - points[:, None], axis=-1) + 10 * np.eye(num_agents)
        assert gaps.min() >= 2 * env.radius - 1e-6
        assert np.abs(points).max() <= env.half_size - env.radius + 1e-6
    assert np.all(np.asarray(states.velocity) == 0)


def test_flying_to_the_target_pays_and_drifting_does_not():
    env = make("Swarm-v0")

    def steer(obs, key):
        return 4 * obs[:, 2:4] - 4 * obs[:, :2]

    def drift(obs, key):
        return jax.random.uniform(key, (8, 2), minval=-1.0)

    def mean_return(policy):
        def body(carry, key):
            state, obs = carry
            state, timestep = env.step(key, state, policy(obs, key))
            return (state, timestep.obs), (timestep.reward, timestep.truncated)

        def episode(key):
            return jax.lax.scan(body, env.reset(key), jax.random.split(key, 100))[1]

        rewards, truncated = jax.jit(jax.vmap(episode))(jax.random.split(KEY, 16))
        assert np.asarray(truncated)[:, -1].all()
        assert not np.asarray(truncated)[:, :-1].any()
        return np.asarray(rewards).sum(axis=1).mean()

    assert mean_return(steer) > 2 > 0 > mean_return(drift)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"num_agents": 1}, "Swarm got num_agents=1; it must be 2 or more"),
        ({"num_agents": 600}, "600 agents of radius 0.05 do not fit into an arena with half_size=1.0"),
    ],
)
def test_errors_say_what_is_wrong(parameters, sentence):
    with pytest.raises(ValueError, match=sentence):
        Swarm(**parameters)
