"""docs/environments.md: its code runs, and its table is true."""

import re
from pathlib import Path

import pytest

from lehr import envs
from lehr.envs.adapters import adapter

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
ROWS = re.findall(r"^\| `([\w-]+-v\d)` \| (.+?) \| (.+?) \| (\d+|none) \|", PAGE, re.MULTILINE)
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_environment_of_the_page_runs(monkeypatch):
    monkeypatch.setattr("lehr.envs.registry._registry", {})
    exec(CODE[1], {"__name__": "page"})
    assert envs.make("Stop-v0").max_steps == 100


def test_the_wrappers_of_the_page_exist():
    assert eval(CODE[0].partition("=")[2], vars(envs)).observation_space.shape == (4, 4)
    named = re.findall(r"^\| `(\w+)\(env", PAGE, re.MULTILINE)
    assert sorted(named) == sorted(set(envs.__all__) & set(dir(envs.wrappers)) - {"Environment", "Wrapper"})


def test_the_table_lists_every_environment():
    assert sorted(row[0] for row in ROWS) == envs.names()


@pytest.mark.parametrize(("prefix", "name"), re.findall(r"^\| `([a-z]+):` \|.*`\1:([^`]+)`", PAGE, re.MULTILINE))
def test_the_examples_of_other_suites_are_there(prefix, name):
    pytest.importorskip(envs.ADAPTERS[prefix][1])
    assert name in adapter(prefix).names()


def test_every_suite_is_in_the_table():
    assert sorted(re.findall(r"^\| `([a-z]+):` \|", PAGE, re.MULTILINE)) == sorted(envs.ADAPTERS)


@pytest.mark.parametrize(("name", "observation", "action", "limit"), ROWS)
def test_the_table_is_true(name, observation, action, limit):
    env = envs.make(name)
    agents = [env.num_agents] if env.num_agents > 1 else []
    assert [int(n) for n in observation.split(" × ")] == [*agents, *env.observation_space.shape]
    if action.startswith("Box"):
        assert [int(n) for n in action.removeprefix("Box, ").split(" × ")] == [*agents, *env.action_space.shape]
    else:
        assert action == f"Discrete({env.action_space.n})"
    assert str(getattr(env, "max_steps", "none")) == limit
