"""The keys of actions."""

import contextlib

import jax
import numpy as np
import pytest

from lehr.acting.agent import action_keys
from lehr.algorithms import ppo
from lehr.errors import InputError
from lehr.networks import NetworkConfig
from lehr.spaces import Box, Discrete
from lehr.training.iteration import next_rollout
from lehr.training.program import assemble
from lehr.training.runners.host import HostRunner, complete


def distinct(space, noise_steps):
    """For each of ten steps, the number of the first step with the same key."""
    keys = np.asarray(jax.random.key_data(action_keys(jax.random.key(0), 10, space, noise_steps))).tolist()
    return [keys.index(key) for key in keys]


@pytest.mark.parametrize(
    ("noise_steps", "wanted"),
    [(1, list(range(10))), (4, [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]), (20, [0] * 10)],
)
def test_continuous_actions_keep_their_noise_for_some_steps(noise_steps, wanted):
    assert distinct(Box(-1, 1, (2,)), noise_steps) == wanted


def test_choices_are_drawn_anew_in_every_step():
    assert distinct(Discrete(3), noise_steps=4) == list(range(10))


def test_noise_is_kept_for_at_least_one_step():
    with pytest.raises(InputError, match="noise_steps is 0"):
        ppo.Config(noise_steps=0)


def check_noise_is_kept(log_prob):
    """The log probability of a normal distribution whose deviation does not depend on the state is that of its noise."""
    found = np.asarray(log_prob).reshape(2, 4, 3)
    np.testing.assert_allclose(found, np.broadcast_to(found[:, :1], found.shape), atol=1e-4)
    assert (np.abs(found[0, 0] - found[1, 0]) > 1e-3).all()


CONFIG = {"num_envs": 3, "horizon": 8, "minibatches": 1, "noise_steps": 4}


def test_a_rollout_keeps_its_noise():
    program, state = assemble("ppo", "Pendulum-v1", ppo.Config(**CONFIG), NetworkConfig(), 1000)
    check_noise_is_kept(next_rollout(program, state).rollout.log_prob)


def test_a_rollout_on_the_host_keeps_its_noise():
    pytest.importorskip("gymnasium")
    program, state = assemble("ppo", "gym:Pendulum-v1", ppo.Config(**CONFIG), NetworkConfig(), 1000)
    runner = HostRunner(program, state, overlap=False, warn=print)
    with contextlib.closing(runner):
        begun = runner.begin(complete(program, state, overlap=False))
        check_noise_is_kept(runner._collect(begun, begun.actor, 0).rollout.log_prob)
