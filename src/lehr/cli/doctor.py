"""`lehr doctor`: versions, devices, cache and optional packages, and a self-test."""

import argparse
import math
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.cli import output
from lehr.training.compilation_cache import use_compilation_cache
from lehr.training.directory import versions

OPTIONAL = {
    "gymnasium": "for gym: environments and Gymnasium spaces",
    "tensorboard": "to view the logs that --tensorboard writes",
    "wandb": "for --wandb",
}
"""Optional packages, and what they are for."""


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add nothing: the command has no arguments of its own."""


def run(arguments: argparse.Namespace) -> int:
    """Print the report, and exit with 1 if the self-test fails."""
    found = versions()
    passed, verdict = _self_test()
    facts = {
        "versions": [f"{name} {version}" for name, version in found.items() if name not in ("backend", "devices")],
        "devices": [_device(device) for device in jax.devices()],
        "host": f"{os.cpu_count()} CPUs, {_size(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} of memory",
        "cache": _cache(),
        "optional": [f"{name} {_version(name)} ({purpose})" for name, purpose in OPTIONAL.items()],
        "self-test": verdict,
    }
    output.print_facts(output.console(), facts)
    return 0 if passed else 1


def _device(device: Any) -> str:
    """The name of a device, and its memory if known."""
    stats = device.memory_stats() or {}
    memory = f", {_size(stats['bytes_limit'])} of memory" if "bytes_limit" in stats else ""
    return f"{device.id}: {device.device_kind} ({device.platform}){memory}"


def _cache() -> str:
    """Location and size of the compilation cache."""
    use_compilation_cache()
    place = getattr(jax.config, "jax_compilation_cache_dir", None)
    if place is None:
        return "off"
    sizes = [path.stat().st_size for path in Path(place).rglob("*") if path.is_file()]
    return f"{place}, {len(sizes)} files, {_size(sum(sizes))}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _self_test() -> tuple[bool, str]:
    """Compile and run a small program and compare its result with NumPy's: whether they agree, and a message."""
    numbers = np.arange(64, dtype=np.float32).reshape(8, 8)
    answer = jax.jit(lambda x: jnp.sum(x @ x.T))(numbers)
    expected = np.sum(numbers @ numbers.T)
    if np.isclose(answer, expected, rtol=1e-2):  # devices may multiply at reduced precision
        return True, f"passed on {jax.default_backend()}"
    return False, f"failed: JAX computed {answer}, NumPy {expected}; reinstall jax and jaxlib for this machine"


def _size(count: int) -> str:
    """Format a number of bytes.

    >>> _size(512), _size(1536), _size(3 * 2**30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    power = min(int(math.log2(max(count, 1)) / 10), 3)
    return f"{count / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
