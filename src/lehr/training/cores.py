"""One CPU device for each core, so that the members of a population train on all of them."""

import contextlib
import math
import os
from pathlib import Path

import jax


def use_cores() -> None:
    """Let JAX see every core that this process may use as a CPU device; call it before JAX computes anything.

    One program runs small operations on one core, and those of a small agent are all small. Members of a population do
    not know of each other, so each core can run a program of its own. Where JAX has begun already, or the user has
    chosen a number of CPU devices, nothing changes.
    """
    is_chosen = getattr(jax.config, "jax_num_cpu_devices", 0) != -1 or "device_count" in os.environ.get("XLA_FLAGS", "")
    if not is_chosen:
        with contextlib.suppress(RuntimeError):  # JAX has begun
            jax.config.update("jax_num_cpu_devices", number_of_cores())


def are_few() -> bool:
    """Whether one program that is compiled keeps all cores busy, so that a second at the same time delays it."""
    return number_of_cores() <= 2


def number_of_cores() -> int:
    """The number of cores that this process may use."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # the limit of a container: microseconds in each period, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        found = min(found, math.ceil(int(quota) / int(period)))
    return max(found, 1)
