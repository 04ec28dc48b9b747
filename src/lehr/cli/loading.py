"""Arguments shared by the commands that load a run, and the loading itself."""

import argparse

import lehr
from lehr.cli import add_trust, find_own_code
from lehr.training.api import Result


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the run, its environment, and `--trust`."""
    parser.add_argument("run_name", metavar="RUN", help="run directory, or its name under runs/")
    parser.add_argument("--env", metavar="NAME", help="environment to use (default: the run's)")
    add_trust(parser)


def load_run(arguments: argparse.Namespace) -> Result:
    """Load the run that the arguments name."""
    if arguments.trust or arguments.env:
        find_own_code()
    return lehr.load(arguments.run_name, arguments.env, trust=arguments.trust)
