"""The command line: what it prints, and its exit codes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import lehr
from lehr.algorithms.vocabulary import coefficients
from lehr.cli import COMMANDS, _start_device, main
from lehr.cli.output import print_table
from lehr.envs import ADAPTERS


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch):
    """Whatever the machine says about colours, the output is a plain file."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def table(output, first):
    """The rows under the header that begins with the word `first`, cut at gaps of two or more spaces."""
    lines = [line.strip() for line in output.splitlines()]
    begin = next(place for place, line in enumerate(lines) if line.startswith(first))
    stop = lines.index("", begin)
    return [re.split(r"\s{2,}", line) for line in lines[begin + 1 : stop]]


def run(capsys, *words):
    """Run a command that must succeed, and return what it printed."""
    assert main(words) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def mistake(capsys, *words):
    """Run a command that must be refused, and return its one sentence."""
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("lehr: ")
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("lehr: ").rstrip("\n")


# lehr schedule -----------------------------------------------------------------------------------------------------


def test_phases_and_holds_cover_the_budget(capsys):
    output = run(capsys, "schedule", "warmup 5%, 0.03 until 20%, 0.03 -> 0.001 cosine(2) until 80%", "--total", "1M")
    assert table(output, "phase") == [
        ["1", "0", "50k", "0", "0.03", "linear", "5%"],
        ["2", "50k", "200k", "0.03", "0.03", "constant", "15%"],
        ["3", "200k", "800k", "0.03", "0.001", "cosine(2)", "60%"],
        ["4", "800k", "1M", "0.001", "0.001", "holds", "20%"],
    ]


def test_a_phase_that_is_cut_short_shows_where_it_comes_to(capsys):
    output = run(capsys, "schedule", "1 -> 0 over 80% until 40%, 0.2", "--total", "1000")
    assert table(output, "phase")[0] == ["1", "0", "400", "1", "0.5", "linear", "40%"]


def test_the_share_counts_only_what_is_within_the_budget(capsys):
    rows = table(
        run(capsys, "schedule", "1 -> 0.5 over 800k, 0.5 -> 0 over 2M, 0.1 -> 0 over 1M", "--total", "1M"), "phase"
    )
    assert [(row[1], row[2], row[-1]) for row in rows] == [
        ("0", "800k", "80%"),
        ("800k", "2.8M", "20%"),
        ("2.8M", "3.8M", "0%"),
    ]


def test_a_late_begin_is_a_hold(capsys):
    rows = table(run(capsys, "schedule", "1 -> 0 polynomial(3) from 20%"), "phase")
    assert rows == [
        ["1", "0%", "20%", "1", "1", "holds", "20%"],
        ["2", "20%", "100%", "1", "0", "polynomial(3)", "80%"],
    ]


def test_many_cycles_are_shortened(capsys):
    rows = table(run(capsys, "schedule", "1 -> 0 repeat 50", "--total", "50k"), "phase")
    assert len(rows) == 20
    assert rows[-2:] == [["..."], ["50", "49k", "50k", "1", "0", "linear", "2%"]]


def test_values_are_those_of_the_schedule(capsys):
    texts = ["warmup 5%, 0.03 -> 0.001 cosine", "3e-4 -> 1e-5 exponential until 777k"]
    output = run(capsys, "schedule", *texts, "--total", "1M", "--at", "123456", "90%+1k", "2M")
    rows = table(output, "at")
    assert [row[:2] for row in rows] == [
        ["0", "0%"],
        ["123456", "12.35%"],
        ["250k", "25%"],
        ["500k", "50%"],
        ["750k", "75%"],
        ["901k", "90.1%"],
        ["1M", "100%"],
        ["2M", "200%"],
    ]
    steps = [0, 123_456, 250_000, 500_000, 750_000, 901_000, 1_000_000, 2_000_000]
    for column, text in enumerate(texts, 2):
        expected = lehr.schedule(text, total_steps=1_000_000)
        assert [float(row[column]) for row in rows] == pytest.approx([expected(step) for step in steps], rel=1e-8)


