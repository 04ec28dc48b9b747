"""One environment, one step, one agent, one action, one unit: everything that is a mean over one stays finite."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr import algorithms
from lehr.config import describe
from lehr.envs import Environment
from lehr.spaces import Box, Discrete
from lehr.types import Timestep
from tests.small import trial

ONES = {"num_envs": 1, "horizon": 1, "hidden_sizes": (1,), "total_steps": 3, "evaluate_episodes": 1}
PARTS = {
    **dict.fromkeys(["minibatches", "auxiliary_minibatches", "value_minibatches"], 1),
    **dict.fromkeys(["batch_size", "prefill", "imagination_length", "recurrent_size", "blocks", "latents"], 1),
    **{"batch_length": 2, "train_ratio": 2},  # sequences of a single step are refused
}
"""What there is least of besides, for algorithms that have such settings."""
QUICK = "ppo"


@dataclass(frozen=True)
class One(Environment):
    """One action, and an episode that ends by chance."""

    observation_space = Box(0, 1, (1,))
    action_space = Discrete(1)

    def reset(self, key):
        state = jax.random.uniform(key, (1,))
        return state, state

    def step(self, key, state, action):
        return state, Timestep(state, jnp.float32(1), jax.random.bernoulli(key, 0.3), jnp.bool_(False), {})


@pytest.mark.parametrize(
    "algorithm", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in algorithms.names()]
)
@pytest.mark.usefixtures("compiled_quickly")
def test_a_run_of_one_of_everything_is_finite(algorithm, tmp_path):
    known = {field.name for cls in algorithms.settings_of(algorithm) for field in describe(cls)}
    parts = {name: count for name, count in PARTS.items() if name in known} | trial(algorithm, One())
    settings = {**ONES, **parts, "normalise_observations": True, "normalise_rewards": True, "progress": False}
    result = lehr.train(algorithm, env=One(), run_dir=tmp_path / "run", tensorboard=False, **settings)
    assert result.final["update/rejected"] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.params))
    measured = {name: column for name, column in result.metrics.items() if name.split("/")[0] in ("loss", "policy")}
    assert len(measured) > 3
    assert all(np.isfinite(column).all() for column in measured.values()), measured
