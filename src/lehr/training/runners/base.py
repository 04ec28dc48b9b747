"""The protocol of runners."""

from typing import Any, Protocol

import numpy as np

from lehr.types import TrainState


class Runner(Protocol):
    """Makes the updates of one run."""

    names: tuple[str, ...]
    """Names of an update's metrics, in column order."""

    def compile(self, state: TrainState) -> None:
        """Compile everything, for states of the same shapes as this one."""

    def begin(self, state: TrainState) -> TrainState:
        """Start the environments, and return the state to continue from."""

    def advance(self, state: TrainState, count: int) -> tuple[TrainState, Any]:
        """Make `count` updates; return the state and the metrics `[count or more, M]`, perhaps not yet computed."""

    def close(self) -> None:
        """Release all resources."""


class Interrupted(Exception):
    """An environment or an actor failed. `state` and `rows` are those of the updates completed before."""

    def __init__(self, error: Exception, state: TrainState, rows: np.ndarray) -> None:
        super().__init__(str(error))
        self.state, self.rows = state, rows
