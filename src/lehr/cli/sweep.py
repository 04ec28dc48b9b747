"""`lehr sweep`: train many configurations at once, and report which is best."""

import argparse
import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from lehr.cli import add_trust, find_own_code
from lehr.cli.output import console, plural, print_facts, print_table
from lehr.cli.summary import exit_code_of_members, next_of_sweep
from lehr.errors import InputError, page
from lehr.sweeps.api import SweepResult, check_size, load_sweep, resume_sweep, sweep
from lehr.sweeps.definition import Definition
from lehr.sweeps.directory import ROOT, SweepDirectory
from lehr.sweeps.gathering import text_of
from lehr.sweeps.halving import SuccessiveHalving
from lehr.sweeps.report import write_report
from lehr.sweeps.results import Halved
from lehr.sweeps.running import estimate
from lehr.sweeps.samplers import make_sampler
from lehr.training.cores import use_cores

_SHOWN = 10
_SCORES = "mean returns at the end of training, most likely actions; those judged by fresh seeds come first"
_MOST_LISTED = 40


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the sweep file, where to save the sweep, and how to run it."""
    parser.usage = (
        "lehr sweep FILE.yaml [--out DIR] [OPTIONS]\n"
        "       lehr sweep FILE.yaml --dry-run\n"
        "       lehr sweep DIR --resume\n"
        "       lehr sweep report DIR"
    )
    parser.epilog = f"{page('sweeps.md')} describes the sweep file."
    parser.add_argument(
        "what", metavar="FILE", help="the sweep file; or the directory of a sweep to resume; or the word 'report'"
    )
    parser.add_argument("sweep", metavar="DIR", nargs="?", help="after 'report': the directory of the sweep")
    parser.add_argument("--out", metavar="DIR", help=f"where to save the sweep (default: {ROOT}/ALGORITHM-ENV-TIME)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help=f"continue a sweep: the one in DIR, or the latest one of FILE under {ROOT}/",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be trained and stop")
    parser.add_argument(
        "--wave-size",
        type=int,
        metavar="N",
        help="train at most N runs at once (default: as many as fit into memory)",
    )
    parser.add_argument(
        "--on", metavar="ray", help="train on the devices of the Ray cluster in RAY_ADDRESS, or of a new local one"
    )
    parser.add_argument("--no-progress", action="store_true", help="do not show progress")
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run, resume, preview or report a sweep."""
    if arguments.trust:
        find_own_code()
    if arguments.what == "report":
        return _report(arguments)
    if arguments.sweep is not None:
        raise InputError(f"Unexpected {arguments.sweep!r}; give one sweep file, or 'report' and a directory.")
    if arguments.dry_run:
        check_size(arguments.wave_size)
        _preview(Definition.read(arguments.what, arguments.trust), arguments.wave_size)
        return 0
    if arguments.on is not None:
        jax.config.update("jax_platforms", "cpu")  # if this machine has a GPU, it is for the workers
    else:
        use_cores()
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
    return exit_code_of_members(result)


def _begun(arguments: argparse.Namespace) -> Path:
    """The directory of the sweep to resume: given, or the latest one of the same file."""
    given = Path(arguments.what)
    if given.is_dir() or given.suffix not in (".yaml", ".yml"):
        if arguments.out is not None:
            raise InputError(f"--out is '{arguments.out}', but a resumed sweep stays in '{given}'; drop --out.")
        return given
    wanted = Definition.read(given, arguments.trust).to_mapping()
    if arguments.out is not None:
        directory = SweepDirectory.open(arguments.out)
        if Definition.read(directory.definition, arguments.trust).to_mapping() != wanted:
            raise InputError(
                f"'{given}' is not the definition of the sweep in '{directory.path}', which a resumed sweep keeps; "
                f"write 'lehr sweep {directory.path} --resume', or give another --out."
            )
        return directory.path
    for place in sorted(ROOT.glob("*/sweep.yaml"), key=lambda path: path.stat().st_mtime, reverse=True):
        with contextlib.suppress(InputError):  # another sweep, of code that is not trusted or not there any more
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
    swept, listed = list(definition.parameters), configurations[:_MOST_LISTED]
    rows = [[str(one.number), *(text_of(one.settings[name]) for name in swept)] for one in listed]
    print_table(out, ["configuration", *swept], rows, words=swept)
    if len(configurations) > _MOST_LISTED:
        out.print(f"... and {len(configurations) - _MOST_LISTED} more")
    if count:
        out.print(f"... and {count - 1} more, which {definition.sampler} chooses by the scores of those before")
    need = estimate(definition, configurations, env=None)
    chosen, seeds = count or len(configurations), len(definition.seeds)
    total = chosen * seeds
    at_once = min(total, wave_size or total, (definition.halving and definition.halving.places) or total)
    facts = {"members": f"{chosen} {plural('configuration', chosen)} x {seeds} {plural('seed', seeds)} = {total}"}
    judged = chosen if definition.evolution is None else total  # with evolution, each member stands for itself
    top, fresh = min(definition.confirm.top, judged), definition.confirm.seeds
    if top and fresh:
        facts["then"] = f"the best {top} again, with {fresh} fresh {plural('seed', fresh)}"
    facts |= {
        "programs": f"{need.groups}, compiled one after the other" if need.groups > 1 else "1",
        "memory": f"at least {_size(need.bytes)} for each member, {_size(need.bytes * at_once)} for {at_once} at once",
        "waves": "as many as memory needs" if wave_size is None else f"of at most {wave_size} members",
    }
    if isinstance(need.evolution, SuccessiveHalving):
        facts |= {"waves": f"one for each program, with at most {at_once} places"} | _outlook(need.evolution, total)
    print_facts(out, facts)


