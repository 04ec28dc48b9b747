"""The drop-in compared with Brax's own PPO: numbers, files, Brax's own tests; and its schedules."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.compat.brax import load_policy, saving, train, upstream
from lehr.compat.brax.arguments import adaptive_rate, network_maker
from lehr.compat.brax.coefficients import NAMES, annealed, bound_coefficients
from lehr.compat.brax.epoch import BraxParams, CarriedState
from lehr.compat.brax.loss import (
    LossSettings,
    NetworkParams,
    Transitions,
    lambda_advantages,
    ppo_loss,
    quantile_huber_loss,
)
from lehr.compat.brax.pixels import shifted
from lehr.envs.suites.foreign import by_their_rules
from lehr.errors import InputError
from lehr.schedules import env_steps
from tests.small import quick_first

pytest.importorskip("brax")
with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
    warnings.simplefilter("ignore")
    envs = importlib.import_module("brax.envs")
    brax_checkpoint = importlib.import_module("brax.training.agents.ppo.checkpoint")
    brax_losses = importlib.import_module("brax.training.agents.ppo.losses")
    brax_networks = importlib.import_module("brax.training.agents.ppo.networks")
    brax_vision = importlib.import_module("brax.training.agents.ppo.networks_vision")
    brax_train = importlib.import_module("brax.training.agents.ppo.train")
    brax_tests = importlib.import_module("brax.training.agents.ppo.train_test")
    brax_types = importlib.import_module("brax.training.types")

small_networks = functools.partial(
    brax_networks.make_ppo_networks, policy_hidden_layer_sizes=(8,), value_hidden_layer_sizes=(8,)
)
SMALL = {
    "episode_length": 12,
    "num_envs": 8,
    "unroll_length": 4,
    "batch_size": 8,
    "num_minibatches": 2,
    "num_updates_per_batch": 2,
    "num_eval_envs": 8,
    "network_factory": small_networks,
}
STEPS = 64
"""Env steps of one training step with these sizes."""


@pytest.fixture(autouse=True, scope="module")
def _compiled_quickly():
    """In these tests, compiling takes longer than running."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def fast():
    return envs.get_environment("fast")


@contextlib.contextmanager
def device_put_replicated():
    """Put back a function that Brax's training calls and newer versions of JAX lack."""

    def replicate(tree, devices):
        return jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * len(devices)), tree)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_put_replicated", replicate, raising=False)
        yield


def assert_same(ours, brax, **tolerance):
    assert jax.tree.structure(ours) == jax.tree.structure(brax)
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), ours, brax)


# The same mathematics ----------------------------------------------------------------------------------------------


def random_ends(key, shape):
    """`done` and `truncation` of random steps, as 0 and 1."""
    kind = jax.random.choice(key, 3, shape, p=jnp.array([0.7, 0.15, 0.15]))
    return (kind > 0).astype(jnp.float32), (kind == 2).astype(jnp.float32)


def test_advantages_equal_those_of_brax():
    keys = jax.random.split(jax.random.key(0), 4)
    rewards, values = jax.random.normal(keys[0], (2, 7, 5))
    last = jax.random.normal(keys[1], (5,))
    done, truncation = random_ends(keys[2], (7, 5))
    termination = done * (1 - truncation)
    assert termination.any()
    assert truncation.any()
    found = jax.jit(lambda_advantages)(rewards, values, last, termination, truncation, 0.97, 0.9)
    brax = jax.jit(brax_losses.compute_gae)(truncation, termination, rewards, values, last, 0.9, 0.97)
    assert_same(found, brax, atol=1e-6)


def test_quantile_huber_loss_equals_that_of_brax():
    quantiles, targets = jax.random.normal(jax.random.key(0), (3, 4, 6)), jax.random.normal(jax.random.key(1), (3, 4))
    found = quantile_huber_loss(quantiles, targets, 0.7)
    np.testing.assert_allclose(found, brax_losses.quantile_huber_loss(quantiles, targets, kappa=0.7), rtol=1e-6)


LOSSES = {
    "squashed": ({}, LossSettings(True, None, False)),
    "normal, clipped values": ({"distribution_type": "normal"}, LossSettings(False, 0.1, False)),
    "quantiles": ({"use_distributional_critic": True}, LossSettings(True, 1.0, True)),
}
COEF = dict(zip(NAMES, (3e-4, 0.02, 0.95, 5.0, 0.2, 0.9, 0.7), strict=True))


