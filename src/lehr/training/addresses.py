"""Where the processes of a run on several hosts find each other: from three variables, or from the cluster."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from lehr.errors import InputError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
TIME_LIMIT = "LEHR_CONNECT_SECONDS"
OPTION = "LEHR_HOSTS_OPTION"
"""Set by what started this process, if not the user: the option to start all processes again."""


@dataclass(frozen=True)
class Addresses:
    """The address of process 0, the number of processes, and that of this one; `None` if JAX finds them."""

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    seconds: float = 300.0
    """How long to wait for each other."""

    @classmethod
    def find(cls) -> "Addresses":
        """Read the variables; without them, JAX knows SLURM, Open MPI and Kubernetes.

        >>> os.environ.update(JAX_COORDINATOR_ADDRESS="10.0.0.1:1234", JAX_NUM_PROCESSES="2", JAX_PROCESS_ID="2")
        >>> Addresses.find()
        Traceback (most recent call last):
        lehr.errors.InputError: JAX_PROCESS_ID is 2, but JAX_NUM_PROCESSES is 2; give a number from 0 to 1.
        >>> for name in VARIABLES:
        ...     del os.environ[name]
        >>> Addresses.find()
        Addresses(coordinator=None, processes=None, process=None, seconds=300.0)
        """
        seconds = _number(TIME_LIMIT, "300")
        given = [name for name in VARIABLES if os.environ.get(name)]
        if not given:
            return cls(seconds=seconds)
        if missing := [name for name in VARIABLES if name not in given]:
            raise InputError(f"{given[0]} is set, but {missing[0]} is not; set all of {', '.join(VARIABLES)}, or none.")
        address = os.environ[VARIABLES[0]]
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise InputError(f"{VARIABLES[0]} is {address!r}; give the host and a port, such as 10.0.0.1:1234.")
        processes, process = (int(_number(name)) for name in VARIABLES[1:])
        if processes < 1:
            raise InputError(f"{VARIABLES[1]} is {processes}; give 1 or more.")
        if process not in range(processes):
            raise InputError(
                f"{VARIABLES[2]} is {process}, but {VARIABLES[1]} is {processes}; give a number from 0 to "
                f"{processes - 1}."
            )
        return cls(address, processes, process, seconds)

    def initialise_jax(self) -> None:
        """Connect the devices of all processes, unless the program did that already."""
        if jax.distributed.is_initialized():
            return
        if self.coordinator is not None and self.process == 0:
            self._check_port(self.coordinator)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(
                self.coordinator,
                self.processes,
                self.process,
                cluster_detection_method=None if self.coordinator is None else "deactivate",
                initialization_timeout=int(self.seconds) + 60,  # ours comes first: JAX would abort the process
            )
        except ValueError as error:
            raise InputError(
                f"distributed is set, but there is neither a cluster that JAX knows (SLURM, Open MPI, Kubernetes) nor "
                f"the variables {', '.join(VARIABLES)}; set them, or drop distributed."
            ) from error
        except RuntimeError as error:
            if "before" not in str(error):
                raise
            raise InputError(
                "distributed is set, but JAX is in use already; call lehr.train before anything else that uses JAX, "
                "or call jax.distributed.initialize yourself at the start."
            ) from error

    def _check_port(self, coordinator: str) -> None:
        """Refuse a port in use before JAX shares it with whoever has it, and aborts."""
        port = int(coordinator.rpartition(":")[2])
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            raise InputError(
                f"{VARIABLES[0]} is {coordinator}, but process 0 cannot listen to port {port} "
                f"({os.strerror(error.errno or 0)}); choose another one, and check that only one process has "
                f"{VARIABLES[2]}=0."
            ) from error

    @contextlib.contextmanager
    def time_limit(self) -> Iterator[None]:
        """End this process with a sentence if it takes too long."""
        timer = threading.Timer(self.seconds, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        who = "the cluster's processes" if self.coordinator is None else f"{self.processes} processes"
        where = "" if self.coordinator is None else f" at {self.coordinator}"
        text = (
            f"Not all of {who} met{where} within {self.seconds:g} s; check the address and that all were started, or "
            f"set {TIME_LIMIT} to wait longer."
        )
        with contextlib.suppress(OSError):
            os.write(2, f"lehr: {text}\n".encode())
        os._exit(2)  # the main thread waits inside JAX, which cannot be interrupted


def option() -> str:
    """The option of `lehr resume` that continues this run on several hosts."""
    return os.environ.get(OPTION) or "--distributed"


def _number(name: str, default: str = "") -> float:
    text = os.environ.get(name) or default
    try:
        value = float(text) if name == TIME_LIMIT else int(text)
    except ValueError:
        raise InputError(f"{name} is {text!r}; give a number.") from None
    if name == TIME_LIMIT and not 0 < value < 1e6:
        raise InputError(f"{name} is {text}; give a positive number of seconds.")
    return value
