"""`lehr export`: write a run's policy to a file, to act with it where Lehr is not installed."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import lehr
from lehr.acting.export import FORMATS, suffix_of
from lehr.cli import output
from lehr.cli.loading import add_run, load_run


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the run, the format and the file."""
    add_run(parser)
    parser.add_argument(
        "--to",
        metavar=f"{{{','.join(FORMATS)}}}",
        default="numpy",
        help="format (default: numpy, with a module that needs NumPy only)",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="output file (default: policy.npz and so on, in the run directory)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the files, and print which and how large they are."""
    suffix = suffix_of(arguments.to)  # before the run is loaded, which takes seconds
    result = load_run(arguments)
    path = lehr.export(result.policy, arguments.to, arguments.out or result.run_dir / f"policy{suffix}")
    console = output.console()
    console.print(output.show(console, f"Saved the policy to {_sized(path)}."), soft_wrap=True)
    if arguments.to == "numpy":
        words = f"Run it with {_sized(path.with_suffix('.py'))}, which needs NumPy only."
        console.print(output.show(console, words), soft_wrap=True)


def _sized(path: Path) -> str:
    return f"{path} ({path.stat().st_size / 1000:.1f} kB)"
