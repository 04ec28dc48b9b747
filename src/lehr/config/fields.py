"""Fields of a config: their types, help texts, and the conversion of texts and objects to values."""

import ast
import dataclasses
import inspect
import itertools
import math
import operator
import os
import re
import textwrap
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from numbers import Integral, Real
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, Union, get_args, get_origin, get_type_hints

from lehr.config.spelling import Names, spellings
from lehr.errors import InputError, closest, quoted
from lehr.schedules.coefficient import Coefficient
from lehr.schedules.text import parse_number

Coef = Annotated[Any, Coefficient()]
"""The type of a coefficient's field, which accepts everything that `lehr.schedule` accepts.

Declare the range and the aliases at the field: `Annotated[Coef, Coefficient(("gamma",), maximum=1)]`. A subclass that
only changes the default writes `Coef` and inherits them. The default range is 0 or more.
"""

_PLUGIN = "a user's object, or its name"
Plugin = Annotated[Any, _PLUGIN]
"""The type of a field that accepts the name of a built-in, `module:Name`, or an object of your own."""

CountOrAll: TypeAlias = int | Literal["all"]
"""The type of a number that may also be all there are."""

CountOrAuto: TypeAlias = int | Literal["auto"]
"""The type of a number that `auto` derives from other settings."""

AutoBool: TypeAlias = bool | Literal["auto"]
"""The type of a switch that `auto` sets by the environment's spaces."""

MISSING: Any = dataclasses.MISSING
"""The default of a required field."""


