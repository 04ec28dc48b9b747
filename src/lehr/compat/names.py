"""Coefficients by the names of another library: what every adapter of schedules reads first."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lehr.algorithms.vocabulary import coefficient, coefficients
from lehr.errors import InputError, closest
from lehr.schedules import Coefficient, Controller, schedule


def collect(
    given: Mapping[str, Any], theirs: Mapping[str, str], own: Iterable[Coefficient] = (), *, speaker: str, example: str
) -> dict[str, tuple[Coefficient, Any]]:
    """What is given, by the library's names: each with its coefficient, which is called as the user called it.

    Args:
        given: what the user gave, by any name.
        theirs: the library's names for Lehr's coefficients.
        own: coefficients that the library alone has; where a name of theirs is also one of Lehr's, theirs counts.
        speaker: who says what is wrong.
        example: a name of theirs, for whoever gave nothing.

    >>> found = collect({"lr": 0.1}, {"learning_rate": "step_size"}, speaker="train", example="step_size")
    >>> found["step_size"][0].name, found["step_size"][1]
    ('lr', 0.1)
    """
    if not given:
        raise InputError(f"{speaker} was given no coefficient; name at least one, {example}='0.01 -> 0'.")
    alone = {entry.name: entry for entry in own}
    aliases = [known for name in theirs for known in (name, *coefficients()[name].aliases)]
    found: dict[str, tuple[Coefficient, Any]] = {}
    for name, spec in given.items():
        if name not in alone and name not in aliases:
            raise InputError(f"{speaker} knows no coefficient {name!r}; {closest(name, [*aliases, *alone])}")
        entry = alone[name] if name in alone else coefficient(name)
        own_name = name if name in alone else theirs[entry.name]
        if own_name in found:
            raise InputError(f"{own_name} is given twice, as {found[own_name][0].name} and {name}; remove one.")
        found[own_name] = replace(entry, name=name), spec
    return found


def clocked(name: str, spec: Any, place: str) -> Any:
    """The schedule of a spec, if it follows the clock alone; `place` is what would have to hold a controller's state.

    >>> str(clocked("lr", "3e-4 -> 0", "a file"))
    '0.0003 -> 0'
    """
    made = schedule(spec)
    if isinstance(made, Controller):
        raise InputError(
            f"{name} is '{made}', which reacts to what is measured and has a state that {place} has no place for; give "
            "a schedule, '3e-4 -> 0' for example."
        )
    return made
