"""JaxDEM's adapter against a miniature with JaxDEM's protocol, and against JaxDEM itself where it is installed.

To run the second part: pip install "jaxdem @ git+https://github.com/cdelv/JaxDEM" distrax.
"""

import functools
import importlib.machinery
import importlib.util
import sys
import types
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.envs import ActionRepeat, check_env
from lehr.envs.suites import jaxdem
from lehr.errors import InputError
from lehr.spaces import Box

KEY = jax.random.key(0)
REAL = importlib.util.find_spec("jaxdem") is not None


@jax.tree_util.register_dataclass
@dataclass
class Particles:
    """What JaxDEM calls a state: positions and velocities `[..., N, 1]`."""

    pos: Any
    vel: Any

    @property
    def N(self):
        return self.pos.shape[-2]

    @property
    def batch_size(self):
        return 1 if self.pos.ndim == 2 else self.pos.shape[0]


@jax.tree_util.register_dataclass
@dataclass
class Clock:
    """What JaxDEM calls a system."""

    step_count: Any


@jax.tree_util.register_dataclass
@dataclass
class Sliders:
    """N beads on a wire, pushed by a force each; the episode ends when one leaves [-2, 2], or after its time.

    As in JaxDEM the methods are static and compiled, take the environment first and write into it, `env_params`
    included; a reward is a difference of potentials that a step has noted in `env_params`.
    """

    state: Particles
    system: Clock
    env_params: dict

    _registry: ClassVar[dict] = {}

    @classmethod
    def Create(cls, N: int = 3, max_steps: int = 1000, dt: float = 0.1):
        zeros = jnp.zeros((N, 1))
        env_params = {"max_steps": jnp.asarray(max_steps), "dt": jnp.asarray(dt), "before": zeros, "now": zeros}
        return cls(Particles(zeros, zeros), Clock(jnp.asarray(0)), env_params)

    @staticmethod
    @jax.jit
    def reset(env, key):
        env.state.pos = jax.random.uniform(key, env.state.pos.shape, minval=-1.0)
        env.state.vel = jnp.zeros_like(env.state.pos)
        env.system = Clock(jnp.asarray(0))
        env.env_params["before"] = env.env_params["now"] = jnp.abs(env.state.pos)
        return env

    @staticmethod
    @functools.partial(jax.jit, inline=True)
    def step(env, action):
        env.env_params["before"] = env.env_params["now"]
        env.state.vel = env.state.vel + env.env_params["dt"] * action.reshape(env.max_num_agents, 1)
        env.state.pos = env.state.pos + env.env_params["dt"] * env.state.vel
        env.system.step_count = env.system.step_count + 1
        env.env_params["now"] = jnp.abs(env.state.pos)
        return env

    @staticmethod
    @jax.jit
    def observation(env):
        return jnp.concatenate([env.state.pos, env.state.vel], axis=-1)

    @staticmethod
    @jax.jit
    def reward(env):
        return (env.env_params["before"] - env.env_params["now"])[..., 0]

    @staticmethod
    @jax.jit
    def done(env):
        late = env.system.step_count > env.env_params["max_steps"]
        return late | jnp.any(jnp.abs(env.state.pos) > 2)

    @staticmethod
    @jax.jit
    def info(env):
        return {"distance": env.env_params["now"][..., 0]}

    @property
    def num_envs(self):
        return self.state.batch_size

    @property
    def max_num_agents(self):
        return self.state.N

    @property
    def action_space_size(self):
        return 1

    @property
    def observation_space_size(self):
        return 2