def test_shares_alone_are_drawn_in_percent(capsys):
    output = run(capsys, "schedule", "0.03 -> 0.001")
    assert [row[0] for row in table(output, "at")] == ["0%", "25%", "50%", "75%", "100%"]
    assert output.splitlines()[-1].split() == ["0%", "25%", "50%", "75%", "100%"]


def test_steps_alone_are_drawn_to_their_own_end(capsys):
    output = run(capsys, "schedule", "0.1 at 0, 0.05 at 1M, 0.01 at 8M", "--at", "3M")
    assert [row[0] for row in table(output, "at")] == ["0", "2M", "3M", "4M", "6M", "8M"]
    assert "Note" not in output


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["1 -> 0 over 2M", "--total", "1M"], "ends at 2M, after the budget of 1M; its value at 1M is 0.5."),
        (["1 until 2M, 0", "--total", "1M"], "ends at 2M, after the budget of 1M; its value at 1M is 1."),
        (["1 -> 0.2 over 80%", "--total", "1M"], "ends at 800k, before the budget of 1M, and holds 0.2 from then on."),
        (["1 -> 0.2 over 80%"], "ends at 80%, before the end of the budget, and holds 0.2 from then on."),
    ],
)
def test_note_on_an_end_that_is_not_the_budget(capsys, words, note):
    assert f"Note: the schedule {note}" in run(capsys, "schedule", *words)


@pytest.mark.parametrize("text", ["1 -> 0", "0.1", "1 until 20%, 0", "1 -> 0 repeat 7", "0.5 until 1M, 0"])
def test_no_note_on_a_schedule_that_ends_well(capsys, text):
    assert "Note" not in run(capsys, "schedule", text, "--total", "1M")


def test_chart_overlays_the_texts_with_a_mark_each(capsys):
    output = run(capsys, "schedule", "8 -> 0", "0", "--width", "30", "--height", "5", "--total", "1M")
    lines = output.splitlines()
    assert lines[-9:-7] == ["● 1  8 -> 0", "○ 2  0"]
    assert lines[-7].strip().startswith("8 ┤●●●")
    assert lines[-3].count("○") > 20


