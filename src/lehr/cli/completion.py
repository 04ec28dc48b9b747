"""`lehr completion`: a script that completes commands, options and their values in bash, zsh or fish.

The script contains all of them, read from the parsers when it is written. Completing runs no Python, so it is instant.
"""

import argparse
import functools
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from lehr import algorithms, envs, rewards, zoo
from lehr.cli import COMMANDS, make_parsers
from lehr.config.build import presets_of
from lehr.envs.adapters import ADAPTERS, listed
from lehr.errors import InputError, closest
from lehr.networks.network_config import CHOICES
from lehr.training.plan import ACTORS, settings_classes

_PLACES = ("FILE", "DIR", "RUN", "SWEEP")
"""What the help calls a value that is a file or a directory."""


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the shell."""
    parser.usage = f"lehr completion {{{','.join(SHELLS)}}}"
    parser.epilog = (
        "For bash, add 'source <(lehr completion bash)' to ~/.bashrc; for zsh, 'source <(lehr completion zsh)' to "
        "~/.zshrc, after compinit; for fish, run 'lehr completion fish > ~/.config/fish/completions/lehr.fish'."
    )
    parser.add_argument("shell", metavar="SHELL", help=f"one of: {', '.join(SHELLS)}")


def run(arguments: argparse.Namespace) -> None:
    """Print the script."""
    if arguments.shell not in SHELLS:
        raise InputError(f"There is no completion for {arguments.shell!r}; {closest(arguments.shell, SHELLS)}")
    print(SHELLS[arguments.shell](contexts()), end="")


class Option(NamedTuple):
    """A flag, what it does, and what may follow it."""

    flag: str
    help: str
    values: tuple[str, ...] | None
    """Values to offer: empty for files, or for a text of the user's own; None if the flag takes no value."""
    is_place: bool
    """Whether the value is a file or a directory."""
    prefixed: tuple[str, ...] = ()
    """Values to offer instead once the user has typed a prefix with its colon, such as `brax:`."""


class Context(NamedTuple):
    """What can follow certain first words, such as `train ppo`."""

    words: str
    options: tuple[Option, ...]
    arguments: dict[str, str]
    """Words to offer, with what each means; if there are none, files."""


def contexts() -> list[Context]:
    """Return what can follow `lehr`, each command, `train` with each algorithm, and `zoo` with each of its own."""
    commands = {name: command.summary for name, command in COMMANDS.items()}
    found = [Context("", _options(make_parsers([])[0][""], {}), commands)]
    choices = _arguments()
    for name in COMMANDS:
        parser = make_parsers([name, "--help"])[0][name]
        found.append(Context(name, _options(parser, _values()), choices.get(name, {})))
    for name in choices["train"]:
        presets = presets_of(settings_classes(name, {}))
        parser = make_parsers(["train", name])[0]["train"]
        found.append(Context(f"train {name}", _options(parser, {**_values(), "--preset": tuple(presets)}), {}))
    tuned = {
        name: {one.env: f"{one.total_steps:,} env steps" for one in zoo.entries(name)}
        for name in choices["zoo"]
        if name != "check"
    }
    options = next(context.options for context in found if context.words == "zoo")
    found.append(Context("zoo check", options, {name: choices["zoo"][name] for name in tuned}))
    for name, tasks in tuned.items():
        found += [Context(f"{words} {name}", options, tasks) for words in ("zoo", "zoo check")]
    return found


def _arguments() -> dict[str, dict[str, str]]:
    from lehr.cli.lists import LISTS, summary_of

    summaries = {name: summary_of(algorithms.find(name)) for name in algorithms.names()}
    tuned = {name: summary for name, summary in summaries.items() if zoo.entries(name)}
    return {
        "train": summaries,
        "zoo": {"check": "train an entry again", **tuned},
        "list": {name: listing.summary for name, listing in LISTS.items()},
        "completion": {name: f"completion for {name}" for name in SHELLS},
    }


def _values() -> dict[str, tuple[str, ...]]:
    suites = (f"{prefix}:" for prefix in ADAPTERS)
    network = {f"--{name.replace('_', '-')}": tuple(filter(None, known)) for name, known in CHOICES.items()}
    return {
        **{"--env": (*envs.names(), *suites), "--reward-model": tuple(rewards.BUILT_IN), "--on": ("ray",)},
        **{"--actors": ACTORS, **network},
    }


