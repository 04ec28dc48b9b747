"""Lehr: reinforcement learning in JAX where every coefficient is a schedule."""

from lehr.errors import InputError
from lehr.schedules import (
    Schedule,
    resolve_coefficient,
    resolve_entropy_coefficient,
    schedule,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "InputError",
    "Schedule",
    "__version__",
    "resolve_coefficient",
    "resolve_entropy_coefficient",
    "schedule",
]
