"""`lehr zoo`: tuned settings, what they reach, and the command that shows it."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lehr
from lehr import algorithms, zoo
from lehr.cli import output
from lehr.envs import HostEnvironment, make
from lehr.errors import InputError, closest, quoted
from lehr.report.loggers.progress import short_number
from lehr.sweeps.directory import SweepDirectory
from lehr.sweeps.statistics import mean_interval
from lehr.sweeps.wave_metrics import last_known, read_wave
from lehr.zoo import Entry
from lehr.zoo.table import number_text, spread_text

FIRST_SEED = 1000
"""By default, entries are trained again with seeds from this one on: no settings were chosen on them."""


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add what to list or to check."""
    parser.usage = "lehr zoo [ALGORITHM] [ENV]\n       lehr zoo check ALGORITHM ENV [--seeds N] [--first-seed SEED]"
    parser.epilog = "Train with the settings of an entry by 'lehr train ALGORITHM --env ENV --tuned'."
    parser.add_argument(
        "words",
        nargs="*",
        metavar="ALGORITHM ENV",
        help="list the entries of these; both show one entry; 'check' before both trains that entry again",
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="check: how many seeds (default: as many as the entry)")
    parser.add_argument(
        "--first-seed", type=int, metavar="SEED", help=f"check: the first of them (default: {FIRST_SEED})"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the list or an entry, or train one again."""
    words = list(arguments.words)
    checks = words[:1] == ["check"]
    algorithm, env = _named(words[checks:])
    if checks:
        if algorithm is None or env is None:
            raise InputError("lehr zoo check trains one entry; name its algorithm and its environment.")
        _check(zoo.find(algorithm, env), arguments.seeds, arguments.first_seed)
        return
    for flag, value in (("--seeds", arguments.seeds), ("--first-seed", arguments.first_seed)):
        if value is not None:
            raise InputError(
                f"{flag} is {value}, but nothing is trained; write 'lehr zoo check ALGORITHM ENV {flag} N'."
            )
    if algorithm is not None and env is not None:
        _show(zoo.find(algorithm, env))
    else:
        _list(zoo.entries(algorithm, env))


def _named(words: Sequence[str]) -> tuple[str | None, str | None]:
    """The algorithm and the environment among at most two words, in any order."""
    known, envs = {one.algorithm for one in zoo.entries()}, {one.env for one in zoo.entries()}
    found = {word: "algorithm" if word in known or word in algorithms.names() else "env" for word in words}
    chosen = {kind: word for word, kind in found.items()}
    if len(chosen) < len(words):
        raise InputError(f"Got {' '.join(map(quoted, words))}; name at most one algorithm and one environment.")
    env = chosen.get("env")
    if env is not None and len(words) == 1 and env not in envs:
        raise InputError(f"The zoo has nothing for {quoted(env)}; {closest(env, [*sorted(known), *sorted(envs)])}")
    return chosen.get("algorithm"), env


HEADER = ("algorithm", "environment", "env steps", "return", "seeds", "published")


def _list(found: Sequence[Entry]) -> None:
    rows = [
        [one.algorithm, one.env, short_number(one.total_steps), reached(one), str(len(one.seeds)), _published(one)]
        for one in found
    ]
    words, optional = ("algorithm", "environment", "published"), ("published", "seeds", "env steps", "return")
    output.print_table(output.console(), HEADER, rows, words, optional)


def reached(entry: Entry) -> str:
    """The mean return of an entry, and its standard deviation over several seeds."""
    return spread_text(list(entry.returns.values())) if entry.returns else "-"


def _published(entry: Entry) -> str:
    return "-" if entry.published is None else str(entry.published)


def protocol(entry: Entry) -> str:
    """How the returns of an entry were measured."""
    episodes = entry.settings["evaluate_episodes"]
    return f"{episodes} episodes with {'the most likely' if entry.metric == 'evaluate/return' else 'sampled'} actions"


def _of_seeds(entry: Entry, count: int) -> str:
    """What a return is the mean of."""
    return f"1 seed, {protocol(entry)}" if count == 1 else f"mean over {count} seeds of {protocol(entry)}"


def _show(entry: Entry) -> None:
    """Print an entry."""
    facts: dict[str, str | list[str]] = {"entry": f"{entry.algorithm} on {entry.env}"}
    facts["env steps"] = f"{entry.total_steps:,}"
    if entry.returns:
        each = ", ".join(f"{number_text(value)} (seed {seed})" for seed, value in entry.returns.items())
        facts["return"] = [f"{reached(entry)}, {_of_seeds(entry, len(entry.seeds))}", each]
    facts |= {"published": _published(entry)} if entry.published else {}
    facts |= {"machine": entry.machine} if entry.machine else {}
    facts |= {"chosen": entry.chosen} if entry.chosen else {}
    facts["settings"] = [f"{name}: {zoo.setting_text(value)}" for name, value in entry.settings.items()]
    facts["train"] = f"lehr train {entry.algorithm} --env {entry.env} --tuned"
    facts |= {"shown by": entry.command} if entry.returns else {}
    output.print_facts(output.console(), facts)


def _check(entry: Entry, count: int | None, first: int | None) -> None:
    """Train an entry again, and print what it reaches."""
    count = len(entry.seeds) if count is None else count
    first = FIRST_SEED if first is None else first
    if count < 1:
        raise InputError(f"--seeds is {count}; it must be 1 or more.")
    found = retrained(entry, range(first, first + count))
    mean, low, _ = mean_interval(found)
    facts = {
        "entry": f"{entry.algorithm} on {entry.env}, {entry.total_steps:,} env steps",
        "return": f"{spread_text(found)}, {_of_seeds(entry, count)}",
        "interval": f"{number_text(low)} to {number_text(2 * mean - low)} (95%, of the mean)" if count > 1 else "-",
        "each": ", ".join(map(number_text, found)),
        "zoo": f"{reached(entry)} with {len(entry.seeds)} {output.plural('seed', len(entry.seeds))}",
    }
    facts |= {"published": _published(entry)} if entry.published else {}
    output.print_facts(output.console(), facts)


def retrained(entry: Entry, seeds: Sequence[int], progress: bool = True) -> np.ndarray:
    """Train an entry with these seeds, in one population if the environment is compiled, and return what each reaches.

    The runs themselves are thrown away.
    """
    env = make(entry.env, **entry.settings.get("env_parameters", {}))
    given: dict[str, Any] = {**entry.settings, "progress": progress, "tensorboard": False}
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(env, HostEnvironment) or len(seeds) == 1:
            runs = [
                lehr.train(entry.algorithm, entry.env, seed=seed, run_dir=Path(folder) / str(seed), **given)
                for seed in seeds
            ]
            return np.array([run.final[entry.metric] for run in runs])
        lehr.train(entry.algorithm, entry.env, seeds=list(seeds), run_dir=Path(folder) / "seeds", **given)
        directory = SweepDirectory(Path(folder) / "seeds")
        found = [
            last_known(read_wave(directory, wave, [entry.metric])[entry.metric])[: len(wave.members)]
            for wave in directory.read_waves()
        ]
        return np.concatenate(found)
