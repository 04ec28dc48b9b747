"""`lehr sweep` and `lehr pick`: what they print, and their exit codes."""

import contextlib
import io
import json
import re
import shutil
import signal
import sys

import jax
import numpy as np
import pytest
import yaml

import lehr
from lehr.cli import main
from lehr.cli.sweep import _summarise
from lehr.sweeps import running
from lehr.sweeps.statistics import interquartile_mean
from lehr.training import columns
from tests.sweeps.conftest import DEFINITION, SMALL


def write(path, **changes):
    """Write a sweep file: the small definition with some keys changed, or left out if they are None."""
    mapping = {key: value for key, value in {**DEFINITION, **changes}.items() if value is not None}
    path.write_text(yaml.safe_dump(mapping, sort_keys=False))
    return str(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a sweep file, the finished sweep `sweeps/small`, and what `lehr sweep` printed."""
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def printed(place):
    write(place / "small.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["sweep", "small.yaml", "--out", "sweeps/small", "--no-progress"]) == 0
    return out.getvalue()


@pytest.fixture
def here(place, printed, monkeypatch):
    """The working directory with the finished sweep."""
    monkeypatch.chdir(place)
    return place


def facts(output):
    """The labelled lines below the table."""
    return dict(re.findall(r"^(\w+) {2,}(.*)$", output, re.MULTILINE))


def mistake(capsys, *words):
    """Run a command that must be refused, and return its one sentence."""
    assert main(["sweep", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err.removeprefix("lehr: ").rstrip("\n")


# What it prints --------------------------------------------------------------------------------------------------


def test_the_summary_shows_the_ranking(here, printed):
    found = lehr.load_sweep("small")
    lines = printed.splitlines()
    names = ["place", "configuration", "score", "95%", "interval", "judged", "by", "learning_rate", "entropy_coef"]
    assert lines[0].split() == names
    rows = [re.split(r"\s{3,}", line.strip()) for line in lines[1:5]]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    for row, configuration in zip(rows, found.ranking.order, strict=True):
        again = found.results.again.get(int(configuration))
        judged = found.results.scores[configuration] if again is None else again
        assert row[1] == str(configuration)
        assert row[2] == f"{interquartile_mean(judged):.4g}"
        assert ("first seeds" if again is None else "fresh seeds") in row
        assert row[-2:] == list(found.results.texts[configuration].values())


def test_the_facts_say_what_to_do_next(printed):
    found = facts(printed)
    assert found["result"].startswith("Configuration ")
    assert found["report"] == "sweeps/small/report.html"
    assert re.fullmatch(r"[\d.]+ s, of which [\d.]+ s compiling", found["time"])
    assert found["next"] == "lehr pick sweeps/small best --out runs/best"


def test_without_a_report_the_command_that_writes_it_is_told(here, tmp_path, capsys):
    path = shutil.copytree(here / "sweeps" / "small", tmp_path / "no report")
    (path / "report.html").unlink()
    _summarise(lehr.load_sweep(path))
    told = facts(capsys.readouterr().out)["report"]
    assert told == f"none; pip install 'lehr[sweeps]', then run: lehr sweep report '{path}'"


def test_a_sweep_whose_members_all_diverged_has_failed(here, tmp_path, capsys):
    path = shutil.copytree(here / "sweeps" / "small", tmp_path / "diverged")
    for metrics in path.glob("waves/*/metrics"):
        table = columns.read_all(metrics)
        table["update/rejected"][:] = table["update"][:, None]
        columns.cut(metrics, 0)
        columns.write(metrics, 0, table)
    assert main(["sweep", str(path), "--resume", "--no-progress"]) == 1
    assert facts(capsys.readouterr().out)["next"].startswith("all members diverged: sweep lower learning rates")


def test_a_dry_run_shows_members_and_memory_and_trains_nothing(here, capsys, monkeypatch):
    monkeypatch.setattr(running, "make_population", lambda *_, **__: pytest.fail("a population was made"))
    before = sorted(here.rglob("*"))
    path = write(
        here / "dry.yaml",
        settings={name: value for name, value in SMALL.items() if name != "hidden_sizes"},
        parameters={"hidden_sizes": [[4], [8], [8, 8]], "clip_range": [0.1, 0.2]},
        sampler="grid",
        samples=None,
        seeds=5,
    )
    assert main(["sweep", path, "--dry-run", "--wave-size", "7"]) == 0
    output = capsys.readouterr().out
    (here / "dry.yaml").unlink()
    rows = [line.split() for line in output.splitlines()[1:7]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert [row[-1] for row in rows] == ["0.1", "0.2"] * 3
    found = facts(output)
    assert found["members"] == "6 configurations x 5 seeds = 30"
    assert found["then"] == "the best 2 again, with 2 fresh seeds"
    assert found["programs"] == "3, compiled one after the other"
    assert found["waves"] == "of at most 7 members"
    each, at_once = (float(size) for size in re.findall(r"([\d.]+) MiB", found["memory"]))
    assert at_once == pytest.approx(7 * each, rel=0.01)
    assert sorted(here.rglob("*")) == before


def test_a_dry_run_counts_the_members_of_an_evolution_that_are_trained_again(here, capsys):
    """Each stands for itself, whatever it began with."""
    parameters = {"clip_range": {"low": 0.1, "high": 0.2}}
    again = {"evolution": {}, "confirm": {"top": 5, "seeds": 1}}
    path = write(here / "dry.yaml", parameters=parameters, samples=2, seeds=2, **again)
    assert main(["sweep", path, "--dry-run"]) == 0
    (here / "dry.yaml").unlink()
    assert facts(capsys.readouterr().out)["then"] == "the best 4 again, with 1 fresh seed"


def test_the_memory_of_a_dry_run_is_that_of_a_member(here, capsys):
    assert main(["sweep", "small.yaml", "--dry-run"]) == 0
    (each,) = re.findall(r"at least ([\d.]+) MiB", capsys.readouterr().out)
    run = lehr.train("ppo", run_dir=here / "runs" / "one", **SMALL, progress=False, tensorboard=False)
    assert float(each) * 2**20 == pytest.approx(sum(leaf.nbytes for leaf in jax.tree.leaves(run.state)), rel=0.01)


def test_a_sampler_that_learns_from_scores_lists_one_configuration(here, capsys):
    path = write(here / "tpe.yaml", sampler="optuna:TPESampler", samples=6)
    assert main(["sweep", path, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "... and 5 more, which optuna:TPESampler chooses by the scores of those before" in output
    assert facts(output)["members"] == "6 configurations x 2 seeds = 12"


def test_the_report_is_written_again(here, capsys, printed):
    report = here / "sweeps" / "small" / "report.html"
    content = report.read_bytes()
    report.unlink()
    assert main(["sweep", "report", "small"]) == 0
    output = capsys.readouterr().out
    assert report.read_bytes() == content
    assert output.splitlines()[:6] == printed.splitlines()[:6]


def test_a_finished_sweep_is_resumed_without_training(here, capsys, monkeypatch, printed):
    monkeypatch.setattr(running.Waves, "_train", lambda *_: pytest.fail("a wave was trained"))
    for words in (["sweeps/small"], ["small"], ["small.yaml"], ["small.yaml", "--out", "sweeps/small"]):
        assert main(["sweep", *words, "--resume"]) == 0
        assert capsys.readouterr().out.splitlines()[:6] == printed.splitlines()[:6]


def test_a_file_finds_its_sweep_among_broken_ones(here, capsys):
    broken = here / "sweeps" / "broken"
    broken.mkdir()
    (broken / "sweep.yaml").write_text("algorithm: stranger.module:Mine\nparameters: {x: [1]}\n")
    assert main(["sweep", "small.yaml", "--resume"]) == 0
    shutil.rmtree(broken)


def test_pick_writes_a_run_and_says_what_it_is_for(here, capsys):
    assert main(["pick", "small", "--out", "runs/the best"]) == 0
    found = facts(capsys.readouterr().out)
    assert found["run"] == "runs/the best"
    winner = lehr.load_sweep("small").ranking.winner
    assert re.fullmatch(rf"member \d+: configuration {winner}, seed \d, score [\d.]+", found["picked"])
    assert found["next"] == "lehr eval 'runs/the best'; lehr resume 'runs/the best' --total-steps STEPS"
    sweep = lehr.load_sweep("small")
    scores = [*sweep.results.scores[sweep.ranking.winner], *sweep.results.again[sweep.ranking.winner]]
    assert lehr.load("runs/the best").final["evaluate/return"] == pytest.approx(np.max(scores))
    assert main(["pick", "small", "top2", "--out", "runs/top"]) == 0
    assert capsys.readouterr().out.count("lehr eval runs/top/member-") == 2
    assert len(list((here / "runs" / "top").iterdir())) == 2


@pytest.mark.slow
def test_what_the_user_trusts_is_found_in_the_working_directory(tmp_path, capsys, monkeypatch):
    (tmp_path / "own_sweep.py").write_text(
        "from lehr.algorithms.ppo import Algorithm\nfrom lehr.envs import Environment, make\n"
        "class Mine(Algorithm):\n    pass\n"
        "def task() -> Environment:\n    return make('CartPole-v1')\n"
    )
    monkeypatch.chdir(tmp_path)
    places = [place for place in sys.path if place not in ("", str(tmp_path))]  # as in an installed command
    small = {**SMALL, "env": "own_sweep:task", "total_steps": 32}
    write(tmp_path / "own.yaml", algorithm="own_sweep:Mine", settings=small, samples=1, seeds=1, confirm=None)
    said = []
    for words in (
        "sweep own.yaml --dry-run",
        "sweep own.yaml --out sweeps/own --no-progress",
        "sweep own.yaml --out sweeps/own --resume --no-progress",
        "sweep report sweeps/own",
        "pick own --out runs/own",
    ):
        monkeypatch.setattr(sys, "path", [*places])
        monkeypatch.delitem(sys.modules, "own_sweep", raising=False)
        assert main([*words.split(), "--trust"]) == 0, words
        said.append(facts(capsys.readouterr().out).get("next"))
    assert said[1:4] == ["lehr pick sweeps/own best --out runs/best --trust"] * 3
    assert said[4] == "lehr eval runs/own --trust; lehr resume runs/own --total-steps STEPS --trust"


# Stopped sweeps --------------------------------------------------------------------------------------------------


def test_a_stopped_sweep_exits_with_130_and_says_how_to_continue(here, capsys, monkeypatch):
    monkeypatch.setattr("lehr.training.loop._next_count", lambda *_: 3)
    with monkeypatch.context() as patch:
        reports = iter([lambda: signal.raise_signal(signal.SIGINT)])
        patch.setattr("lehr.training.loop.Loop._report", lambda loop: next(reports, int)())
        assert main(["sweep", "small.yaml", "--out", "sweeps/stop it", "--no-progress"]) == 130
    output = facts(capsys.readouterr().out)
    assert output["next"] == "lehr sweep 'sweeps/stop it' --resume"
    assert json.loads((here / "sweeps" / "stop it" / "status.json").read_text())["status"] == "stopped"
    assert mistake(capsys, "report", "sweeps/stop it").startswith("No member of the sweep 'sweeps/stop it' is trained")
    assert mistake(capsys, "small.yaml", "--out", "sweeps/stop it") == (
        "There is a sweep in 'sweeps/stop it' already; add --resume, or give another directory."
    )
    assert main(["sweep", "sweeps/stop it", "--resume", "--no-progress"]) == 0
    shutil.rmtree(here / "sweeps" / "stop it")


def test_ctrl_c_between_waves_exits_with_130(here, capsys, monkeypatch):
    def interrupted(*_):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("this process ignores SIGINT, as one in the background of a script does")

    monkeypatch.setattr(running.Waves, "_train", interrupted)
    assert main(["sweep", "small.yaml", "--out", "sweeps/early", "--no-progress"]) == 130
    assert capsys.readouterr().err == "lehr: interrupted.\n"
    assert json.loads((here / "sweeps" / "early" / "status.json").read_text())["status"] == "stopped"
    shutil.rmtree(here / "sweeps" / "early")


# Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none.yaml"], "none.yaml"),
        (["none.yaml", "--resume"], "none.yaml"),
        (["none", "--resume"], "There is no sweep 'none', neither as a directory nor under 'sweeps'"),
        (["sweeps/small"], "'sweeps/small' is a directory; to continue the sweep in it, add --resume."),
        (["sweeps"], "'sweeps' is a directory"),
        (["sweeps", "--resume"], "'sweeps' has no sweep.yaml; give a directory written by 'lehr sweep'."),
        (["report"], "The directory of the sweep is missing; write 'lehr sweep report DIR'."),
        (["report", "none"], "There is no sweep 'none'"),
        (["reprot", "sweeps/small"], "Unexpected 'sweeps/small'; give one sweep file, or 'report' and a directory."),
        (["small.yaml", "--wave-size", "0"], "wave_size is 0; it must be 1 or more."),
        (["small.yaml", "--wave-size", "0", "--dry-run"], "wave_size is 0; it must be 1 or more."),
        (["small.yaml", "--wave-size", "many"], "argument --wave-size: invalid int value: 'many'"),
        (["small.yaml", "--resum"], "--resum"),
        (["sweeps/small", "--dry-run"], "sweeps/small"),
        (["sweeps/small", "--resume", "--out", "other"], "a resumed sweep stays in 'sweeps/small'; drop --out."),
        (["small.yaml", "--out", "sweeps/small"], "There is a sweep in 'sweeps/small' already; add --resume"),
        (["small.yaml", "--out", "small.yaml"], "Cannot create a run at 'small.yaml': it is a file"),
        ([], "the following arguments are required: FILE"),
    ],
)
def test_bad_words_are_one_sentence(here, capsys, words, sentence):
    assert sentence in mistake(capsys, *words)


def test_a_file_that_was_changed_does_not_continue_the_sweep(here, capsys):
    path = write(here / "changed.yaml", seeds=3)
    assert "'changed.yaml' is not the definition of the sweep in 'sweeps/small'" in mistake(
        capsys, "changed.yaml", "--out", "sweeps/small", "--resume"
    )
    assert "'sweeps' has no sweep of 'changed.yaml' to resume" in mistake(capsys, "changed.yaml", "--resume")
    (here / path).unlink()


@pytest.mark.parametrize(
    ("settings", "changes", "sentence"),
    [
        ({"env": "Nope-v1"}, {}, "There is no environment named 'Nope-v1'"),
        ({"env": "gym:CartPole-v1"}, {}, "gym:CartPole-v1 runs on the host, but a population is one compiled program"),
        ({"evaluate_episodes": 0}, {}, "evaluate_episodes is 0, but a sweep ranks its runs by an evaluation"),
        ({"target_return": 400}, {}, "target_return is 400, but all runs of a sweep are trained for the whole budget"),
        ({"wandb": True}, {}, "wandb is True, but the runs of a sweep are logged to its own directory only"),
        ({"actors": "threads"}, {}, "actors is 'threads', but CartPole-v1 is compiled"),
        ({"total_steps": 0}, {}, "total_steps is 0"),
        ({"minibatches": 7}, {}, "32 samples cannot be split into 7 equal minibatches"),
        (
            {"minibatches": None},
            {"parameters": {"minibatches": [2, 7]}, "sampler": "grid", "samples": None},
            "32 samples cannot be split into 7 equal minibatches",
        ),
        (
            {},
            {"parameters": {"entropy_coef": {"start": [0.1, 0.2], "end": 0, "shape": "exponential"}}, "samples": 2},
            "Configuration 0 (entropy_coef.start=0.1) is not possible",
        ),
        ({}, {"seeds": [2**63 - 1]}, "but the 2 fresh seeds of confirm are those after the largest"),
        ({}, {"algorithm": "gail"}, "demonstrations is none"),
        ({}, {"sampler": "optuna:Nope"}, "There is no sampler 'optuna:Nope'"),
        ({}, {"algorithm": "pppo"}, "pppo"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is(here, capsys, monkeypatch, settings, changes, sentence):
    monkeypatch.setattr(running, "make_population", lambda *_, **__: pytest.fail("a population was made"))
    kept = {name: value for name, value in {**SMALL, **settings}.items() if value is not None}
    path = write(here / "bad.yaml", settings=kept, **changes)
    said = mistake(capsys, path, "--out", "sweeps/bad")
    (here / "bad.yaml").unlink()
    assert sentence in said
    assert not (here / "sweeps" / "bad").exists()


@pytest.mark.parametrize("command", ["sweep", "pick"])
def test_help_names_every_form(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    words = {
        "sweep": ["FILE.yaml --dry-run", "DIR --resume", "report DIR", "--wave-size N", "--no-progress", "--trust"],
        "pick": ["SWEEP [best | NUMBER | c4 | top3] --out RUN", "--trust"],
    }
    assert all(word in output for word in words[command])
