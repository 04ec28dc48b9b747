"""Each wrapper around environments small enough to work out by hand."""

from dataclasses import dataclass

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr import spaces
from lehr.envs import (
    ActionRepeat,
    AutoReset,
    Batch,
    ClipAction,
    Environment,
    EpisodeStatistics,
    FlattenObservation,
    FrameStack,
    HideObservation,
    RescaleAction,
    StackChannels,
    TimeLimit,
    make,
)
from lehr.envs.host.worker import GymFrameStack
from lehr.spaces import Box, Dict, Discrete
from lehr.training.plan import make_plan
from lehr.types import Timestep

KEY = jax.random.key(0)


@dataclass(frozen=True)
class Counter(Environment):
    """Observes how many steps were made, and is rewarded with that number; ends after `length` steps."""

    length: int = 4
    observation_space = Box(0, 100, (1,))
    action_space = Box(-2, 6, (1,))

    def reset(self, key):
        return jnp.int32(0), jnp.zeros(1)

    def step(self, key, state, action):
        count = state + 1
        reward = count.astype(jnp.float32)
        return count, Timestep(reward[None], reward, count >= self.length, jnp.bool_(False), {"action": action})


@dataclass(frozen=True)
class Relay(Environment):
    """Agent i of two is done from its step 2 i + 1 on; the reward is always 1, the observation the count."""

    num_agents: int = 2
    observation_space = Dict({"count": Box(0, 100, (1,)), "mode": Discrete(3)})
    action_space = Box(-1, 1, (2,))

    def _observe(self, count):
        return {"count": jnp.full((2, 1), count, jnp.float32), "mode": jnp.full(2, count % 3)}

    def reset(self, key):
        return jnp.int32(0), self._observe(jnp.int32(0))

    def step(self, key, state, action):
        count = state + 1
        done = count >= jnp.array([1, 3])
        return count, Timestep(self._observe(count), jnp.ones(2), done, jnp.zeros(2, bool), {"action": action})


@dataclass(frozen=True)
class Picture(Environment):
    """Bytes of noise, 10 by 10 with 2 channels."""

    observation_space = Box(0, 255, (10, 10, 2), np.uint8)
    action_space = Discrete(2)

    def reset(self, key):
        return jnp.int32(0), jax.random.bits(key, (10, 10, 2), jnp.uint8)

    def step(self, key, state, action):
        done = state >= 3
        return state + 1, Timestep(self.reset(key)[1], jnp.float32(1), done, jnp.bool(False), {})


def play(env, actions):
    """The first observation, and the timesteps for a list of actions, stacked."""
    state, obs = env.reset(KEY)
    steps = []
    for action in actions:
        state, timestep = env.step(KEY, state, jnp.asarray(action, jnp.float32))
        steps.append(timestep)
    return obs, jax.tree.map(lambda *leaves: np.stack(leaves), *steps)


STILL = [[0.0]] * 6
STILL_TWO = [np.zeros((2, 2))] * 5


class TestTimeLimit:
    def test_truncates_at_the_limit_and_after_and_leaves_terminated_alone(self):
        _, steps = play(TimeLimit(Counter(length=3), 2), STILL[:4])
        assert steps.truncated.tolist() == [False, True, True, True]
        assert steps.terminated.tolist() == [False, False, True, True]

    def test_both_flags_are_set_where_both_hold_as_in_gymnasium(self):
        class Once(gymnasium.Env):
            observation_space = action_space = gymnasium.spaces.Discrete(1)

            def reset(self, *, seed=None, options=None):
                return 0, {}

            def step(self, action):
                return 0, 0.0, True, False, {}

        theirs = gymnasium.wrappers.TimeLimit(Once(), 1)
        theirs.reset()
        _, steps = play(TimeLimit(Counter(length=1), 1), STILL[:1])
        assert theirs.step(0)[2:4] == (True, True) == (steps.terminated[0], steps.truncated[0])

    def test_truncates_every_agent(self):
        _, steps = play(TimeLimit(Relay(), 2), STILL_TWO[:2])
        assert steps.truncated.tolist() == [[False, False], [True, True]]


