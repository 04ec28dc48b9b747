"""Actors of their own for environments on the host: they act while the learner learns, and feed it through a queue.

    newest parameters ─► actor 0 ─┐
    newest parameters ─► actor 1 ─┼─► queue, bounded ─► learner, one rollout an update
    newest parameters ─► actor … ─┘

An actor is a thread, a process, or a Ray actor on some machine. Each has environments of its own and makes whole
rollouts, with the parameters that were the newest when it began one; `rollout/lag` counts the updates until it is
learned from. Where the queue is full, actors wait, so that nothing grows old in it. An actor that is lost is replaced,
and nothing else stops.
"""

import contextlib
import dataclasses
import multiprocessing
import pickle
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lehr.coefficients import Coefficients
from lehr.collector import Collector, Update, without_actor
from lehr.envs.host import EnvironmentFailed, HostEnvironment
from lehr.envs.optional import load
from lehr.host import Interrupted
from lehr.iteration import Program, derive, make_program
from lehr.networks import NetworkConfig
from lehr.normalise import RewardScaling
from lehr.rollout import Collected
from lehr.types import PyTree, TrainState

MOST_LOSSES = 3
"""So often in a row an actor is replaced before it has given anything."""

PATIENCE = 5.0
"""Seconds that actors have to end their rollouts when a run is over."""

WATCHED = ("rollout/lag", "actors/queue", "actors/lost", "actors/steps_per_second", "learner/waited")
"""What is measured here at every update: by how many updates its rollout lagged, rollouts that waited in the queue,
actors lost so far, env steps per second of all actors while they act, and how long the learner waited, in seconds."""


class Weights(NamedTuple):
    """What an actor acts with."""

    updates: int
    """How many updates they have seen."""
    packed: np.ndarray
    """The parameters as one vector."""
    statistics: PyTree
    """By which observations are normalised, `()` for not at all."""


class Arrival(NamedTuple):
    """A rollout, and how it came about."""

    updates: int
    """Those of the weights it was made with."""
    collected: Collected
    """NumPy arrays, without an actor."""
    seconds: float
    life: int = 0
    """Of the actor: another one, with new episodes, where it was lost."""


class ActorLost(RuntimeError):
    """An actor is no more."""


@dataclass(frozen=True)
class Blueprint:
    """What an actor is made from, wherever it is."""

    env: HostEnvironment
    algorithm: str
    config: Any
    network: NetworkConfig
    seed: int
    index: int = 0
    """Which of the actors."""
    updates: int = 0
    """Those of the run when it was begun or resumed."""
    life: int = 0
    """How many actors of this index were lost before."""


class Worker:
    """One actor: environments of its own, and how to act in them."""

    def __init__(self, blueprint: Blueprint) -> None:
        key = jax.random.key(blueprint.seed)
        program, params = make_program(
            blueprint.algorithm, blueprint.env, blueprint.config, blueprint.network, derive(key, "network")
        )
        for purpose in ("index", "updates", "life"):
            key = derive(key, f"actor's {purpose}", getattr(blueprint, purpose))
        self.key, self.rollouts, self.life = key, 0, blueprint.life
        self.collector = Collector(program, params)
        self.collector.start()
        self.actor = self.collector.reset(derive(key, "environments"))

    def collect(self, weights: Weights) -> Arrival:
        """The next rollout."""
        begin = time.perf_counter()
        packed, statistics = jax.device_put((weights.packed, weights.statistics))
        collected = self.collector.collect(packed, statistics, self.actor, self.key, self.rollouts)
        self.actor, self.rollouts = collected.actor, self.rollouts + 1
        given = jax.device_get(collected._replace(actor=()))  # type: ignore[arg-type]
        return Arrival(weights.updates, given, time.perf_counter() - begin, self.life)

    def close(self) -> None:
        """End the environments."""
        self.collector.close()


