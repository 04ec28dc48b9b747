"""`lehr sweep`: train many configurations at once, and report which is best."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from lehr.cli import add_trust
from lehr.cli.output import console, print_facts, print_table
from lehr.errors import InputError
from lehr.sweeps.api import SweepResult, load_sweep, members_of, resume_sweep, sweep
from lehr.sweeps.definition import Definition
from lehr.sweeps.directory import ROOT
from lehr.sweeps.report import write_report
from lehr.sweeps.running import estimate
from lehr.sweeps.samplers import make_sampler

_SHOWN = 10
_MOST_LISTED = 40


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the sweep file, where to save the sweep, and how to run it."""
    parser.usage = (
        "lehr sweep FILE.yaml [--out DIR] [OPTIONS]\n       lehr sweep DIR --resume\n       lehr sweep report DIR"
    )
    parser.epilog = "docs/sweeps.md describes the sweep file."
    parser.add_argument(
        "what", metavar="FILE", help="the sweep file; or the directory of a sweep to resume; or 'report'"
    )
    parser.add_argument("sweep", metavar="DIR", nargs="?", help="after 'report': the directory of the sweep")
    parser.add_argument("--out", metavar="DIR", help=f"where to save the sweep (default: {ROOT}/ALGORITHM-ENV-TIME)")
    parser.add_argument("--resume", action="store_true", help="continue the sweep, from its latest checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="show the members and the memory they need, then stop")
    parser.add_argument(
        "--wave-size", type=int, metavar="N", help="train at most N members at once (default: as many as fit)"
    )
    parser.add_argument(
        "--on", metavar="ray", help="train on the devices of the Ray cluster in RAY_ADDRESS, or of a new local one"
    )
    parser.add_argument("--no-progress", action="store_true", help="do not show progress")
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run, resume, preview or report a sweep."""
    if arguments.what == "report":
        return _report(arguments)
    if arguments.sweep is not None:
        raise InputError(f"Unexpected {arguments.sweep!r}; give one sweep file, or 'report' and a directory.")
    if arguments.dry_run:
        _preview(Definition.read(arguments.what, arguments.trust), arguments.wave_size)
        return 0
    if arguments.on is not None:
        jax.config.update("jax_platforms", "cpu")  # if this machine has a GPU, it is for the workers
    options = {
        "wave_size": arguments.wave_size,
        "on": arguments.on,
        "progress": not arguments.no_progress,
        "trust": arguments.trust,
    }
    if arguments.resume:
        result = resume_sweep(_begun(arguments), **options)
    else:
        if Path(arguments.what).is_dir():
            raise InputError(f"'{arguments.what}' is a directory; to continue the sweep in it, add --resume.")
        result = sweep(arguments.what, out=arguments.out, **options)
    _summarise(result)
    return 0 if result.is_finished else 130


def _begun(arguments: argparse.Namespace) -> Path:
    """The directory of the sweep to resume: given, or the latest one of the same file."""
    if arguments.out is not None:
        return Path(arguments.out)
    given = Path(arguments.what)
    if given.suffix not in (".yaml", ".yml"):
        return given
    wanted = Definition.read(given, arguments.trust).to_mapping()
    for place in sorted(ROOT.glob("*/sweep.yaml"), key=lambda path: path.stat().st_mtime, reverse=True):
        if Definition.read(place, arguments.trust).to_mapping() == wanted:
            return place.parent
    raise InputError(f"'{ROOT}' has no sweep of '{given}' to resume; give its directory, or drop --resume.")


def _report(arguments: argparse.Namespace) -> int:
    """Write the report of a sweep again."""
    if arguments.sweep is None:
        raise InputError("The directory of the sweep is missing; write 'lehr sweep report DIR'.")
    result = load_sweep(arguments.sweep, trust=arguments.trust)
    if not result.results.members.size:
        raise InputError(f"No member of the sweep '{result.directory}' is trained yet; resume the sweep first.")
    write_report(result.results, result.directory / "report.html")
    _summarise(result)
    return 0


def _preview(definition: Definition, wave_size: int | None) -> None:
    """Print the members, and the memory that they need."""
    out = console()
    count = definition.samples if definition.sampler.startswith("optuna:") else None
    configurations = make_sampler(definition).ask(1 if count else 10**9)
    members = members_of(configurations, definition.seeds)
    names = list(definition.space.domains)
    swept = list(definition.parameters)
    rows = [[str(one.number), *(str(one.settings[name]) for name in swept)] for one in configurations[:_MOST_LISTED]]
    print_table(out, ["configuration", *swept], rows, words=swept)
    if len(configurations) > _MOST_LISTED:
        out.print(f"... and {len(configurations) - _MOST_LISTED} more")
    if count:
        out.print(f"The sampler {definition.sampler} chooses the other {count - 1} by the scores of those before.")
    need = estimate(definition.algorithm, members)
    total = (count or len(configurations)) * len(definition.seeds)
    at_once = need.bytes * min(total, wave_size or total)
    print_facts(
        out,
        {
            "members": f"{count or len(configurations)} configurations x {len(definition.seeds)} seeds = {total}",
            "parameters": ", ".join(names),
            "programs": f"{need.groups}, compiled one after the other",
            "memory": f"at least {need.bytes / 2**20:.3g} MiB for each member, {at_once / 2**30:.3g} GiB at once",
            "waves": "as many as memory needs" if wave_size is None else f"of {wave_size} members",
        },
    )


def _summarise(result: SweepResult) -> None:
    """Print what was found."""
    out, results, ranking = console(), result.results, result.ranking
    if not results.members.size:
        out.print("No member was trained to its end; continue with --resume.")
        return
    rows = []
    for place, configuration in enumerate(ranking.order[:_SHOWN], 1):
        found = ranking.estimate(int(configuration))
        fresh = "fresh seeds" if int(configuration) in ranking.fresh else ""
        texts = results.texts[configuration]
        interval = "-" if np.isnan(found.low) else f"{found.low:.4g} to {found.high:.4g}"
        rows.append([str(place), f"{found.value:.4g}", interval, fresh, *texts.values()])
    header = ["place", "score", "95% interval", "judged by", *results.texts[0]]
    print_table(out, header, rows, words=["judged by", *results.texts[0]])
    facts: dict[str, str | list[str]] = {"result": result.summary}
    if result.definition.evolution is not None:
        facts["path"] = [
            f"{name}: {path.schedule} (off by {path.error:.0%})" for name, path in result.winning_paths.items()
        ]
    report = result.directory / "report.html"
    facts["report"] = str(report) if report.exists() else "none; install lehr[sweeps], then run 'lehr sweep report'"
    if result.seconds:
        facts["time"] = f"{result.seconds:.1f} s, of which {result.compile_seconds:.1f} s compiling"
    if result.is_finished:
        facts["next"] = f"lehr pick {result.directory} best --out runs/best"
    else:
        facts["next"] = f"lehr sweep {result.directory} --resume"
    print_facts(out, facts)
