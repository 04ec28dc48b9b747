"""`lehr list`: algorithms, environments, coefficients, presets and runs."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lehr import algorithms, config, envs
from lehr.algorithms import vocabulary
from lehr.cli import output
from lehr.envs.adapters import adapter
from lehr.errors import InputError, closest, quoted, shortened
from lehr.report.loggers.progress import short_number
from lehr.spaces import Dict, Discrete, MultiDiscrete, Space
from lehr.training import checkpoint
from lehr.training.directory import ROOT, RunDirectory

Rows = list[list[str]]


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add what to list."""
    parser.add_argument("what", nargs="?", metavar="WHAT", help=f"one of: {', '.join(LISTS)}")
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="DIR", help=f"directory with the runs (default: {ROOT})"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print one list, or an overview of the lists."""
    optional: tuple[str, ...] = ()
    if arguments.what is None:
        header: tuple[str, ...] = ("command", "description")
        rows = [[f"lehr list {name}", listing.summary] for name, listing in LISTS.items()]
    elif arguments.what in LISTS:
        _, header, list_rows, optional = LISTS[arguments.what]
        rows = list_rows(arguments)
    else:
        raise InputError(f"There is no list of {arguments.what!r}; {closest(arguments.what, LISTS)}")
    words = [name for name in header if name not in _NUMBERS]
    output.print_table(output.console(), header, rows, words, optional)


def _coefficients(arguments: argparse.Namespace) -> Rows:
    known = vocabulary.coefficients().values()
    return [[entry.name, ", ".join(entry.aliases), entry.range_text, entry.summary] for entry in known]


def _algorithms(arguments: argparse.Namespace) -> Rows:
    return [[name, summary_of(algorithms.find(name))] for name in algorithms.names()]


def summary_of(algorithm: type) -> str:
    """The first line of the file of an algorithm."""
    return (sys.modules[algorithm.__module__].__doc__ or "").partition("\n")[0]


def _presets(arguments: argparse.Namespace) -> Rows:
    return [
        [
            algorithm,
            preset,
            ", ".join(f"{name} {_setting_text(value)}" for name, value in values.items()) or "the defaults",
        ]
        for algorithm in algorithms.names()
        for preset, values in getattr(algorithms.find(algorithm).Config, "PRESETS", {}).items()
    ]


def _setting_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if isinstance(value, str) and " " in value else str(value)


def _environments(arguments: argparse.Namespace) -> Rows:
    rows = []
    for name in envs.names():
        env = envs.make(name)
        limit = str(env.max_steps) if isinstance(env, envs.TimeLimit) else "-"
        rows.append(
            [name, _space_text(env.observation_space), _space_text(env.action_space), str(env.num_agents), limit]
        )
    return rows


def _suites(arguments: argparse.Namespace) -> Rows:
    """The other environment suites, with some names from the installed ones."""
    rows = []
    for prefix, (_, package) in envs.ADAPTERS.items():
        try:
            names = adapter(prefix).names()
            shown = ", ".join(names[:3]) + (f", ... ({len(names)} in total)" if len(names) > 3 else "")
        except InputError as error:
            shown = f"not installed: {str(error).partition(': ')[2]}"
        except Exception as error:  # a suite that its other packages do not fit must not hide the others
            shown = f"broken: {shortened(f'{type(error).__name__}: {error}', 60)}"
        rows.append([f"{prefix}:", package, shown])
    return rows


def _space_text(space: Space) -> str:
    """A short description of a space: its type and shape."""
    match space:
        case Dict():
            return ", ".join(f"{name}: {_space_text(inner)}" for name, inner in space.spaces.items())
        case Discrete():
            return f"Discrete {space.n}" + (f" from {space.start}" if space.start else "")
        case MultiDiscrete():
            return f"MultiDiscrete {list(space.nvec)}"
    return f"Box {list(space.shape)}"


def _runs(arguments: argparse.Namespace) -> Rows:
    try:
        found = sorted(arguments.root.glob("*/status.json"), key=lambda path: path.lstat().st_mtime)
    except OSError as error:  # such as a name that is too long
        raise InputError(f"--root is {quoted(str(arguments.root))}: {error.strerror}; give a directory.") from None
    if not found:
        raise InputError(f"There are no runs in '{arguments.root}'; start one with 'lehr train', or give --root.")
    return [_run_row(RunDirectory(path.parent)) for path in found]


def _run_row(directory: RunDirectory) -> list[str]:
    """A run's row, read from its settings and latest checkpoint; a run that has just started has neither.

    What cannot be read is left out, and the status says so: one damaged run must not hide the others.
    """
    row = {"name": directory.path.name, "status": "damaged", "env": "-", "env steps": "-", "best return": "-"}
    with contextlib.suppress(InputError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        settings = config.from_yaml(directory.config) if directory.config.is_file() else {}
        row["env"] = shortened(str(settings.get("env", "-")))
        meta: dict[str, Any] = {"env_steps": 0, "best": None}
        if steps := checkpoint.steps(directory.checkpoints):
            meta = json.loads((directory.checkpoints / f"{steps[-1]:012d}" / "meta.json").read_text())["meta"]
        row["env steps"] = short_number(meta["env_steps"])
        row["best return"] = "-" if meta["best"] is None else f"{meta['best']:.4g}"
        status = str(directory.read_status()["status"])
        row["status"] = "interrupted" if status == "running" and not directory.is_locked() else shortened(status)
    return list(row.values())


class _List(NamedTuple):
    summary: str
    header: tuple[str, ...]
    rows: Callable[[argparse.Namespace], Rows]
    optional: tuple[str, ...] = ()
    """The columns that a narrow terminal does without, in this order."""


_NUMBERS = ("agents", "time limit", "env steps", "best return")
"""Columns with numbers, which are right-aligned."""

LISTS: dict[str, _List] = {
    "coefficients": _List(
        "coefficients you can schedule, with aliases and ranges",
        ("name", "aliases", "range", "description"),
        _coefficients,
    ),
    "algorithms": _List("training algorithms", ("name", "description"), _algorithms),
    "presets": _List("presets for --preset, with their settings", ("algorithm", "preset", "settings"), _presets),
    "envs": _List(
        "built-in environments",
        ("name", "observations", "actions", "agents", "time limit"),
        _environments,
        optional=("agents",),
    ),
    "suites": _List("other environment suites, by prefix", ("prefix", "package", "environments"), _suites),
    "runs": _List(
        "runs in a directory, newest last",
        ("name", "status", "env", "env steps", "best return"),
        _runs,
        optional=("env", "env steps"),
    ),
}
"""The lists that `lehr list` can print."""