class TestAutoReset:
    def test_shows_the_reset_observation_and_keeps_the_final_one(self):
        first, steps = play(AutoReset(Counter(length=2)), STILL)
        assert first == 0
        assert steps.obs[:, 0].tolist() == [1, 0, 1, 0, 1, 0]
        assert steps.info["final_obs"][:, 0].tolist() == [1, 2, 1, 2, 1, 2]
        assert steps.reward.tolist() == [1, 2, 1, 2, 1, 2]
        assert steps.terminated.tolist() == [False, True] * 3

    def test_also_resets_the_wrappers_inside(self):
        _, steps = play(AutoReset(EpisodeStatistics(TimeLimit(Counter(), 3))), STILL)
        assert steps.truncated.tolist() == [False, False, True] * 2
        assert steps.info["episode_return"].tolist() == [1, 3, 6] * 2

    def test_waits_for_every_agent(self):
        _, steps = play(AutoReset(Relay()), STILL_TWO)
        assert steps.obs["count"][:, :, 0].tolist() == [[1, 1], [2, 2], [0, 0], [1, 1], [2, 2]]
        assert steps.info["final_obs"]["count"][:, 1, 0].tolist() == [1, 2, 3, 1, 2]

    def test_each_reset_is_a_fresh_draw(self):
        env = AutoReset(TimeLimit(make("CartPole-v1"), 1))
        state, first = env.reset(KEY)
        step = jax.jit(env.step)
        observations = [first] + [step(key, state, 0)[1].obs for key in jax.random.split(KEY, 4)]
        assert len(np.unique(observations, axis=0)) == 5
        assert np.abs(observations).max() <= 0.05

    def test_has_no_branch(self):
        env = Batch(AutoReset(make("CartPole-v1")), 2)
        states, _ = env.reset(KEY)
        assert "cond" not in str(jax.make_jaxpr(env.step)(KEY, states, jnp.zeros(2, jnp.int32)))

    @pytest.mark.parametrize("wrap", [lambda e: TimeLimit(e, 3), EpisodeStatistics, AutoReset])
    def test_must_be_outermost(self, wrap):
        with pytest.raises(
            ValueError, match="wraps AutoReset, which would not reset it: make AutoReset the outermost wrapper"
        ):
            wrap(AutoReset(Counter()))


class TestEpisodeStatistics:
    def test_adds_up_the_episode(self):
        _, steps = play(EpisodeStatistics(Counter(length=3)), STILL[:3])
        assert steps.info["episode_return"].tolist() == [1, 3, 6]
        assert steps.info["episode_length"].tolist() == [1, 2, 3]
        assert steps.info["episode_done"].tolist() == [False, False, True]
        assert steps.info["action"].shape == (3, 1), "the environment's own info stays"

    def test_ends_for_each_agent_once(self):
        _, steps = play(AutoReset(EpisodeStatistics(Relay())), STILL_TWO)
        assert steps.info["episode_done"].tolist() == [[1, 0], [0, 0], [0, 1], [1, 0], [0, 0]]
        assert steps.info["episode_return"].tolist() == [[1, 1], [1, 2], [1, 3], [1, 1], [1, 2]]
        assert steps.info["episode_length"].tolist() == [[1, 1], [1, 2], [1, 3], [1, 1], [1, 2]]


class TestActions:
    def test_clip(self):
        env = ClipAction(Counter())
        _, steps = play(env, [[-9], [1], [9]])
        assert steps.info["action"][:, 0].tolist() == [-2, 1, 6]
        assert env.action_space == Box(-np.inf, np.inf, (1,))

    def test_rescale(self):
        env = RescaleAction(Counter(), low=0, high=2)
        _, steps = play(env, [[0], [0.5], [1], [2]])
        assert steps.info["action"][:, 0].tolist() == [-2, 0, 2, 6]
        assert env.action_space == Box(0, 2, (1,))

    def test_each_agent_is_clipped_and_rescaled(self):
        actions = np.array([[[-2, 0.5], [0, 8]]])
        _, steps = play(ClipAction(Relay()), actions)
        assert steps.info["action"].tolist() == [[[-1, 0.5], [0, 1]]]
        _, steps = play(RescaleAction(Relay(), -2, 8), actions)
        np.testing.assert_allclose(steps.info["action"], [[[-1, -0.5], [-0.6, 1]]], atol=1e-6)

    @pytest.mark.parametrize("wrap", [ClipAction, RescaleAction])
    def test_need_bounds(self, wrap):
        with pytest.raises(
            ValueError, match=r"needs a Box with finite bounds as the action space, but got Discrete\(n=2\)"
        ):
            wrap(make("CartPole-v1"))


