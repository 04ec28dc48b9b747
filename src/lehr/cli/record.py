"""`lehr record`: record episodes of a run's policy as demonstrations for imitation."""

import argparse
from collections.abc import Sequence

import lehr
from lehr.cli import output
from lehr.cli.loading import add_episodes, add_run, check_episodes, load_run


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the run, which episodes to record, and where to save them."""
    add_run(parser)
    add_episodes(parser, default=10)
    parser.add_argument("--out", metavar="FILE", help="output file (default: demos.npz in the run directory)")


def run(arguments: argparse.Namespace) -> None:
    """Record the episodes, and print what they are."""
    check_episodes(arguments)
    result = load_run(arguments)
    path = arguments.out or result.run_dir / "demos.npz"
    greedy = not arguments.sampled
    found = lehr.record(result.policy, result.env, arguments.episodes, seed=arguments.seed, greedy=greedy, out=path)
    console = output.console()
    console.print(output.show(console, f"Saved {found.summary}, to {path}."), soft_wrap=True)