def test_output_without_unicode():
    command = [sys.executable, "-c", "import lehr.cli; raise SystemExit(lehr.cli.main())"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    drawn = subprocess.run(
        [*command, "schedule", "1 → 0", "0.5"], env=environment, capture_output=True, check=True
    ).stdout.decode("ascii")
    assert "* 1  1 -> 0\n" in drawn
    assert " 1 +***" in drawn
    listed = subprocess.run([*command, "list", "coefficients"], env=environment, capture_output=True, check=True).stdout
    assert "[0, inf)" in listed.decode("ascii")


def test_a_terminal_gets_colours(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    output = run(capsys, "schedule", "1 -> 0", "0.5")
    assert "\x1b[36m━\x1b[0m 1" in output
    assert "\x1b[35m━\x1b[0m 2" in output
    monkeypatch.setenv("NO_COLOR", "1")
    assert "● 1" in re.sub(r"\x1b\[\d*m", "", run(capsys, "schedule", "1 -> 0", "0.5"))


@pytest.mark.parametrize(("name", "opening"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_plot_writes_a_picture(capsys, tmp_path, name, opening):
    path = tmp_path / name
    output = run(capsys, "schedule", "warmup 5%, 1 -> 0", "0.5", "--total", "1M", "--plot", str(path))
    assert path.read_bytes().startswith(opening)
    assert f"Saved the figure to {path}." in output
    if name == "a.svg":
        assert ">warmup 5%, 1 -&gt; 0<" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["0.03 -> 0.1 cosin"], "did you mean 'cosine'?"),
        (["1 until 500k, 1 -> 0"], "give the budget as total_steps, or --total on the command line."),
        (
            ["1 -> 0 over 1M", "1 -> 0 over 10%"],
            "Both env steps and shares of the budget are used in '1 -> 0 over 1M', '1 -> 0 over 10%'",
        ),
        (
            ["auto(target_entropy=0.5)"],
            "depends on metrics and not on the step, so it cannot be plotted; give a schedule.",
        ),
        (["1 -> 0", "--total", "5%"], "--total is '5%'; give a number of env steps, for example 500k, 1M or 1e6."),
        (
            ["1 -> 0", "--total", "0"],
            "total_steps is 0; the budget must be finite, above 0 and at most 2^48 env steps.",
        ),
        (["1 -> 0", "--at", "5k"], "--at is '5k', but the schedule is in shares of the budget only"),
        (["1 -> 0 over 5k", "--at", "5%"], "--at is '5%', but the schedule is in env steps only"),
        (["1 -> 0", "--at", "later"], "--at is 'later'; give env steps or a share of the budget"),
        (
            ["1 -> 0", "--plot", "a.jpg"],
            "The figure cannot be saved to 'a.jpg'; the file name must end in .png or .svg.",
        ),
        (["1 -> 0", "--width", "0"], "The chart size is 0 by 17 characters; it must be from"),
        (["1 -> 0", "--width", "wide"], "argument --width: invalid int value: 'wide'; see 'lehr schedule --help'."),
        (["1 -> 0", "--plto", "a.png"], "There is no option '--plto'; did you mean '--plot'?"),
        (["1 -> 0", "--totl=1M"], "There is no option '--totl'; did you mean '--total'?"),
        ([], "the following arguments are required: TEXT; see 'lehr schedule --help'."),
    ],
)
def test_schedule_mistakes(capsys, words, message):
    assert message in mistake(capsys, "schedule", *words)


# lehr list ---------------------------------------------------------------------------------------------------------


def test_list_coefficients(capsys):
    rows = table(run(capsys, "list", "coefficients"), "name")
    assert [row[0] for row in rows] == list(coefficients())
    assert [
        "entropy_coef",
        "ent_coef, entropy_cost, entropy_coeff",
        "[0, ∞)",
        coefficients()["entropy_coef"].summary,
    ] in rows


def test_list_alone_says_what_can_be_listed(capsys):
    assert table(run(capsys, "list"), "command")[0][0] == "lehr list coefficients"


def test_list_suites_names_some_environments_of_those_that_are_installed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "craftax", None)  # as if it were not installed
    rows = {row[0]: row for row in table(run(capsys, "list", "suites"), "prefix")}
    assert list(rows) == [f"{prefix}:" for prefix in ADAPTERS]
    assert "in total)" in rows["gym:"][-1]
    for missing in ("jaxdem:", "craftax:"):
        assert rows[missing][-1].startswith("not installed: pip install")


def test_presets_are_shown_as_they_are_written(capsys):
    rows = {(row[0], row[1]): row[-1] for row in table(run(capsys, "list", "presets"), "algorithm")}
    assert "normalise_observations false" in rows["ppo", "classic"]
    assert rows["dreamer", "tiny"] == "the defaults"


def test_a_narrow_terminal_cuts_no_name(capsys):
    name, rows = (
        "ppo-CartPole-v1-s0-20261119-203041",
        [["finished", "CartPole-v1", "204k", "a-word-of-twenty-six-letter"]],
    )
    header = ("name", "status", "env", "env steps", "said")
    print_table(Console(width=80), header, [[name, *row] for row in rows], words=header, optional=("env", "env steps"))
    lines = capsys.readouterr().out.splitlines()
    assert name in lines[1].split()
    assert max(map(len, lines)) <= 80
    assert "a-word-of-twenty-six-letter" in lines[1]
    assert lines[-1] == "In a wider terminal: env, env steps."


