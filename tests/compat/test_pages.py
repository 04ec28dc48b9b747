"""docs/other-frameworks.md and docs/migration.md: their code runs, their names and defaults are those of the packages."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import io
import re
import warnings
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

import lehr
from lehr import algorithms, config
from lehr.algorithms.vocabulary import coefficient, coefficients
from lehr.envs.adapters import adapter
from lehr.networks import NetworkConfig
from lehr.training.plan import RunConfig

DOCS = Path(__file__).parents[2] / "docs"
FRAMEWORKS = (DOCS / "other-frameworks.md").read_text(encoding="utf-8")
MIGRATION = (DOCS / "migration.md").read_text(encoding="utf-8")


def section(page, title):
    found = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found, title
    return found


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def theirs(module):
    pytest.importorskip(module.partition(".")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


# Other frameworks --------------------------------------------------------------------------------------------------


def run(title, names):
    found = [block for block in blocks(section(FRAMEWORKS, title)) if block.startswith(">>> ")]
    test = doctest.DocTestParser().get_doctest("\n".join(found), names, title, "other-frameworks.md", 0)
    report = io.StringIO()
    failed, tried = doctest.DocTestRunner().run(test, out=report.write, clear_globs=False)
    assert tried >= len(found) > 0
    assert not failed, report.getvalue()
    return test.globs


@pytest.mark.slow
def test_stable_baselines3(tmp_path):
    theirs("stable_baselines3")
    theirs("torch").set_num_threads(1)
    run("Stable-Baselines3", {"place": tmp_path})


def test_a_pytorch_loop():
    """With what a reader has: an optimiser and a loss."""
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}])
    run("A PyTorch loop", {"policy_loss": 0.0, "entropy": 1.0, "optimizer": optimizer})


@pytest.mark.slow
def test_cleanrl():
    """With what a reader has: an optimiser and the arguments of CleanRL's ppo.py."""
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}])
    args = SimpleNamespace(total_timesteps=4096, num_iterations=8, batch_size=512, ent_coef=0.01, clip_coef=0.2)
    names = run("CleanRL", {"args": args, "global_step": 0, "optimizer": optimizer})
    assert args.ent_coef == lehr.schedule("0.02 -> 0.001 cosine", 4096)(7 * 512)
    assert optimizer.param_groups[0]["lr"] == lehr.schedule("2.5e-4 -> 0", 4096)(7 * 512)
    assert names["global_step"] == 4096


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_rllib(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what others deprecate
        theirs("torch").set_num_threads(1)
        run("RLlib", {"place": tmp_path})


# Migration: the names and the defaults -----------------------------------------------------------------------------

OURS = {field.name: field.default for part in (RunConfig, NetworkConfig) for field in fields(part)}


def written(value):
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def rows(title):
    """The cells of the table of settings: their name, their default, our name, our default."""
    found = re.findall(r"^\| `([^`|]+)` \| ([^|]+) \| `([^`|]+)` \| ([^|]+) \|$", section(MIGRATION, title), re.M)
    assert len(found) >= 8, title
    return [tuple(cell.strip("` ") for cell in row) for row in found]


TITLES = re.findall(r"^## (You use .*)", MIGRATION, re.MULTILINE)


@pytest.mark.parametrize("title", TITLES)
def test_our_names_and_defaults(title):
    defaults = OURS | {field.name: field.default for field in fields(algorithms.find("ppo").Config)}
    for _, _, name, shown in rows(title):
        assert shown == written(defaults[name]), name


@pytest.mark.parametrize("title", TITLES)
def test_what_is_said_to_be_here_is_here(title):
    """In the tables of what is there and here, each name that is set or named as an algorithm's."""
    known = OURS.keys() | {"from_run", "run_dir"}
    for name in algorithms.names():
        known |= {field.name for field in fields(algorithms.find(name).Config)}
    cells = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", section(MIGRATION, title), re.M)
    assert cells or "PureJaxRL" in title
    for cell in cells:
        named = re.findall(r"(\w+)=", re.sub(r'="[^"]*"', "=", cell))
        assert set(named) <= known, cell
        assert set(re.findall(r'train\("(\w+)"', cell)) <= set(algorithms.names()), cell


def check_theirs(title, defaults):
    for name, default, _, _ in rows(title):
        if name in defaults:
            value = defaults[name]
            assert default == (f"{value:g}" if isinstance(value, float) else written(value)), name
        else:
            assert default == "-", f"{name} is not a setting of theirs with a default"
    assert sum(name in defaults for name, *_ in rows(title)) >= 8


def signature(function):
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}


