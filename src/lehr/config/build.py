"""Build configs from the user's keys and values, and convert them back; return the coefficients of a config."""

from collections.abc import Mapping, Sequence
from typing import Any

from lehr.config.fields import MISSING, FieldDescription, Plugin, convert, describe, fields_of, is_none, nearest
from lehr.errors import InputError, closest, quoted
from lehr.plugins import is_placeholder, text_of
from lehr.schedules.constructors import constant
from lehr.schedules.controllers import Controller
from lehr.schedules.function import FunctionSchedule
from lehr.schedules.keys import ENDINGS, Keys, coefficient_schedule, combine, is_number, is_open
from lehr.schedules.schedule import Schedule
from lehr.schedules.spec import AnySchedule, schedule

Parts = dict[str, tuple[str, str]]
"""Maps every spelling of every key of a coefficient to its name and one of `ENDINGS`."""


def build(classes: Sequence[type], given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Build one instance of each class from the given keys.

    Args:
        classes: frozen dataclasses with disjoint field names.
        given: values, or their texts, by field name or by a coefficient's alias, optionally with `_schedule` or
            `_warmup_steps` appended; hyphens count as underscores. `preset` names one of the classes' `PRESETS`, whose
            values apply where no key is given.

    Coefficients are stored as a number, a text or a function, however they were given.
    """
    known = fields_of(classes)
    keys = dict(given)
    presets = presets_of(classes)
    preset = keys.pop("preset", None) if presets else None
    parts = _parts(known)
    merged = _known_only(keys, known, parts)
    if not is_none(preset):
        name = preset if isinstance(preset, str) else quoted(preset)
        if name not in presets:
            raise InputError(f"There is no preset {quoted(preset)}; {closest(name, presets)}")
        merged = _merge(parts, _known_only(presets[name], known, parts), merged)
    mentioned = {_part(parts, key)[0] for key in merged}
    defaults = {name: field.default for name, field in known.items() if field.default is not MISSING}
    merged = _merge(parts, {name: defaults[name] for name in mentioned & defaults.keys()}, merged)
    values = {name: _value(known[name], merged) for name in known if name in mentioned}
    for name, field in known.items():
        if name not in values and field.default is MISSING:
            raise InputError(f"{name} is not given; give {field.type_text}.")
    return tuple(cls(**{f.name: values[f.name] for f in describe(cls) if f.name in values}) for cls in classes)


def with_preset(cls: type, name: str) -> Any:
    """Return a config with the values of one of the class's `PRESETS: ClassVar[dict[str, dict[str, Any]]]`."""
    return build([cls], {"preset": name})[0]


def presets_of(classes: Sequence[type]) -> dict[str, dict[str, Any]]:
    """Return the presets of several classes; presets with the same name are merged."""
    found: dict[str, dict[str, Any]] = {}
    for cls in classes:
        for name, values in getattr(cls, "PRESETS", {}).items():
            found[name] = {**found.get(name, {}), **values}
    return found


def merge(classes: Sequence[type], below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings with canonical keys; `above` overrides `below`.

    A complete schedule, or none, replaces every key of its coefficient, and a number replaces a complete schedule.
    Otherwise a number, a shape or a warm-up replaces only the same key.

    >>> from dataclasses import dataclass
    >>> from typing import Annotated
    >>> from lehr.config import Coef
    >>> from lehr.schedules import Coefficient
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     entropy_coef: Annotated[Coef, Coefficient(("ent_coef",))] = 0.01
    ...     num_envs: int = 8
    >>> merge([Config], {"ent_coef": 0.03, "ent_coef_schedule": "linear", "num-envs": 4}, {"entropy-coef": 0.02})
    {'entropy_coef': 0.02, 'entropy_coef_schedule': 'linear', 'num_envs': 4}
    >>> merge([Config], {"ent_coef": 0.03, "ent_coef_schedule": "linear"}, {"entropy-coef": "0.02 -> 0.01"})
    {'entropy_coef': '0.02 -> 0.01'}
    """
    return _merge(_parts(fields_of(classes)), below, above)


def _merge(parts: Parts, below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    lower, upper = _canonical(parts, below), _canonical(parts, above)
    for key, value in upper.items():
        name, ending = _part(parts, key)
        if key in parts and ((value is None and not ending) or (ending != "_warmup_steps" and _is_whole(value))):
            lower = {other: kept for other, kept in lower.items() if _part(parts, other)[0] != name}
        elif key in parts and not ending and _is_whole(lower.get(f"{key}_schedule")):
            del lower[f"{key}_schedule"]
    return {**lower, **upper}


def canonical(classes: Sequence[type], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values by canonical keys; an unknown key is an error that suggests the nearest known one.

    >>> from dataclasses import dataclass
    >>> from typing import Annotated
    >>> from lehr.config import Coef
    >>> from lehr.schedules import Coefficient
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     entropy_coef: Annotated[Coef, Coefficient(("ent_coef",))] = 0.01
    >>> canonical([Config], {"ent-coef": 0.03, "ent_coef_schedule": "linear"})
    {'entropy_coef': 0.03, 'entropy_coef_schedule': 'linear'}
    """
    known = fields_of(classes)
    return _known_only(given, known, _parts(known))


def to_mapping(*configs: Any) -> dict[str, Any]:
    """Return plain values by field name, for JSON and YAML; `build` turns them back into configs.

    Schedules and controllers become their texts, and your own objects `module:Name`. A value that cannot be saved as
    text, such as a lambda, becomes a description in angle brackets, and `build` asks for it again.
    """
    known = fields_of([type(config) for config in configs])
    values = {field.name: getattr(config, field.name) for config in configs for field in describe(type(config))}
    for name, value in values.items():
        if known[name].is_coefficient and value is not None:
            plain = _plain(name, value)
            values[name] = plain if isinstance(plain, int | float | str) else str(schedule(plain))
        elif isinstance(value, tuple):
            values[name] = [text_of(item) if known[name].type == tuple[Plugin, ...] else item for item in value]
        elif isinstance(value, dict):
            values[name] = {key: list(item) if isinstance(item, tuple) else item for key, item in value.items()}
        elif known[name].type == Plugin and value is not None:
            values[name] = text_of(value)
    return values


def coefficients(config: Any, total_steps: float) -> dict[str, AnySchedule | Controller]:
    """Return the coefficients of a config by name, bound to the budget and checked; those set to `None` are omitted."""
    found: dict[str, AnySchedule | Controller] = {}
    for field in describe(type(config)):
        value = getattr(config, field.name)
        if field.coefficient is not None and value is not None:
            found[field.name] = coefficient_schedule(field.coefficient, {field.name: value}, total_steps)
    return found


# Keys --------------------------------------------------------------------------------------------------------------


def underscored(key: Any) -> str:
    """Return a key as settings are spelled, with underscores.

    >>> underscored("env-parameters")
    'env_parameters'
    """
    return str(key).replace("-", "_")


def _parts(known: Mapping[str, FieldDescription]) -> Parts:
    """Return the keys of all coefficients among these fields."""
    return {
        spelling + ending: (field.name, ending)
        for field in known.values()
        if field.is_coefficient
        for spelling in (field.name, *field.aliases)
        for ending in ENDINGS
    }


def _part(parts: Parts, key: str) -> tuple[str, str]:
    """Return the field that a key belongs to, and its part, one of `ENDINGS`."""
    return parts.get(key, (key, ""))


def _canonical(parts: Parts, given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keys to underscores and canonical names; two spellings of one key are an error."""
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for written, value in given.items():
        key = underscored(written)
        canonical = "".join(_part(parts, key))
        if canonical in found:
            spare = written if spelled[canonical] == canonical else spelled[canonical]
            raise InputError(
                f"{canonical} is given twice, as {spelled[canonical]!r} and as {written!r}; remove {spare!r}."
            )
        spelled[canonical] = str(written)
        found[canonical] = None if key in parts and is_none(value) else value
    return found


def _known_only(given: Mapping[str, Any], known: Mapping[str, FieldDescription], parts: Parts) -> dict[str, Any]:
    """Convert keys to canonical names; an unknown key is an error that suggests the nearest known one."""
    words = list(dict.fromkeys([*known, *parts]))
    others = {name: said for field in known.values() if field.coefficient for name, said in field.coefficient.others}
    for written in given:
        key = underscored(written)
        if key in others:
            raise InputError(f"There is no setting {quoted(written)}: {others[key]}.")
        if key not in words:
            raise InputError(f"There is no setting {quoted(written)}; {closest(key, nearest(key, words) or known)}")
    return _canonical(parts, given)


# Values ------------------------------------------------------------------------------------------------------------


def _value(field: FieldDescription, merged: Mapping[str, Any]) -> Any:
    if not field.is_coefficient:
        given = merged[field.name]
        for item in given if isinstance(given, list | tuple) else [given]:
            if field.type in (Plugin, tuple[Plugin, ...]) and is_placeholder(item):
                raise InputError(f"{field.name} was an object, {item}, which cannot be saved in a file; pass it again.")
        return convert(field, given)
    value = _combined(field.name, *(merged.get(field.name + ending) for ending in ENDINGS))
    if value is None and not field.optional:
        raise InputError(f"{field.name} is none; give {field.type_text}.")
    return value


def _plain(key: str, given: Any) -> Any:
    """Return a coefficient as it is stored: a number, a text, or the function or controller that no text can hold."""
    made = _made(key, given)
    if isinstance(made, FunctionSchedule) or (isinstance(made, Controller) and is_placeholder(str(made))):
        return given
    if isinstance(made, Schedule) and made == constant(made.phases[0].start):
        return made.phases[0].start
    return given if isinstance(given, str) else str(made)


def _made(key: str, given: Any) -> AnySchedule | Controller:
    _refuse_placeholder(key, given)
    try:
        return schedule(given)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None


def _refuse_placeholder(key: str, given: Any) -> None:
    if is_placeholder(given):
        what = "function" if given.startswith("<function ") else "object"
        article = "a" if what == "function" else "an"
        raise InputError(
            f"{key} was {article} {what}, {given}, which cannot be saved in a file; pass the {what} again."
        )


def _is_whole(given: Any) -> bool:
    """Whether this is a complete schedule, not just a number."""
    return given is not None and not is_number(given) and not is_open(given)


def _combined(name: str, value: Any, shape: Any, ramp: Any) -> Any:
    """Combine the three keys of a coefficient into one value, before the budget is known."""
    keys = Keys.spelled(name)
    if value is None and shape is None:
        if ramp is not None:
            raise InputError(f"{keys.warmup} is {quoted(ramp)}, but {name} is none; remove one of them.")
        return None
    if shape is None and ramp is None:
        return _plain(name, value)
    for key, given in ((keys.fixed, value), (keys.schedule, shape)):
        _refuse_placeholder(key, given)
    combined = combine(keys, value, shape, ramp)
    keeps_text = ramp is None and not is_open(shape)
    return _plain(keys.schedule, shape) if keeps_text else _plain(name, combined)