@pytest.mark.parametrize("case", quick_first(LOSSES))
def test_loss_of_a_minibatch_equals_that_of_brax(case):
    """Value, metrics and gradients, for the same parameters and data."""
    options, settings = LOSSES[case]
    network = small_networks(3, 2, preprocess_observations_fn=upstream.running_statistics.normalize, **options)

    def made(key):
        """Some segments, and parameters that have changed since the rollout."""
        keys = jax.random.split(key, 6)
        obs = jax.random.normal(keys[0], (6, 7, 3))
        params = NetworkParams(network.policy_network.init(keys[1]), network.value_network.init(keys[2]))
        normalizer = upstream.running_statistics.update(upstream.running_statistics.init_state(jnp.zeros(3)), obs)
        act = brax_networks.make_inference_fn(network, True, settings.use_distributional_critic)
        _, extras = act((normalizer, *params))(obs[:-1], keys[3])
        done, truncation = random_ends(keys[4], (5, 7))
        moved = jax.tree.map(lambda x: x + 0.05 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), params)
        return moved, normalizer, obs, extras, jax.random.normal(keys[5], (5, 7)), done, truncation

    def ours(key):
        params, normalizer, obs, extras, reward, done, truncation = made(key)
        acted = extras["raw_action"], extras["log_prob"], extras["distribution_params"]
        batch = Transitions(obs, *acted, reward, done, truncation, extras["value"])
        differentiate = jax.value_and_grad(ppo_loss, has_aux=True)
        return differentiate(params, normalizer, batch, key, network, settings, COEF)

    def brax(key):
        params, normalizer, obs, extras, reward, done, truncation = made(key)
        extras = {"policy_extras": extras, "state_extras": {"truncation": truncation}}
        data = brax_types.Transition(obs[:-1], extras["policy_extras"]["raw_action"], reward, 1 - done, obs[1:], extras)
        renamed = {name: value for name, value in COEF.items() if name not in ("learning_rate", "vf_loss_coefficient")}
        (loss, metrics), gradients = jax.value_and_grad(brax_losses.compute_ppo_loss, has_aux=True)(
            brax_losses.PPONetworkParams(*params),
            normalizer,
            jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), data),
            key,
            network,
            **renamed,
            vf_coefficient=COEF["vf_loss_coefficient"],
            **settings._asdict(),
        )
        return (loss, metrics), NetworkParams(gradients.policy, gradients.value)

    with by_their_rules():
        key = jax.random.PRNGKey(1)
        assert_same(jax.jit(ours)(key), jax.jit(brax)(key), rtol=1e-5, atol=1e-5)


def test_image_augmentation_equals_that_of_brax():
    images = np.random.default_rng(0).normal(size=(2, 5, 3, 12, 12, 1)).astype(np.float32)
    obs = {"pixels/b": images[0], "pixels/a": images[1], "state": np.zeros((5, 3, 2), np.float32)}

    def both(key):
        found = shifted(jax.tree.map(lambda x: x.swapaxes(0, 1), obs), jax.random.split(key, 5))
        return jax.tree.map(lambda x: x.swapaxes(0, 1), found), brax_train._random_translate_pixels(obs, key)

    with by_their_rules():
        assert_same(*jax.jit(both)(jax.random.PRNGKey(3)))


# The same training -------------------------------------------------------------------------------------------------


def curve_of(function, env, **options):
    """The metrics that `progress_fn` gets, by step, and the result."""
    curve = {}
    result = function(env, progress_fn=lambda step, metrics: curve.update({step: metrics}), **options)
    return curve, result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("brax")


TRAINING = {
    **SMALL,
    "num_timesteps": 8 * STEPS * 2,
    "num_evals": 3,
    "num_resets_per_eval": 2,
    "action_repeat": 2,
    "episode_length": 24,
    "normalize_observations": True,
    "learning_rate": 3e-3,
    "entropy_cost": 1e-2,
    "discounting": 0.95,
    "reward_scaling": 10,
    "max_grad_norm": 1.0,
    "seed": 3,
}


