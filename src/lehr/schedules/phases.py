"""Phases and positions: what a schedule is made of, and what makes one impossible."""

import itertools
import math
from decimal import Decimal
from typing import NamedTuple

import numpy as np

from lehr.errors import InputError, closest
from lehr.schedules.shapes import CODES, NAMES

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


MULTIPLIERS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}


def number_text(value: float, multipliers: bool = False) -> str:
    """The shortest text of a number that reads back as the same one.

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
    """A place or a length on the step axis: `steps + share · total_steps`.

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
        """1, 0 or −1 where that is the same for every budget; `None` where it depends on the budget."""
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
        """The place in steps, for a budget."""
        return self.steps + self.share * total_steps


END = Position(share=1.0)
"""The end of the budget."""


class Phase(NamedTuple):
    """One piece of a schedule, for the host: to build, to check and to print."""

    begin: Position
    length: Position
    start: float
    end: float
    shape: str = "linear"
    power: float = 1.0

    @property
    def stop(self) -> Position:
        """Where the curve reaches its end value."""
        return self.begin.plus(self.length)

    @property
    def needs_length(self) -> bool:
        """Whether the phase moves; a constant may be of length 0, since it holds its value anyway."""
        return self.shape != "constant"


def check_total(total_steps: float, name: str = "total_steps") -> float:
    """The budget as a float, or an error that calls it by its name."""
    if isinstance(total_steps, bool) or not isinstance(total_steps, int | float | np.number):
        raise InputError(f"{name} is {total_steps!r}; it must be a number of env steps, above 0.")
    if not 0 < total_steps < math.inf:
        raise InputError(f"{name} is {total_steps:g}; the budget must be finite and above 0.")
    return float(total_steps)


def check_phases(phases: list[Phase]) -> list[Phase]:
    """The phases in their one form, or an error for what no schedule can be."""
    if not phases:
        raise InputError("A schedule needs at least one phase; give a value, for example 0.01.")
    checked = [_check_phase(number, phase) for number, phase in enumerate(phases, 1)]
    for number, (phase, following) in enumerate(itertools.pairwise(checked), 1):
        if following.begin.plus(phase.begin, -1).sign() in (0, -1):
            raise InputError(
                f"Phase {number + 1} begins at {following.begin}, which is not after {phase.begin}, where "
                f"phase {number} begins; phases must follow one another."
            )
    # A constant lasts until the next phase, or for ever: one form for one meaning.
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
        value = getattr(phase, side)
        if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not math.isfinite(value):
            raise InputError(f"Phase {number} has the {side} {value!r}; it must be a finite number.")
        if value and not _SMALLEST <= abs(float(value)) <= _LARGEST:
            raise InputError(
                f"Phase {number} has the {side} {value:g}, which float32 cannot hold; it must be 0 or between "
                f"{_SMALLEST:g} and {_LARGEST:g} in size."
            )
    if phase.start == phase.end:
        phase = phase._replace(shape="constant", power=1.0)
    if not phase.power > 0:
        raise InputError(f"Phase {number} has the power {phase.power:g}; it must be above 0.")
    if phase.shape == "constant" and phase.start != phase.end:
        raise InputError(
            f"Phase {number} is constant but goes from {phase.start:g} to {phase.end:g}; give one value or a shape."
        )
    if phase.shape == "exponential":
        if 0 in (phase.start, phase.end) or (phase.start > 0) != (phase.end > 0):
            raise InputError(
                f"Phase {number} is exponential from {phase.start:g} to {phase.end:g}; an exponential can neither "
                "reach 0 nor change sign, so give ends of one sign or another shape."
            )
        if not _SMALLEST < phase.end / phase.start < _LARGEST:
            raise InputError(
                f"Phase {number} is exponential from {phase.start:g} to {phase.end:g}; the ratio of its ends is more "
                "than float32 can hold, so cut it into two phases."
            )
    if phase.begin.sign() == -1:
        raise InputError(f"Phase {number} begins at {phase.begin}; the first step is 0.")
    sign = phase.length.sign()
    if sign == -1 or (phase.needs_length and sign == 0):
        raise InputError(f"Phase {number} has the length {phase.length}; it must be above 0.")
    if phase.stop.steps == 0 and phase.stop.share > 1 + 1e-9:
        raise InputError(
            f"Phase {number} ends at {phase.stop} of the budget; give lengths that add up to 100% at most."
        )
    return phase._replace(start=float(phase.start), end=float(phase.end), power=float(phase.power))
