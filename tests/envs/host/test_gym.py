"""Gymnasium's environments: what a batch answers, against single environments stepped by hand."""

import multiprocessing
import os
import re
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest

import lehr
from lehr import spaces
from lehr.envs import check_env, make, register
from lehr.envs.host import group, worker
from lehr.envs.host.answers import WrongAnswer
from lehr.envs.host.base import EnvironmentFailed, ask, begin, check_step, next_seeds
from lehr.envs.host.gym import Gym
from lehr.errors import InputError
from lehr.training.loop import RunFailed
from tests.envs.gym_tasks import Clock, Endless, Walk
from tests.small import SMALL

TASKS = "gym:tests.envs.gym_tasks:"
SEEDS = np.array([3, 4_000_000_000, 5], np.uint32)
LEARNING = SMALL | {"num_envs": 8, "horizon": 32, "learning_rate": 0.01, "evaluate_episodes": 8}


def actions(count, size=3):
    return np.random.default_rng(0).uniform(-1, 1, (count, size, 2)).astype(np.float32)


def by_hand(seeds, given):
    """What three single environments answer, each reset with the next seed when its episode is over."""
    envs = [gymnasium.make("tests.envs.gym_tasks:Walk-v0") for _ in seeds]
    seeds = seeds.copy()
    first = np.stack([env.reset(seed=int(seed))[0] for env, seed in zip(envs, seeds, strict=True)])
    rows = []
    for action in given:
        row = []
        for i, env in enumerate(envs):
            final, reward, terminated, truncated, _ = env.step(action[i])
            obs = final
            if terminated or truncated:
                seeds[i] = next_seeds(seeds[i : i + 1])[0]
                obs, _ = env.reset(seed=int(seeds[i]))
            row.append((obs, final, reward, terminated, truncated))
        rows.append([np.array(part) for part in zip(*row, strict=True)])
    return first, rows


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_batch_answers_as_single_environments_do(vectorization):
    batch = make(TASKS + "Walk-v0", vectorization=vectorization).start(3)
    try:
        first, rows = by_hand(SEEDS, actions(40))
        np.testing.assert_array_equal(batch.reset(SEEDS), first)
        ends = 0
        for action, expected in zip(actions(40), rows, strict=True):
            step = batch.step(action)
            for found, wanted in zip(step[:5], expected, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-6)
            assert step.valid is None
            ends += (step.terminated | step.truncated).sum()
        assert ends > 6
    finally:
        batch.close()


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_the_ways_of_gymnasium_to_reset_lose_no_step_and_count_none_twice(autoreset):
    """Rewards of valid steps, final observations and ends are those of the environments themselves."""
    env = make(TASKS + "Walk-v0", autoreset=autoreset)
    assert env.masks == (autoreset == "next_step")
    batch = env.start(3)
    singles = [gymnasium.make("tests.envs.gym_tasks:Walk-v0") for _ in SEEDS]
    obs = batch.reset(SEEDS)
    for single, seed in zip(singles, SEEDS, strict=True):
        single.reset(seed=int(seed))
    over, resets = np.zeros(3, bool), 0
    for action in actions(60):
        step = batch.step(action)
        for i, single in enumerate(singles):
            if over[i]:
                expected, _ = single.reset()
                over[i] = False
                if autoreset == "next_step":
                    resets += 1
                    assert not step.valid[i]
                    assert step.terminated[i]
                    assert step.reward[i] == 0
                    np.testing.assert_array_equal(step.obs[i], expected)
                    continue
            final, reward, terminated, truncated, _ = single.step(action[i])
            assert step.valid is None or step.valid[i]
            np.testing.assert_allclose(step.reward[i], reward, rtol=1e-6)
            np.testing.assert_array_equal(step.final_obs[i], final)
            assert (step.terminated[i], step.truncated[i]) == (terminated, truncated)
            over[i] = terminated or truncated
            if autoreset == "same_step" and over[i]:
                resets += 1
                np.testing.assert_array_equal(step.obs[i], single.reset()[0])
                over[i] = False
        obs = step.obs
    assert resets > 6
    assert obs.shape == (3, 2)
    batch.close()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_environments_are_brought_back_by_their_actions(vectorization):
    env = make(TASKS + "Walk-v0", vectorization=vectorization)
    one, other = env.start(3), env.start(3)
    try:
        one.reset(SEEDS)
        for action in actions(25):
            last = one.step(action)
        state = one.state()
        assert 0 < state["elapsed"].max() <= 12
        np.testing.assert_array_equal(other.restore(state), last.obs)
        for action in actions(20):
            for found, expected in zip(other.step(action)[:5], one.step(action)[:5], strict=True):
                np.testing.assert_array_equal(found, expected)
    finally:
        one.close()
        other.close()


