"""The command line. Invalid input prints one line and exits with 2; a failure at run time exits with 1.

Each command is a module here, imported only when it is called, with two functions: `add_arguments(parser, words)`,
where `words` are the words after the command's name, and `run(arguments)`, which may return an exit code.
"""

import argparse
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import lehr
from lehr import garbage, plugins
from lehr.errors import InputError, closest

_INTERRUPTED = 130
"""The exit code after Ctrl-C, by shell convention."""


class Command(NamedTuple):
    """A subcommand: its one-line help, and the module that adds its arguments and runs it."""

    summary: str
    module: str


COMMANDS: dict[str, Command] = {
    "train": Command("train an agent", "lehr.cli.train"),
    "resume": Command("resume a stopped run, or extend a finished one", "lehr.cli.resume"),
    "eval": Command("evaluate a run's policy", "lehr.cli.evaluate"),
    "sweep": Command("train many configurations at once, and report which is best", "lehr.cli.sweep"),
    "pick": Command("take members out of a sweep as ordinary runs", "lehr.cli.pick"),
    "plot": Command("plot the learning curves of one or more runs", "lehr.cli.plot"),
    "play": Command("record an episode of a run's policy as a GIF, a video or a page", "lehr.cli.play"),
    "record": Command("record episodes of a run's policy as demonstrations", "lehr.cli.record"),
    "export": Command("write a run's policy to a file for NumPy, StableHLO or ONNX", "lehr.cli.export"),
    "schedule": Command("preview schedules: phases, values and curves", "lehr.cli.schedule"),
    "list": Command("list algorithms, environments, coefficients, presets or runs", "lehr.cli.lists"),
    "zoo": Command("list tuned settings and what they reach, or train them again", "lehr.cli.zoo"),
    "check-env": Command("check that an environment implements Lehr's interface", "lehr.cli.check_env"),
    "completion": Command("print a completion script for bash, zsh or fish", "lehr.cli.completion"),
    "doctor": Command("show versions and devices, and run a self-test", "lehr.cli.doctor"),
}
"""The subcommands, in the order in which the help lists them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Without `argv`, it is that of this process, which ends with it."""
    words = sys.argv[1:] if argv is None else list(argv)
    if argv is None:
        garbage.stays_at_exit()
    try:
        words = [plugins.with_modules(word) for word in words]
        with garbage.importing(for_good=argv is None):
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
            failure = f"{type(error).__name__}: {message} ({_place(error)}--debug shows the traceback)"
            print("lehr:", message if mistake else failure, file=sys.stderr)
        return 2 if mistake else 1


def _place(error: Exception) -> str:
    """The last line of the user's own code that an error came through: no installed package's, Python's or Lehr's."""
    others = [str(Path(lehr.__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(other) for other in others):
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            return f"in {shown}, line {frame.lineno}; "
    return ""


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add `--trust`, which allows a run or a config file to name code outside Lehr."""
    parser.add_argument("--trust", action="store_true", help="allow the run or config file to import code outside Lehr")


def add_distributed(parser: argparse._ActionsContainer, words: Sequence[str]) -> None:
    """Add `--distributed`, which makes this one of several processes of a run, and `--on ray`, which starts them."""
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="run as one of several processes of a single run, for example one per host: their addresses come from "
        "SLURM, Open MPI or Kubernetes, or from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID",
    )
    parser.add_argument(
        "--on",
        metavar="ray",
        help="start the run on all GPU nodes of the Ray cluster in RAY_ADDRESS, or on its CPU nodes if it has no GPU",
    )
    parser.set_defaults(words=list(words))


def run_elsewhere(command: str, arguments: argparse.Namespace) -> int | None:
    """Run a command on the nodes of a Ray cluster and return its exit code, if `--on` says so."""
    if arguments.on is None:
        return None
    if arguments.on != "ray":
        raise InputError(f"--on is {arguments.on!r}; it must be 'ray', or left out to train on this machine.")
    if arguments.distributed:
        raise InputError("--on ray starts the processes of a run, which --distributed would join; drop one of them.")
    if getattr(arguments, "seeds", None) is not None:
        raise InputError(
            f"--on ray is for a single run, but --seeds is {arguments.seeds}; drop one of them, or use 'lehr sweep'."
        )
    from lehr.training.ray_hosts import run_on_ray

    words = list(arguments.words)
    while place := next((place for place, word in enumerate(words, 1) if word.partition("=")[0] == "--on"), 0):
        del words[place - 1 : place + (words[place - 1] == "--on")]
    return run_on_ray([command, *words])


def find_own_code() -> None:
    """Look for `module:Class` in the working directory too; call this only once the user has named or trusted it."""
    if "" not in sys.path:
        sys.path.append("")


class _Formatter(argparse.HelpFormatter):
    """argparse's help, with the value of an option that has two names after the second only, as in Python 3.13."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _get_help_string(self, action: argparse.Action) -> str | None:
        from lehr.config import help_of

        return help_of(action)


class Parser(argparse.ArgumentParser):
    """argparse, with errors raised as `InputError`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Formatter, **options)

    def error(self, message: str) -> NoReturn:
        """Raise the message that `main` prints."""
        from lehr.config.flags import switch_advice

        if advice := switch_advice(message):
            raise InputError(f"{advice}.")
        raise InputError(f"{message}; see '{self.prog} --help'.")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    from lehr.config import refuse_unknown  # here, and not above: it takes seconds, in which Ctrl-C must work

    _start_device(words)
    parsers, called = make_parsers(words)
    arguments, unknown = parsers[""].parse_known_args(words)
    refuse_unknown(parsers[called], unknown, words)
    return arguments


_WITHOUT_DEVICE = ("-h", "--help", "--dry-run", "--distributed", "--on")
"""Options with which a command does not train on the device of this process, or not at once."""


def _start_device(words: Sequence[str]) -> None:
    """If a command will train here, start the device in a thread, while the command is imported."""
    command, options = words[0] if words else "", {word.partition("=")[0] for word in words}
    if command not in ("train", "sweep") or options & {*_WITHOUT_DEVICE, "report"}:
        return
    from lehr.training import background, cores

    if command == "sweep" or "--seeds" in options:
        cores.use_cores()
    background.start_device()


def make_parsers(words: Sequence[str]) -> tuple[dict[str, Parser], str]:
    """Return the parsers by command, with `""` for that of `lehr` itself, and the command that `words` call, or `""`.

    Only the called command has its arguments: they may depend on the other words, and adding them imports its module.
    """
    called = next((word for word in words if not word.startswith("-")), "")
    if called and called not in COMMANDS:
        raise InputError(f"There is no command {called!r}; {closest(called, COMMANDS)}")
    everywhere = Parser(add_help=False)
    everywhere.add_argument("--debug", action="store_true", help="show the full traceback of an error")
    parser = Parser(
        prog="lehr",
        usage="lehr COMMAND [OPTIONS]",
        description=(lehr.__doc__ or "").partition("\n")[0],
        epilog="Run 'lehr COMMAND --help' for the options of a command.",
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
    return parsers, called
