"""`lehr train`: start a run, with settings from flags, a config file, or another run."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import lehr
from lehr import algorithms, config, plugins, zoo
from lehr.cli import Parser, add_distributed, add_trust, find_own_code, run_elsewhere
from lehr.cli.summary import exit_code, exit_code_of_members, print_summary, summarise_seeds
from lehr.errors import InputError
from lehr.networks import NetworkConfig
from lehr.training import settings_file
from lehr.training.api import check_trust
from lehr.training.cores import use_cores
from lehr.training.directory import RunDirectory
from lehr.training.plan import RunConfig, settings_classes

_OTHER_NAMES = [f"--{name}" for name in ("env_id", "env-id", "env_name", "env-name")]
"""What other libraries call `--env`."""

FIRST = (
    *("env", "env_parameters", "total_steps", "seed"),
    *("num_envs", "horizon", "learning_rate", "discount", "gae_lambda", "entropy_coef", "value_coef"),
    *("clip_range", "epochs", "minibatches", "max_grad_norm"),
)
"""The settings that the help lists first, since most users change these."""


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the algorithm, where its settings come from, and a flag for each setting of the algorithm in `words`."""
    known = ", ".join(algorithms.names())
    algorithm, chosen = _named(words)
    if algorithm is None and not {"-h", "--help"} & set(words):
        raise InputError(
            "The algorithm is missing; name it first, as in 'lehr train ppo', or set 'algorithm: ppo' in the --config "
            f"file; known: {known}"
        )
    start = "lehr train"
    more = " " * len(f"usage: {start} ") + "[--SETTING VALUE ...]"
    parser.usage = f"{start} {algorithm or 'ALGORITHM'} [--env NAME] [--total-steps STEPS]\n{more}"
    parser.epilog = (
        "A SCHEDULE is a number or a text such as '0.03 -> 0.001 cosine'; preview it with 'lehr schedule'. Names from "
        "other libraries work too, such as --ent-coef and --gamma ('lehr list coefficients' shows them all), and so do "
        "--ent-coef-schedule and --ent-coef-warmup-steps."
    )
    parser.add_argument(
        "algorithm",
        nargs="?",
        default=algorithm,
        metavar="ALGORITHM",
        help=f"one of: {known} (default: the algorithm of --config or --from)",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings; flags override it")
    parser.add_argument(
        "--tuned",
        action="store_true",
        help="use the zoo's settings for this algorithm and environment; --config and flags override them "
        "('lehr zoo' lists what there is)",
    )
    parser.add_argument(
        "--from", dest="from_run", metavar="RUN", help="start from the state and settings of another run"
    )
    parser.add_argument(
        "--run-dir", metavar="DIR", help="where to save the run (default: runs/ALGORITHM-ENV-sSEED-TIME)"
    )
    parser.add_argument(
        "--seeds",
        metavar="LIST",
        help="train several seeds at once, as a sweep of seeds alone: how many, or which, such as 3,7,11; compiled "
        "environments only",
    )
    add_trust(parser)
    titles = [f"{name} settings" for name in ("run", *([] if algorithm is None else [algorithm]), "network", "reward")]
    classes = [RunConfig, NetworkConfig] if algorithm is None else settings_classes(algorithm, chosen)
    config.add_flags(parser, classes, titles[: len(classes)], FIRST)
    add_distributed(parser.add_argument_group("several machines"), words)


def run(arguments: argparse.Namespace) -> int:
    """Train, and print a summary; the exit code says whether a signal stopped the run."""
    if (code := run_elsewhere("train", arguments)) is not None:
        return code
    given = config.from_yaml(arguments.config) if arguments.config else {}
    given.pop("algorithm", None)
    flags = config.given_flags(arguments)
    tuned = _tuned_settings(arguments.algorithm, {**given, **flags}) if arguments.tuned else {}
    classes = settings_classes(arguments.algorithm, tuned | given | flags)
    flags = config.merge(classes, {}, flags)
    if arguments.config:
        found = {name: value for name, value in config.merge(classes, given, {}).items() if name not in flags}
        check_trust(found, f"The config '{arguments.config}'", arguments.trust)
    if arguments.trust or "env" in flags or any(map(plugins.own_code, flags.values())):
        find_own_code()
    settings = config.merge(classes, given, flags)
    no_settings = ("run_dir", "from_run", "progress_fn", "trust", "distributed", "seeds", "tuned")  # arguments of train
    for name in no_settings:
        if name in settings:
            raise InputError(f"The config {arguments.config} has {name!r}, which is not a setting; remove it.")
    options: dict[str, Any] = {"run_dir": arguments.run_dir, "from_run": arguments.from_run, "trust": arguments.trust}
    options |= {"tuned": arguments.tuned, "distributed": arguments.distributed}
    if arguments.seeds is not None:
        use_cores()
        trained = lehr.train(arguments.algorithm, seeds=_seeds(arguments.seeds), **options, **settings)
        summarise_seeds(trained)
        return exit_code_of_members(trained)
    result = lehr.train(arguments.algorithm, **options, **settings)
    print_summary(result)
    return exit_code(result)


def _tuned_settings(algorithm: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The zoo's settings for an algorithm and the environment among the settings."""
    env = config.merge([RunConfig], {}, {config.underscored(name): value for name, value in given.items()}).get("env")
    return zoo.find(algorithms.name_of(algorithm), RunConfig.env if env is None else str(env)).settings


def _seeds(text: str) -> int | list[int]:
    """A number of seeds, or a list of them, from a flag."""
    try:
        listed = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--seeds is {text!r}; give a whole number, or several such as 3,7,11.") from None
    return listed if "," in text else listed[0]


def _named(words: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """The algorithm, and the settings that choose others: from the words, or else the config file or the original run.

    What they name is imported, since its settings are flags: what a file names only if it is Lehr's, or trusted.
    """
    files = Parser(prog="lehr train", add_help=False, allow_abbrev=False)
    for option in ("--config", "--from"):
        files.add_argument(option)
    for option in ("--trust", "--tuned"):
        files.add_argument(option, action="store_true")
    files.add_argument("--env", *_OTHER_NAMES)
    given, _ = files.parse_known_args(words)
    found: dict[str, Any] = {}
    origin = getattr(given, "from")
    if origin is not None:
        found |= settings_file.read(RunDirectory.open(origin)).values
    if given.config is not None:
        found |= config.from_yaml(given.config)
        if any(isinstance(found.get(key), Mapping) for key in ("settings", "parameters")):
            raise InputError(
                f"'{given.config}' is a sweep file, not the settings of one run: run 'lehr sweep {given.config}'."
            )
    where = f"'{given.config or origin}'"
    typed = {"algorithm": words[0]} if words and not words[0].startswith("-") else {}
    algorithm = _chosen(("algorithm",), typed, found, where, given.trust).get("algorithm")
    if given.tuned and algorithm is not None and not {"-h", "--help"} & set(words):
        env = {} if given.env is None else {"env": given.env}
        found = _tuned_settings(algorithm, found | env) | found
    deciding = ("reward_model", *(() if algorithm is None else algorithms.find(algorithm).decided_by))
    options = Parser(prog="lehr train", add_help=False, allow_abbrev=False)
    for name in deciding:
        options.add_argument(f"--{name.replace('_', '-')}", f"--{name}", dest=name, default=argparse.SUPPRESS)
    return algorithm, _chosen(deciding, vars(options.parse_known_args(words)[0]), found, where, given.trust)


def _chosen(
    names: Sequence[str], typed: dict[str, str], found: dict[str, str], where: str, trust: bool
) -> dict[str, str]:
    """The settings of these names that were typed, or else found in a file; the latter only if trusted."""
    if trust or any(map(plugins.own_code, typed.values())):
        find_own_code()
    named = {name: str(found[name]) for name in names if name in found and name not in typed}
    check_trust(named, where, trust)
    return named | typed
