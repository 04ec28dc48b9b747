"""Phases and positions, the parts of a schedule, and the checks on them."""

import itertools
import math
from decimal import Decimal
from typing import NamedTuple

import numpy as np

from lehr.errors import InputError, closest, quoted
from lehr.schedules.shapes import CODES, NAMES

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


MOST_STEPS = 2**48
"""The largest position, where the clock of a compiled program stops being exact."""

MULTIPLIERS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}


def number_text(value: float, multipliers: bool = False) -> str:
    """Return the shortest string that parses back to the same number.

    >>> number_text(0.03), number_text(1_500_000, multipliers=True)
    ('0.03', '1.5M')
    """
    exact = Decimal(repr(float(value)))
    for unit, multiplier in reversed(MULTIPLIERS.items()) if multipliers else ():
        if unit != "K" and multiplier <= abs(exact):
            scaled = format((exact / multiplier).normalize(), "f")
            if len(scaled) <= 6 or not unit:
                return scaled + unit
    text = repr(float(value))
    return text.removesuffix(".0")


class Position(NamedTuple):
    """A point or a length on the step axis: `steps + share · total_steps`.

    >>> str(Position(steps=-25_000, share=0.25))
    '25%-25k'
    """

    steps: float = 0.0
    share: float = 0.0

    def plus(self, other: "Position", times: float = 1) -> "Position":
        """Return `self + times · other`."""
        return Position(self.steps + times * other.steps, self.share + times * other.share)

    def scaled(self, factor: float) -> "Position":
        """Return `factor · self`."""
        return Position(factor * self.steps, factor * self.share)

    def sign(self) -> int | None:
        """Return 1, 0 or −1 if the sign is the same for every budget, or `None` if it depends on the budget."""
        low, high = min(self.steps, self.share), max(self.steps, self.share)
        if low < 0 < high:
            return None
        return int(high > 0) - int(low < 0)

    def __str__(self) -> str:
        share = format((Decimal(repr(float(self.share))) * 100).normalize(), "f") + "%"
        steps = number_text(self.steps, multipliers=True)
        if not self.share:
            return steps
        if not self.steps:
            return share
        if self.share < 0:
            return steps + share
        return share + ("" if self.steps < 0 else "+") + steps

    def bound(self, total_steps: float) -> float:
        """Return the position in env steps for a given budget."""
        return self.steps + self.share * total_steps


END = Position(share=1.0)
"""The end of the budget."""


class Phase(NamedTuple):
    """One piece of a schedule as plain Python numbers, used to build, check and print schedules."""

    begin: Position
    length: Position
    start: float
    end: float
    shape: str = "linear"
    power: float = 1.0

    @property
    def stop(self) -> Position:
        """The position at which the curve reaches its end value."""
        return self.begin.plus(self.length)

    @property
    def needs_length(self) -> bool:
        """Whether the length must be above 0; a constant may have length 0, since it holds its value anyway."""
        return self.shape != "constant"


def as_finite(given: object) -> float | None:
    """Return a real number as a float, or `None` if it is anything else, or not finite.

    >>> as_finite(3), as_finite(10**400), as_finite(True), as_finite("3")
    (3.0, None, None, None)
    """
    if isinstance(given, bool) or not isinstance(given, int | float | np.integer | np.floating):
        return None
    try:
        value = float(given)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def check_total(total_steps: float, name: str = "total_steps") -> float:
    """Return the budget as a float, or raise an error that mentions it by `name`."""
    if isinstance(total_steps, bool) or not isinstance(total_steps, int | float | np.integer | np.floating):
        raise InputError(f"{name} is {quoted(total_steps)}; it must be a number of env steps above 0.")
    total = as_finite(total_steps)
    if total is None or not 0 < total <= MOST_STEPS:
        shown = quoted(total_steps) if total is None else f"{total:g}"
        raise InputError(f"{name} is {shown}; the budget must be finite, above 0 and at most 2^48 env steps.")
    return total


def check_phases(phases: list[Phase]) -> list[Phase]:
    """Return the phases in canonical form, or raise an error if they do not make a valid schedule."""
    if not phases:
        raise InputError("A schedule needs at least one phase; give a value, for example 0.01.")
    checked = [_check_phase(number, phase) for number, phase in enumerate(phases, 1)]
    for number, (phase, following) in enumerate(itertools.pairwise(checked), 1):
        if following.begin.plus(phase.begin, -1).sign() in (0, -1):
            raise InputError(
                f"Phase {number + 1} begins at {following.begin}, but phase {number} begins at {phase.begin}; each "
                "phase must begin after the previous one."
            )
    # Canonical form: a constant lasts until the next phase; the last phase, if constant, has length 0.
    stops = [following.begin for following in checked[1:]]
    for index, phase in enumerate(checked):
        if not phase.needs_length:
            lasts = stops[index].plus(phase.begin, -1) if index < len(stops) else Position()
            checked[index] = phase._replace(length=lasts)
    return checked


def _check_phase(number: int, phase: Phase) -> Phase:
    if phase.shape not in CODES:
        raise InputError(f"Phase {number} has the unknown shape {phase.shape!r}; {closest(phase.shape, NAMES)}")
    for side in ("start", "end", "power"):
        value = as_finite(getattr(phase, side))
        if value is None:
            given = quoted(getattr(phase, side))
            raise InputError(f"The {side} of phase {number} is {given}; it must be a finite number.")
        if value and not _SMALLEST <= abs(float(value)) <= _LARGEST:
            raise InputError(
                f"The {side} of phase {number} is {value:g}, outside the range of float32; it must be 0 or have a "
                f"magnitude between {_SMALLEST:g} and {_LARGEST:g}."
            )
    if phase.start == phase.end:
        phase = phase._replace(shape="constant", power=1.0)
    if not phase.power > 0:
        raise InputError(f"The power of phase {number} is {phase.power:g}; it must be above 0.")
    if phase.shape == "constant" and phase.start != phase.end:
        raise InputError(
            f"Phase {number} is constant but goes from {phase.start:g} to {phase.end:g}; give one value or another "
            "shape."
        )
    if phase.shape == "exponential":
        if 0 in (phase.start, phase.end) or (phase.start > 0) != (phase.end > 0):
            raise InputError(
                f"Phase {number} is exponential from {phase.start:g} to {phase.end:g}, but an exponential cannot reach "
                "0 or change sign; use nonzero values of the same sign, or another shape."
            )
        if not _SMALLEST < phase.end / phase.start < _LARGEST:
            raise InputError(
                f"Phase {number} is exponential from {phase.start:g} to {phase.end:g}, and the ratio of the two is "
                "outside the range of float32; split it into two phases."
            )
    for place in (phase.begin, phase.length, phase.stop):
        if not abs(place.steps) <= MOST_STEPS:
            raise InputError(
                f"Phase {number} reaches {place.steps:g} env steps; positions go up to 2^48, about 2.8e14."
            )
    if phase.begin.sign() == -1:
        raise InputError(f"Phase {number} begins at {phase.begin}; it must begin at 0 or later.")
    sign = phase.length.sign()
    if sign == -1 or (phase.needs_length and sign == 0):
        raise InputError(f"The length of phase {number} is {phase.length}; it must be above 0.")
    if phase.stop.steps == 0 and phase.stop.share > 1 + 1e-9:
        raise InputError(f"Phase {number} ends at {phase.stop} of the budget; the lengths may add up to at most 100%.")
    return phase._replace(start=float(phase.start), end=float(phase.end), power=float(phase.power))
