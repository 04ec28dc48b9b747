"""Functions that build schedules. Positions are env steps (`500_000`, `"500k"`) or shares of the budget (`"20%"`)."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from lehr.errors import InputError, quoted
from lehr.schedules.function import FunctionSchedule
from lehr.schedules.phases import END, Phase, Position, as_finite
from lehr.schedules.schedule import Schedule
from lehr.schedules.shapes import CODES
from lehr.schedules.text import MOST_CYCLES, lay, parse_number, parse_position, phases_of_points


def position(given: Any) -> Position:
    """Read a number of steps, or a string such as `"500k"` or `"20%"`.

    >>> position("20%")
    Position(steps=0.0, share=0.2)
    """
    if isinstance(given, Position):
        return given
    if isinstance(given, str):
        return parse_position(given)
    steps = as_finite(given)
    if steps is None:
        raise InputError(
            f"{quoted(given)} is not a position; give a number of env steps, or a string such as '500k' or '20%'."
        )
    if steps < 0:
        raise InputError(f"The position {steps:g} is below 0; the first step is 0.")
    return Position(steps=steps)


def number(given: Any, what: str) -> float:
    """Read a finite number, also from a string such as `"3e-4"`, which YAML does not parse as a number."""
    if isinstance(given, str):
        return parse_number(given)
    value = as_finite(given)
    if value is None:
        raise InputError(f"The {what} is {quoted(given)}; it must be a finite number.")
    return value


def curve(
    shape: str,
    start: Any,
    end: Any,
    *,
    over: Any = None,
    until: Any = None,
    begin: Any = 0,
    repeat: float = 1,
    power: Any = 1,
) -> Schedule:
    """Build a single phase of any shape. Without `over` and `until` it takes the rest of the budget."""
    phase = Phase(Position(), Position(), number(start, "start"), number(end, "end"), shape, number(power, "power"))
    extent = {name: None if given is None else position(given) for name, given in (("over", over), ("until", until))}
    try:
        return Schedule(lay(phase, position(begin), repeat=repeat, **extent)[0])
    except InputError as error:
        message = str(error)
        raise InputError(message[0].upper() + message[1:]) from None


def constant(value: Any) -> Schedule:
    """Return the same value at every step.

    >>> constant(0.01)(123)
    0.01
    """
    return curve("constant", value, value)


def linear(start: Any, end: Any, over: Any = None, *, begin: Any = 0) -> Schedule:
    """Interpolate linearly from start to end.

    >>> linear(1.0, 0.0, over=100)(25)
    0.75
    """
    return curve("linear", start, end, over=over, begin=begin)


def cosine(start: Any, end: Any = 0.0, over: Any = None, *, begin: Any = 0, exponent: Any = 1.0) -> Schedule:
    """Follow half a cosine wave from start to end; `exponent` means the same as in optax.

    >>> round(cosine(0.03, 0.01, over=100)(50), 6)
    0.02
    """
    return curve("cosine", start, end, over=over, begin=begin, power=exponent)


def exponential(start: Any, end: Any, over: Any = None, *, begin: Any = 0) -> Schedule:
    """Interpolate geometrically from start to end, which must have the same sign and not be 0.

    >>> round(exponential(0.1, 0.001, over=100)(50), 6)
    0.01
    """
    return curve("exponential", start, end, over=over, begin=begin)


def polynomial(start: Any, end: Any, power: Any, over: Any = None, *, begin: Any = 0) -> Schedule:
    """Go from start to end in proportion to the remaining fraction, raised to `power`.

    >>> polynomial(1.0, 0.0, 2, over=100)(50)
    0.25
    """
    return curve("polynomial", start, end, over=over, begin=begin, power=power)


def piecewise(points: Iterable[Sequence[Any]], shape: str = "linear") -> Schedule:
    """Interpolate between `(position, value)` pairs with a shape; with `"step"`, hold each value until the next point.

    >>> piecewise([(0, 1.0), ("1M", 0.5), ("5M", 0.0)])(500_000)
    0.75
    """
    pairs = []
    for point in points:
        if isinstance(point, str) or not isinstance(point, Sequence | np.ndarray) or len(point) != 2:
            raise InputError(f"{quoted(point)} is not a point of a schedule; give [step, value] pairs.")
        pairs.append((position(point[0]), number(point[1], "value of a point")))
    return Schedule(phases_of_points(pairs, shape))


def join(schedules: Sequence[Schedule], boundaries: Sequence[Any]) -> Schedule:
    """Chain schedules; each one's clock starts at its boundary, as in `optax.join_schedules`.

    >>> str(join([constant(0.1), linear(0.1, 0, over=50)], boundaries=[100]))
    '0.1 until 100, 0.1 -> 0 over 50'
    """
    if len(schedules) != len(boundaries) + 1:
        raise InputError(
            f"join got {len(schedules)} schedules and {len(boundaries)} boundaries; n schedules need n - 1 boundaries."
        )
    phases: list[Phase] = []
    begins = [Position(), *(position(boundary) for boundary in boundaries)]
    for index, (schedule, offset) in enumerate(zip(schedules, begins, strict=True)):
        if not isinstance(schedule, Schedule) or not schedule.is_bound:
            raise InputError(
                f"Schedule {index + 1} of a join is {quoted(schedule)}; join only takes bound schedules: call "
                "bind(total_steps)."
            )
        if phases and offset.plus(begins[index - 1], -1).sign() != 1:
            raise InputError(f"The boundaries of a join are {list(boundaries)}; they must be increasing.")
        moved = [phase._replace(begin=phase.begin.plus(offset)) for phase in schedule.phases]
        if moved[0].begin != offset:  # a schedule holds its start value before its first phase
            moved.insert(0, Phase(offset, Position(), moved[0].start, moved[0].start, "constant"))
        stop = begins[index + 1] if index + 1 < len(begins) else None
        phases += [phase for phase in moved if stop is None or phase.begin.plus(stop, -1).sign() == -1]
    return Schedule(phases)


def warmup(over: Any, schedule: Any, start: Any = 0.0) -> Any:
    """Ramp linearly from `start` to the schedule's first value, then follow the schedule, delayed by the ramp.

    Shares of the budget in the schedule become shares of what the ramp leaves of the budget.

    >>> str(warmup("10%", linear(0.03, 0.001)))
    '0 -> 0.03 over 10%, 0.03 -> 0.001'
    """
    length = position(over)
    if length.sign() != 1:
        raise InputError(f"The warm-up has length {quoted(over)}; it must be above 0.")
    if isinstance(schedule, FunctionSchedule):
        return schedule.after_ramp(length, number(start, "start of a warm-up"))
    moved = [
        phase._replace(begin=_squeeze(phase.begin, length).plus(length), length=_squeeze(phase.length, length))
        for phase in schedule.phases
    ]
    last = moved[-1]
    if schedule.phases[-1].stop == END:  # ends exactly at the end of the budget, despite rounding
        moved[-1] = last._replace(length=END.plus(last.begin, -1))
    ramp = Phase(Position(), moved[0].begin, number(start, "start of a warm-up"), moved[0].start)
    return Schedule([ramp, *moved])


def _squeeze(place: Position, taken: Position) -> Position:
    """Map a position to a budget that is shorter by `taken`: `steps + share · (total - taken)`."""
    return Position(place.steps).plus(END.plus(taken, -1), place.share)


def repeat(schedule: Schedule, count: int) -> Schedule:
    """Repeat a schedule `count` times. If its lengths are shares of the budget, the cycles divide the budget.

    >>> str(repeat(cosine(0.03, 0.003), 4))
    '0.03 -> 0.003 cosine repeat 4'
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"A schedule cannot repeat {quoted(count)} times; give a whole number, 1 or more.")
    if count * len(schedule.phases) > MOST_CYCLES:
        raise InputError(
            f"A schedule of {len(schedule.phases)} phases cannot repeat {quoted(count)} times; the maximum is "
            f"{MOST_CYCLES} phases."
        )
    phases = [
        phase._replace(
            begin=Position(phase.begin.steps, phase.begin.share / count),
            length=Position(phase.length.steps, phase.length.share / count),
        )
        for phase in schedule.phases
    ]
    cycle = phases[-1].stop
    if cycle.sign() != 1 or not phases[-1].needs_length:
        raise InputError(
            f"'{schedule}' ends in a constant of no fixed length, so it cannot repeat; end it with a curve, for "
            "example '1 -> 0 over 100k'."
        )
    return Schedule(phase._replace(begin=phase.begin.plus(cycle, k)) for k in range(count) for phase in phases)


