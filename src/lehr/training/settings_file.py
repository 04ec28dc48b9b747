"""A run's settings: `config.yaml`, compared with those that its latest checkpoint was saved with.

A cut or edited file would otherwise change the run without a word, since a missing setting means its default.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lehr import config
from lehr.errors import InputError, shortened
from lehr.files import sync, sync_directory
from lehr.training import checkpoint
from lehr.training.directory import RunDirectory

_MOST_NAMED = 5


class SavedSettings(NamedTuple):
    """The settings of a run, including its `algorithm`."""

    path: Path
    """The file."""
    values: dict[str, Any]
    """As the latest checkpoint has them; as the file has them if the checkpoint is of an older version."""
    differences: dict[str, str]
    """What is wrong in the file, by setting."""

    def check(self, given: Collection[str] = ()) -> None:
        """Refuse settings that are missing or changed in the file, except the given ones, which do not come from it."""
        wrong = [text for name, text in self.differences.items() if name not in given]
        if wrong:
            more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
            raise InputError(
                f"'{self.path}' does not have the settings of the run: {', '.join(wrong[:_MOST_NAMED])}{more}. Delete "
                "the file to go on with the settings of the latest checkpoint; to change a setting, pass it to resume."
            )


def read(directory: RunDirectory) -> SavedSettings:
    """Read the settings of a run from its file, or, if that is missing, from its latest checkpoint."""
    meta = checkpoint.latest_meta(directory.checkpoints)
    known, before = (meta.get(name) for name in ("settings", "settings_before"))
    if not directory.config.exists():
        if not isinstance(known, dict):
            raise InputError(
                f"The run '{directory.path}' ended before its first checkpoint; start it again in the same directory."
            )
        return SavedSettings(directory.config, known, {})
    found = config.from_yaml(directory.config)
    changes = isinstance(before, dict) and _texts(before) == _texts(found)  # a process was killed while it changed them
    if isinstance(known, dict) and not changes and (differences := _differences(known, found)):
        return SavedSettings(directory.config, known, differences)
    if "algorithm" not in found:
        raise InputError(f"'{directory.config}' has no 'algorithm'; restore the file from a copy.")
    return SavedSettings(directory.config, found, {})


def to_json(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as they are stored in a checkpoint."""
    return {name: json.loads(text) for name, text in _texts(mapping).items()}


def write(directory: RunDirectory, mapping: Mapping[str, Any]) -> None:
    """Write the file atomically: a killed process leaves either the old settings or the new ones.

    In between, the checkpoints allow both.
    """
    wanted = to_json(mapping)
    if directory.config.exists():
        before = read(directory)
        change = {"settings": wanted} | ({} if before.differences else {"settings_before": to_json(before.values)})
        checkpoint.amend(directory.checkpoints, lambda meta: meta if meta.get("settings") == wanted else meta | change)
    temporary = directory.config.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)  # it may be a link
    config.to_yaml(temporary, mapping)
    with temporary.open("r+b") as file:
        sync(file)
    temporary.replace(directory.config)
    sync_directory(directory.path)
    checkpoint.amend(
        directory.checkpoints, lambda meta: {name: meta[name] for name in meta if name != "settings_before"}
    )


def _texts(mapping: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): json.dumps(value, default=str) for name, value in mapping.items()}


def _differences(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    here, there = _texts(found), _texts(known)
    differences = {}
    for name in [*there, *(name for name in here if name not in there)]:
        if name not in here:
            differences[name] = f"{name} is missing (it was {_value(known[name])})"
        elif name not in there:
            differences[shortened(name)] = f"{shortened(name)} was not one of them"
        elif here[name] != there[name]:
            differences[name] = f"{name} is {_value(found[name])} (it was {_value(known[name])})"
    return differences


def _value(value: Any) -> str:
    return shortened(json.dumps(value, default=str))
