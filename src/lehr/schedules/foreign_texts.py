"""Texts that other libraries, or habit, use for schedules, and how to write them here."""

import re

from lehr.errors import InputError
from lehr.schedules.shapes import NAMES
from lehr.schedules.text import parse_number

_LINEAR = re.compile(r"lin_(\S+)")
_AUTO = re.compile(r"auto(?:_(\S+))?")
_CALLED = re.compile(rf"({'|'.join(NAMES)})\s*\((.*)\)")


def explained(text: str) -> str:
    """Say how to write a text that is no schedule here, if it is one elsewhere; otherwise empty.

    >>> explained("lin_3e-4")
    "The schedule 'lin_3e-4' is RL Zoo's; write '3e-4 -> 0'."
    >>> explained("cosine(0.03, 0.001)")
    "There is no controller 'cosine'; did you mean '0.03 -> 0.001 cosine'?"
    >>> explained("auto")
    "'auto' needs the entropy to aim at; write, for example, auto(target_entropy=0.5)."
    """
    text = text.strip()
    if (match := _LINEAR.fullmatch(text)) and _is_number(match[1]):
        return f"The schedule {text!r} is RL Zoo's; write '{match[1]} -> 0'."
    if (match := _AUTO.fullmatch(text)) and (match[1] is None or _is_number(match[1])):
        value = "" if match[1] is None else f"{match[1]}, "
        start = f"value={value}" if value else ""
        return f"{text!r} needs the entropy to aim at; write, for example, auto({start}target_entropy=0.5)."
    if match := _CALLED.fullmatch(text):
        shape, values = match[1], [part.rpartition("=")[2].strip() for part in match[2].split(",")]
        return f"There is no controller {shape!r}; {_as_phase(shape, values)}"
    return ""


def _as_phase(shape: str, values: list[str]) -> str:
    """A call such as `cosine(0.03, 0.001)` as a phase, or what a phase looks like."""
    most = {"constant": 1, "polynomial": 3, "cosine": 3}.get(shape, 2)
    if all(map(_is_number, values)) and len(values) <= most:
        if shape == "constant":
            return f"did you mean '{values[0]}'?"
        if shape != "polynomial" and len(values) == 1 and shape != "exponential":
            values = [*values, "0"]
        power = f"({values[2]})" if len(values) == 3 else ""
        written = "" if shape == "linear" else f" {shape}{power}"
        if len(values) > 1 and (shape != "polynomial" or power):
            return f"did you mean '{values[0]} -> {values[1]}{written}'?"
    example = {
        "constant": "0.1 constant",
        "polynomial": "0.1 -> 0 polynomial(2)",
        "exponential": "0.1 -> 0.01 exponential",
    }
    return f"a shape comes last, as in '{example.get(shape, f'0.1 -> 0 {shape}')}'."


def _is_number(text: str) -> bool:
    try:
        parse_number(text)
    except InputError:
        return False
    return True
