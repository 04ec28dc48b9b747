import re
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.envs import AutoReset, Environment, EpisodeStatistics, TimeLimit, check_env, make, names
from lehr.errors import InputError
from lehr.spaces import Box, Dict, Discrete
from lehr.training.api import evaluate
from lehr.training.plan import make_plan
from lehr.types import Timestep


@pytest.mark.parametrize("name", [n for n in names() if not n.startswith("Probe")] + ["Probe-TwoStep-v0"])
def test_built_in_environments_pass(name):
    assert check_env(make(name), num_steps=50) == []


def test_wrapped_environments_pass():
    assert check_env(AutoReset(EpisodeStatistics(make("CartPole-v1"))), num_steps=50) == []


PLACE_AND_PARITY, LEFT_OR_RIGHT = Dict({"place": Box(-3, 3, (1,)), "parity": Discrete(2)}), Discrete(2)


@dataclass(frozen=True)
class Walk(Environment):
    """A correct random walk on [-3, 3] with one part to be replaced by a `fault`."""

    fault: dict = field(default_factory=dict, hash=False)
    observation_space: Any = PLACE_AND_PARITY
    action_space: Any = LEFT_OR_RIGHT
    num_agents: int = 1

    def observe(self, place):
        return {"place": place[None], "parity": (place % 2).astype(jnp.int32)}

    def reset(self, key):
        place = self.fault.get("start", lambda key: jnp.float32(0))(key)
        return place, self.fault.get("observe", self.observe)(place)

    def step(self, key, state, action):
        place = self.fault.get("move", lambda s, a: jnp.clip(s + 2.0 * a - 1, -3, 3))(state, action)
        timestep = Timestep(
            self.fault.get("observe", self.observe)(place),
            self.fault.get("reward", lambda s: s)(place),
            self.fault.get("terminated", lambda s: s >= 3)(place),
            jnp.bool_(False),
            self.fault.get("info", lambda s: {})(place),
        )
        return place, timestep


def observe_wrong(**changes):
    return lambda place: {**Walk().observe(place), **{name: change(place) for name, change in changes.items()}}


counter = iter(range(10**6))


def test_the_walk_itself_passes():
    assert check_env(Walk(), num_steps=50) == []


FAULTS = [
    ({"observe": lambda s: {"place": s[None]}}, r"has the entries \['place'\], but observation_space has"),
    ({"observe": lambda s: s}, "has no entries, but"),
    ({"observe": observe_wrong(place=lambda s: s)}, r"entry 'place', is float32\[\], but must be float32\[1\]"),
    ({"observe": observe_wrong(place=lambda s: s[None].astype(jnp.int32))}, r"is int32\[1\], but must be float32\[1\]"),
    (
        {"observe": observe_wrong(place=lambda s: s[None] + 9)},
        "it contains 9.0, but the bounds are -3.0 and 3.0; widen",
    ),
    ({"move": lambda s, a: s + 2.0 * a - 1}, "The observation of step, entry 'place', is outside of observation_space"),
    ({"observe": observe_wrong(place=lambda s: s[None] / 0 * 0)}, "it contains nan, but the bounds are"),
    (
        {"observe": observe_wrong(parity=lambda s: jnp.int32(2))},
        "entry 'parity', is outside.*it contains 2, but the bounds are",
    ),
    ({"reward": lambda s: s.astype(jnp.int32)}, r"reward of step is int32\[\], but must be float32\[\]"),
    ({"reward": lambda s: s[None]}, r"reward of step is float32\[1\]"),
    ({"reward": lambda s: (s, s)}, r"reward of step is a tuple, but must be an array of float32\[\]\."),
    ({"reward": lambda s: jnp.where(s < -2, jnp.inf, s)}, "rewards are not finite"),
    ({"terminated": lambda s: s.astype(jnp.float32)}, r"terminated of step is float32\[\], but must be bool\[\]"),
    ({"info": lambda s: None}, "info of step is a NoneType"),
    ({"info": lambda s: {f"call {next(counter)}": s}}, r"The timestep.*float32\[\] after one step and absent after"),
    ({"start": lambda key: "here"}, r"reset\(key\) raised"),
    ({"start": lambda key: jnp.float32(next(counter) % 3)}, "different results for the same keys"),
    ({"reward": lambda s: s + np.float32(next(counter))}, "different results for the same keys"),
    ({"move": lambda s, a: s if s > 2 else s + 0.0 * a}, "TracerBoolConversionError.* Use jnp.where"),
    ({"move": lambda s, a: jnp.float32(np.clip(s, -3, 3)) * float(s)}, r"step\(key, state, action\) raised.*Use jnp"),
    ({"move": lambda s, a: 1 / 0}, "raised ZeroDivisionError: division by zero"),
]


