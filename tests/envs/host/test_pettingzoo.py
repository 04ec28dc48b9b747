"""PettingZoo's environments: what a batch answers, against the parallel API itself; and short runs on them."""

import logging
import sys
from types import ModuleType
from typing import ClassVar

import jax
import numpy as np
import pytest

import lehr
from lehr import spaces
from lehr.envs import check_env, make
from lehr.envs.host import pettingzoo as adapter
from lehr.envs.host.base import EnvironmentFailed, ask, next_seeds
from lehr.errors import InputError
from tests.small import SMALL

gymnasium = pytest.importorskip("gymnasium")
try:
    from pettingzoo import ParallelEnv
except ImportError:
    ParallelEnv = object

SEEDS = np.array([3, 4_000_000_000, 5], np.uint32)


class Crowd(ParallelEnv):
    """Three agents that drift at random, pushed by their actions, and see where they are and who is still there.

    One that drifts too far is terminated, and all that are left are truncated after `max_cycles` steps.
    """

    metadata: ClassVar = {"name": "crowd"}
    possible_agents = ("ann", "bob", "eve")

    def __init__(self, max_cycles=9, discrete=False, render_mode=None):
        self.max_cycles, self.discrete, self.render_mode = max_cycles, discrete, render_mode
        self.agents = []

    def __str__(self):
        return "crowd"

    @property
    def unwrapped(self):
        return self

    def observation_space(self, agent):
        return gymnasium.spaces.Box(-np.inf, np.inf, (5,), np.float64)

    def action_space(self, agent):
        if self.discrete:
            return gymnasium.spaces.Discrete(3, start=1)
        return gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def _obs(self):
        there = [float(agent in self.agents) for agent in self.possible_agents]
        return {agent: np.concatenate([self.place[agent], there]) for agent in self.agents}

    def reset(self, seed=None, options=None):
        self.rng, self.count = np.random.default_rng(seed), 0
        self.agents = list(self.possible_agents)
        self.place = {agent: self.rng.normal(size=2) for agent in self.agents}
        return self._obs(), {agent: {} for agent in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.count += 1
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action)
            push = float(action) - 2 if self.discrete else action
            self.place[agent] = self.place[agent] + 0.8 * push + 0.3 * self.rng.normal(size=2)
        obs = self._obs()
        reward = {agent: np.exp(-np.abs(self.place[agent]).sum()) for agent in self.agents}
        terminated = {agent: bool(np.abs(self.place[agent]).max() > 2.5) for agent in self.agents}
        truncated = dict.fromkeys(self.agents, self.count >= self.max_cycles)
        infos = {agent: {} for agent in self.agents}
        self.agents = [agent for agent in self.agents if not (terminated[agent] or truncated[agent])]
        return obs, reward, terminated, truncated, infos

    def render(self):
        return np.full((4, 4, 3), 7, np.uint8) if self.render_mode == "rgb_array" else None

    def close(self):
        pass


class Brief(Crowd):
    """Reward 1 for ever: `eve` sees 1 and is terminated after one step, the others see 0 and are cut after 3.

    So 0 is worth 1 / (1 − γ), and 1 is worth 1. While `eve` waits she sees zeros, which must not be learned from.
    """

    def __init__(self):
        super().__init__(max_cycles=3, discrete=True)

    def observation_space(self, agent):
        return gymnasium.spaces.Box(0, 1, (1,), np.float32)

    def reset(self, seed=None, options=None):
        self.count, self.agents = 0, list(self.possible_agents)
        return {agent: np.float32([agent == "eve"]) for agent in self.agents}, {}

    def step(self, actions):
        self.count += 1
        acted = self.agents
        terminated = {agent: agent == "eve" for agent in acted}
        truncated = {agent: agent != "eve" and self.count == 3 for agent in acted}
        self.agents = [agent for agent in acted if not (terminated[agent] or truncated[agent])]
        obs = {agent: np.float32([agent == "eve"]) for agent in acted}
        return obs, dict.fromkeys(acted, 1.0), terminated, truncated, {}


