"""What a reward model is given, and what becomes of what it gives: data from outside, actions, the order of the stages."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.acting.agent import observed
from lehr.acting.policy import Policy
from lehr.config import build
from lehr.rewards import EnvironmentReward, RewardModel, find
from lehr.training import checkpoint
from lehr.training.iteration import iteration
from lehr.training.program import assemble
from lehr.types import Learner, Loaded
from tests.small import SMALL

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


@dataclass(frozen=True)
class TeacherSettings:
    """Settings of the model."""

    rows: str = ""
    """A file with numbers."""


@dataclass(frozen=True)
class Teacher(RewardModel):
    """The reward is how often it has learned, plus the mean of its data; it needs everything."""

    Config: ClassVar[type] = TeacherSettings
    path: str

    @classmethod
    def build(cls, spaces, config):
        return cls(config.rows)

    @property
    def needs(self):
        return frozenset({"final_obs", "taken"})

    def load(self):
        rows = np.load(self.path) if self.path else ROWS
        return Loaded(jnp.asarray(rows), ((self.path, str(rows.sum())),), f"Loaded {len(rows)} rows.")

    def init(self, key, example):
        assert example.taken.shape == example.action.shape
        return Learner(jnp.float32(0), ())

    def normalised(self, learner, statistics):
        return learner._replace(data=observed(statistics, learner.data))

    def reward(self, learner, rollout, coef):
        return jnp.full_like(rollout.reward, learner.params + jnp.mean(learner.data))

    def learn(self, learner, rollout, coef, key):
        difference = jnp.max(jnp.abs(rollout.taken - jnp.clip(rollout.action, -2, 2)))
        return Learner(learner.params + 1, ()), {
            "teacher/data": jnp.mean(learner.data),
            "teacher/difference": difference,
            "teacher/outside": jnp.mean(jnp.abs(rollout.action) > 2),
        }


@dataclass(frozen=True)
class Quick(Teacher):
    """Learns first."""

    learns_first: ClassVar[bool] = True


SIZES = {name: SMALL[name] for name in ("num_envs", "horizon", "epochs", "minibatches", "hidden_sizes")}


PLAIN = {"normalise_observations": False, "normalise_rewards": False}


def begin(model, env="Pendulum-v1", **settings):
    config, network = build(lehr.algorithms.settings_of("ppo"), {**SIZES, **PLAIN, **settings})
    return assemble("ppo", env, config, network, 10_000, 0, model)


def test_data_is_seen_and_kept_but_not_saved(tmp_path):
    program, state = begin(Teacher, initial_log_std=2.0)
    np.testing.assert_array_equal(state.reward_model.data, ROWS)
    after, metrics = jax.jit(partial(iteration, program))(state)
    np.testing.assert_array_equal(after.reward_model.data, ROWS)  # although `learn` gave a state without it
    assert metrics["teacher/data"] == ROWS.mean()
    assert jax.tree.leaves(after.saved.reward_model) == [1.0]
    checkpoint.save(tmp_path, after.saved, 1, {})
    saved, _, _ = checkpoint.newest(tmp_path, state.saved)
    again = saved.completed(state)
    jax.tree.map(np.testing.assert_array_equal, *(s._replace(key=jax.random.key_data(s.key)) for s in (again, after)))


def test_the_action_that_the_environment_took_is_kept_where_it_is_needed():
    program, state = begin(Teacher, initial_log_std=2.0)
    _, metrics = jax.jit(partial(iteration, program))(state)
    assert metrics["teacher/outside"] > 0.3  # so that clipping did something
    assert metrics["teacher/difference"] < 1e-6


def test_data_is_normalised_as_observations_are():
    program, state = begin(Teacher, env="CartPole-v1", normalise_observations=True)
    statistics = state.observation_statistics
    moved = type(statistics)(statistics.count, jnp.full(4, 5.0), jnp.full(4, 4.0))
    seen = program.reward_model.normalised(state.reward_model, moved)
    np.testing.assert_allclose(seen.data, (ROWS - 5) / 2, rtol=1e-6)


@pytest.mark.parametrize(("model", "expected"), [(Teacher, 0.0), (Quick, 1.0)])
def test_a_model_says_whether_it_learns_before_it_rewards(model, expected):
    program, state = begin(model, normalise_rewards=True)
    after, _ = jax.jit(partial(iteration, program))(state)
    # The discounted returns that scale the rewards show what the rewards were: all the same.
    reward, discount, horizon = ROWS.mean() + expected, 0.99, 8
    np.testing.assert_allclose(
        after.reward_scaling.returns, reward * (1 - discount**horizon) / (1 - discount), rtol=1e-4
    )


def run(path: Path, rows: Path, **more: Any) -> Any:
    settings = {**SMALL, "reward_model": Teacher, "rows": rows, "total_steps": 64, **more}
    return lehr.train("ppo", "Pendulum-v1", run_dir=path, **PLAIN, **settings)


def test_a_run_remembers_what_it_loaded_and_reports_a_change(tmp_path, caplog):
    rows = tmp_path / "rows.npy"
    np.save(rows, ROWS)
    run(tmp_path / "run", rows)
    lehr.resume(tmp_path / "run", reward_model=Teacher, total_steps=128, trust=True)
    assert "changed" not in caplog.text
    np.save(rows, ROWS + 1)
    lehr.resume(tmp_path / "run", reward_model=Teacher, total_steps=192, trust=True)
    assert f"The data '{rows}' changed since the last checkpoint (SHA-256 66.0 before, 78.0 now)" in caplog.text
    rows.unlink()  # to act, a run needs no data
    assert isinstance(lehr.load(tmp_path / "run", trust=True).policy, Policy)


def test_installed_packages_are_not_searched_for_a_built_in_model(monkeypatch):
    monkeypatch.setattr("lehr.plugins.offered", lambda group: pytest.fail(f"{group} was searched"))
    assert find("environment") is EnvironmentReward
