"""`lehr resume`: go on with a run."""

import argparse
from collections.abc import Sequence

import lehr
from lehr import algorithms, config
from lehr.cli import add_trust, find_own_code
from lehr.cli.summary import print_summary
from lehr.errors import InputError
from lehr.training.api import check_trust
from lehr.training.directory import RunDirectory
from lehr.training.plan import RunConfig


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The run, and a flag for each setting that may change; the network, the environment and the seed may not."""
    parser.usage = "lehr resume RUN [--total-steps STEPS] [--SETTING VALUE ...]"
    parser.add_argument("run_name", metavar="RUN", help="its directory, or its name under runs/")
    add_trust(parser)
    if not words or words[0] in ("-h", "--help"):
        return
    if words[0].startswith("-"):
        raise InputError(f"'lehr resume' is followed by {words[0]!r}; name the run first, for it says what can change.")
    saved = config.from_yaml(RunDirectory.open(words[0]).config)
    algorithm, trusts = str(saved.get("algorithm")), "--trust" in words
    if trusts:
        find_own_code()
    check_trust({"algorithm": algorithm}, f"The run '{words[0]}'", trusts)
    titles = [f"settings of {name}, to change them" for name in ("the run", algorithm)]
    config.add_flags(parser, [RunConfig, algorithms.find(algorithm).Config], titles)


def run(arguments: argparse.Namespace) -> None:
    """Go on to the end of the budget, and say what came of it."""
    settings = config.given_flags(arguments)
    if arguments.trust or "env" in settings:
        find_own_code()
    print_summary(lehr.resume(arguments.run_name, trust=arguments.trust, **settings))