class HashableDict(dict[str, Any]):
    """A dict for a config that is a static, hashable value; it must not be changed. Lists in it become tuples."""

    def __init__(self, given: Mapping[str, Any] = types.MappingProxyType({})) -> None:
        super().__init__({name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


class FieldDescription(NamedTuple):
    """A field of a config, for help pages, flags and conversion."""

    name: str
    type_text: str
    """What it accepts, in words: `a whole number such as 64 or 500k, or none`."""
    default: Any
    """`MISSING` if the field is required."""
    config: type
    """The class whose field it is."""
    type: Any
    """`bool`, `AutoBool`, `int`, `float`, `str`, `tuple[…, ...]`, `dict[str, Any]`, `Literal[…]`, `CountOrAll`,
    `CountOrAuto`, `Plugin` or `Coef`."""
    optional: bool
    """Whether it may be `None`."""
    coefficient: Coefficient | None = None
    """Range and aliases, if it is a coefficient."""
    names: Names = Names()
    """What other libraries call it, if it is not a coefficient."""

    @property
    def help(self) -> str:
        """The docstring under the field; read from the source, which takes a while and is not needed for a run."""
        return _docstrings(self.config).get(self.name, "")

    @property
    def is_coefficient(self) -> bool:
        """Whether the field accepts schedules."""
        return self.coefficient is not None

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names with the same meaning, American spellings included."""
        found = self.names.aliases if self.coefficient is None else self.coefficient.aliases
        return tuple(spellings(self.name, found)[1:])

    @property
    def others(self) -> tuple[tuple[str, str], ...]:
        """Similar names with another meaning, each with an explanation."""
        return self.names.others if self.coefficient is None else self.coefficient.others


def describe(cls: type) -> list[FieldDescription]:
    """Return the fields of a config class in order, including inherited ones."""
    return list(_described(cls))


@cache
def _described(cls: type) -> list[FieldDescription]:
    hints = get_type_hints(cls, include_extras=True)
    described = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        kind, optional = _without_none(hints[field.name])
        kind = _without_names(kind)
        coefficient = None
        if _declared(kind) is not None:
            coefficient = dataclasses.replace(_coefficient(cls, field.name), name=field.name)
            kind = Coef
        text = _type_text(kind, f"{cls.__name__}.{field.name}")
        if optional:
            text += ", or none"
        make: Any = field.default_factory
        default = field.default if make is MISSING else make()
        names = _names(cls, field.name) if coefficient is None else Names()
        described.append(FieldDescription(field.name, text, default, cls, kind, optional, coefficient, names))
    return described


def _without_names(hint: Any) -> Any:
    """Return the type of a field without its `Names`.

    >>> _without_names(Annotated[int, Names(("n_envs",))]), _without_names(Annotated[Plugin, Names()]) == Plugin
    (<class 'int'>, True)
    """
    parts = getattr(hint, "__metadata__", ())
    kept = tuple(part for part in parts if not isinstance(part, Names))
    if len(kept) == len(parts):
        return hint
    return Annotated[hint.__origin__, *kept] if kept else hint.__origin__


def _names(cls: type, name: str) -> Names:
    """Return the first declaration of what other libraries call a field, in the class or its parents."""
    for parent in cls.__mro__:
        if name in inspect.get_annotations(parent):
            kind, _ = _without_none(get_type_hints(parent, include_extras=True)[name])
            for part in getattr(kind, "__metadata__", ()):
                if isinstance(part, Names):
                    return part
    return Names()


def _declared(hint: Any) -> Coefficient | None:
    """Return the last `Coefficient` of an annotation; `None` if the field is not a coefficient."""
    kind, _ = _without_none(hint)
    said = [part for part in getattr(kind, "__metadata__", ()) if isinstance(part, Coefficient)]
    return said[-1] if said else None


def _coefficient(cls: type, name: str) -> Coefficient:
    """Return the first declaration of a coefficient, in the class or its parents, that is more than `Coef`."""
    for parent in cls.__mro__:
        if name in inspect.get_annotations(parent):
            entry = _declared(get_type_hints(parent, include_extras=True)[name])
            if entry is not None and entry != Coefficient():
                return entry
    return Coefficient()


def fields_of(classes: Sequence[type]) -> dict[str, FieldDescription]:
    """Return the fields of several classes as one namespace."""
    found: dict[str, FieldDescription] = {}
    for cls in classes:
        for field in describe(cls):
            if field.name in found:
                raise TypeError(
                    f"Two of {', '.join(c.__name__ for c in classes)} have a field {field.name!r}; rename one."
                )
            found[field.name] = field
    return found


MOST_COUNTED = 2**31 - 1
"""The largest count of anything that is stored in an array or looped over; such indices are 32-bit integers."""


def check_counts(config: Any, *names: str, least: int = 1, most: int = MOST_COUNTED) -> None:
    """Raise an error if one of these fields is below `least` or above `most`; `None` is neither."""
    for name in names:
        given = getattr(config, name)
        for count in given if isinstance(given, tuple) else [given]:
            if count is not None and count < least:
                raise InputError(f"{name} is {quoted(given)}; it must be {least} or more.")
            if count is not None and count > most:
                raise InputError(f"{name} is {quoted(given)}; it must be {most} or less.")


def count_of(name: str, given: Any) -> int:
    """Convert a count that another library's setting gives, or raise an error.

    >>> count_of("batch_size", "1k")
    1000
    """
    try:
        count = _whole_number(given)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise InputError(f"{name} is {quoted(given)}; give a whole number such as 64 or 500k.")
    return count


# Types -------------------------------------------------------------------------------------------------------------


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return the type without `None`, and whether it allowed `None`."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    members = tuple(member for member in get_args(hint) if member is not type(None))
    return reduce(operator.or_, members), len(members) < len(get_args(hint))


_TYPE_TEXTS = {
    CountOrAll: "a whole number, or all",
    CountOrAuto: "a whole number, or auto",
    Plugin: "a name, 'module:Name', or an object",
    tuple[Plugin, ...]: "names, 'module:Name', or objects",
    Coef: "a number or a schedule such as '0.03 -> 0.001 cosine'",
    bool: "true or false",
    AutoBool: "auto, true or false",
    int: "a whole number such as 64 or 500k",
    float: "a number",
    str: "a text",
    tuple[int, ...]: "whole numbers such as 64,64",
    tuple[float, ...]: "numbers such as 0.5,1",
    tuple[str, ...]: "texts such as position,velocity",
    dict[str, Any]: "names and values such as backend=spring,friction=0.5",
}


def _type_text(kind: Any, where: str) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if kind not in _TYPE_TEXTS:
        raise TypeError(
            f"{where} is annotated with {kind}; a config accepts Coef, Plugin, bool, int, float, str, AutoBool, "
            "CountOrAll, CountOrAuto, tuple[int, ...], tuple[float, ...], tuple[str, ...], dict[str, Any], Literal, "
            "and any of these or None."
        )
    return _TYPE_TEXTS[kind]


_PARSING = threading.Lock()
"""Python 3.11 raises a SystemError if two threads parse at the same time."""


@cache
def _docstrings(cls: type) -> dict[str, str]:
    """Return the docstring under each field, from the source of the class and its parents."""
    found: dict[str, str] = {}
    for parent in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        try:
            with _PARSING:
                source = ast.parse(textwrap.dedent(inspect.getsource(parent)))
        except (OSError, TypeError, SyntaxError):  # made at run time: no source, or inspect finds the wrong lines
            continue
        bodies = [part.body for part in source.body if isinstance(part, ast.ClassDef) and part.name == parent.__name__]
        for statement, following in itertools.pairwise(itertools.chain(*bodies)):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


# Values ------------------------------------------------------------------------------------------------------------

TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_BRACKETS = re.compile(r"\[(.*)\]|\((.*)\)")


def is_none(given: Any) -> bool:
    """Whether this is `None`, or a text that means it."""
    return given is None or (isinstance(given, str) and given.strip().lower() in ("none", "null"))


def convert(field: FieldDescription, given: Any) -> Any:
    """Convert an object or a text to the value of a static field; an error says what is allowed."""
    if field.optional and is_none(given):
        return None
    if get_origin(field.type) is Literal:
        return _choice(field, given)
    try:
        if get_origin(field.type) is tuple:
            return tuple(_CONVERTERS[get_args(field.type)[0]](item) for item in _items(given))
        if get_origin(field.type) is dict:
            return _pairs(given)
        return _CONVERTERS[field.type](given)
    except (ValueError, OverflowError):
        raise InputError(f"{field.name} is {quoted(given)}; give {field.type_text}.") from None


def _choice(field: FieldDescription, given: Any) -> Any:
    choices = get_args(field.type)
    if isinstance(given, bool) and "on" in choices:
        given = "on" if given else "off"  # YAML reads both words as truth values
    for choice in choices:
        if (type(given) is type(choice) and given == choice) or (isinstance(given, str) and given == str(choice)):
            return choice
    word = given if isinstance(given, str) else quoted(given)
    raise InputError(f"{field.name} is {quoted(given)}; {closest(word, map(str, choices))}")


def _items(given: Any) -> Sequence[Any]:
    """Return the items of a list, of a text such as `64,64` or `[64, 64]`, or of a single item."""
    if not isinstance(given, str):
        return given if isinstance(given, list | tuple) else [given]
    match = _BRACKETS.fullmatch(given.strip())
    inner = given if match is None else match[1] or match[2] or ""
    inner = inner.strip().removesuffix(",")
    return [item.strip().strip("'\"") for item in inner.split(",")] if inner else []


def _pairs(given: Any) -> dict[str, Any]:
    """Return the names and values of a mapping, or of a text such as `backend=spring,friction=0.5`."""
    if not isinstance(given, str):
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise ValueError
        return dict(given)
    pairs = [item.partition("=") for item in _items(given)]
    if not all(name.strip().isidentifier() and equals for name, equals, _ in pairs):
        raise ValueError
    return {name.strip(): _scalar(value.strip()) for name, _, value in pairs}


def _scalar(text: str) -> Any:
    """Convert a text to a bool, a number or `None` if possible; otherwise return the text."""
    if is_none(text):
        return None
    for read in (_truth, _whole_number, _number):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _truth(given: Any) -> bool:
    if isinstance(given, str) and given.strip().lower() in TRUTHS:
        return TRUTHS[given.strip().lower()]
    if not isinstance(given, bool):
        raise ValueError
    return given


def _number(given: Any) -> float:
    if isinstance(given, str):
        return parse_number(given)
    if isinstance(given, bool) or not isinstance(given, Real) or math.isnan(given):
        raise ValueError
    return float(given)


def _whole_number(given: Any) -> int:
    if isinstance(given, str) and re.fullmatch(r"\s*[-+]?\d+\s*", given):
        whole = int(given)  # exact, while a float only has sixteen digits
    elif isinstance(given, Integral) and not isinstance(given, bool):
        whole = int(given)
    elif (value := _number(given)).is_integer():
        whole = int(value)
    else:
        raise ValueError
    if not -(2**63) <= whole < 2**64:
        raise ValueError
    return whole


def _or_word(word: str, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a converter that keeps this word, and reads all else."""
    return lambda given: word if isinstance(given, str) and given.strip().lower() == word else read(given)


def _text(given: Any) -> str:
    if not isinstance(given, str | os.PathLike):
        raise ValueError
    return os.fspath(given)


def _plugin(given: Any) -> Any:
    if given is None or isinstance(given, bool | int | float):
        raise ValueError
    return given


_CONVERTERS: dict[Any, Callable[[Any], Any]] = {
    bool: _truth,
    AutoBool: _or_word("auto", _truth),
    int: _whole_number,
    float: _number,
    str: _text,
    Plugin: _plugin,
    CountOrAll: _or_word("all", _whole_number),
    CountOrAuto: _or_word("auto", _whole_number),
}