@pytest.fixture
def module(monkeypatch):
    """`module(parallel_env)`: the name of an environment whose module has this function."""

    def put(parallel_env, name="a_crowd_v0"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        if parallel_env is not None:
            monkeypatch.setattr(sys.modules[name], "parallel_env", parallel_env, raising=False)
        return f"pettingzoo:{name}"

    return put


def actions(env, count, size=3):
    rng, shape = np.random.default_rng(0), (count, size * env.num_agents)
    if isinstance(env.action_space, spaces.Discrete):
        return rng.integers(env.action_space.n, size=shape, dtype=np.int32) + env.action_space.start
    return rng.uniform(env.action_space.low, env.action_space.high, (*shape, *env.action_space.shape)).astype(
        np.float32
    )


def against_the_api(env, singles, given):
    """Step a batch, and by hand the environments themselves; how often agents acted, waited, ended and were cut."""
    batch, agents = env.start(3), env.agents
    seeds, size = SEEDS.copy(), env.num_agents
    width = env.observation_space.shape
    found = batch.reset(SEEDS).reshape(3, size, *width)
    for e, single in enumerate(singles):
        first, _ = single.reset(seed=int(seeds[e]))
        for a, agent in enumerate(agents):
            np.testing.assert_array_equal(found[e, a], first[agent])
    counts = dict.fromkeys(("acted", "waited", "terminated", "truncated"), 0)
    for action in given:
        step = batch.step(action)
        rows = action.reshape(3, size, *action.shape[1:])
        obs, final_obs = (np.asarray(part).reshape(3, size, *width) for part in (step.obs, step.final_obs))
        reward, terminated, truncated, valid = (part.reshape(3, size) for part in step[2:])
        for e, single in enumerate(singles):
            there = list(single.agents)
            taken = {agent: rows[e, a] for a, agent in enumerate(agents)}
            answer = single.step({agent: taken[agent] for agent in there})
            left = list(single.agents)
            begun = None
            if not left:
                seeds[e] = next_seeds(seeds[e : e + 1])[0]
                begun, _ = single.reset(seed=int(seeds[e]))
            for a, agent in enumerate(agents):
                assert valid[e, a] == (agent in there)
                if agent in there:
                    np.testing.assert_array_equal(final_obs[e, a], answer[0][agent])
                    assert reward[e, a] == answer[1][agent]
                    assert (terminated[e, a], truncated[e, a]) == (answer[2][agent], answer[3][agent])
                    counts["acted"] += 1
                    counts["terminated"] += terminated[e, a]
                    counts["truncated"] += truncated[e, a]
                else:
                    assert (reward[e, a], terminated[e, a], truncated[e, a]) == (0, True, False)
                    np.testing.assert_array_equal(final_obs[e, a], 0)
                    counts["waited"] += 1
                following = begun if begun is not None else answer[0] if agent in left else {}
                np.testing.assert_array_equal(obs[e, a], following.get(agent, 0))
    batch.close()
    return counts


# Conversion ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discrete", [False, True], ids=["box", "discrete"])
def test_a_batch_answers_as_single_environments_do(discrete, module):
    env = make(module(Crowd), discrete=discrete)
    assert (env.num_agents, env.masks) == (3, True)
    assert env.observation_space == spaces.Box(-np.inf, np.inf, (5,))
    assert env.action_space == (spaces.Discrete(3, start=1) if discrete else spaces.Box(-1, 1, (2,)))
    counts = against_the_api(env, [Crowd(discrete=discrete) for _ in SEEDS], actions(env, 60))
    assert min(counts.values()) > 20


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "parameters", "least"),
    [
        ("mpe2.simple_spread_v3", {"max_cycles": 7}, {"truncated": 40}),
        ("mpe2.simple_spread_v3", {"max_cycles": 7, "continuous_actions": True}, {"truncated": 40}),
        # Archers and knights die one by one.
        ("butterfly.knights_archers_zombies_v11", {"max_cycles": 400}, {"waited": 5, "terminated": 3}),
    ],
    ids=["discrete", "box", "dying"],
)
def test_a_batch_answers_as_the_environments_of_pettingzoo_do(name, parameters, least):
    pytest.importorskip("pygame")
    pytest.importorskip("pettingzoo")
    module = pytest.importorskip(name if name.startswith("mpe2") else f"pettingzoo.{name}")
    env = make(f"pettingzoo:{name}", **parameters)
    given = actions(env, 220 if "butterfly" in name else 40)
    counts = against_the_api(env, [module.parallel_env(**parameters) for _ in SEEDS], given)
    assert all(counts[what] > number for what, number in least.items()), counts