@pytest.mark.parametrize(("fault", "sentence"), FAULTS)
def test_each_fault_is_named(fault, sentence):
    problems = check_env(Walk(fault), num_steps=50)
    assert any(re.search(sentence, problem) for problem in problems), problems


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (object(), "observation_space is None, but must be"),
        (object(), "num_agents is None, but must be"),
        (object(), "The method step is missing"),
        (
            Walk(action_space=Box(0, 1, (), np.int32)),
            r"^Actions are in Box.* a Box of whole numbers, but .* MultiDiscrete",
        ),
        (Walk(action_space=gymnasium.spaces.Discrete(2)), "convert it with lehr.spaces.from_gymnasium"),
        (Walk(num_agents=0), "num_agents is 0"),
        (Walk(num_agents=2), r"float32\[1\], but must be float32\[2, 1\]"),
    ],
)
def test_attributes_are_named(env, sentence):
    assert any(re.search(sentence, problem) for problem in check_env(env))


def test_unhashable_environments_are_named():
    class Unhashable(Walk):
        __hash__ = None

    assert "not hashable" in check_env(Unhashable())[0]


def test_a_state_that_changes_its_dtype_is_named():
    class Promoting(Walk):
        def reset(self, key):
            return jnp.int32(0), self.observe(jnp.float32(0))

    assert check_env(Promoting()) == [
        "The state is int32[] after reset and float32[] after step, but structure, shapes and dtypes must never "
        "change: make them the same."
    ]


def test_wrong_returns_are_named():
    class Gym(Walk):
        def step(self, key, state, action):
            return (*super().step(key, state, action)[1],)

    class Bare(Walk):
        def reset(self, key):
            return super().reset(key)[1]

    assert check_env(Gym()) == ["step returned a tuple, but must return the pair (state, lehr.types.Timestep)."]
    assert check_env(Bare()) == ["reset returned a dict, but must return the pair (state, observation)."]


def test_agents_that_come_back_are_named():
    @dataclass(frozen=True)
    class Blink(Environment):
        num_agents: int = 2
        observation_space = Box(0, np.inf, (1,))
        action_space = Discrete(2)

        def reset(self, key):
            return jnp.int32(0), jnp.zeros((2, 1))

        def step(self, key, state, action):
            done = jnp.array([state % 2 == 0, False])
            return state + 1, Timestep(jnp.zeros((2, 1)), jnp.zeros(2), done, jnp.zeros(2, bool), {})

    assert [
        "An agent that was done became active again while other agents were not done" in problem
        for problem in check_env(Blink())
    ] == [True]


def test_an_environment_that_was_changed_after_a_run_is_refused():
    inner = make("CartPole-v1")

    class Mutable(Environment):
        observation_space, action_space = inner.observation_space, inner.action_space

        def __init__(self, goal):
            self.goal, self.table, self._calls, self.resets = goal, None, 0, 0
            self.sizes = {"width": 3, "start": np.zeros(2)}

        def reset(self, key):
            self.resets += 1  # counts traces
            return inner.reset(key)

        def step(self, key, state, action):
            return inner.step(key, state, action)

    env = Mutable(1.0)
    sizes = {"num_envs": 2, "horizon": 4, "minibatches": 1}
    make_plan("ppo", sizes, env, abstract=True)
    env.goal, env.table, env._calls, env.late = float(1), [1], 5, "new"  # an equal value, and what is found when needed
    make_plan("ppo", sizes, env, abstract=True)
    env.goal = 2.0
    with pytest.raises(
        InputError, match=r"Mutable was used with goal=1\.0, which is 2\.0 now, but .* create a new env"
    ):
        make_plan("ppo", sizes, TimeLimit(env, 5), abstract=True)
    other = Mutable(2.0)
    program = make_plan("ppo", sizes, other, abstract=True).program
    assert program.env.env is other
    assert make_plan("ppo", sizes, Mutable(2.0), abstract=True).program != program
    other.sizes["start"][1] = 7.0
    with pytest.raises(InputError, match=r"with sizes=.*array\(\[0\., 0\.\]\).*, which is .*array\(\[0\., 7\.\]\)"):
        make_plan("ppo", sizes, other, abstract=True)
    plan = make_plan("ppo", sizes, third := Mutable(3.0))
    policy = plan.policy(plan.state)
    assert evaluate(policy, third, episodes=2).returns.shape == (2,)
    assert evaluate(policy, third, episodes=3).returns.shape == (3,)  # tracing it counted resets
    third.goal = 4.0
    with pytest.raises(InputError, match=r"used with goal=3\.0, which is 4\.0 now"):
        evaluate(policy, third, episodes=2)
