"""What makes the updates of a run."""

from typing import Any, Protocol

import numpy as np

from lehr.types import TrainState


class Runner(Protocol):
    """What makes the updates of one run."""

    names: tuple[str, ...]
    """The metrics of an update, in the order of the columns."""

    def compile(self, state: TrainState) -> None:
        """Compile all that is needed, for states like this one."""

    def begin(self, state: TrainState) -> TrainState:
        """Make everything ready to go on from this state."""

    def advance(self, state: TrainState, count: int) -> tuple[TrainState, Any]:
        """The state after `count` updates, and their metrics `[count or more, M]`, perhaps still being computed."""

    def close(self) -> None:
        """Let go of what the run needed."""


class Interrupted(Exception):
    """An environment failed, or an actor. `state` and `rows` are those of the updates that were made before."""

    def __init__(self, error: Exception, state: TrainState, rows: np.ndarray) -> None:
        super().__init__(str(error))
        self.state, self.rows = state, rows