def test_ctrl_c_is_the_trainers_alone(monkeypatch):
    """In a process of its own an environment does not hear it, in the trainer's nothing changes."""
    heard = []
    monkeypatch.setattr("lehr.envs.host.worker.signal.signal", lambda *arguments: heard.append(arguments))
    arguments = "CartPole-v1", {}, 1, 1
    worker.make_env(*arguments, trainer=os.getpid())
    assert heard == []
    worker.make_env(*arguments, trainer=os.getpid() + 1)
    assert heard == [(signal.SIGINT, signal.SIG_IGN)]


# Workers that die, hang or raise ---------------------------------------------------------------------------------------


@pytest.fixture
def broken():
    """`broken(fault)`: two environments in worker processes that break in their third step."""
    made = []

    def start(fault, step_timeout=None, **parameters):
        env = make(TASKS + "Breaking-v0", vectorization="async", fault=fault, **parameters)
        made.append(begin(env if step_timeout is None else env.with_step_timeout(step_timeout), 2))
        made[-1].reset(SEEDS[:2])
        for _ in range(2):
            made[-1].step(np.zeros(2, np.int32))
        return made[-1]

    yield start
    for batch in made:
        began = time.perf_counter()
        batch.close()
        assert time.perf_counter() - began < 5
        assert not [child for child in multiprocessing.active_children() if child.name.startswith("lehr-environment")]


@pytest.mark.parametrize("method", ["step", pytest.param("reset", marks=pytest.mark.slow)])
def test_a_worker_that_is_killed_is_named(method, broken):
    batch = broken("none")
    process = batch.group.processes[1]
    os.kill(process.pid, signal.SIGKILL)
    sentence = rf"Breaking-v0 is gone: its worker 1 \(process {process.pid}\) ended with code -9\.$"
    with pytest.raises(EnvironmentFailed, match=sentence):
        batch.step(np.zeros(2, np.int32)) if method == "step" else batch.reset(SEEDS[:2])


def test_a_worker_that_is_killed_while_it_steps_is_named(broken):
    batch = broken("hangs")
    threading.Timer(0.3, batch.group.processes[0].kill).start()
    with pytest.raises(EnvironmentFailed, match=r"its worker 0 \(process \d+\) ended with code -9"):
        batch.step(np.zeros(2, np.int32))


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("raises", r"failed in step \(OSError: the simulator is gone\), in worker 0\.$"),
        pytest.param(
            "loses its connection",
            r"failed in step \(ConnectionResetError: the simulator hung up\), in worker 0\.$",
            marks=pytest.mark.slow,
        ),
        pytest.param("reward=lambda: 0", r"failed in step \(.*pickle.*\), in worker 0\.$", marks=pytest.mark.slow),
        ("exits", r"failed in step \(SystemExit: 3\), in worker 0\.$"),
        pytest.param("interrupts", r"failed in step \(KeyboardInterrupt\), in worker 0\.$", marks=pytest.mark.slow),
        pytest.param("dies", r"its worker 0 \(process \d+\) ended with code 7\.$", marks=pytest.mark.slow),
    ],
)
def test_what_ends_a_worker_is_one_sentence(fault, sentence, broken, capfd):
    with pytest.raises(EnvironmentFailed, match=sentence):
        broken(fault).step(np.zeros(2, np.int32))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_step_that_takes_too_long_is_a_failure(vectorization):
    env = make(TASKS + "Breaking-v0", vectorization=vectorization, fault="hangs").with_step_timeout(1.0)
    batch = begin(env, 2)
    batch.reset(SEEDS[:2])
    answers = [batch.step(np.zeros(2, np.int32)) for _ in range(2)]
    assert answers[1].reward.tolist() == [1.0, 1.0]
    began = time.perf_counter()
    with pytest.raises(EnvironmentFailed, match="Breaking-v0 did not answer step within step_timeout=1 seconds"):
        batch.step(np.zeros(2, np.int32))
    batch.close()
    assert 1.0 <= time.perf_counter() - began < 4.0