@pytest.fixture(scope="module")
def ours(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = {**TRAINING, "save_checkpoint_path": str(folder / "ours")}
        return curve_of(train, envs.get_environment("fast"), **options)


@pytest.fixture(scope="module")
def brax(folder):
    with by_their_rules(), device_put_replicated():
        options = {**TRAINING, "save_checkpoint_path": str(folder / "brax")}
        return curve_of(brax_train.train, envs.get_environment("fast"), **options)


@pytest.mark.slow
def test_training_equals_that_of_brax(ours, brax):
    """The same seed gives the same curve: rollouts, resets, normalisation, minibatches, gradient steps, evaluation."""
    (curve, (_, params, last)), (their_curve, (_, their_params, their_last)) = ours, brax
    assert list(curve) == list(their_curve) == [0, 8 * STEPS, 16 * STEPS]
    for step, measured in their_curve.items():
        assert set(measured) <= set(curve[step])
        for name, value in measured.items():
            if not name.endswith(("sps", "walltime", "time")):
                np.testing.assert_allclose(curve[step][name], value, rtol=1e-4, atol=1e-6, err_msg=f"{name} at {step}")
    assert_same(params, their_params, rtol=1e-3, atol=1e-5)
    assert set(last) - set(their_last) == {f"training/{name}" for name in NAMES if name != "learning_rate"}


# Schedules ---------------------------------------------------------------------------------------------------------

SCHEDULED = {
    "learning_rate": "3e-4 -> 1e-4 exponential",
    "discounting": lambda step: 0.9 + 0.05 * step / 1e3,
    "reward_scaling": {"start": 1.0, "end": 2.0, "shape": "cosine"},
    "clipping_epsilon": lehr.schedule("0.3 -> 0.2 until 50%"),
    "gae_lambda": "0.95 until 20%, 0.95 -> 0.9",
    "vf_loss_coefficient": [[0, 0.5], [100, 0.25]],
}


@pytest.mark.parametrize("shape", ["linear", pytest.param("cosine", marks=pytest.mark.slow)])
def test_applied_coefficients_follow_their_schedules(fast, shape):
    """One training step per epoch, the last one past the budget: bit for bit, and traced once.

    With XLA's older code generator, see tests/conftest.py, a cosine inside a loop is rounded differently.
    """
    total, traces = int(2.2 * STEPS), []
    curve, _ = curve_of(
        train,
        fast,
        num_timesteps=total,
        num_evals=5,
        run_evals=False,
        entropy_cost=0.01,
        entropy_cost_end=0.001,
        entropy_schedule=shape,
        policy_params_fn=lambda *args: traces.append(fast.step_count),
        **SCHEDULED if shape == "cosine" else {},
        **SMALL,
    )
    given = dict.fromkeys(NAMES, 1.0) | (SCHEDULED if shape == "cosine" else {})
    bound = bound_coefficients(given | {"entropy_cost": annealed(0.01, 0.001, shape)}, total)
    compiled = jax.jit(lambda updates: bound.values(bound.init(), env_steps(updates, STEPS)))
    assert list(curve) == [STEPS, 2 * STEPS, 3 * STEPS, 4 * STEPS]
    names = NAMES if shape == "cosine" else ["entropy_cost"]
    most = 1 if "fusion_emitters=false" in os.environ.get("XLA_FLAGS", "") else 0
    for updates, measured in enumerate(curve.values()):
        expected = compiled(jnp.uint32(updates))
        for name in names:
            np.testing.assert_array_max_ulp(np.float32(measured[f"training/{name}"]), expected[name], maxulp=most)
    applied = [float(measured["training/entropy_cost"]) for measured in curve.values()]
    done = np.arange(3) * STEPS / total
    fraction = done if shape == "linear" else (1 - np.cos(np.pi * done)) / 2
    np.testing.assert_allclose(applied, [*(0.01 - 0.009 * fraction), 0.001], rtol=1e-5)
    assert len(set(traces[1:])) == 1


def test_the_clock_does_not_wrap():
    """At 2^33 env steps and more, with the sizes of Brax's ant."""
    per_update = 2048 * 32 * 5
    entropy = bound_coefficients(dict.fromkeys(NAMES, 1.0) | {"entropy_cost": "1 -> 0"}, 2**35)
    value = jax.jit(lambda updates: entropy.values({}, env_steps(updates, per_update))["entropy_cost"])
    for steps in (2**31, 2**32, 2**33, 2**34, 2**35):
        updates = steps // per_update
        np.testing.assert_allclose(value(jnp.uint32(updates)), 1 - updates * per_update / 2**35, atol=1e-6)


def test_jax_numbers_and_playground_configs_are_accepted_as_schedules():
    config = pytest.importorskip("ml_collections").ConfigDict({"shape": "cosine", "start": 0.01, "end": 0.001})
    ends = annealed(jnp.float32(0.01), np.float32(0.001), "cosine")
    given = dict.fromkeys(NAMES, 0.5)
    found = [
        bound_coefficients(given | {"entropy_cost": spec}, 100).values({}, env_steps(50, 1))["entropy_cost"]
        for spec in (config, ends)
    ]
    np.testing.assert_allclose(found, 0.0055, rtol=1e-6)


@pytest.mark.parametrize(("desired", "expected"), [(0.0, 1e-3 / 1.5), (float("inf"), 1.5e-3), (0.01, 1e-3 / 1.5)])
def test_any_desired_kl_is_accepted(desired, expected):
    controller = adaptive_rate(1e-3, "ADAPTIVE_KL", desired, 1e-5, 1e-2)
    moved = controller.update(controller.init(), {"kl_mean": jnp.float32(0.03)})
    assert float(moved.value) == pytest.approx(expected)


@pytest.mark.slow
def test_training_works_with_x64_enabled(fast):
    with jax.enable_x64(True):
        _, params, metrics = train(fast, STEPS, **SMALL, run_evals=False, normalize_observations=True)
    assert params[0].mean.dtype == jnp.float64
    assert params[1]["params"]["hidden_0"]["kernel"].dtype == jnp.float32
    assert metrics["training/entropy_cost"].dtype == jnp.float32


def test_arguments_and_defaults_equal_those_of_brax():
    ours, brax = (inspect.signature(function).parameters for function in (train, brax_train.train))
    assert list(ours) == [*brax, "entropy_cost_end", "entropy_schedule"]
    for name, parameter in brax.items():
        assert ours[name].kind == parameter.kind
        if not name.endswith("_fn"):
            assert ours[name].default == parameter.default, name


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"entropy_cost": "0.1 -> 0", "entropy_cost_end": 0.1}, "give entropy_cost as a number"),
        ({"entropy_cost_end": 0.1, "entropy_schedule": "cosin"}, "did you mean 'cosine'"),
        (
            {"entropy_schedule": "cosine"},
            "but entropy_cost_end, the value it leads to, is not given; set entropy_cost_end",
        ),
        ({"network_factory": {"policy_hidden_sizes": (8,)}}, "'policy_hidden_sizes', which make_ppo_networks lacks"),
        ({"network_factory": "mlp"}, "network_factory is 'mlp'; give a function such as make_ppo_networks"),
        ({"discounting": "0.9 -> 1.1"}, "discounting is '0.9 -> 1.1 over 64', which reaches 1.1"),
        ({"entropy_cost": "auto(target_entropy=0.5)"}, "which adapts to a metric; give a number"),
        (
            {"learning_rate": "1e-3 -> 0", "learning_rate_schedule": "ADAPTIVE_KL"},
            "but learning_rate is itself a schedule, '1e-3 -> 0'; give learning_rate as a number",
        ),
        ({"learning_rate_schedule": "ADAPTIVE"}, "did you mean 'ADAPTIVE_KL'"),
        ({"num_envs": 5}, "must be a multiple of num_envs, which is 5"),
        (
            {"use_distributional_critic": True},
            "but clipping_epsilon_value, which the quantile Huber loss needs, is None; set it",
        ),
        ({"vision": True, "action_repeat": 2}, "set action_repeat to 1"),
        ({"episode_length": None}, "episode_length is None"),
    ],
)
def test_mistakes_are_reported_before_anything_is_compiled(fast, options, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)):
        train(fast, num_timesteps=STEPS, **SMALL | options)
    assert fast.reset_count == 0


