"""A stranger's run or file runs no code: what it names is imported only once the user says so."""

import subprocess
import sys

import pytest
import yaml

import lehr
from lehr import envs, plugins
from lehr.cli import main
from lehr.errors import InputError
from lehr.training import checkpoint

SMALL = {
    "num_envs": 2,
    "horizon": 4,
    "epochs": 1,
    "minibatches": 1,
    "hidden_sizes": [4],
    "evaluate_episodes": 0,
    "tensorboard": False,
    "progress": False,
}
STRANGERS = """
import pathlib
pathlib.Path({marker!r}).write_text("imported")
from lehr.envs import Environment, make
def task() -> Environment:
    return make("CartPole-v1")
def anything(**parameters):
    pathlib.Path({marker!r}).write_text("called")
parallel_env = anything
"""


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A run of ours, half done."""
    path = tmp_path_factory.mktemp("honest") / "run"
    lehr.train("ppo", "CartPole-v1", total_steps=16, run_dir=path, **SMALL)
    return path


@pytest.fixture
def stranger(honest, tmp_path, monkeypatch):
    """The working directory holds a run whose config is changed, and a module of a stranger's."""
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "marker"
    (tmp_path / "evil_task.py").write_text(STRANGERS.format(marker=str(marker)))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda **changes: _changed(honest, tmp_path, changes), marker
    sys.modules.pop("evil_task", None)


def _changed(honest, folder, changes):
    (folder / "runs").mkdir(exist_ok=True)
    run = folder / "runs" / "theirs"
    if not run.exists():
        subprocess.run(["cp", "-r", str(honest), str(run)], check=True)
    config = yaml.safe_load((honest / "config.yaml").read_text()) | changes
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    checkpoint.amend(run / "checkpoints", lambda meta: meta | {"settings": config})  # a careful stranger
    return run


