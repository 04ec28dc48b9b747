"""Mapping ↔ YAML file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lehr.errors import InputError


def to_yaml(path: str | Path, mapping: Mapping[str, Any]) -> None:
    """Write a mapping, such as `to_mapping` makes, one key a line."""
    text = yaml.dump(dict(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    Path(path).write_text(text, encoding="utf-8")


def from_yaml(path: str | Path) -> dict[str, Any]:
    """Read a mapping. Numbers such as `1e-4`, which YAML takes for texts, stay texts: `build` reads them."""
    try:
        found = yaml.load(Path(path).read_bytes(), Loader=_Loader)
    except OSError as error:
        raise InputError(f"The config {path} cannot be read: {error.strerror}; give the path of a YAML file.") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"The config {path}{line}: {error.problem}; correct it there.") from None
    except yaml.YAMLError:
        raise InputError(f"The config {path} is no text in UTF-8; save it as one.") from None
    if not isinstance(found, dict | None):
        raise InputError(f"The config {path} holds a {type(found).__name__}; write lines of 'name: value'.")
    return found or {}


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, where a key that stands twice is an error instead of a silent loss."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} stands there for the second time", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Lists on one line."""


_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence(_Dumper.DEFAULT_SEQUENCE_TAG, items, True)
)