# Files -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_checkpoints_of_brax_are_read(brax, folder, fast):
    """Training restores them, with the clock at 0, and `load_policy` loads them."""
    path = folder / "brax" / f"{16 * STEPS:012d}"
    make_policy, their_params, _ = brax[1]
    restoring = {**SMALL, "normalize_observations": True, "restore_checkpoint_path": str(path)}
    _, params, _ = train(fast, 0, **restoring)
    assert_same(params, their_params)
    with by_their_rules():
        action, _ = load_policy(path)(jnp.ones(2), jax.random.PRNGKey(0))
        expected, _ = make_policy(their_params, deterministic=True)(jnp.ones(2), jax.random.PRNGKey(0))
    np.testing.assert_array_equal(action, expected)
    curve, _ = curve_of(train, fast, num_timesteps=STEPS, run_evals=False, **restoring)
    assert list(curve) == [STEPS]


@pytest.mark.slow
def test_brax_reads_our_checkpoints(ours, folder, fast):
    path = folder / "ours" / f"{16 * STEPS:012d}"
    make_policy, params, _ = ours[1]
    restoring = {**SMALL, "normalize_observations": True, "restore_checkpoint_path": str(path)}
    with by_their_rules(), device_put_replicated():
        loaded = brax_checkpoint.load(path)
        action, _ = brax_checkpoint.load_policy(path)(jnp.ones(2), jax.random.PRNGKey(0))
        also, _ = load_policy(path)(jnp.ones(2), jax.random.PRNGKey(0))
        expected, _ = make_policy(params, deterministic=True)(jnp.ones(2), jax.random.PRNGKey(0))
        _, restored, _ = brax_train.train(fast, 0, **restoring)
    assert_same(tuple(loaded), params)
    assert_same(tuple(restored), params)
    np.testing.assert_array_equal(action, expected)
    np.testing.assert_array_equal(also, expected)


