"""`lehr check-env`: does an environment keep to the protocol?"""

import argparse
from collections.abc import Sequence

from lehr.cli import find_own_code, output
from lehr.envs import check_env, make


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The environment."""
    parser.add_argument("env", metavar="ENV", help="its name, or 'module:Class' of one of your own")


def run(arguments: argparse.Namespace) -> int:
    """Print what is wrong, and exit with 1 if anything is."""
    find_own_code()
    problems = check_env(make(arguments.env))
    verdict = "does not keep to the protocol:" if problems else "keeps to the protocol."
    console = output.console()
    for line in [f"{arguments.env} {verdict}", *(f"- {problem}" for problem in problems)]:
        console.print(output.show(console, line), soft_wrap=True)
    return 1 if problems else 0
