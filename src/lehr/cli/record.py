"""`lehr record`: record episodes of a run's policy as demonstrations for imitation."""

import argparse
from collections.abc import Sequence

import lehr
from lehr.cli import output
from lehr.cli.loading import add_run, load_run
from lehr.errors import InputError


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the run, which episodes to record, and where to save them."""
    add_run(parser)
    parser.add_argument("--episodes", type=int, default=10, metavar="INTEGER", help="number of episodes (default: 10)")
    parser.add_argument("--out", metavar="FILE", help="output file (default: demos.npz in the run directory)")
    parser.add_argument("--sampled", action="store_true", help="sample actions instead of taking the most likely ones")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="INTEGER", help="random seed of the episodes (default: 0)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Record the episodes, and print what they are."""
    if arguments.episodes < 1:
        raise InputError(f"--episodes is {arguments.episodes}; it must be 1 or more.")
    result = load_run(arguments)
    path = arguments.out or result.run_dir / "demos.npz"
    greedy = not arguments.sampled
    found = lehr.record(result.policy, result.env, arguments.episodes, seed=arguments.seed, greedy=greedy, out=path)
    console = output.console()
    console.print(output.show(console, f"Saved {found.summary}, to {path}."), soft_wrap=True)
