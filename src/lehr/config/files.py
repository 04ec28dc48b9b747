"""Mapping ↔ YAML file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lehr.errors import InputError


def to_yaml(path: str | Path, mapping: Mapping[str, Any]) -> None:
    """Write a mapping, such as that of `to_mapping`, with one key per line."""
    text = yaml.dump(dict(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    Path(path).write_text(text, encoding="utf-8")


def from_yaml(path: str | Path) -> dict[str, Any]:
    """Read a mapping. Numbers such as `1e-4`, which YAML reads as texts, stay texts; `build` converts them."""
    try:
        found = yaml.load(Path(path).read_bytes(), Loader=_Loader)
    except OSError as error:
        raise InputError(f"The config {path} cannot be read: {error.strerror}; give the path of a YAML file.") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"The config {path}{line}: {error.problem}; fix that line.") from None
    except yaml.YAMLError:
        raise InputError(f"The config {path} is not UTF-8 text; save it as UTF-8.") from None
    if not isinstance(found, dict | None):
        raise InputError(f"The config {path} contains a {type(found).__name__}; write lines of 'name: value'.")
    return found or {}


class _Loader(yaml.SafeLoader):
    """Safe YAML loader in which a duplicate key is an error, instead of silently overriding the first."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Safe YAML dumper that writes lists on one line."""


_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence(_Dumper.DEFAULT_SEQUENCE_TAG, items, True)
)