NAMES = [
    {"env": "os:system", "env_parameters": {"command": "touch marker"}},
    {"env": "evil_task:task"},
    {"env": "evil_task:anything"},
    {"env": "evil_task:Registered-v0"},
    {"env": "gym:evil_task:task-v0"},
    {"env": "pettingzoo:evil_task"},
    {"env": "gym:GymV26Environment-v0", "env_parameters": {"env_id": "evil_task:task-v0"}},
    {"env": "CartPole-v1", "env_parameters": {"nested": ["evil_task:task-v0"]}},
]
COMMANDS = {
    "eval": ["eval", "runs/theirs"],
    "play": ["play", "runs/theirs"],
    "resume": ["resume", "runs/theirs", "--total-steps", "32"],
    "config": ["train", "--config", "runs/theirs/config.yaml", "--run-dir", "new"],
    "from": ["train", "--from", "runs/theirs", "--run-dir", "new", "--total-steps", "32"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("changes", NAMES, ids=lambda changes: changes["env"])
def test_commands_import_nothing_that_a_run_or_a_file_names(stranger, capsys, changes, command):
    change, marker = stranger
    change(**changes)
    assert main(COMMANDS[command]) == 2
    said = capsys.readouterr().err
    assert "if you trust it, pass --trust" in said
    assert said.count("\n") == 1
    assert not marker.exists()
    assert "evil_task" not in sys.modules


def test_another_spelling_of_a_key_is_no_way_around(stranger):
    change, _ = stranger
    run = change()
    text = (run / "config.yaml").read_text().replace("env_parameters: {}", "env-parameters: {a: 'evil_task:task-v0'}")
    (run / "config.yaml").write_text(text)
    checkpoint.amend(run / "checkpoints", lambda meta: {"env_steps": 16})  # a run of an older version
    with pytest.raises(InputError, match="if you trust it"):
        lehr.load(run)


@pytest.mark.parametrize(
    "changes",
    [
        {"env_id": "gym:evil_task:task-v0"},
        {"ENV_NAME": "evil_task:Maze-v0"},
        {"env_kwargs": {"a": "evil_task:task-v0"}},
    ],
    ids=str,
)
def test_nor_is_the_name_of_another_library(stranger, changes):
    change, marker = stranger
    run = change()
    given = yaml.safe_load((run / "config.yaml").read_text())
    given = {name: value for name, value in given.items() if name not in ("env", "env_parameters")}
    (run / "config.yaml").write_text(yaml.safe_dump(given | changes))
    checkpoint.amend(run / "checkpoints", lambda meta: {"env_steps": 16})  # a run of an older version
    for call in (lehr.load, lehr.resume):
        with pytest.raises(InputError, match="if you trust it"):
            call(run)
    assert main(["train", "ppo", "--config", str(run / "config.yaml"), "--run-dir", "new"]) == 2
    assert not marker.exists()


def test_nor_are_the_settings_in_a_checkpoint(stranger):
    change, marker = stranger
    run = change(env="evil_task:task")
    (run / "config.yaml").unlink()
    for call in (lehr.load, lehr.resume):
        with pytest.raises(InputError, match="if you trust it"):
            call(run)
    assert not marker.exists()


@pytest.mark.parametrize("changes", NAMES, ids=lambda changes: changes["env"])
def test_python_calls_import_nothing_either(stranger, changes):
    change, marker = stranger
    run = change(**changes)
    for call in (
        lambda: lehr.load(run),
        lambda: lehr.resume(run, total_steps=32),
        lambda: lehr.train("ppo", from_run=run, run_dir="new", total_steps=32, **SMALL),
        lambda: lehr.train("ppo", "CartPole-v1", from_run=run, run_dir="new", total_steps=32, **SMALL),
    ):
        with pytest.raises(InputError, match="if you trust it"):
            call()
    assert not marker.exists()


def test_the_message_says_what_would_run_from_where(stranger):
    change, _ = stranger
    run = change(env="evil_task:task")
    with pytest.raises(InputError) as caught:
        lehr.load(run)
    assert str(caught.value) == (
        f"The run '{run}' has env: evil_task:task, which would run code from '{run.parent.parent / 'evil_task.py'}'; "
        "if you trust it, pass --trust (trust=True in Python), or name it yourself with --env evil_task:task "
        "(env=task in Python)."
    )


def test_the_message_names_no_option_that_the_command_lacks(stranger, capsys):
    change, marker = stranger
    change(algorithm="evil_task:Mine")
    (marker.parent / "sweep.yaml").write_text(
        "algorithm: ppo\nsettings: {env: 'evil_task:task'}\nparameters: {learning_rate: [0.1]}\n"
    )
    for words in (COMMANDS["eval"], COMMANDS["resume"], COMMANDS["config"], ["sweep", "sweep.yaml", "--dry-run"]):
        assert main(words) == 2
        assert capsys.readouterr().err.endswith("if you trust it, pass --trust (trust=True in Python).\n")
    assert not marker.exists()


@pytest.mark.parametrize("words", [["--trust"], ["--env", "evil_task:task"]], ids=["trusted", "named"])
@pytest.mark.parametrize("command", ["eval", "resume", "config", "from"])
def test_what_the_user_trusts_or_names_runs(stranger, capsys, command, words):
    change, marker = stranger
    change(env="evil_task:task")
    more = ["--episodes", "1"] if command == "eval" else ["--no-progress"]
    assert main([*COMMANDS[command], *words, *more]) == 0
    assert marker.read_text() == "imported"


def test_naming_another_environment_does_not_import_the_runs(stranger):
    change, marker = stranger
    run = change(env="evil_task:task")
    assert lehr.load(run, "CartPole-v1").config["env"] == "CartPole-v1"
    pytest.importorskip("gymnasium")  # whose state the checkpoint does not have
    for env in ("gym:CartPole-v1", envs.make("gym:CartPole-v1")):
        assert lehr.load(run, env).config["env"] == "gym:CartPole-v1"
    assert not marker.exists()


def test_the_working_directory_is_no_place_of_suites(stranger, capsys):
    """A folder that carries a package of an optional suite's name does not stand in for it."""
    change, marker = stranger
    change(env="jaxdem:SingleNavigator")
    (marker.parent / "jaxdem.py").write_text(STRANGERS.format(marker=str(marker)))
    before = list(sys.path)
    sys.path[:] = [place for place in sys.path if place not in ("", str(marker.parent))]
    try:
        assert main(COMMANDS["eval"]) == 2
    finally:
        sys.path[:] = before
    assert not marker.exists()


@pytest.mark.parametrize("name", ["os:system", "subprocess:run", "math:pi", "builtins:int", "os:path"])
def test_what_makes_no_environments_is_refused_before_it_is_called(name):
    with pytest.raises(InputError, match="which does not create environments"):
        envs.make(name)


@pytest.mark.parametrize("name", ["::", ".os:path", "os:", ":system", "a b:c"])
def test_what_is_no_name_at_all_is_refused(name):
    with pytest.raises(InputError, match="is not of the form 'module:Name'"):
        envs.make(name)


def test_the_origin_of_a_module_is_found_without_running_it(stranger):
    _, marker = stranger
    assert plugins.origin("evil_task.deeper") == f"'{marker.parent / 'evil_task.py'}'"
    assert plugins.origin("sys") == "a module of Python itself"
    (marker.parent / "folder_of_tasks").mkdir()
    assert plugins.origin("folder_of_tasks.maze") == f"the folder '{marker.parent / 'folder_of_tasks'}'"
    assert plugins.origin("no_such_module_anywhere") == "a module that is not installed"
    assert not marker.exists()


def test_functions_that_say_that_they_make_environments_do(stranger, monkeypatch):
    (stranger[1].parent / "annotated_tasks.py").write_text(
        "from lehr.envs import Environment, make\n"
        "def task(gravity: float = 9.8) -> Environment:\n    return make('CartPole-v1', gravity=gravity)\n"
        "def silent():\n    raise SystemExit\n"
    )
    monkeypatch.syspath_prepend(str(stranger[1].parent))
    assert envs.make("annotated_tasks:task", gravity=1.5) == envs.make("CartPole-v1", gravity=1.5)
    with pytest.raises(InputError, match="def make\\(\\) -> Environment"):
        envs.make("annotated_tasks:silent")
    sys.modules.pop("annotated_tasks")
