"""The space of a sweep: its parameters, and the settings that a point of it stands for."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lehr.config.fields import FieldDescription, convert, is_none
from lehr.errors import InputError, closest, quoted
from lehr.schedules.coefficient import Coefficient
from lehr.schedules.constructors import constant, number, position
from lehr.schedules.keys import coefficient_schedule, is_number
from lehr.schedules.shapes import NAMES
from lehr.schedules.spec import schedule
from lehr.sweeps.domains import RANGE_KEYS, Choices, Domain, Range

Point = dict[str, Any]
"""A value for each swept parameter, by keys such as `learning_rate` and `entropy_coef.start`."""

PARTS = {
    "start": "number",
    "end": "number",
    "shape": "word",
    "power": "number",
    "from": "position",
    "over": "position",
    "until": "position",
    "warmup": "position",
    "repeat": "whole",
}
"""The parts of a schedule, which are the keys of its mapping, and the unit of each."""


@dataclass(frozen=True)
class Space:
    """The swept parameters of a sweep.

    >>> from lehr.algorithms.ppo import Config
    >>> from lehr.config import describe
    >>> parameters = {"entropy_coef": {"start": {"low": 0.01, "high": 0.1, "scale": "log"}, "end": 0}}
    >>> space = Space.read({field.name: field for field in describe(Config)}, parameters, total_steps=1000)
    >>> space.settings({"entropy_coef.start": 0.03})
    {'entropy_coef': '0.03 -> 0'}
    """

    domains: dict[str, Domain]
    """The values of each parameter."""
    fixed_parts: dict[str, dict[str, Any]]
    """For each coefficient with swept parts, the parts that are not swept."""
    coefficients: frozenset[str]
    """The swept settings that are coefficients; the others shape arrays."""
    total_steps: int
    """The budget of a run, in env steps."""

    @classmethod
    def read(cls, fields: Mapping[str, FieldDescription], parameters: Mapping[str, Any], total_steps: int) -> "Space":
        """Read and check the parameters, each by itself.

        Args:
            fields: the settings that may be swept, by name.
            parameters: by the name of a setting: a list of choices, a range, or the parts of a schedule.
            total_steps: the budget of a run, in env steps.
        """
        domains: dict[str, Domain] = {}
        fixed_parts: dict[str, dict[str, Any]] = {}
        for name, given in parameters.items():
            field = fields[name]
            if field.coefficient is not None and isinstance(given, Mapping) and not _is_range(given):
                swept, fixed_parts[name] = _read_parts(field.coefficient, given, total_steps)
                domains |= swept
            else:
                domains[name] = _read_setting(field, given, total_steps)
        coefficients = frozenset(name for name in parameters if fields[name].is_coefficient)
        return cls(domains, fixed_parts, coefficients, total_steps)

    def is_static(self, key: str) -> bool:
        """Whether a parameter is not a coefficient, so that runs that differ in it are different programs."""
        return key.partition(".")[0] not in self.coefficients

    def is_position(self, key: str) -> bool:
        """Whether the values of a parameter are positions: env steps or shares of the budget."""
        return PARTS.get(key.partition(".")[2]) == "position"

    def comparable(self, key: str, value: Any) -> Any:
        """Return a value of a parameter as conditions compare it: a position in env steps, all else as it is."""
        return position(value).bound(self.total_steps) if self.is_position(key) else value

    def settings(self, point: Point) -> dict[str, Any]:
        """Return the swept settings at a point, as `lehr.train` takes them; a schedule of parts as its text."""
        found: dict[str, Any] = {}
        for key, value in point.items():
            name, dot, part = key.partition(".")
            if dot:
                found.setdefault(name, dict(self.fixed_parts[name]))[part] = value
            else:
                found[name] = value
        for name in self.fixed_parts:
            found[name] = _schedule_text(name, found[name])
        return found


def _is_range(given: Mapping[str, Any]) -> bool:
    return any(key in RANGE_KEYS for key in given)


_OTHER_BOUNDS = (("low", "min", "minimum", "lower", "lo"), ("high", "max", "maximum", "upper", "hi"))
_OTHER_CHOICES = ("values", "choices", "options", "categories")


def _as_ours(given: Mapping[str, Any]) -> str:
    """How to write a range or choices that have the keys of other libraries; or nothing.

    >>> _as_ours({"min": "1e-4", "max": "1e-3"}), _as_ours({"values": [1, 2]}), _as_ours({"start": 1})
    ('for a range write {low: 1e-4, high: 1e-3, scale: log}', 'for choices write a list: [1, 2]', '')
    """
    for name in _OTHER_CHOICES:
        if isinstance(given.get(name), list):
            return f"for choices write a list: {quoted(given[name])}"
    ends = [next((given[name] for name in names if name in given), None) for names in _OTHER_BOUNDS]
    if None in ends or not all(map(is_number, ends)):
        return ""
    low, high = (number(end, "end") for end in ends)
    scale = ", scale: log" if 0 < 10 * low <= high else ""
    return f"for a range write {{low: {ends[0]}, high: {ends[1]}{scale}}}"


def _items(key: str, given: list[Any]) -> Iterator[Any]:
    """Go through a list of choices, which must not be empty."""
    if not given:
        raise InputError(f"{key} has an empty list of choices; give at least one value.")
    yield from given


def _choices(key: str, values: list[Any]) -> Choices:
    known = set()
    for value in values:
        if (mark := _mark(value)) in known:
            raise InputError(f"{key} has the choice {quoted(value)} twice; remove one.")
        known.add(mark)
    return Choices(tuple(values))


def _mark(value: Any) -> Hashable:
    """Return what only equal values of the same type have in common.

    >>> _mark([1, {"a": 2}]) == _mark([1, {"a": 2}]), _mark(1) == _mark(True)
    (True, False)
    """
    if isinstance(value, list):
        return list, tuple(map(_mark, value))
    if isinstance(value, dict):
        return dict, frozenset((name, _mark(item)) for name, item in value.items())
    return type(value), value if isinstance(value, Hashable) else repr(value)


def _read_setting(field: FieldDescription, given: Any, total_steps: int) -> Domain:
    """Read the choices or the range of a whole setting."""
    name, entry = field.name, field.coefficient
    if isinstance(given, list):
        if entry is None:
            return _choices(name, [_listed(convert(field, item)) for item in _items(name, given)])
        return _choices(name, [_choice(field, entry, item, total_steps) for item in _items(name, given)])
    if not isinstance(given, Mapping):
        raise InputError(
            f"{name} is {quoted(given)}, a single value; sweep a list or a range such as "
            "{low: 0.1, high: 1}, or move it to settings."
        )
    if not _is_range(given) and (ours := _as_ours(given)):
        raise InputError(f"{name} is {quoted(given)}; {ours}.")
    units = {int: "whole", float: "number"}
    if (entry is None and field.type not in units) or not _is_range(given):
        raise InputError(f"{name} is {quoted(given)}, but it takes {field.type_text}; give a list of choices.")
    found = Range.read(name, given, "number" if entry is not None else units[field.type])
    if entry is not None:
        for value in found.extremes:
            _check_value(name, entry, value)
    return found


def _listed(value: Any) -> Any:
    """Return a setting's value as YAML stores it."""
    return list(value) if isinstance(value, tuple) else value