@functools.cache
def _prefixed() -> dict[str, tuple[str, ...]]:
    return {"--env": tuple(f"{prefix}:{name}" for prefix in ADAPTERS for name in listed(prefix))}


def _options(parser: argparse.ArgumentParser, values: dict[str, tuple[str, ...]]) -> tuple[Option, ...]:
    formatter, found, prefixed = parser._get_formatter(), [], _prefixed()
    for action in parser._actions:
        if not action.option_strings or action.help == argparse.SUPPRESS:
            continue
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        known = tuple(metavar[1:-1].split(",")) if metavar.startswith("{") else ()
        for flag in action.option_strings:
            offered = None if action.nargs == 0 else values.get(flag, known)
            if flag.startswith("--"):
                described = formatter._expand_help(action)
                found.append(Option(flag, described, offered, metavar in _PLACES, prefixed.get(flag, ())))
    return tuple(found)


# One writer for each shell -----------------------------------------------------------------------------------------


class _CaseShell(NamedTuple):
    """What differs between shells that have `case`."""

    pattern: str
    """How it writes the pattern of a case."""
    head: str
    words: str
    """The words before the one to complete."""
    offers_flags: str
    """The commands that offer the context's flags if the word to complete is one, and no value is expected."""
    foot: str


_CASES = """\
{head}
    for each in {words}; do
        case "$context|$each" in
            {flag} ;;
{contexts}
        esac
    done
    case "$context" in
{flags}
    esac
    case "$context $previous" in
{values}
        {other}
            {offers_flags} ;;
    esac
{foot}
"""

# Bash splits COMP_WORDS at colons too, and replaces only what follows the last one.
_BASH = _CaseShell(
    pattern="{})",
    head="""\
# Completion of lehr for bash.
_lehr() {
    local line="${COMP_LINE:0:COMP_POINT}" typed last
    read -ra typed <<< "$line"
    [[ "$line" == *[[:space:]] ]] && typed+=("")
    last=$((${#typed[@]} - 1))
    local word="${typed[last]}" previous="${typed[last - 1]}"
    local context="" flags="" words="" each""",
    words='"${typed[@]:1:last - 1}"',
    offers_flags='[[ "$word" == -* ]] && words="$flags"',
    foot="""\
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [[ "${COMPREPLY[*]}" == *: ]] && compopt -o nospace 2>/dev/null
    [[ "$word" == *:* && "$COMP_WORDBREAKS" == *:* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%:*}:"}")
    return 0
}
complete -o default -F _lehr lehr""",
)

_ZSH = _CaseShell(
    pattern="({})",
    head="""\
#compdef lehr
# Completion of lehr for zsh.
_lehr() {
    local word="$words[CURRENT]" previous="$words[CURRENT-1]" context="" each
    local -a flags offered suites""",
    words='"${(@)words[2,CURRENT-1]}"',
    offers_flags='if [[ "$word" == -* ]]; then _describe option flags; return; fi',
    foot="""\
    if (( $#suites )); then _describe suite suites -S ''; fi
    if (( $#offered )); then _describe value offered; else _files; fi
}
if [[ "$funcstack[1]" == _lehr ]]; then _lehr "$@"; else compdef _lehr lehr; fi""",
)

_FISH = """\
# Completion of lehr for fish.
function __lehr_in --description 'Whether the words so far are those of a context'
    set -l context ''
    for each in (commandline -opc)[2..]
        switch "$context|$each"
            case '*|-*'
{contexts}
        end
    end
    test "$context" = "$argv[1]"
end
complete -c lehr -f
{lines}
"""


def _transitions(found: Iterable[Context], write: Callable[[str, str], str]) -> str:
    """A line for each context that says from which other context its last word leads to it."""
    pairs = [(context.words.rpartition(" ")[0], context.words) for context in found if context.words]
    return "\n".join(write(f"{before}|{words.rpartition(' ')[2]}", words) for before, words in pairs)


def bash(found: Sequence[Context]) -> str:
    """Return the script for bash."""

    def offers(context: Context) -> str:
        listed, words = " ".join(option.flag for option in context.options), " ".join(context.arguments)
        return f"flags={shlex.quote(listed)}; words={shlex.quote(words)}"

    def values(option: Option) -> str:
        action = "" if option.is_place or option.values else "; compopt +o default 2>/dev/null"
        within = f'; [[ "$word" == *:* ]] && words={shlex.quote(" ".join(option.prefixed))}' if option.prefixed else ""
        return f"words={shlex.quote(' '.join(option.values or ()))}{within}{action}"

    return _with_cases(_BASH, found, offers, values)