def test_the_names_of_stable_baselines3():
    check_theirs("You use Stable-Baselines3", signature(theirs("stable_baselines3").PPO.__init__))


def test_the_names_of_brax():
    check_theirs("You use Brax", signature(theirs("brax.training.agents.ppo.train").train))


def test_the_names_of_rllib():
    """Read from its files, as it does not import without all of its packages."""
    folder = importlib.util.find_spec("ray")
    if folder is None:
        pytest.skip("Ray is not installed")
    root = Path(folder.submodule_search_locations[0]) / "rllib" / "algorithms"
    defaults = {}
    for file in ("algorithm_config.py", "ppo/ppo.py"):
        for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                for target in node.targets:
                    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                        defaults.setdefault((file, target.attr), node.value.value)
    latest = {name: value for (_, name), value in defaults.items()}
    check_theirs("You use RLlib", latest)


def test_the_table_of_names_is_that_of_the_fields():
    """Every name of another library that a static setting has; those of coefficients are in docs/schedules.md."""
    classes = [RunConfig, algorithms.find("ppo").Config, NetworkConfig, algorithms.find("trpo").Config]
    fields = {field.name: field for cls in classes for field in config.describe(cls)}
    lines = []
    for name, field in fields.items():
        converted = [f"`{found.name}` (converted)" for found in field.names.conversions]
        called = [*(f"`{alias}`" for alias in field.names.aliases), *converted]
        if called:
            lines.append(f"| `{name}` | {', '.join(called)} |")
    table = "\n".join(lines)
    assert table in section(MIGRATION, "Names from other libraries"), table


# Migration: the same training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("title", TITLES)
def test_our_half_of_the_same_training(title, tmp_path, monkeypatch):
    """As it is shown: all settings are read, and those for Stable-Baselines3's readers are trained with, for one update."""
    (block,) = [block for block in blocks(section(MIGRATION, title)) if "lehr.train" in block]
    monkeypatch.chdir(tmp_path)
    train = lehr.train

    def read(algorithm, **given):
        run, settings, _ = config.build([RunConfig, *algorithms.settings_of(algorithm)], given)
        assert settings.num_envs * settings.horizon % settings.minibatches == 0
        assert config.coefficients(settings, run.total_steps)
        suite, _, name = run.env.rpartition(":")
        if suite and importlib.util.find_spec(suite):
            assert name in adapter(suite).names()
        small = {"total_steps": 1, "evaluate_episodes": 0, "progress": False}
        return train(algorithm, **given | small).final if "Baselines" in title else {"update": 1}

    monkeypatch.setattr(lehr, "train", read)
    names = {}
    exec(compile(block, "migration.md", "exec"), names)
    assert names["result"]["update"] == 1


def test_every_coefficient_in_the_text_is_one():
    given = re.findall(r'`(\w+)="([^"`]+)"`', MIGRATION)
    texts = [(name, text) for name, text in given if name in coefficients()]
    assert len(texts) >= 3
    for name, text in texts:
        coefficient(name).check(lehr.schedule(text, 1_000_000))


@pytest.mark.slow
def test_the_half_of_stable_baselines3(tmp_path, monkeypatch):
    theirs("stable_baselines3")
    theirs("torch").set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks(section(MIGRATION, "You use Stable-Baselines3")) if "model.learn" in block]
    names = {}
    exec(compile(block.replace("100_000", "1"), "migration.md", "exec"), names)
    assert names["model"].num_timesteps == 8 * 32