def _choice(field: FieldDescription, entry: Coefficient, given: Any, total_steps: int) -> Any:
    """Check one choice of a coefficient over the whole budget, and return it as a number, a text or `None`."""
    if is_none(given):
        if field.optional:
            return None
        raise InputError(f"{field.name} has the choice none; give {field.type_text}.")
    coefficient_schedule(entry, {field.name: given}, total_steps)
    if is_number(given):
        return number(given, field.name)
    return given if isinstance(given, str) else str(schedule(given))


def _read_parts(
    entry: Coefficient, given: Mapping[str, Any], total_steps: int
) -> tuple[dict[str, Domain], dict[str, Any]]:
    """Read a schedule with swept parts: what is swept, and the parts that are fixed."""
    swept: dict[str, Domain] = {}
    fixed: dict[str, Any] = {}
    for part, value in given.items():
        key = f"{entry.name}.{part}"
        if part not in PARTS:
            ours, near = _as_ours(given), closest(part, PARTS)
            if ours or near.startswith("known"):
                ours = ours or "for a range write {low: 1e-4, high: 1e-3, scale: log}"
                near = f"{ours}, for a schedule its parts: {', '.join(PARTS)}"
            raise InputError(f"{entry.name} has the unknown part {quoted(part)}; {near}")
        if isinstance(value, Mapping):
            if PARTS[part] == "word" or not _is_range(value):
                ours = _as_ours(value) if PARTS[part] != "word" else ""
                ours = ours or "give a value, a list of choices or a range"
                raise InputError(f"{key} is {quoted(value)}; {ours}.")
            swept[key] = Range.read(key, value, PARTS[part])
            for extreme in swept[key].extremes:
                _check_part(key, entry, extreme, total_steps)
        elif isinstance(value, list):
            swept[key] = _choices(key, [_check_part(key, entry, item, total_steps) for item in _items(key, value)])
        else:
            fixed[part] = _check_part(key, entry, value, total_steps)
    if not swept:
        raise InputError(
            f"{entry.name} is one schedule, {quoted(given)}; sweep one of its parts, or move it to settings."
        )
    if "start" not in given:
        raise InputError(f"{entry.name} has no start; add the value its schedules start from.")
    return swept, fixed


def _check_part(key: str, entry: Coefficient, given: Any, total_steps: int) -> Any:
    """Check one value of a part of a schedule by itself, and return it; numbers as numbers."""
    part = key.partition(".")[2]
    if PARTS[part] == "word":
        if given not in NAMES:
            raise InputError(f"{key} is {quoted(given)}; {closest(str(given), NAMES)}")
        return given
    try:
        value = given if PARTS[part] == "position" else number(given, part)
        if part not in ("start", "end"):
            shape = "polynomial" if part == "power" else "linear"
            schedule({"start": 1, "end": 0.5, "shape": shape, part: value}, total_steps)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None
    if part in ("start", "end"):
        _check_value(key, entry, value)
    return round(value) if part == "repeat" else value


def _check_value(key: str, entry: Coefficient, value: float) -> None:
    """Raise an error if a value is outside of the coefficient's range."""
    try:
        made = constant(value)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None
    replace(entry, name=key).check(made)


def _schedule_text(name: str, parts: dict[str, Any]) -> str:
    """Return the text of a schedule; parts that its shape does not take, such as a linear one's power, are left out."""
    shape = parts.get("shape")
    unused = {"constant": ("end", "power"), "linear": ("power",), "exponential": ("power",)}.get(str(shape), ())
    try:
        return str(schedule({part: value for part, value in parts.items() if part not in unused}))
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
