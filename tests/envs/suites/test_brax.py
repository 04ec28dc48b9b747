import base64
import json
import re
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.algorithms import ppo
from lehr.config import build
from lehr.envs import ActionRepeat, TimeLimit, check_env
from lehr.envs.base import NEVER
from lehr.envs.suites import brax as adapter
from lehr.errors import InputError
from lehr.networks import NetworkConfig
from lehr.report import film
from lehr.spaces import Box
from lehr.training.program import assemble
from lehr.training.runners.device import chunk, metric_names
from tests.small import SMALL

pytest.importorskip("brax")
brax = adapter._brax()

QUICKLY = {"xla_backend_optimization_level": 0}
"""Compiling takes longer than all that is computed here."""


@pytest.fixture(scope="module")
def pendulum():
    return adapter.make("inverted_pendulum", backend="spring")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_steps_are_those_of_brax(pendulum):
    """Side by side, though only a part of Brax's state is kept here."""
    theirs = brax.get_environment("inverted_pendulum", backend="spring")

    def both(key):
        (state, obs), their_state = pendulum.reset(key), theirs.reset(key)

        def step(states, key):
            state, their_state = states
            action = pendulum.action_space.sample(key)
            state, timestep = pendulum.step(key, state, action)
            their_state = theirs.step(their_state, action)
            their_state = their_state.replace(reward=jnp.asarray(their_state.reward, jnp.float32))
            return (state, their_state), (timestep, (their_state.obs, their_state.reward, their_state.done))

        return obs, their_state.obs, jax.lax.scan(step, (state, their_state), jax.random.split(key, 40))[1]

    with jax.numpy_rank_promotion("allow"):
        first, their_first, (timestep, (obs, reward, done)) = jax.jit(both, compiler_options=QUICKLY)(jax.random.key(1))
    np.testing.assert_array_equal(first, their_first)
    np.testing.assert_allclose(timestep.obs, obs, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(timestep.reward, reward)
    np.testing.assert_array_equal(timestep.terminated, done == 1)
    assert timestep.terminated.any()
    assert not timestep.truncated.any()


def test_the_state_holds_what_a_step_reads(pendulum):
    physics = pendulum.env.task.physics
    state = physics.structure.unflatten(physics.leaves)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    read = {path for path, is_kept in zip(paths, physics.is_kept, strict=True) if is_kept}
    assert ".pipeline_state.q" in read
    assert not {".obs", ".reward", ".done"} & read
    assert len(read) < len(paths)


def test_a_page_shows_where_the_bodies_are(pendulum, tmp_path):
    physics = pendulum.env.task.physics
    whole = physics.whole(
        [
            jnp.zeros(leaf.shape, leaf.dtype)
            for leaf, is_kept in zip(physics.leaves, physics.is_kept, strict=True)
            if is_kept
        ]
    )
    moved = whole.replace(pipeline_state=whole.pipeline_state.replace(q=jnp.array([0.25, 0.0])))
    film.save(pendulum.env, [physics.kept(moved)], [], tmp_path / "film.html")
    packed = re.search(r'system = "([^"]+)"', (tmp_path / "film.html").read_text())[1]
    (place,) = json.loads(zlib.decompress(base64.b64decode(packed)))["states"]["x"]
    assert [body[0] for body in place["pos"]] == [0.25, 0.25]
    assert film.can_show(pendulum)
    assert not film.can_show(adapter.make("fast"))


@pytest.mark.slow
def test_the_physics_of_an_ant_needs_no_scatter_and_almost_no_gather():
    """On a GPU each would be a kernel of its own, ten times in every step."""
    env = adapter.make("ant", backend="spring")
    state, _ = jax.eval_shape(env.reset, jax.random.key(0))
    program = str(jax.make_jaxpr(env.step)(jax.random.key(0), state, jax.ShapeDtypeStruct((8,), jnp.float32)))
    assert "scatter" not in program
    assert "dot_general" not in program
    assert program.count("gather[") <= 1


@pytest.mark.parametrize("parameters", [{}, {"obs_mode": "dict_state", "asymmetric_obs": True, "action_repeat": 2}])
def test_environments_keep_to_the_protocol(parameters):
    assert check_env(adapter.make("fast", **parameters), num_steps=20) == []


@pytest.mark.slow
def test_a_physical_environment_keeps_to_the_protocol(pendulum):
    assert check_env(pendulum, num_steps=20) == []


def flags(env, actions):
    """Whether each step terminated and whether it truncated."""

    def step(state, action):
        state, timestep = env.step(jax.random.key(0), state, jnp.full(env.action_space.shape, action))
        return state, (timestep.terminated, timestep.truncated, timestep.reward)

    state, _ = env.reset(jax.random.key(0))
    return jax.tree.map(np.ndarray.tolist, jax.tree.map(np.asarray, jax.lax.scan(step, state, jnp.array(actions))[1]))


def test_the_time_limit_truncates():
    env = adapter.make("fast", episode_length=3)
    terminated, truncated, _ = flags(env, [1.0, 1.0, 1.0])
    assert truncated == [False, False, True]
    assert terminated == [False] * 3
    assert (env.truncation_gap, env.env.truncation_gap) == (3, NEVER)
    assert adapter.make("fast", episode_length=None).truncation_gap == NEVER


def test_an_action_is_repeated_up_to_the_time_limit():
    env = adapter.make("fast", episode_length=3, action_repeat=2)
    assert env == ActionRepeat(TimeLimit(adapter.Brax("fast"), 3), 2)
    _, truncated, rewards = flags(env, [1.0, 1.0])
    single = flags(adapter.make("fast"), [1.0] * 3)[2]
    assert truncated == [False, True]
    np.testing.assert_allclose(rewards, [single[0] + single[1], single[2]], rtol=1e-6)


def test_an_episode_wrapper_of_brax_says_what_was_truncated():
    wrapped = brax.training.EpisodeWrapper(brax.get_environment("fast"), 4, 2)
    env = lehr.envs.make(wrapped)
    terminated, truncated, _ = flags(env, [1.0, 1.0])
    assert truncated == [False, True]
    assert terminated == [False, False]
    assert (env.truncation_gap, env.env_steps_per_step) == (2, 2)
    assert check_env(env, num_steps=10) == []
    with pytest.raises(
        InputError, match="EpisodeWrapper already sets the episode length and the action repeat: remove episode_length"
    ):
        adapter.adapt(wrapped, episode_length=3)


class Stumble(brax.Env):
    """Falls on its third step, and keeps the count in `info` alone."""

    def reset(self, rng):
        return brax.State(None, jnp.zeros(1), jnp.float32(0), jnp.float32(0), {"height": jnp.float32(1)}, {"count": 0})

    def step(self, state, action):
        count = state.info["count"] + 1
        done, info = jnp.float32(count == 3), {**state.info, "count": count}
        return state.replace(obs=jnp.float32(count)[None], reward=jnp.float32(1), done=done, info=info)

    observation_size, action_size, backend = 1, 2, "none"


def test_environment_objects_are_adapted():
    env = adapter.adapt(Stumble(), episode_length=5)
    assert (env.action_space, env.observation_space) == (Box(-1, 1, (2,)), Box(-np.inf, np.inf, (1,)))
    assert env.max_steps == 5
    assert len(jax.tree.leaves(env.env.reset(jax.random.key(0))[0])) == 1
    assert check_env(env, num_steps=10) == []
    assert flags(env, [0.0] * 3) == ([False, False, True], [False] * 3, [1.0] * 3)
    terminated, truncated, _ = flags(adapter.adapt(brax.training.EpisodeWrapper(Stumble(), 3, 1)), [0.0] * 3)
    assert (terminated, truncated) == ([False, False, True], [False] * 3)


def test_a_state_that_changes_its_entries_is_named():
    class Growing(Stumble):
        def step(self, state, action):
            state = super().step(state, action)
            return state.replace(metrics={**state.metrics, "speed": jnp.float32(1)})

    with pytest.raises(InputError, match="Growing has other entries after a step than after a reset"):
        adapter.adapt(Growing())


@pytest.mark.parametrize("wrapper", ["VmapWrapper", "AutoResetWrapper", "EvalWrapper"])
def test_wrappers_that_do_what_lehr_does_are_refused(wrapper):
    env = getattr(brax.training, wrapper)(brax.get_environment("fast"))
    with pytest.raises(InputError, match=f"Brax's {wrapper} batches, resets or evaluates, which Lehr does itself"):
        adapter.adapt(env)


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        ("inverted_pendulm", {}, "no environment named 'brax:inverted_pendulm'; did you mean 'brax:inverted_pendulum'"),
        ("ant", {"healthy_rewrd": 1}, "brax:ant has no parameter 'healthy_rewrd'; did you mean 'healthy_reward'"),
        ("ant", {"backend": "springs"}, "brax:ant has no backend 'springs'; did you mean 'spring'"),
        (
            "ant",
            {"healthy_z_range": {}},
            "healthy_z_range of brax:ant is {}; it must be a number, a string or a list of these",
        ),
        ("fast", {"episode_length": 0}, "TimeLimit got max_steps=0; it must be an integer of at least 1"),
        ("fast", {"action_repeat": 0}, "ActionRepeat got k=0; it must be an integer of at least 1"),
    ],
)
def test_errors_say_what_is_wrong(name, parameters, sentence):
    with pytest.raises(InputError, match=sentence):
        adapter.make(name, **parameters)


