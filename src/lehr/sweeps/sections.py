"""The parts of a sweep file besides its space: seeds, confirmation, evolution and halving, each read and checked."""

import inspect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lehr import config
from lehr.config.fields import is_none
from lehr.errors import InputError, closest, quoted
from lehr.schedules.constructors import number, position
from lehr.schedules.keys import is_number
from lehr.sweeps.domains import Range
from lehr.sweeps.space import Space

OPTUNA = "optuna:"
"""The prefix of Optuna's samplers."""
MOST_CONFIGURATIONS = 100_000
"""The largest number of configurations of a sweep, and of points of a grid."""
LARGEST_SEED = 2**63 - 1


class Confirm(NamedTuple):
    """The best configurations are trained again with fresh seeds, because the best of many is in part the luckiest."""

    top: int = 5
    """Number of configurations."""
    seeds: int = 5
    """Number of fresh seeds of each."""


class EvolutionSettings(NamedTuple):
    """Population-based training: see `lehr.sweeps.evolution`."""

    method: str = "pbt"
    interval: float | str = "5%"
    """Between rankings: a share of the budget, or env steps."""
    share: float = 0.25
    """The share of the members that is replaced, and the share that they are copied from."""
    factor: float = 1.2
    """A copied member's coefficients are multiplied or divided by this."""


class HalvingSettings(NamedTuple):
    """Successive halving: see `lehr.sweeps.halving`."""

    places: int | None = None
    """Members that train at once; `None` for as many as fit into memory."""
    first: float | str = "10%"
    """The first rung: a share of the budget, or env steps."""
    factor: int = 3
    """One of so many members goes on at a rung, to the next one at so many times the env steps."""