class TestActionRepeat:
    def test_sums_rewards_and_stops_at_the_end(self):
        env = ActionRepeat(Counter(length=5), 3)
        _, steps = play(env, STILL[:2])
        assert steps.reward.tolist() == [1 + 2 + 3, 4 + 5]
        assert steps.obs[:, 0].tolist() == [3, 5]
        assert steps.terminated.tolist() == [False, True]
        assert env.env_steps_per_step == 3
        assert AutoReset(ActionRepeat(env, 2)).env_steps_per_step == 6

    def test_once_changes_nothing(self):
        _, steps = play(ActionRepeat(Counter(length=3), 1), STILL[:3])
        assert steps.reward.tolist() == [1, 2, 3]

    def test_goes_on_until_all_agents_are_done_and_one_that_is_done_waits(self):
        """The first agent ends with the first step: it is rewarded once, and saw no more than that step."""
        _, steps = play(ActionRepeat(Relay(), 4), STILL_TWO[:1])
        assert steps.reward.tolist() == [[1, 3]]
        assert steps.obs["count"][0, :, 0].tolist() == [1, 3]
        assert steps.obs["mode"][0].tolist() == [1, 0]
        assert steps.terminated.tolist() == [[True, True]]

    def test_an_agent_that_is_done_keeps_how_it_ended(self):
        _, steps = play(ActionRepeat(TimeLimit(Relay(), 2), 2), STILL_TWO[:1])
        assert steps.reward.tolist() == [[1, 2]]
        assert steps.terminated.tolist() == [[True, False]]
        assert steps.truncated.tolist() == [[False, True]]