@pytest.mark.parametrize("autoreset", ["seeded", "same_step", "next_step"])
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("terminated='no'", r"gave 'no' \(str\) as terminated, but must give a bool\."),
        ("terminated=None", r"gave None \(NoneType\) as terminated, but must give a bool\."),
        ("truncated=nan", r"gave nan \(float\) as truncated, but must give a bool\."),
        ("truncated=1", r"gave 1 \(int\) as truncated, but must give a bool\."),
        ("reward='5'", r"gave '5' \(str\) as reward, but must give a number\."),
        ("reward=None", r"gave None \(NoneType\) as reward, but must give a number\."),
        ("reward=1j", r"gave 1j \(complex\) as reward, but must give a number\."),
        ("reward=[1, 2]", r"gave \[1, 2\] \(list\) as reward, but must give a number\."),
    ],
)
def test_rewards_and_flags_are_not_made_of_something_else(fault, sentence, autoreset):
    batch = begin(make(TASKS + "Breaking-v0", autoreset=autoreset, fault=fault), 2)
    step = partial(batch.step, np.zeros(2, np.int32))
    batch.reset(SEEDS[:2])
    [step() for _ in range(2)]
    with pytest.raises(EnvironmentFailed, match=sentence):
        ask("Breaking-v0", "step", step)
    batch.close()


@pytest.mark.parametrize("autoreset", ["seeded", pytest.param("next_step", marks=pytest.mark.slow)])
def test_nor_are_those_of_a_worker(autoreset, broken):
    with pytest.raises(EnvironmentFailed, match=r"gave 'no' \(str\) as terminated, but must give a bool\."):
        ask("Breaking-v0", "step", partial(broken("terminated='no'", autoreset=autoreset).step, np.zeros(2, np.int32)))


@pytest.mark.parametrize("repeat", [1, 2])
def test_a_repeated_action_adds_up_numbers_only(repeat):
    env = make(TASKS + "Breaking-v0", fault="reward='5'").with_wrappers(repeat, 1)
    problems = check_env(env)
    assert problems == [f"The environment {env.name} gave '5' (str) as reward, but must give a number."]


def test_numbers_of_all_kinds_are_rewards():
    for reward, expected in (("np.float32(2)", 2), ("3", 3), ("True", 1), ("np.array(4.0)", 4), ("np.int8(5)", 5)):
        batch = make(TASKS + "Breaking-v0", fault=f"reward={reward}").start(2)
        batch.reset(SEEDS[:2])
        answer = [batch.step(np.zeros(2, np.int32)) for _ in range(3)][-1]
        assert answer.reward.tolist() == [expected, 1.0]
        check_step(make(TASKS + "Breaking-v0", fault=""), answer, 2)
        batch.close()


@pytest.mark.parametrize("vectorization", ["sync", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("obs=np.zeros(1)", r"gave float32\[2\] and float64\[1\] as obs, but must give the same shape"),
        ("obs=np.array(['a', 'b'])", "gave obs in <U32, but its space requires float32"),
        ("reset=np.zeros(1)", r"gave float64\[1\] as obs, but must give float32\[2\]"),
    ],
)
def test_an_observation_that_does_not_match_its_space_is_not_made_to_match(fault, sentence, vectorization):
    problems = check_env(make(TASKS + "Breaking-v0", vectorization=vectorization, fault=fault), num_envs=2)
    assert len(problems) == 1
    assert re.search(sentence, problems[0])


BEYOND = [
    ({}, 3_000_000_000, "int32"),
    ({"late": -3_000_000_000}, -3_000_000_000, "int32"),
    ({"space": np.uint64}, 3_000_000_000, "int32"),
    ({"space": np.int16, "given": np.int64, "late": 40_000}, 40_000, "int16"),
]


