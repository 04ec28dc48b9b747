from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.algorithms import ppo
from lehr.config import build
from lehr.envs import check_env, make
from lehr.envs.base import NEVER
from lehr.envs.builtin.classic import CartPole, CartPoleState
from lehr.envs.suites import gymnax as adapter
from lehr.errors import InputError
from lehr.networks import NetworkConfig
from lehr.report import film, render
from lehr.spaces import Box, Dict, Discrete
from lehr.training.program import assemble
from lehr.training.runners.device import chunk, metric_names
from tests.small import SMALL, quick_first

gymnax = pytest.importorskip("gymnax")
environment = pytest.importorskip("gymnax.environments.environment")
spaces = pytest.importorskip("gymnax.environments.spaces")
struct = pytest.importorskip("flax.struct")

VERSION_1 = hasattr(environment.Environment, "is_truncated")
ABSENT = {"MNISTBandit-bsuite"}  # downloads its images
if not VERSION_1:
    ABSENT |= {"SimpleBandit-bsuite"}  # fails in its first step
SLOW = {"Asterix-MinAtar", "Freeway-MinAtar", "Seaquest-MinAtar"}  # to compile; they end like SpaceInvaders
NAMES = sorted(set(gymnax.registered_envs) - ABSENT - SLOW)

QUICKLY = {"xla_backend_optimization_level": 0}
"""Compiling takes longer than all that is computed here."""


def their_step(env, params, key, state, action):
    """Gymnax's own step without its reset: observation, state, reward, and whether the episode is over."""
    obs, state, reward, done, _ = env.step_env(key, state, action, params)
    return obs, state, reward, (done | env.is_truncated(state, params)) if VERSION_1 else done


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", quick_first(NAMES, 8))
def test_steps_are_those_of_gymnax_and_its_time_limit_truncates(name):
    """Side by side from the same state, begun so late that the time limit is met within the ten steps."""
    ours = adapter.make(name)
    env, params = gymnax.make(name)
    limit = int(params.max_steps_in_episode)

    def both(key):
        (state, first), (their_first, _) = ours.reset(key), env.reset_env(key, params)
        state = state.replace(time=jnp.asarray(max(0, limit - 5), state.time.dtype))

        def step(states, key):
            state, theirs = states
            action = ours.action_space.sample(key)
            state, timestep = ours.step(key, state, action)
            obs, theirs, reward, done = their_step(env, params, key, theirs, action)
            return (state, jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), theirs, state)), (
                timestep,
                (obs, reward, done),
            )

        return first, their_first, jax.lax.scan(step, (state, state), jax.random.split(key, 10))[1]

    with jax.numpy_rank_promotion("allow"):
        run = jax.jit(both, compiler_options=QUICKLY)
        first, their_first, (timestep, (obs, reward, done)) = run(jax.random.key(3))
    np.testing.assert_array_equal(first, their_first)
    length = int(np.argmax(done)) + 1
    assert done[length - 1]
    np.testing.assert_array_equal((timestep.terminated | timestep.truncated)[:length], done[:length])
    np.testing.assert_array_equal(timestep.obs[:length], obs[:length])
    rewarded = length - (name == "Pong-misc" and not VERSION_1)  # 0.0.9 withholds the reward of a step that is cut
    np.testing.assert_array_equal(timestep.reward[:rewarded], reward[:rewarded])
    if type(env).__name__ in adapter.FIXED_LENGTH:
        assert timestep.terminated[length - 1]
        assert ours.truncation_gap == NEVER
        assert not timestep.truncated.any()
    else:
        assert timestep.truncated[length - 1] == (length == 5)
        assert ours.truncation_gap == limit


@pytest.mark.parametrize(("name", "truncates"), [("Pendulum-v1", True), ("DiscountingChain-bsuite", False)])
def test_an_episode_lasts_as_long_as_its_limit(name, truncates):
    env = adapter.make(name)
    limit = int(gymnax.make(name)[1].max_steps_in_episode)

    def step(state, key):
        return env.step(key, state, env.action_space.sample(key))

    keys = jax.random.split(jax.random.key(0), limit)
    timesteps = jax.jit(lambda: jax.lax.scan(step, env.reset(keys[0])[0], keys)[1])()
    end, never = (timesteps.truncated, timesteps.terminated)[:: 1 if truncates else -1]
    assert np.flatnonzero(end).tolist() == [limit - 1]
    assert not never.any()


CHECKED = ["Breakout-MinAtar", "FourRooms-misc", "MemoryChain-bsuite", "PointRobot-misc"]


@pytest.mark.parametrize("name", CHECKED)
def test_environments_keep_to_the_protocol(name):
    assert check_env(adapter.make(name), num_steps=50) == []


