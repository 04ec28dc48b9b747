"""Conditions on the parameters of a sweep, such as `entropy_coef.end <= entropy_coef.start`."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lehr.errors import InputError, closest, quoted
from lehr.schedules.constructors import number, position
from lehr.schedules.keys import is_number
from lehr.sweeps.domains import Choices
from lehr.sweeps.space import Point, Space

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_OPERATOR = re.compile("|".join(_OPERATORS))
_OR = re.compile(r"\s+or\s+")


class Term(NamedTuple):
    """One side of a comparison."""

    text: str
    key: str | None
    """The parameter, or `None` if the term is a value."""
    value: Any = None
    """The value, as `Space.comparable` gives those of the parameter on the other side."""


class Comparison(NamedTuple):
    """Two terms with an operator between them."""

    left: Term
    sign: str
    right: Term

    def __str__(self) -> str:
        return f"{self.left.text} {self.sign} {self.right.text}"


@dataclass(frozen=True)
class Condition:
    """A condition, which holds if one of its comparisons does."""

    alternatives: tuple[Comparison, ...]

    @classmethod
    def read(cls, text: Any, space: Space, spellings: Mapping[str, str]) -> "Condition":
        """Read comparisons between parameters, numbers and words, with `or` between them.

        Args:
            text: the condition.
            space: the parameters.
            spellings: the names of settings by their aliases.
        """
        if not isinstance(text, str):
            raise InputError(f"The condition {quoted(text)} is not a text; write one such as 'clip_range < 0.3'.")
        return cls(tuple(_comparison(text, alternative, space, spellings) for alternative in _OR.split(text.strip())))

    def holds(self, space: Space, point: Point) -> bool:
        """Whether a point of the space satisfies the condition."""

        def value(term: Term) -> Any:
            return term.value if term.key is None else space.comparable(term.key, point[term.key])

        return any(_OPERATORS[sign](value(left), value(right)) for left, sign, right in self.alternatives)

    def __str__(self) -> str:
        return " or ".join(map(str, self.alternatives))


def _comparison(condition: str, text: str, space: Space, spellings: Mapping[str, str]) -> Comparison:
    signs = _OPERATOR.findall(text)
    sides = [side.strip() for side in _OPERATOR.split(text)]
    if len(signs) != 1 or not all(sides):
        raise InputError(
            f"The condition {quoted(condition)} is not a comparison of two terms with one of {', '.join(_OPERATORS)}; "
            "write one comparison per condition, with 'or' between alternatives."
        )
    keys = [_key(side, space, spellings) for side in sides]
    for key in keys:
        if key is not None:
            _check_comparable(condition, key, signs[0], space)
    terms = []
    for side, key, other in zip(sides, keys, reversed(keys), strict=True):
        terms.append(
            Term(side, None, _value(condition, side, other, signs[0], space)) if key is None else Term(key, key)
        )
    return Comparison(terms[0], signs[0], terms[1])


def _key(text: str, space: Space, spellings: Mapping[str, str]) -> str | None:
    """Return the parameter that a term names, also by an alias or with hyphens; `None` if it names none."""
    name, dot, part = text.replace("-", "_").partition(".")
    key = spellings.get(name, name) + dot + part
    return key if key in space.domains else None


def _check_comparable(condition: str, key: str, sign: str, space: Space) -> None:
    """Raise an error if a parameter has values that the operator cannot compare."""
    domain = space.domains[key]
    wanted = (int, float, str) if sign in ("==", "!=") else (int, float)
    for value in domain.values if isinstance(domain, Choices) else ():
        if not isinstance(space.comparable(key, value), wanted):
            raise InputError(
                f"The condition {quoted(condition)} compares {key}, but its value {quoted(value)} is not a number; "
                "compare parameters that are numbers, or words with == and !=."
            )


def _value(condition: str, text: str, other: str | None, sign: str, space: Space) -> Any:
    """Return the value that a term stands for: a number, a position in env steps, or a choice of the other side."""
    domain = None if other is None else space.domains[other]
    words = [value for value in domain.values if isinstance(value, str)] if isinstance(domain, Choices) else []
    if other is not None and space.is_position(other) and text.endswith("%"):
        return position(text).bound(space.total_steps)
    if is_number(text) and other is not None:
        return number(text, "value")
    if text in words and sign in ("==", "!="):
        return text
    if is_number(text):
        raise InputError(f"The condition {quoted(condition)} names no parameter; known: {', '.join(space.domains)}")
    raise InputError(
        f"The condition {quoted(condition)} has the term {quoted(text)}, which is neither a swept parameter nor a "
        f"value of the other side; {closest(text, [*space.domains, *words])}"
    )