def test_environments_are_brought_back_by_their_actions(module):
    env = make(module(Crowd))
    one, other = env.start(3), env.start(3)
    one.reset(SEEDS)
    state = one.state()
    assert state["actions"].shape == (10, 9, 2)
    waited = False
    for count, action in enumerate(actions(env, 40)):
        last = one.step(action)
        if count % 6 == 5:
            np.testing.assert_array_equal(other.restore(one.state()), last.obs)
            waited |= any((~world.alive).any() for world in other.worlds)
    assert waited
    other.restore(one.state())
    for action in actions(env, 20):
        for found, expected in zip(other.step(action), one.step(action), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_an_episode_that_is_too_long_is_not_brought_back(module):
    class Endless(Crowd):
        def step(self, actions):
            self.count, self.place = 0, {agent: np.zeros(2) for agent in self.agents}
            return super().step(actions)

    env = make(module(Endless))
    batch = env.start(1)
    batch.reset(SEEDS[:1])
    for action in 0 * actions(env, 11, size=1):
        batch.step(action)
    with pytest.raises(InputError, match="an episode is longer than the 10 actions that are stored"):
        env.start(1).restore(batch.state())


def test_environments_keep_to_the_protocol(module):
    assert check_env(make(module(Crowd)), num_envs=2, num_steps=40) == []


def test_pictures_are_drawn(module):
    env = make(module(Crowd))
    assert (env.start(1, render=True).render() == 7).all()
    with pytest.raises(InputError, match="This environment cannot be rendered: create it with render_mode='rgb_array'"):
        env.start(1).render()


def test_observations_may_be_dicts_and_agents_may_come_late(module):
    class Late(Crowd):
        """`eve` comes after the first step; observations are a number and a vector."""

        def observation_space(self, agent):
            box = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
            return gymnasium.spaces.Dict({"turn": gymnasium.spaces.Discrete(4), "place": box})

        def _seen(self):
            return {agent: {"place": np.ones(2, np.float32), "turn": self.count} for agent in self.agents}

        def reset(self, seed=None, options=None):
            self.count, self.agents = 0, ["ann", "bob"]
            return self._seen(), {}

        def step(self, actions):
            assert set(actions) == set(self.agents)
            acted = self.agents
            self.count += 1
            self.agents = list(self.possible_agents)
            obs, over = self._seen(), self.count == 3
            if over:
                self.agents = []
            return obs, dict.fromkeys(acted, 1.0), dict.fromkeys(acted, False), dict.fromkeys(acted, over), {}

    batch = make(module(Late)).start(1)
    first = batch.reset(SEEDS[:1])
    np.testing.assert_array_equal(first["place"], [[1, 1], [1, 1], [0, 0]])
    zeros = np.zeros((3, 2), np.float32)
    steps = [batch.step(zeros) for _ in range(3)]
    assert [step.valid.tolist() for step in steps] == [[True, True, False], [True] * 3, [True] * 3]
    assert [step.truncated.all() for step in steps] == [False, False, True]
    assert [step.terminated.tolist() for step in steps] == [[False, False, True], [False] * 3, [False] * 3]
    np.testing.assert_array_equal(steps[0].obs["turn"], [1, 1, 1])
    np.testing.assert_array_equal(steps[2].final_obs["turn"], [3, 3, 3])
    np.testing.assert_array_equal(steps[2].obs["turn"], [0, 0, 0])


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("silent", None),
        ("stranger", "these agents are not in possible_agents: mallory"),
        ("blind", "no observation of ann"),
        ("empty", "an episode started without agents"),
    ],
)
def test_what_breaks_the_rules_is_said(fault, sentence, module):
    class Faulty(Crowd):
        def reset(self, seed=None, options=None):
            answer = super().reset(seed)
            self.place = {agent: np.zeros(2) for agent in self.agents}
            if fault == "empty":
                self.agents = []
            return answer

        def step(self, actions):
            obs, *rest = super().step(actions)
            if fault == "silent":
                self.agents = [agent for agent in self.agents if agent != "ann"]
            if fault == "stranger":
                self.agents.append("mallory")
            if fault == "blind":
                del obs["ann"]
            return obs, *rest

    env = make(module(lambda: Faulty(max_cycles=99)))
    batch = env.start(1)

    def live():
        batch.reset(SEEDS[:1])
        return batch.step(np.zeros((3, 2), np.float32))

    if sentence is None:  # one who is gone without a word is terminated
        assert ask(env.name, "step", live).terminated[0]
        return
    with pytest.raises(EnvironmentFailed, match=sentence):
        ask(env.name, "step", live)


