"""`lehr eval`: evaluate a run's policy over whole episodes."""

import argparse
from collections.abc import Sequence

import numpy as np

import lehr
from lehr.acting.evaluation import without_noise
from lehr.cli import output
from lehr.cli.loading import add_episodes, add_run, check_episodes, load_run
from lehr.report.loggers.progress import short_number


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the run, and which episodes to evaluate."""
    add_run(parser)
    add_episodes(parser, default=100)


def run(arguments: argparse.Namespace) -> None:
    """Print statistics of the episodes' returns and lengths."""
    check_episodes(arguments)
    result = load_run(arguments)
    found = lehr.evaluate(
        result.policy, result.env, arguments.episodes, seed=arguments.seed, greedy=not arguments.sampled
    )
    actions = "sampled" if arguments.sampled else "greedy"
    steps = short_number(result.env_steps)
    console = output.console()
    words = f"{arguments.episodes} episodes of {result.config['env']}, {actions} actions, after {steps} env steps"
    console.print(output.show(console, f"{words}\n"), soft_wrap=True)
    rows = [["return", *_statistics(found.returns)], ["length", *_statistics(found.lengths)]]
    output.print_table(console, ("", "mean", "std", "min", "median", "max"), rows, words=("",))


def _statistics(values: np.ndarray) -> list[str]:
    """Mean, standard deviation, minimum, median and maximum."""
    mean, std = without_noise(float(np.mean(values)), float(np.std(values)))
    found = (mean, std, np.min(values), np.median(values), np.max(values))
    return [f"{number:.6g}" for number in found]
