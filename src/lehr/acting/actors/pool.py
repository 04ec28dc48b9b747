"""A pool of actors, the queue they feed, and a thread per actor that drives it."""

import contextlib
import dataclasses
import queue
import signal
import threading
import time
from collections.abc import Callable

from lehr.acting.actors.actor import ActorLost, Arrival, Blueprint, Weights
from lehr.acting.actors.links import LINKS, Link, ray_cluster

MOST_LOSSES = 3
"""Stop the run when an actor is lost this many times in a row without a rollout."""

PATIENCE = 5.0
"""Seconds that actors have to finish their rollouts when the run ends."""


class Pool:
    """Actors, the queue they feed, and a thread per actor that drives it."""

    def __init__(
        self, kind: str, blueprint: Blueprint, count: int, queue_size: int, warn: Callable[[str], object]
    ) -> None:
        self.kind, self.blueprint, self.count, self.warn = kind, blueprint, count, warn
        self.queue: queue.Queue[tuple[int, Arrival]] = queue.Queue(maxsize=queue_size)
        self.lost = 0
        self.links: dict[int, Link] = {}
        self._weights: Weights | None = None
        self._failure: BaseException | None = None
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._stack = contextlib.ExitStack()
        self._threads = [
            threading.Thread(target=self._tend, args=(index,), name=f"lehr-actor-{index}", daemon=True)
            for index in range(count)
        ]

    def start(self, weights: Weights) -> None:
        """Start all actors."""
        if self.kind == "ray":
            cpus = self._stack.enter_context(ray_cluster())
            if cpus < self.count:
                self.warn(f"The Ray cluster has {cpus:g} CPUs for {self.count} actors: some wait until more are free.")
        self.publish(weights)
        for thread in self._threads:
            thread.start()

    def publish(self, weights: Weights) -> None:
        """Use these weights for every rollout that starts from now on."""
        self._weights = weights

    def wait(self) -> None:
        """Wait for a rollout in the queue."""
        while self.queue.empty():
            self._check()
            time.sleep(0.01)

    def take(self) -> tuple[int, Arrival]:
        """Return the index of an actor and its rollout, the oldest in the queue."""
        while True:
            self._check()
            with contextlib.suppress(queue.Empty):
                return self.queue.get(timeout=0.1)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop all actors."""
        self._closing.set()
        begun = [thread for thread in self._threads if thread.ident is not None]
        _join(begun, PATIENCE)
        for link in list(self.links.values()):
            link.abort()
        _join(begun, PATIENCE)
        self._stack.close()

    def _tend(self, index: int) -> None:
        """Keep one actor busy until the end; replace it if it is lost."""
        # Only the trainer handles Ctrl-C: block it for processes started from this thread, even while they start.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            life, losses = 0, 0
            while not self._closing.is_set():
                try:
                    self._put(index, self._ask(index, life))
                    losses = 0
                except ActorLost as error:
                    if self._closing.is_set():
                        return
                    if link := self.links.pop(index, None):
                        link.close()
                    life, losses = life + 1, losses + 1
                    with self._lock:
                        self.lost += 1
                    if losses == MOST_LOSSES:
                        raise ActorLost(f"Actor {index} was lost {losses} times in a row ({error}).") from error
                    self.warn(f"Actor {index} was lost ({error}) and is replaced.")
        except BaseException as error:  # whatever ends this thread must end the run
            self._failure = error
        finally:
            if link := self.links.pop(index, None):
                link.close()

    def _ask(self, index: int, life: int) -> Arrival:
        """Return the actor's next rollout; create the actor if needed."""
        if index not in self.links:
            self.links[index] = LINKS[self.kind](dataclasses.replace(self.blueprint, index=index, life=life))
        assert self._weights is not None
        return self.links[index].collect(self._weights)

    def _put(self, index: int, arrival: Arrival) -> None:
        """Put a rollout into the queue, as soon as there is room."""
        while not self._closing.is_set():
            with contextlib.suppress(queue.Full):
                self.queue.put((index, arrival), timeout=0.1)
                return


def _join(threads: list[threading.Thread], seconds: float) -> None:
    """Wait for all threads, at most this many seconds in total."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
