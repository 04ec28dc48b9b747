"""Which kernels JAX has lowered for a GPU before, so that a later process need not try.

Before a kernel becomes part of a larger program, it is lowered alone, so that one that JAX refuses can be replaced.
That takes a second. What was lowered is remembered in `kernels.json` beside JAX's compiled programs, by the versions of
JAX and jaxlib and the source of the kernels. Without a cache on this machine, or with a damaged file, nothing is
remembered.
"""

import contextlib
import functools
import hashlib
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from lehr.files import write_json
from lehr.types import PyTree

_MOST = 1000
"""Kernels that are remembered; the oldest are forgotten first."""


def check(description: str, kernel: Callable[..., Any], *arguments: PyTree) -> None:
    """Raise JAX's error if it cannot lower a kernel for a GPU; one that it lowered before is not tried again.

    Args:
        description: everything that the kernel depends on besides its source and the arguments' shapes.
        kernel: a function of arrays.
        arguments: arrays or their shapes.
    """
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), arguments)
    name = _name(f"{description} {given}")
    if name in _lowered or name in (saved := _read()):
        _lowered.add(name)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compiling the program will repeat them
        jax.jit(kernel).trace(*given).lower(lowering_platforms=("cuda",))
    _lowered.add(name)
    if (path := _path()) is not None:
        with contextlib.suppress(OSError):  # the disk is full, or another process writes it too
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, [*saved, name][-_MOST:])


_lowered: set[str] = set()
"""The kernels that this process knows."""


def _name(description: str) -> str:
    lasting = re.sub(r"0x[0-9a-f]+", "", description)  # addresses differ in every process
    return hashlib.sha256(f"{_source()} {lasting}".encode()).hexdigest()[:32]


@functools.cache
def _source() -> str:
    """What decides whether JAX lowers a kernel, besides its description."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    digests = (hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    return " ".join([jax.__version__, jaxlib.__version__, *digests])


def _path() -> Path | None:
    """The file, in the folder of JAX's compilation cache; `None` if that is off or on another machine."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    return None if not folder or "://" in folder else Path(folder) / "kernels.json"


def _read() -> list[str]:
    try:
        path = _path()
        found = [] if path is None else json.loads(path.read_text())
        return found if isinstance(found, list) else []
    except (OSError, ValueError, RecursionError):
        return []
