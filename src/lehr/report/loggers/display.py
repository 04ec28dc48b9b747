"""A display that changes in place on a terminal, and prints a line now and then to a file."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

_PLAIN_SECONDS = 10.0
_TICK = 0.2
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PLAIN_SPINNER = "|/-\\"


class Display:
    """Show a state that changes.

    Args:
        render: gives the state, for a terminal.
        enabled: if false, print nothing, not even messages.
        console: where to print, standard error by default. If it is not a terminal, a plain line is printed at most
            every 10 seconds, and one at the end.
        seconds: on a terminal, at least so long between two changes.
        transient: remove it from the terminal at the end.
    """

    def __init__(
        self,
        render: Callable[[], Any],
        enabled: bool = True,
        console: Console | None = None,
        seconds: float = 0.2,
        transient: bool = False,
    ) -> None:
        self.console = console or Console(stderr=True)
        self._render, self._enabled, self._seconds, self._transient = render, enabled, seconds, transient
        self._live: Live | None = None
        self._line, self._shown, self._shown_at = "", "", -math.inf
        self._waiting: tuple[str, str, float] | None = None

    def __enter__(self) -> "Display":
        if self._enabled and self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._renderable, console=self.console, auto_refresh=False, transient=self._transient
            )
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

    @contextmanager
    def waiting(self, what: str, last: float | None = None, plain: bool = True) -> Iterator[None]:
        """While something takes its time, show what it is, for how many seconds, and how many it took the last time.

        Args:
            what: what is done, such as "compiling ppo on CartPole-v1".
            last: seconds that it took the last time, if known.
            plain: print a line at its beginning where the display is not live.
        """
        before = "" if last is None else f"{last:.0f} s the last time"
        if self._live is None:
            if plain:
                self.message(f"{what} ({before})" if before else what)
            yield
            return
        self._waiting = what, before, monotonic()
        over = threading.Event()
        ticking = threading.Thread(target=self._tick, args=(self._live, over), daemon=True)
        ticking.start()
        try:
            yield
        finally:
            over.set()
            ticking.join()
            self._waiting = None
            self._live.refresh()

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

    def _renderable(self) -> Any:
        """What is waited for, or else the state."""
        if self._waiting is None:
            return self._render()
        what, before, begin = self._waiting
        seconds = monotonic() - begin
        signs = _PLAIN_SPINNER if self.console.options.ascii_only else _SPINNER
        line = f"{signs[int(seconds / _TICK) % len(signs)]} {what}, {seconds:.0f} s{'; ' if before else ''}{before}"
        return Text(line, no_wrap=True, overflow="ellipsis")

    @staticmethod
    def _tick(live: Live, over: threading.Event) -> None:
        while not over.wait(_TICK):
            live.refresh()


class Displayed:
    """Abstract base class of a state that a `Display` shows while it is entered."""

    _display: Display

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._display.__exit__(*error)

    def waiting(self, what: str, last: float | None = None, plain: bool = True) -> AbstractContextManager[None]:
        """Show what is waited for, as `Display.waiting` does."""
        return self._display.waiting(what, last, plain)

    def message(self, text: str) -> None:
        """Print a line above the display."""
        self._display.message(text)


@contextmanager
def waiting(what: str, enabled: bool = True) -> Iterator[None]:
    """On a terminal, show what takes its time, and for how many seconds; then remove it."""
    with Display(Group, enabled, transient=True) as display, display.waiting(what, plain=False):
        yield
