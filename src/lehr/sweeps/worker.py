"""Train waves in a process on another machine, which need not have the files of the sweep."""

import logging
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lehr.sweeps.directory import Wave
from lehr.sweeps.parcels import Parcel, marks, pack, unpack
from lehr.sweeps.running import Trained, WaveTrainer
from lehr.training import checkpoint
from lehr.training.directory import RunDirectory

ASK_SECONDS = 1.0
"""A worker that has nothing to tell answers after this time."""


class Position(NamedTuple):
    """How far a wave is."""

    env_steps: int
    """Of all its members."""
    rate: float
    """Env steps per second, of all its members."""
    returns: np.ndarray
    """The latest mean episode return of each member, NaN if it has none."""


class News(NamedTuple):
    """What happened since a worker was asked before."""

    position: Position | None
    """`None` before the first chunk of updates."""
    parcel: Parcel | None
    """What changed in the directory of the wave, if there was a checkpoint or the end."""
    warnings: list[str]
    """For the user."""
    trained: Trained | None
    """How the wave ended; `None` if it has not."""


class WaveWorker:
    """Trains one wave after the other, and answers meanwhile.

    Args:
        trainer: trains the waves.
    """

    def __init__(self, trainer: WaveTrainer) -> None:
        self._trainer = trainer
        self._training: _Training | None = None

    def place(self) -> str:
        """The name of the machine."""
        return socket.gethostname()

    def begin(self, wave: Wave, parcel: Parcel) -> None:
        """Begin to train a wave, from the latest checkpoint in the parcel if it has one."""
        self._training = _Training(self._trainer, wave, parcel)
        self._training.start()

    def ask(self, stop_reason: str = "") -> News:
        """Wait a moment for news; raise what ended the training. With a reason, the wave saves and stops."""
        assert self._training is not None
        return self._training.ask(stop_reason)

    def leave(self) -> None:
        """Remove the files of the wave that is under way, because the process is killed next."""
        if self._training is not None:
            self._training.place.cleanup()


class _Training(threading.Thread):
    """Trains a wave in a temporary directory."""

    def __init__(self, trainer: WaveTrainer, wave: Wave, parcel: Parcel) -> None:
        super().__init__(name=f"lehr-wave-{wave.number}", daemon=True)
        self._trainer, self._wave, self._given = trainer, wave, parcel
        self._lock, self._has_news = threading.Lock(), threading.Event()
        self.place = tempfile.TemporaryDirectory(prefix="lehr-wave-", ignore_cleanup_errors=True)
        self._news = News(None, None, [], None)
        self._error: BaseException | None = None
        self._stop_reason = ""

    def ask(self, stop_reason: str) -> News:
        """Wait a moment for news, and return them."""
        self._stop_reason = stop_reason
        self._has_news.wait(ASK_SECONDS)
        with self._lock:
            self._has_news.clear()
            news, self._news = self._news, self._news._replace(parcel=None, warnings=[])
        if self._error is not None:
            raise self._error
        return news

    def run(self) -> None:
        """Train the wave."""
        listener = _Listener(self._warn)
        logging.getLogger("lehr").addHandler(listener)
        try:
            with self.place as place:
                trained = self._train(Path(place))
            self._tell(trained=trained)
        except BaseException as error:  # whatever ends this thread is told to the one who asks
            self._error = error
            self._has_news.set()
        finally:
            logging.getLogger("lehr").removeHandler(listener)

    def _train(self, path: Path) -> Trained:
        unpack(path, self._given)
        known, saved = marks(path), _saved(path)

        def send() -> None:
            nonlocal known, saved
            parcel = pack(path, known)
            known, saved = marks(path), _saved(path)
            with self._lock:  # the one before may still be here
                before = self._news.parcel
                self._news = self._news._replace(parcel=parcel if before is None else before.followed_by(parcel))
            self._has_news.set()

        def report(env_steps: int, metrics: dict[str, Any]) -> bool:
            self._tell(position=Position(env_steps, metrics["time/steps_per_second"], metrics["returns"]))
            if _saved(path) != saved:
                send()
            return bool(self._stop_reason)

        trained = self._trainer.train(self._wave, path, report=report)
        if trained.stop_reason is not None:
            trained = trained._replace(stop_reason=self._stop_reason)
            RunDirectory(path).write_status("stopped", self._stop_reason)
        send()
        return trained

    def _tell(self, **changes: Any) -> None:
        with self._lock:
            self._news = self._news._replace(**changes)
        if "trained" in changes:
            self._has_news.set()

    def _warn(self, text: str) -> None:
        with self._lock:
            self._news.warnings.append(text)


def _saved(path: Path) -> list[int]:
    return checkpoint.steps(RunDirectory(path).checkpoints)


class _Listener(logging.Handler):
    """Passes warnings on."""

    def __init__(self, warn: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._warn = warn

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on the text of a warning."""
        self._warn(record.getMessage())
