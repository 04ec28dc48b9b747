"""What Gymnasium's environments get as an action: a member of their own space, wherever it comes from."""

import gymnasium
import jax
import numpy as np
import pytest

import lehr
from lehr.acting.demonstrations import read_demonstrations
from lehr.acting.export.numpy_policy import NumpyPolicy
from lehr.envs import check_env, make
from lehr.errors import InputError
from lehr.spaces import Discrete, MultiDiscrete, Spaces
from tests.small import SMALL

TASKS = "tests.envs.gym_tasks:"
SEEDS = np.array([3, 4_000_000_000, 5], np.uint32)


def played(env, act):
    """The return of an episode, as docs/deploy.md plays it."""
    obs, _ = env.reset(seed=0)
    total, over = 0.0, False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(act(obs))
        total, over = total + reward, terminated or truncated
    return total


@pytest.fixture(scope="module")
def dial(tmp_path_factory):
    """A run on a task with actions 5, 6 and 7, which asserts that it gets no others."""
    settings = SMALL | {"num_envs": 8, "horizon": 32, "learning_rate": 0.01, "evaluate_episodes": 8}
    return lehr.train(
        "ppo", f"gym:{TASKS}Dial-v0", total_steps=4096, run_dir=tmp_path_factory.mktemp("dial"), **settings
    )


def test_actions_that_start_at_5_are_the_environments_wherever_they_come_from(dial, tmp_path):
    assert dial.env.action_space == Discrete(3, start=5)
    assert dial.final["evaluate/return"] == 8  # 7 is right, 8 times
    policy, env, obs = dial.policy, gymnasium.make(f"{TASKS}Dial-v0"), np.zeros(1, np.float32)
    assert played(env, policy) == 8
    assert env.action_space.contains(policy(obs, np.random.default_rng(0)))
    assert jax.jit(jax.vmap(policy))(jax.numpy.zeros((2, 1))).tolist() == [7, 7]
    assert policy.step(policy.initial_carry(2), np.zeros((2, 1)), [True, True])[1].tolist() == [7, 7]
    exported = NumpyPolicy(lehr.export(policy, "numpy", tmp_path / "policy.npz"))
    assert played(env, exported) == 8
    assert set(exported(np.zeros((50, 1)), np.random.default_rng(0)).tolist()) <= {5, 6, 7}


def test_they_are_recorded_as_the_environment_takes_them_and_imitated(dial, tmp_path):
    path = str(tmp_path / "demos.npz")
    demos = lehr.record(dial.policy, dial.env, 2, out=path)
    assert demos.returns.tolist() == [8, 8]
    assert set(demos.actions.tolist()) == {7}
    found, _ = read_demonstrations(path, Spaces(dial.env.observation_space, dial.env.action_space))
    np.testing.assert_array_equal(found.actions, demos.actions)
    settings = SMALL | {"discriminator_sizes": (8,), "discriminator_batch": 16, "demonstrations": path}
    result = lehr.train("gail", f"gym:{TASKS}Dial-v0", total_steps=256, run_dir=None, **settings)
    assert Discrete(3, start=5).contains(result.policy(np.zeros(1, np.float32)))


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"vectorization": "async"}, marks=pytest.mark.slow), {"autoreset": "next_step"}],
    ids=str,
)
def test_batches_take_them_too(options):
    env = make(f"gym:{TASKS}Dial-v0", **options)
    assert check_env(env, num_steps=20) == []
    batch = env.start(3)
    try:
        first = batch.reset(SEEDS).copy()
        batch.step(np.array([5, 6, 7], np.int32))
        step = batch.step(np.array([5, 5, 5], np.int32))
        np.testing.assert_array_equal(step.obs - first, [[10], [11], [12]])
        if batch.restores:
            state = batch.state()
            # Counted from 0, as in the checkpoints of versions before: these go on.
            np.testing.assert_array_equal(state["actions"][:2], [[0, 1, 2], [0, 0, 0]])
            np.testing.assert_array_equal(batch.restore(state) - first, [[10], [11], [12]])
    finally:
        batch.close()


