"""One actor: its own environments, and how to act in them, in any thread, process or machine."""

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
from lehr.types import NOTHING, Actor, Key, PyTree, derive


class Weights(NamedTuple):
    """The parameters an actor acts with."""

    updates: int
    """Number of updates made before."""
    packed: np.ndarray
    """The parameters as one vector."""
    statistics: PyTree
    """Normalise the observations; `()` for no normalisation."""


class Arrival(NamedTuple):
    """A rollout, and how it was collected."""

    updates: int
    """`Weights.updates` of the weights it was collected with."""
    collected: Collected
    """NumPy arrays, without an actor."""
    seconds: float
    life: int = 0
    """The actor's `Blueprint.life`: a replaced actor has another, with new episodes."""


class ActorLost(RuntimeError):
    """An actor crashed or disappeared."""

    @classmethod
    def by(cls, error: BaseException) -> "ActorLost":
        """Wrap an error by its name and text, since its class may not exist in this process."""
        return cls(f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Blueprint:
    """Everything needed to create an actor, in any process."""

    env: HostEnvironment
    build: Callable[[Key], tuple[Agent, PyTree]]
    """Returns the agent, and an example of its parameters; must be picklable."""
    num_envs: int
    horizon: int
    needs: frozenset[str]
    """The optional parts of a rollout to keep."""
    seed: int
    index: int = 0
    """Index of the actor."""
    updates: int = 0
    """Updates of the run when it was started or resumed."""
    life: int = 0
    """Number of actors with this index that were lost before."""
    noise_steps: int = 1
    """Steps for which the noise of continuous actions is kept."""


class Worker:
    """An actor. It creates its environments with its first rollout, so errors there are reported like any other."""

    def __init__(self, blueprint: Blueprint) -> None:
        self.blueprint, self.rollouts = blueprint, 0
        self.collector: Collector | None = None
        self.key: Key = NOTHING
        self.actor: Actor = NOTHING

    def collect(self, weights: Weights) -> Arrival:
        """Return the next rollout. Raise `ActorLost` for every error except the environment's own."""
        try:
            return self._collect(weights)
        except EnvironmentFailed:
            raise
        except BaseException as error:  # also SystemExit, which would end a thread without a word
            raise ActorLost.by(error) from error

    def close(self) -> None:
        """Close the environments."""
        if self.collector is not None:
            self.collector.close()

    def abort(self) -> None:
        """Do nothing: an actor in a thread cannot be killed."""

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
        """Create and reset the environments, with separate random keys for each life of each actor."""
        blueprint = self.blueprint
        key = jax.random.key(blueprint.seed)
        agent, params = blueprint.build(derive(key, "network"))
        for purpose in ("index", "updates", "life"):
            key = derive(key, f"actor's {purpose}", getattr(blueprint, purpose))
        self.key = key
        sizes = blueprint.num_envs, blueprint.horizon
        self.collector = Collector(blueprint.env, agent, *sizes, params, blueprint.needs, blueprint.noise_steps)
        self.collector.start()
        self.actor = self.collector.reset(derive(key, "environments"))
