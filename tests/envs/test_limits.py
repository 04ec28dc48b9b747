"""Tasks that only a time limit ends, written for other suites: their exact value is learned through each adapter.

Reward 1 for ever at a discount of 0.7 is worth 1 / 0.3, although no episode lasts longer than 3 steps. Who takes the
limit for an end learns at most 2.2.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.envs import make
from lehr.envs.suites import craftax
from lehr.envs.suites.jaxdem import JaxDEM, Template, adapt

LIMIT, DISCOUNT = 3, 0.7


def in_gymnax():
    """In the older of Gymnax's two protocols the limit is an end; in the newer it has a method of its own."""
    gymnax = pytest.importorskip("gymnax")
    from flax import struct

    environment, spaces = gymnax.environments.environment, gymnax.environments.spaces
    knows_truncation = hasattr(environment.Environment, "is_truncated")

    @struct.dataclass
    class State(environment.EnvState):
        time: Any

    @struct.dataclass
    class Params(environment.EnvParams):
        max_steps_in_episode: int = LIMIT

    class Endless(environment.Environment):
        default_params = Params()

        def reset_env(self, key, params):
            return jnp.zeros(1), State(time=jnp.int32(0))

        def step_env(self, key, state, action, params):
            state = State(time=state.time + 1)
            over = jnp.bool(False) if knows_truncation else self.is_terminal(state, params)
            return jnp.zeros(1), state, jnp.float32(1), over, {}

        def is_terminal(self, state, params):
            return jnp.bool(False) if knows_truncation else state.time >= params.max_steps_in_episode

        def action_space(self, params=None):
            return spaces.Discrete(2)

        def observation_space(self, params):
            return spaces.Box(0, 1, (1,))

    return make(Endless())


def in_brax(wrapped):
    envs = pytest.importorskip("brax.envs")

    class Endless(envs.Env):
        observation_size, action_size, backend = 1, 1, "none"

        def reset(self, rng):
            return envs.State(None, jnp.zeros(1), jnp.float32(0), jnp.float32(0))

        def step(self, state, action):
            return state.replace(reward=jnp.float32(1), done=jnp.float32(0))

    if wrapped:
        return make(envs.training.EpisodeWrapper(Endless(), LIMIT, 1))
    return make(Endless(), episode_length=LIMIT)


def in_playground():
    mjx_env = pytest.importorskip("mujoco_playground._src.mjx_env")
    from ml_collections import config_dict

    class Endless(mjx_env.MjxEnv):
        action_size, xml_path, mj_model, mjx_model = 1, "", None, None

        def reset(self, rng):
            return mjx_env.State(None, jnp.zeros(1), jnp.float32(0), jnp.float32(0), {}, {})

        def step(self, state, action):
            return state.replace(reward=jnp.float32(1), done=jnp.float32(0))

    config = config_dict.create(ctrl_dt=0.1, sim_dt=0.1, episode_length=LIMIT, action_repeat=1)
    return make(Endless(config))


def in_craftax():
    """Craftax has no environment to inherit from: this one has what its games have."""
    pytest.importorskip("craftax")
    from flax import struct
    from gymnax.environments import spaces

    @struct.dataclass
    class State:
        achievements: Any
        timestep: Any

    @struct.dataclass
    class Params:
        max_timesteps: int = LIMIT

    class Endless:
        name, num_actions, default_params, static_env_params = "Endless", 2, Params(), Params()

        def reset_env(self, key, params):
            return jnp.zeros(1), State(jnp.zeros(1, bool), jnp.int32(0))

        def step_env(self, key, state, action, params):
            state = State(state.achievements, state.timestep + 1)
            return jnp.zeros(1), state, jnp.float32(1), state.timestep >= params.max_timesteps, {}

        def observation_space(self, params):
            return spaces.Box(0, 1, (1,))

    return craftax.adapt(Endless())


def in_jumanji():
    jumanji = pytest.importorskip("jumanji")
    from jumanji import specs
    from jumanji.types import restart, transition, truncation

    class State(NamedTuple):
        time: Any
        key: Any

    class View(NamedTuple):
        nothing: Any

    class Endless(jumanji.Environment):
        time_limit = LIMIT

        def reset(self, key):
            return State(jnp.int32(0), key), restart(View(jnp.zeros(1)))

        def step(self, state, action):
            state = State(state.time + 1, state.key)
            over = state.time >= self.time_limit
            reward, view = jnp.float32(1), View(jnp.zeros(1))
            return state, jax.lax.cond(over, truncation, transition, reward, view)

        @cached_property
        def observation_spec(self):
            return specs.Spec(View, "View", nothing=specs.BoundedArray((1,), jnp.float32, 0.0, 1.0))

        @cached_property
        def action_spec(self):
            return specs.DiscreteArray(2)

    return make(Endless())


@jax.tree_util.register_dataclass
@dataclass
class EndlessParticles:
    """Two agents, in JaxDEM's protocol."""

    count: Any
    env_params: dict

    max_num_agents = 2
    num_envs = 1
    action_space_size = 1

    @staticmethod
    def reset(env, key):
        env.count = jnp.int32(0)
        return env

    @staticmethod
    def step(env, action):
        env.count = env.count + 1
        return env

    @staticmethod
    def observation(env):
        return jnp.zeros((2, 1))

    @staticmethod
    def reward(env):
        return jnp.ones(2)

    @staticmethod
    def done(env):
        return env.count > env.env_params["max_steps"]

    @staticmethod
    def info(env):
        return {}


def in_jaxdem():
    env = adapt(EndlessParticles(jnp.int32(0), {"max_steps": jnp.asarray(LIMIT - 1)}), max_action=1.0)
    assert isinstance(env, JaxDEM)
    assert isinstance(env.template, Template)
    return env


KINDS = {
    "gymnax": in_gymnax,
    "brax": lambda: in_brax(wrapped=False),
    "brax's episode wrapper": lambda: in_brax(wrapped=True),
    "playground": in_playground,
    "craftax": in_craftax,
    "jumanji": in_jumanji,
    "jaxdem": in_jaxdem,
}


@pytest.mark.parametrize(
    "kind", [kind if kind in ("gymnax", "brax") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_what_is_only_ever_truncated_is_worth_its_exact_value(kind, tmp_path):
    result = lehr.train(
        "ppo",
        env=KINDS[kind](),
        run_dir=tmp_path / "run",
        total_steps=150 * 16 * 8,
        num_envs=16,
        horizon=8,
        epochs=2,
        minibatches=2,
        hidden_sizes=(16,),
        discount=DISCOUNT,
        learning_rate="0.02 -> 0",
        entropy_coef=0.0,
        normalise_observations=False,
        normalise_rewards=False,
        evaluate_episodes=0,
        tensorboard=False,
        progress=False,
    )
    network, obs = result.policy.program.agent.network, jnp.zeros((1, 1))
    obs = {"nothing": obs} if kind == "jumanji" else obs
    value = network.value(result.params, network.initial_carry((1,)), obs)
    assert float(value[0]) == pytest.approx(1 / (1 - DISCOUNT), abs=0.08)
    np.testing.assert_array_equal(result.metrics["episode/length"][1:], LIMIT)
