"""`lehr train`: a new run, with settings from flags, a file, or another run."""

import argparse
from collections.abc import Sequence

import lehr
from lehr import algorithms, config
from lehr.cli import Parser, add_trust, find_own_code
from lehr.cli.summary import print_summary
from lehr.errors import InputError
from lehr.networks import NetworkConfig
from lehr.training.api import check_trust
from lehr.training.directory import RunDirectory
from lehr.training.plan import RunConfig


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Where the run comes from and goes to, and a flag for each setting of the algorithm that `words` name."""
    known = ", ".join(algorithms.names())
    algorithm = _algorithm(words)
    if algorithm is None and not {"-h", "--help"} & set(words):
        raise InputError(
            "The algorithm is missing; name it first, as in 'lehr train ppo', or write 'algorithm: ppo' into the file "
            f"of --config; known: {known}"
        )
    parser.usage = f"lehr train {algorithm or 'ALGORITHM'} [--env NAME] [--total-steps STEPS] [--SETTING VALUE ...]"
    parser.epilog = (
        "A SCHEDULE is a number or a text such as '0.03 -> 0.001 cosine': see 'lehr schedule'. The names of other "
        "libraries work too, such as --ent-coef and --gamma, and so do --ent-coef-schedule and "
        "--ent-coef-warmup-steps: see 'lehr list coefficients'."
    )
    parser.add_argument(
        "algorithm",
        nargs="?",
        default=algorithm,
        metavar="ALGORITHM",
        help=f"one of: {known}; left out, it is that of the file or of the run to begin from",
    )
    parser.add_argument("--config", metavar="FILE", help="settings in YAML, of the same names; flags hold above them")
    parser.add_argument(
        "--from", dest="from_run", metavar="RUN", help="begin with the state and the settings of another run"
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="where all about the run is kept (default: runs/ALGORITHM-ENV-sSEED-TIME)",
    )
    add_trust(parser)
    of = ["the run", *([] if algorithm is None else [algorithm]), "the network"]
    config.add_flags(parser, _classes(algorithm), [f"settings of {name}" for name in of])


def run(arguments: argparse.Namespace) -> None:
    """Train, and say what came of it."""
    given = config.from_yaml(arguments.config) if arguments.config else {}
    given.pop("algorithm", None)
    flags = config.given_flags(arguments)
    if arguments.config:
        found = {name: value for name, value in config.merge(given, {}).items() if name not in flags}
        check_trust(found, f"The config '{arguments.config}'", arguments.trust)
    if arguments.trust or "env" in flags:
        find_own_code()
    settings = config.merge(given, flags)
    for name in ("run_dir", "from_run", "progress_fn", "trust"):  # arguments of train, which a key must not become
        if name in settings:
            raise InputError(f"The config {arguments.config} has {name!r}, which is no setting; remove it there.")
    result = lehr.train(
        arguments.algorithm,
        run_dir=arguments.run_dir,
        from_run=arguments.from_run,
        trust=arguments.trust,
        **settings,
    )
    print_summary(result)


def _classes(algorithm: str | None) -> list[type]:
    """The classes of all settings, as `make_plan` reads them."""
    return [RunConfig, *([NetworkConfig] if algorithm is None else algorithms.settings(algorithm))]


def _algorithm(words: Sequence[str]) -> str | None:
    """The algorithm that the first word names, or else the file, or the run to begin from."""
    if words and not words[0].startswith("-"):
        return words[0]
    sources = Parser(prog="lehr train", add_help=False, allow_abbrev=False)
    sources.add_argument("--config")
    sources.add_argument("--from", dest="from_run")
    given, _ = sources.parse_known_args(words)
    found: dict[str, str] = {}
    if given.from_run is not None:
        found |= config.from_yaml(RunDirectory.open(given.from_run).config)
    if given.config is not None:
        found |= config.from_yaml(given.config)
    return str(found["algorithm"]) if "algorithm" in found else None