def test_suites_are_listed_where_none_is_installed():
    code = """
import sys
from lehr.plugins import ADAPTERS
for package in {package for _, package in ADAPTERS.values()} | {"minari", "mujoco"}:
    sys.modules[package] = None
from lehr.cli import main
sys.exit(main(["list", "suites"]))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rows = table(found.stdout, "prefix")
    assert [row[0] for row in rows] == [f"{prefix}:" for prefix in ADAPTERS]
    assert all(row[-1].startswith("not installed: pip install") for row in rows)


def test_a_suite_that_cannot_be_imported_does_not_hide_the_others(capsys, monkeypatch):
    monkeypatch.setattr("lehr.envs.suites.gymnax.names", lambda: {}["of another version"])
    rows = {row[0]: row for row in table(run(capsys, "list", "suites"), "prefix")}
    assert rows["gymnax:"][-1] == "broken: KeyError: 'of another version'"
    assert "in total)" in rows["gym:"][-1]


def test_list_mistakes(capsys):
    assert mistake(capsys, "list", "coeficients") == "There is no list of 'coeficients'; did you mean 'coefficients'?"
    assert mistake(capsys, "list", "coefficients", "x") == "Unexpected argument 'x'; see 'lehr list --help'."


# lehr --------------------------------------------------------------------------------------------------------------


def test_alone_it_prints_its_help(capsys):
    output = run(capsys)
    assert all(command.summary in output for command in COMMANDS.values())


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"lehr {lehr.__version__}\n"


def test_unknown_command_and_option(capsys):
    assert mistake(capsys, "schedul", "0.1") == "There is no command 'schedul'; did you mean 'schedule'?"
    assert mistake(capsys, "--versio") == "There is no option '--versio'; did you mean '--version'?"


@pytest.mark.parametrize("words", [["--debug", "schedule", "x"], ["schedule", "x", "--debug"]])
def test_debug_shows_the_traceback(capsys, words):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert "InputError: In the schedule 'x', character 1" in error


def test_a_failure_at_run_time_is_one_line_and_exit_code_1(capsys, tmp_path):
    (tmp_path / "a.png").mkdir()
    assert main(["schedule", "1 -> 0", "--plot", str(tmp_path / "a.png")]) == 1
    assert re.fullmatch(r"lehr: IsADirectoryError: .* \(--debug shows the traceback\)\n", capsys.readouterr().err)


def test_a_failure_in_the_users_own_code_names_its_line(capsys, tmp_path, monkeypatch):
    (tmp_path / "own_fault.py").write_text(
        "import jax\nfrom lehr.envs import Environment\n\n\ndef task() -> Environment:\n"
        "    jax.tree.map(lambda leaf: {}[leaf], ['mix'])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["train", "ppo", "--env", "own_fault:task"]) == 1
    assert capsys.readouterr().err == "lehr: KeyError: 'mix' (in own_fault.py, line 6; --debug shows the traceback)\n"


def test_the_installed_command_runs():
    command = Path(sys.executable).with_name("lehr")
    printed = subprocess.run([command, "list"], capture_output=True, check=True, text=True)
    assert "lehr list coefficients" in printed.stdout


@pytest.mark.parametrize(
    ("words", "begun"),
    [
        ("train ppo", ["device"]),
        ("train ppo --seeds 3", ["cores", "device"]),
        ("sweep sweep.yaml --out there", ["cores", "device"]),
        ("sweep sweep.yaml --dry-run", []),
        ("sweep report sweeps/first", []),
        ("sweep sweep.yaml --on=ray", []),
        ("train ppo --distributed", []),
        ("train ppo --help", []),
        ("list runs", []),
        ("", []),
    ],
)
def test_the_device_starts_at_once_if_it_is_needed(monkeypatch, words, begun):
    found = []
    monkeypatch.setattr("lehr.training.cores.use_cores", lambda: found.append("cores"))
    monkeypatch.setattr("lehr.training.background.start_device", lambda: found.append("device"))
    _start_device(words.split())
    assert found == begun


def test_a_command_that_ends_the_process_looks_for_no_garbage_at_its_end():
    code = """
import atexit, gc, sys

atexit.register(lambda: print("visited", any(known is kept for known in gc.get_objects())))
import lehr.cli

sys.argv = ["lehr", "schedule", "1 -> 0"]
assert lehr.cli.main(sys.argv[1:]) == 0
assert gc.get_freeze_count() == 0
assert lehr.cli.main() == 0
assert gc.get_freeze_count() > 0 and gc.isenabled()
kept = [[]]
assert any(known is kept for known in gc.get_objects())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "visited False"
