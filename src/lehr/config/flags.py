"""Fields ↔ command-line flags."""

import argparse
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin
from weakref import WeakKeyDictionary

from lehr.config.build import advice, presets_of, spellings_of
from lehr.config.fields import (
    MISSING,
    TRUTHS,
    AutoBool,
    Coef,
    CountOrAll,
    CountOrAuto,
    FieldDescription,
    Plugin,
    describe,
    fields_of,
)
from lehr.config.spelling import suggestion
from lehr.errors import InputError, quoted, shortened
from lehr.schedules.keys import ENDINGS

_PREFIX = "setting:"
"""Prefix of settings in the namespace, which also holds other arguments."""
_classes: WeakKeyDictionary[argparse.ArgumentParser, tuple[type, ...]] = WeakKeyDictionary()
"""The settings classes of parsers, for advice on unknown flags."""
_fields: WeakKeyDictionary[argparse.Action, FieldDescription] = WeakKeyDictionary()
"""The settings of flags, for their help."""
_METAVARS = {
    Coef: "SCHEDULE",
    CountOrAll: "N|all",
    CountOrAuto: "N|auto",
    Plugin: "NAME",
    int: "INTEGER",
    float: "NUMBER",
    str: "TEXT",
    dict[str, Any]: "NAME=VALUE,...",
}


def add_flags(
    parser: argparse.ArgumentParser, classes: Sequence[type], groups: Sequence[str], first: Sequence[str] = ()
) -> None:
    """Add one flag per field of the classes to the parser, with one title of `groups` per class.

    The help lists the fields in `first` at the beginning of their group. The formatter of the parser must show
    `help_of`, as that of `lehr.cli.Parser` does. Aliases, other libraries' settings that can be converted, and a
    coefficient's `-schedule` and `-warmup-steps` are flags too, but hidden in the help. Values are texts until `build`.
    """
    fields_of(classes)  # checks that the names are disjoint
    _classes[parser] = tuple(classes)
    presets = presets_of(classes)
    for cls, title in zip(classes, groups, strict=True):
        if not describe(cls):
            continue
        group = parser.add_argument_group(title)
        if presets and hasattr(cls, "PRESETS"):
            _add(group, "preset", metavar="NAME", help=f"Preset for settings that are not given: {', '.join(presets)}.")
            presets = {}  # one flag for all classes
        own = {field.name: field for field in describe(cls)}
        for name in dict.fromkeys([*(name for name in first if name in own), *own]):
            _add_field(group, own[name])
    for cls in classes:
        for field in describe(cls):
            _add_aliases(parser, field)


