"""Turn any accepted form of a coefficient into a schedule or a controller."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lehr.errors import InputError, closest, quoted
from lehr.schedules.constructors import constant, curve, number, piecewise, position
from lehr.schedules.controllers import Controller, is_controller_text, parse_controller
from lehr.schedules.foreign_texts import explained
from lehr.schedules.function import FunctionSchedule
from lehr.schedules.phases import Phase, Position
from lehr.schedules.schedule import Schedule
from lehr.schedules.shapes import NAMES
from lehr.schedules.text import parse

AnySchedule = Schedule | FunctionSchedule
Spec = Any
"""A number, string, mapping, list of `[step, value]` pairs, `Schedule`, controller, or function of the step."""

_KEYS = {"type": "shape", "kind": "shape", "value": "start", "exponent": "power", "from": "begin"}
"""Aliases of mapping keys."""
_OWN_KEYS = ("shape", "start", "end", "power", "warmup", "begin", "over", "until", "repeat")
_MAPPING_KEYS = (*_OWN_KEYS, *_KEYS)


def schedule(spec: Spec, total_steps: float | None = None) -> AnySchedule | Controller:
    """Build a schedule from any of its forms, bound to a budget if one is given.

    Args:
        spec: a number, a string, a mapping, a list of `[step, value]` pairs, a `Schedule`, a function of the step (any
            optax schedule), or a controller or its string form.
        total_steps: the budget, used to turn shares such as `20%` into env steps.

    >>> schedule("0.03 -> 0.001 cosine", total_steps=1_000_000)(1_000_000)
    0.001
    >>> schedule({"shape": "linear", "start": 1, "end": 0, "over": "50%"})
    Schedule('1 -> 0 over 50%')
    >>> schedule([[0, 1.0], [1_000_000, 0.5]])(500_000)
    0.75
    """
    kind: Any = type(spec)
    is_number = kind is float or (kind is int and abs(spec) < 2**63)  # Python does not print much larger ones
    is_plain = is_number or (kind is str and not is_controller_text(spec))
    if is_plain and type(total_steps) in (int, float, type(None)):
        return _known(kind, spec if kind is str else repr(spec), total_steps)
    return _made(spec, total_steps)


def _made(spec: Spec, total_steps: float | None) -> AnySchedule | Controller:
    unbound = _unbound(spec)
    return unbound if total_steps is None else unbound.bind(total_steps)


@functools.lru_cache(maxsize=4096)
def _known(kind: type, text: str, total_steps: float | None) -> AnySchedule | Controller:
    """A schedule from a text or a number. The members of a sweep share most of theirs, and none can be changed."""
    return _made(kind(text), total_steps)


def _unbound(spec: Spec) -> AnySchedule | Controller:
    if isinstance(spec, Schedule | FunctionSchedule | Controller):
        return spec
    if isinstance(spec, bool) or spec is None:
        raise InputError(
            f"{spec!r} is not a schedule; give a number, a string, a mapping, [step, value] pairs or a function."
        )
    if isinstance(spec, str):
        if spec.strip() in NAMES:
            raise InputError(
                f"The schedule {quoted(spec, 400)} is a shape without values; add them, for example '0.03 -> 0.001 "
                f"{spec.strip()}'."
            )
        try:
            return parse_controller(spec) if is_controller_text(spec) else parse(spec)
        except InputError:
            if said := explained(spec):
                raise InputError(said) from None
            raise
    if isinstance(spec, int | float | np.number) or (isinstance(spec, np.ndarray) and spec.ndim == 0):
        return constant(spec if not isinstance(spec, np.ndarray) else spec.item())
    if isinstance(spec, Mapping):
        return from_mapping(spec)
    if callable(spec):
        return FunctionSchedule(spec)
    if type(spec).__name__ in ("ConfigDict", "FrozenConfigDict"):  # from ml_collections; not a Mapping
        return from_mapping(spec.to_dict())
    if isinstance(spec, Sequence | np.ndarray):
        return piecewise(spec)
    if hasattr(spec, "dtype") and np.ndim(spec) == 0 and np.dtype(spec.dtype).kind not in "mM":  # a JAX scalar
        return constant(float(spec))
    raise InputError(
        f"{quoted(spec, 400)} of type {type(spec).__name__} is not a schedule; give a number, a string, a mapping, "
        "[step, value] pairs or a function."
    )


def _word(given: Any) -> str:
    return given if isinstance(given, str) else quoted(given)


def from_mapping(given: Mapping[str, Any]) -> Schedule:
    """Build a schedule from a mapping with the keys `shape, start, end, power, warmup, from, over, until, repeat`."""
    fields: dict[str, Any] = {}
    shown = quoted(dict(given), 400)
    for key, value in given.items():
        if not isinstance(key, str) or key not in _MAPPING_KEYS:
            raise InputError(
                f"The schedule {shown} has the unknown key {quoted(key)}; {closest(_word(key), _MAPPING_KEYS)}"
            )
        name = _KEYS.get(key, key)
        if name in fields:
            raise InputError(f"The schedule {shown} sets {name!r} twice, under two names; remove one.")
        fields[name] = value
    shape = fields.pop("shape", "constant" if "end" not in fields else "linear")
    if not isinstance(shape, str) or shape not in NAMES:
        raise InputError(f"The schedule {shown} has the unknown shape {quoted(shape)}; {closest(_word(shape), NAMES)}")
    if "start" not in fields:
        raise InputError(f"The schedule {shown} has no start; add the value it starts from.")
    if shape == "constant":
        fields.setdefault("end", fields["start"])
    if "end" not in fields:
        raise InputError(f"The schedule {shown} has no end; add the value it goes to.")
    if "power" in fields and shape not in ("cosine", "polynomial"):
        raise InputError(f"The schedule {shown} has a power, which {shape!r} does not take; remove it.")
    if "power" not in fields and shape == "polynomial":
        raise InputError(f"The schedule {shown} has no power, which a polynomial needs; add one, for example 2.")
    if "repeat" in fields:
        fields["repeat"] = number(fields["repeat"], "repeat")
    ramp = position(fields.pop("warmup", 0))
    if ramp == Position():
        return curve(shape, fields.pop("start"), fields.pop("end"), **fields)
    begin = position(fields.pop("begin", ramp))
    if begin.plus(ramp, -1).sign() == -1:
        raise InputError(f"The schedule {shown} begins before its warm-up ends; begin later, or shorten the warm-up.")
    body = curve(shape, fields.pop("start"), fields.pop("end"), begin=begin, **fields)
    return Schedule([Phase(Position(), ramp, 0.0, body.phases[0].start), *body.phases])
