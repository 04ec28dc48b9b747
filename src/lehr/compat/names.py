"""Coefficients under the names of another library, for the adapters that set its coefficients by schedules."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lehr.algorithms.vocabulary import coefficient, coefficients
from lehr.errors import InputError, closest
from lehr.schedules import Coefficient, Controller, schedule


def named_coefficients(
    given: Mapping[str, Any], theirs: Mapping[str, str], own: Iterable[Coefficient] = (), *, speaker: str, example: str
) -> dict[str, tuple[Coefficient, Any]]:
    """What the user gave, by the library's names: the coefficient, called as the user called it, and its spec.

    Args:
        given: what the user gave, under any known name.
        theirs: the library's names, by Lehr's names.
        own: coefficients that only the library has; their names take precedence over Lehr's.
        speaker: the function or class that error messages name.
        example: one of the library's names, for the error message if nothing was given.

    >>> theirs = {"learning_rate": "step_size"}
    >>> found = named_coefficients({"lr": 0.1}, theirs, speaker="train", example="step_size")
    >>> found["step_size"][0].name, found["step_size"][1]
    ('lr', 0.1)
    """
    if not given:
        raise InputError(f"{speaker} was given no coefficient; give at least one, for example {example}='0.01 -> 0'.")
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


def clock_schedule(name: str, spec: Any, saved_in: str) -> Any:
    """The schedule of a spec, which must not be a controller: `saved_in`, the library's file, cannot hold its state.

    >>> str(clock_schedule("lr", "3e-4 -> 0", "a file"))
    '0.0003 -> 0'
    """
    made = schedule(spec)
    if isinstance(made, Controller):
        raise InputError(
            f"{name} is '{made}', which adapts to a metric and has a state that {saved_in} cannot hold; give a "
            "schedule, '3e-4 -> 0' for example."
        )
    return made
