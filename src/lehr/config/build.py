"""Build configs from the user's keys and values, and convert them back; return the coefficients of a config."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from lehr.config.fields import MISSING, FieldDescription, Plugin, convert, describe, fields_of, is_none
from lehr.config.spelling import Conversion, as_one_text, suggestion
from lehr.errors import InputError, closest, page, quoted, shortened
from lehr.plugins import is_placeholder, text_of
from lehr.schedules.coefficient import Coefficient
from lehr.schedules.constructors import constant
from lehr.schedules.controllers import Controller
from lehr.schedules.function import FunctionSchedule
from lehr.schedules.keys import ENDINGS, Keys, coefficient_schedule, combine, is_number, is_open
from lehr.schedules.schedule import Schedule
from lehr.schedules.spec import AnySchedule, schedule

MOST_LISTED = 20
"""The maximum number of settings to list if an unknown one is like none of them."""


class Vocabulary(NamedTuple):
    """How the settings of some classes may be called."""

    parts: dict[str, tuple[str, str]]
    """Every spelling of every key of a coefficient: its name, and one of `ENDINGS`."""
    static: dict[str, str]
    """Every spelling of every other setting: its name."""
    conversions: dict[str, tuple[str, Conversion]]
    """Settings of other libraries that are converted: the setting that they decide, and how."""
    others: dict[str, str]
    """Settings of other libraries with another meaning: an explanation."""
    spellings: dict[str, str]
    """The name of the setting for every key."""
    elsewhere: tuple[Callable[[str], str], ...]
    """Functions that say where else a setting is known, for example in another algorithm; empty if nowhere."""

    @classmethod
    def of(cls, classes: Sequence[type], known: Mapping[str, FieldDescription]) -> "Vocabulary":
        """Return the vocabulary of these classes; a setting's own name comes before another one's alias."""
        fields = list(known.values())
        parts = {
            spelling + ending: (field.name, ending)
            for field in fields
            if field.is_coefficient
            for spelling in (field.name, *field.aliases)
            for ending in ENDINGS
            if spelling == field.name or spelling not in known
        }
        taken = {*known, *parts}
        static = {alias: field.name for field in fields if not field.is_coefficient for alias in field.aliases}
        conversions = {found.name: (field.name, found) for field in fields for found in field.names.conversions}
        others = {name: said for part in classes for name, said in getattr(part, "OTHERS", {}).items()}
        others |= {name: said for field in fields for name, said in field.others}
        own = {name: name for name, field in known.items() if not field.is_coefficient}
        own |= {alias: name for alias, name in static.items() if alias not in taken}
        converted = {name: found for name, found in conversions.items() if name not in taken and name not in static}
        return cls(
            parts,
            own,
            converted,
            {name: said for name, said in others.items() if name not in {*taken, *static, *conversions}},
            {**own, **{key: name for key, (name, _) in parts.items()}, **{key: key for key in converted}},
            tuple(part.elsewhere for part in classes if hasattr(part, "elsewhere")),
        )

    def part(self, key: str) -> tuple[str, str]:
        """Return the field that a key belongs to, and its part, one of `ENDINGS`."""
        return self.parts.get(key) or (self.static.get(key, key), "")


@cache
def _vocabulary(classes: tuple[type, ...]) -> Vocabulary:
    return Vocabulary.of(classes, fields_of(classes))


def build(classes: Sequence[type], given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Build one instance of each class from the given keys.

    Args:
        classes: frozen dataclasses with disjoint field names.
        given: values, or their texts, by field name or by an alias; for a coefficient, optionally with `_schedule` or
            `_warmup_steps` appended; hyphens count as underscores. `preset` names one of the classes' `PRESETS`, whose
            values apply where no key is given.

    Coefficients are stored as a number, a text or a function, however they were given.
    """
    return _built(classes, parse(classes, given))


