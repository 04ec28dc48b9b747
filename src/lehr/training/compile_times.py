"""How long each program took to compile, so that the next run can say how long it may take.

The seconds are kept in `compile_times.json` beside JAX's compiled programs. Nothing depends on them: without a cache on
this machine, or with a damaged file, nothing is remembered.
"""

import contextlib
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import jax

from lehr.files import write_json
from lehr.training.plan import Plan

_MOST = 1000
"""Programs that are remembered; the oldest are forgotten first."""


def program_key(plan: Plan, state: Any) -> str:
    """Name what is compiled: programs of the same name take about as long.

    Args:
        plan: the run.
        state: the state that the program is compiled for, perhaps with an axis for the members of a population.
    """
    device = jax.devices()[0]
    parts = [
        *(jax.__version__, device.platform, device.device_kind, jax.device_count()),
        *(plan.algorithm, plan.run.env, plan.run.env_parameters, plan.program.steps_per_update),
        *((leaf.dtype, leaf.shape) for leaf in jax.tree.leaves(state)),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def last_time(key: str) -> float | None:
    """Seconds that a program took to compile the last time, or `None`."""
    seconds = _read().get(key)
    return float(seconds) if isinstance(seconds, int | float) and math.isfinite(seconds) else None


def remember(key: str, seconds: float) -> None:
    """Remember how long a program took to compile."""
    path = _path()
    if path is None:
        return
    known = {name: value for name, value in _read().items() if name != key} | {key: round(seconds, 1)}
    with contextlib.suppress(OSError):  # the disk is full, or another process writes it too
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dict(list(known.items())[-_MOST:]))


def _path() -> Path | None:
    """The file, in the folder of JAX's compilation cache; `None` if that is off or on another machine."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    return None if not folder or "://" in folder else Path(folder) / "compile_times.json"


def _read() -> dict[str, Any]:
    try:
        path = _path()
        found = {} if path is None else json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}
