"""The live display of waves that are trained at the same time: one line for each, and one for all."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console, Group
from rich.text import Text

from lehr.report.loggers.display import Display, Displayed
from lehr.report.loggers.population_progress import progress_line


@dataclass
class _Wave:
    members: int
    place: str = ""
    """Where it is trained; empty if it is not."""
    env_steps: int = 0
    """Of all members."""
    rate: float = 0.0
    """Env steps per second, of all members."""
    returns: np.ndarray = field(default_factory=lambda: np.zeros(0))


class WavesProgress(Displayed):
    """Show how far each wave is, where it is trained, and how far they are together.

    Args:
        total_steps: the budget of one member in env steps.
        sizes: the number of members of each wave to train, by its number.
        count: the number of all waves, with those trained before.
        enabled: if false, print nothing, not even messages.
        console: where to print, as for `Display`.
    """

    def __init__(
        self,
        total_steps: int,
        sizes: Mapping[int, int],
        count: int,
        enabled: bool = True,
        console: Console | None = None,
    ) -> None:
        self._total, self._count, self._rate = total_steps, count, 0.0
        self._waves = {number: _Wave(members) for number, members in sizes.items()}
        self._display = Display(self._render, enabled, console)

    def begin(self, number: int, place: str) -> None:
        """A wave begins, or goes on, at a place."""
        self._waves[number].place = place
        self._display.update(self._overall())

    def update(self, number: int, env_steps: int, rate: float, returns: np.ndarray) -> None:
        """Show how far a wave is.

        Args:
            number: of the wave.
            env_steps: env steps of all its members so far.
            rate: env steps per second, of all its members.
            returns: the latest mean episode return of each member, NaN if it has none.
        """
        wave = self._waves[number]
        wave.env_steps, wave.rate, wave.returns = env_steps, rate, returns
        self._display.update(self._overall())

    def end(self, number: int) -> None:
        """A wave ended, or lost its place."""
        self._waves[number].place, self._waves[number].rate = "", 0.0
        self._display.update(self._overall())

    def _overall(self) -> str:
        waves = self._waves.values()
        members = sum(wave.members for wave in waves)
        steps = sum(wave.env_steps for wave in waves)
        self._rate = sum(wave.rate for wave in waves) or self._rate
        returns = np.concatenate([wave.returns for wave in waves])
        running = sum(bool(wave.place) for wave in waves)
        state = progress_line(members, steps, self._total * members, self._rate, returns)
        return f"waves running: {running}  {state}"

    def _render(self) -> Group:
        lines = [self._overall()]
        for number, wave in self._waves.items():
            if wave.place:
                state = progress_line(wave.members, wave.env_steps, self._total * wave.members, wave.rate, wave.returns)
                lines.append(f"wave {number + 1} of {self._count} on {wave.place}  {state}")
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))