class LateWorker:
    """A worker that is made with its first rollout, so that what goes wrong then is told like everything else."""

    def __init__(self, blueprint: Blueprint) -> None:
        self.blueprint = blueprint
        self.worker: Worker | None = None

    def collect(self, weights: Weights) -> Arrival:
        """The next rollout."""
        self.worker = self.worker or Worker(self.blueprint)
        return self.worker.collect(weights)

    def close(self) -> None:
        """End the environments."""
        if self.worker is not None:
            self.worker.close()


# Where an actor is ---------------------------------------------------------------------------------------------------


class Link(Protocol):
    """The way to one actor."""

    def collect(self, weights: Weights) -> Arrival:
        """Its next rollout. Raises `ActorLost`, or `EnvironmentFailed` where it is not the actor's fault."""

    def close(self) -> None:
        """End it, after the rollout under way."""

    def abort(self) -> None:
        """End it at once; a `collect` under way raises."""


class ThreadLink:
    """An actor in the thread that asks for its rollouts."""

    def __init__(self, blueprint: Blueprint) -> None:
        self.worker = LateWorker(blueprint)

    def collect(self, weights: Weights) -> Arrival:
        """Its next rollout."""
        try:
            return self.worker.collect(weights)
        except EnvironmentFailed:
            raise
        except Exception as error:
            raise ActorLost(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the environments."""
        self.worker.close()

    def abort(self) -> None:
        """A thread cannot be ended from outside."""


class ProcessLink:
    """An actor in a process of its own, which computes on the CPU."""

    def __init__(self, blueprint: Blueprint) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, blueprint), name=f"lehr-actor-{blueprint.index}")
        self.answered = False
        try:
            self.process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise EnvironmentFailed(
                f"The environment {blueprint.env.name} cannot be sent to a process of its own ({error}); set actors to "
                "threads."
            ) from error
        theirs.close()  # so that the end of the process is the end of the connection

    def collect(self, weights: Weights) -> Arrival:
        """Its next rollout."""
        try:
            self.connection.send(weights)
            answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            hint = ""
            if not self.answered and self.process.exitcode == 1:
                hint = "; a script that trains with processes does so under if __name__ == '__main__'"
            text = f"its process {self.process.pid} ended with code {self.process.exitcode}{hint}"
            raise ActorLost(text) from None
        self.answered = True
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Ask it to end, and do not wait for long."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(5)
        self.abort()
        self.connection.close()

    def abort(self) -> None:
        """Kill it."""
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(connection: Connection, blueprint: Blueprint) -> None:
    """The life of an actor's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the trainer decides what it means
    jax.config.update("jax_platforms", "cpu")
    worker = LateWorker(blueprint)
    try:
        while (weights := connection.recv()) is not None:
            try:
                connection.send(worker.collect(weights))
            except EnvironmentFailed as error:
                connection.send(EnvironmentFailed(str(error)))
            except Exception as error:
                connection.send(ActorLost(f"{type(error).__name__}: {error}"))
    except (EOFError, OSError):
        pass  # the trainer is gone
    worker.close()


class RayLink:
    """A Ray actor, on this machine or another of the cluster, which computes on the CPU."""

    def __init__(self, blueprint: Blueprint) -> None:
        self.ray = load("ray", "ray", "actors=ray")
        self.worker = self.ray.remote(num_cpus=1)(_RayWorker).remote(blueprint)

    def collect(self, weights: Weights) -> Arrival:
        """Its next rollout."""
        try:
            return self.ray.get(self.worker.collect.remote(weights))
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EnvironmentFailed):
                raise EnvironmentFailed(str(error.cause)) from None
            raise ActorLost(f"{type(error.cause).__name__}: {error.cause}") from None
        except self.ray.exceptions.RayError as error:
            raise ActorLost(type(error).__name__) from error

    def close(self) -> None:
        """End it."""
        self.abort()

    def abort(self) -> None:
        """End it at once."""
        self.ray.kill(self.worker)


class _RayWorker(LateWorker):
    """A worker in a process of Ray's."""

    def __init__(self, blueprint: Blueprint) -> None:
        jax.config.update("jax_platforms", "cpu")
        super().__init__(blueprint)