@pytest.mark.slow
def test_parameters_are_restored_with_or_without_the_critic(ours, fast):
    params = ours[1][1]
    restoring = {**SMALL, "restore_params": params, "normalize_observations_mode": "ema", "seed": 9}
    _, whole, _ = train(fast, 0, **restoring)
    _, actor, _ = train(fast, 0, restore_value_fn=False, **restoring)
    assert_same(whole, params)  # the statistics go on as they were kept, whatever new ones would be
    assert_same(actor[1], params[1])
    kernels = [value["params"]["hidden_0"]["kernel"] for value in (actor[2], params[2])]
    assert not np.allclose(*kernels)


@pytest.mark.parametrize("kept", ["welford", "ema"])
@pytest.mark.parametrize("wanted", ["welford", "ema"])
def test_the_mode_of_saved_statistics_is_recognised(kept, wanted):
    """Files do not say it; converted, the statistics equal those kept in the wanted mode from the start."""
    statistics = upstream.running_statistics
    example = {"state": jnp.zeros(3)}
    sizes = jnp.array([[1.0, 5.0, 0.1]])
    batches = [{"state": jax.random.normal(jax.random.key(seed), (50, 3)) * sizes} for seed in (0, 1)]

    def seen(mode):
        state = statistics.init_state(example, std_eps=1e-4, mode=mode)
        with by_their_rules():
            return functools.reduce(statistics.update, batches, state)

    welford, ema = statistics.NormalizationMode
    unnamed = seen(kept).replace(mode=welford)  # as Brax loads them
    found = saving.in_mode(unnamed, {"welford": welford, "ema": ema}[wanted])
    assert_same(found, seen(wanted), rtol=1e-5)
    before = statistics.init_state(example, mode=kept)
    assert_same(saving.in_mode(before, before.mode), before)


class Elsewhere(envs.Wrapper):
    """The same environment with other initial states."""

    def reset(self, rng):
        state = self.env.reset(rng)
        return state.replace(obs=state.obs + 100)


@pytest.mark.slow
def test_episodes_continue_only_in_the_same_environment(folder, fast):
    """In another one they restart, as in Brax; optimiser and clock continue."""
    options = SMALL | {"num_timesteps": STEPS, "run_evals": False, "normalize_observations": True}
    train(fast, **options, save_checkpoint_path=str(folder / "there"))
    restoring = options | {"restore_checkpoint_path": str(folder / "there" / f"{STEPS:012d}")}
    means = [train(env, **restoring)[1][0].mean.max() for env in (fast, Elsewhere(fast))]
    assert means[0] < 5 < means[1]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"seed": 2}, True),  # compared separately
        ({"limits": {"episode_length": 24}}, False),
        ({"names": (".b", ".a")}, False),
        ({"steps_per_update": 20}, False),
        ({"beginnings": ((0.0, 1000.0), (2.01, 3.0))}, False),
        ({"beginnings": ((0.05, 1000.0), (2.0, 3.0))}, True),  # a rounding error, relative to 1000
        ({"beginnings": ((0.0, 1000.0),)}, False),
    ],
)
def test_which_environments_count_as_the_same(change, same):
    origin = saving.Origin(1, 10, {"episode_length": 12}, (".a", ".b"), ((0.0, 1000.0), (2.0, 3.0)))
    written = json.loads(json.dumps(dataclasses.replace(origin, **change).describe(0)))
    assert origin.has_environments_of(written) == same


@pytest.mark.slow
def test_statistics_that_brax_loaded_in_the_wrong_mode_are_corrected(fast):
    """Brax loads all statistics as "welford"; given as `restore_params`, their numbers are converted to that mode."""
    statistics = upstream.running_statistics
    with by_their_rules():
        batch = 3 * jax.random.normal(jax.random.key(0), (50, 2))
        seen = statistics.update(statistics.init_state(jnp.zeros(2), mode="ema"), batch)
    loaded = seen.replace(mode=statistics.NormalizationMode.WELFORD)
    _, params, _ = train(fast, 0, **SMALL)
    _, found, _ = train(fast, 0, **SMALL, restore_params=(loaded, *params[1:]))
    assert found[0].mode == statistics.NormalizationMode.WELFORD
    np.testing.assert_allclose(found[0].summed_variance, 50 * seen.summed_variance, rtol=1e-5)


@pytest.mark.slow
def test_another_seed_gives_other_random_numbers_after_a_checkpoint_too(ours, folder, fast):
    middle = folder / "ours" / f"{8 * STEPS:012d}"
    options = TRAINING | {"num_timesteps": 8 * STEPS, "num_evals": 1, "run_evals": False}
    found = [train(fast, **options | {"seed": seed, "restore_checkpoint_path": str(middle)})[1][1] for seed in (4, 5)]
    kernels = [params["params"]["hidden_0"]["kernel"] for params in found]
    assert not np.allclose(*kernels)