def given_flags(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the settings given on the command line, without defaults."""
    return {name.removeprefix(_PREFIX): value for name, value in vars(namespace).items() if name.startswith(_PREFIX)}


def refuse_unknown(parser: argparse.ArgumentParser, words: Sequence[str], given: Sequence[str] = ()) -> None:
    """Raise an error for arguments that `parser.parse_known_args` did not recognise, with what may be meant.

    Args:
        parser: the parser.
        words: the arguments that it did not recognise.
        given: all arguments.
    """
    for word in words:
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            raise InputError(f"Unexpected argument {quoted(word)}; {_meant(parser, word, given)}")
        raise InputError(f"There is no option {quoted(flag)}{_advice(parser, flag, words)}")


def _meant(parser: argparse.ArgumentParser, word: str, given: Sequence[str]) -> str:
    """What to do about a word that is no flag: it may belong to a list, or be an environment."""
    options = parser._option_string_actions
    for flag, text in itertools.pairwise(given):
        if text == word and isinstance(options.get(flag), argparse.BooleanOptionalAction):
            return f"{flag} takes no value; {_switched(flag, word)}."
    for place, text in enumerate(given):
        flag, equals, first = text.partition("=")
        if flag not in options or options[flag].metavar != "LIST":
            continue
        after = itertools.takewhile(lambda value: not value.startswith("-"), given[place + 1 :])
        values = [*([first] if equals else []), *after]
        if word in values[1:] and len({value[:1].isdigit() for value in values}) == 1:  # all or none are numbers
            return f"lists are written with commas: {flag} {shortened(','.join(values))}"
    if "--env" in options and re.search(r"-v\d+$|^\w+:", word) and not any(text.startswith("--env") for text in given):
        return f"did you mean '--env {shortened(word)}'?"
    return f"see '{parser.prog} --help'."


def _advice(parser: argparse.ArgumentParser, flag: str, words: Sequence[str]) -> str:
    """What to do about an unknown flag: as for an unknown setting, unless it is like a flag that is none."""
    said = ""
    if parser in _classes:
        given = {word[2:].partition("=")[0]: word.partition("=")[2] for word in words if word.startswith("--")}
        given |= {
            first[2:]: second for first, second in itertools.pairwise(words) if first == flag and second[0] != "-"
        }
        said = advice(_classes[parser], flag.lstrip("-"), given)
    if said.startswith(":") or "one text" in said:
        return _as_flags(said, parser)
    names = spellings_of(_classes[parser]) if parser in _classes else {}
    options = {option: _own_flag(option, names) for option in parser._option_string_actions}
    near = suggestion(shortened(flag).replace("_", "-"), options, "")
    if "did you mean" in said and not near:
        return re.sub(r"'(\w+)'", lambda match: f"'--{match[1].replace('_', '-')}'", said)
    otherwise = f"see '{parser.prog} --help'."
    return f"; {near or otherwise}"


def _own_flag(option: str, names: Mapping[str, str]) -> str:
    """The flag with a setting's own name, for one with any of its names."""
    key = option.removeprefix("--").replace("-", "_")
    return f"--{names[key].replace('_', '-')}" if key in names and option.startswith("--") else option


_SETTING = re.compile(
    r"(\w+)=(?:(True|False)|'([^']*)'|\{'(\w+)': ([^}]*)\}|(\d+(?:\.\d+)?)|(?=[;.:,]|$))"
    r"|(?<!by )\b[a-z]+(?:_[a-z]+)+\b(?! ·)"
    r"|(?:(?<=write )|(?<=set )|(?<=or ))[a-z]+\b"
)
"""A setting in a sentence: with a value as in Python, by its name of several words, or where one is to be written."""


def _as_flags(said: str, parser: argparse.ArgumentParser) -> str:
    """Write the settings in a sentence, such as `epochs=4`, as the command line takes them."""

    def flag(match: re.Match[str]) -> str:
        name = match[1] or match[0]
        flag = f"--{name.replace('_', '-')}"
        action = parser._option_string_actions.get(flag)
        if action is None or action.dest.removeprefix(_PREFIX) != name:
            return match[0]
        _, truth, text, key, value, number = match.groups()
        if match[1] is None:
            return flag
        if truth:
            return flag if truth == "True" else f"--no-{flag[2:]}"
        if text is not None:
            return f"{flag} {text}" if re.fullmatch(r"[\w./:-]+", text) else f'{flag} "{text}"'
        if key:
            return f"{flag} {key}={value.strip(chr(39))}"
        return f"{flag} {number or action.metavar}"

    return _SETTING.sub(flag, said)


def switch_advice(message: str) -> str:
    """What to write instead, for argparse's message about a switch that was given a value; empty for other messages.

    >>> switch_advice("argument --wandb/--no-wandb: ignored explicit argument 'false'")
    '--wandb takes no value; write --wandb or --no-wandb'
    """
    match = re.fullmatch(r"argument --([\w-]+)(?:/--[\w-]+)*/--no-.*: ignored explicit argument .*", message)
    return f"--{match[1]} takes no value; write --{match[1]} or --no-{match[1]}" if match else ""


def _switched(flag: str, value: str) -> str:
    """How to write a switch that was given a value."""
    positive = flag.replace("--no-", "--", 1)
    if (truth := TRUTHS.get(value.lower())) is None or flag != positive:
        return f"write {positive} or --no-{positive[2:]}"
    return f"write {positive}" if truth else f"write --no-{positive[2:]}"


class _Switch(argparse.Action):
    """`--name` and `--no-name`, as for a bool, and `--name auto|true|false`."""

    def __init__(self, option_strings: Sequence[str], **options: Any) -> None:
        negated = [f"--no-{option[2:]}" for option in option_strings]
        super().__init__([*option_strings, *negated], nargs="?", metavar="{auto,true,false}", **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Store the value, true if there is none, or false."""
        is_negated = str(option_string).startswith("--no-")
        if is_negated and values is not None:
            parser.error(f"unexpected argument {quoted(values)} after {option_string}; drop one of them")
        setattr(namespace, self.dest, not is_negated if values is None else values)


def _switch(field: FieldDescription) -> dict[str, Any]:
    """The options of argparse for a switch; empty if the field is none."""
    if field.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"action": _Switch} if field.type == AutoBool else {}


def _add_field(group: Any, field: FieldDescription) -> None:
    action = _add(group, field.name, help=field.name, **(_switch(field) or {"metavar": _metavar(field)}))
    _fields[action] = field


def help_of(action: argparse.Action) -> str | None:
    """Return the help of a flag: that of a setting is the docstring under its field, which takes a while to read."""
    if action not in _fields:
        return action.help
    field = _fields[action]
    default = "required" if field.default is MISSING else f"default: {_default_text(field.default)}"
    is_told = field.default == () or (field.default is None and "by default" in field.help)
    return (field.help if is_told else f"{field.help} ({default})").strip().replace("%", "%%")


def _metavar(field: FieldDescription) -> str:
    choices = f"{{{','.join(map(str, get_args(field.type)))}}}" if get_origin(field.type) is Literal else "LIST"
    return _METAVARS.get(field.type, choices)


def _add_aliases(parser: argparse.ArgumentParser, field: FieldDescription) -> None:
    """Add hidden flags for the other names of a setting, unless another setting has the name itself."""
    endings = ENDINGS if field.is_coefficient else ("",)
    keys = [spelling + ending for spelling in (field.name, *field.aliases) for ending in endings][1:]
    for key in [*keys, *(found.name for found in field.names.conversions)]:
        if f"--{key.replace('_', '-')}" not in parser._option_string_actions:
            _add(parser, key, help=argparse.SUPPRESS, **(_switch(field) or {"metavar": _metavar(field)}))


def _add(group: Any, name: str, help: str, **options: Any) -> argparse.Action:
    """Add a flag with hyphens, and a hidden one with underscores; return the former."""
    options |= {"dest": _PREFIX + name, "default": argparse.SUPPRESS}
    action = group.add_argument(f"--{name.replace('_', '-')}", help=help, **options)
    if "_" in name:
        group.add_argument(f"--{name}", help=argparse.SUPPRESS, **options)
    return action


def _default_text(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or "()"
    if default == {}:
        return "none"
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)
