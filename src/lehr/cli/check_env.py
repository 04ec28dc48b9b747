"""`lehr check-env`: check that an environment implements Lehr's interface."""

import argparse
from collections.abc import Sequence

from lehr.cli import find_own_code, output
from lehr.envs import check_env, make


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the environment's name."""
    parser.add_argument("env", metavar="ENV", help="name of the environment, or 'module:Class' for your own")


def run(arguments: argparse.Namespace) -> int:
    """Print the problems found, and exit with 1 if there are any."""
    find_own_code()
    problems = check_env(make(arguments.env))
    verdict = "failed the environment check:" if problems else "passed the environment check."
    console = output.console()
    for line in [f"{arguments.env} {verdict}", *(f"- {problem}" for problem in problems)]:
        console.print(output.show(console, line), soft_wrap=True)
    return 1 if problems else 0
