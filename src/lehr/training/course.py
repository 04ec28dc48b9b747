"""The course of a run or a population: how long it is, and at which updates members come to their end."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Course:
    """The course of a run, or of a population whose members all end with the last update."""

    updates: int
    """The maximum number of updates."""

    def next_end(self, update: int) -> int:
        """Return the next update after `update` at which a member may come to its end; a chunk ends there too."""
        return self.updates

    def ended(self, state: Any) -> np.ndarray | None:
        """Which members came to their end with the latest update, bool `[P]`; `None` if they all keep their places.

        Those that do not are evaluated and saved now, because the next update may begin with others in their places.
        """
        return None

    def members(self, state: Any) -> np.ndarray:
        """The number of the member in each place, int `[P]`."""
        return np.arange(state.size)

    def expected_updates(self, members: int) -> int:
        """The updates of so many members together, if nobody diverges."""
        return members * self.updates

    def is_over(self, done: int, state: Any) -> bool:
        """Whether nothing is left to train after `done` updates."""
        return done >= self.updates