@contextlib.contextmanager
def ray_cluster() -> Iterator[float]:
    """The CPUs of the cluster that `RAY_ADDRESS` names, or of a new one; one that is connected already stays so."""
    ray = load("ray", "ray", "actors=ray")
    if ray.is_initialized():
        yield ray.cluster_resources().get("CPU", 0.0)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what others deprecate is not the user's affair
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield ray.cluster_resources().get("CPU", 0.0)
    finally:
        ray.shutdown()


LINKS: dict[str, Callable[[Blueprint], Link]] = {"threads": ThreadLink, "processes": ProcessLink, "ray": RayLink}
"""By what `actors` is set to."""


# All of them ---------------------------------------------------------------------------------------------------------


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


class ActorRunner:
    """The updates of a run whose rollouts come from actors of their own.

    What was learned is saved and resumed to the bit; the environments begin anew, and rollouts under way are lost.
    """

    def __init__(
        self, program: Program, coefficients: Coefficients, state: TrainState, pool: Pool, warn: Callable[[str], object]
    ) -> None:
        self.program, self.pool, self.warn = program, pool, warn
        self.update = Update(program, coefficients, state, WATCHED)
        self.names = self.update.names
        self._pack = Collector(program, state.learner.params).pack
        self._returns: dict[tuple[int, int], jax.Array] = {}
        """By actor and life: the discounted returns under way, by which rewards are scaled."""
        self._speeds: dict[int, float] = {}

    def compile(self, state: TrainState) -> None:
        """Compile the learning; the actors compile their part for themselves."""
        self.update.compile(state)

    def begin(self, state: TrainState) -> TrainState:
        """Start the actors, and wait until one has made a rollout: then what it compiles is compiled."""
        if updates := int(state.updates):
            env = self.pool.blueprint.env
            self.warn(f"The environments of {env.name} begin new episodes: those of actors are not brought back.")
        self.pool.blueprint = dataclasses.replace(self.pool.blueprint, updates=updates)
        self.pool.start(self._weights(state, updates))
        self.pool.wait()
        return state

    def advance(self, state: TrainState, count: int) -> tuple[TrainState, np.ndarray]:
        """Make `count` updates. What fails leaves the state of the last whole one."""
        rows: list[jax.Array] = []
        learned, updates = state, int(state.updates)
        try:
            for number in range(updates, updates + count):
                begin = time.perf_counter()
                index, arrival = self.pool.take()
                self._speeds[index] = self.program.steps_per_update / arrival.seconds
                watched = {
                    "rollout/lag": number - arrival.updates,
                    "actors/queue": self.pool.queue.qsize(),
                    "actors/lost": self.pool.lost,
                    "actors/steps_per_second": sum(self._speeds.values()),
                    "learner/waited": time.perf_counter() - begin,
                }
                whose = index, arrival.life
                before = self._swapped(learned, whose)
                after, row = self.update(before, arrival.collected, watched)
                self.pool.publish(self._weights(after, number + 1))
                if isinstance(after.reward_scaling, RewardScaling):
                    self._returns[whose] = after.reward_scaling.returns
                learned = after._replace(actor=state.actor)
                rows.append(row)
        except (EnvironmentFailed, ActorLost) as error:
            raise Interrupted(error, learned, self.update.table(rows)) from error
        return learned, self.update.table(rows)

    def close(self) -> None:
        """End the actors."""
        self.pool.close()

    def _weights(self, state: TrainState, updates: int) -> Weights:
        packed, statistics = jax.device_get((self._pack(state.learner.params), state.observation_statistics))
        return Weights(updates, packed, statistics)

    def _swapped(self, state: TrainState, whose: tuple[int, int]) -> TrainState:
        """The state with the returns under way of this actor's environments."""
        state = without_actor(state)
        if not isinstance(state.reward_scaling, RewardScaling):
            return state
        returns = self._returns.get(whose, jnp.zeros_like(state.reward_scaling.returns))
        return state._replace(reward_scaling=dataclasses.replace(state.reward_scaling, returns=returns))
