"""What a schedule does that its writer may not have meant."""

import math
from typing import Any

from lehr.schedules.controllers import Controller
from lehr.schedules.function import FunctionSchedule
from lehr.schedules.phases import number_text
from lehr.schedules.schedule import Schedule

HIGH_RATE = 0.5
"""A learning rate above this is hardly ever meant."""
MUCH_LARGER = 100.0
"""Another coefficient, if it is given as a function, is hardly ever meant to become larger than this."""


def surprises(name: str, schedule: Any, total_steps: float) -> list[str]:
    """Return sentences about a coefficient's schedule, bound or not, that goes on after the run or jumps in it.

    A controller has no values to look at before the run.

    >>> import lehr
    >>> surprises("clip_range", lehr.schedule("0.2 -> 0.1 over 5M"), 20_000)
    ['The schedule of clip_range ends after 5M env steps, later than the run: its last value will be 0.1996.']
    >>> surprises("clip_range", lehr.schedule("0.2 -> 0.1 over 0.5"), 20_000)
    ['The schedule of clip_range goes from 0.2 to 0.1 within 0.5 env steps; a share of the budget is written as 50%.']
    """
    if isinstance(schedule, Controller):
        return []
    bound = schedule.bind(total_steps)
    found = [*_short(name, schedule, bound), *_late(name, bound, total_steps)] if isinstance(bound, Schedule) else []
    highest = max(float(bound(share * total_steps)) for share in (0, 0.5, 1))
    limit = HIGH_RATE if name == "learning_rate" else MUCH_LARGER
    if highest > limit and (name == "learning_rate" or isinstance(schedule, FunctionSchedule)):
        what = "The learning rate" if name == "learning_rate" else f"The schedule of {name}"
        found.append(
            f"{what} reaches {highest:.4g}. If you gave a function: it is called with the env steps so far, and not "
            "with the share of the training that is left."
        )
    return found


def _short(name: str, schedule: Schedule, bound: Schedule) -> list[str]:
    """A sentence about the first phase that is shorter than an env step, or about a first phase of one.

    A later phase of one step is how a jump is written between points: from 999 to 1000.
    """
    for given, phase in zip(schedule.phases, bound.phases, strict=True):
        length, is_share = phase.length.steps, given.length.share != 0
        if 0 < length < 1 or (length == 1 and phase.begin.steps == 0 and not is_share):
            changes = f"goes from {phase.start:g} to {phase.end:g} within"
            does = changes if phase.needs_length else f"stays at {phase.end:g} for"
            steps = "env step" if length == 1 else "env steps"
            advice = "" if is_share else f"; a share of the budget is written as {100 * length:.3g}%"
            return [f"The schedule of {name} {does} {length:g} {steps}{advice}."]
    return []


def _late(name: str, bound: Schedule, total_steps: float) -> list[str]:
    """A sentence about a schedule that changes after the run, or as late as the run ends: no update starts there."""
    last, (low, high) = bound.phases[-1], bound.bounds()
    end = last.stop.steps
    if low == high or end < total_steps * (1 - 1e-9):
        return []
    if end > total_steps * (1 + 1e-9):
        when = "later than the run"
    elif not last.needs_length and bound.phases[-2].end != last.start:
        when = "when the run is over"
    else:
        return []
    value = bound(math.nextafter(total_steps, 0))
    steps = number_text(end, multipliers=True)
    return [f"The schedule of {name} ends after {steps} env steps, {when}: its last value will be {value:.4g}."]