def read_mapping(key: str, given: Any) -> dict[str, Any]:
    """Read what stands under a key, with plain values; nothing is an empty mapping."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(f"{key} is {quoted(given)}; write lines of 'name: value' under it.")
    return {str(name): _plain(str(name), value) for name, value in given.items()}


def _plain(name: str, given: Any) -> Any:
    """Return a value with plain lists and numbers only; what a file cannot hold is an error."""
    if given is None or isinstance(given, bool | int | float | str):
        return given
    if isinstance(given, np.generic):
        return given.item()
    if isinstance(given, Mapping):
        return {str(key): _plain(f"{name}.{key}", value) for key, value in given.items()}
    if isinstance(given, list | tuple):
        return [_plain(name, item) for item in given]
    what = "a function" if inspect.isroutine(given) else f"an object of type {type(given).__name__}"
    raise InputError(
        f"{name} is {quoted(given)}, {what}, but a sweep is saved as text; give a number, or a text such as "
        "'0.03 -> 0.001 cosine'."
    )


def _parts(key: str, given: Any, known: tuple[str, ...]) -> dict[str, Any]:
    found = {config.underscored(name): value for name, value in read_mapping(key, given).items()}
    for name in found:
        if name not in known:
            raise InputError(f"{key} has no part {quoted(name)}; {closest(name, known)}")
    return found


def read_confirm(given: Any, seeds: int) -> Confirm:
    """Read how the best are trained again."""
    if given is False or (given is not None and is_none(given)):
        return Confirm(0, 0)
    parts = _parts("confirm", given, Confirm._fields)
    top = whole_number("confirm.top", parts.get("top", Confirm().top), least=0, most=MOST_CONFIGURATIONS)
    fresh = whole_number(
        "confirm.seeds", parts.get("seeds", max(Confirm().seeds, seeds)), least=0, most=MOST_CONFIGURATIONS
    )
    return Confirm(top, fresh)


def read_evolution(given: Any, space: Space, parameters: Mapping[str, Any]) -> EvolutionSettings | None:
    """Check the settings of population-based training, which perturbs coefficients within the swept ranges."""
    if given is None:
        return None
    parts = _parts("evolution", given, EvolutionSettings._fields)
    found = EvolutionSettings(**parts)
    if found.method != "pbt":
        raise InputError(f"evolution.method is {quoted(found.method)}; it must be pbt.")
    for name, low, high in (("share", 0.0, 0.5), ("factor", 1.0, 10.0)):
        value = getattr(found, name)
        value = number(value, f"evolution.{name}") if is_number(value) else math.nan
        if not low < value <= high:
            raise InputError(
                f"evolution.{name} is {quoted(getattr(found, name))}; it must be above {low:g}, at most {high:g}."
            )
        found = EvolutionSettings(**{**found._asdict(), name: float(value)})
    _check_position("evolution.interval", found.interval, space.total_steps)
    for name in parameters:
        if space.is_static(name):
            raise InputError(f"{name} shapes the program, so evolution cannot change it; move it to settings.")
        if not isinstance(space.domains.get(name), Range):
            raise InputError(
                f"{name} is not a range of numbers, but evolution perturbs numbers; give {{low: ..., high: ...}}."
            )
    return found


def _check_position(name: str, given: Any, total_steps: int) -> None:
    """Refuse what is not a position within the budget."""
    try:
        steps = position(given).bound(total_steps)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    if not 0 < steps < total_steps:
        raise InputError(f"{name} is {quoted(given)}; it must be above 0 and less than the budget, such as 5%.")


def read_halving(given: Any, total_steps: int) -> HalvingSettings | None:
    """Check the settings of successive halving."""
    if given is None or is_none(given):
        return None
    found = HalvingSettings(**_parts("halving", given, HalvingSettings._fields))
    _check_position("halving.first", found.first, total_steps)
    factor = whole_number("halving.factor", found.factor, least=2, most=MOST_CONFIGURATIONS)
    places = found.places
    if places is not None:
        places = whole_number("halving.places", places, least=1, most=MOST_CONFIGURATIONS)
    return HalvingSettings(places, found.first, factor)


def check_halving(evolution: EvolutionSettings | None, sampler: str, settings: Mapping[str, Any]) -> None:
    """Refuse what successive halving does not go together with."""
    if evolution is not None:
        raise InputError(
            "The sweep has both evolution and halving, but one replaces members by copies of others and the other by "
            "new ones; remove one of them."
        )
    if sampler.startswith(OPTUNA):
        raise InputError(
            f"sampler is {sampler}, which learns from the scores of all members at their end, but halving stops most "
            "of them earlier; choose another sampler, or remove halving."
        )
    if settings.get("evaluate_every") is not None:
        raise InputError(
            f"evaluate_every is {quoted(settings['evaluate_every'])}, but with halving, members are evaluated only at "
            "their end; remove it."
        )


def read_seeds(given: Any) -> tuple[int, ...]:
    """Read a number of seeds, or a list of them."""
    if not isinstance(given, list | tuple):
        return tuple(range(whole_number("seeds", given, least=1, most=MOST_CONFIGURATIONS)))
    if not given:
        raise InputError("seeds is an empty list; give at least one seed, or a number of seeds.")
    seeds = tuple(whole_number("one of seeds", seed, least=-(2**63)) for seed in given)
    known: dict[int, int] = {}
    for seed in seeds:
        other = known.get(seed % 2**32)
        if other == seed:
            raise InputError(f"seeds has {seed} twice, which would train the same run twice; remove one.")
        if other is not None:
            raise InputError(
                f"seeds has {other} and {seed}, which are the same run, since the lowest 32 bits of a seed count; "
                "remove one."
            )
        known[seed % 2**32] = seed
    return seeds


def whole_number(name: str, given: Any, least: int, most: int = LARGEST_SEED) -> int:
    """Read a whole number between two limits, also from a text such as `1k`."""
    is_integer = isinstance(given, int) and not isinstance(given, bool)
    value = given if is_integer else number(given, name) if is_number(given) else math.nan
    if not least <= value <= most or value != int(value):
        limits = f"{least} or more" if most == LARGEST_SEED else f"from {least} to {most}"
        raise InputError(f"{name} is {quoted(given)}; give a whole number, {limits}.")
    return int(value)
