"""`Schedule`: a coefficient as a function of env steps, stored as a few small arrays.

A schedule is K phases on the env-step axis. Each phase has a beginning, a length, a start value, an end value, a shape
and a power. Before its first phase a schedule holds the first start value; after a phase it holds that phase's end
value until the next phase begins. All of this is data: schedules of any shapes stack into one pytree of arrays, and
changing the numbers never recompiles.
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from lehr.errors import InputError
from lehr.schedules.phases import Phase, Position, check_phases, check_total
from lehr.schedules.shapes import CODES, CURVES, NAMES
from lehr.schedules.steps import Steps, split


@jax.tree_util.register_pytree_node_class
class Schedule:
    """A coefficient as a function of env steps.

    Called with a Python or NumPy number, or an array of steps, it is evaluated with NumPy in float64. Called with a
    traced step or with `Steps`, it becomes part of the compiled program, in float32.

    Build one with `lehr.schedule`, or with `constant`, `linear`, `cosine`, `exponential`, `polynomial`, `piecewise`,
    `join`, `warmup` and `repeat`.

    >>> from lehr.schedules import linear
    >>> schedule = linear(0.03, 0.001, over="80%").bind(1_000_000)
    >>> schedule(400_000)
    0.0155
    >>> str(schedule)
    '0.03 -> 0.001 over 800k'
    """

    # Arrays of shape [K]: float64 on the host; on a device, JAX's default (float32).
    begin: Any
    """The step at which the phase begins; infinite for the padding in a stack."""
    length: Any
    """Steps from the beginning to the end value; 0 for a constant that lasts forever."""
    stop: Any
    """The step at which the end value is reached, `begin + length`."""
    remainders: tuple[Any, Any]
    """The rounding errors of `begin` and `stop` in float32, so that a short phase late in a long run stays exact."""
    start: Any
    end: Any
    shape: Any
    """int32, the index of the shape's name in `lehr.schedules.shapes.NAMES`."""
    power: Any
    """The power of a polynomial or the exponent of a cosine; otherwise 1."""
    shares: tuple[Any, Any] | None
    """For an unbound schedule, the shares of the budget to add to `begin` and `length`; otherwise `None`."""

    _FIELDS = ("begin", "length", "stop", "remainders", "start", "end", "shape", "power", "shares")
    __slots__ = (*_FIELDS, "__weakref__", "_table")

    def __init__(self, phases: Iterable[Phase]) -> None:
        """Check the phases and store them as arrays. Prefer `lehr.schedule` or the constructors."""
        checked = check_phases(list(phases))
        begin = np.array([p.begin.steps for p in checked], float)
        length = np.array([p.length.steps for p in checked], float)
        shares = np.array([[p.begin.share, p.length.share] for p in checked], float).T
        stop = begin + length
        fields = (
            begin,
            length,
            stop,
            (begin - begin.astype(np.float32), stop - stop.astype(np.float32)),
            np.array([p.start for p in checked], float),
            np.array([p.end for p in checked], float),
            np.array([CODES[p.shape] for p in checked], np.int32),
            np.array([p.power for p in checked], float),
            (shares[0], shares[1]) if shares.any() else None,
        )
        for leaf in jax.tree.leaves(fields):
            leaf.flags.writeable = False
        self._set(*fields, table=(begin.tolist(), checked))

    def _set(self, *fields: Any, table: tuple[list[float], list[Phase]] | None = None) -> None:
        for name, field in zip(self._FIELDS, fields, strict=True):
            setattr(self, name, field)
        self._table = table

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        """Return the arrays; nothing is static, so changing the numbers never retraces."""
        return tuple(getattr(self, name) for name in self._FIELDS), None

    @classmethod
    def tree_unflatten(cls, auxiliary: None, leaves: Sequence[Any]) -> Self:
        """Rebuild from arrays, tracers or any other leaves that a transformation uses, without checks."""
        schedule = object.__new__(cls)
        schedule._set(*leaves)
        return schedule

    def with_values(self, start: Any, end: Any) -> Self:
        """Return the same phases with other start and end values, without checks; also of a stack, and traced."""
        fields = {name: getattr(self, name) for name in self._FIELDS} | {"start": start, "end": end}
        return self.tree_unflatten(None, tuple(fields.values()))

    # Properties --------------------------------------------------------------------------------------------------

    @property
    def is_bound(self) -> bool:
        """Whether all positions are in env steps, which is required to call it."""
        return self.shares is None

    @property
    def phases(self) -> list[Phase]:
        """The phases as plain numbers."""
        return self._host()[1]

    def _host(self) -> tuple[list[float], list[Phase]]:
        """Return the phases and where they begin as Python numbers, cached."""
        if self._table is not None:
            return self._table
        leaves = jax.tree.leaves(self)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise InputError(
                "The phases of a schedule cannot be read while it is traced by JAX; call the schedule with a step "
                "instead."
            )
        if np.ndim(self.begin) != 1:
            raise InputError(
                f"This is a stack of {np.shape(self.begin)[0]} schedules; evaluate it with "
                "jax.vmap(lambda schedule: schedule(step))(stack)."
            )
        used = np.isfinite(self.begin)
        exact = np.asarray(self.begin, float)
        if self.begin.dtype != np.float64:  # it was moved to a device
            exact = exact + np.asarray(self.remainders[0], float)
        share = np.zeros((2, len(used))) if self.shares is None else np.asarray(self.shares, float)
        columns = (exact, share[0], self.length, share[1], self.start, self.end, self.shape, self.power)
        rows = zip(*(np.asarray(column)[used].tolist() for column in columns), strict=True)
        phases = [
            Phase(Position(begin, begin_share), Position(length, length_share), start, end, NAMES[shape], power)
            for begin, begin_share, length, length_share, start, end, shape, power in rows
        ]
        self._table = [phase.begin.steps for phase in phases], phases
        return self._table

    def __str__(self) -> str:
        from lehr.schedules.text import to_text

        return to_text(self)

    def __repr__(self) -> str:
        if any(type(leaf) is not np.ndarray for leaf in jax.tree.leaves(self)) or self.begin.ndim != 1:
            return f"Schedule(<{self.begin}>)"
        return f"Schedule({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.phases == other.phases

    def __hash__(self) -> int:
        return hash(tuple(self.phases))

    def bounds(self) -> tuple[float, float]:
        """Return the exact minimum and maximum over all steps."""
        phases = self.phases
        values = [phases[0].start]
        for phase, following in zip(phases, [*phases[1:], None], strict=True):
            values += [phase.start, _last_value(phase, following)]
        return min(values), max(values)

    # Evaluation --------------------------------------------------------------------------------------------------

    def bind(self, total_steps: float) -> "Schedule":
        """Turn shares of the budget into env steps. A bound schedule is returned unchanged.

        >>> from lehr.schedules import linear
        >>> str(linear(1, 0).bind(2_000_000))
        '1 -> 0 over 2M'
        """
        total = check_total(total_steps)
        if self.is_bound:
            return self
        phases = self.phases
        begins = [_tidy(phase.begin.bound(total)) for phase in phases]
        bound = []
        for number, phase in enumerate(phases, 1):
            begin, length = begins[number - 1], _tidy(phase.length.bound(total))
            if number < len(phases) and phase.stop == phases[number].begin:
                length = _tidy(begins[number] - begin)  # phases that touch still touch, despite rounding
            if length < 0 or (phase.needs_length and length == 0):
                raise InputError(
                    f"Phase {number} of '{self}' would last {length:g} steps with a budget of {total:g}; give a larger "
                    "budget, or positions that leave room for the phase."
                )
            bound.append(phase._replace(begin=Position(begin), length=Position(length)))
        for number, (phase, following) in enumerate(itertools.pairwise(bound), 1):
            if not phase.begin.steps < following.begin.steps:
                raise InputError(
                    f"Phase {number + 1} of '{self}' would begin at step {following.begin.steps:g}, but phase {number} "
                    f"begins at {phase.begin.steps:g}, with a budget of {total:g}; each phase must begin after the "
                    "previous one."
                )
        return Schedule(bound)

    def __call__(self, step: Any) -> Any:
        """Evaluate at an env step: a number gives a float, an array of steps an array, a traced step a traced value."""
        if not self.is_bound:
            raise InputError(
                f"'{self!s}' has positions that are shares of the budget; call bind(total_steps) before calling it."
            )
        on_host = not isinstance(self.begin, jax.core.Tracer)
        if on_host and isinstance(step, int | float | np.number):
            return self._at(float(step))
        if on_host and isinstance(step, np.ndarray | list | tuple) and not isinstance(step, Steps):
            return self._at_all(np.asarray(step, float))
        return self._traced(split(step))

    def _at(self, step: float) -> float:
        if not 0 <= step < math.inf:
            raise InputError(f"A schedule was called with step {step:g}; steps must be finite and 0 or more.")
        begins, phases = self._host()
        phase = phases[max(bisect.bisect_right(begins, step) - 1, 0)]
        elapsed = step - phase.begin.steps
        if elapsed >= phase.length.steps:
            return phase.end
        if elapsed <= 0:
            return phase.start
        return _curve(phase, elapsed / phase.length.steps, (phase.stop.steps - step) / phase.length.steps)

    def _at_all(self, steps: np.ndarray) -> np.ndarray:
        if steps.size and not (np.min(steps) >= 0 and np.max(steps) < np.inf):
            raise InputError(
                f"A schedule was called with steps from {np.min(steps):g} to {np.max(steps):g}; steps must be finite "
                "and 0 or more."
            )
        begins, phases = self._host()
        index = np.maximum(np.searchsorted(begins, steps, side="right") - 1, 0)
        values = np.empty(steps.shape)
        for number in np.unique(index):
            here, phase = index == number, phases[number]
            elapsed = steps[here] - phase.begin.steps
            length = phase.length.steps or 1.0
            left = np.clip((phase.stop.steps - steps[here]) / length, 0, 1)
            begun = np.where(elapsed <= 0, phase.start, _curve(phase, np.clip(elapsed / length, 0, 1), left))
            values[here] = np.where(elapsed >= phase.length.steps, phase.end, begun)
        return values

    def _traced(self, step: Steps) -> jax.Array:
        # Compare the step with all phases, then evaluate only the phase that applies.
        high, low = jnp.asarray(step.high), jnp.asarray(step.low)
        axes = (1,) * max(high.ndim, low.ndim)

        def field(array: Any) -> jax.Array:
            array = jnp.asarray(array)
            if array.ndim != 1:
                raise InputError(
                    f"A stack of {array.shape[0]} schedules was called; evaluate it with "
                    "jax.vmap(lambda schedule: schedule(step))(stack)."
                )
            return array.reshape(axes + array.shape)

        def since(place: Any, remainder: Any) -> jax.Array:
            # Subtract the large parts first: that is exact near `place`, so the small parts are not rounded away.
            place = field(place)
            steps = (high[..., None] - place) + low[..., None]
            return steps if place.dtype == jnp.float64 else steps - field(remainder)

        elapsed = since(self.begin, self.remainders[0])
        number = jnp.maximum(jnp.sum(elapsed >= 0, axis=-1, keepdims=True) - 1, 0)
        applies = jnp.arange(elapsed.shape[-1]).reshape((*axes, -1)) == number

        def pick(array: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(applies, array, 0), axis=-1)

        elapsed, remaining = pick(elapsed), pick(-since(self.stop, self.remainders[1]))
        start, end = pick(field(self.start)), pick(field(self.end))
        shape, power, length = pick(field(self.shape)), pick(field(self.power)), pick(field(self.length))
        done, left = (jnp.clip(part / jnp.where(length > 0, length, 1), 0, 1) for part in (elapsed, remaining))
        value = end
        for code, curve in enumerate(CURVES):
            selected = shape == code
            # All shapes are computed, those not selected with arguments of 1, so that they cannot produce NaNs.
            safe = [jnp.where(selected, number, 1) for number in (start, end, power)]
            value = jnp.where(selected, curve(jnp, done, left, *safe), value)
        value = jnp.clip(value, jnp.minimum(start, end), jnp.maximum(start, end))
        return jnp.where(remaining <= 0, end, jnp.where(elapsed <= 0, start, value))

    # The protocol shared with controllers --------------------------------------------------------------------------

    def init(self) -> tuple[()]:
        """Return the initial state: a schedule has none."""
        return ()

    def value(self, state: Any, step: Any) -> Any:
        """Return the coefficient at this step."""
        return self(step)

    def update(self, state: Any, metrics: Any) -> Any:
        """Return the state unchanged: a schedule ignores metrics."""
        return state


