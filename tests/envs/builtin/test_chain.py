"""The chain that only exploration solves, step by step."""

import jax
import jax.numpy as jnp
import pytest

from lehr.envs import make
from lehr.envs.builtin.chain import DeepChain
from lehr.errors import InputError


def play(env, actions):
    """The return of an episode with these actions, and whether it ended with the last."""
    key = jax.random.key(0)
    state, obs = env.reset(key)
    total, ended = 0.0, []
    places = [int(obs.argmax())]
    for action in actions:
        state, timestep = env.step(key, state, jnp.int32(action))
        total += float(timestep.reward)
        ended.append(bool(timestep.terminated))
        places.append(int(timestep.obs.argmax()))
        assert not timestep.truncated
    assert ended == [False] * (len(actions) - 1) + [True]
    return total, places


def test_only_right_at_every_step_is_paid():
    env = DeepChain(length=4, cost=0.1)
    assert play(env, [1, 1, 1, 1]) == (pytest.approx(0.9), [0, 1, 2, 3, 3])
    assert play(env, [0, 0, 0, 0]) == (0.0, [0, 0, 0, 0, 0])
    assert play(env, [1, 1, 1, 0])[0] == pytest.approx(-0.075)
    assert play(env, [1, 0, 1, 1]) == (pytest.approx(-0.075), [0, 1, 0, 1, 2])


def test_it_has_a_name_and_parameters():
    assert make("DeepChain-v0").observation_space.shape == (6,)
    assert make("DeepChain-v0", length=9).observation_space.shape == (9,)
    with pytest.raises(InputError, match="DeepChain got length=1; it must be 2 or more"):
        DeepChain(length=1)
