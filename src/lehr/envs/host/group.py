"""Single Gymnasium environments that step together: in this process, or each in a worker process that is watched."""

import contextlib
import multiprocessing
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium.vector.utils import CloudpickleWrapper, create_shared_memory, read_from_shared_memory

from lehr.envs.host.answers import WrongAnswer, beyond, described
from lehr.envs.host.base import EnvironmentFailed
from lehr.envs.host.worker import Single, serve
from lehr.types import PyTree

PATIENCE = 2.0
"""Seconds that workers have to close their environments before they are killed."""

Answers = list[tuple[Any, ...]]


class Group(ABC):
    """`E` single environments. An answer to `step` begins with observation, reward, terminated and truncated."""

    def reset(self, seeds: Iterable[int]) -> PyTree:
        """Start an episode in each environment and return the observations `[E, ...]`."""
        return self.observations(self.each("reset", {index: (int(seed),) for index, seed in enumerate(seeds)}))

    def step(self, actions: np.ndarray) -> Answers:
        """Step each environment."""
        return self.each("step", dict(enumerate(zip(actions, strict=True))))

    @abstractmethod
    def reset_some(self, obs: PyTree, seeds: dict[int, int]) -> PyTree:
        """Start an episode in these environments, and put their observations into those of the others."""

    @abstractmethod
    def each(self, method: str, arguments: dict[int, tuple[Any, ...]]) -> Answers:
        """Call a method of `Single` in these environments, with these arguments."""

    @abstractmethod
    def observations(self, answers: Answers) -> PyTree:
        """The observations `[E, ...]` in the answers of all environments."""

    @abstractmethod
    def close(self) -> None:
        """Close the environments."""


class Local(Group):
    """Environments in this process, which step one after the other."""

    def __init__(self, singles: list[Single]) -> None:
        self.singles = singles
        # Without the layer in between: it only matters to environments that reset themselves.
        self.steps = [single.env.step if single.autoreset == "seeded" else single.step for single in singles]

    def step(self, actions: np.ndarray) -> Answers:
        """Step each environment."""
        return [step(action) for step, action in zip(self.steps, actions, strict=True)]

    def reset_some(self, obs: PyTree, seeds: dict[int, int]) -> PyTree:
        """Start an episode in these environments, and put their observations into those of the others."""
        for index, seed in seeds.items():
            put(obs, index, self.singles[index].reset(seed)[0])
        return obs

    def each(self, method: str, arguments: dict[int, tuple[Any, ...]]) -> Answers:
        """Call a method of these environments."""
        return [getattr(self.singles[index], method)(*given) for index, given in arguments.items()]

    def observations(self, answers: Answers) -> PyTree:
        """Stack the observations."""
        return stack([answer[0] for answer in answers])

    def close(self) -> None:
        """Close the environments."""
        for single in self.singles:
            single.close()