def test_a_name_without_its_prefix_is_found_here():
    with pytest.raises(InputError, match=r"'inverted_pendulum' \(did you mean 'brax:inverted_pendulum'\?\)"):
        lehr.envs.make("inverted_pendulum")


def test_an_existing_environment_takes_no_arguments_of_its_class():
    sentence = "Stumble is an existing object, so the parameter 'episode_lenth' cannot be set; did you mean"
    with pytest.raises(InputError, match=sentence):
        adapter.adapt(Stumble(), episode_lenth=3)


def test_equal_environments_are_traced_once(count_traces):
    @count_traces
    def begin(env):
        return env.reset(jax.random.key(0))[1]

    jitted = jax.jit(begin, static_argnums=0)
    for mode in ("ndarray", "ndarray", "dict_state"):
        jitted(adapter.make("fast", obs_mode=mode, n_frames=1))
    assert begin.traces == 2


def test_resets_are_shared():
    assert adapter.make("fast").environments_per_reset == 16


def test_all_names_are_listed():
    assert {"ant", "halfcheetah", "humanoid", "inverted_pendulum", "fast"} <= set(adapter.names())


def test_a_run_is_trained(tmp_path):
    result = lehr.train(
        "ppo",
        env="brax:fast",
        env_parameters={"episode_length": 8},
        run_dir=tmp_path / "run",
        total_steps=256,
        **SMALL,
    )
    assert np.isfinite(result.metrics["loss/policy"]).all()


PENDULUM = {
    "num_envs": 64,
    "horizon": 32,
    "epochs": 4,
    "minibatches": 4,
    "learning_rate": "1e-3 -> 0",
    "discount": 0.98,
    "entropy_coef": 0.0,
    "initial_log_std": -1.0,
    "normalise_observations": True,
    "normalise_rewards": True,
}


@pytest.mark.slow
def test_the_pendulum_is_balanced(pendulum):
    """A policy that learns nothing lasts 28 steps; four seeds lasted 550 to 800."""
    total_steps = 131_072
    config, network_config = build([ppo.Config, NetworkConfig], PENDULUM)
    program, state = assemble("ppo", pendulum, config, network_config, total_steps, 0)
    updates = total_steps // program.steps_per_update
    column = metric_names(program, state).index("episode/return")
    _, rows = jax.jit(partial(chunk, program, updates), donate_argnums=0)(state, jnp.int32(updates))
    assert np.nanmean(np.asarray(rows)[-updates // 10 :, column]) >= 300
