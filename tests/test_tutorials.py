"""The tutorials, scripts and notebooks: their code runs, in order, as it is shown, with small sizes."""

import functools
import importlib
import json
import runpy
import sys
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
import pytest

import lehr
from lehr import config
from lehr.cli import make_parsers
from tests import shown_code

ROOT = Path(__file__).parent.parent
TUTORIALS = {page.stem: page for page in sorted((ROOT / "docs" / "tutorials").glob("*.md"))}
NEEDED = {"from-brax": "brax", "from-sb3": "stable_baselines3", "cluster": "ray", "sweep": "plotly"}
QUICK = ("first-run", "deploy")
LONG = ("cluster", "from-brax")
"""What these train is tested elsewhere; they take half a minute each."""
SCRIPTS = [path.stem for path in sorted((ROOT / "examples").glob("*.py")) if not path.stem.startswith("own_")]
NOTEBOOKS = [path.stem for path in sorted((ROOT / "examples").glob("*.ipynb"))]


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch, compiled_quickly):
    """An empty directory to work in, whose modules can be imported and are then forgotten; no windows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    shown_code.smaller(monkeypatch)
    before, shown_by = set(sys.modules), matplotlib.get_backend()
    matplotlib.use("agg")
    yield
    matplotlib.pyplot.close("all")
    matplotlib.use(shown_by)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def small_brax(monkeypatch):
    """Brax's trainer with small sizes, in its smallest environment."""
    brax = importlib.import_module("lehr.compat.brax")
    envs = importlib.import_module("brax.envs")
    train, make = brax.train, envs.get_environment
    sizes = {"num_envs": 8, "batch_size": 8, "num_minibatches": 2, "unroll_length": 4, "episode_length": 12}
    small = {**sizes, "num_timesteps": 128, "num_eval_envs": 8, "num_evals": 2}
    monkeypatch.setattr(envs, "get_environment", lambda _: make("fast"))
    monkeypatch.setattr(brax, "train", lambda env, **given: train(env, **given | small))


def small_sb3(monkeypatch):
    """Stable-Baselines3's trainer for two rollouts."""
    importlib.import_module("torch").set_num_threads(1)
    model = importlib.import_module("stable_baselines3").PPO
    learn = model.learn
    monkeypatch.setattr(model, "learn", lambda self, steps, **given: learn(self, 512, **given))


@pytest.fixture
def ray(monkeypatch):
    """A Ray of this machine with two CPUs, in a place with a short name; sixteen actors are two."""
    package = pytest.importorskip("ray")
    with (
        tempfile.TemporaryDirectory(prefix="lehr-ray-", ignore_cleanup_errors=True) as place,
        shown_code.others_may_warn(),
    ):
        monkeypatch.setenv("TMPDIR", place)
        package.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        train = lehr.train
        monkeypatch.setattr(lehr, "train", functools.partial(train_with_two, train))
        yield
        package.shutdown()


def train_with_two(train, *what, **given):
    return train(*what, **given | ({"num_actors": 2} if "num_actors" in given else {}))


def marks(name):
    return [] if name in QUICK else pytest.mark.long if name in LONG else pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in TUTORIALS])
def test_a_tutorial(name, monkeypatch, request):
    if name in NEEDED:
        with shown_code.others_may_warn():
            pytest.importorskip(NEEDED[name])
    if name == "from-brax":
        with shown_code.others_may_warn():
            small_brax(monkeypatch)
    if name == "from-sb3":
        small_sb3(monkeypatch)
    if name == "cluster":
        request.getfixturevalue("ray")
    names = {}
    shown_code.run_page(TUTORIALS[name], names)
    CHECKS.get(name, lambda _: None)(names)


def check_first_run(names):
    assert lehr.load("runs/first").final["env_steps"] >= 300_000 / shown_code.SHARE
    assert Path("cartpole.gif").is_file()
    assert names["total"] > 0


def check_anneal(names):
    np.testing.assert_allclose(names["applied"][0], 3)
    assert names["applied"][-1] < 1.5
    assert Path("compared.png").is_file()


def check_sweep(names):
    assert Path("figure.pdf").is_file()
    assert Path("sweeps/first/report.html").is_file()
    assert names["results"].scores.shape == (4, 2)


def check_brax(names):
    # The last of two training steps of 64 env steps: the schedule is at a half of its budget.
    assert 1e-4 < names["metrics"]["training/entropy_cost"] < 1e-2
    np.testing.assert_allclose(names["metrics"]["training/learning_rate"], 1.5e-4, rtol=1e-5)


def check_sb3(names):
    assert names["schedules"].values["learning_rate"] == pytest.approx(0.5e-3)
    assert len(names["found"].returns) == 20


CHECKS = {
    "first-run": check_first_run,
    "anneal": check_anneal,
    "sweep": check_sweep,
    "from-brax": check_brax,
    "from-sb3": check_sb3,
}


@pytest.mark.parametrize("name", LONG)
def test_the_commands_of_a_tutorial_are_understood(name):
    """A quick look at those that are seldom run."""
    commands = shown_code.commands(TUTORIALS[name])
    assert commands
    for words in commands:
        parsers, called = make_parsers(words)
        config.refuse_unknown(parsers[called], parsers[""].parse_known_args(words)[1])


# Scripts and notebooks ---------------------------------------------------------------------------------------------


@pytest.fixture
def _small_sweeps(monkeypatch):
    sweep = lehr.sweep

    def small(definition, **given):
        if not isinstance(definition, dict):
            definition = shown_code.yaml.safe_load(Path(definition).read_text(encoding="utf-8"))
        return sweep(shown_code.small_sweep(definition), progress=False, **given)

    monkeypatch.setattr(lehr, "sweep", small)


@pytest.mark.slow
@pytest.mark.usefixtures("_small_sweeps")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(name, capsys):
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert f"Run it with `python examples/{name}.py`" in text
    assert len([line for line in text.splitlines() if line.strip()]) < 60
    if "gymnasium" in text:
        pytest.importorskip("gymnasium")
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("_small_sweeps")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook(name):
    notebook = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 4
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "clear the outputs before you commit"
    names = {}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"{name}.ipynb, cell {number}", "exec"), names)


def test_the_page_lists_every_example():
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    files = [path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb", ".yaml")]
    assert [name for name in files if f"(../examples/{name})" not in page] == []
