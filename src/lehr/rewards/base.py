"""The reward model protocol: a stage between acting and learning that computes the rewards of a rollout.

A reward model receives a rollout with the environment's rewards, before normalisation, and returns the rewards that the
algorithm learns from. It may also learn from the rollout; what it learns is part of the run's state. It may learn from
data from outside too, such as demonstrations, which is loaded at the start and after a resume, and never saved.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from lehr.spaces import Spaces
from lehr.types import Key, Learner, Loaded, Metrics, Rollout


class RewardModel(ABC):
    """The protocol. A reward model is a static, hashable value; everything that changes is passed as an argument."""

    Config: ClassVar[type]
    """Its settings: a frozen dataclass whose field names no other settings class uses. Its coefficients are scheduled
    and logged like the algorithm's."""
    learns_first: ClassVar[bool] = False
    """Whether `reward` gets the state after learning from the rollout, not the state before it."""

    @property
    def needs(self) -> frozenset[str]:
        """The optional parts of a rollout that it uses; see `lehr.algorithms.base.Algorithm.needs`."""
        return frozenset()

    @classmethod
    @abstractmethod
    def build(cls, spaces: Spaces, config: Any) -> "RewardModel":
        """Return the reward model for an environment's spaces."""

    def load(self) -> Loaded:
        """Load the data that it learns from, on the host, before a run starts or goes on; `Learner.data` holds it."""
        return Loaded()

    @abstractmethod
    def init(self, key: Key, example: Rollout) -> Learner:
        """Return the initial state, without `data`; `example` has the shapes and dtypes of a rollout."""

    def normalised(self, learner: Learner, statistics: Any) -> Learner:
        """Return the state with its data as `reward` and `learn` are to see it.

        Args:
            learner: the state.
            statistics: `RunningStatistics` that normalise the observations of rollouts, for
                `lehr.acting.agent.observed`; `()` in a run that does not normalise them.
        """
        return learner

    @abstractmethod
    def reward(self, learner: Learner, rollout: Rollout, coef: Metrics) -> jax.Array:
        """Return the rewards to learn from, float32 `[T, N]`; `rollout.reward` is the environment's."""

    @abstractmethod
    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Learn from a rollout; return the new state, and metrics with the same names at every update.

        The `data` of the new state is ignored: it never changes.
        """

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
