"""Which kernels JAX has lowered for a GPU before, so that a later process need not try.

Before a kernel becomes part of a larger program, it is lowered alone, so that one that JAX refuses can be replaced.
That takes a second. What was lowered is remembered in `kernels.json` beside JAX's compiled programs, by the versions of
JAX and jaxlib, the source of the kernels, and `settings`. Without a cache on this machine, or with a damaged file,
nothing is remembered.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from lehr.files import write_json
from lehr.types import PyTree

_MOST = 1000
"""Kernels that are remembered; the oldest are forgotten first."""


LOWERED_FOR, RUN_ON = "cuda", "gpu"
"""The platform that kernels are lowered for, and JAX's name of its devices."""
TOLERANCE = 0.02
"""How far results of a kernel may be from those of plain JAX, of the largest entry of each array; TF32 needs 0.001."""


def check(
    description: str,
    kernel: Callable[..., Any],
    *arguments: PyTree,
    compiles: bool = False,
    plain: Callable[..., Any] | None = None,
) -> None:
    """Raise an error if JAX cannot lower a kernel for a GPU; one that passed before is not tried again.

    Args:
        description: everything that the kernel depends on besides its source and the arguments' shapes.
        kernel: a function of arrays.
        arguments: arrays or their shapes.
        compiles: also compile it, if there is a GPU, for a kernel that may need more memory than the chip has.
        plain: computes the same in plain JAX. If there is a GPU, both are compiled and compared on the arguments, which
            must then be arrays.
    """
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), arguments)
    name = _name(f"{description} {given}")
    if name in _lowered or name in (saved := _read()):
        _lowered.add(name)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compiling the program will repeat them
        found = jax.jit(kernel).trace(*given).lower(lowering_platforms=(LOWERED_FOR,))
        if (compiles or plain is not None) and jax.devices()[0].platform == RUN_ON:
            compiled = found.compile()
            if plain is not None:
                _compare(compiled(*arguments), jax.jit(plain).lower(*given).compile()(*arguments))
    _lowered.add(name)
    if (path := _path()) is not None:
        with contextlib.suppress(OSError):  # the disk is full, or another process writes it too
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, [*saved, name][-_MOST:])


def _compare(found: PyTree, expected: PyTree) -> None:
    """Raise an error if arrays differ by more than rounding.

    >>> _compare([jnp.array([1.0, 100.0])], [jnp.array([1.0, 103.0])])
    Traceback (most recent call last):
    ValueError: its results differ from plain JAX's by 0.029 of the largest
    """
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        difference = float(np.max(np.abs(np.asarray(one) - np.asarray(other)), initial=0.0))
        largest = float(np.max(np.abs(np.asarray(other)), initial=0.0))
        if not difference <= TOLERANCE * largest:  # NaN too
            raise ValueError(
                f"its results differ from plain JAX's by {difference / (largest or 1.0):.2g} of the largest"
            )


def load() -> None:
    """Import what JAX needs to lower kernels for a GPU, if it can have one; otherwise the first kernel waits for it."""
    chosen = getattr(jax.config, "jax_platforms", None) or LOWERED_FOR
    if LOWERED_FOR not in chosen and RUN_ON not in chosen:
        return
    with contextlib.suppress(ImportError):  # JAX's plugin for CUDA, then what lowers
        importlib.import_module("jax_plugins")
        if any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)):
            importlib.import_module("jax.experimental.pallas.mosaic_gpu")


_lowered: set[str] = set()
"""The kernels that this process knows."""


def _name(description: str) -> str:
    lasting = re.sub(r"0x[0-9a-f]+", "", description)  # addresses differ in every process
    return hashlib.sha256(f"{_source()} {settings()} {lasting}".encode()).hexdigest()[:32]


@functools.cache
def capability() -> tuple[int, ...]:
    """The lowest compute capability of this process's GPUs, such as (9, 0) for Hopper; () without one of NVIDIA's."""
    names = [str(getattr(device, "compute_capability", "")) for device in jax.local_devices()]
    return min((tuple(map(int, name.split("."))) for name in names if re.fullmatch(r"\d+\.\d+", name)), default=())


def on_platform(interpret: bool, kernel: Callable[..., Any], plain: Callable[..., Any], *arguments: PyTree) -> Any:
    """Call a kernel in a program for CUDA, or in the interpreter, and plain JAX elsewhere."""
    if interpret:
        return kernel(*arguments)
    return jax.lax.platform_dependent(*arguments, cuda=kernel, default=plain)


def settings() -> str:
    """JAX's options and the device on which it depends whether a kernel is lowered and compiled, and how precise it is.

    A folder of compiled programs may be shared by machines with different GPUs.
    """
    config, device = jax.config, jax.local_devices()[0]
    options = [getattr(config, f"jax_{name}", None) for name in ("enable_x64", "default_matmul_precision")]
    return f"{options} {device.platform} {device.device_kind}"


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
