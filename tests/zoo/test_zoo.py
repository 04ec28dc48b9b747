"""The zoo: every entry can be trained, its settings are what a run gets, and the page says what the files say."""

import re
from pathlib import Path

import numpy as np
import pytest

import lehr
from lehr import config, zoo
from lehr.cli import main
from lehr.cli.zoo import retrained
from lehr.envs import ADAPTERS, names
from lehr.errors import InputError
from lehr.training.plan import settings_classes
from lehr.zoo import Entry
from lehr.zoo.table import tables

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
EXPLICIT = {"total_steps", "evaluate_episodes", "num_envs", "horizon", "normalise_observations", "normalise_rewards"}
EXPLICIT |= {"discount", "entropy_coef"}
"""Settings that every entry states, so that a new default does not change it."""
FEW = {"total_steps": 512, "horizon": 32, "value_epochs": 1, "evaluate_episodes": 2, "tensorboard": False}


@pytest.mark.parametrize("entry", zoo.entries(), ids=lambda entry: f"{entry.algorithm} {entry.env}")
def test_every_entry_is_complete_and_builds_a_config(entry):
    built = config.build(settings_classes(entry.algorithm, entry.settings), {**entry.settings, "env": entry.env})
    assert set(entry.settings) >= EXPLICIT
    assert built[0].total_steps == entry.total_steps
    for made in built:
        config.coefficients(made, entry.total_steps)  # checks the ranges over the whole run
    prefix = entry.env.partition(":")[0]
    assert entry.env in names() or prefix in ADAPTERS
    assert np.isfinite(list(entry.returns.values())).all()
    assert entry.returns
    assert entry.machine
    assert entry.chosen


def test_there_are_twelve_tasks_in_five_suites():
    assert len({entry.env for entry in zoo.entries()}) >= 12
    assert len({entry.suite for entry in zoo.entries()}) >= 5


def test_mean_deviation_and_what_is_met():
    published = zoo.Published(9.0, "somebody", 0.5)
    entry = Entry("ppo", "CartPole-v1", {"total_steps": 10}, {3: 8.0, 4: 9.0}, published=published)
    assert (entry.mean, entry.deviation, entry.meets) == (8.5, 0.5, True)
    assert entry.command == "lehr zoo check ppo CartPole-v1 --seeds 2 --first-seed 3"
    assert not Entry("ppo", "CartPole-v1", {}, {3: 8.4}, published=published).meets
    assert str(published) == "9 ± 0.5 (somebody)"


@pytest.mark.usefixtures("compiled_quickly")
def test_a_tuned_run_has_the_tuned_settings_and_those_given_override_them(tmp_path, capsys):
    tuned = zoo.find("trpo", "MountainCarContinuous-v0").settings
    words = "--env MountainCarContinuous-v0 --tuned --gamma 0.5 --total-steps 512 --horizon 32 --value-epochs 1"
    out = tmp_path / "run"
    assert main(["train", "trpo", *words.split(), "--evaluate-episodes", "2", "--run-dir", str(out)]) == 0
    shown = re.search(r"tuned settings: (.*)\n", capsys.readouterr().err).group(1)
    saved = config.from_yaml(out / "config.yaml")
    given = {"discount": 0.5, "total_steps": 512, "horizon": 32, "value_epochs": 1, "evaluate_episodes": 2}
    assert {name: saved[name] for name in tuned} == {**tuned, **given}
    assert "action_repeat 10" in shown
    assert "discount" not in shown, "it was given"


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_quickly")
def test_an_entry_trained_again_gives_a_return_for_each_seed():
    entry = zoo.find("trpo", "MountainCarContinuous-v0")
    small = Entry(entry.algorithm, entry.env, {**entry.settings, **FEW})
    found = retrained(small, [7, 8], progress=False)
    assert found.shape == (2,)
    assert found[0] != found[1]


