"""How a run remembers its environment: what it saves makes an equal environment in another process."""

import sys
from functools import partial

import gymnasium
import pytest

import lehr
from lehr.cli import main
from lehr.envs import TimeLimit, make, registry
from lehr.envs.builtin.classic import CartPole
from lehr.envs.naming import adopt
from lehr.errors import InputError
from tests.envs.gym_tasks import Faulty, Walk
from tests.small import SMALL


def pole(**parameters):
    return gymnasium.make("CartPole-v1", **parameters)


def used():
    env = pole(max_episode_steps=50, render_mode="rgb_array")
    env.reset(seed=3)
    env.step(0)
    return env


def long_pole():
    env = pole()
    env.unwrapped.length = 2.0
    return env


def annotated(size: int = 3) -> gymnasium.Env:
    return Walk()


GIVEN = {
    "an object of gymnasium.make": (pole(sutton_barto_reward=True), "gym:CartPole-v1", {"sutton_barto_reward": True}),
    "an object that was used": (used(), "gym:CartPole-v1", {"max_episode_steps": 50}),
    "an object of a module that registers it": (gymnasium.make("Walk-v0"), "gym:tests.envs.gym_tasks:Walk-v0", {}),
    "a lambda": (lambda: pole(sutton_barto_reward=True), "gym:CartPole-v1", {"sutton_barto_reward": True}),
    "a function": (used, "gym:CartPole-v1", {"max_episode_steps": 50}),
    "a partial": (partial(gymnasium.make, "CartPole-v1"), "gym:CartPole-v1", {}),
    "a class": (Walk, "tests.envs.gym_tasks:Walk", {}),
    "a partial of a class": (partial(Faulty, fault="raises"), "tests.envs.gym_tasks:Faulty", {"fault": "raises"}),
    "an annotated function": (partial(annotated, size=5), "tests.envs.test_naming:annotated", {"size": 5}),
    "a class of Lehr": (CartPole, "CartPole-v1", {}),
    "an object of Lehr": (make("CartPole-v1", gravity=2.0), "CartPole-v1", {"gravity": 2.0}),
    "a vector of gymnasium": (
        gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync", vector_kwargs=None),
        "gym:CartPole-v1",
        {"vectorization": "sync", "autoreset": "next_step"},
    ),
}


@pytest.mark.parametrize("given", GIVEN)
def test_what_is_saved_makes_the_same_environment(given):
    env, name, parameters = GIVEN[given]
    found = adopt(env, {})
    assert (found.name, found.parameters, found.is_found_elsewhere) == (name, parameters, True)
    if "vector" not in given:
        assert make(name, **parameters) == found.env
    assert adopt(env, {} if "class" in given or "function" in given else parameters).name == name, (
        "as a resumed run does"
    )


class Hidden(gymnasium.Wrapper):
    """A wrapper that does not say how it was created."""


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (Walk(), "<Walk>"),
        (Hidden(pole()), "<CartPoleEnv>"),
        (lambda: Hidden(pole()), "<lambda>"),
        (long_pole, "<long_pole>"),
        (TimeLimit(CartPole(), 7), "<TimeLimit>"),
        (partial(Faulty, fault=object()), "<Faulty>"),
    ],
    ids=["object", "wrapper", "lambda", "function", "object of Lehr", "parameter"],
)
def test_what_cannot_be_saved_is_said_to_be(env, name):
    found = adopt(env, {})
    assert (found.name, found.is_found_elsewhere) == (name, False)
    with pytest.raises(
        InputError, match=r"The environment was <.*>, which .* pass it as env=, or .* --env module:Class"
    ):
        adopt(name, {})


def test_a_vector_of_functions_is_resumed_with_the_same():
    vector = gymnasium.vector.SyncVectorEnv([Walk, Walk])
    found = adopt(vector, {})
    assert found[1:] == ("<SyncVectorEnv>", {"autoreset": "next_step"}, False)
    assert adopt(vector, found.parameters)[1:] == found[1:]


# Runs --------------------------------------------------------------------------------------------------------------

TASK = """
import gymnasium, numpy
from lehr.envs import register

@register("Ones-v0", max_steps=3)
class Ones(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self, worth=1.0):
        self.worth = worth
    def reset(self, *, seed=None, options=None):
        return numpy.zeros(1, numpy.float32), {}
    def step(self, action):
        return numpy.zeros(1, numpy.float32), self.worth, False, False, {}
"""


@pytest.fixture
def ones(tmp_path, monkeypatch):
    """A module of the user's in the working directory, which `forget` removes from this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("lehr.envs.registry._registry", dict(registry._registry))
    (tmp_path / "ones_task.py").write_text(TASK)
    yield __import__("ones_task")
    sys.modules.pop("ones_task", None)


def forget():
    """Like another process, which has not imported the module."""
    sys.modules.pop("ones_task", None)
    registry._registry.pop("Ones-v0", None)


def test_a_registered_environment_is_found_again(ones, capsys):
    lehr.train("ppo", "Ones-v0", run_dir="run", total_steps=32, env_parameters={"worth": 2.0}, **SMALL)
    assert lehr.load("run").config["env"] == "ones_task:Ones-v0", "without trust where it is registered"
    assert lehr.evaluate("run", episodes=2).returns.tolist() == [6.0, 6.0]
    forget()
    assert main(["eval", "run"]) == 2
    assert "if you trust it, pass --trust" in capsys.readouterr().err
    assert "ones_task" not in sys.modules
    assert main(["eval", "run", "--trust", "--episodes", "2"]) in (0, None)
    assert capsys.readouterr().out.split("return")[1].split()[0] == "6"
    forget()
    assert main(["resume", "run", "--env", "ones_task:Ones-v0", "--total-steps", "64"]) in (0, None)
    forget()
    with pytest.raises(InputError, match="a resumed run keeps its environment"):
        lehr.resume("run", env="CartPole-v1")


def test_an_environment_that_cannot_be_saved_is_passed_again(ones, caplog, capsys):
    env = Hidden(ones.Ones(worth=3.0))
    limited = gymnasium.wrappers.TimeLimit(env, 3)
    result = lehr.train("ppo", limited, run_dir="run", total_steps=32, **SMALL)
    assert result.config["env"] == "<Ones>"
    said = [record.message for record in caplog.records if "how to create Ones" in record.message]
    assert len(said) == 1, "without progress it is logged"
    assert "resume, load and evaluate will need env=" in said[0]
    for call in (lehr.load, lehr.resume, lehr.evaluate):
        with pytest.raises(InputError, match=r"The environment was <Ones>, which .* pass it as env="):
            call("run")
    assert lehr.evaluate("run", env=limited, episodes=2).returns.tolist() == [9.0, 9.0]
    assert lehr.evaluate(result, episodes=2).returns.tolist() == [9.0, 9.0]
    resumed = lehr.resume(
        "run", env=lambda: gymnasium.wrappers.TimeLimit(Hidden(ones.Ones(worth=3.0)), 3), total_steps=64
    )
    assert resumed.final["env_steps"] == 64
    assert main(["eval", "run", "--env", "ones_task:Ones", "--episodes", "2"]) in (0, None)
    assert capsys.readouterr().out.split("return")[1].split()[0] == "3"