class Pixels(envs.Wrapper):
    """The same environment with small images as observations."""

    def reset(self, rng):
        return self._seen(self.env.reset(rng))

    def step(self, state, action):
        return self._seen(self.env.step(state, action))

    def _seen(self, state):
        return state.replace(obs={"pixels/view_0": jnp.ones((12, 12, 3)) * state.obs.sum(), "state": jnp.ones(2)})

    @property
    def observation_size(self):
        return {"pixels/view_0": (12, 12, 3), "state": (2,)}


@pytest.mark.slow
def test_pixel_policies_saved_by_either_library_are_loaded(tmp_path, fast):
    small = {"policy_hidden_layer_sizes": (8,), "value_hidden_layer_sizes": (8,), "cnn_output_channels": (2, 2, 2)}
    factory = functools.partial(brax_vision.make_ppo_networks_vision, **small, normalise_channels=True)
    env, options = Pixels(fast), SMALL | {"num_timesteps": STEPS, "run_evals": False, "network_factory": factory}
    seen = {"pixels/view_0": jnp.ones((1, 12, 12, 3)), "state": jnp.ones((1, 2))}
    key = jax.random.PRNGKey(0)
    for name, function in (("ours", train), ("theirs", brax_train.train)):
        with by_their_rules(), device_put_replicated():
            make_policy, params, _ = function(env, **options, save_checkpoint_path=str(tmp_path / name))
            expected, _ = make_policy(params, deterministic=True)(seen, key)
            path = tmp_path / name / f"{STEPS:012d}"
            action, _ = load_policy(path, brax_vision.make_ppo_networks_vision)(seen, key)
        np.testing.assert_allclose(action, expected, rtol=1e-5)
    config = path / "ppo_network_config.json"
    config.write_text(config.read_text().replace('"relu"', '"mine"'))
    with pytest.raises(
        InputError, match=r"cnn_activation is .* in the checkpoint, which is not one of Brax's names; pass it with"
    ):
        load_policy(path, brax_vision.make_ppo_networks_vision)
    with by_their_rules():
        given = functools.partial(brax_vision.make_ppo_networks_vision, cnn_activation="relu")
        action, _ = load_policy(path, given)(seen, key)
    np.testing.assert_allclose(action, expected, rtol=1e-5)


@pytest.mark.slow
def test_another_number_of_environments_restarts_episodes(ours, folder, fast):
    """Optimiser and clock continue."""
    path = folder / "ours" / f"{16 * STEPS:012d}"
    options = TRAINING | {"num_envs": 16, "num_timesteps": 2 * STEPS, "num_evals": 1, "num_resets_per_eval": 0}
    curve, _ = curve_of(train, fast, **options, run_evals=False, restore_checkpoint_path=str(path))
    assert list(curve) == [18 * STEPS]


@pytest.mark.slow
def test_training_resumes_exactly_from_our_checkpoints(ours, folder, fast):
    """The second half, trained again from the checkpoint between the halves, gives the same bits."""
    middle = folder / "ours" / f"{8 * STEPS:012d}"
    options = TRAINING | {"num_timesteps": 8 * STEPS, "num_evals": 2, "restore_checkpoint_path": str(middle)}
    curve, (_, params, last) = curve_of(train, fast, **options)
    assert list(curve) == [8 * STEPS, 16 * STEPS]
    assert_same(params, ours[1][1], rtol=0, atol=0)
    measured = {name: value for name, value in ours[1][2].items() if name.startswith("training/")}
    for name in set(measured) - {"training/sps", "training/walltime"}:
        assert last[name] == measured[name], name


@pytest.mark.slow
def test_an_adaptive_rate_and_episode_reports_continue_after_a_checkpoint(ours, folder, fast):
    """The rate was not adaptive before, so it starts as given; reports count from the checkpoint's clock."""
    told = []
    options = {"num_timesteps": 4 * STEPS, "num_evals": 1, "num_resets_per_eval": 0, "run_evals": False}
    adapting = {"learning_rate_schedule": "ADAPTIVE_KL", "learning_rate": 1e-3, "desired_kl": 1e9}  # it only rises
    reporting = {"log_training_metrics": True, "training_metrics_steps": 1}
    train(
        fast,
        **TRAINING | options | adapting | reporting,
        restore_checkpoint_path=str(folder / "ours" / f"{16 * STEPS:012d}"),
        progress_fn=lambda step, metrics: told.append((step, metrics)),
    )
    # Brax's reports do not count action repeats.
    assert [step for step, metrics in told if "episode/sps" in metrics] == [9 * STEPS, 10 * STEPS]
    assert told[-1][1]["training/learning_rate"] > 1e-3


