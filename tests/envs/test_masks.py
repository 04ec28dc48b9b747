"""Observations whose action mask allows no action are the environment's fault, and it is named."""

import logging
from dataclasses import dataclass

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.envs import Environment, check_env, make
from lehr.masks import without_action
from lehr.spaces import Box, Dict, Discrete
from lehr.training.loop import RunFailed
from lehr.types import Timestep
from tests.small import SMALL


@dataclass(frozen=True)
class Masked(Environment):
    """Episodes of 4 steps; in state `empty` no action is possible. On the device."""

    empty: int = -1
    observation_space = Dict({"action_mask": Box(0, 1, (2,), np.int8), "step": Box(0, 4, (1,))})
    action_space = Discrete(2)

    def reset(self, key):
        return jnp.int32(0), self._obs(jnp.int32(0))

    def _obs(self, state):
        mask = jnp.where(state == self.empty, jnp.zeros(2, jnp.int8), jnp.ones(2, jnp.int8))
        return {"action_mask": mask, "step": state.astype(jnp.float32)[None]}

    def step(self, key, state, action):
        return state + 1, Timestep(self._obs(state + 1), jnp.float32(1), state + 1 >= 4, jnp.bool_(False), {})


class MaskedOnHost(gymnasium.Env):
    """The same, on the host."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Dict(
        {"action_mask": gymnasium.spaces.Box(0, 1, (2,), np.int8), "step": gymnasium.spaces.Box(0, 4, (1,), np.float32)}
    )

    def __init__(self, empty=-1):
        self.empty, self.count = empty, 0

    def _obs(self):
        mask = np.zeros(2, np.int8) if self.count == self.empty else np.ones(2, np.int8)
        return {"action_mask": mask, "step": np.array([self.count], np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._obs(), {}

    def step(self, action):
        self.count += 1
        return self._obs(), 1.0, self.count >= 4, False, {}


class Forbidding(gymnasium.Env):
    """A mask in `info`, a different one at every step; an action that it forbids raises an error."""

    action_space = gymnasium.spaces.MultiDiscrete([2, 3])
    observation_space = gymnasium.spaces.Box(0, 4, (1,), np.float32)

    def __init__(self, forgets=False):
        self.forgets = forgets

    def _answer(self):
        self.masks = tuple(self.np_random.permuted([1] + [0] * (n - 1)).astype(np.int8) for n in (2, 3))
        is_told = not self.forgets or self.count == 0
        return np.array([self.count], np.float32), {"action_mask": self.masks} if is_told else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._answer()

    def step(self, action):
        assert all(mask[choice] for mask, choice in zip(self.masks, action, strict=True))
        self.count += 1
        obs, info = self._answer()
        return obs, 1.0, self.count >= 4, False, {} if self.count >= 4 else info


gymnasium.register("MaskedOnHost-v0", MaskedOnHost)
gymnasium.register("Forbidding-v0", Forbidding)
gymnasium.register(
    "ForbiddingMany-v0",
    Forbidding,
    vector_entry_point=lambda num_envs, **_: gymnasium.vector.SyncVectorEnv([Forbidding] * num_envs),
)
HOST = "gym:tests.envs.test_masks:MaskedOnHost-v0"


def test_on_the_host_it_stops_the_run(tmp_path):
    with pytest.raises(RunFailed, match=r"MaskedOnHost-v0 gave an action_mask without any action \(agent 0 of the bat"):
        lehr.train(env=HOST, run_dir=tmp_path / "run", total_steps=64, env_parameters={"empty": 2}, **SMALL)
    assert check_env(make(HOST, empty=4)) == [], "at the end of an episode there may be nothing left to do"


@pytest.mark.parametrize(("empty", "expected"), [(2, 8), (4, 0), (-1, 0)])
def test_on_the_device_it_is_counted_and_told_once(empty, expected, tmp_path, caplog):
    """4 environments make 8 steps per update, 2 episodes of 4 each: 8 of 32 observations are in a given state."""
    with caplog.at_level(logging.WARNING, "lehr"):
        result = lehr.train(env=Masked(empty), run_dir=tmp_path / "run", total_steps=96, **SMALL)
    assert result.metrics["environment/broken_masks"].tolist() == [expected] * 3
    said = (
        "Masked returned 8 observations whose action_mask allows no action, in update 1; there, any action may be taken"
    )
    assert [said in record.message for record in caplog.records] == [True] * bool(expected)
    if empty >= 0:
        problems = check_env(Masked(empty), num_steps=8, num_envs=2)
        said = "The action_mask of step allows no action in 4 of 16 observations: allow at least one while an episode"
        assert [said in problem for problem in problems] == [True] * bool(expected)


def test_a_mask_in_info_is_followed(tmp_path):
    name = HOST.replace("MaskedOnHost", "Forbidding")
    env = make(name)
    assert env.observation_space == Dict({"action_mask": Box(0, 1, (5,), np.int8), "observation": Box(0, 4, (1,))})
    result = lehr.train(env=name, run_dir=tmp_path / "run", total_steps=64, **SMALL)
    assert result.final["episode/length"] == 4
    assert result.final["policy/entropy"] == 0, "there is never a choice"
    problem = f"The environment {name} gave nothing as info['action_mask'], but must give an array of shape (5,)"
    assert check_env(make(name, forgets=True))[0].startswith(problem)
    assert make(name, vectorization="async").observation_space == env.observation_space
    many = make(name.replace("-v0", "Many-v0"), vectorization="vector")
    assert many.observation_space == env.observation_space
    assert many.start(3).reset(np.zeros(3, np.uint32))["action_mask"].sum(1).tolist() == [2, 2, 2]


def allowed_by(masks):
    """Actions of `Forbidding` that its masks allow."""
    return np.stack([masks[:, :2].argmax(1), masks[:, 2:].argmax(1)], 1)


@pytest.mark.parametrize("mode", list(gymnasium.vector.AutoresetMode)[:2])
def test_masks_in_the_info_of_a_vector_environment_are_followed(mode, tmp_path):
    """Each row equals the mask that its environment drew; a row whose episode is over has none, and allows all."""
    vector = gymnasium.vector.SyncVectorEnv([Forbidding] * 4, autoreset_mode=mode)
    env = make(vector)
    assert env.observation_space == make(HOST.replace("MaskedOnHost", "Forbidding")).observation_space
    batch = env.start(4)
    obs, over = batch.reset(np.arange(4, dtype=np.uint32)), np.zeros(4, bool)
    for _ in range(10):
        drawn = np.array([np.concatenate(one.masks) for one in vector.envs])
        np.testing.assert_array_equal(obs["action_mask"], np.where(over[:, None], 1, drawn))
        step = batch.step(allowed_by(obs["action_mask"]))
        obs, done = step.obs, step.terminated & (True if step.valid is None else step.valid)
        np.testing.assert_array_equal(step.final_obs["action_mask"][done], np.ones((done.sum(), 5)))
        np.testing.assert_array_equal(step.final_obs["action_mask"][~done], obs["action_mask"][~done])
        over = done & (mode == gymnasium.vector.AutoresetMode.NEXT_STEP)
    vector.envs[2].forgets = True
    obs = batch.reset(np.arange(4, dtype=np.uint32))
    with pytest.raises(TypeError, match=r"info\['action_mask'\] is nothing, but must be an array of shape \(5,\)"):
        batch.step(allowed_by(obs["action_mask"]))
    vector.envs[2].forgets = False
    result = lehr.train(env=vector, run_dir=tmp_path / "run", total_steps=64, **SMALL)
    assert result.final["policy/entropy"] == 0, "there is never a choice"


def test_players_that_take_turns_only_make_legal_moves(tmp_path):
    """The two returns of a game of legal moves sum to 0; an illegal move costs the one who makes it 1."""
    pytest.importorskip("pettingzoo")
    name = "pettingzoo:classic.tictactoe_v3"
    result = lehr.train(env=name, run_dir=tmp_path / "run", total_steps=256, **SMALL)
    returns, lengths = (result.metrics[f"episode/{field}"] for field in ("return", "length"))
    assert np.nanmax(np.abs(returns)) == 0
    assert np.nanmin(lengths) >= 5
    # A player that waits can only do nothing, which its policy gives a probability of 1.
    batch = make(name).start(1)
    first = batch.reset(np.zeros(1, np.uint32))["action_mask"]
    assert first.tolist() == [[1] * 9, [1] + [0] * 8]
    then = batch.step(np.array([4, 0])).obs["action_mask"]
    assert then.tolist() == [[1] + [0] * 8, [1, 1, 1, 1, 0, 1, 1, 1, 1]]


def test_only_the_mask_of_a_discrete_action_is_read():
    obs = {"action_mask": jnp.zeros((3, 2), jnp.int8)}
    masks = Dict({"action_mask": Box(0, 1, (2,), np.int8)})
    assert without_action(masks, Discrete(2), obs).tolist() == [True] * 3
    assert without_action(masks, Discrete(3), obs) is None
    assert without_action(masks, Box(0, 1, (2,)), obs) is None
    assert without_action(masks.spaces["action_mask"], Discrete(2), obs["action_mask"]) is None
    assert without_action(Dict({"action_mask": Box(0, 1, (2,))}), Discrete(2), jax.tree.map(jnp.float32, obs)) is None
