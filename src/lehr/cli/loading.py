"""The arguments of commands that load a run, and the run they load."""

import argparse

import lehr
from lehr.cli import add_trust, find_own_code
from lehr.training.api import Result


def add_run(parser: argparse.ArgumentParser) -> None:
    """The run, its environment, and whether its code is trusted."""
    parser.add_argument("run_name", metavar="RUN", help="its directory, or its name under runs/")
    parser.add_argument("--env", metavar="NAME", help="environment to use (default: the run's)")
    add_trust(parser)


def load_run(arguments: argparse.Namespace) -> Result:
    """The run that the arguments name."""
    if arguments.trust or arguments.env:
        find_own_code()
    return lehr.load(arguments.run_name, arguments.env, trust=arguments.trust)