def _tidy(steps: float) -> float:
    """Round away floating-point noise in a position; 13 digits resolve single steps beyond 10^12."""
    return float(f"{steps:.13g}")


def _curve(phase: Phase, done: Any, left: Any) -> Any:
    """Evaluate the phase's curve in float64, clipped to lie between its start and end despite rounding."""
    value = CURVES[CODES[phase.shape]](np, done, left, phase.start, phase.end, phase.power)
    low, high = min(phase.start, phase.end), max(phase.start, phase.end)
    if isinstance(done, float):
        return min(max(float(value), low), high)
    return np.clip(value, low, high)


def _last_value(phase: Phase, following: Phase | None) -> float:
    """Return the value a phase reaches: its end, unless the next phase cuts it short."""
    if following is None or not phase.needs_length:
        return phase.end
    room = following.begin.plus(phase.begin, -1)
    if room.plus(phase.length, -1).sign() in (0, 1):
        return phase.end
    for unit in range(2):
        if room[1 - unit] == phase.length[1 - unit] == 0:  # both in steps, or both in shares
            done = room[unit] / phase.length[unit]
            left = (phase.length[unit] - room[unit]) / phase.length[unit]
            return _curve(phase, done, left) if left > 1e-12 else phase.end  # anything smaller is rounding
    raise InputError(
        f"Whether the phase from {phase.start:g} to {phase.end:g} is cut short depends on the budget; call "
        "bind(total_steps) before bounds()."
    )
