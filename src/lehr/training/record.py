"""The protocol of records: what the loop tells of its updates, to be written down."""

import collections
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

PACE_SECONDS = 2.0
"""The speed is averaged over at least this many seconds."""


class RunFailed(RuntimeError):
    """The run could not continue; its last good state is saved."""


@dataclass
class Verdict:
    """Whether a run goes on."""

    stop_reason: str | None = None
    """Why it stops after the current chunk."""
    failure: Exception | None = None
    """The error that stops the run; raised once everything is written."""

    def fail(self, error: Exception) -> None:
        """Stop like a run stopped by the user, so that nothing is lost, and raise the error afterwards."""
        self.failure = self.failure or error
        self.stop_reason = "failed"


class Chunk(NamedTuple):
    """The metrics of some updates, and when they were made."""

    begin: int
    """The updates before these."""
    updates: int
    """How many they are."""
    table: np.ndarray
    """`[rows, ..., M]`, one column per metric."""
    start: float
    """Seconds since the run began, at the first update."""
    end: float
    pace: float
    """Seconds per update, averaged over the last seconds of training."""


class Pace:
    """Measures the time of updates, excluding events."""

    def __init__(self, done: int) -> None:
        self.seconds = float("inf")
        """Seconds per update."""
        self._marks = collections.deque([(0.0, done)])
        """Seconds of training, and the updates made by then."""

    def add(self, seconds: float, done: int) -> float:
        """Note that it took so many more seconds until `done` updates were made, and return the seconds per update."""
        # The host may notice late that a chunk has finished; averaging over a few chunks evens that out.
        self._marks.append((self._marks[-1][0] + seconds, done))
        while len(self._marks) > 2 and self._marks[-1][0] - self._marks[1][0] > PACE_SECONDS:
            self._marks.popleft()
        if len(self._marks) > 2 and self._marks[0][0] == 0:  # the first chunk is short, and warms the device up
            self._marks.popleft()
        (first, before), (last, _) = self._marks[0], self._marks[-1]
        self.seconds = (last - first) / (done - before)
        return self.seconds


class Record(Protocol):
    """What the loop tells of its updates."""

    latest: dict[str, float]
    """The latest value of each metric, for the progress line; empty before the first update."""
    unit: int
    """Number of updates of one row; chunks have a multiple of it."""

    def log(self, chunk: Chunk, evaluation: dict[str, Any], is_whole: bool) -> None:
        """Write down the updates of a chunk; the evaluation belongs to the last one, which `is_whole` if it ends one.

        It may stop the run.
        """

    def prepare(self, state: Any, after: Future | None, is_busy: bool = False) -> None:
        """Begin to compile the evaluation in the background, if this record does so; perhaps `after` the updates.

        While training is busy, the caller should have little to do with it.
        """

    def evaluate(self, state: Any, done: int, stops: Callable[[], bool] | None = None) -> dict[str, Any]:
        """Evaluate the policy after `done` updates; raise `EvaluationStopped` as soon as `stops` says so, if it can."""

    def is_best(self, evaluation: dict[str, Any], done: int) -> bool:
        """Whether this is the best evaluation so far; also stop the run if it reaches the target return."""

    def save(self, done: int) -> dict[str, Any]:
        """Write everything to disk, and return what a checkpoint remembers of it."""

    def protected(self) -> tuple[int, ...]:
        """The checkpoints to keep in any case."""

    def close(self) -> None:
        """Close all files."""
