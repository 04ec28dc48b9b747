"""Combine a config's three keys for a coefficient into one schedule.

The keys for the entropy coefficient, by its name or any alias:

- `entropy_coef`: the fixed value, or a complete schedule;
- `entropy_coef_schedule`: a schedule, or the name of a shape that goes from the fixed value to 0;
- `entropy_coef_warmup_steps`: the length of a warm-up from 0 before it.
"""

import math
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from lehr.errors import InputError, quoted
from lehr.schedules.coefficient import Coefficient
from lehr.schedules.constructors import number, position, warmup
from lehr.schedules.controllers import Controller
from lehr.schedules.function import FunctionSchedule
from lehr.schedules.phases import Position, check_total
from lehr.schedules.shapes import NAMES
from lehr.schedules.spec import AnySchedule, schedule

ENDINGS = ("", "_schedule", "_warmup_steps")
"""Endings of the three keys of a coefficient."""


def coefficient_schedule(
    entry: Coefficient,
    config: Mapping[str, Any],
    total_steps: float,
    known: Callable[[], Collection[str]] = tuple,
) -> AnySchedule | Controller:
    """Return the schedule of a coefficient in a config, bound and checked.

    Args:
        entry: the coefficient.
        config: a mapping with the keys above, among others.
        total_steps: the budget of the whole run.
        known: returns the names of other coefficients, so that their keys are not mistaken for typos of this one.

    >>> entry = Coefficient(("ent_coef",), name="entropy_coef")
    >>> coefficient_schedule(entry, {"ent_coef": 0.02, "ent_coef_schedule": "linear"}, 1_000_000)(500_000)
    0.01
    """
    total = check_total(total_steps)
    keys, (fixed, shape, ramp) = _read(entry, config, known)
    if fixed is None and shape is None:
        raise InputError(f"The config has no {entry.name}; give {entry.name} or {entry.name}_schedule.")
    if ramp is not None:
        steps = position(ramp).bound(total)
        if steps >= total:
            raise InputError(f"{keys.warmup} is {quoted(ramp)}, but the whole budget is {total:g} steps; give fewer.")
        ramp = steps
    made = combine(keys, fixed, shape, ramp)
    try:
        bound = made.bind(total)
    except InputError as error:
        raise InputError(f"{keys.fixed if shape is None else keys.schedule}: {error}") from None
    entry.check(bound)
    return bound


class Keys(NamedTuple):
    """The three keys of a coefficient, in one spelling."""

    fixed: str
    schedule: str
    warmup: str

    @classmethod
    def spelled(cls, name: str) -> "Keys":
        """Return the keys for one spelling of the coefficient.

        >>> Keys.spelled("ent_coef").warmup
        'ent_coef_warmup_steps'
        """
        return cls(*(name + ending for ending in ENDINGS))


def combine(keys: Keys, fixed: Any, shape: Any, ramp: Any) -> AnySchedule | Controller:
    """Combine the values of the three keys, `None` if not given, into one unbound schedule.

    >>> str(combine(Keys.spelled("ent_coef"), 0.02, "cosine", "10%"))
    '0 -> 0.02 over 10%, 0.02 -> 0 cosine'
    """
    spec = fixed if shape is None else _scheduled(keys, fixed, shape)
    try:
        made = schedule(spec)
    except InputError as error:
        raise InputError(f"{keys.fixed if shape is None else keys.schedule}: {error}") from None
    if shape is not None and fixed is not None:
        _check_start(keys, fixed, made)
    return made if ramp is None else _warmed(keys, made, ramp)


