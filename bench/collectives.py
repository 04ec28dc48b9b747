"""What crosses between devices in a compiled program: its collectives, read from the program's text."""

import re
from collections import defaultdict
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_OPERATION = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"(pred|[a-z]+\d+)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Collective(NamedTuple):
    """An operation in which devices exchange arrays."""

    kind: str
    bytes: int
    """Size of its result on one device."""
    times: int
    """How often it runs in one call of the program, where loops of unknown length count once."""
    computation: str
    """The name of the computation it is in, the body of a loop for example."""


def collectives(text: str) -> list[Collective]:
    """Return the collectives of a program from its text, `compiled.as_text()`."""
    lines: dict[str, list[str]] = defaultdict(list)
    entry = name = ""
    for line in text.splitlines():
        if (head := _HEAD.match(line)) is not None:
            name = head[1]
            entry = name if line.startswith("ENTRY") else entry
        elif line.startswith("  ") and name:
            lines[name].append(line)
    found: list[Collective] = []

    def visit(computation: str, times: int) -> None:
        for line in lines[computation]:
            if (operation := _OPERATION.search(line)) is not None:
                found.append(Collective(operation[2], _bytes(operation[1]), times, computation))
                continue  # it calls its sum
            trips = int(match[1]) if " while(" in line and (match := _TRIPS.search(line)) else 1
            for one, several in _CALLED.findall(line):
                for called in [one] if one else [each.strip().lstrip("%") for each in several.split(",")]:
                    visit(called, times * trips)

    visit(entry, 1)
    return found


def _bytes(shape: str) -> int:
    """The size of an array or a tuple of arrays.

    >>> _bytes("(f32[3,5]{1,0}, u32[2]{0}, pred[])")
    69
    """
    total = 0
    for kind, sizes in _ARRAY.findall(shape):
        size = 1 if kind == "pred" else int(re.sub(r"\D", "", kind)) // 8
        for length in filter(None, sizes.split(",")):
            size *= int(length)
        total += size
    return total
