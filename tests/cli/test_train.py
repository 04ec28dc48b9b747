import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import lehr
from lehr import algorithms, config
from lehr.acting.export.numpy_policy import NumpyPolicy
from lehr.algorithms import ppo
from lehr.cli import COMMANDS, main
from lehr.cli.play import episode
from lehr.cli.summary import _next, print_summary
from lehr.envs import Environment, registry
from lehr.networks import NetworkConfig
from lehr.report.loggers.jsonl import read
from lehr.spaces import Box, Discrete
from lehr.training.api import own_code_in_settings
from lehr.training.directory import RunDirectory
from lehr.training.plan import RunConfig, make_plan
from lehr.types import Timestep

SCHEDULE = "0.03 -> 0.001 cosine"
TOTAL, PER_UPDATE = 4096, 128
SMALL = {
    "num_envs": 4,
    "horizon": 32,
    "epochs": 1,
    "minibatches": 2,
    "hidden_sizes": [8, 8],
    "evaluate_episodes": 2,
    "tensorboard": False,
}
FLAGS = "--num-envs 4 --horizon 32 --epochs 1 --minibatches 2 --hidden-sizes 8,8 --evaluate-episodes 2 --no-tensorboard"
PARAMETERS = (4 * 8 + 8) + (8 * 8 + 8) + (8 * 2 + 2) + (4 * 8 + 8) + (8 * 8 + 8) + (8 * 1 + 1)
"""Of two networks with two layers of 8, from 4 numbers to 2 actions and to 1 value."""


def call(*words):
    """The exit code, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


def mistake(*words):
    """The one sentence of a command that must be refused."""
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert err.startswith("lehr: ")
    assert err.count("\n") == 1
    return err.removeprefix("lehr: ").rstrip("\n")


def table(output, first):
    """The rows under the header that begins with `first`, cut at gaps of two or more spaces."""
    lines = [line.strip() for line in output.splitlines()]
    begin = next(place for place, line in enumerate(lines) if line.startswith(first))
    return [re.split(r"\s{2,}", line) for line in lines[begin + 1 : lines.index("", begin)]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 32 updates, with what its command printed."""
    path = tmp_path_factory.mktemp("runs") / "first"
    words = ["train", "ppo", "--env", "CartPole-v1", "--total-steps", "4096", "--entropy-coef", SCHEDULE]
    code, out, err = call(*words, *FLAGS.split(), "--run-dir", path)
    assert code == 0, err
    return path, out, err


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of the run, to change."""
    return shutil.copytree(trained[0], tmp_path / "copied")


# lehr train --------------------------------------------------------------------------------------------------------


def test_train_says_what_it_does_and_what_came_of_it(trained):
    path, out, err = trained
    assert f"ppo on CartPole-v1, {PARAMETERS} parameters, saved in {path}\n" in err
    assert re.search(r"^compiled in \d+\.\d s$", err, re.M)
    assert "100%  4.10k/4.10k steps" in err
    final = lehr.load(path).final
    spread = f"{final['evaluate/return']:.4g} ± {final['evaluate/return_std']:.3g}"
    assert f"greedy {spread}, sampled {final['evaluate/return_sampled']:.4g}" in out
    assert "(mean return ± std over 2 episodes)" in out
    assert "finished after 4.10k of 4.10k env steps\n" in out
    assert re.search(r"^time +\d+:\d\d to the last update; [\d.]+k? steps/s in training$", out, re.M)
    assert f"lehr resume {path} --total-steps 8192\n" in out
    assert f"lehr play {path}\n" in out
    for name in ("curve.png", "metrics.jsonl"):
        assert f" {path / name}\n" in out
        assert (path / name).stat().st_size > 0


def test_metrics_hold_the_schedule_that_was_given(trained):
    rows = [json.loads(line) for line in (trained[0] / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "coef/entropy_coef" in row]
    assert [row["env_steps"] for row in updates] == list(range(PER_UPDATE, TOTAL + 1, PER_UPDATE))
    expected = lehr.schedule(SCHEDULE, total_steps=TOTAL)
    given = [expected(row["env_steps"] - PER_UPDATE) for row in updates]
    assert [row["coef/entropy_coef"] for row in updates] == pytest.approx(given, rel=1e-6)


def test_config_has_the_settings_and_builds_them_again(trained):
    saved = config.from_yaml(trained[0] / "config.yaml")
    assert saved.pop("algorithm") == "ppo"
    assert {name: saved[name] for name in SMALL} == SMALL
    assert (saved["total_steps"], saved["env"], saved["entropy_coef"]) == (TOTAL, "CartPole-v1", SCHEDULE)
    assert config.to_mapping(*config.build([RunConfig, ppo.Config, NetworkConfig], saved)) == saved


def test_a_file_and_other_names_give_the_same_run(trained, tmp_path):
    file = tmp_path / "settings.yaml"
    config.to_yaml(file, SMALL | {"algorithm": "ppo", "total-steps": "9k", "gamma": 0.5, "ent_coef": 0.5})
    flags = ["--total_steps", "4096", "--discount", "0.99", "--ent-coef-schedule", SCHEDULE]
    code, _, err = call("train", "--config", file, *flags, "--run-dir", tmp_path / "second")
    assert code == 0, err
    first, second = (read(path / "metrics.jsonl") for path in (trained[0], tmp_path / "second"))
    assert first.keys() == second.keys()
    for name in first:
        if not name.startswith("time/"):
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    texts = [(path / "config.yaml").read_text() for path in (trained[0], tmp_path / "second")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        (["--ent-coef", "0.04"], [0.04, 0.04, 0.04]),
        (["--entropy-coef", "0.04 -> 0"], [0.04, 0.02, 0.0]),
        (["--ent_coef", "0.04", "--ent_coef_schedule", "linear"], [0.04, 0.02, 0.0]),
        (["--entropy-cost-schedule=0.04 -> 0"], [0.04, 0.02, 0.0]),
        (["--ent-coef", "0.04", "--ent-coef-warmup-steps", "1k"], [0.0, 0.02, 0.04]),
        (["--entropy-coef", "0.04", "--entropy-coef-warmup-steps", "100%"], [0.0, 0.02, 0.04]),
    ],
)
def test_all_spellings_of_a_coefficient(monkeypatch, flags, values):
    asked = {}

    def train(algorithm, **settings):
        asked.update(settings)
        raise RuntimeError("This is as far as the test goes.")

    monkeypatch.setattr(lehr, "train", train, raising=False)
    assert call("train", "ppo", "--total-steps", "1000", *flags)[0] == 1
    for option in ("run_dir", "from_run", "trust", "tuned", "distributed"):
        del asked[option]
    _, settings = config.build([RunConfig, ppo.Config], asked)
    entropy_coef = config.coefficients(settings, total_steps=1000)["entropy_coef"]
    assert [entropy_coef(step) for step in (0, 500, 1000)] == pytest.approx(values)


def test_ctrl_c_outside_of_a_run(monkeypatch):
    def train(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(lehr, "train", train, raising=False)
    assert call("train", "ppo") == (130, "", "lehr: interrupted.\n")


def test_ctrl_c_while_the_command_is_imported_is_one_line(monkeypatch):
    program = """
