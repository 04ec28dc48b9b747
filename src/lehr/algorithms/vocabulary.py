"""Every coefficient by any of its names, as the fields of the algorithms' configs declare them.

For those who have a training loop of their own: `resolve_coefficient` reads a config in either naming style.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from lehr import algorithms
from lehr.algorithms import settings
from lehr.config import describe
from lehr.errors import InputError, closest
from lehr.schedules import keys
from lehr.schedules.coefficient import Coefficient
from lehr.schedules.controllers import Controller
from lehr.schedules.spec import AnySchedule


@cache
def coefficients() -> dict[str, Coefficient]:
    """All coefficients of the built-in algorithms by name, those that several share first."""
    found = dict(_shared())
    for name in algorithms.names():
        for field in describe(algorithms.find(name).Config):
            if field.coefficient is not None:
                found.setdefault(field.name, field.coefficient)
    return found


@cache
def _shared() -> dict[str, Coefficient]:
    """Those that are declared in `settings`: to look one up imports no algorithm."""
    groups = [
        group for group in vars(settings).values() if isinstance(group, type) and issubclass(group, settings.Settings)
    ]
    return {field.name: field.coefficient for group in groups for field in describe(group) if field.coefficient}


def coefficient(name: str) -> Coefficient:
    """The coefficient of this name, canonical or alias.

    >>> coefficient("ent_coef").name
    'entropy_coef'
    """
    for known in (_shared, coefficients):
        for entry in known().values():
            if name in (entry.name, *entry.aliases):
                return entry
    raise InputError(f"There is no coefficient {name!r}; {closest(name, spellings())}")


def spellings() -> list[str]:
    """All names of all coefficients."""
    return [name for entry in coefficients().values() for name in (entry.name, *entry.aliases)]


def coefficient_schedule(name: str, config: Mapping[str, Any], total_steps: float) -> AnySchedule | Controller:
    """The schedule of a coefficient in a config, bound and checked; see `lehr.schedules.keys` for the keys.

    >>> coefficient_schedule("gamma", {"gamma": "0.9 -> 0.99"}, 1000)(1000)
    0.99
    """
    return keys.coefficient_schedule(coefficient(name), config, total_steps, _not_misspelled)


def _not_misspelled() -> list[str]:
    """All names of coefficients, and those that only look like one."""
    return [*spellings(), *(name for entry in coefficients().values() for name, _ in entry.others)]


def resolve_coefficient(name: str, config: Mapping[str, Any], step: Any, total_steps: float) -> Any:
    """The value of a coefficient at an env step, from a config mapping, for people with a training loop of their own.

    Args:
        name: the coefficient, canonical or alias.
        config: the mapping; see `lehr.schedules.keys` for the keys.
        step: env steps before this update's rollout, a number or traced.
        total_steps: the budget of the whole run.

    >>> config = {"entropy_coef": 0.03, "entropy_coef_schedule": "cosine", "entropy_coef_warmup_steps": 100}
    >>> [resolve_coefficient("entropy_coef", config, step, 1000) for step in (0, 50, 100, 1000)]
    [0.0, 0.015, 0.03, 0.0]
    """
    found = coefficient_schedule(name, config, total_steps)
    if isinstance(found, Controller):
        raise InputError(
            f"{name} is '{found}', which reacts to metrics and not to the step; use its init, value and update."
        )
    return found(step)


def resolve_entropy_coefficient(config: Mapping[str, Any], step: Any, total_steps: float) -> Any:
    """The entropy coefficient of a config at an env step; see `resolve_coefficient`.

    >>> resolve_entropy_coefficient({"ent_coef": 0.02, "ent_coef_schedule": "linear"}, 500_000, 1_000_000)
    0.01
    """
    return resolve_coefficient("entropy_coef", config, step, total_steps)
