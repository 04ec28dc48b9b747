"""`lehr plot`: plot the learning curves of runs."""

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from lehr.algorithms.vocabulary import coefficient
from lehr.cli import output
from lehr.errors import InputError
from lehr.report.curves import MOST_COEFFICIENTS, Columns, learning_curve
from lehr.report.loggers.jsonl import read
from lehr.training.directory import RunDirectory


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the runs, and what to plot."""
    parser.add_argument("run_names", nargs="+", metavar="RUN", help="run directory, or its name under runs/")
    parser.add_argument(
        "--out", default="curve.png", metavar="FILE", help="output file, .png or .svg (default: curve.png)"
    )
    parser.add_argument(
        "--coefficients",
        metavar="LIST",
        help="coefficients to plot below the return, such as entropy_coef,learning_rate (default: those that change "
        f"or differ between runs, at most {MOST_COEFFICIENTS})",
    )


def run(arguments: argparse.Namespace) -> None:
    """Save the figure."""
    found = [RunDirectory.open(name) for name in dict.fromkeys(arguments.run_names)]
    for directory in found:
        if not directory.metrics.is_file():
            raise InputError(f"The run '{directory.path}' has no metrics yet; plot it after its first update.")
    runs = {_label(one.path, found): read(one.metrics) for one in found}
    names = None
    if arguments.coefficients is not None:
        names = [_coefficient(name.strip().replace("-", "_"), runs) for name in arguments.coefficients.split(",")]
    learning_curve(runs, arguments.out, names)
    console = output.console()
    console.print(output.show(console, f"Saved the figure to {arguments.out}."), soft_wrap=True)


def _coefficient(name: str, runs: Mapping[str, Columns]) -> str:
    """The name under which the runs log a coefficient, which may be one of the user's own algorithm."""
    if not any(f"coef/{name}" in columns for columns in runs.values()):
        with contextlib.suppress(InputError):  # `learning_curve` says which coefficients there are
            return coefficient(name).name
    return name


def _label(path: Path, among: Sequence[RunDirectory]) -> str:
    """The name of a run, or its full path if another run has the same name."""
    alone = sum(other.path.name == path.name for other in among) == 1
    return path.name if alone else str(path)
