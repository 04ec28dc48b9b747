"""Loggers of a run's metrics: `metrics.jsonl`, TensorBoard, Weights & Biases, and the progress line.

A backend is a final class with `log`, `flush` and `close`; a row is the metrics of one update by name.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from lehr import plugins
from lehr.errors import InputError, shortened
from lehr.report.loggers.jsonl import JsonLines
from lehr.report.loggers.progress import Progress
from lehr.report.loggers.tensorboard import TensorBoard
from lehr.report.loggers.wandb import WeightsAndBiases

__all__ = ["JsonLines", "Logger", "Loggers", "Progress", "TensorBoard", "WeightsAndBiases", "make_logger"]


class Logger(Protocol):
    """The interface of a backend."""

    def log(self, row: Mapping[str, float | str]) -> None:
        """Log one row; it may be buffered until the next `flush`."""

    def flush(self) -> None:
        """Write out all rows so far, so that a killed process does not lose them."""

    def close(self) -> None:
        """Flush and close; no more rows can be logged."""


def make_logger(given: Any, directory: Path, config: Mapping[str, Any]) -> Logger:
    """A logger of the user's own.

    Args:
        given: a logger; or a class or function that makes one of `(directory, config)`, or `module:Name` of it.
        directory: of the run.
        config: all settings of the run by name.
    """
    found = plugins.import_object(given, "logger") if isinstance(given, str) else given
    is_logger = not isinstance(found, type) and _logs(found)
    if not is_logger and (not callable(found) or (isinstance(found, type) and not _logs(found))):
        raise InputError(
            f"loggers has {shortened(repr(found))}; a logger has the methods log, flush and close: give one, "
            "or a class or function of (directory, config) that makes one."
        )
    return found if is_logger else found(directory, dict(config))


def _logs(thing: Any) -> bool:
    return all(callable(getattr(thing, name, None)) for name in ("log", "flush", "close"))


class Loggers:
    """All backends of a run. As a context manager it closes them at the end, in the order given."""

    def __init__(self, *backends: Logger) -> None:
        self._backends = backends

    def log(self, row: Mapping[str, float | str]) -> None:
        """Log one row to every backend."""
        for backend in self._backends:
            backend.log(row)

    def flush(self) -> None:
        """Flush every backend."""
        for backend in self._backends:
            backend.flush()

    def close(self) -> None:
        """Close every backend, even if one of them fails."""
        with contextlib.ExitStack() as stack:
            for backend in reversed(self._backends):
                stack.callback(backend.close)

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