@pytest.fixture
def installed(monkeypatch):
    """A package `jaxdem` with the miniature as its only environment."""
    base = type("Environment", (), {"_registry": {"": object, "sliders": Sliders}})
    for name in ("jaxdem", "jaxdem.rl", "jaxdem.rl.environments"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["jaxdem.rl.environments"].Environment = base


def assert_follows(env, theirs, max_steps=6):
    """Reset and step both from the same key with the same actions, until the time is over."""
    state, obs = jax.jit(env.reset)(KEY)
    theirs = theirs.reset(theirs, KEY)
    step = jax.jit(env.step)
    one = (lambda x: x[0]) if env.num_agents == 1 else (lambda x: x)
    for i in range(max_steps + 1):
        np.testing.assert_allclose(obs, one(theirs.observation(theirs)), rtol=1e-5, atol=1e-6)
        action = jax.random.normal(jax.random.key(i), (env.num_agents, *env.action_space.shape))
        state, timestep = step(KEY, state, one(action))
        theirs, obs = theirs.step(theirs, action), timestep.obs
        np.testing.assert_allclose(timestep.reward, one(theirs.reward(theirs)), rtol=1e-4, atol=1e-6)
        assert not np.any(timestep.terminated)
        assert np.all(timestep.truncated) == np.any(timestep.truncated) == bool(theirs.done(theirs)) == (i == max_steps)


@pytest.mark.parametrize("agents", [1, 3])
def test_the_same_keys_and_actions_give_what_jaxdem_gives(agents):
    theirs = Sliders.Create(agents, max_steps=6)
    env = jaxdem.adapt(theirs)
    assert (env.num_agents, env.observation_space, env.action_space) == (
        agents,
        Box(-np.inf, np.inf, (2,)),
        Box(-np.inf, np.inf, (1,)),
    )
    assert_follows(env, theirs)


@pytest.mark.parametrize("agents", [1, 3])
def test_keeps_to_the_protocol(agents):
    assert check_env(jaxdem.adapt(Sliders.Create(agents, max_steps=20)), num_steps=50) == []


def test_an_end_that_is_not_the_time_limit_terminates():
    env = jaxdem.adapt(Sliders.Create(2, max_steps=3, dt=1.0))
    outward = jnp.array([[0.0], [5.0]])
    state, _ = env.reset(KEY)
    _, timestep = env.step(KEY, state, outward)
    assert timestep.terminated.tolist() == [True, True]
    assert timestep.truncated.tolist() == [False, False]
    for _ in range(3):
        state, timestep = env.step(KEY, state, jnp.zeros((2, 1)))
    assert not np.any(timestep.terminated | timestep.truncated)
    _, timestep = env.step(KEY, state, outward)  # both the limit and an end
    assert timestep.terminated.tolist() == [True, True]
    assert timestep.truncated.tolist() == [False, False]


def test_nothing_that_is_given_is_written_into():
    theirs = Sliders.Create()
    # Without the compilation, which copies its arguments, the methods would write into them.
    reset, step = Sliders.reset.__wrapped__, Sliders.step.__wrapped__
    careless = type("Careless", (Sliders,), {"reset": staticmethod(reset), "step": staticmethod(step)})
    careless = jax.tree_util.register_dataclass(dataclass(careless))
    env = jaxdem.adapt(careless(theirs.state, theirs.system, theirs.env_params))
    before = jax.tree.map(np.asarray, theirs)
    state, _ = env.reset(KEY)
    started = jax.tree.map(np.asarray, state)
    env.step(KEY, state, jnp.ones((3, 1)))
    jax.tree.map(np.testing.assert_array_equal, (before, started), (theirs, state))


def test_rewards_of_repeated_actions_are_summed():
    env = jaxdem.adapt(Sliders.Create(1))
    action = jnp.ones(1)
    state, _ = env.reset(KEY)
    _, repeated = ActionRepeat(env, 3).step(KEY, state, action)
    total = 0.0
    for _ in range(3):
        state, timestep = env.step(KEY, state, action)
        total += timestep.reward
    np.testing.assert_allclose(repeated.reward, total, rtol=1e-6)


def test_made_by_any_spelling_and_equal_for_equal_parameters(installed):
    assert jaxdem.names() == ["Sliders"]
    env = jaxdem.make("Sliders", N=2, max_action=0.5)
    assert env == lehr.envs.make("jaxdem:sliders", N=2, max_action=0.5)
    assert hash(env) == hash(jaxdem.make("Sli-ders", N=2, max_action=0.5))
    assert env != jaxdem.make("Sliders", N=3, max_action=0.5)
    assert env != jaxdem.make("Sliders", N=2)
    assert env.action_space == Box(-0.5, 0.5, (1,))
    theirs = Sliders.Create()
    assert jaxdem.adapt(theirs) == jaxdem.adapt(theirs) != jaxdem.adapt(Sliders.Create())


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: jaxdem.make("Slider"), "JaxDEM has no environment 'Slider'; did you mean 'jaxdem:Sliders'"),
        (lambda: jaxdem.make("Sliders", max_step=3), "no parameter 'max_step'; did you mean 'max_steps'"),
        (lambda: jaxdem.make("Sliders", N={}), "jaxdem:Sliders cannot be created with N="),
        (lambda: jaxdem.make("Sliders", max_action=0), "max_action is 0; it must be a finite number above 0"),
        (
            lambda: jaxdem.adapt(jax.tree.map(lambda x: jnp.stack([x] * 4), Sliders.Create())),
            "is a batch of 4: give the environment before vectorise_env",
        ),
    ],
)
def test_errors_say_what_is_wrong(installed, call, sentence):
    with pytest.raises(InputError, match=sentence):
        call()


@pytest.mark.skipif(REAL, reason="JaxDEM is installed")
def test_a_missing_package_is_named_with_its_address():
    with pytest.raises(InputError, match=r"needs the package jaxdem.*github.com/cdelv/JaxDEM"):
        jaxdem.make("MultiNavigator")


@pytest.mark.slow
def test_trains(installed, tmp_path):
    result = lehr.train(
        "ppo",
        env="jaxdem:Sliders",
        env_parameters={"N": 2, "max_steps": 20, "max_action": 1.0},
        total_steps=512,
        num_envs=4,
        horizon=32,
        epochs=1,
        minibatches=2,
        evaluate_episodes=0,
        progress=False,
        run_dir=tmp_path / "run",
    )
    assert np.isfinite(result.final["episode/return"])
    assert result.final["episode/length"] == 21


@pytest.mark.skipif(not REAL, reason="JaxDEM is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "parameters"), [("SingleNavigator", {}), ("multi_navigator", {"N": 3})])
def test_the_real_one_is_followed_and_keeps_to_the_protocol(name, parameters):
    env = lehr.envs.make(f"jaxdem:{name}", max_steps=6, **parameters)
    assert env == lehr.envs.make(env.template.env)
    assert env.truncation_gap == 7
    assert check_env(env, num_steps=20) == []
    with jax.numpy_rank_promotion("allow"):
        assert_follows(env, env.template.env)
