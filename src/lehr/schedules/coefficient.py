"""What a coefficient is: a number of the mathematics with a name, the names others have for it, and its range."""

import math
from dataclasses import dataclass, field

from lehr.errors import InputError
from lehr.schedules.controllers import Controller
from lehr.schedules.phases import number_text
from lehr.schedules.spec import AnySchedule


@dataclass(frozen=True)
class Coefficient:
    """A number of the mathematics, hence schedulable. It stands at the field of a config that declares it.

    >>> Coefficient(maximum=1.0).range_text, Coefficient(open_minimum=True).range_text
    ('[0, 1]', '(0, ∞)')
    """

    aliases: tuple[str, ...] = ()
    """Names that other libraries have for the same thing."""
    minimum: float = 0.0
    maximum: float = math.inf
    open_minimum: bool = False
    """Whether the minimum itself is out of range."""
    others: tuple[tuple[str, str], ...] = ()
    """Names that look like it and mean something else, each with what that is and what to write instead."""
    name: str = ""
    """Its field's."""
    description: str = field(default="", compare=False)
    """Its field's docstring."""

    @property
    def summary(self) -> str:
        """The first clause of its description.

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
        return f"{left}{number_text(self.minimum)}, {number_text(self.maximum)}]"

    def check(self, value: AnySchedule | Controller) -> None:
        """Raise if the coefficient would leave its range at any step."""
        low, high = value.bounds()
        below = low <= self.minimum if self.open_minimum else low < self.minimum
        if below or high > self.maximum or math.isnan(low + high):
            worst = low if below else high
            raise InputError(
                f"{self.name} is '{value}', which reaches {number_text(worst)}; it must stay in {self.range_text} at "
                "every step."
            )
