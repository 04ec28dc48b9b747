"""Lehr: reinforcement learning in JAX where every coefficient is a schedule.

The names below are the public API. Each is imported when it is first used, so that `import lehr` for its schedules
alone stays light, and Ctrl-C while the command line starts does not show a traceback.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from lehr import garbage
from lehr.errors import InputError

if TYPE_CHECKING:
    from lehr import envs
    from lehr.acting.export import export
    from lehr.acting.recording import record
    from lehr.algorithms.vocabulary import resolve_coefficient, resolve_entropy_coefficient
    from lehr.schedules.schedule import Schedule
    from lehr.schedules.spec import schedule
    from lehr.sweeps.api import SweepResult, load_sweep, resume_sweep, sweep
    from lehr.sweeps.pick import pick
    from lehr.sweeps.seeds import train
    from lehr.training.api import Result, evaluate, load, resume

__version__ = "0.1.0.dev0"

_LATER = {
    "Result": "lehr.training.api",
    "Schedule": "lehr.schedules.schedule",
    "SweepResult": "lehr.sweeps.api",
    "evaluate": "lehr.training.api",
    "export": "lehr.acting.export",
    "load": "lehr.training.api",
    "load_sweep": "lehr.sweeps.api",
    "pick": "lehr.sweeps.pick",
    "record": "lehr.acting.recording",
    "resolve_coefficient": "lehr.algorithms.vocabulary",
    "resolve_entropy_coefficient": "lehr.algorithms.vocabulary",
    "resume": "lehr.training.api",
    "resume_sweep": "lehr.sweeps.api",
    "schedule": "lehr.schedules.spec",
    "sweep": "lehr.sweeps.api",
    "train": "lehr.sweeps.seeds",
}

__all__ = [
    "InputError",
    "Result",
    "Schedule",
    "SweepResult",
    "__version__",
    "envs",
    "evaluate",
    "export",
    "load",
    "load_sweep",
    "pick",
    "record",
    "resolve_coefficient",
    "resolve_entropy_coefficient",
    "resume",
    "resume_sweep",
    "schedule",
    "sweep",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in ("envs", "schedules"):
        return importlib.import_module(f"lehr.{name}")
    if name in _LATER:
        if _LATER[name] not in sys.modules:
            with garbage.importing():
                importlib.import_module(_LATER[name])
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'lehr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