# What is given -------------------------------------------------------------------------------------------------------


def test_an_environment_can_be_given_itself():
    pytest.importorskip("pettingzoo")
    given = Crowd(max_cycles=5)
    env = make(given)
    assert env.name == "crowd"
    counts = against_the_api(env, [Crowd(max_cycles=5) for _ in SEEDS], actions(env, 20))
    assert counts["truncated"] > 5
    assert given.agents == []  # it was copied
    with pytest.raises(
        InputError, match="Got an existing environment together with the parameters max_cycles: set them"
    ):
        make(given, max_cycles=3)


def test_an_environment_that_cannot_be_copied_is_asked_for_by_name():
    pytest.importorskip("pettingzoo")
    given = Crowd()
    given.file = sys.stdout.buffer
    with pytest.raises(InputError, match=r"crowd cannot be copied .*: give it by name as 'pettingzoo:MODULE'"):
        make(given)


def test_agents_that_act_in_turn_but_could_act_together_are_refused():
    rps = pytest.importorskip("pettingzoo.classic.rps.rps")
    with pytest.raises(InputError, match=r"The agents of \w+ act in turn: give its parallel_env"):
        make(rps.env())


def test_agents_that_differ_are_named(module):
    class Unlike(Crowd):
        def action_space(self, agent):
            return gymnasium.spaces.Discrete(2 if agent == "bob" else 3)

    with pytest.raises(InputError, match="but the action_space of bob differs from that of ann"):
        make(module(Unlike))


def test_what_cannot_be_made_is_refused_in_a_sentence(module):
    cases = [
        (
            module(None, "an_empty_module"),
            {},
            "The module an_empty_module has neither a function parallel_env nor env: give a",
        ),
        (module(Crowd), {"colour": "red"}, "pettingzoo:a_crowd_v0 cannot be created with these parameters"),
        (
            module(lambda: Crowd.__new__(type("None", (Crowd,), {"possible_agents": ()}))),
            {},
            "has no possible_agents: list all agents there",
        ),
    ]
    for name, parameters, sentence in cases:
        with pytest.raises(InputError, match=sentence) as error:
            make(name, **parameters)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("butterfly.knights_archers_zombies_v0", "did you mean 'pettingzoo:butterfly.knights_archers_zombies_v"),
        ("no.such.module", "There is no module 'no.such.module' or pettingzoo.no.such.module;"),
    ],
)
def test_a_module_that_is_not_there_is_missed(name, sentence):
    pytest.importorskip("pettingzoo")
    with pytest.raises(InputError, match=sentence):
        make(f"pettingzoo:{name}")