def _read(
    entry: Coefficient, config: Mapping[str, Any], known: Callable[[], Collection[str]]
) -> tuple[Keys, tuple[Any, Any, Any]]:
    """Return the three keys of a coefficient, in the spelling that the config uses, and their values."""
    spellings = (entry.name, *entry.aliases)
    keys_of_it = [spelling + ending for spelling in spellings for ending in ENDINGS]
    for key in config:
        if isinstance(key, str) and key not in keys_of_it:
            near = get_close_matches(key, keys_of_it, n=1, cutoff=0.8)
            others = [name for name in (*known(), *dict(entry.others)) if name not in spellings] if near else []
            if near and not any(key.startswith(other) for other in others):
                raise InputError(f"The config has the unknown key {quoted(key)}; did you mean {near[0]!r}?")
    used = [spelling for spelling in spellings if any(config.get(spelling + ending) is not None for ending in ENDINGS)]
    if len(used) > 1:
        given = [[s + ending for ending in ENDINGS if config.get(s + ending) is not None] for s in used]
        raise InputError(
            f"The config spells {entry.name} in two ways, {', '.join(given[0])} and {', '.join(given[1])}; remove one."
        )
    keys = Keys.spelled(used[0] if used else entry.name)
    return keys, (config.get(keys.fixed), config.get(keys.schedule), config.get(keys.warmup))


def _scheduled(keys: Keys, fixed: Any, shape: Any) -> Any:
    """Return the schedule, with its missing start taken from the fixed value."""
    if fixed is not None and not is_number(fixed):
        raise InputError(
            f"{keys.fixed} is already a schedule, {quoted(fixed)}; give {keys.fixed} as a number, or remove "
            f"{keys.schedule}."
        )
    if not is_open(shape):
        return shape
    if fixed is None:
        raise InputError(
            f"{keys.schedule} is {quoted(shape)}, which has no start, and {keys.fixed} is not given; give {keys.fixed}."
        )
    opened = dict(shape) if isinstance(shape, Mapping) else {"shape": shape.strip()}
    is_constant = "constant" in (opened.get("shape"), opened.get("type"), opened.get("kind"))
    return {**({} if is_constant else {"end": 0.0}), **opened, "start": fixed}


def _warmed(keys: Keys, made: AnySchedule | Controller, given: Any) -> AnySchedule | Controller:
    """Prepend a warm-up from 0 to the schedule, which then covers the rest of the budget."""
    try:
        length = position(given)
    except InputError as error:
        raise InputError(f"{keys.warmup}: {error}") from None
    if length == Position():
        return made
    if isinstance(made, Controller):
        raise InputError(
            f"{keys.warmup} is {quoted(given)}, but '{made}' reacts to metrics and cannot be warmed up; remove one of "
            "them."
        )
    if _starts(made)[0] == 0:
        raise InputError(
            f"{keys.warmup} is {quoted(given)}, but the schedule '{made}' already starts at 0; remove {keys.warmup}."
        )
    return warmup(length, made)


def _check_start(keys: Keys, fixed: Any, found: AnySchedule | Controller) -> None:
    """Raise an error unless the schedule starts at the fixed value, directly or after its own warm-up."""
    if isinstance(found, Controller):
        raise InputError(f"{keys.schedule} is '{found}', which has its own start; remove {keys.fixed}.")
    starts, value = _starts(found), number(fixed, keys.fixed)
    if not any(math.isclose(start, value, rel_tol=1e-9) for start in starts):
        raise InputError(
            f"{keys.fixed} is {value:g} but {keys.schedule} starts at {starts[-1]:g}; remove {keys.fixed}, or start "
            "the schedule there."
        )


def _starts(made: AnySchedule) -> list[float]:
    """Return where a schedule starts, and where it starts after its own warm-up."""
    if isinstance(made, FunctionSchedule):
        return [made(0)]
    starts = [phase.start for phase in made.phases[:2]]
    return starts if starts[0] == 0 else starts[:1]


def is_open(given: Any) -> bool:
    """Whether this is a shape without a start."""
    if isinstance(given, Mapping):
        return "start" not in given and "value" not in given
    return isinstance(given, str) and given.strip() in NAMES


def is_number(given: Any) -> bool:
    """Whether this is a plain number, or its text: YAML reads `1e-4` as text."""
    try:
        number(given, "value")
    except InputError:
        return False
    return True