def test_a_vector_environment_gets_them():
    vector = gymnasium.make_vec(f"{TASKS}Dial-v0", num_envs=3, vectorization_mode="sync")
    batch = make(vector).start(3)
    first = batch.reset(SEEDS).copy()
    np.testing.assert_array_equal(batch.step(np.array([5, 6, 7], np.int32)).obs - first, [[5], [6], [7]])
    vector.close()


def test_bits_are_choices_between_0_and_1_and_nothing_in_between(tmp_path):
    settings = SMALL | {"num_envs": 8, "horizon": 32, "learning_rate": 0.01, "evaluate_episodes": 8}
    result = lehr.train("ppo", f"gym:{TASKS}Lights-v0", total_steps=8192, run_dir=None, **settings)
    assert result.env.action_space == MultiDiscrete((2, 2, 2))
    assert result.final["evaluate/return"] > 22  # 3 lights, 8 times; without looking, 12
    env, obs = gymnasium.make(f"{TASKS}Lights-v0"), np.array([1, 0, 1], np.float32)
    assert played(env, result.policy) > 22
    assert result.policy(obs).tolist() == [1, 0, 1]
    exported = NumpyPolicy(lehr.export(result.policy, "numpy", tmp_path / "policy.npz"))
    assert played(env, exported) > 22
    demos = lehr.record(result.policy, result.env, 2)
    assert demos.actions.dtype.kind == "i"
    assert {tuple(bits) for bits in demos.actions.tolist()} == {tuple(lights) for lights in demos.obs.tolist()}


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"vectorization": "async"}, marks=pytest.mark.slow), {"autoreset": "same_step"}],
    ids=str,
)
def test_batches_of_environments_get_bits_in_the_dtype_of_their_space(options):
    env = make(f"gym:{TASKS}Lights-v0", **options)
    assert check_env(env, num_steps=20) == []
    batch = env.start(3)
    try:
        obs = batch.reset(SEEDS)
        for _ in range(3):
            action = obs.astype(np.int32)
            step = batch.step(action)
            assert step.reward.tolist() == [3, 3, 3]
            obs = step.obs
        if batch.restores:
            np.testing.assert_array_equal(batch.restore(batch.state()), obs)
    finally:
        batch.close()


@pytest.mark.parametrize("given", ["single", "vector"])
def test_the_environment_itself_sees_int8(given, monkeypatch):
    seen = []

    def step(self, action):
        seen.append(np.asarray(action).dtype)
        return np.zeros(3, np.float32), 0.0, False, False, {}

    monkeypatch.setattr("tests.envs.gym_tasks.Lights.step", step)
    vector = gymnasium.make_vec(f"{TASKS}Lights-v0", num_envs=3, vectorization_mode="sync")
    batch = make(vector if given == "vector" else f"gym:{TASKS}Lights-v0").start(3)
    batch.reset(SEEDS)
    batch.step(np.zeros((3, 3), np.int32))
    if batch.restores:
        batch.restore(batch.state())
    assert set(seen) == {np.dtype(np.int8)}
    batch.close()


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        (
            {},
            r"^Actions are in Box\(0, 4, shape=\(2,\), dtype=int32\), a Box of whole numbers, but .* MultiDiscrete, or ",
        ),
        ({"bits": True}, r"^The action space MultiBinary\(.*\) has 2 axes, but .* so that it takes a vector\.$"),
    ],
    ids=str,
)
def test_actions_that_no_policy_gives_are_refused_in_a_sentence(parameters, sentence):
    env = make(f"gym:{TASKS}Wheel-v0", **parameters)
    with pytest.raises(InputError, match=sentence):
        lehr.train("ppo", env, total_steps=64, run_dir=None, **SMALL)
    [problem] = check_env(env)
    with pytest.raises(InputError, match=sentence):
        raise InputError(problem)