@pytest.mark.parametrize(
    ("name", "observation_space", "action_space"),
    [
        ("Breakout-MinAtar", Box(0, 1, (10, 10, 4), np.int8), Discrete(3)),
        ("Pendulum-v1", Box([-1, -1, -8], [1, 1, 8]), Box(-2, 2, (1,))),
        ("FourRooms-misc", Box(1, 11, (4,)), Discrete(4)),
        ("Reacher-misc", Box(-np.inf, np.inf, (8,)), Box(-1, 1, (2,))),
    ],
)
def test_spaces(name, observation_space, action_space):
    env = adapter.make(name)
    assert env.observation_space == observation_space
    assert env.action_space == action_space


def test_parameters_go_to_the_class_and_to_the_params():
    env = lehr.envs.make("gymnax:DeepSea-bsuite", size=5, unscaled_move_cost=0.5)
    assert env.observation_space.shape == (5, 5)
    state, _ = env.reset(jax.random.key(0))
    _, timestep = env.step(jax.random.key(0), state, state.action_mapping[0, 0].astype(int))
    np.testing.assert_allclose(timestep.reward, -0.1, rtol=1e-6)
    assert adapter.make("CartPole-v1", max_steps_in_episode=7).truncation_gap == 7
    torques = adapter.make("Acrobot-v1", available_torque=[-2.0, 0.0, 2.0])
    assert torques.task.params.available_torque.tolist() == [-2.0, 0.0, 2.0]
    assert torques == adapter.make("Acrobot-v1", available_torque=jnp.array([-2.0, 0.0, 2.0]))


def test_equal_environments_are_traced_once(count_traces):
    @count_traces
    def begin(env):
        return env.reset(jax.random.key(0))[1]

    jitted = jax.jit(begin, static_argnums=0)
    for gravity in (9, 9.0, 10):
        jitted(adapter.make("CartPole-v1", gravity=gravity, tau=0.01))
    assert begin.traces == 2


def test_an_environment_can_be_made_within_a_trace():
    adapter._task.cache_clear()
    observed = jax.jit(lambda key: adapter.Gymnax("Breakout-MinAtar").reset(key)[1])(jax.random.key(0))
    np.testing.assert_array_equal(observed, adapter.make("Breakout-MinAtar").reset(jax.random.key(0))[1])


def test_environment_objects_are_adapted():
    env, _ = gymnax.make("MountainCar-v0")
    adapted = lehr.envs.make(env, max_steps_in_episode=4)
    assert adapted == adapter.adapt(env, max_steps_in_episode=4)
    assert adapted.truncation_gap == 4
    assert adapted.action_space == Discrete(3)


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        ("Breakout", {}, "no environment named 'gymnax:Breakout'; did you mean 'gymnax:Breakout-MinAtar'"),
        ("Cartpole-v1", {}, "did you mean 'gymnax:CartPole-v1'"),
        ("CartPole-v1", {"gravty": 1}, "gymnax:CartPole-v1 has no parameter 'gravty'; did you mean 'gravity'"),
        ("CartPole-v1", {"gravity": "much"}, "got gravity='much'; it must be a number such as 9.8"),
        ("CartPole-v1", {"max_steps_in_episode": 2.5}, "got max_steps_in_episode=2.5; it must be a number such as 500"),
        ("FourRooms-misc", {"goal_fixed": {}}, "got goal_fixed={}; it must be a number, a string or a list of these"),
        ("MetaMaze-misc", {"maze_size": 4}, "gymnax:MetaMaze-misc could not be created .AssertionError"),
    ],
)
def test_errors_say_what_is_wrong(name, parameters, sentence):
    with pytest.raises(InputError, match=sentence):
        adapter.make(name, **parameters)


def test_wrappers_of_gymnax_are_refused():
    purerl = pytest.importorskip("gymnax.wrappers.purerl")
    with pytest.raises(InputError, match="wrapper LogWrapper is not supported: give the environment that it wraps"):
        adapter.adapt(purerl.LogWrapper(gymnax.make("CartPole-v1")[0]))


@pytest.mark.skipif(VERSION_1, reason="gymnax 1 has repaired it")
def test_a_task_that_is_broken_says_so():
    with pytest.raises(
        InputError, match="SimpleBandit does not work in the installed version of gymnax: its first step fails"
    ):
        adapter.make("SimpleBandit-bsuite")


def test_all_names_are_listed():
    assert adapter.names() == sorted(gymnax.registered_envs)


# The two ways of Gymnax to end an episode, each on a walk to the right with an end at `goal`.


@struct.dataclass
class WalkState(environment.EnvState):
    place: jax.Array
    time: int


@struct.dataclass
class WalkParams(environment.EnvParams):
    goal: int = 3
    max_steps_in_episode: int = 5


