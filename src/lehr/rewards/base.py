"""What a reward model is: a stage between acting and learning that says what each step was worth.

It sees a rollout with the environment's own rewards, before they are normalised, and returns the rewards that the
algorithm learns from. It may learn too, from the same rollout, and what it has learned is part of the run's state.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from lehr.spaces import Spaces
from lehr.types import Key, Learner, Metrics, Rollout


class RewardModel(ABC):
    """The protocol. A reward model is a static, hashable value; everything that changes is in its arguments."""

    Config: ClassVar[type]
    """Its settings, a frozen dataclass whose names no other class of settings has. Its coefficients are scheduled and
    logged with the algorithm's."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """The optional parts of a rollout that it looks at; see `lehr.algorithms.base.Algorithm.needs`."""

    @classmethod
    @abstractmethod
    def build(cls, spaces: Spaces, config: Any) -> "RewardModel":
        """The model for an environment's spaces."""

    @abstractmethod
    def init(self, key: Key, example: Rollout) -> Learner:
        """What it begins with; `example` has the shapes and dtypes of a rollout."""

    @abstractmethod
    def reward(self, learner: Learner, rollout: Rollout, coef: Metrics) -> jax.Array:
        """The rewards to learn from, float32 `[T, N]`, for a rollout whose `reward` is the environment's."""

    @abstractmethod
    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """What it has learned after a rollout, and metrics, the same at every update."""


@dataclass(frozen=True)
class NoSettings:
    """The settings of a model that has none."""


@dataclass(frozen=True)
class EnvironmentReward(RewardModel):
    """The environment's own reward."""

    Config: ClassVar[type] = NoSettings

    @classmethod
    def build(cls, spaces: Spaces, config: NoSettings) -> "EnvironmentReward":
        """The same for every environment."""
        return cls()

    def init(self, key: Key, example: Rollout) -> Learner:
        """Nothing is learned."""
        return Learner((), ())

    def reward(self, learner: Learner, rollout: Rollout, coef: Metrics) -> jax.Array:
        """As it is."""
        return rollout.reward

    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Nothing is learned."""
        return learner, {}
