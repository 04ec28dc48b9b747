"""Arguments shared by the commands that load a run, and the loading itself."""

import argparse

import lehr
from lehr import plugins
from lehr.cli import add_trust, find_own_code
from lehr.envs import AnyEnvironment, make
from lehr.envs.registry import full_name
from lehr.errors import InputError, quoted
from lehr.training import settings_file
from lehr.training.api import Result, check_trust
from lehr.training.directory import RunDirectory


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the run, its environment, and `--trust`."""
    parser.add_argument("run_name", metavar="RUN", help="run directory, or its name under runs/")
    parser.add_argument("--env", metavar="NAME", help="environment to use (default: the run's)")
    add_trust(parser)


def load_run(arguments: argparse.Namespace) -> Result:
    """Load the run that the arguments name."""
    if arguments.trust or arguments.env:
        find_own_code()
    return lehr.load(arguments.run_name, arguments.env, trust=arguments.trust)


def load_environment(arguments: argparse.Namespace) -> tuple[AnyEnvironment, str] | None:
    """The environment that `load_run` would load, and its name; `None` if the run cannot name it."""
    if arguments.trust or arguments.env:
        find_own_code()
    directory = RunDirectory.open(arguments.run_name)
    saved = settings_file.read(directory).values
    check_trust(saved, f"The run '{directory.path}'", arguments.trust, arguments.env)
    name = arguments.env or str(saved["env"])
    if plugins.is_placeholder(name):
        return None
    is_own = full_name(name) == saved["env"] or plugins.is_placeholder(saved["env"])
    return make(name, **(saved["env_parameters"] if is_own else {})), name


def add_episodes(parser: argparse.ArgumentParser, default: int) -> None:
    """Add how many episodes, with which actions and which seed."""
    parser.add_argument(
        "--episodes", type=int, default=default, metavar="INTEGER", help=f"number of episodes (default: {default})"
    )
    parser.add_argument("--sampled", action="store_true", help="sample actions instead of taking the most likely ones")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="INTEGER", help="random seed of the episodes (default: 0)"
    )


def check_episodes(arguments: argparse.Namespace) -> None:
    """Refuse less than one episode, and what is no seed."""
    if arguments.episodes < 1:
        raise InputError(f"--episodes is {arguments.episodes}; it must be 1 or more.")
    check_seed(arguments)


def check_seed(arguments: argparse.Namespace) -> None:
    """Refuse a seed of more than 64 bits."""
    if not -(2**63) <= arguments.seed < 2**63:
        raise InputError(f"--seed is {quoted(arguments.seed)}; give a whole number of at most 64 bits.")