class Walk(environment.Environment):
    """What both ways share; observes the share of the time that is over, as some tasks do."""

    @property
    def default_params(self):
        return WalkParams()

    def reset_env(self, key, params):
        state = WalkState(place=jnp.float32(0), time=0)
        return self.observe_both(state, params), state

    def step_env(self, key, state, action, params):
        state = WalkState(place=state.place + action, time=state.time + 1)
        return self.observe_both(state, params), state, state.place, self.ends(state, params), {}

    def observe_both(self, state, params):
        share = jnp.float32(state.time) / params.max_steps_in_episode
        return {"place": state.place[None], "share": share[None]}

    def action_space(self, params):
        return spaces.Discrete(2)

    def observation_space(self, params):
        return spaces.Dict({"place": spaces.Box(0, 5, (1,)), "share": spaces.Box(0, 1, (1,))})


class OldWalk(Walk):
    """As Gymnax 0.0.9 has it: the time limit ends the episode like anything else."""

    def ends(self, state, params):
        return (state.place >= params.goal) | (state.time >= params.max_steps_in_episode)


class NewWalk(Walk):
    """As Gymnax 1 has it: a step says what terminated, `is_truncated` what the time limit cut."""

    def ends(self, state, params):
        return state.place >= params.goal

    def is_truncated(self, state, params):
        return state.time >= params.max_steps_in_episode


def walk(env, actions):
    state, _ = env.reset(jax.random.key(0))
    timesteps = []
    for action in actions:
        state, timestep = env.step(jax.random.key(0), state, jnp.int32(action))
        timesteps.append(timestep)
    return timesteps


@pytest.mark.parametrize(
    "kind", [pytest.param(OldWalk, marks=pytest.mark.skipif(VERSION_1, reason="of 0.0.9")), NewWalk]
)
def test_both_ways_to_end_an_episode_are_told_apart(kind):
    env = adapter.adapt(kind())
    assert isinstance(env.observation_space, Dict)
    assert check_env(env, num_steps=20) == []
    short, long = walk(env, [1, 0, 1, 1]), walk(env, [0, 1, 0, 1, 0])
    assert [(bool(t.terminated), bool(t.truncated)) for t in short] == [(False, False)] * 3 + [(True, False)]
    assert [(bool(t.terminated), bool(t.truncated)) for t in long] == [(False, False)] * 4 + [(False, True)]
    np.testing.assert_allclose([t.obs["share"][0] for t in long], [0.2, 0.4, 0.6, 0.8, 1.0])
    assert [float(t.reward) for t in long] == [0, 1, 1, 2, 2]
    assert env.truncation_gap == (5 if kind is OldWalk else 1)


@pytest.mark.slow
def test_images_are_trained_on(tmp_path):
    result = lehr.train(
        "ppo",
        env="gymnax:Breakout-MinAtar",
        run_dir=tmp_path / "run",
        total_steps=256,
        **SMALL,
    )
    assert np.isfinite(result.metrics["loss/policy"]).all()


BREAKOUT = {
    "torso": "mlp",  # quicker than convolutions
    "num_envs": 32,
    "horizon": 32,
    "epochs": 4,
    "minibatches": 4,
    "learning_rate": "2e-3 -> 0",
}


@pytest.mark.slow
def test_breakout_is_learned():
    """Chance breaks 0.4 bricks; four seeds broke 5.7 to 6.5."""
    total_steps = 65_536
    config, network_config = build([ppo.Config, NetworkConfig], BREAKOUT)
    program, state = assemble("ppo", "gymnax:Breakout-MinAtar", config, network_config, total_steps, 0)
    updates = total_steps // program.steps_per_update
    column = metric_names(program, state).index("episode/return")
    _, rows = jax.jit(partial(chunk, program, updates), donate_argnums=0)(state, jnp.int32(updates))
    assert np.nanmean(np.asarray(rows)[-updates // 10 :, column]) >= 4


def test_classic_control_is_drawn_like_lehrs_own():
    env = make("gymnax:CartPole-v1")
    state, _ = env.reset(jax.random.key(0))
    expected = render.frame(CartPole(), CartPoleState(0.5, 0.0, 0.1, 0.0))
    np.testing.assert_array_equal(render.frame(env, state.replace(x=0.5, theta=0.1)), expected)
    assert film.formats(env) == (".gif", ".mp4")


def test_other_tasks_are_drawn_by_gymnax():
    env = make("gymnax:FourRooms-misc")
    state, _ = env.reset(jax.random.key(0))
    here, there = (render.frame(env, state.replace(pos=jnp.array(place))) for place in ([1, 1], [5, 5]))
    assert here.dtype == np.uint8
    assert (here != there).any()
