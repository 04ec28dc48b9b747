"""Mapping ↔ YAML file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lehr.errors import InputError, quoted, shortened


def to_yaml(path: str | Path, mapping: Mapping[str, Any]) -> None:
    """Write a mapping, such as that of `to_mapping`, with one key per line."""
    Path(path).write_bytes(checked_yaml(mapping))


def checked_yaml(mapping: Mapping[str, Any]) -> bytes:
    """Return the content of the file that `to_yaml` writes; raise an error if `from_yaml` would refuse its size."""
    content = _dumped(mapping)
    if len(content) > MOST_BYTES:
        sizes = {name: len(_dumped({name: value})) for name, value in mapping.items()}
        largest = max(sizes, key=lambda name: sizes[name])
        raise InputError(
            f"All settings together take {len(content):,} bytes in a file, of which Lehr reads at most "
            f"{MOST_BYTES:,}; {largest} takes {sizes[largest]:,} of them: give fewer values, or a shorter text."
        )
    return content


def _dumped(mapping: Mapping[str, Any]) -> bytes:
    return yaml.dump(dict(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120).encode()


MOST_BYTES = 2**16
"""The largest YAML file that is read."""
_DEEPEST = 50
"""The deepest nesting of lists and mappings in a YAML file."""


def from_yaml(path: str | Path) -> dict[str, Any]:
    """Read a mapping. Numbers such as `1e-4`, which YAML reads as texts, stay texts; `build` converts them.

    A file can come from anybody, so its size and its nesting are limited, and anchors and aliases, with which a few
    lines can stand for gigabytes, are refused.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise InputError(f"The config {path} is larger than 64 KiB; give a YAML file with the settings of a run.")
        found = yaml.load(text, Loader=_Loader)
    except OSError as error:
        raise InputError(f"The config {path} cannot be read: {error.strerror}; give the path of a YAML file.") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = shortened(" ".join(str(error.problem).split()), 200)
        raise InputError(f"The config {path}{line}: {problem}; fix that line.") from None
    except yaml.YAMLError:
        raise InputError(f"The config {path} is not UTF-8 text; save it as UTF-8.") from None
    if not isinstance(found, dict | None):
        raise InputError(f"The config {path} contains a {type(found).__name__}; write lines of 'name: value'.")
    return found or {}


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that refuses aliases, deep nesting, duplicate keys, and values that do not fit their tag."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:  # an alias, or the node that it would stand for
            sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
            raise _error(f"anchors and aliases, such as {sign}{event.anchor}, are not allowed", event.start_mark)
        if self.depth > _DEEPEST:
            raise _error(f"lists and mappings are nested more than {_DEEPEST} deep", event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            found = super().construct_object(node, deep)
            if isinstance(found, int):
                str(found)  # refuses what has too many digits to be printed, in hexadecimal too
            return found
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            kind = node.tag.rpartition(":")[2]
            raise _error(f"{quoted(node.value)} is not a valid value of the type {kind!r}", node.start_mark) from None

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if str(key.value) in seen:
                raise _error(f"the key {quoted(key.value)} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _error(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=mark)


class _Dumper(yaml.SafeDumper):
    """Safe YAML dumper that writes lists on one line, and no aliases, which `from_yaml` refuses."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence(_Dumper.DEFAULT_SEQUENCE_TAG, items, True)
)