def test_another_reward_model_leaves_out_the_settings_of_the_tuned_one():
    tuned = zoo.find("ppo", "DeepChain-v0").settings
    assert tuned["reward_model"] == "novelty"
    found = zoo.with_tuned("ppo", "DeepChain-v0", {"reward_model": "environment", "ent_coef": 0.5})
    assert "novelty_coef" not in found
    assert (found["reward_model"], found["entropy_coef"]) == ("environment", 0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: zoo.find("ppg", "MountainCar-v0"),
            "of ppg for MountainCar-v0, only of ppo and trpo. For ppg it has CartPole-v1, ",
        ),
        (
            lambda: zoo.find("gail", "Nowhere-v0"),
            "The zoo has no tuned settings for Nowhere-v0. It has none for gail. Train without",
        ),
        (
            lambda: lehr.train("ppo", "Nowhere-v0", tuned=True),
            "no tuned settings for Nowhere-v0. For ppo it has CartPole-v1, ",
        ),
        (lambda: lehr.train("ppo", lehr.envs.make("CartPole-v1"), tuned=True), "knows environments by name"),
        (lambda: lehr.train("ppo", tuned=True, preset="classic"), "preset is 'classic', but the tuned settings"),
        (lambda: lehr.train("ppo", tuned=True, from_run="run"), "a fork keeps the settings"),
    ],
)
def test_what_cannot_be_tuned(call, message):
    with pytest.raises(InputError, match=re.escape(message)):
        call()


def printed(capsys, *words):
    """The exit code and what a command printed."""
    code, said = main(["zoo", *words]), capsys.readouterr()
    return code, said.out + said.err


def test_the_command_lists_and_shows(capsys):
    code, listed = printed(capsys)
    assert code == 0
    assert len(listed.splitlines()) == 1 + len(zoo.entries()) + 1
    _, listed = printed(capsys, "Pendulum-v1")
    assert [line.split()[0] for line in listed.splitlines()[1:-1]] == [
        entry.algorithm for entry in zoo.entries(env="Pendulum-v1")
    ]
    entry = zoo.find("trpo", "Pendulum-v1")
    _, shown = printed(capsys, "trpo", "Pendulum-v1")
    assert f"{entry.mean:.4g}" in shown
    assert "discount: '0.9 -> 0.97'" in shown
    assert entry.command in shown


@pytest.mark.parametrize(
    ("columns", "left_out"),
    [
        ("120", ""),
        ("80", "published, seeds"),
        ("62", "published, seeds, env steps"),
        ("60", "published, seeds, env steps, return"),
    ],
)
def test_names_are_whole_in_a_narrow_terminal(capsys, monkeypatch, columns, left_out):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", "40")  # without it, Rich takes a dumb terminal to have 80 columns
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    monkeypatch.setenv("TERM", "dumb")
    _, listed = printed(capsys)
    lines = listed.splitlines()
    assert [tuple(line.split()[:2]) for line in lines[1 : 1 + len(zoo.entries())]] == [
        (entry.algorithm, entry.env) for entry in zoo.entries()
    ]
    assert max(map(len, lines)) <= int(columns)
    assert lines[-1] == (f"In a wider terminal: {left_out}." if left_out else "")


def test_one_seed_has_no_deviation(capsys):
    _, shown = printed(capsys, "ppo", "brax:ant")
    assert "return       13844, 1 seed, 128 episodes with" in shown
    assert "±" not in shown


def test_nothing_is_none_as_the_command_line_takes_it(capsys):
    assert all("None" not in printed(capsys, entry.algorithm, entry.env)[1] for entry in zoo.entries())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("Cartpole-v1",), "The zoo has nothing for 'Cartpole-v1'; did you mean 'CartPole-v1'?"),
        (("ppo", "a2c"), "name at most one algorithm and one environment"),
        (("check", "ppo"), "name its algorithm and its environment"),
        (("check", "ppo", "CartPole-v1", "--seeds", "0"), "--seeds is 0; it must be 1 or more"),
        (("ppo", "--seeds", "3"), "but nothing is trained"),
    ],
)
def test_mistakes_in_the_command(capsys, words, message):
    code, said = printed(capsys, *words)
    assert code == 2
    assert message in said


def test_the_page_has_the_tables_of_the_files():
    assert tables() in PAGE.read_text(encoding="utf-8"), "run python -m lehr.zoo.table"