def parse(classes: Sequence[type], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the settings that the keys mention, by field name, as `build` gives them to the classes."""
    known = fields_of(classes)
    keys = dict(given)
    presets = presets_of(classes)
    preset = keys.pop("preset", None) if presets else None
    words = _vocabulary(tuple(classes))
    merged = _known_only(keys, known, words)
    if not is_none(preset):
        name = preset if isinstance(preset, str) else quoted(preset)
        if name not in presets:
            raise InputError(f"There is no preset {quoted(preset)}; {closest(name, presets)}")
        merged = _merge(words, _known_only(presets[name], known, words), merged)
    merged = _converted(words, known, merged)
    mentioned = {words.part(key)[0] for key in merged}
    defaults = {name: field.default for name, field in known.items() if field.default is not MISSING}
    merged = _merge(words, {name: defaults[name] for name in mentioned & defaults.keys()}, merged)
    values = {name: _value(known[name], merged) for name in known if name in mentioned}
    for name, field in known.items():
        if name not in values and field.default is MISSING:
            raise InputError(f"{name} is not given; give {field.type_text}.")
    return values


def with_coefficients(classes: Sequence[type], parsed: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Build one instance of each class from the values of `parse` and other coefficients, each given by one key.

    What a class derives from its settings is derived anew for each.
    """
    known = fields_of(classes)
    return _built(classes, {**parsed, **{name: _value(known[name], given) for name in given}})


def _built(classes: Sequence[type], values: Mapping[str, Any]) -> tuple[Any, ...]:
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


def spellings_of(classes: Sequence[type]) -> Mapping[str, str]:
    """Return the name of the setting for every key that `build` takes.

    >>> from lehr.algorithms import ppo
    >>> spellings_of([ppo.Config])["ent_coef"]
    'entropy_coef'
    """
    return _vocabulary(tuple(classes)).spellings


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
    return _merge(_vocabulary(tuple(classes)), below, above)


def _merge(words: Vocabulary, below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    lower, upper = _canonical(words, below), _canonical(words, above)
    parts = words.parts
    for key, value in upper.items():
        name, ending = words.part(key)
        if key in parts and ((value is None and not ending) or (ending != "_warmup_steps" and _is_whole(value))):
            lower = {other: kept for other, kept in lower.items() if words.part(other)[0] != name}
        elif key in parts and not ending and _is_whole(lower.get(f"{key}_schedule")):
            del lower[f"{key}_schedule"]
        target = words.conversions[key][0] if key in words.conversions else key
        for other, (decided, _) in words.conversions.items():  # two ways to decide one setting
            if decided == target and other != key:
                lower.pop(other, None)
        if target != key:
            lower.pop(target, None)
    return {**lower, **upper}


def canonical(classes: Sequence[type], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values by canonical keys; an unknown key is an error that suggests the nearest known one.

    >>> from lehr.algorithms import ppo
    >>> canonical([ppo.Config], {"ent-coef": 0.03, "ent_coef_schedule": "linear"})
    {'entropy_coef': 0.03, 'entropy_coef_schedule': 'linear'}
    """
    return _known_only(given, fields_of(classes), _vocabulary(tuple(classes)))


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
            bind = _bound if type(value) in (int, float, str) else _bound.__wrapped__
            found[field.name] = bind(field.coefficient, value, total_steps)
    return found


@lru_cache(maxsize=2**12)  # in a sweep, most coefficients are the same in all members
def _bound(entry: Coefficient, value: Any, total_steps: float) -> AnySchedule | Controller:
    return coefficient_schedule(entry, {entry.name: value}, total_steps)


# Keys --------------------------------------------------------------------------------------------------------------


def underscored(key: Any) -> str:
    """Return a key as settings are spelled, with underscores and, if all of it is upper-case, in lower case.

    >>> underscored("env-parameters"), underscored("NUM_ENVS")
    ('env_parameters', 'num_envs')
    """
    text = str(key).replace("-", "_")
    return text.lower() if text.isupper() else text


def _canonical(words: Vocabulary, given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keys to underscores and canonical names; two spellings of one key are an error."""
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for written, value in given.items():
        key = underscored(written)
        canonical = "".join(words.part(key))
        if canonical in found:
            spare = written if spelled[canonical] == canonical else spelled[canonical]
            raise InputError(
                f"{canonical} is given twice, as {spelled[canonical]!r} and as {written!r}; remove {spare!r}."
            )
        spelled[canonical] = str(written)
        found[canonical] = None if key in words.parts and is_none(value) else value
    return found


def _known_only(given: Mapping[str, Any], known: Mapping[str, FieldDescription], words: Vocabulary) -> dict[str, Any]:
    """Convert keys to canonical names; an unknown key is an error that explains it, or suggests what may be meant."""
    spelled = words.spellings
    for written in given:
        key = underscored(written)
        if key not in spelled:
            raise InputError(f"There is no setting {quoted(written)}{_advice(key, given, known, words)}")
        if key in words.conversions:
            values = {underscored(name): value for name, value in given.items()}
            explained = words.conversions[key][1].explain(values)
            if explained:
                raise InputError(f"{key} is {quoted(given[written])}; {explained}.")
    return _canonical(words, given)


def advice(classes: Sequence[type], key: str, given: Mapping[str, Any]) -> str:
    """Return what to do about an unknown setting, beginning with punctuation; `given` are all settings."""
    return _advice(underscored(key), given, fields_of(classes), _vocabulary(tuple(classes)))


def _advice(key: str, given: Mapping[str, Any], known: Mapping[str, FieldDescription], words: Vocabulary) -> str:
    if key in words.others:
        return f": {words.others[key]}."
    for known_elsewhere in filter(None, (say(key) for say in words.elsewhere)):
        return f": {known_elsewhere}."
    values = {underscored(name): value for name, value in given.items()}
    coefficients = {spelling: name for spelling, (name, ending) in words.parts.items() if not ending}
    explained = as_one_text(key, values, coefficients, {name: field.default for name, field in known.items()})
    if explained:
        return f"; {explained}."
    listed = f"known: {', '.join(known)}"
    otherwise = (
        listed if len(known) <= MOST_LISTED else f"{page('migration.md')} lists what other libraries call settings."
    )
    return f"; {suggestion(shortened(key), words.spellings, otherwise)}"


def _converted(words: Vocabulary, known: Mapping[str, FieldDescription], merged: dict[str, Any]) -> dict[str, Any]:
    """Convert the settings of other libraries, in the order of the settings that they decide."""

    def value(name: str) -> Any:
        return convert(known[name], settled[name]) if name in settled else known[name].default

    settled = {key: given for key, given in merged.items() if key not in words.conversions}
    given: dict[str, list[str]] = {}
    for key in merged:
        if key in words.conversions:
            given.setdefault(words.conversions[key][0], []).append(key)
    sources: dict[str, str] = {}
    for name in known:
        for key in given.get(name, ()):
            for decided, result in words.conversions[key][1].convert(merged[key], value).items():
                if decided in settled and settled[decided] != result:
                    other = f"{sources[decided]} means" if decided in sources else f"{decided} is"
                    raise InputError(
                        f"{key} is {quoted(merged[key])}, which means {decided}={quoted(result)}, but {other} "
                        f"{quoted(settled[decided])}; remove one of them."
                    )
                settled[decided], sources[decided] = result, key
    return settled


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
    if isinstance(made, Schedule):
        first = made.phases[0]
        if first.start == first.end and made == constant(first.start):
            return first.start
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
