"""Train the waves of a sweep on the devices of a Ray cluster, one wave on each device at a time.

    waves that wait ─► worker on device 0 ─┐
                    ─► worker on device 1 ─┼─► checkpoints and metrics ─► the directory of the sweep
                    ─► worker on device … ─┘

A worker keeps its device for the whole sweep, so that it compiles each program once. It sends what changed in the
directory of its wave after every checkpoint; if it is lost, the wave goes on from there on another device.
"""

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lehr.errors import InputError, shortened
from lehr.plugins import require
from lehr.report.loggers.waves_progress import WavesProgress
from lehr.sweeps.directory import SweepDirectory, Wave
from lehr.sweeps.parcels import pack, unpack
from lehr.sweeps.running import Stopped, WaveTooLarge, WaveTrainer
from lehr.sweeps.worker import News, WaveWorker
from lehr.training import signals
from lehr.training.record import RunFailed
from lehr.training.runners.population import TooLarge

MOST_LOSSES = 3
"""Stop the sweep when a wave is lost this many times in a row without a checkpoint in between."""
WAIT_SECONDS = 2.0
"""Wait this long for answers before looking for new devices of the cluster, and for workers to leave."""


class WorkerLost(Exception):
    """A worker disappeared, or could not start; the message is Ray's name for the reason."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(type(error).__name__)
        self.details = _last_line(error)


@dataclass(eq=False)
class _Hired:
    """A worker, as seen from here."""

    actor: Any
    answer: Any
    """Reference to what it was asked last; `None` if that is answered."""
    place: str = ""
    """Its machine; empty until it has started."""
    wave: Wave | None = None
    """What it trains."""
    compile_seconds: float = 0.0


class RayDevices:
    """The devices of the Ray cluster that this process is connected to: its GPUs, or its CPUs if it has no GPUs.

    Args:
        trainer: trains the waves.
    """

    def __init__(self, trainer: WaveTrainer) -> None:
        self.ray = require("ray", "ray", "--on ray")
        self.trainer = trainer
        self.workers: list[_Hired] = []
        self.compile_seconds = 0.0
        self.failed_starts = 0
        """How many workers in a row could not start."""
        self._kind = "GPU" if self.ray.cluster_resources().get("GPU", 0) >= 1 else "CPU"
        if self.count() < 1:
            raise InputError("The Ray cluster has neither a GPU nor a CPU; add a node to it with 'ray start'.")
        options = {"num_gpus": 1, "num_cpus": 0} if self._kind == "GPU" else {"num_cpus": 1}
        self._actor_class = self.ray.remote(**options)(WaveWorker)

    def count(self) -> int:
        """The number of devices at this moment."""
        return int(self.ray.cluster_resources().get(self._kind, 0))

    def train(self, directory: SweepDirectory, waves: Sequence[Wave], total: int) -> None:
        """Train some of the `total` waves of a sweep; when one is too large or the user stops, the others save."""
        try:
            _Round(self, directory, waves, total).run()
        except BaseException as error:
            if not isinstance(error, Stopped | WaveTooLarge):
                self.close()
            raise

    def close(self) -> None:
        """End all workers."""
        self.dismiss(*self.workers)

    def hire(self, needed: int) -> None:
        """Start workers until there are as many as needed, or one for each device."""
        for _ in range(len(self.workers), min(needed, self.count())):
            try:
                actor = self._actor_class.remote(self.trainer.elsewhere())
            except TypeError as error:
                raise InputError(
                    f"The sweep cannot be sent to other machines ({_last_line(error)}); give the algorithm and the "
                    "environment by name."
                ) from error
            self.workers.append(_Hired(actor, actor.place.remote()))

    def dismiss(self, *workers: _Hired) -> None:
        """End workers, whatever they are doing."""
        leaving = [worker.actor.leave.remote() for worker in workers if worker.wave is not None]
        if leaving:
            self.ray.wait(leaving, num_returns=len(leaving), timeout=WAIT_SECONDS)
        for worker in workers:
            self.workers.remove(worker)
            with contextlib.suppress(self.ray.exceptions.RayError):
                self.ray.kill(worker.actor)

    def answered(self) -> list[_Hired]:
        """Wait a moment for answers, and return the workers that gave one or were lost."""
        asked = {worker.answer: worker for worker in self.workers if worker.answer is not None}
        if not asked:  # the cluster has lost all its devices
            time.sleep(WAIT_SECONDS)
            return []
        ready, others = self.ray.wait(list(asked), num_returns=1, timeout=WAIT_SECONDS)
        if ready and others:
            ready += self.ray.wait(others, num_returns=len(others), timeout=0)[0]
        return [asked[reference] for reference in ready]

    def answer(self, worker: _Hired) -> Any:
        """Return the answer of a worker, or raise its error; `WorkerLost` if there is none."""
        reference, worker.answer = worker.answer, None
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self.ray.exceptions.RayError as error:
            raise WorkerLost(error) from error


class _Round:
    """Trains some waves to their ends."""

    def __init__(self, devices: RayDevices, directory: SweepDirectory, waves: Sequence[Wave], total: int) -> None:
        self.devices, self.directory, self.waves, self.total = devices, directory, waves, total
        self.waiting = deque(waves)
        self.losses: Counter[int] = Counter()
        """By wave, how often it was lost since its last checkpoint."""
        self.too_large: WaveTooLarge | None = None
        self.stop_reason = ""
        budget = devices.trainer.total_steps(waves[0].members[0])
        sizes = {wave.number: len(wave.members) for wave in waves}
        self.display = WavesProgress(budget, sizes, total, devices.trainer.progress)

    def run(self) -> None:
        """Hand out waves and receive what they send until all have ended."""
        with signals.handled(self._stop), self.display:
            while self.waiting or self._busy():
                if self.stop_reason:
                    self.waiting.clear()
                self.devices.hire(len(self.waiting) + self._busy())
                for worker in self.devices.workers:
                    if self.waiting and worker.place and worker.wave is None:
                        self._begin(worker, self.waiting.popleft())
                for worker in self.devices.answered():
                    self._hear(worker)
        if self.too_large is not None:
            raise self.too_large
        if self.stop_reason and not all(map(self.directory.is_finished, self.waves)):
            raise Stopped(self.stop_reason)

    def _busy(self) -> int:
        return sum(worker.wave is not None for worker in self.devices.workers)

    def _stop(self, reason: str) -> None:
        """Stop all waves after their current chunks."""
        self.stop_reason = reason

    def _begin(self, worker: _Hired, wave: Wave) -> None:
        """Let a worker train a wave, from its latest checkpoint if it has one."""
        worker.wave = wave
        worker.actor.begin.remote(wave, pack(self.directory.wave_path(wave.number), {}))
        worker.answer = worker.actor.ask.remote(self.stop_reason)
        self.display.begin(wave.number, worker.place)

    def _hear(self, worker: _Hired) -> None:
        """Receive the answer of a worker."""
        try:
            answer = self.devices.answer(worker)
        except WorkerLost as error:
            self._lose(worker, error)
        except TooLarge as error:
            assert worker.wave is not None
            self.too_large = WaveTooLarge(worker.wave, str(error))
            self.stop_reason = self.stop_reason or f"wave {worker.wave.number + 1} is too large"
            self._end(worker)
        else:
            if worker.wave is None:
                worker.place, self.devices.failed_starts = answer, 0
            else:
                self._receive(worker, worker.wave, answer)

    def _receive(self, worker: _Hired, wave: Wave, news: News) -> None:
        """Write what a worker sends, and ask it again."""
        for text in news.warnings:
            self._warn(text)
        if news.parcel is not None:
            unpack(self.directory.wave_path(wave.number), news.parcel)
            self.losses[wave.number] = 0
        if news.position is not None:
            self.display.update(wave.number, *news.position)
        if news.trained is not None:
            worker.compile_seconds += news.trained.compile_seconds
            self.devices.compile_seconds = max(self.devices.compile_seconds, worker.compile_seconds)
            self._end(worker)
        elif self.stop_reason and news.position is None:  # still compiling: there is nothing to save
            self.devices.dismiss(worker)
            self._end(worker)
        else:
            worker.answer = worker.actor.ask.remote(self.stop_reason)

    def _end(self, worker: _Hired) -> None:
        """A worker has no wave any more."""
        assert worker.wave is not None
        self.display.end(worker.wave.number)
        worker.wave = None

    def _lose(self, worker: _Hired, error: WorkerLost) -> None:
        """Give the wave of a lost worker to another one."""
        wave = worker.wave
        self.devices.dismiss(worker)
        if wave is None:
            self.devices.failed_starts += 1
            if self.devices.failed_starts == MOST_LOSSES:
                raise RunFailed(
                    f"{MOST_LOSSES} workers in a row could not start on the Ray cluster ({error}: {error.details}); "
                    "install Lehr in the same version on all its nodes."
                )
            return
        self._end(worker)
        self.losses[wave.number] += 1
        title = f"Wave {wave.number + 1} of {self.total} on {worker.place}"
        if self.losses[wave.number] == MOST_LOSSES:
            raise RunFailed(
                f"{title} was lost {MOST_LOSSES} times in a row without a checkpoint in between ({error}); once that "
                f"is fixed, resume the sweep '{self.directory.path}'."
            )
        if not self.stop_reason:
            self._warn(f"{title} was lost ({error}); it goes on from its last checkpoint on another device.")
            self.waiting.appendleft(wave)

    def _warn(self, text: str) -> None:
        """Print a warning, or log it if progress is not shown."""
        if self.devices.trainer.progress:
            self.display.message(text)
        else:
            logging.getLogger("lehr").warning(text)


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return shortened(lines[-1].strip(), 200) if lines else type(error).__name__