@pytest.fixture
def little():
    """A small state and keys to save."""
    carried = CarriedState((jnp.ones(2),), jnp.float32(0), jnp.uint32(5), (jnp.arange(3.0),))
    return carried, {"host": jax.random.PRNGKey(1), "environments": jax.random.split(jax.random.PRNGKey(2), 3)}


@pytest.fixture
def _only_ours(monkeypatch):
    monkeypatch.setattr(upstream, "checkpoint", lambda: SimpleNamespace(save=lambda *arguments: None))


@pytest.mark.usefixtures("_only_ours")
@pytest.mark.parametrize("most", [saving.MOST_BYTES, 0], ids=["small", "large"])
def test_environments_too_large_to_save_restart_and_the_rest_continues(little, tmp_path, monkeypatch, most):
    monkeypatch.setattr(saving, "MOST_BYTES", most)
    carried, keys = little
    origin = saving.Origin(seed=1, steps_per_update=10)
    saving.save(tmp_path, None, origin, 50, BraxParams(NetworkParams((), ()), ()), carried, keys)
    begun = jax.tree.map(jnp.zeros_like, carried)
    other = {name: jnp.zeros_like(key) for name, key in keys.items()}
    found, found_keys, step = saving.restore(tmp_path / f"{50:012d}", origin, begun, other)
    assert step == 50
    assert_same(found[:3], carried[:3], rtol=0, atol=0)
    assert_same(found_keys["host"], keys["host"], rtol=0, atol=0)
    assert_same(found.environments, (carried if most else begun).environments, rtol=0, atol=0)
    assert_same(found_keys["environments"], (keys if most else other)["environments"], rtol=0, atol=0)


