"""Any function of the step, used as a schedule."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.errors import InputError, quoted, shortened
from lehr.schedules.phases import Position, check_total
from lehr.schedules.schedule import Schedule
from lehr.schedules.steps import Steps

_SAMPLES = 1001


@jax.tree_util.register_static
@dataclass(frozen=True)
class FunctionSchedule:
    """A function of env steps, for example an optax schedule, used as a schedule.

    It works wherever a `Schedule` does, except in `stack`: a function is code, not data, so the members of a
    population cannot have different ones, and changing the function recompiles the program.

    >>> FunctionSchedule(lambda step: 0.5 ** (step / 100))(200)
    0.25
    """

    function: Callable[[Any], Any]
    total_steps: float | None = None
    """The budget, which `bounds` needs; set by `bind`."""

    @property
    def is_bound(self) -> bool:
        """Always true: a function is defined in env steps, not in shares of the budget."""
        return True

    def bind(self, total_steps: float) -> "FunctionSchedule":
        """Return the same function with its budget set."""
        return replace(self, total_steps=check_total(total_steps))

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and largest of 1,001 samples over the budget; exact bounds of a function are unknown."""
        if self.total_steps is None:
            raise InputError(f"The bounds of {self} depend on the budget; call bind(total_steps) first.")
        values = self(np.linspace(0, self.total_steps, _SAMPLES))
        return float(values.min()), float(values.max())

    def after_ramp(self, over: Position, start: float) -> "FunctionSchedule":
        """Return the function delayed by `over`, after a linear ramp from `start` to its first value."""
        if over.share:
            raise InputError(
                f"The warm-up of a function has length {over}; give it in env steps, since a function has no budget."
            )
        function, length = self.function, over.steps
        first = self(0)

        def ramped(step: Any) -> Any:
            ramp = start + (first - start) * (step / length)
            if isinstance(step, int | float):
                return ramp if step < length else function(step - length)
            return jnp.where(step < length, ramp, function(jnp.maximum(step - length, 0)))

        return replace(self, function=ramped)

    def __call__(self, step: Any) -> Any:
        """Evaluate: a number gives a float, an array of steps an array, a traced step whatever the function returns."""
        if isinstance(step, Steps):
            return self._compiled(step)
        if isinstance(step, np.ndarray | list | tuple):
            steps = np.asarray(step)
            return np.array([self(number) for number in steps.ravel().tolist()]).reshape(steps.shape)
        if isinstance(step, int | float | np.number):
            return self._checked(step)
        return self.function(step)

    def _compiled(self, step: Steps) -> jax.Array:
        try:
            return jnp.asarray(self.function(step.high + step.low), jnp.float32)
        except jax.errors.JAXTypeError as error:  # such as Python's `if` on the step
            told = shortened(str(error).splitlines()[0], 160)
            raise InputError(
                f"{self} cannot be compiled, since it needs to know the step, for example in an 'if' ({told}); write "
                "jnp.where(step < 1000, a, b), or a text such as '1e-3 until 1k, 1e-4'."
            ) from None

    def _checked(self, step: Any) -> float:
        if not 0 <= step < math.inf:
            raise InputError(f"A schedule was called with step {step:g}; steps must be finite and 0 or more.")
        given = self.function(step)
        try:
            value = float(given)
        except (TypeError, ValueError):
            raise InputError(f"{self} returned {quoted(given)} at step {step:g}; it must return one number.") from None
        if not math.isfinite(value):
            raise InputError(f"{self} returned {value} at step {step:g}; it must be finite at every step.")
        return value

    def __str__(self) -> str:
        return f"<function {getattr(self.function, '__qualname__', type(self.function).__name__)}>"

    init = Schedule.init
    value = Schedule.value
    update = Schedule.update