@pytest.mark.parametrize("vectorization", ["sync", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("parameters", "value", "dtype"), BEYOND, ids=str)
def test_an_integer_that_does_not_fit_is_not_wrapped_around(parameters, value, dtype, vectorization):
    env = make(partial(Clock, **parameters), vectorization=vectorization)
    [problem] = check_env(env, num_steps=8)
    assert f"gave {value} in obs['time'], which does not fit into {dtype}: wrap it" in problem
    late = make(partial(Clock, **parameters | {"late": 7}), vectorization=vectorization)
    assert check_env(late, num_steps=8) == []


def test_nor_is_one_of_a_reset():
    batch = make(partial(Clock, np.int16, given=np.int64)).start(1)
    into = {"time": np.zeros((1, 2), np.int16)}
    with pytest.raises(WrongAnswer, match=r"obs is 40000, but must be integers of int16"):
        group.put(into, 0, {"time": np.array([0, 40_000])})
    batch.close()


def test_a_run_stops_at_an_integer_that_does_not_fit(tmp_path):
    with pytest.raises(RunFailed, match=r"gave 3000000000 in obs\['time'\], which does not fit into int32"):
        lehr.train("ppo", Clock, total_steps=256, run_dir=tmp_path / "run", **SMALL)


def test_closing_a_vector_environment_does_not_hide_what_ended_a_process():
    batch = make("gym:CartPole-v1", vectorization="vector").start(1)
    ended = []

    def close():
        raise EOFError

    batch.envs.close, batch.envs.processes = close, [SimpleNamespace(terminate=lambda: ended.append(True))]
    batch.close()
    assert ended == [True]


def test_the_vectorised_version_of_an_environment():
    env = make("gym:CartPole-v1", vectorization="vector")
    assert env.masks
    assert check_env(env) == []


def test_spaces_are_those_of_gymnasium_in_32_bits():
    endless = make(TASKS + "Endless-v0")
    assert endless.observation_space == spaces.Box(0, 100, (1,))
    assert endless.action_space == spaces.Discrete(2, start=1)
    mixed = make(TASKS + "Mixed-v0")
    assert mixed.action_space == spaces.MultiDiscrete((2, 3))
    assert mixed.observation_space.spaces["picture"].dtype == np.uint8
    assert make("gym:Pendulum-v1").action_space == spaces.Box(-2, 2, (1,))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_bools_are_seen_and_mask_actions(vectorization):
    env = make(TASKS + "Doors-v0", vectorization=vectorization)
    assert env.observation_space.spaces["seen"] == spaces.Box(0, 1, (2, 2), bool)
    assert check_env(env, num_steps=50) == []  # the environment asserts that it gets possible actions only


def test_a_run_learns_from_bools():
    result = lehr.train("ppo", TASKS + "Doors-v0", total_steps=8192, run_dir=None, **LEARNING)
    assert result.final["evaluate/return"] > 7.5
    mask = np.array([True, True, False])
    assert result.policy({"action_mask": mask, "seen": np.zeros((2, 2), bool)}) == 1


def test_observations_are_stacked_and_actions_repeated():
    env = make(TASKS + "Walk-v0").with_wrappers(action_repeat=2, frame_stack=3)
    assert env.env_steps_per_step == 2
    assert env.observation_space.shape == (6,)
    batch = env.start(1)
    single = gymnasium.make("tests.envs.gym_tasks:Walk-v0")
    first, _ = single.reset(seed=3)
    np.testing.assert_array_equal(batch.reset(SEEDS[:1])[0], np.tile(first, 3))
    action = actions(1, 1)[0]
    step, rewards = batch.step(action), 0.0
    for _ in range(2):
        obs, reward, *_ = single.step(action[0])
        rewards += reward
    np.testing.assert_array_equal(step.obs[0], np.concatenate([first, first, obs]))
    assert step.reward[0] == pytest.approx(rewards)
    picture = make(TASKS + "Picture-v0").with_wrappers(1, frame_stack=4)
    assert picture.observation_space.shape == (16, 16, 12)
    assert picture.observation_space.dtype == np.uint8


def test_an_environment_of_gymnasium_can_be_given_itself():
    env = make(gymnasium.make("CartPole-v1", sutton_barto_reward=True))
    assert env == Gym("CartPole-v1", parameters=(("sutton_barto_reward", True),))
    assert hash(env) == hash(make("gym:CartPole-v1", sutton_barto_reward=True))
    short = make(gymnasium.make("CartPole-v1", max_episode_steps=50))
    assert len(short.initial_state(SEEDS)["actions"]) == 50
    human = make(gymnasium.make("CartPole-v1", render_mode="rgb_array"))
    assert human == Gym("CartPole-v1"), "training does not draw"
    vector = gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
    assert check_env(make(vector), num_envs=4) == []
    with pytest.raises(InputError, match="has 4 environments, but num_envs is 5: set num_envs=4"):
        make(vector).start(5)


class Uncopied(Walk):
    def __deepcopy__(self, memo):
        raise TypeError("a simulator cannot be copied")


def negated():
    return gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), lambda reward: -reward)


