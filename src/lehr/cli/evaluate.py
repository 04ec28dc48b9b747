"""`lehr eval`: evaluate a run's policy over whole episodes."""

import argparse
from collections.abc import Sequence

import numpy as np

import lehr
from lehr.cli import output
from lehr.cli.loading import add_run, load_run
from lehr.errors import InputError
from lehr.report.loggers.progress import short_number


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the run, and which episodes to evaluate."""
    add_run(parser)
    parser.add_argument(
        "--episodes", type=int, default=100, metavar="INTEGER", help="number of episodes (default: 100)"
    )
    parser.add_argument("--sampled", action="store_true", help="sample actions instead of taking the most likely ones")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="INTEGER", help="random seed of the episodes (default: 0)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print statistics of the episodes' returns and lengths."""
    if arguments.episodes < 1:
        raise InputError(f"--episodes is {arguments.episodes}; it must be 1 or more.")
    result = load_run(arguments)
    found = lehr.evaluate(
        result.policy, result.env, arguments.episodes, seed=arguments.seed, greedy=not arguments.sampled
    )
    actions = "sampled" if arguments.sampled else "greedy"
    steps = short_number(result.final.get("env_steps", 0))
    console = output.console()
    words = f"{arguments.episodes} episodes of {result.config['env']}, {actions} actions, after {steps} env steps"
    console.print(output.show(console, f"{words}\n"), soft_wrap=True)
    rows = [["return", *_statistics(found.returns)], ["length", *_statistics(found.lengths)]]
    output.print_table(console, ("", "mean", "std", "min", "median", "max"), rows, words=("",))


def _statistics(values: np.ndarray) -> list[str]:
    """Mean, standard deviation, minimum, median and maximum."""
    found = (np.mean(values), np.std(values), np.min(values), np.median(values), np.max(values))
    return [f"{number:.6g}" for number in found]
