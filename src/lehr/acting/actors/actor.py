"""One actor, wherever it is: environments of its own, and how to act in them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from lehr.acting.agent import Agent
from lehr.acting.collector import Collector
from lehr.acting.rollout import Collected
from lehr.envs.host.base import EnvironmentFailed, HostEnvironment
from lehr.maths.randomness import derive
from lehr.types import NOTHING, Actor, Key, PyTree


class Weights(NamedTuple):
    """What an actor acts with."""

    updates: int
    """How many updates they have seen."""
    packed: np.ndarray
    """The parameters as one vector."""
    statistics: PyTree
    """By which observations are normalised, `()` for not at all."""


class Arrival(NamedTuple):
    """A rollout, and how it came about."""

    updates: int
    """Those of the weights it was made with."""
    collected: Collected
    """NumPy arrays, without an actor."""
    seconds: float
    life: int = 0
    """Of the actor: another one, with new episodes, where it was lost."""


class ActorLost(RuntimeError):
    """An actor is no more."""

    @classmethod
    def by(cls, error: BaseException) -> "ActorLost":
        """For something that went wrong in it, under its name: it may come from another process."""
        return cls(f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Blueprint:
    """What an actor is made from, wherever it is."""

    env: HostEnvironment
    build: Callable[[Key], tuple[Agent, PyTree]]
    """Makes who acts, and an example of its parameters; it must be possible to send it to another process."""
    num_envs: int
    horizon: int
    needs: frozenset[str]
    """The optional parts of a rollout that are kept."""
    seed: int
    index: int = 0
    """Which of the actors."""
    updates: int = 0
    """Those of the run when it was begun or resumed."""
    life: int = 0
    """How many actors of this index were lost before."""


class Worker:
    """An actor. Its environments begin with its first rollout, so that what goes wrong then is told like all else."""

    def __init__(self, blueprint: Blueprint) -> None:
        self.blueprint, self.rollouts = blueprint, 0
        self.collector: Collector | None = None
        self.key: Key = NOTHING
        self.actor: Actor = NOTHING

    def collect(self, weights: Weights) -> Arrival:
        """The next rollout. What is not the environment's fault is the loss of this actor."""
        try:
            return self._collect(weights)
        except EnvironmentFailed:
            raise
        except Exception as error:
            raise ActorLost.by(error) from error

    def close(self) -> None:
        """End the environments."""
        if self.collector is not None:
            self.collector.close()

    def abort(self) -> None:
        """Nothing: one that is not in a process of its own cannot be ended from outside."""

    def _collect(self, weights: Weights) -> Arrival:
        if self.collector is None:
            self._begin()
        assert self.collector is not None
        begin = time.perf_counter()
        packed, statistics = jax.device_put((weights.packed, weights.statistics))
        collected = self.collector.collect(packed, statistics, self.actor, self.key, self.rollouts)
        self.actor, self.rollouts = collected.actor, self.rollouts + 1
        given = jax.device_get(collected._replace(actor=NOTHING))
        return Arrival(weights.updates, given, time.perf_counter() - begin, self.blueprint.life)

    def _begin(self) -> None:
        """Make the environments and begin their episodes, each life of each actor with randomness of its own."""
        blueprint = self.blueprint
        key = jax.random.key(blueprint.seed)
        agent, params = blueprint.build(derive(key, "network"))
        for purpose in ("index", "updates", "life"):
            key = derive(key, f"actor's {purpose}", getattr(blueprint, purpose))
        self.key = key
        sizes = blueprint.num_envs, blueprint.horizon
        self.collector = Collector(blueprint.env, agent, *sizes, params, blueprint.needs)
        self.collector.start()
        self.actor = self.collector.reset(derive(key, "environments"))