class TestObservations:
    def test_frame_stack_equals_gymnasium(self):
        class Numbers(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(0, 100, (1,))
            action_space = gymnasium.spaces.Discrete(1)

            def reset(self, *, seed=None, options=None):
                self.count = 0
                return np.zeros(1, np.float32), {}

            def step(self, action):
                self.count += 1
                return np.full(1, self.count, np.float32), 0.0, False, False, {}

        theirs = gymnasium.wrappers.FrameStackObservation(Numbers(), 3)
        env = FrameStack(Counter(), 3)
        first, steps = play(env, STILL[:4])
        np.testing.assert_array_equal(first, theirs.reset()[0])
        for obs in steps.obs:
            np.testing.assert_array_equal(obs, theirs.step(0)[0])
        assert env.observation_space == Box(0, 100, (3, 1))

    @pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3)], ids=["grey", "channels"])
    def test_images_are_stacked_along_their_channels_as_on_the_host(self, shape):
        """One wrapper for compiled environments and one around Gymnasium's: both give the same images."""
        rng = np.random.default_rng(0)
        images = rng.integers(0, 255, (6, *shape), np.uint8)

        class Theirs(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
            action_space = gymnasium.spaces.Discrete(1)

            def reset(self, *, seed=None, options=None):
                self.count = 0
                return images[0], {}

            def step(self, action):
                self.count += 1
                return images[self.count], 0.0, False, False, {}

        @dataclass(frozen=True)
        class Ours(Environment):
            observation_space = Box(0, 255, shape, np.uint8)
            action_space = Box(-1, 1, (1,))

            def reset(self, key):
                return jnp.int32(0), jnp.asarray(images)[0]

            def step(self, key, state, action):
                flag = jnp.bool(False)
                return state + 1, Timestep(jnp.asarray(images)[state + 1], jnp.float32(0), flag, flag, {})

        theirs, env = GymFrameStack(Theirs(), 3), StackChannels(Ours(), 3)
        first, steps = play(env, STILL[:5])
        np.testing.assert_array_equal(first, theirs.reset()[0])
        for obs in steps.obs:
            np.testing.assert_array_equal(obs, theirs.step(0)[0])
        assert steps.obs.dtype == np.uint8
        assert env.observation_space == spaces.from_gymnasium(theirs.observation_space)

    def test_a_run_with_stacked_images_has_convolutions(self):
        plan = make_plan("ppo", {"env_parameters": {}, "frame_stack": 4, "num_envs": 2, "horizon": 2}, Picture())
        assert plan.env.observation_space == Box(0, 255, (10, 10, 8), np.uint8)
        torso = plan.program.algorithm.network.module.trunk.actor_torso
        assert type(torso.encoder).__name__ == "CNN"

    def test_frame_stack_is_per_agent_and_reset_with_the_episode(self):
        env = AutoReset(FrameStack(FlattenObservation(Relay()), 2))
        _, steps = play(env, STILL_TWO[:4])
        assert steps.obs.shape == (4, 2, 2, 4)
        assert steps.obs[:, 1, :, 0].tolist() == [[0, 1], [1, 2], [0, 0], [0, 1]]
        assert steps.info["final_obs"][2, 1, :, 0].tolist() == [2, 3]

    def test_flatten_makes_one_vector_per_agent(self):
        env = FlattenObservation(Relay())
        first, steps = play(env, STILL_TWO[:1])
        assert first.tolist() == [[0, 1, 0, 0]] * 2
        assert steps.obs.tolist() == [[[1, 0, 1, 0]] * 2]
        assert env.observation_space == Box(0, [100, 1, 1, 1])

    def test_hide_keeps_the_chosen_entries(self):
        env = HideObservation(FlattenObservation(Relay()), (3, 0))
        first, steps = play(env, STILL_TWO[:2])
        assert first.tolist() == [[0, 0]] * 2
        assert steps.obs[1].tolist() == [[1, 2]] * 2
        assert env.observation_space == Box(0, [1, 100])

    @pytest.mark.parametrize(
        ("wrap", "sentence"),
        [
            (
                lambda: FrameStack(Relay(), 2),
                r"FrameStack needs a Box or a Dict of boxes, but got Discrete\(n=3\): apply FlattenObservation",
            ),
            (lambda: FrameStack(Counter(), 0), "FrameStack got k=0; it must be an integer of at least 1"),
            (lambda: TimeLimit(Counter(), 2.5), "TimeLimit got max_steps=2.5; it must be an integer of at least 1"),
            (lambda: HideObservation(Relay(), (0,)), "HideObservation needs a one-dimensional Box, but got"),
            (
                lambda: HideObservation(Counter(), (1,)),
                r"got indices_to_keep=\(1,\); give at least one index, each from 0 to 0",
            ),
            (
                lambda: RescaleAction(Counter(), 1, 1),
                "RescaleAction got low=1 and high=1; both must be finite, with low < high",
            ),
        ],
    )
    def test_errors_say_what_is_wrong(self, wrap, sentence):
        with pytest.raises(ValueError, match=sentence):
            wrap()


class TestBatch:
    def test_is_the_single_environment_many_times(self):
        env = AutoReset(EpisodeStatistics(make("CartPole-v1")))
        batch, single = Batch(env, 3), jax.jit(env.step)
        states, obs = batch.reset(KEY)
        assert obs.shape == (3, 4)
        assert len(np.unique(obs, axis=0)) == 3
        actions = jnp.array([0, 1, 1])
        _, together = batch.step(KEY, states, actions)
        for i, key in enumerate(jax.random.split(KEY, 3)):
            _, alone = single(key, jax.tree.map(lambda leaf, i=i: leaf[i], states), actions[i])
            jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a, b[i], rtol=1e-6), alone, together)

    def test_agents_come_after_environments(self):
        batch = Batch(Relay(), 5)
        states, obs = batch.reset(KEY)
        _, steps = batch.step(KEY, states, jnp.zeros((5, 2, 2)))
        assert obs["count"].shape == (5, 2, 1)
        assert steps.reward.shape == steps.terminated.shape == (5, 2)


def test_wrapped_environments_are_values():
    def build():
        return AutoReset(FrameStack(HideObservation(TimeLimit(make("CartPole-v1"), 9), [0, 2]), 3))

    assert build() == build()
    assert hash(build()) == hash(build())
    assert build() != AutoReset(make("CartPole-v1"))
