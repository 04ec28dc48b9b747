"""Links to actors: in a thread, the worker itself; otherwise, a proxy."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Protocol

import jax

from lehr.acting.actors.actor import ActorLost, Arrival, Blueprint, Weights, Worker
from lehr.envs.host.base import EnvironmentFailed
from lehr.errors import InputError
from lehr.plugins import require


class Link(Protocol):
    """Connection to one actor."""

    def collect(self, weights: Weights) -> Arrival:
        """Return the next rollout. Raise `EnvironmentFailed` if the environment fails, `ActorLost` for other errors."""

    def close(self) -> None:
        """Stop the actor after its current rollout."""

    def abort(self) -> None:
        """Stop the actor immediately; a running `collect` raises."""


class ProcessLink:
    """An actor in its own process, on the CPU."""

    def __init__(self, blueprint: Blueprint) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, blueprint), name=f"lehr-actor-{blueprint.index}")
        self.answered = False
        try:
            self.process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise EnvironmentFailed(
                f"The environment {blueprint.env.name} cannot be pickled for another process ({error}); set actors to "
                "threads."
            ) from error
        theirs.close()  # so that the connection ends when the process does

    def collect(self, weights: Weights) -> Arrival:
        """Return the next rollout."""
        try:
            self.connection.send(weights)
            answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            hint = ""
            if not self.answered and self.process.exitcode == 1:
                hint = "; with actors=processes, a script must call train under if __name__ == '__main__'"
            text = f"its process {self.process.pid} ended with code {self.process.exitcode}{hint}"
            raise ActorLost(text) from None
        self.answered = True
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Ask the process to stop; kill it if it does not stop soon."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(5)
        self.abort()
        self.connection.close()

    def abort(self) -> None:
        """Kill the process."""
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(connection: Connection, blueprint: Blueprint) -> None:
    """Serve rollouts in an actor's process until the trainer stops it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, but only the trainer handles it
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
            except Exception as error:  # the rollout cannot be pickled
                connection.send(ActorLost.by(error))


class RayLink:
    """A Ray actor on any machine of the cluster, on the CPU."""

    def __init__(self, blueprint: Blueprint) -> None:
        self.ray = require("ray", "ray", "actors=ray")
        self.worker = self.ray.remote(num_cpus=1)(_RayWorker).remote(blueprint)

    def collect(self, weights: Weights) -> Arrival:
        """Return the next rollout."""
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
        """Stop the actor."""
        self.abort()

    def abort(self) -> None:
        """Kill the actor."""
        self.ray.kill(self.worker)


class _RayWorker(Worker):
    """A worker in a Ray process."""

    def __init__(self, blueprint: Blueprint) -> None:
        jax.config.update("jax_platforms", "cpu")
        super().__init__(blueprint)


@contextlib.contextmanager
def ray_cluster(what: str = "actors=ray") -> Iterator[float]:
    """Connect to the cluster at `RAY_ADDRESS`, or start one, and yield its CPU count; reuse an existing connection.

    Args:
        what: what needs it, for the error message.
    """
    ray = require("ray", "ray", what)
    if ray.is_initialized():
        yield ray.cluster_resources().get("CPU", 0.0)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hide Ray's deprecation warnings from the user
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        except (ConnectionError, ValueError, RuntimeError) as error:
            if "RAY_ADDRESS" not in os.environ:
                raise
            reason = " ".join(str(error).split())
            raise InputError(
                f"RAY_ADDRESS is '{os.environ['RAY_ADDRESS']}', where no Ray cluster answers ({reason}); "
                "correct it, or unset it to start a local one."
            ) from error
    try:
        yield ray.cluster_resources().get("CPU", 0.0)
    finally:
        ray.shutdown()


LINKS: dict[str, Callable[[Blueprint], Link]] = {"threads": Worker, "processes": ProcessLink, "ray": RayLink}
"""Links by the value of `actors`."""
