"""The way to an actor: in a thread it is the worker itself, else something that stands for it here."""

import contextlib
import multiprocessing
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Protocol

import jax

from lehr.acting.actors.actor import ActorLost, Arrival, Blueprint, Weights, Worker
from lehr.envs.host.base import EnvironmentFailed
from lehr.plugins import require


class Link(Protocol):
    """The way to one actor."""

    def collect(self, weights: Weights) -> Arrival:
        """Its next rollout. Raises `ActorLost`, or `EnvironmentFailed` where it is not the actor's fault."""

    def close(self) -> None:
        """End it, after the rollout under way."""

    def abort(self) -> None:
        """End it at once; a `collect` under way raises."""


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
    worker = Worker(blueprint)
    with contextlib.closing(worker), contextlib.suppress(EOFError, OSError):  # the trainer is gone
        while (weights := connection.recv()) is not None:
            try:
                connection.send(worker.collect(weights))
            except (EnvironmentFailed, ActorLost) as error:
                connection.send(type(error)(str(error)))
            except OSError:
                raise
            except Exception as error:  # what was made cannot be sent
                connection.send(ActorLost.by(error))


class RayLink:
    """A Ray actor, on this machine or another of the cluster, which computes on the CPU."""

    def __init__(self, blueprint: Blueprint) -> None:
        self.ray = require("ray", "ray", "actors=ray")
        self.worker = self.ray.remote(num_cpus=1)(_RayWorker).remote(blueprint)

    def collect(self, weights: Weights) -> Arrival:
        """Its next rollout."""
        try:
            return self.ray.get(self.worker.collect.remote(weights))
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, (EnvironmentFailed, ActorLost)):
                raise type(cause)(str(cause)) from None
            raise ActorLost.by(cause) from None
        except self.ray.exceptions.RayError as error:
            raise ActorLost(type(error).__name__) from error

    def close(self) -> None:
        """End it."""
        self.abort()

    def abort(self) -> None:
        """End it at once."""
        self.ray.kill(self.worker)


class _RayWorker(Worker):
    """A worker in a process of Ray's."""

    def __init__(self, blueprint: Blueprint) -> None:
        jax.config.update("jax_platforms", "cpu")
        super().__init__(blueprint)


@contextlib.contextmanager
def ray_cluster() -> Iterator[float]:
    """The CPUs of the cluster that `RAY_ADDRESS` names, or of a new one; one that is connected already stays so."""
    ray = require("ray", "ray", "actors=ray")
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


LINKS: dict[str, Callable[[Blueprint], Link]] = {"threads": Worker, "processes": ProcessLink, "ray": RayLink}
"""By what `actors` is set to."""
