"""`lehr resume`: resume or extend a run."""

import argparse
from collections.abc import Sequence
from typing import Any

import lehr
from lehr import config, plugins
from lehr.cli import add_distributed, add_trust, find_own_code, run_elsewhere
from lehr.cli.summary import exit_code, print_summary
from lehr.cli.train import FIRST
from lehr.errors import InputError
from lehr.training import settings_file
from lehr.training.api import check_trust
from lehr.training.directory import RunDirectory
from lehr.training.plan import RunConfig, settings_classes


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the run, and a flag for each setting of the run and the algorithm; the network's settings cannot change."""
    parser.usage = "lehr resume RUN [--total-steps STEPS] [--SETTING VALUE ...]"
    parser.add_argument("run_name", metavar="RUN", help="run directory, or its name under runs/")
    parser.epilog = "Run 'lehr resume RUN --help' for the settings that you can change."
    add_distributed(parser, words)
    add_trust(parser)
    if not words or words[0] in ("-h", "--help"):
        return
    if words[0].startswith("-"):
        raise InputError(
            f"'lehr resume' got {words[0]!r} before the run; name the run first: the options depend on it."
        )
    saved = settings_file.read(RunDirectory.open(words[0])).values
    algorithm, trusts = str(saved["algorithm"]), "--trust" in words
    if trusts:
        find_own_code()
    chosen: dict[str, Any] = {name: saved[name] for name in ("algorithm", "reward_model") if name in saved}
    check_trust(chosen, f"The run '{words[0]}'", trusts)
    parser.epilog = None
    titles = [f"{name} settings" for name in ("run", algorithm, "reward")]
    run_settings, own, _, reward = settings_classes(algorithm, saved)
    config.add_flags(parser, [run_settings, own, reward], titles, FIRST)


def run(arguments: argparse.Namespace) -> int:
    """Train to the end of the budget, and print a summary; the exit code is as in `lehr train`."""
    if (code := run_elsewhere("resume", arguments)) is not None:
        return code
    settings = config.merge([RunConfig], {}, config.given_flags(arguments))
    if arguments.trust or "env" in settings or any(map(plugins.own_code, settings.values())):
        find_own_code()
    result = lehr.resume(arguments.run_name, trust=arguments.trust, distributed=arguments.distributed, **settings)
    print_summary(result)
    return exit_code(result)
