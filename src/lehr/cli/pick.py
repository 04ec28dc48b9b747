"""`lehr pick`: take members out of a sweep as ordinary runs."""

import argparse
from collections.abc import Sequence

from lehr.cli import add_trust
from lehr.cli.output import console, print_facts
from lehr.sweeps.pick import pick


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the sweep, which members, and where to."""
    parser.usage = "lehr pick SWEEP [best | NUMBER | top3] --out RUN"
    parser.add_argument("sweep", metavar="SWEEP", help="directory of the sweep, or its name under sweeps/")
    parser.add_argument(
        "which",
        metavar="WHICH",
        nargs="?",
        default="best",
        help="best (the default), the number of a member, or top3 for the best members of three configurations",
    )
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="the new run directory; with top3, the one they are created in"
    )
    add_trust(parser)


def run(arguments: argparse.Namespace) -> None:
    """Write the runs, and print what can be done with them."""
    out = console()
    for path in pick(arguments.sweep, arguments.which, out=arguments.out, trust=arguments.trust):
        print_facts(out, {"run": str(path), "next": f"lehr eval {path}; lehr resume {path} --total-steps STEPS"})