def zsh(found: Sequence[Context]) -> str:
    """Return the script for zsh."""

    def described(pairs: Iterable[tuple[str, str]]) -> str:
        escaped = ((word.replace(":", "\\:"), _first_sentence(text)) for word, text in pairs)
        return " ".join(shlex.quote(f"{word}:{text}") for word, text in escaped)

    def listed_in(words: Iterable[str]) -> str:
        escaped = (word.replace(":", "\\:") for word in words)
        return f"({' '.join(map(shlex.quote, escaped))})"

    def offers(context: Context) -> str:
        options = described((option.flag, option.help) for option in context.options)
        return f"flags=({options}); offered=({described(context.arguments.items())})"

    def values(option: Option) -> str:
        action = "" if option.is_place or option.values else "; _message value; return"
        offered = [value for value in option.values or () if not value.endswith(":")]
        suites = [value for value in option.values or () if value.endswith(":")]
        if not suites:
            return f"offered={listed_in(offered)}{action}"
        return (
            f'if [[ "$word" == *:* ]]; then offered={listed_in(option.prefixed)}; '
            f"else offered={listed_in(offered)}; suites={listed_in(suites)}; fi"
        )

    return _with_cases(_ZSH, found, offers, values)


def _with_cases(
    shell: _CaseShell,
    found: Sequence[Context],
    offers: Callable[[Context], str],
    values: Callable[[Option], str],
) -> str:
    """Write the script of a shell with `case`: what each context offers, and the values of each option that has some.

    Args:
        shell: the shell.
        found: the contexts.
        offers: the commands for a context.
        values: the commands for an option.
    """

    def case(text: str, commands: str) -> str:
        return f"        {shell.pattern.format(shlex.quote(text))} {commands} ;;"

    return _CASES.format(
        **shell._asdict(),
        flag=shell.pattern.format('*"|-"*'),
        other=shell.pattern.format("*"),
        contexts=_transitions(found, lambda text, words: f"    {case(text, f'context={shlex.quote(words)}')}"),
        flags="\n".join(case(context.words, offers(context)) for context in found),
        values="\n".join(
            case(f"{context.words} {option.flag}", values(option))
            for context in found
            for option in context.options
            if option.values is not None
        ),
    )


def fish(found: Sequence[Context]) -> str:
    """Return the script for fish."""
    lines = []
    for context in found:
        start = f"complete -c lehr -n {_fish_quoted(f'__lehr_in {_fish_quoted(context.words)}')}"
        lines += [
            f"{start} -a {_fish_quoted(word)} -d {_fish_quoted(_first_sentence(text))}"
            for word, text in context.arguments.items()
        ]
        if context.words and not context.arguments:
            lines.append(f"{start} -F")
        for option in context.options:
            flag, values = f"-l {option.flag.removeprefix('--')}", option.values
            flag += f" -d {_fish_quoted(_first_sentence(option.help))}"
            if values is None:
                lines.append(f"{start} {flag}")
            elif option.prefixed:
                has_colon, where = "commandline -ct | string match -q '*:*'", f"__lehr_in {_fish_quoted(context.words)}"
                for condition, offered in ((f"not {has_colon}", values), (has_colon, option.prefixed)):
                    when = _fish_quoted(f"{where}; and {condition}")
                    lines.append(f"complete -c lehr -n {when} {flag} -x -a {_fish_quoted(' '.join(offered))}")
            else:
                lines.append(
                    f"{start} {flag} " + ("-r -F" if option.is_place else f"-x -a {_fish_quoted(' '.join(values))}")
                )
    transitions = _transitions(
        found,
        lambda case, words: f"            case {_fish_quoted(case)}\n                set context {_fish_quoted(words)}",
    )
    return _FISH.format(contexts=transitions, lines="\n".join(lines))


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].partition(" (default")[0].removesuffix(".")


def _fish_quoted(text: str) -> str:
    """In fish, a quote and a backslash inside single quotes have a backslash before them."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS: dict[str, Callable[[Sequence[Context]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
"""The shells, with what writes the script of each."""
