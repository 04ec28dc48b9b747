"""The protocol of runners."""

from concurrent.futures import Future
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lehr.acting.rollout import Collected
from lehr.maths.normalise import RunningStatistics, update_statistics
from lehr.types import TrainState

MOST_UPDATES = 1024
"""Maximum number of updates in a chunk; their metrics stay on the device until it ends."""


class Runner(Protocol):
    """Makes the updates of one run."""

    names: tuple[str, ...]
    """Names of an update's metrics, in column order."""
    most: int
    """Maximum number of updates of one call."""
    since: float | None
    """When it began to compile in the background, by `time.perf_counter`; `None` if it did not."""

    def prepare(self, state: TrainState) -> Future | None:
        """Begin to compile in the background, if this runner does so."""

    def compile(self, state: TrainState) -> None:
        """Compile everything, for states of the same shapes as this one."""

    def begin(self, state: TrainState) -> TrainState:
        """Start the environments, and return the state to continue from."""

    def advance(self, state: TrainState, count: int) -> tuple[TrainState, Any]:
        """Make `count` updates; return the state and the metrics `[count or more, M]`, perhaps not yet computed."""

    def close(self) -> None:
        """Release all resources."""


def is_unmeasured(state: TrainState) -> bool:
    """Whether a run, or a population, normalises observations but has seen none yet: they would pass as they are."""
    if not normalises(state) or int(state.updates.max()):
        return False
    return not float(state.observation_statistics.samples.max())


def normalises(state: TrainState) -> bool:
    """Whether a run, or a population, has statistics of its observations."""
    if not isinstance(state.observation_statistics, RunningStatistics):
        return False
    return any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(state.actor.obs))


def measured(state: TrainState, collected: Collected) -> TrainState:
    """Return the state with the statistics of a rollout's observations."""
    statistics = update_statistics(state.observation_statistics, collected.raw_obs, collected.rollout.valid)
    return state._replace(observation_statistics=statistics)


class Interrupted(Exception):
    """An environment or an actor failed. `state` and `rows` are those of the updates completed before."""

    def __init__(self, error: Exception, state: TrainState, rows: np.ndarray) -> None:
        super().__init__(str(error))
        self.state, self.rows = state, rows
