"""The command line. A mistake in the input is one line and exit code 2; a failure at run time is exit code 1.

Each command is a file here, imported when it is called, with two functions: `add_arguments(parser, words)`, where
`words` are those after the command's name, and `run(arguments)`, which may return an exit code.
"""

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import lehr
from lehr.config import refuse_unknown
from lehr.errors import InputError, closest

_INTERRUPTED = 130
"""The exit code of a process that Ctrl-C ended, by the shell's convention."""


class Command(NamedTuple):
    """A subcommand: one line of help, and the module that adds its arguments and runs it."""

    summary: str
    module: str


COMMANDS: dict[str, Command] = {
    "train": Command("train an agent", "lehr.cli.train"),
    "resume": Command("go on with a run that was stopped, or extend one", "lehr.cli.resume"),
    "eval": Command("see what the policy of a run is worth", "lehr.cli.evaluate"),
    "plot": Command("draw the learning curves of runs", "lehr.cli.plot"),
    "play": Command("film one episode of a run's policy", "lehr.cli.play"),
    "schedule": Command("show schedules: phases, values and curves", "lehr.cli.schedule"),
    "list": Command("list what there is", "lehr.cli.lists"),
    "check-env": Command("test an environment against the protocol", "lehr.cli.check_env"),
    "doctor": Command("tell what this installation has, and whether it works", "lehr.cli.doctor"),
}
"""The subcommands, in the order of the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        arguments = _parse(words)
        return arguments.run(arguments) or 0
    except KeyboardInterrupt:
        print("lehr: interrupted.", file=sys.stderr)
        return _INTERRUPTED
    except Exception as error:
        mistake = isinstance(error, InputError)
        if "--debug" in words:
            traceback.print_exc()
        else:
            message = " ".join(str(error).splitlines())
            print("lehr:", message if mistake else f"{type(error).__name__}: {message}", file=sys.stderr)
        return 2 if mistake else 1


def add_trust(parser: argparse.ArgumentParser) -> None:
    """The options by which the user vouches for code that a run or a file names."""
    parser.add_argument("--trust", action="store_true", help="run code outside Lehr that the run or file names")


def find_own_code() -> None:
    """Let `module:Class` be found in the working directory; called only once the user has named or trusted it."""
    if "" not in sys.path:
        sys.path.append("")


class Parser(argparse.ArgumentParser):
    """argparse, with its errors as ours."""

    def error(self, message: str) -> NoReturn:
        """Raise what `main` prints."""
        raise InputError(f"{message}; see '{self.prog} --help'.")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    called = next((word for word in words if not word.startswith("-")), "")
    if called and called not in COMMANDS:
        raise InputError(f"There is no command {called!r}; {closest(called, COMMANDS)}")
    everywhere = Parser(add_help=False)
    everywhere.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = Parser(
        prog="lehr",
        usage="lehr [--version] COMMAND ...",
        description=(lehr.__doc__ or "").partition("\n")[0],
        epilog="See 'lehr COMMAND --help' for each.",
        parents=[everywhere],
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lehr {lehr.__version__}")
    parser.set_defaults(run=lambda arguments: parser.print_help())
    parsers = {"": parser}
    commands = parser.add_subparsers(title="commands", metavar="COMMAND ...", prog="lehr", parser_class=Parser)
    for name, command in COMMANDS.items():
        parsers[name] = commands.add_parser(
            name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            parents=[everywhere],
            allow_abbrev=False,
        )
    if called:
        module = importlib.import_module(COMMANDS[called].module)
        module.add_arguments(parsers[called], words[words.index(called) + 1 :])
        parsers[called].set_defaults(run=module.run)
    arguments, unknown = parser.parse_known_args(words)
    refuse_unknown(parsers[called], unknown)
    return arguments