def long_pole():
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.length = 2.0
    return env


@pytest.mark.parametrize(
    ("given", "vectorization"),
    [(negated, "sync"), (negated(), "sync"), (lambda: negated(), "async")],
    ids=["function", "object", "lambda in other processes"],
)
def test_wrappers_of_a_function_or_an_object_are_kept(given, vectorization):
    env = make(given, vectorization=vectorization)
    batch = env.start(2)
    try:
        batch.reset(SEEDS[:2])
        assert batch.step(np.zeros(2, int)).reward.tolist() == [-1, -1]
    finally:
        batch.close()
    assert len(env.initial_state(SEEDS)["actions"]) == 500


@pytest.mark.parametrize("given", [long_pole, long_pole(), lambda: long_pole()], ids=["function", "object", "lambda"])
def test_what_was_changed_after_gymnasium_made_it_is_kept(given):
    assert make(given).start(1).group.singles[0].env.unwrapped.length == 2.0


def test_an_object_is_copied_and_left_alone_unless_there_can_be_only_one():
    env = Walk()
    batch = make(env).start(3)
    batch.reset(SEEDS[:3])
    assert len({id(single.env.unwrapped) for single in batch.group.singles} | {id(env)}) == 4
    assert not hasattr(env, "place")
    only = make(Uncopied())
    assert only.fixed_size == 1
    assert only.for_evaluation() is None
    assert make(gymnasium.vector.SyncVectorEnv([Uncopied] * 3)).for_evaluation().name == "SyncVectorEnv"


def test_a_registered_class_of_gymnasium_has_its_time_limit(monkeypatch):
    monkeypatch.setattr("lehr.envs.registry._registry", {})
    register("Endless-v9", max_steps=5)(Endless)
    batch = make("Endless-v9").start(1)
    batch.reset(SEEDS[:1])
    assert [bool(batch.step(np.ones(1, int)).truncated[0]) for _ in range(6)] == [False] * 4 + [True, False]
    assert len(make("tests.envs.gym_tasks:Endless").initial_state(SEEDS)["actions"]) == 5


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        ("gym:CartPol-v1", {}, "Gymnasium has no environment 'CartPol-v1'; did you mean 'gym:CartPole-v1'?"),
        ("gym:CartPole-v77", {}, "Gymnasium cannot create 'CartPole-v77'"),
        ("gym:CartPole-v1", {"colour": "red"}, "gym:CartPole-v1 cannot be created with these parameters"),
        ("gym:CartPole-v1", {"vectorization": "asink"}, "vectorization is 'asink'; known: sync, async, vector"),
        ("gym:CartPole-v1", {"autoreset": "none"}, "autoreset is 'none'; "),
        ("gym:Acrobot-v1", {"vectorization": "vector"}, "gym:Acrobot-v1 has no vectorised version: choose"),
        ("gym:Blackjack-v1", {}, "is not supported: wrap the environment so that its space is a Box"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_sentence(name, parameters, sentence):
    with pytest.raises(InputError) as error:
        _ = make(name, **parameters).observation_space
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