class Workers(Group):
    """Environments in worker processes, which step at the same time.

    A worker that dies, or that does not answer a step within `step_timeout` seconds, raises `EnvironmentFailed`.
    """

    def __init__(
        self,
        name: str,
        functions: Sequence[Callable[[], Any]],
        space: gymnasium.Space,
        step_timeout: float | None,
    ) -> None:
        self.name, self.step_timeout, self.broken = name, step_timeout, False
        context: Any = multiprocessing.get_context("forkserver")  # forking is not safe after JAX has been used
        memory = create_shared_memory(space, n=len(functions), ctx=context)
        self.memory = read_from_shared_memory(space, memory, n=len(functions))
        self.pipes: list[connection.Connection] = []
        self.processes: list[Any] = []
        for index, function in enumerate(functions):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                name=f"lehr-environment-{index}",
                args=(index, CloudpickleWrapper(function), theirs, ours, memory),
                daemon=True,
            )
            process.start()
            theirs.close()  # so that the connection ends when the process does
            self.pipes.append(ours)
            self.processes.append(process)
        try:
            self.each("start", dict.fromkeys(range(len(functions)), ()))
        except BaseException:
            self.close()
            raise

    def reset_some(self, obs: PyTree, seeds: dict[int, int]) -> PyTree:
        """Start an episode in these environments; their observations appear among those of the others."""
        answers = self.each("reset", {index: (seed,) for index, seed in seeds.items()})
        for index, answer in zip(seeds, answers, strict=True):
            if answer[0] is not None or obs is not self.memory:
                put(obs, index, self._observation(index, answer))
        return obs

    def each(self, method: str, arguments: dict[int, tuple[Any, ...]]) -> Answers:
        """Call a method of these environments, all at the same time."""
        for index, given in arguments.items():
            try:
                self.pipes[index].send((method, given))
            except OSError:
                self._report_dead(index)
        return self._receive(method, list(arguments))

    def observations(self, answers: Answers) -> PyTree:
        """The shared memory; copies of the observations if one of them does not match its space."""
        if all(answer[0] is None for answer in answers):
            return self.memory
        return stack([self._observation(index, answer) for index, answer in enumerate(answers)])

    def close(self) -> None:
        """Close the environments; kill the processes of those that do not close in time."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError, ValueError):
                pipe.send(None)
        deadline = time.monotonic() + (0.0 if self.broken else PATIENCE)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()

    def _observation(self, index: int, answer: tuple[Any, ...]) -> PyTree:
        return pick(self.memory, index) if answer[0] is None else answer[0]

    def _receive(self, method: str, indices: list[int]) -> Answers:
        """Wait for the answers of these environments, and watch their processes."""
        limited = method in ("reset", "step") and self.step_timeout is not None
        deadline = time.monotonic() + (self.step_timeout or 0.0) if limited else None
        answers: dict[int, tuple[Any, ...]] = {}
        missing = {self.pipes[index]: index for index in indices}
        while missing:
            # A connection whose other end is gone is ready too, and receiving from it raises.
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = connection.wait(list(missing), left)
            if not ready:
                self.broken = True
                stuck = min(missing.values())
                raise EnvironmentFailed(
                    f"The environment {self.name} did not answer {method} within step_timeout={self.step_timeout:g} "
                    f"seconds: its worker {stuck} (process {self.processes[stuck].pid}) is still busy."
                )
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                index = missing.pop(pipe)
                try:
                    well, answer = pipe.recv()
                except (EOFError, OSError):
                    self._report_dead(index)
                if not well:
                    self.broken = True
                    if isinstance(answer, WrongAnswer):
                        raise answer
                    where = "its constructor" if method == "start" else method
                    raise EnvironmentFailed(
                        f"The environment {self.name} failed in {where} ({answer}), in worker {index}."
                    )
                answers[index] = answer
        return [answers[index] for index in indices]

    def _report_dead(self, index: int) -> NoReturn:
        self.broken = True
        process = self.processes[index]
        process.join(PATIENCE)
        raise EnvironmentFailed(
            f"The environment {self.name} is gone: its worker {index} (process {process.pid}) ended with code "
            f"{process.exitcode}."
        )


def pick(obs: PyTree, index: int) -> PyTree:
    """One observation of a batch."""
    return {name: pick(part, index) for name, part in obs.items()} if isinstance(obs, dict) else obs[index]


def put(into: PyTree, index: int, obs: PyTree) -> None:
    """Put one observation into a batch."""
    if isinstance(into, dict):
        for name, part in into.items():
            put(part, index, obs[name])
        return
    array, shape = np.asarray(obs), into.shape[1:]
    if array.shape != shape or not np.can_cast(array.dtype, into.dtype, "same_kind"):
        raise WrongAnswer("obs", described(array), f"{into.dtype}{list(shape)}")
    if (bad := beyond(array, into.dtype)) is not None:
        raise WrongAnswer("obs", str(bad), f"integers of {into.dtype}")
    into[index] = array


def stack(observations: Sequence[PyTree]) -> PyTree:
    """Stack the observations of single environments into a batch."""
    if isinstance(observations[0], dict):
        return {name: stack([obs[name] for obs in observations]) for name in observations[0]}
    try:
        return np.stack(observations)
    except ValueError:
        found = " and ".join(sorted({described(np.asarray(obs)) for obs in observations}))
        raise WrongAnswer("obs", found, "the same shape in every environment") from None
