import importlib.util
import subprocess
import sys
from functools import partial
from importlib import invalidate_caches

import jax
import jax.numpy as jnp
import pytest

from lehr.envs import Environment, TimeLimit, make, names, register, registry
from lehr.envs.adapters import ADAPTERS, adapter, listed
from lehr.envs.builtin.classic import Acrobot, CartPole
from lehr.errors import InputError
from lehr.spaces import Dict

BUILT_IN = ["Acrobot-v1", "CartPole-Hidden-v1", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0"]


def test_names_are_sorted_and_hold_the_built_ins():
    assert names() == sorted(names())
    assert set(BUILT_IN) | {"Pendulum-v1", "Swarm-v0", "Probe-Truncated-v0"} <= set(names())


def test_make_applies_the_standard_time_limit_and_the_parameters():
    assert make("CartPole-v1") == TimeLimit(CartPole(), 500)
    assert make("CartPole-v1", gravity=1.6) == TimeLimit(CartPole(gravity=1.6), 500)


def test_make_takes_objects_and_import_paths():
    env = CartPole()
    assert make(env) is env
    assert make("lehr.envs.builtin.classic:CartPole", force=5.0) == TimeLimit(CartPole(force=5.0), 500)
    assert make(CartPole, force=5.0) == TimeLimit(CartPole(force=5.0), 500), "a class is what its import path is"
    assert make(lambda force: CartPole(force=force), force=5.0) == CartPole(force=5.0)
    assert make(partial(CartPole, force=4.0), gravity=1.0) == TimeLimit(CartPole(force=4.0, gravity=1.0), 500)


def test_register_adds_a_name(monkeypatch):
    monkeypatch.setattr("lehr.envs.registry._registry", {})
    assert register("Mine-v0", max_steps=7)(CartPole) is CartPole
    assert names() == ["Mine-v0"]
    assert make("Mine-v0") == TimeLimit(CartPole(), 7)
    sentence = r"An environment named 'Mine-v0' is already registered \(.*:CartPole\): choose another name"
    with pytest.raises(InputError, match=sentence):
        register("Mine-v0")(Acrobot)


def test_the_cell_of_a_notebook_may_run_twice(monkeypatch):
    monkeypatch.setattr("lehr.envs.registry._registry", {})
    cell = "@register('Mine-v0', max_steps=LIMIT)\nclass Mine(CartPole):\n    pass"
    for limit in (7, 8):
        names = {"register": register, "CartPole": CartPole, "__name__": "__main__", "LIMIT": limit}
        exec(cell, names)
    assert make("Mine-v0") == TimeLimit(names["Mine"](), 8)
    assert registry.full_name("Mine-v0") == "Mine-v0"
    assert not registry.is_found_elsewhere("Mine-v0")


@pytest.mark.parametrize(
    ("env", "parameters", "sentence"),
    [
        ("cartpole-v1", {}, "no environment named 'cartpole-v1' .did you mean 'CartPole-v1'"),
        ("Nothing", {}, "no environment named 'Nothing': choose one of Acrobot-v1, "),
        (
            "Nothing",
            {},
            r"MountainCarContinuous-v0, Pendulum-v1, Swarm-v0, one from another suite with its prefix, as in gym:",
        ),
        ("Ant-v5", {}, "no environment named 'Ant-v5' .did you mean 'gym:Ant-v5'"),
        ("ALE/Pong-v5", {}, "no environment named 'ALE/Pong-v5' .did you mean 'gym:ALE/Pong-v5'"),
        ("SomethingElse-v3", {}, "no environment named 'SomethingElse-v3' .did you mean 'gym:SomethingElse-v3'"),
        ("tests.small:Maze-v0", {}, "The module 'tests.small' registers no environment 'Maze-v0'; correct the name"),
        ("no_such_module:Maze-v0", {}, "'no_such_module:Maze-v0' could not be imported"),
        (
            "CartPole",
            {},
            r"'CartPole' \(did you mean 'CartPole-v1'\?\): 'lehr list envs' and 'lehr list suites' show the",
        ),
        ("", {}, "no environment named '': choose one of Acrobot-v1, "),
        ("a", {}, "no environment named 'a': choose one of Acrobot-v1, "),
        ("no/my_maze.py", {}, "There is no file 'no/my_maze.py' for the environment 'no/my_maze.py'; correct the path"),
        ("MountainCarContinous-v0", {}, "did you mean 'MountainCarContinuous-v0'"),
        ("no_such_module:Env", {}, "could not be imported"),
        ("lehr.envs.builtin.classic:Cart", {}, "could not be imported"),
        (
            "CartPole-v1",
            {"gravty": 1},
            "CartPole-v1 cannot be created with these parameters .*'gravty'.*; it takes: gravity, cart_mass",
        ),
        (
            CartPole(),
            {"gravity": 1},
            "Got an environment object together with the parameters gravity: pass them to its class, or",
        ),
        (3, {}, "3 is not an environment: it must have the methods reset and step"),
    ],
)
def test_errors_say_what_is_wrong(env, parameters, sentence):
    with pytest.raises(InputError, match=sentence):
        make(env, **parameters)


def test_a_name_of_gymnasium_is_suggested_also_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr("lehr.envs.registry._names_in_gymnasium", list)
    monkeypatch.setattr("lehr.envs.registry._in_a_suite", lambda name: [])
    monkeypatch.setattr("lehr.envs.registry.listed", lambda prefix: ["ant", "inverted_pendulum"])
    for name, brax in (
        ("Ant-v5", " or 'brax:ant'"),
        ("InvertedPendulum-v5", " or 'brax:inverted_pendulum'"),
        ("FrozenLake-v1", ""),
    ):
        with pytest.raises(InputError, match=rf"named '{name}' \(did you mean 'gym:{name}'{brax}\?\)"):
            make(name)
    with pytest.raises(InputError, match="did you mean 'MountainCarContinuous-v0'"):
        make("MountainCarContinous-v0")


@pytest.mark.parametrize("prefix", ADAPTERS)
def test_the_names_of_a_suite_are_found_without_importing_it(prefix):
    if importlib.util.find_spec(ADAPTERS[prefix][1]) is None:
        assert listed(prefix) == []
    elif prefix not in ("envpool", "jaxdem"):  # whose files do not list them
        names = adapter(prefix).names()
        if prefix == "gym":  # where other tests have registered their own
            entries = {
                name: str(spec.entry_point) for name, spec in importlib.import_module("gymnasium").registry.items()
            }
            names = [name for name in names if name in listed("gym") or entries[name].startswith("gymnasium.")]
        assert listed(prefix) == names


def test_what_was_registered_with_a_suite_is_suggested():
    gymnasium = pytest.importorskip("gymnasium")
    gymnasium.register("OwnMaze-v7", entry_point="mazes:OwnMaze")
    try:
        with pytest.raises(InputError, match="gym:OwnMaze-v7"):
            make("OwnMaze-v7")
    finally:
        del gymnasium.registry["OwnMaze-v7"]


def test_a_name_that_is_unknown_everywhere_imports_no_slow_suite():
    ask = (
        "import sys, lehr\n"
        "for name in ('nothing like it', 'ant'):\n"
        "    try: lehr.envs.make(name)\n"
        "    except lehr.InputError as error: print(error)\n"
        "print({'brax', 'gymnax', 'jumanji', 'mujoco_playground', 'pgx'} & set(sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[0].startswith("There is no environment named 'nothing like it': choose one of")
    assert ("did you mean 'brax:ant'?" in told[1]) == (importlib.util.find_spec("brax") is not None)
    assert told[2] == "set()"


@pytest.mark.parametrize("name", names())
def test_types_hold_under_double_precision_and_strict_rank_promotion(name):
    env = make(name)
    shape = () if env.num_agents == 1 else (env.num_agents,)
    assert not isinstance(env.observation_space, Dict)
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        state, obs = jax.eval_shape(env.reset, jax.random.key(0))
        action = jnp.zeros((*shape, *env.action_space.shape), env.action_space.dtype)
        next_state, timestep = jax.eval_shape(env.step, jax.random.key(0), state, action)
    assert obs.dtype == timestep.obs.dtype == timestep.reward.dtype == jnp.float32
    assert timestep.terminated.dtype == timestep.truncated.dtype == bool
    assert timestep.reward.shape == timestep.terminated.shape == timestep.truncated.shape == shape
    assert jax.tree.map(lambda leaf: leaf.dtype, state) == jax.tree.map(lambda leaf: leaf.dtype, next_state)


def test_what_is_of_lehrs_kind_is_not_adapted_whatever_else_it_is():
    gymnasium = pytest.importorskip("gymnasium")

    class Both(Environment, gymnasium.Env):
        def reset(self, key):
            raise AssertionError

        def step(self, key, state, action):
            raise AssertionError

    env = Both()
    assert make(env) is env


# Installed packages ---------------------------------------------------------------------------------------------------

OFFERS = """
from lehr.envs import Environment, make, register
from lehr.envs.builtin.classic import CartPole

def heavy(gravity: float = 20.0) -> Environment:
    return make("CartPole-v1", gravity=gravity)

class Light(CartPole):
    pass

register("Registers-Itself-v0", max_steps=7)(Light)
number = 3
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package that offers environments, as pip would have installed it."""
    folder = tmp_path / "offers_environments-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: offers-environments\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[lehr.environments]\n"
        "HeavyCartPole-v0 = offers_environments:heavy\n"
        "LightCartPole-v0 = offers_environments:Light\n"
        "Registers-Itself-v0 = offers_environments:Light\n"
        "CartPole-v1 = offers_environments:number\n"
        "Number-v0 = offers_environments:number\n"
        "Gone-v0 = offers_environments:gone\n"
    )
    (tmp_path / "offers_environments.py").write_text(OFFERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("lehr.envs.registry._registry", dict(registry._registry))
    invalidate_caches()
    yield "offers_environments"
    sys.modules.pop("offers_environments", None)


def test_an_installed_package_offers_environments_by_name(installed):
    assert "HeavyCartPole-v0" not in names()
    assert make("CartPole-v1") == TimeLimit(CartPole(), 500), "a built-in name stays what it is"
    assert installed not in sys.modules, "nothing is imported until it is asked for"
    assert make("HeavyCartPole-v0") == TimeLimit(CartPole(gravity=20.0), 500)
    assert make("HeavyCartPole-v0", gravity=1.0) == TimeLimit(CartPole(gravity=1.0), 500)
    light = sys.modules[installed].Light
    assert make("LightCartPole-v0", gravity=1.0) == light(gravity=1.0)
    assert make("Registers-Itself-v0") == TimeLimit(light(), 7)


def test_a_run_may_name_what_an_installed_package_offers(installed):
    """It is no stranger's: whoever installed the package asked for it."""
    assert registry.own_code("HeavyCartPole-v0") is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("HeavyCartPole", "no environment named 'HeavyCartPole' .did you mean 'HeavyCartPole-v0'"),
        ("Nothing", "choose one of Acrobot-v1, .*, HeavyCartPole-v0, "),
        ("Number-v0", "'Number-v0' is 3, which does not create environments"),
        (
            "Gone-v0",
            "'Gone-v0' is offered by the package offers-environments, but 'offers_environments:gone' could not",
        ),
    ],
)
def test_mistakes_with_what_a_package_offers(installed, name, sentence):
    with pytest.raises(InputError, match=sentence):
        make(name)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("::", "The environment '::' is not of the form 'module:Name'"),
        (".os:path", "The environment '.os:path' is not of the form 'module:Name'"),
        ("math:pi", "'math:pi' is 3.14159.*, which does not create environments"),
        ("builtins:int", "'builtins:int' is <class 'int'>, which does not create environments"),
        ("x" * 10_000, "There is no environment named 'x{38}…x{38}': choose one of"),
    ],
)
def test_names_that_are_no_environments_are_one_sentence(name, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        make(name)
    assert len(str(caught.value)) < 1000
