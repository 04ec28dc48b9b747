"""What a schedule does that its writer may not have meant."""

from typing import Any

from lehr.schedules.controllers import Controller
from lehr.schedules.phases import number_text
from lehr.schedules.schedule import Schedule

HIGH_RATE = 0.5
"""A learning rate above this is hardly ever meant."""


def surprises(name: str, schedule: Any, total_steps: float) -> list[str]:
    """Return sentences about a coefficient's schedule, bound to the budget, that goes on after the run or jumps in it.

    A controller has no values to look at before the run.

    >>> import lehr
    >>> surprises("clip_range", lehr.schedule("0.2 -> 0.1 over 5M", total_steps=20_000), 20_000)
    ['The schedule of clip_range ends after 5M env steps, later than the run: its last value will be 0.1996.']
    >>> surprises("clip_range", lehr.schedule("0.2 -> 0.1 over 0.5", total_steps=20_000), 20_000)
    ['The schedule of clip_range goes from 0.2 to 0.1 within 0.5 env steps; a share of the budget is written as 50%.']
    """
    found = []
    if isinstance(schedule, Schedule):
        for phase in schedule.phases:
            length = phase.length.steps
            if phase.needs_length and length < 1 and phase.start != phase.end:
                found.append(
                    f"The schedule of {name} goes from {phase.start:g} to {phase.end:g} within {length:g} env steps; "
                    f"a share of the budget is written as {100 * length:.3g}%."
                )
        last = schedule.phases[-1]
        if last.needs_length and last.stop.steps > total_steps * (1 + 1e-9):
            found.append(
                f"The schedule of {name} ends after {number_text(last.stop.steps, multipliers=True)} env steps, later "
                f"than the run: its last value will be {schedule(total_steps):.4g}."
            )
    if name == "learning_rate" and not isinstance(schedule, Controller):
        highest = max(float(schedule(share * total_steps)) for share in (0, 0.5, 1))
        if highest > HIGH_RATE:
            found.append(
                f"The learning rate reaches {highest:.4g}. If you gave a function: it is called with the env steps so "
                "far, and not with the share of the training that is left."
            )
    return found
