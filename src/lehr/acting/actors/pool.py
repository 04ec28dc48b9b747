"""Several actors, the queue they feed, and the threads that keep them busy."""

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
"""So often in a row an actor is replaced before it has given anything."""

PATIENCE = 5.0
"""Seconds that actors have to end their rollouts when a run is over."""


class Pool:
    """Actors, the queue they feed, and a thread for each that keeps it busy."""

    def __init__(
        self, kind: str, blueprint: Blueprint, count: int, queue_size: int, warn: Callable[[str], object]
    ) -> None:
        self.kind, self.blueprint, self.count, self.warn = kind, blueprint, count, warn
        self.queue: queue.Queue[tuple[int, Arrival]] = queue.Queue(maxsize=queue_size)
        self.lost = 0
        self.links: dict[int, Link] = {}
        self._weights: Weights | None = None
        self._failure: Exception | None = None
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._stack = contextlib.ExitStack()
        self._threads = [
            threading.Thread(target=self._tend, args=(index,), name=f"lehr-actor-{index}", daemon=True)
            for index in range(count)
        ]

    def start(self, weights: Weights) -> None:
        """Let all actors begin."""
        if self.kind == "ray":
            cpus = self._stack.enter_context(ray_cluster())
            if cpus < self.count:
                self.warn(f"The Ray cluster has {cpus:g} CPUs for {self.count} actors: some wait until it has more.")
        self.publish(weights)
        for thread in self._threads:
            thread.start()

    def publish(self, weights: Weights) -> None:
        """Every rollout that begins from now on is made with these."""
        self._weights = weights

    def wait(self) -> None:
        """Wait until there is a rollout."""
        while self.queue.empty():
            self._check()
            time.sleep(0.01)

    def take(self) -> tuple[int, Arrival]:
        """The oldest rollout in the queue, and the index of its actor."""
        while True:
            self._check()
            with contextlib.suppress(queue.Empty):
                return self.queue.get(timeout=0.1)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End all actors."""
        self._closing.set()
        begun = [thread for thread in self._threads if thread.ident is not None]
        _join(begun, PATIENCE)
        for link in list(self.links.values()):
            link.abort()
        _join(begun, PATIENCE)
        self._stack.close()

    def _tend(self, index: int) -> None:
        """Keep one actor busy until the end; where it is lost, make another."""
        # Ctrl-C is the trainer's: a process that is started from here does not hear it, not even while it starts.
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
                    self.warn(f"Actor {index} was lost ({error}); another takes its place.")
        except Exception as error:
            self._failure = error
        finally:
            if link := self.links.pop(index, None):
                link.close()

    def _ask(self, index: int, life: int) -> Arrival:
        """A rollout of the actor, which is made if there is none."""
        if index not in self.links:
            self.links[index] = LINKS[self.kind](dataclasses.replace(self.blueprint, index=index, life=life))
        assert self._weights is not None
        return self.links[index].collect(self._weights)

    def _put(self, index: int, arrival: Arrival) -> None:
        """Into the queue, as soon as there is room."""
        while not self._closing.is_set():
            with contextlib.suppress(queue.Full):
                self.queue.put((index, arrival), timeout=0.1)
                return


def _join(threads: list[threading.Thread], seconds: float) -> None:
    """Wait for all threads, so many seconds in all."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
