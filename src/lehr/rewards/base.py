"""The reward model protocol: a stage between acting and learning that computes the rewards of a rollout.

A reward model receives a rollout with the environment's rewards, before normalisation, and returns the rewards that the
algorithm learns from. It may also learn from the rollout; what it learns is part of the run's state.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from lehr.spaces import Spaces
from lehr.types import Key, Learner, Metrics, Rollout


class RewardModel(ABC):
    """The protocol. A reward model is a static, hashable value; everything that changes is passed as an argument."""

    Config: ClassVar[type]
    """Its settings: a frozen dataclass whose field names no other settings class uses. Its coefficients are scheduled
    and logged like the algorithm's."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """The optional parts of a rollout that it uses; see `lehr.algorithms.base.Algorithm.needs`."""

    @classmethod
    @abstractmethod
    def build(cls, spaces: Spaces, config: Any) -> "RewardModel":
        """Return the reward model for an environment's spaces."""

    @abstractmethod
    def init(self, key: Key, example: Rollout) -> Learner:
        """Return the initial state; `example` has the shapes and dtypes of a rollout."""

    @abstractmethod
    def reward(self, learner: Learner, rollout: Rollout, coef: Metrics) -> jax.Array:
        """Return the rewards to learn from, float32 `[T, N]`; `rollout.reward` is the environment's."""

    @abstractmethod
    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Learn from a rollout; return the new state, and metrics with the same names at every update."""

    def forget(self, learner: Learner) -> Learner:
        """Return the state of a run that is resumed without `memory`; see `lehr.algorithms.base.Algorithm.forget`."""
        return learner


@dataclass(frozen=True)
class NoSettings:
    """Settings of a reward model without any."""


@dataclass(frozen=True)
class EnvironmentReward(RewardModel):
    """The environment's reward, unchanged."""

    Config: ClassVar[type] = NoSettings

    @classmethod
    def build(cls, spaces: Spaces, config: NoSettings) -> "EnvironmentReward":
        """Return the model, which is the same for all spaces."""
        return cls()

    def init(self, key: Key, example: Rollout) -> Learner:
        """Return an empty state."""
        return Learner((), ())

    def reward(self, learner: Learner, rollout: Rollout, coef: Metrics) -> jax.Array:
        """Return the environment's reward."""
        return rollout.reward

    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Return the state unchanged."""
        return learner, {}
