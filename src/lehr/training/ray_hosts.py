"""Start a run on several nodes of a Ray cluster: one process on each, which then find each other by themselves.

Ray places the processes and gives them their GPUs. From then on they are the processes of `--distributed`, as on any
other cluster; this one shows what the first of them prints, and passes signals on.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lehr.acting.actors.links import ray_cluster
from lehr.errors import InputError
from lehr.plugins import require
from lehr.training import signals
from lehr.training.addresses import OPTION, VARIABLES
from lehr.training.hosts import GRACE, SILENT_SECONDS
from lehr.training.record import RunFailed

READ_SECONDS = 0.5
"""A process that prints nothing is asked again after this time."""
PLACE_SECONDS = 60.0
"""Wait this long until all nodes are free."""
_LOST = -1
"""The exit code of a process that did not end by itself, or a lower one."""


class HostProcess:
    """On one node, the process of a run: a Ray actor, which ends with the one who started it."""

    def address(self) -> str:
        """An address of this node, with a free port."""
        host = require("ray.util", "ray", "--on ray").get_node_ip_address()
        with socket.create_server(("", 0)) as free:
            return f"{host}:{free.getsockname()[1]}"

    def start(self, words: Sequence[str], variables: dict[str, str], folder: str) -> None:
        """Start `lehr` with these words in a folder."""
        if not Path(folder).is_dir():
            raise InputError(
                f"{socket.gethostname()} has no folder '{folder}'; start the run in one that all nodes share."
            )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lehr", *words, "--distributed"],
            cwd=folder,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()

    def read(self) -> tuple[bytes, int | None]:
        """Wait a moment for output; return it, and the exit code if there will be no more."""
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._output, selectors.EVENT_READ)
            if not waiting.select(READ_SECONDS):
                return b"", None
        text = os.read(self._output, 1 << 16)
        return text, None if text else self._process.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        self._process.send_signal(number)


def _end_with_parent() -> None:
    """Listen to signals, which a Ray worker need not, and ask Linux for one if the actor is killed."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def run_on_ray(words: Sequence[str]) -> int:
    """Run `lehr` with these words on all nodes of a Ray cluster that have GPUs, or CPUs if none has.

    Returns:
        its exit code.
    """
    with ray_cluster("--on ray"), _placed() as actors:
        ray = require("ray", "ray", "--on ray")
        try:
            address = ray.get(actors[0].address.remote())
            starts = []
            for index, actor in enumerate(actors):
                variables = dict(zip(VARIABLES, (address, str(len(actors)), str(index)), strict=True))
                starts.append(actor.start.remote(words, variables | {OPTION: "--on ray"}, os.getcwd()))
            ray.get(starts)
        except ray.exceptions.RayTaskError as error:
            raise error.cause or error from None
        except ray.exceptions.RayError as error:
            kind = type(error).__name__
            raise RunFailed(
                f"A node of the Ray cluster was lost while the run began ({kind}); start it again."
            ) from None
        return _watched(ray, actors)


def _watched(ray: Any, actors: Sequence[Any]) -> int:
    """Show what the first process prints until all have ended; return its exit code, or that of one that failed."""
    codes: dict[int, int] = {}
    kept = dict.fromkeys(range(len(actors)), b"")
    reasons: list[str] = []
    ended: float | None = None
    with signals.handled(reasons.append):
        while len(codes) < len(actors) and (ended is None or time.monotonic() < ended + SILENT_SECONDS + 4 * GRACE):
            while reasons:
                actors[0].send_signal.remote(signal.Signals[reasons.pop(0).removeprefix("signal ")])
            running = [index for index in range(len(actors)) if index not in codes]
            answers = [actors[index].read.remote() for index in running]
            for index, answer in zip(running, answers, strict=True):
                try:
                    text, code = ray.get(answer)
                except ray.exceptions.RayError:  # the node is gone; the other processes end by themselves and say so
                    text, code = b"", _LOST
                kept[index] = (kept[index] + text)[-10_000:]
                if index == 0:
                    sys.stdout.buffer.write(text)
                    sys.stdout.buffer.flush()
                if code is not None:
                    codes[index] = code
                    ended = ended or time.monotonic()
    first = codes.get(0, _LOST)
    if first > 0:  # it said why
        return first
    for index, code in sorted(codes.items()):
        if code > 0:
            sys.stderr.write(_last_words(kept[index]))
            return code
    if first < 0:
        raise RunFailed("All processes of the run were lost; go on with 'lehr resume RUN --on ray'.")
    return 0


def _last_words(printed: bytes) -> str:
    """The sentence with which a process ended, or all that it printed if there is none.

    >>> _last_words(b"a warning of JAX\\n\\nlehr: Process 0 of 2 is gone.\\n")
    'lehr: Process 0 of 2 is gone.\\n'
    """
    text = printed.decode(errors="replace")
    sentences = [line for line in text.splitlines() if line.startswith("lehr: ")]
    return f"{sentences[-1]}\n" if sentences else text


@contextlib.contextmanager
def _placed() -> Any:
    """Reserve one place on each node, and yield an actor in each."""
    ray = require("ray", "ray", "--on ray")
    groups = require("ray.util.placement_group", "ray", "--on ray")
    strategies = require("ray.util.scheduling_strategies", "ray", "--on ray")
    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    kind = "GPU" if any(node.get("GPU", 0) >= 1 for node in found) else "CPU"
    sizes = [int(node[kind]) for node in found if node.get(kind, 0) >= 1]
    if not sizes:
        raise InputError("The Ray cluster has neither a GPU nor a CPU; add a node to it with 'ray start'.")
    each = {kind: min(sizes)}  # every process has equally many devices
    group = groups.placement_group([each] * len(sizes), strategy="STRICT_SPREAD")
    try:
        if not group.wait(PLACE_SECONDS):
            raise InputError(
                f"{len(sizes)} nodes of the Ray cluster did not all have {min(sizes)} {kind}s free within "
                f"{PLACE_SECONDS:g} s; wait until what runs there has ended."
            )
        options = {"num_gpus": min(sizes), "num_cpus": 0} if kind == "GPU" else {"num_cpus": min(sizes)}
        made = ray.remote(**options)(HostProcess)
        yield [
            made.options(
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index
                )
            ).remote()
            for index in range(len(sizes))
        ]
    finally:
        groups.remove_placement_group(group)  # ends the actors too
