"""`lehr pick`: take members out of a sweep as ordinary runs."""

import argparse
import shlex
from collections.abc import Sequence

from lehr.cli import add_trust, find_own_code
from lehr.cli.output import console, print_facts
from lehr.cli.summary import trust_flag
from lehr.sweeps.pick import pick_members
from lehr.training import settings_file
from lehr.training.api import own_code_in_settings
from lehr.training.directory import RunDirectory


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the sweep, which members, and where to."""
    parser.usage = "lehr pick SWEEP [best | NUMBER | c4 | top3] --out RUN"
    parser.add_argument("sweep", metavar="SWEEP", help="directory of the sweep, or its name under sweeps/")
    parser.add_argument(
        "which",
        metavar="WHICH",
        nargs="?",
        default="best",
        help="best (the default): the best member of the best configuration; a member's number; c4: the best "
        "member of configuration 4; or top3: the best member of each of the best three configurations",
    )
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="the new run directory; with top3, the directory of the new runs"
    )
    add_trust(parser)


def run(arguments: argparse.Namespace) -> None:
    """Write the runs, and print what can be done with them."""
    if arguments.trust:
        find_own_code()
    out = console()
    for picked in pick_members(arguments.sweep, arguments.which, out=arguments.out, trust=arguments.trust):
        run = shlex.quote(str(picked.path))
        trust = trust_flag(own_code_in_settings(settings_file.read(RunDirectory(picked.path)).values))
        commands = f"lehr eval {run}{trust}; lehr resume {run} --total-steps STEPS{trust}"
        print_facts(out, {"run": str(picked.path), "picked": str(picked), "next": commands})