def stack(schedules: Sequence[Any], phases: int = 1) -> Any:
    """Stack schedules into one pytree with a leading axis, for `jax.vmap` over a population.

    Shorter schedules are padded with phases that never begin, which leaves every member's values unchanged.
    Controllers of the same kind can be stacked too.

    Args:
        schedules: bound ones, or controllers.
        phases: pad to at least so many phases, so that stacks of different schedules have the same shapes.

    >>> population = stack([constant(0.01), linear(0.03, 0.001, over=100)])
    >>> [round(float(value), 4) for value in jax.vmap(lambda schedule: schedule(100))(population)]
    [0.01, 0.001]
    """
    if not schedules:
        raise InputError("stack got no schedules; give at least one.")
    for index, schedule in enumerate(schedules):
        if isinstance(schedule, FunctionSchedule):
            raise InputError(
                f"Schedule {index + 1} of a stack is the function {schedule}; functions cannot be stacked, so write it "
                "as phases, for example with piecewise."
            )
        if isinstance(schedule, Schedule) and not schedule.is_bound:
            raise InputError(
                f"Schedule {index + 1} of a stack, '{schedule}', is not bound; call bind(total_steps) first."
            )
    kinds = {type(schedule).__name__ for schedule in schedules}
    if len(kinds) > 1:
        raise InputError(f"stack got {', '.join(sorted(kinds))}; all members of a stack must have the same type.")
    if not isinstance(schedules[0], Schedule):
        return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *schedules)
    return _padded(schedules, phases)


def _padded(schedules: Sequence[Schedule], least: int) -> Schedule:
    """Stack schedules, padded with phases that begin at infinity, that is, never."""
    counts = np.array([len(schedule.begin) for schedule in schedules])
    is_used = np.arange(max(least, counts.max())) < counts[:, None]

    def together(leaves: list[np.ndarray], fill: float) -> np.ndarray:
        values = np.concatenate(leaves)
        found = np.full(is_used.shape, fill, values.dtype)
        found[is_used] = values
        return found

    remainders = tuple(together([schedule.remainders[index] for schedule in schedules], 0.0) for index in (0, 1))
    begin, length, stop, start, end, shape, power = (
        together([getattr(schedule, name) for schedule in schedules], fill) for name, fill in _PADDING.items()
    )
    return Schedule.tree_unflatten(None, (begin, length, stop, remainders, start, end, shape, power, None))


_PADDING = {
    "begin": np.inf,
    "length": 0.0,
    "stop": np.inf,
    "start": 0.0,
    "end": 0.0,
    "shape": CODES["constant"],
    "power": 1.0,
}
"""A phase that never begins."""
