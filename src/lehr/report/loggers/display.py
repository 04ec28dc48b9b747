"""A display that changes in place on a terminal, and prints a line now and then to a file."""

import math
from collections.abc import Callable
from time import monotonic
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

_PLAIN_SECONDS = 10.0


class Display:
    """Show a state that changes.

    Args:
        render: gives the state, for a terminal.
        enabled: if false, print nothing, not even messages.
        console: where to print, standard error by default. If it is not a terminal, a plain line is printed at most
            every 10 seconds, and one at the end.
        seconds: on a terminal, at least so long between two changes.
    """

    def __init__(
        self, render: Callable[[], Any], enabled: bool = True, console: Console | None = None, seconds: float = 0.2
    ) -> None:
        self.console = console or Console(stderr=True)
        self._render, self._enabled, self._seconds = render, enabled, seconds
        self._live: Live | None = None
        self._line, self._shown, self._shown_at = "", "", -math.inf

    def __enter__(self) -> "Display":
        if self._enabled and self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(get_renderable=self._render, console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._line != self._shown:
            self._show()

    def update(self, line: str) -> None:
        """Show the current state, or this line of it, unless something was shown just before."""
        self._line = line
        if monotonic() - self._shown_at >= (_PLAIN_SECONDS if self._live is None else self._seconds):
            self._show()

    def message(self, text: str) -> None:
        """Print a line above the display."""
        if self._enabled:
            self.console.print(Text(text), soft_wrap=True)

    def _show(self) -> None:
        if self._live is not None:
            self._live.refresh()
        elif self._line:
            self.message(self._line)
        self._shown_at, self._shown = monotonic(), self._line