def _outlook(halving: SuccessiveHalving, members: int) -> dict[str, str]:
    """Where members are stopped, and how many env steps that saves."""
    steps = halving.program.steps_per_update
    expected = halving.course(members, members).expected_updates(members) / (members * halving.last)
    rungs = ", ".join(f"{rung * steps:,}" for rung in halving.rungs)
    return {
        "rungs": f"at {rungs} of {halving.last * steps:,} env steps; one of {halving.factor} goes on at each",
        "saves": f"at most {1 - expected:.0%} of {members * halving.last * steps:,} env steps",
    }


def _halved(halved: Halved, total_steps: int) -> str:
    """How many members were stopped early, and what that saved."""
    members, trained = int(np.isfinite(halved.env_steps).sum()), float(np.nansum(halved.env_steps))
    share = trained / (members * total_steps)
    return f"{int(halved.stopped.sum())} of {members} members stopped early; {share:.0%} of all env steps trained"


def _size(count: int) -> str:
    """A number of bytes, for people."""
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"


def _summarise(result: SweepResult) -> None:
    """Print what was found."""
    out, results, ranking = console(), result.results, result.ranking
    if not results.members.size:
        print_facts(
            out,
            {
                "result": "none yet: no member is trained to its end",
                "next": next_of_sweep(result),
            },
        )
        return
    rows = []
    for place, configuration in enumerate(ranking.order[:_SHOWN], 1):
        found = ranking.estimate(int(configuration))
        first = "first seeds" if ranking.fresh else ""
        fresh = "fresh seeds" if int(configuration) in ranking.fresh else first
        texts = results.texts[configuration]
        score = "-" if np.isnan(found.value) else f"{found.value:.4g}"
        interval = "-" if np.isnan(found.low) else f"{found.low:.4g} to {found.high:.4g}"
        far = [] if results.halved is None else [f"{np.nanmax(results.halved.env_steps[configuration]):,.0f}"]
        rows.append([str(place), str(configuration), score, interval, *far, fresh, *texts.values()])
    steps = [] if results.halved is None else ["env steps"]
    header = ["place", "configuration", "score", "95% interval", *steps, "judged by", *results.texts[0]]
    print_table(out, header, rows, words=["judged by", *results.texts[0]])
    facts: dict[str, str | list[str]] = {"scores": _SCORES, "result": result.summary}
    if result.definition.evolution is not None:
        facts["path"] = [
            f"{name}: {path.schedule} (off by {path.error:.0%})" for name, path in result.winning_paths.items()
        ]
    if results.halved is not None:
        facts["halving"] = _halved(results.halved, result.definition.space.total_steps)
    report = result.directory / "report.html"
    later = f"none; pip install 'lehr[sweeps]', then run: lehr sweep report {shlex.quote(str(result.directory))}"
    facts["report"] = str(report) if report.exists() else later
    if result.seconds:
        facts["time"] = f"{result.seconds:.1f} s, of which {result.compile_seconds:.1f} s compiling"
    if np.isnan(ranking.worst):
        facts["next"] = "all members diverged: sweep lower learning rates, or see the members' metrics for why"
    else:
        facts["next"] = next_of_sweep(result)
    print_facts(out, facts)
