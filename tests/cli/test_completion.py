"""`lehr completion`: each shell completes from the script, without starting Python."""

import shutil
import subprocess

import pytest

from lehr import algorithms, envs
from lehr.algorithms.ppo import Config
from lehr.cli import COMMANDS, main
from lehr.cli.lists import LISTS
from lehr.envs.adapters import listed

ASK = {  # how to ask each shell, with FILE for the script and WORDS for what was typed
    "bash": [
        "-c",
        'source "$0"; COMP_WORDBREAKS=":"; COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; _lehr; printf "%s\\n" "${COMPREPLY[@]}"',
    ],
    # zsh completes only at a terminal: here its helpers print what they would offer, of which it takes what fits.
    "zsh": [
        "-fc",
        "compdef() { }; _files() { }; _message() { }; _describe() { print -rl -- ${(P)2} }; source $0;"
        "words=($@); CURRENT=$#; [[ -z $@[-1] ]] && words+=(''); _lehr | sed 's/\\\\:/\\n/; s/:.*//; s/\\n/:/' | grep -- \"^$@[-1]\"",
    ],
    "fish": ["--no-config", "-c", 'source $argv[1]; complete -C (string join -- " " $argv[2..])'],
}


@pytest.fixture(scope="module", params=ASK)
def complete(request, tmp_path_factory):
    """Complete the last of some words in a shell that cannot start any other program of ours."""
    shell = shutil.which(request.param)
    if shell is None:
        pytest.skip(f"needs {request.param}")
    script = tmp_path_factory.mktemp("completion") / "script"
    with script.open("w") as file, pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.stdout", file)
        assert main(["completion", request.param]) == 0

    def ask(*words):
        command = [shell, *ASK[request.param], str(script), "lehr", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "HOME": str(script.parent)}
        )
        assert done.stderr == ""
        typed = words[-1].rpartition(":")[0] if request.param == "bash" else ""  # bash keeps what ends in a colon
        prefix = f"{typed}:" if typed else ""
        return sorted(prefix + line.partition("\t")[0] for line in done.stdout.splitlines() if line)

    return ask


def test_commands_options_and_values(complete):
    assert complete("") == sorted(COMMANDS)
    assert complete("train", "") == sorted(algorithms.names())
    assert complete("list", "") == sorted(LISTS)
    assert complete("zoo", "trpo", "Mountain") == ["MountainCar-v0", "MountainCarContinuous-v0"]
    assert complete("zoo", "check", "tr") == ["trpo"]
    assert complete("--debug", "sweep", "--dry") == ["--dry-run"]
    assert complete("train", "ppo", "--env", "Cart") == sorted(name for name in envs.names() if name.startswith("Cart"))
    assert complete("train", "ppo", "--env", "gymn") == ["gymnax:"]
    assert complete("train", "ppo", "--preset", "") == sorted(Config.PRESETS)
    assert complete("train", "dreamer", "--train-r") == ["--train-ratio"]
    assert complete("train", "ppo", "--train-r") == [], "a setting of another algorithm"


def test_values_of_options_that_take_one_of_a_few(complete):
    """Those that argparse shows in braces, those of a network, which may be the user's own, and those of a run."""
    assert complete("export", "a_run", "--to", "") == ["numpy", "onnx", "stablehlo"]
    assert complete("train", "ppo", "--torso", "") == ["auto", "cnn", "gru", "lstm", "mingru", "mlp"]
    assert complete("train", "recurrent_ppo", "--critic-torso", "m") == ["mingru", "mlp"]
    assert complete("train", "ppo", "--activation", "ta") == ["tanh"]
    assert complete("train", "ppo", "--distribution", "") == ["normal", "tanh_normal"]
    assert complete("train", "ppo", "--precision", "") == ["bfloat16", "float32"]
    assert complete("train", "ppo", "--minibatching", "") == ["auto", "flat", "prioritised", "segments"]
    assert complete("train", "appo", "--actors", "") == ["none", "processes", "ray", "threads"]


@pytest.mark.parametrize("prefix", ["brax", "gymnax", "pgx"])
def test_environments_of_a_suite(complete, prefix):
    known = [f"{prefix}:{name}" for name in listed(prefix)]
    if not known:
        pytest.skip(f"needs {prefix}")
    assert complete("train", "ppo", "--env", f"{prefix}:") == sorted(known)
    assert complete("eval", "a_run", "--env", known[0][:-1]) == [
        name for name in known if name.startswith(known[0][:-1])
    ]
    assert complete("train", "ppo", "--env", prefix) == [f"{prefix}:"], "its environments come after the colon"
    assert complete("train", "ppo", "--env", f"{prefix}:{known[0]}x") == []


def test_a_shell_that_is_not_known(capsys):
    assert main(["completion", "bsh"]) == 2
    assert "There is no completion for 'bsh'; did you mean 'bash'?" in capsys.readouterr().err
