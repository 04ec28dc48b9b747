"""Any function of the step in the place of a schedule."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.errors import InputError
from lehr.schedules.phases import Position, check_total
from lehr.schedules.schedule import Schedule
from lehr.schedules.steps import Steps

_SAMPLES = 1001


@jax.tree_util.register_static
@dataclass(frozen=True)
class FunctionSchedule:
    """A function of env steps, an optax schedule for example, used as it is.

    It works wherever a `Schedule` does, except in `stack`: a function is code, not data, so a population cannot hold
    different ones, and another function is another program.

    >>> FunctionSchedule(lambda step: 0.5 ** (step / 100))(200)
    0.25
    """

    function: Callable[[Any], Any]
    total_steps: float | None = None
    """The budget, for `bounds`; `bind` sets it."""

    @property
    def is_bound(self) -> bool:
        """A function has no shares of a budget: it counts in env steps."""
        return True

    def bind(self, total_steps: float) -> "FunctionSchedule":
        """The same function, with its budget known."""
        return replace(self, total_steps=check_total(total_steps))

    def bounds(self) -> tuple[float, float]:
        """The least and greatest value found at 1,001 places of the budget: a function cannot be known better."""
        if self.total_steps is None:
            raise InputError(f"The bounds of {self} depend on the budget; call bind(total_steps) first.")
        values = self(np.linspace(0, self.total_steps, _SAMPLES))
        return float(values.min()), float(values.max())

    def after_ramp(self, over: Position, start: float) -> "FunctionSchedule":
        """The function, later by `over`, behind a ramp from `start` to its first value."""
        if over.share:
            raise InputError("The warm-up of a function must be in env steps, since a function has no budget to share.")
        function, length = self.function, over.steps
        first = self(0)

        def ramped(step: Any) -> Any:
            ramp = start + (first - start) * (step / length)
            if isinstance(step, int | float):
                return ramp if step < length else function(step - length)
            return jnp.where(step < length, ramp, function(jnp.maximum(step - length, 0)))

        return replace(self, function=ramped)

    def __call__(self, step: Any) -> Any:
        """The function's value: a float for a number, an array for an array of steps, else what the function makes."""
        if isinstance(step, Steps):
            return jnp.asarray(self.function(step.high + step.low), jnp.float32)
        if isinstance(step, np.ndarray | list | tuple):
            steps = np.asarray(step)
            return np.array([self(number) for number in steps.ravel().tolist()]).reshape(steps.shape)
        if isinstance(step, int | float | np.number):
            return self._checked(step)
        return self.function(step)

    def _checked(self, step: Any) -> float:
        if not 0 <= step < math.inf:
            raise InputError(f"A schedule was called with step {step:g}; a step is a finite number, 0 or more.")
        given = self.function(step)
        try:
            value = float(given)
        except (TypeError, ValueError):
            raise InputError(f"{self} gave {given!r} at step {step:g}; it must give one number.") from None
        if not math.isfinite(value):
            raise InputError(f"{self} gave {value} at step {step:g}; it must be finite at every step.")
        return value

    def __str__(self) -> str:
        return f"<function {getattr(self.function, '__qualname__', type(self.function).__name__)}>"

    init = Schedule.init
    value = Schedule.value
    update = Schedule.update