@pytest.mark.usefixtures("_only_ours")
def test_only_brax_files_are_written_to_a_bucket(little, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saving.save("gs://bucket/run", None, saving.Origin(1, 10), 50, BraxParams(NetworkParams((), ()), ()), *little)
    assert list(tmp_path.iterdir()) == []


# Brax's own tests --------------------------------------------------------------------------------------------------

BRAX_TESTS = (
    "testTrain0",
    "testTrainWithNetworkParams13",
    "testTrainAsymmetricActorCritic",
    "testTrainDomainRandomize",
)
"""Some of them; bench/brax_tests.py runs all."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BRAX_TESTS)
def test_of_brax(name, monkeypatch):
    """From the installed package, with our `train`; tests that only check that the code runs are shortened."""
    learns = name == "testTrain0"

    def ours(env, num_timesteps, **options):
        if learns:
            return train(env, num_timesteps, **options)
        less = {"run_evals": False, "num_minibatches": 4, "num_updates_per_batch": 1}
        return train(env, 128, **options | less)

    monkeypatch.setattr(brax_tests, "ppo", SimpleNamespace(train=ours))
    with by_their_rules():
        getattr(brax_tests.PPOTest(name), name)()


# Everything else ---------------------------------------------------------------------------------------------------


def test_what_training_reports(fast):
    """Episodes during training, parameters that stay valid, and no evaluation with `run_evals=False`."""
    told, kept = [], []
    _, params, metrics = train(
        fast,
        num_timesteps=4 * STEPS,
        num_evals=3,
        run_evals=False,
        log_training_metrics=True,
        progress_fn=lambda step, metrics: told.append((step, metrics)),
        policy_params_fn=lambda step, make_policy, params: kept.append((step, params)),
        normalize_observations=True,
        **SMALL,
    )
    reports = [metrics for _, metrics in told if "episode/sum_reward" in metrics]
    assert {"episode/length", "episode/entropy_cost", "episode/total_loss", "episode/sps"} <= set(reports[-1])
    assert reports[-1]["episode/length"] == SMALL["episode_length"]
    assert [step for step, metrics in told if "training/sps" in metrics] == [2 * STEPS, 4 * STEPS]
    assert not any(name.startswith("eval/") for name in metrics)
    assert [step for step, _ in kept] == [0, 2 * STEPS, 4 * STEPS]
    assert [int(params[0].count) for _, params in kept] == [0, 2 * STEPS, 4 * STEPS]
    assert_same(kept[-1][1], params)


@pytest.mark.parametrize("suite", ["locomotion", "manipulation"])
def test_the_network_factory_of_a_playground_config_holds_options_of_brax_s(suite):
    """As Playground's own script reads it: the network has the layers and observation keys of the config."""
    pytest.importorskip("mujoco_playground")
    with by_their_rules(), contextlib.redirect_stdout(io.StringIO()):
        published = importlib.import_module(f"mujoco_playground.config.{suite}_params")
    name = {"locomotion": "Go1JoystickFlatTerrain", "manipulation": "LeapCubeReorient"}[suite]
    given = published.brax_ppo_config(name).network_factory
    made = network_maker(given, vision=False)({"state": (5,), "privileged_state": (7,)}, 2)
    policy, value = (network.init(jax.random.key(0))["params"] for network in (made.policy_network, made.value_network))
    assert policy["hidden_0"]["kernel"].shape == (5, given.policy_hidden_layer_sizes[0])
    assert value["hidden_0"]["kernel"].shape == (7, given.value_hidden_layer_sizes[0])
    assert len(policy) == len(given.policy_hidden_layer_sizes) + 1


def test_the_drop_in_caches_what_it_compiles_unless_that_is_turned_off(fast, tmp_path, monkeypatch):
    kept = {name: getattr(jax.config, name) for name in jax.config.values if "cache" in name}
    try:
        for place, expected in (("off", None), (str(tmp_path), str(tmp_path))):
            monkeypatch.setenv("LEHR_CACHE", place)
            jax.config.update("jax_compilation_cache_dir", None)
            train(fast, 0, **SMALL)
            assert jax.config.jax_compilation_cache_dir == expected
    finally:
        for name, value in kept.items():
            jax.config.update(name, value)


@pytest.mark.slow
def test_a_playground_config_trains_unchanged():
    pytest.importorskip("mujoco_playground")
    with by_their_rules(), contextlib.redirect_stdout(io.StringIO()):
        playground = importlib.import_module("mujoco_playground")
        published = importlib.import_module("mujoco_playground.config.dm_control_suite_params")
        config = published.brax_ppo_config("CartpoleBalance")
        config.update(num_timesteps=64, num_evals=1, num_envs=8, batch_size=4, num_minibatches=2, unroll_length=4)
        config.update(num_updates_per_batch=1, num_resets_per_eval=1, episode_length=8)
        env = playground.registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
    training = functools.partial(train, **config)
    _, params, metrics = training(
        environment=env, wrap_env_fn=playground.wrapper.wrap_for_brax_training, run_evals=False
    )
    assert np.isfinite(metrics["training/total_loss"])
    assert int(params[0].count) == 64


def test_without_brax_one_sentence_says_what_to_install():
    code = (
        "import sys; sys.modules['brax'] = None\n"
        "from lehr.compat.brax import train\n"
        "try: train(None, 0)\n"
        "except ValueError as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "lehr.compat.brax needs the package brax, which is not installed: pip install 'lehr[brax]'."


TWO_DEVICES = """
import jax, numpy as np
from brax import envs
from lehr.training.sharding import EnvironmentSharding
from lehr.compat.brax import train, upstream
from tests.compat.test_brax import SMALL, STEPS
class Counted(envs.Wrapper):
    "With a state that has no row per environment."
    def reset(self, rng):
        state = self.env.reset(rng)
        return state.replace(info={**state.info, "turns": jax.numpy.int32(0)})
    def step(self, state, action):
        rest = dict(state.info)
        turns = rest.pop("turns")
        after = self.env.step(state.replace(info=rest), action)
        return after.replace(info={**after.info, "turns": turns + 1}, reward=after.reward + turns)
def wrapped(env, **options):
    return Counted(upstream.wrappers.wrap(env, **options))
options = SMALL | {"num_timesteps": 2 * STEPS, "num_evals": 3, "run_evals": False, "normalize_observations": True}
options["wrap_env_fn"] = wrapped
found = [train(envs.get_environment("fast"), max_devices_per_host=most, **options)[1] for most in (1, None)]
assert len(jax.tree.leaves(found[1])[0].sharding.device_set) == 2
jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5), *found)
sharding = EnvironmentSharding.over(jax.devices(), num_envs=4)
tree = {"rows": np.zeros((4, 3), np.float32), "count": np.zeros((), np.int32)}
def shares(placed): return {name: [share.data.shape for share in x.addressable_shards] for name, x in placed.items()}
assert shares(jax.device_put(tree, sharding.of(tree))) == {"rows": [(2, 3), (2, 3)], "count": [(), ()]}
assert shares(sharding.replicate(tree)) == {"rows": [(4, 3), (4, 3)], "count": [(), ()]}
try: train(envs.get_environment("fast"), 64, **SMALL | {"num_envs": 1})
except ValueError as error: print(error)
"""


@pytest.mark.slow
def test_two_devices_share_the_environments():
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    }
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TWO_DEVICES], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == (
        "num_envs is 1, which 2 devices cannot share equally; choose a multiple of 2, or lower max_devices_per_host."
    )
