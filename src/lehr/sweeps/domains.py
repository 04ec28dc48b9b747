"""The values of one swept parameter: a range, or a list of choices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lehr.errors import InputError, closest, quoted
from lehr.schedules.constructors import number, position
from lehr.schedules.phases import number_text

SCALES = ("linear", "log")
RANGE_KEYS = ("low", "high", "scale", "steps")
_FINENESS = 1e-4
"""Values are rounded to this part of the range and of themselves, so that they are short and a text holds them."""


@dataclass(frozen=True)
class Choices:
    """A list of values."""

    values: tuple[Any, ...]

    @property
    def grid(self) -> tuple[Any, ...]:
        """The values."""
        return self.values

    @property
    def extremes(self) -> tuple[Any, ...]:
        """The values, any of which may be out of range."""
        return self.values

    def at(self, place: float) -> Any:
        """Return the value at a place of [0, 1], of which each value has an equal part.

        >>> [Choices(("linear", "cosine")).at(place) for place in (0, 0.49, 0.5, 1)]
        ['linear', 'linear', 'cosine', 'cosine']
        """
        return self.values[min(int(place * len(self.values)), len(self.values) - 1)]


@dataclass(frozen=True)
class Range:
    """A range of numbers, of whole numbers, or of shares of the budget."""

    low: float
    high: float
    scale: str = "linear"
    """`linear` or `log`, in which the values are evenly distributed."""
    steps: int | None = None
    """If given, only so many evenly spaced values, including both ends."""
    unit: str = "number"
    """`number`, `whole` for whole numbers, or `%` for shares of the budget in percent."""

    @classmethod
    def read(cls, key: str, given: Mapping[str, Any], unit: str) -> "Range":
        """Read a mapping with `low` and `high`, and perhaps `scale` and `steps`.

        Args:
            key: the parameter, for error messages.
            given: the mapping.
            unit: `number`, `whole`, or `position` for env steps or shares of the budget.

        >>> Range.read("entropy_coef.over", {"low": "20%", "high": "100%", "steps": 3}, "position").grid
        ('20%', '60%', '100%')
        """
        for name in given:
            if name not in RANGE_KEYS:
                raise InputError(f"The range of {key} has the unknown key {quoted(name)}; {closest(name, RANGE_KEYS)}")
        for name in ("low", "high"):
            if given.get(name) is None:
                raise InputError(f"The range of {key} has no {name}; give both low and high.")
        scale, steps = given.get("scale", "linear"), given.get("steps")
        if scale not in SCALES:
            word = scale if isinstance(scale, str) else quoted(scale)
            raise InputError(f"The scale of {key} is {quoted(scale)}; {closest(word, SCALES)}")
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 2):
            raise InputError(f"The steps of {key} are {quoted(steps)}; give a whole number of values, 2 or more.")
        low, high, unit = _ends(key, given["low"], given["high"], unit)
        shown = f"from {given['low']} to {given['high']}"
        if not low < high:
            raise InputError(f"The range of {key} goes {shown}, so it is empty; low must be below high.")
        if scale == "log" and low <= 0:
            raise InputError(
                f"The range of {key} goes {shown}, but a log scale cannot reach 0; give low above 0, or drop the scale."
            )
        if unit == "whole" and steps is not None and steps > high - low + 1:
            raise InputError(
                f"The range of {key} has {steps} steps, but only {high - low + 1:.0f} whole numbers; give fewer steps."
            )
        return cls(low, high, scale, steps, unit)

    @cached_property
    def grid(self) -> tuple[Any, ...] | None:
        """The values of a grid; `None` if the range is continuous and has no `steps`."""
        if self.steps is not None:
            places = [index / (self.steps - 1) for index in range(self.steps)]
            return tuple(dict.fromkeys(self._value(self._between(self.low, self.high, place)) for place in places))
        return tuple(range(int(self.low), int(self.high) + 1)) if self.unit == "whole" else None

    @property
    def extremes(self) -> tuple[Any, ...]:
        """Both ends."""
        return self._value(self.low), self._value(self.high)

    def at(self, place: float) -> Any:
        """Return the value at a place of [0, 1], of which equal parts have equal chances.

        >>> Range(1e-4, 1e-2, "log").at(0.5), Range(1, 3, unit="whole").at(0.5), Range(20, 80, unit="%").at(0.25)
        (0.001, 2, '35%')
        """
        if self.steps is not None:
            return Choices(self.grid or ()).at(place)
        if self.unit == "whole":  # each whole number stands for the interval around it
            low, high = self.low - 0.5, self.high + 0.5
            return int(min(max(round(self._between(low, high, place)), self.low), self.high))
        return self._value(self._between(self.low, self.high, place))

    def _between(self, low: float, high: float, place: float) -> float:
        """Interpolate in the range's scale."""
        if self.scale == "log":
            return low * (high / low) ** place
        return low + (high - low) * place

    def _value(self, value: float) -> Any:
        """Round a number within the range, and give it its unit."""
        if self.unit == "whole":
            return round(value)
        width = value * math.log(self.high / self.low) if self.scale == "log" else self.high - self.low
        finest = _FINENESS * min(width, abs(value) or width)
        short = min(max(round(value, -math.floor(math.log10(finest))), self.low), self.high)
        return short if self.unit == "number" else f"{number_text(short)}%"


Domain = Choices | Range


def _ends(key: str, low: Any, high: Any, unit: str) -> tuple[float, float, str]:
    """Read both ends, and return them with the unit of the values."""
    try:
        if unit == "position":
            ends = position(low), position(high)
            if not any(end.share for end in ends):
                unit, numbers = "whole", [end.steps for end in ends]
            elif not any(end.steps for end in ends):
                return *(float(f"{100 * end.share:.12g}") for end in ends), "%"  # type: ignore[return-value]
            else:
                raise InputError("one end is a share of the budget, the other is in env steps; use the same for both.")
        else:
            numbers = [number(low, "low"), number(high, "high")]
    except InputError as error:
        raise InputError(f"The range of {key}: {error}") from None
    for end, given in zip(numbers, (low, high), strict=True):
        if unit == "whole" and not end.is_integer():
            raise InputError(f"The range of {key} has the end {quoted(given)}; give whole numbers.")
    return numbers[0], numbers[1], unit
