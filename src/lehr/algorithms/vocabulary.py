"""Look up coefficients by name or alias, as declared in the algorithms' configs.

For your own training loop, `resolve_coefficient` reads a config in either naming style.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from lehr import algorithms, rewards
from lehr.algorithms import settings
from lehr.config import describe
from lehr.errors import InputError, closest
from lehr.schedules import keys
from lehr.schedules.coefficient import Coefficient
from lehr.schedules.controllers import Controller
from lehr.schedules.spec import AnySchedule


@cache
def coefficients() -> dict[str, Coefficient]:
    """Return all coefficients of the built-in algorithms and reward models by name, shared ones first."""
    found = dict(_shared())
    classes = [algorithms.find(name).Config for name in algorithms.names()]
    for cls in [*classes, *(rewards.find(name).Config for name in rewards.BUILT_IN)]:
        found |= _declared(cls) | found
    return found


@cache
def _shared() -> dict[str, Coefficient]:
    """Return the coefficients declared in `settings`, without importing any algorithm."""
    groups = [
        group for group in vars(settings).values() if isinstance(group, type) and issubclass(group, settings.Settings)
    ]
    return {name: entry for group in groups for name, entry in _declared(group).items()}


def _declared(cls: type) -> dict[str, Coefficient]:
    """Return the coefficients of a config class by name, each with the docstring of its field."""
    described = ((field.coefficient, field.help) for field in describe(cls) if field.coefficient is not None)
    return {entry.name: replace(entry, description=text) for entry, text in described}


def coefficient(name: str) -> Coefficient:
    """Return the coefficient with this name or alias.

    >>> coefficient("ent_coef").name
    'entropy_coef'
    """
    for known in (_shared, coefficients):
        for entry in known().values():
            if name in (entry.name, *entry.aliases):
                return entry
    raise InputError(f"There is no coefficient {name!r}; {closest(name, spellings())}")


def spellings() -> list[str]:
    """Return the names and aliases of all coefficients."""
    return [name for entry in coefficients().values() for name in (entry.name, *entry.aliases)]


def coefficient_schedule(name: str, config: Mapping[str, Any], total_steps: float) -> AnySchedule | Controller:
    """Return the schedule of a coefficient in a config, bound and checked; see `lehr.schedules.keys` for the keys.

    >>> coefficient_schedule("gamma", {"gamma": "0.9 -> 0.99"}, 1000)(1000)
    0.99
    """
    return keys.coefficient_schedule(coefficient(name), config, total_steps, _not_misspelled)


def _not_misspelled() -> list[str]:
    """Return all names and aliases, and the known names of other libraries' settings that differ from ours."""
    return [*spellings(), *(name for entry in coefficients().values() for name, _ in entry.others)]


def resolve_coefficient(name: str, config: Mapping[str, Any], step: Any, total_steps: float) -> Any:
    """Return the value of a coefficient at an env step, from a config mapping, for use in your own training loop.

    Args:
        name: name or alias of the coefficient.
        config: the mapping; see `lehr.schedules.keys` for the keys.
        step: env steps before this update's rollout, a number or a traced value.
        total_steps: the budget of the whole run.

    >>> config = {"entropy_coef": 0.03, "entropy_coef_schedule": "cosine", "entropy_coef_warmup_steps": 100}
    >>> [resolve_coefficient("entropy_coef", config, step, 1000) for step in (0, 50, 100, 1000)]
    [0.0, 0.015, 0.03, 0.0]
    """
    found = coefficient_schedule(name, config, total_steps)
    if isinstance(found, Controller):
        raise InputError(
            f"{name} is '{found}', a controller, which reacts to metrics instead of the step; use its init, value and "
            "update."
        )
    return found(step)


def resolve_entropy_coefficient(config: Mapping[str, Any], step: Any, total_steps: float) -> Any:
    """Return the entropy coefficient of a config at an env step; see `resolve_coefficient`.

    >>> resolve_entropy_coefficient({"ent_coef": 0.02, "ent_coef_schedule": "linear"}, 500_000, 1_000_000)
    0.01
    """
    return resolve_coefficient("entropy_coef", config, step, total_steps)
