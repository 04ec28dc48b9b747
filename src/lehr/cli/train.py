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
from lehr.training.plan import RunConfig, settings_classes


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Where the run comes from and goes to, and a flag for each setting of the algorithm that `words` name."""
    known = ", ".join(algorithms.names())
    algorithm, reward_model = _named(words)
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
    if algorithm is None:
        config.add_flags(parser, [RunConfig, NetworkConfig], ["settings of the run", "settings of the network"])
        return
    classes = settings_classes(algorithm, reward_model)
    titles = [f"settings of {name}" for name in ("the run", algorithm, "the network", "the reward model")]
    config.add_flags(parser, classes, titles)


def run(arguments: argparse.Namespace) -> None:
    """Train, and say what came of it."""
    given = config.from_yaml(arguments.config) if arguments.config else {}
    given.pop("algorithm", None)
    flags = config.given_flags(arguments)
    classes = settings_classes(arguments.algorithm, flags.get("reward_model", given.get("reward_model", "environment")))
    if arguments.config:
        found = {name: value for name, value in config.merge(classes, given, {}).items() if name not in flags}
        check_trust(found, f"The config '{arguments.config}'", arguments.trust)
    if arguments.trust or "env" in flags:
        find_own_code()
    settings = config.merge(classes, given, flags)
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


def _named(words: Sequence[str]) -> tuple[str | None, str]:
    """The algorithm and the reward model that the words name, or else the file, or the run to begin from.

    To know their flags they are imported: those that a file names only if they are Lehr's, or trusted.
    """
    sources = Parser(prog="lehr train", add_help=False, allow_abbrev=False)
    for option in ("--config", "--from", "--reward-model"):
        sources.add_argument(option)
    sources.add_argument("--trust", action="store_true")
    given, _ = sources.parse_known_args(words)
    typed: dict[str, str] = {} if given.reward_model is None else {"reward_model": given.reward_model}
    if words and not words[0].startswith("-"):
        typed["algorithm"] = words[0]
    if typed or given.trust:
        find_own_code()
    found: dict[str, str] = {}
    origin = getattr(given, "from")
    if origin is not None:
        found |= config.from_yaml(RunDirectory.open(origin).config)
    if given.config is not None:
        found |= config.from_yaml(given.config)
    named: dict[str, str] = {name: str(found[name]) for name in ("algorithm", "reward_model") if name in found}
    check_trust({n: v for n, v in named.items() if n not in typed}, f"'{given.config or origin}'", given.trust)
    named |= typed
    return named.get("algorithm"), named.get("reward_model", "environment")
