"""Coefficients: schedulable numbers with a name, aliases and a valid range."""

import math
from dataclasses import dataclass, field

from lehr.errors import InputError
from lehr.schedules.controllers import Controller
from lehr.schedules.phases import number_text
from lehr.schedules.spec import AnySchedule


@dataclass(frozen=True)
class Coefficient:
    """A schedulable number; the annotation of a config's field declares it.

    >>> Coefficient(maximum=1.0).range_text, Coefficient(open_minimum=True).range_text
    ('[0, 1]', '(0, ∞)')
    """

    aliases: tuple[str, ...] = ()
    """Names that other libraries use for the same coefficient."""
    minimum: float = 0.0
    maximum: float = math.inf
    open_minimum: bool = False
    """Whether the range excludes the minimum itself."""
    open_maximum: bool = False
    """Whether the range excludes the maximum itself."""
    others: tuple[tuple[str, str], ...] = ()
    """Similar names with another meaning; each with an explanation and what to write instead."""
    name: str = ""
    """Name of its field."""
    description: str = field(default="", compare=False)
    """Docstring of its field."""

    @property
    def summary(self) -> str:
        """The first clause of the description.

        >>> Coefficient(description="Weight of the penalty; none leaves it out.").summary
        'Weight of the penalty'
        """
        return self.description.partition(";")[0].removesuffix(".")

    @property
    def range_text(self) -> str:
        """The range in interval notation."""
        left = "(" if self.open_minimum else "["
        if math.isinf(self.maximum):
            return f"{left}{number_text(self.minimum)}, ∞)"
        right = ")" if self.open_maximum else "]"
        return f"{left}{number_text(self.minimum)}, {number_text(self.maximum)}{right}"

    def check(self, value: AnySchedule | Controller) -> None:
        """Raise an error if the coefficient leaves its range at any step."""
        low, high = value.bounds()
        below = low <= self.minimum if self.open_minimum else low < self.minimum
        above = high >= self.maximum if self.open_maximum else high > self.maximum
        if below or above or math.isnan(low + high):
            worst = low if below else high
            raise InputError(
                f"{self.name} is '{value}', which reaches {number_text(worst)}; it must stay in {self.range_text} at "
                "every step."
            )
