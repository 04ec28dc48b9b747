"""`lehr doctor`: what this installation has, and whether it works."""

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
from lehr.training.directory import versions
from lehr.training.plan import use_compilation_cache

OPTIONAL = {
    "gymnasium": "spaces from and to Gymnasium's",
    "tensorboard": "to look at the files of --tensorboard",
    "wandb": "for --wandb",
}
"""The packages that not everybody needs, and what for."""


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """None: it tells all it knows."""


def run(arguments: argparse.Namespace) -> int:
    """Print everything, and exit with 1 if the computation goes wrong."""
    found = versions()
    works, verdict = _computation()
    facts = {
        "versions": [f"{name} {version}" for name, version in found.items() if name not in ("backend", "devices")],
        "devices": [_device(device) for device in jax.devices()],
        "host": f"{os.cpu_count()} CPUs, {_size(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} of memory",
        "cache": _cache(),
        "optional": [f"{name} {_version(name)}: {purpose}" for name, purpose in OPTIONAL.items()],
        "computation": verdict,
    }
    output.print_facts(output.console(), facts)
    return 0 if works else 1


def _device(device: Any) -> str:
    """The name of a device, and its memory where it tells."""
    stats = device.memory_stats() or {}
    memory = f", {_size(stats['bytes_limit'])} of memory" if "bytes_limit" in stats else ""
    return f"{device.id}: {device.device_kind} ({device.platform}){memory}"


def _cache() -> str:
    """Where compiled programs are kept, and how much there is."""
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
        return "is missing"


def _computation() -> tuple[bool, str]:
    """Whether a small compiled program gives what NumPy gives, and how to say it."""
    numbers = np.arange(64, dtype=np.float32).reshape(8, 8)
    answer = jax.jit(lambda x: jnp.sum(x @ x.T))(numbers)
    expected = np.sum(numbers @ numbers.T)
    if np.isclose(answer, expected, rtol=1e-2):  # a device may multiply in fewer digits
        return True, f"a compiled program runs on {jax.default_backend()}"
    return False, f"a compiled program gave {answer}, but NumPy {expected}; reinstall jax and jaxlib for this machine"


def _size(count: int) -> str:
    """Bytes with a unit.

    >>> _size(512), _size(1536), _size(3 * 2**30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    power = min(int(math.log2(max(count, 1)) / 10), 3)
    return f"{count / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