def test_names_are_modules_with_an_environment():
    pytest.importorskip("pettingzoo")
    found = adapter.names()
    assert "classic.rps_v2" in found
    assert "classic.tictactoe_v3" in found
    assert not any("all_modules" in name for name in found)
    assert any(name.startswith("butterfly.knights_archers_zombies_v") for name in found)


# Runs ----------------------------------------------------------------------------------------------------------------


def test_time_limits_are_seen_through_and_waiting_teaches_nothing(module, tmp_path):
    """If a cut were an end, or if waiting were lived through, 0 would be worth much less than 1 / (1 − γ)."""
    settings = {"discount": 0.7, "learning_rate": "0.02 -> 0", "entropy_coef": 0.0}
    run = {"total_steps": 120 * 8 * 8 * 3, "run_dir": tmp_path / "run"}
    result = lehr.train("ppo", env=module(Brief), **run, **{**SMALL, "num_envs": 8, **settings})
    network = result.policy.program.agent.network
    obs = np.array([[0.0], [1.0]], np.float32)
    value = network.value(result.params, network.initial_carry((2,)), obs)
    np.testing.assert_allclose(value, [1 / 0.3, 1.0], atol=0.08)
    # Of three agents one lives for 1 step and two for 3.
    assert result.metrics["episode/length"][10:].mean() == pytest.approx(7 / 3, rel=0.05)
    assert result.metrics["episode/return"][10:].mean() == pytest.approx(7 / 3, rel=0.05)


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_as_one_that_was_not(module, tmp_path, caplog):
    settings = {**SMALL, "env": module(Crowd), "total_steps": 30 * 96, "normalise_observations": True}
    whole = lehr.train("ppo", run_dir=tmp_path / "whole", **settings)
    stopped = lehr.train("ppo", run_dir=tmp_path / "run", progress_fn=lambda steps, _: steps >= 900, **settings)
    assert 900 <= stopped.final["env_steps"] < 30 * 96
    with caplog.at_level(logging.WARNING, "lehr"):
        resumed = lehr.resume(tmp_path / "run", trust=True)
    assert not caplog.records
    leaves = zip(jax.tree.leaves(resumed.params), jax.tree.leaves(whole.params), strict=True)
    assert all(np.array_equal(x, y) for x, y in leaves)
    for name in [name for name in whole.metrics if not name.startswith("time/")]:
        np.testing.assert_array_equal(resumed.metrics[name], whole.metrics[name])


@pytest.mark.slow
def test_a_run_learns_and_is_evaluated(module, tmp_path):
    """Agents learn to push themselves back to the middle, against their drift."""
    settings = {"num_envs": 8, "horizon": 16, "learning_rate": "0.01 -> 0", "evaluate_episodes": 8, "epochs": 4}
    run = {"total_steps": 40 * 8 * 16 * 3, "run_dir": tmp_path / "run"}
    env = {"env": module(Crowd), "env_parameters": {"max_cycles": 20}}
    result = lehr.train("ppo", **env, **run, **{**SMALL, **settings})
    batch = make(env["env"], max_cycles=20).start(32)
    batch.reset(np.arange(32, dtype=np.uint32))
    idle = sum(step.reward.mean() for step in (batch.step(np.zeros((96, 2), np.float32)) for _ in range(20)))
    assert result.final["evaluate/return"] > 2 * idle
    assert result.final["evaluate/length"] > 19


def test_a_package_that_a_family_needs_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    monkeypatch.delitem(sys.modules, "pettingzoo.classic.tictactoe_v3", raising=False)
    for name in [name for name in sys.modules if name.startswith("pettingzoo.classic.tictactoe")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        InputError, match=r"needs a package that is not installed: .*; pip install 'pettingzoo\[classic\]'"
    ):
        make("pettingzoo:classic.tictactoe_v3")