import builtins, signal, sys
really = builtins.__import__
def imports(name, *rest, **named):
    if name == "jax":  # the first heavy import
        signal.raise_signal(signal.SIGINT)
    return really(name, *rest, **named)
builtins.__import__ = imports
sys.argv = ["lehr", "list", "algorithms"]
from lehr.cli import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "lehr: interrupted.\n")


def test_a_dollar_sign_in_the_name_is_no_formula_and_a_failing_picture_fails_no_run(tmp_path, monkeypatch):
    flags = [*FLAGS.split(), "--total-steps", PER_UPDATE, "--no-progress"]
    code, _, err = call("train", "ppo", *flags, "--run-dir", tmp_path / "$5_vs_$10")
    assert (code, err) == (0, "")
    assert (tmp_path / "$5_vs_$10" / "curve.png").stat().st_size > 0

    def fail(*_, **__):
        raise RuntimeError("no colours left")

    monkeypatch.setattr("lehr.training.api.learning_curve", fail)
    code, _, _ = call("train", "ppo", *flags, "--run-dir", tmp_path / "other")
    assert code == 0
    assert json.loads((tmp_path / "other" / "status.json").read_text())["status"] == "finished"


def test_a_run_that_cannot_begin_leaves_its_directory_and_its_error(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    flags = [*FLAGS.split(), "--total-steps", PER_UPDATE, "--loggers", "math:pi"]
    for place in (tmp_path / "link", "."):
        assert "a logger has the methods log, flush and close" in mistake("train", "ppo", *flags, "--run-dir", place)
        assert (tmp_path / "link").is_symlink()
        assert list(folder.iterdir()) == []


def test_names_that_are_too_long_are_one_sentence(tmp_path):
    long = tmp_path / ("x" * 300)
    assert "File name too long" in mistake("train", "ppo", *FLAGS.split(), "--run-dir", long)
    for command in ("eval", "plot", "resume"):
        assert "File name too long" in mistake(command, long)


def test_a_close_that_raises_does_not_fail_a_complete_run(tmp_path):
    class Logger:
        def log(self, row): ...
        def flush(self): ...
        def close(self):
            raise OSError("gone")

    result = lehr.train("ppo", **SMALL, total_steps=PER_UPDATE, loggers=[Logger()], run_dir=tmp_path / "run")
    assert RunDirectory(tmp_path / "run").read_status()["status"] == "finished"
    assert int(result.state.updates) == 1


def test_help_has_the_docstrings_of_the_algorithms_settings(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as exit_:
        main(["train", "ppo", "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"\n{name} settings:\n") for name in ("run", "ppo", "network")]
    assert places == sorted(places)
    for cls in (RunConfig, ppo.Config, NetworkConfig):
        for field in config.describe(cls):
            assert f"--{field.name.replace('_', '-')}" in shown
            assert field.help in shown
    assert "classic, puffer" in shown
    assert "by default all. (default:" not in shown
    assert "(default: ())" not in shown
    assert "hidden_sizes.\n" in shown


def test_help_begins_with_what_most_users_change(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["train", "ppo", "--help"])
    flags = re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
    first = ["--run-dir", "--env", "--total-steps", "--seed", "--num-envs", "--learning-rate", "--clip-range"]
    later = ["--target-kl", "--optimiser", "--torso", "--distributed"]
    assert [flag for flag in flags if flag in (*first, *later)] == [*first, *later]


@pytest.mark.parametrize("words", [*([name] for name in COMMANDS), *(["train", name] for name in algorithms.names())])
def test_help_fits_into_80_columns(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_help_without_an_algorithm_names_those_there_are(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert f"one of: {', '.join(algorithms.names())}" in shown
    assert "--clip-range" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "The algorithm is missing; name it first, as in 'lehr train ppo'"),
        (["train", "--env", "CartPole-v1", "ppo"], "The algorithm is missing; name it first"),
        (["train", "pppo"], "There is no algorithm 'pppo'; did you mean 'ppo'?"),
        (["train", "ppo", "a2c"], "Unexpected argument 'a2c'; see 'lehr train --help'."),
        (["train", "ppo", "CartPole-v1"], "Unexpected argument 'CartPole-v1'; did you mean '--env CartPole-v1'?"),
        (
            ["train", "ppo", "--seeds", "3", "brax:ant", "--seed", "1"],
            "Unexpected argument 'brax:ant'; did you mean '--env brax:ant'?",
        ),
        (
            ["train", "ppo", "--net-arch", "64", "64", "--policy", "MlpPolicy"],
            "Unexpected argument '64'; lists are written with commas: --net-arch 64,64",
        ),
        (
            ["train", "ppo", "--actor-obs=near", "far"],
            "Unexpected argument 'far'; lists are written with commas: --actor-obs near,far",
        ),
        (
            ["train", "ppo", "--n-steps", "64", "64"],
            "Unexpected argument '64'; see 'lehr train --help'.",
        ),
        (
            ["train", "ppo", "--entropy-cof", "0.1"],
            "There is no option '--entropy-cof'; did you mean '--entropy-coef'?",
        ),
        (
            ["train", "ppo", "--exp-name", "mine"],
            "There is no option '--exp-name': name the run's directory with --run-dir DIR.",
        ),
        (["train", "ppo", "--tensorboard", "false"], "--tensorboard takes no value; write --no-tensorboard."),
        (["train", "ppo", "--entropy-coef", "0.03 -> 0.1 cosin"], "did you mean 'cosine'?"),
        (["train", "ppo", "--entropy-coef", "-1"], "entropy_coef is '-1', which reaches -1; it must stay in [0, ∞)"),
        (
            ["train", "ppo", "--entropy-coef", "<function f>"],
            "entropy_coef was a function, <function f>, which cannot be saved in a file",
        ),
        (["train", "ppo", "--ent-coef", "1", "--entropy-coef", "1"], "entropy_coef is given twice, as 'ent_coef' and"),
        (["train", "ppo", "--num-envs", "2.5"], "num_envs is '2.5'; give a whole number such as 64 or 500k."),
        (
            ["train", "ppo", "--env", "CartPole"],
            "There is no environment named 'CartPole' (did you mean 'CartPole-v1'?)",
        ),
        (["train", "ppo", "--preset", "clasic"], "There is no preset 'clasic'; did you mean 'classic'?"),
        (["train", "--config", "none.yaml"], "The config none.yaml cannot be read: No such file or directory"),
        (["train", "--config"], "argument --config: expected one argument; see 'lehr train --help'."),
        (["train", "--from", "none"], "There is no run 'none', neither as a directory nor under 'runs'"),
        (["resume"], "the following arguments are required: RUN; see 'lehr resume --help'."),
        (["resume", "--total-steps", "5k"], "'lehr resume' got '--total-steps' before the run; name the run first"),
        (["resume", "none"], "There is no run 'none'"),
        (["eval", "none"], "There is no run 'none'"),
        (["plot", "none"], "There is no run 'none'"),
        (["play", "none"], "There is no run 'none'"),
        (["check-env", "nowhere:Env"], "The environment 'nowhere:Env' could not be imported"),
        (["train", "PPO"], "There is no algorithm 'PPO'; did you mean 'ppo'?"),
        (
            ["train", "mine.py", "--env", "CartPole-v1"],
            "There is no file 'mine.py' for the algorithm 'mine.py'; correct the path, or give 'module:Name'",
        ),
        (["train", "mine.Mine"], "your own is 'module:Class': did you mean 'mine:Mine'?"),
        (["list", "rnus"], "There is no list of 'rnus'; did you mean 'runs'?"),
        (["list", "runs"], "There are no runs in 'runs'; start one with 'lehr train', or give --root."),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_mistakes(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in mistake(*words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("env: CartPole-v1", "The algorithm is missing"),
        ("algorithm: 7", f"There is no algorithm '7'; known: {', '.join(algorithms.names())}"),
        ("algorithm: ppo\nentropy_cof: 1", "There is no setting 'entropy_cof'; did you mean 'entropy_coef'?"),
        ("algorithm: ppo\nprogress_fn: print", "has 'progress_fn', which is not a setting; remove it."),
        (
            "algorithm: ppo\nseeds: 3\nsettings: {env: CartPole-v1}",
            "settings.yaml' is a sweep file, not the settings of one run: run 'lehr sweep ",
        ),
        ("algorithm: ppo\nrun-dir: here", "has 'run_dir', which is not a setting; remove it."),
    ],
)
def test_mistakes_in_the_file(tmp_path, text, message):
    (tmp_path / "settings.yaml").write_text(text)
    assert message in mistake("train", "--config", tmp_path / "settings.yaml")


def test_a_run_that_cannot_go_on_is_exit_code_1(tmp_path):
    flags = [*FLAGS.split(), "--learning-rate", "3e38", "--max-rejected", "0", "--total-steps", TOTAL]
    code, out, err = call("train", "ppo", *flags, "--run-dir", tmp_path / "run")
    assert (code, out) == (1, "")
    assert "Update 1 was not applied" in err
    assert err.splitlines()[-1].startswith("lehr: RunFailed: 1 updates were non-finite, more than max_rejected=0")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "failed"


def test_a_run_of_which_no_update_was_applied_says_so_and_is_exit_code_1(tmp_path):
    flags = [*FLAGS.split(), "--learning-rate", "3e38", "--max-rejected", "1000", "--total-steps", PER_UPDATE * 4]
    code, out, _ = call("train", "ppo", *flags, "--run-dir", tmp_path / "run")
    assert code == 1
    assert "of whose 4 updates 4 were not finite and were left out" in " ".join(out.split())


@pytest.mark.parametrize("progress", [(), ("--no-progress",)])
def test_what_is_hardly_meant_of_a_schedule_is_told_when_the_run_starts(tmp_path, caplog, progress):
    given = {"--clip-range": "0.2 -> 0.1 over 5M", "--entropy-coef": "0.01 -> 0 over 0.5", "--learning-rate": "1.5"}
    given["--rho-clip"] = "1 -> 0.5 over 5M"  # which PPO does not use
    flags = [*FLAGS.split(), *(word for pair in given.items() for word in pair), "--total-steps", PER_UPDATE]
    _, _, err = call("train", "ppo", *flags, *progress, "--run-dir", tmp_path / "run", "--max-rejected", "1000")
    told = " ".join((caplog.text if progress else err).split())
    assert "The schedule of clip_range ends after 5M env steps, later than the run: its last value will be 0.2." in told
    assert "entropy_coef goes from 0.01 to 0 within 0.5 env steps; a share of the budget is written as 50%." in told
    assert "The learning rate reaches 1.5. If you gave a function: it is called with the env steps so far" in told
    assert "rho_clip" not in told


def test_a_signal_saves_the_state_and_says_how_to_resume(tmp_path):
    metrics = tmp_path / "run" / "metrics.jsonl"

    def interrupt():
        while not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    flags = [*FLAGS.split(), "--total-steps", "1B", "--no-progress"]
    code, out, err = call("train", "ppo", *flags, "--run-dir", tmp_path / "run")
    assert (code, err) == (128 + signal.SIGTERM, "")
    assert re.search(r"outcome +stopped after .* of 1.00B env steps \(.*SIGTERM.*\); the state is saved\n", out)
    assert f" lehr resume {tmp_path / 'run'}\n" in out
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "stopped"
    assert int(lehr.load(tmp_path / "run").state.updates) == read(metrics)["update"][-1]


def test_a_fork_goes_on_with_another_coefficient(trained, tmp_path):
    words = ["--from", trained[0], "--ent-coef", "0.5", "--total-steps", TOTAL + 2 * PER_UPDATE]
    code, _, err = call("train", *words, "--run-dir", tmp_path / "fork")
    assert code == 0, err
    metrics = read(tmp_path / "fork" / "metrics.jsonl")
    updates = ~np.isnan(metrics["coef/entropy_coef"])
    assert metrics["coef/entropy_coef"][updates].tolist() == [0.5, 0.5]
    assert metrics["env_steps"][updates].tolist() == [TOTAL + PER_UPDATE, TOTAL + 2 * PER_UPDATE]
    assert "preset is 'classic', but a preset only fills in missing settings" in mistake(
        "train", "--from", trained[0], "--preset", "classic"
    )


# lehr resume -------------------------------------------------------------------------------------------------------


def test_resume_extends_a_run(trained, copied):
    code, out, err = call("resume", copied, "--total-steps", 2 * TOTAL)
    assert code == 0, err
    assert f"The budget changes from {TOTAL} to {2 * TOTAL} env steps" in err
    assert "outcome      finished after 8.19k of 8.19k env steps\n" in out
    before, after = (read(path / "metrics.jsonl") for path in (trained[0], copied))
    assert after["update"][-1] == 2 * before["update"][-1]
    rows = len(before["update"])
    np.testing.assert_array_equal(after["loss/total"][:rows], before["loss/total"])
    clock = (after["update"][rows:-1] - 1) * PER_UPDATE
    expected = lehr.schedule(SCHEDULE, total_steps=2 * TOTAL)
    values = after["coef/entropy_coef"][rows:-1]
    assert values == pytest.approx([expected(step) for step in clock.tolist()], rel=1e-6)


@pytest.mark.parametrize(
    ("target", "outcome"),
    [
        ("1", "solved after 4.35k of 4.61k env steps: the mean return reached the target of 1"),
        ("501", "finished after 4.61k of 4.61k env steps, below the target return of 501"),
    ],
)
def test_a_target_return_is_reached_or_not(copied, target, outcome):
    flags = ["--total-steps", TOTAL + 4 * PER_UPDATE, "--evaluate-every", 2 * PER_UPDATE, "--target-return", target]
    code, out, err = call("resume", copied, *flags)
    assert code == 0, err
    assert f"outcome      {outcome}\n" in out


def test_what_is_recommended_after_a_run_with_own_code_is_not_refused(copied):
    found = lehr.load(copied)
    own = replace(found, config={**found.config, "env": "my_tasks:Pole"})
    assert _next(own, own.final) == [
        f"lehr resume {copied} --total-steps {2 * own.config['total_steps']} --trust",
        f"lehr play {copied} --trust",
    ]


def test_an_environment_that_this_process_registered_is_own_code_in_the_next(copied, monkeypatch):
    found = lehr.load(copied)
    own = replace(found, config={**found.config, "env": "my_tasks:Pole-v9"})
    monkeypatch.setattr(registry, "_is_registered", lambda module, name: (module, name) == ("my_tasks", "Pole-v9"))
    assert not [*own_code_in_settings(own.config)]
    assert all(command.endswith(" --trust") for command in _next(own, own.final))


def test_own_code_may_be_named_by_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    folder = tmp_path / "by_file" / "inner"
    folder.mkdir(parents=True)
    (folder / "my_tasks.py").write_text(
        "from lehr.algorithms.ppo import Algorithm\nfrom lehr.envs.builtin.classic import CartPole\n"
        "class Mine(Algorithm):\n    pass\nclass Pole(CartPole):\n    pass\n"
    )
    task = "--env=./by_file/inner/my_tasks.py:Pole"
    words = ["train", folder / "my_tasks.py:Mine", task, "--total-steps", TOTAL, "--run-dir", "run", *FLAGS.split()]
    assert call(*words)[0] == 0
    saved = config.from_yaml("run/config.yaml")
    assert (saved["algorithm"], saved["env"]) == ("by_file.inner.my_tasks:Mine", "by_file.inner.my_tasks:Pole")
    for name in [name for name in sys.modules if name.startswith("by_file")]:
        del sys.modules[name]
    assert "which would run code from" in mistake("resume", "run")
    assert call("resume", "run", "--trust")[0] == 0


def test_mistakes_with_files_of_own_code(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    for name in ("mine.py", "inner/not-mine.py", "inner/my_maze.py"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert "'not-mine' is not a Python name; rename it, for example to 'not_mine'" in mistake(
        "train", "inner/not-mine.py:Mine"
    )
    assert "There is no file 'no/other.py' for the algorithm" in mistake("train", "no/other.py:Mine")
    assert "There is no file 'other.py' for the environment" in mistake("train", "ppo", "--env", "other.py:Mine")
    assert "as in 'inner.my_maze:MyMaze'" in mistake("train", "ppo", "--env", "inner/my_maze.py")
    monkeypatch.chdir(tmp_path / "inner")
    assert "The file '../mine.py' is outside the working directory" in mistake("train", "../mine.py:Mine")


def test_a_run_that_was_stopped_before_its_first_update_has_a_summary(copied):
    (copied / "metrics.jsonl").write_text("")
    (copied / "curve.png").unlink()
    RunDirectory(copied).write_status("stopped", "signal SIGINT")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_summary(lehr.load(copied))
    assert printed.getvalue().splitlines() == [
        f"run          {copied}",
        "outcome      stopped after 0 of 4.10k env steps (signal SIGINT); the state is saved",
        f"files        {copied / 'metrics.jsonl'}",
        f"next         lehr resume {copied}",
        f"             lehr play {copied}",
    ]


def test_a_run_in_which_no_episode_ended_shows_its_reward(copied):
    rows = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: row[name] for name in row if not name.startswith(("episode/", "evaluate/"))} for row in rows]
    kept[-1]["rollout/reward"] = -0.25
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    printed, result = io.StringIO(), lehr.load(copied)
    with contextlib.redirect_stdout(printed):
        print_summary(result)
    assert "reward       -0.25 per step in the last update; no episode has ended\n" in printed.getvalue()
    assert "  reward     -0.25 (rollout/reward, the mean per step: no episode has ended)\n" in repr(result)


def test_only_what_can_be_drawn_is_recommended_to_be_played(trained):
    result = lehr.load(trained[0])
    assert [command.split()[1] for command in _next(result, result.final)] == ["resume", "play"]
    undrawn = dataclasses.replace(result, env=lehr.envs.make("DeepChain-v0"))
    assert [command.split()[1] for command in _next(undrawn, result.final)] == ["resume"]


def test_resume_of_a_finished_run_changes_nothing(copied):
    before = (copied / "metrics.jsonl").read_bytes()
    code, out, err = call("resume", copied)
    assert code == 0, err
    assert (copied / "metrics.jsonl").read_bytes() == before
    assert "The run is already finished" in " ".join(err.split())
    assert f"lehr resume {copied} --total-steps 8192" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "1"], "seed is 1, but a resumed run keeps its seed (0); drop the option"),
        (
            ["--env", "Acrobot-v1"],
            "env is 'Acrobot-v1', but a resumed run keeps its environment (CartPole-v1); drop the option.",
        ),
        (["--preset", "classic"], "preset is 'classic', but a preset only fills in missing settings"),
        (["--num-envs", "8"], "is int32[4], expected int32[8]"),
        (["--torso", "gru"], "There is no option '--torso'"),
        (["--total-step", "5k"], "There is no option '--total-step'; did you mean '--total-steps'?"),
    ],
)
def test_resume_mistakes(trained, flags, message):
    assert message in mistake("resume", trained[0], *flags)


# lehr eval, plot, play ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--sampled"]])
def test_eval_prints_the_statistics_of_the_episodes(trained, flags):
    code, out, err = call("eval", trained[0], "--episodes", "5", "--seed", "3", *flags)
    assert code == 0, err
    result = lehr.load(trained[0])
    returns, lengths = lehr.evaluate(result.policy, result.env, 5, seed=3, greedy=not flags)
    assert f"5 episodes of CartPole-v1, {'sampled' if flags else 'greedy'} actions, after 4.10k env steps" in out
    for row, values in zip(table(out, "mean"), (returns, lengths), strict=True):
        expected = [values.mean(), values.std(), values.min(), np.median(values), values.max()]
        assert [float(cell) for cell in row[1:]] == pytest.approx(expected, rel=1e-5)


def test_plot_draws_all_runs_with_the_coefficients_that_are_asked_for(trained, copied, tmp_path):
    path = tmp_path / "curve.svg"
    code, out, err = call("plot", trained[0], copied, "--out", path, "--coefficients", "ent-coef,gamma")
    assert code == 0, err
    assert f"Saved the figure to {path}." in out
    drawn = path.read_text(encoding="utf-8")
    assert all(f">{word}<" in drawn for word in ("first", "copied", "entropy_coef", "discount"))
    assert ">learning_rate<" not in drawn


def test_plot_draws_a_coefficient_of_the_users_own_algorithm(copied, tmp_path):
    text = (copied / "metrics.jsonl").read_text().replace('"coef/entropy_coef"', '"coef/mix_coef"')
    (copied / "metrics.jsonl").write_text(text)
    code, _, err = call("plot", copied, "--out", tmp_path / "curve.svg", "--coefficients", "mix-coef")
    assert code == 0, err
    assert ">mix_coef<" in (tmp_path / "curve.svg").read_text(encoding="utf-8")
    assert (
        mistake("plot", copied, "--coefficients", "mix") == "No run has a coefficient 'mix'; did you mean 'mix_coef'?"
    )


def test_plot_tells_runs_of_one_name_apart(trained, tmp_path, monkeypatch):
    shutil.copytree(trained[0], tmp_path / "first")
    monkeypatch.chdir(tmp_path)
    assert call("plot", trained[0], "first", "--out", "curve.svg")[0] == 0
    assert f">{trained[0]}<" in (tmp_path / "curve.svg").read_text(encoding="utf-8")


HOSTILE = (
    '[1, 2]', '3', 'null', '"text"', '{"env_steps": [1]}', '{"env_steps": null}', '{"env_steps": {}}', '{"env_steps": "a"}',
    '{"env_steps": 1e999}', '{"env_steps": -1}', '{"env_steps": "NaN"}', '{"env_steps": ' + "9" * 400 + "}",
    '{"env_steps": ' + "9" * 5000 + "}", '{"x": ' + "[" * 100_000 + "}", '{"env_steps": 1, "episode/return": "high"}',
    '{"env_steps": 1, "episode/return": 1e308, "evaluate/return": 1e308, "evaluate/return_std": 1e308}',
    '{"env_steps": 1, "coef/entropy_coef": "low"}', '{"env_steps": 1, "coef/$\\\\frac$": 1}', '{"env_steps": true}', '\xff', '',
    '{"env_steps": 9223372036854775808}', '{"": 1}', '{"env_steps": 1, "env_steps": "x"}', '{"env_steps": 1}{"env_steps": 2}',
)  # fmt: skip


@pytest.mark.parametrize("line", HOSTILE)
@pytest.mark.parametrize("place", ["alone", "between"])
def test_hostile_metrics_are_drawn_or_are_one_sentence(line, place, tmp_path):
    RunDirectory.create(tmp_path / "run").unlock()
    sound = '{"update": 1, "env_steps": 64, "episode/return": 5.0, "coef/entropy_coef": 0.1}\n'
    text = line + "\n" if place == "alone" else sound + line + "\n" + sound.replace("64", "128")
    (tmp_path / "run" / "metrics.jsonl").write_text(text, encoding="latin-1")
    code, _, err = call("plot", tmp_path / "run", "--out", tmp_path / "curve.png")
    assert code in (0, 2), err
    assert (tmp_path / "curve.png").exists() == (code == 0)
    assert err.count("\n") == (code != 0)
    assert len(err) < 500


def test_plot_mistakes(trained, copied):
    assert mistake("plot", trained[0], "--coefficients", "entropy") == (
        "No run has a coefficient 'entropy'; did you mean 'entropy_coef'?"
    )
    (copied / "metrics.jsonl").unlink()
    assert mistake("plot", copied) == f"The run '{copied}' has no metrics yet; plot it after its first update."


def test_play_films_the_first_episode_that_is_evaluated(trained, tmp_path):
    path = tmp_path / "film.gif"
    code, out, err = call("play", trained[0], "--gif", path, "--seed", "5")
    assert code == 0, err
    result = lehr.load(trained[0])
    length = lehr.evaluate(result.policy, result.env, 3, seed=5).lengths[0]
    assert out == f"Saved an episode of {length} steps with return {length} to {path}.\n"
    with Image.open(path) as film:
        assert 1 < film.n_frames <= length + 1  # equal frames in a row are one


def test_play_cuts_a_long_episode_and_keeps_the_film_with_the_run(copied, monkeypatch):
    code, out, err = call("play", copied, "--max-steps", "4")
    assert code == 0, err
    assert out == f"Saved an episode of 4 steps with return 4 to {copied / 'play.gif'}.\n"
    with Image.open(copied / "play.gif") as film:
        assert film.n_frames == 5
    monkeypatch.setattr("lehr.cli.play.load_run", None)  # what cannot be shown is refused before a policy is loaded
    assert mistake("play", copied, "--out", copied / "play.html") == (
        "CartPole-v1 cannot be shown as a page, which is for Brax and Playground; give a .gif or .mp4 file."
    )
    assert "must end in .gif, .mp4 or .html" in mistake("play", copied, "--out", copied / "play.avi")
    assert mistake("play", copied, "--max-steps", "0") == "--max-steps is 0; it must be 1 or more."
    assert mistake("play", copied, "--imagine", "0") == "--imagine is 0; it must be 1 or more."
    for command in ("play", "eval", "record"):
        sentence = f"--seed is {2**64}; give a whole number of at most 64 bits."
        assert mistake(command, copied, "--seed", str(2**64)) == sentence
    monkeypatch.undo()
    assert mistake("play", copied, "--imagine", "3") == (
        "The algorithm of this run has no model of the environment, so it imagines nothing; leave out --imagine, or "
        "play a run of dreamer."
    )
    assert mistake("eval", copied, "--episodes", "0") == "--episodes is 0; it must be 1 or more."


def untrained(env, seed=0, **settings):
    """A policy with large random parameters, whose actions depend on all that it sees and remembers."""
    plan = make_plan("ppo", {"num_envs": 1, "horizon": 8, "hidden_sizes": (8,), **settings}, env)
    policy = plan.policy(plan.state)
    draw = np.random.default_rng(seed).normal
    params = jax.tree.map(lambda x: jnp.asarray(draw(size=x.shape), x.dtype), policy.learned.params)
    return replace(policy, learned=replace(policy.learned, params=params))


def test_play_carries_the_memory():
    env = lehr.envs.make("CartPole-Hidden-v1")
    policy = untrained(env, torso="gru", recurrent_size=8)
    evaluated = lehr.evaluate(policy, env, 5, seed=1)
    played = episode(env, policy, seed=1, max_steps=1000)
    assert len(played.states) - 1 == played.total == evaluated.lengths[0]


@dataclass(frozen=True)
class TwoAgents(Environment):
    """One agent's episode takes 2 steps and the other's 4, each step with a reward of 1, also those after the end."""

    observation_space = Box(0, 9, (1,))
    action_space = Discrete(2)
    num_agents = 2

    def reset(self, key):
        return jnp.int32(0), jnp.zeros((2, 1))

    def step(self, key, state, action):
        state = state + 1
        obs = jnp.full((2, 1), state, jnp.float32)
        return state, Timestep(obs, jnp.ones(2), state >= jnp.array([2, 4]), jnp.zeros(2, bool), {})


def test_play_with_many_agents_ends_with_the_last_and_counts_none_too_long():
    env = TwoAgents()
    played = episode(env, untrained(env), seed=0, max_steps=1000)
    assert [int(state) for state in played.states] == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(np.stack(played.observations)[..., 0], np.arange(5)[:, None].repeat(2, 1))
    assert played.total == (2 + 4) / 2


# lehr export ---------------------------------------------------------------------------------------------------------


def test_export_writes_the_policy_beside_the_run(copied):
    code, out, err = call("export", copied)
    assert (code, err) == (0, "")
    written = copied / "policy.npz"
    size = f"{written.stat().st_size / 1000:.1f} kB"
    assert out.splitlines()[0] == f"Saved the policy to {written} ({size})."
    obs = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    assert NumpyPolicy(written)(obs).tolist() == lehr.load(copied).policy(obs).tolist()
    assert mistake("export", copied).startswith(f"'{written}' exists already, and is not overwritten;")


def test_export_refuses_what_it_cannot_write(copied, tmp_path):
    assert (
        mistake("export", copied, "--to", "torch")
        == "The format to export to is 'torch'; known: numpy, stablehlo, onnx"
    )
    assert mistake("export", tmp_path / "none").startswith(f"There is no run '{tmp_path / 'none'}'")
    shutil.rmtree(copied / "checkpoints")
    assert mistake("export", copied).startswith(f"There is no checkpoint in '{copied / 'checkpoints'}'")


def test_the_page_on_deployment(copied, tmp_path, monkeypatch):
    pytest.importorskip("gymnasium")
    pytest.importorskip("onnxruntime")
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
    (tmp_path / "runs").mkdir()
    copied.rename(tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "runs" / "first")
    names, languages = {}, []
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        languages.append(language)
        if language == "python":
            exec(compile(block, "deploy.md", "exec"), names)
        else:
            assert [main(line.split()[1:]) for line in block.splitlines()] == [0, 0, 0]
    assert languages == ["python", "sh", "python", "python", "python"]
    assert names["exported"](names["obs"]) == names["action"] == names["actions"][0] == names["policy"](names["obs"])
    sys.modules.pop("policy")


# lehr list, doctor, check-env --------------------------------------------------------------------------------------


def test_list_runs(trained, copied):
    shutil.copytree(copied, copied.parent / "begun", ignore=shutil.ignore_patterns("checkpoints", "config.yaml"))
    code, out, _ = call("list", "runs", "--root", copied.parent)
    assert code == 0
    best = read(trained[0] / "metrics.jsonl")["evaluate/return"]
    rows = sorted(table(out, "name"))
    assert rows == [
        ["begun", "finished", "-", "0", "-"],
        ["copied", "finished", "CartPole-v1", "4.10k", f"{np.nanmax(best):.4g}"],
    ]


def test_a_run_that_was_killed_is_interrupted_and_as_old_as_its_checkpoint(copied):
    run = RunDirectory(copied)
    run.write_status("running")
    newest = json.loads((copied / "metrics.jsonl").read_text().splitlines()[-1])
    later = newest | {"update": newest["update"] + 1, "env_steps": 9_000_000}
    with (copied / "metrics.jsonl").open("a") as file:  # rows after the last checkpoint
        file.write(json.dumps(later) + "\n")
    with run:
        assert table(call("list", "runs", "--root", copied.parent)[1], "name")[0][1] == "running"
    assert table(call("list", "runs", "--root", copied.parent)[1], "name")[0][1] == "interrupted"
    assert "after 4.10k env steps" in call("eval", copied, "--episodes", 2)[1]
    assert "env steps  4,096 of 4,096\n" in repr(lehr.load(copied))


@pytest.mark.parametrize("name", ["config.yaml", "status.json", "meta.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 10_000, b'{"meta": {"best": "x", "env_steps": []}}']
)
def test_a_damaged_run_does_not_hide_the_others(name, content, trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "sound")
    damaged = shutil.copytree(trained[0], tmp_path / "damaged")
    newest = sorted((damaged / "checkpoints").iterdir())[-1]
    (newest / name if name == "meta.json" else damaged / name).write_bytes(content)
    code, out, err = call("list", "runs", "--root", tmp_path)
    assert (code, err) == (0, "")
    rows = {row[0]: row[1] for row in table(out, "name")}
    assert rows["sound"] == "finished"
    assert rows["damaged"] in ("damaged", "finished")


def test_eval_of_a_run_before_its_first_update(tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lehr.training.loop.Loop._run_chunks", interrupt)
        assert call("train", "ppo", *FLAGS.split(), "--total-steps", TOTAL, "--run-dir", tmp_path / "run")[0] == 130
    code, out, err = call("eval", tmp_path / "run", "--episodes", 2)
    assert (code, err) == (0, "")
    assert out.startswith("2 episodes of CartPole-v1, greedy actions, after 0 env steps\n")


def test_list_algorithms_presets_and_envs():
    rows = table(call("list", "algorithms")[1], "name")
    summaries = [sys.modules[algorithms.find(name).__module__].__doc__.splitlines()[0] for name in algorithms.names()]
    assert rows == [list(row) for row in zip(algorithms.names(), summaries, strict=True)]
    presets = table(call("list", "presets")[1], "algorithm")
    (classic,) = [row for row in presets if row[:2] == ["ppo", "classic"]]
    assert "learning_rate '2.5e-4 -> 0'" in classic[2]
    rows = table(call("list", "envs")[1], "name")
    assert [row[0] for row in rows] == lehr.envs.names()
    assert ["Swarm-v0", "Box [12]", "Box [2]", "8", "100"] in rows
    assert ["CartPole-v1", "Box [4]", "Discrete 2", "1", "500"] in rows


def test_doctor_tells_versions_devices_cache_and_what_is_missing(monkeypatch):
    monkeypatch.setattr("lehr.cli.doctor.OPTIONAL", {"gymnasium": "known", "no-such-package": "unknown"})
    code, out, err = call("doctor")
    assert (code, err) == (0, "")
    assert f"versions     lehr {lehr.__version__}\n" in out
    assert re.search(r"^devices +0: \w+", out, re.M)
    assert re.search(r"^host +\d+ CPUs, [\d.]+ [MG]iB of memory$", out, re.M)
    assert re.search(r"^cache +(off|.+, \d+ files, [\d.]+ \w+)$", out, re.M)
    assert re.search(r"gymnasium \d\S+ \(known\)$", out, re.M)
    assert "no-such-package not installed (unknown)\n" in out
    assert re.search(r"^self-test +passed on \w+$", out, re.M)


def test_doctor_notices_a_device_that_computes_wrongly(monkeypatch):
    monkeypatch.setattr("lehr.cli.doctor.jax.jit", lambda function: lambda x: function(x) + 1e6)
    code, out, _ = call("doctor")
    assert code == 1
    assert "reinstall jax and jaxlib" in out


def test_check_env(tmp_path, monkeypatch):
    assert call("check-env", "CartPole-v1") == (0, "CartPole-v1 passed the environment check.\n", "")
    source = "from lehr.envs.builtin.classic import CartPole\nclass Broken(CartPole):\n    num_agents = 0\n"
    (tmp_path / "my_environments.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    code, out, _ = call("check-env", "my_environments:Broken")
    assert code == 1
    assert out.startswith("my_environments:Broken failed the environment check:\n- num_agents is 0, but must be")


def test_light_commands_import_nothing_heavy():
    program = (
        "import contextlib, sys, lehr.cli\n"
        "for words in (['--help'], ['schedule', '1 -> 0'], ['list']):\n"
        "    with contextlib.suppress(SystemExit): lehr.cli.main(words)\n"
        "assert not {'flax', 'optax', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
