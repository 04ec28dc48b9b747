"""PPO: its loss and its minibatches against NumPy, and each of its options by what it must do."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.algorithms import ppo
from lehr.config import build, with_preset
from lehr.errors import InputError
from tests.algorithms.rollouts import (
    COEF,
    SEGMENTS,
    STEPS,
    assert_params_close,
    assert_step_goes_down,
    assert_steps_not_taken_teach_nothing,
    distance,
    drawn,
    learned_from,
    lived,
    made_up,
    network_of,
    numpy_gae,
    outputs,
)


def algorithm_of(torso="mlp", **settings):
    defaults = {"epochs": 1, "minibatches": 1, "optimiser": "sgd", "max_grad_norm": None}
    return ppo.Algorithm(ppo.Config(**{**defaults, **settings}), network_of(torso)[0])


def learn(algorithm, rollout, torso="mlp", params=None, **coef):
    return learned_from(algorithm, rollout, {**COEF, **coef}, torso, params)


def numpy_losses(rollout, log_probs, values, advantages, targets, coef, weights=1.0):
    """The three losses of a whole rollout, from their formulas."""
    log_prob = np.take_along_axis(log_probs, np.asarray(rollout.action)[..., None], -1)[..., 0]
    ratio = np.exp(log_prob - np.asarray(rollout.log_prob, np.float64))
    standardised = weights * (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = np.clip(ratio, 1 - coef["clip_range"], 1 + coef["clip_range"])
    policy = -np.minimum(ratio * standardised, clipped * standardised).mean()
    value = (values - targets) ** 2
    if "value_clip_range" in coef:
        old, limit = np.asarray(rollout.value, np.float64), coef["value_clip_range"]
        value = np.maximum(value, (old + np.clip(values - old, -limit, limit) - targets) ** 2)
    entropy = -(np.exp(log_probs) * log_probs).sum(-1).mean()
    return {
        "loss/policy": policy,
        "loss/value": value.mean() / 2,
        "policy/entropy": entropy,
        "loss/total": policy + coef["value_coef"] * value.mean() / 2 - coef["entropy_coef"] * entropy,
        "policy/ratio": ratio.mean(),
        "policy/approximate_kl": (ratio - 1 - np.log(ratio)).mean(),
        "policy/clip_fraction": (np.abs(ratio - 1) > coef["clip_range"]).mean(),
    }


# The loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "coef", "torso"),
    [
        ({}, {}, "mlp"),
        ({"value_clip_range": 0.2}, {"value_clip_range": 0.2}, "mlp"),
        ({"minibatching": "segments"}, {}, "gru"),
    ],
    ids=["values not clipped", "values clipped", "recurrent"],
)
def test_the_losses_are_those_of_their_formulas(settings, coef, torso):
    rollout, coef = made_up(torso), {**COEF, **coef}
    _, metrics = learn(algorithm_of(torso, **settings), rollout, torso, **coef)
    advantages, targets = numpy_gae(rollout, coef["discount"], coef["gae_lambda"])
    expected = numpy_losses(rollout, *outputs(torso), advantages, targets, coef)
    expected["return/mean"], expected["advantage/mean"] = targets.mean(), advantages.mean()
    assert 0.2 < expected["policy/clip_fraction"] < 1
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_step_goes_down_the_gradient_of_the_loss_that_is_reported():
    """Against the difference of losses at two nearby places, along a random direction."""
    coef = {"value_clip_range": 0.2, "max_grad_norm": 1e9}
    algorithm = algorithm_of(value_clip_range=0.2, max_grad_norm=1.0)
    assert_step_goes_down(algorithm, made_up(), {**COEF, **coef})


# Minibatches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("minibatching", "minibatches"), [("flat", 6), ("segments", 4)])
def test_every_step_is_seen_once_per_epoch(minibatching, minibatches):
    """With a rate of 0, the mean of the losses of all minibatches is the loss of the whole, and only then."""
    algorithm = algorithm_of(minibatching=minibatching, minibatches=minibatches, epochs=2)
    params, metrics = learn(algorithm, made_up(), learning_rate=0.0)
    assert_params_close(params, network_of()[1], rtol=0, atol=0)
    advantages, targets = numpy_gae(made_up(), COEF["discount"], COEF["gae_lambda"])
    expected = numpy_losses(made_up(), *outputs(), advantages, targets, COEF)
    for name in ("loss/value", "policy/entropy", "policy/ratio", "policy/approximate_kl"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name


@pytest.mark.parametrize(("minibatching", "torso"), [("flat", "mlp"), ("segments", "gru")])
def test_accumulated_gradients_are_those_of_the_whole_minibatch(minibatching, torso):
    settings = {"minibatching": minibatching, "minibatches": 2, "epochs": 2, "optimiser": "adam"}
    whole, metrics = learn(algorithm_of(torso, **settings), made_up(torso), torso)
    parts, metrics_of_parts = learn(algorithm_of(torso, accumulate=4, **settings), made_up(torso), torso)
    assert_params_close(parts, whole, rtol=1e-3, atol=1e-4)
    assert metrics_of_parts == pytest.approx(metrics, rel=1e-2, abs=1e-4)


SOME_VALID = np.random.default_rng(3).random((STEPS, SEGMENTS)) < 0.6
COMBINATIONS = [
    pytest.param(advantage, minibatching, masked, more, marks=[] if masked == bool(more) else pytest.mark.slow)
    for advantage, minibatching in [
        ("gae", "flat"),
        ("gae", "segments"),
        ("vtrace", "segments"),
        ("vtrace", "prioritised"),
    ]
    for masked in (False, True)
    for more in ({}, {"standardise_advantages": False, "value_clip_range": 0.2})
]


@pytest.mark.parametrize(("advantage", "minibatching", "masked", "more"), COMBINATIONS)
def test_the_gradient_of_a_minibatch_does_not_depend_on_the_parts_it_is_cut_into(advantage, minibatching, masked, more):
    """Each valid step of a minibatch counts alike, and advantages are standardised over all of it."""
    rollout = made_up()._replace(valid=jnp.asarray(SOME_VALID)) if masked else made_up()
    coef = {"rho_clip": 1.2, "c_clip": 1.1, "priority_exponent": 0.8, "importance_exponent": 0.6, "kl_coef": 0.1}
    coef |= {"value_clip_range": 0.2} if more else {}
    found = [
        learn(algorithm_of(advantage=advantage, minibatching=minibatching, accumulate=parts, **more), rollout, **coef)
        for parts in (1, 4)
    ]
    (whole, metrics), (parts, metrics_of_parts) = found
    assert_params_close(parts, whole, rtol=1e-4, atol=1e-5)
    start = network_of()[1]
    moved = distance(whole, start)
    assert distance(parts, whole) < 1e-4 * moved
    for found in (metrics, metrics_of_parts):
        found.pop("priority/weight_max", None)  # the mean over parts of the largest of each
    assert metrics_of_parts == pytest.approx(metrics, rel=1e-3, abs=1e-5)


def test_a_minibatch_that_cannot_be_cut_is_refused():
    with pytest.raises(InputError, match="A minibatch of 48 cannot be split into accumulate=5 equal parts"):
        learn(algorithm_of(accumulate=5), made_up())


def test_where_steps_are_remembered_segments_stay_whole():
    assert algorithm_of("mlp").config.minibatching == "flat"
    assert algorithm_of("gru").config.minibatching == "segments"
    assert algorithm_of("mlp", advantage="vtrace").config.minibatching == "segments"
    with pytest.raises(InputError, match="the network is recurrent and needs whole segments"):
        algorithm_of("gru", minibatching="flat")
    with pytest.raises(InputError, match="which needs whole segments"):
        ppo.Config(advantage="vtrace", minibatching="flat")
    with pytest.raises(InputError, match="minibatching is 'segment'; did you mean 'segments'"):
        ppo.Config(minibatching="segment")


# V-trace and priorities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torso", ["mlp", "mingru"])
def test_vtrace_is_gae_where_the_policy_is_the_one_that_acted(torso):
    """In the first minibatch of an update all ratios are 1."""
    settings = {"minibatching": "segments"}
    expected, metrics = learn(algorithm_of(torso, **settings), lived(torso), torso)
    clips = {"rho_clip": 1.0, "c_clip": 1.0}
    found, found_metrics = learn(algorithm_of(torso, advantage="vtrace", **settings), lived(torso), torso, **clips)
    assert found_metrics["policy/ratio"] == pytest.approx(1, abs=1e-5)
    assert_params_close(found, expected)
    assert found_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5)


def ratios():
    log_probs, _ = outputs()
    log_prob = np.take_along_axis(log_probs, np.asarray(made_up().action)[..., None], -1)[..., 0]
    return np.exp(log_prob - np.asarray(made_up().log_prob, np.float64))


VTRACE = {"rho_clip": 1.1, "c_clip": 0.9}


def vtraced(coef):
    rho, c = (np.minimum(coef[clip], ratios()) for clip in ("rho_clip", "c_clip"))
    return numpy_gae(made_up(), coef["discount"], coef["gae_lambda"], rho, c)


def test_advantages_are_corrected_by_the_ratios_of_the_current_policy():
    coef = {**COEF, **VTRACE}
    _, metrics = learn(algorithm_of(advantage="vtrace"), made_up(), **coef)
    expected = numpy_losses(made_up(), *outputs(), *vtraced(coef), coef)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("advantage", ["gae", "vtrace"])
def test_a_prioritised_minibatch_is_weighted_by_the_importance_of_its_segments(advantage):
    """Two minibatches of half the segments, and the second is drawn with what the first one found."""
    coef = {**COEF, **VTRACE, "priority_exponent": 0.7, "importance_exponent": 0.6, "learning_rate": 0.0}
    algorithm = algorithm_of(advantage=advantage, minibatching="prioritised", minibatches=2)
    _, metrics = learn(algorithm, made_up(), **coef)
    plain = numpy_gae(made_up(), coef["discount"], coef["gae_lambda"])
    estimate = plain if advantage == "gae" else vtraced(coef)
    priorities, losses = np.abs(plain[0]).sum(0), []
    for step in range(2):
        indices, weights = drawn(step, 2, priorities, 0.7, 0.6, SEGMENTS // 2)
        part = jax.tree.map(lambda x, chosen=indices: x[:, chosen], made_up()._replace(carry=()))
        given = (x[:, indices] for x in (*outputs(), *estimate))
        losses.append(numpy_losses(part, *given, coef, weights=weights))
        losses[-1] |= {"priority/weight": weights.mean(), "priority/weight_max": weights.max()}
        priorities[indices] = np.abs(estimate[0]).sum(0)[indices]
        assert np.ptp(weights) > 0.1
    expected = {name: (losses[0][name] + losses[1][name]) / 2 for name in losses[0]}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("replacement", [False, True])
def test_a_minibatch_of_all_segments_has_no_weights_to_correct(replacement):
    coef = {**COEF, "priority_exponent": 0.7, "importance_exponent": 1.0}
    _, metrics = learn(algorithm_of(minibatching="prioritised", replacement=replacement), made_up(), **coef)
    assert (metrics["priority/weight_max"] == 1) != replacement


@pytest.mark.parametrize("advantage", ["gae", "vtrace"])
def test_priorities_follow_the_advantages(advantage):
    """With a sharp exponent the segment of the largest priority is drawn. V-trace with tiny ratios then finds nothing
    left to learn in it, so the next draw is another: each once. GAE's advantages stay, and so does the choice."""
    coef = {**COEF, "rho_clip": 1e-3, "c_clip": 1e-3, "priority_exponent": 1000.0, "importance_exponent": 0.0}
    rollout = made_up(scale=30.0)
    algorithm = algorithm_of(advantage=advantage, minibatching="prioritised", minibatches=SEGMENTS)
    _, metrics = learn(algorithm, rollout, learning_rate=0.0, **{k: v for k, v in coef.items() if k != "learning_rate"})
    advantages, targets = numpy_gae(rollout, coef["discount"], coef["gae_lambda"])
    order = np.argsort(-np.abs(advantages).sum(0))
    known_by = ratios().mean(0)  # a figure for each segment
    chosen = order[:1] if advantage == "gae" else order
    assert metrics["policy/ratio"] == pytest.approx(known_by[chosen].mean(), rel=1e-4)
    assert abs(known_by[order[0]] - known_by.mean()) > 1e-2
    if advantage == "gae":
        value_loss = ((outputs()[1] - targets) ** 2).mean(0) / 2
        assert metrics["loss/value"] == pytest.approx(value_loss[order[0]], rel=1e-4)


def test_minibatches_without_a_segment_are_refused():
    coef = {"priority_exponent": 0.5, "importance_exponent": 0.5}
    with pytest.raises(InputError, match="8 segments cannot fill 9 minibatches; choose at most 8"):
        learn(algorithm_of(minibatching="prioritised", minibatches=9), made_up(), **coef)


# Steps that do not count ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "torso"),
    [({"minibatches": 2}, "mlp"), ({"minibatching": "prioritised", "advantage": "vtrace"}, "mlp"), ({}, "gru")],
    ids=["flat", "prioritised", "recurrent"],
)
def test_what_is_not_valid_teaches_nothing(settings, torso):
    """Whatever stands in steps that were not taken, the update is the same; in others it is not."""
    coef = {**COEF, "priority_exponent": 0.7, "importance_exponent": 0.6, **VTRACE}
    assert_steps_not_taken_teach_nothing(algorithm_of(torso, **settings), coef, torso)


# The stop at a divergence --------------------------------------------------------------------------------------------


def test_past_the_target_divergence_the_rest_of_the_update_is_left_out():
    """The first step starts at a divergence of 0 and is taken; all that follow start above a tiny target."""
    settings = {"epochs": 4, "minibatching": "segments", "optimiser": "adam"}
    stopped, metrics = learn(algorithm_of(target_kl=1e-6, **settings), lived(), target_kl=1e-6)
    once, _ = learn(algorithm_of(**{**settings, "epochs": 1}), lived())
    assert metrics["policy/steps_taken"] == 0.25
    assert_params_close(stopped, once)
    free, metrics = learn(algorithm_of(target_kl=1e6, **settings), lived(), target_kl=1e6)
    never, _ = learn(algorithm_of(**settings), lived())
    assert metrics["policy/steps_taken"] == 1
    assert_params_close(free, never)
    assert any(jax.tree.leaves(jax.tree.map(lambda x, y: bool(jnp.abs(x - y).max() > 1e-2), free, stopped)))


# Whole runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["classic", "puffer"])
def test_a_preset_is_what_it_says_and_gives_way_to_what_is_given(preset):
    values = ppo.Config.PRESETS[preset]
    config = with_preset(ppo.Config, preset)
    assert {name: getattr(config, name) for name in values} == values
    assert build([ppo.Config], {"preset": preset, "discount": 0.5})[0] == replace(config, discount=0.5)


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "classic", "num_envs": 4, "horizon": 16, "minibatches": 4},
        {"preset": "puffer"},
        pytest.param(
            {"preset": "puffer", "torso": "mingru", "replacement": True, "accumulate": 2}, marks=pytest.mark.slow
        ),
        {"precision": "bfloat16", "optimiser": "rmsprop"},
        pytest.param(
            {"distribution": "tanh_normal", "state_dependent_std": True, "shared": True}, marks=pytest.mark.slow
        ),
    ],
    ids=["classic", "puffer", "puffer with a memory", "bfloat16", "squashed actions"],
)
def test_presets_and_options_run(settings, begin, advance):
    run = advance(begin("ppo", "Pendulum-v1" if "distribution" in settings else "CartPole-v1", **settings), 4)
    assert run.metrics["update/rejected"][-1] == 0
    assert {leaf.dtype for leaf in jax.tree.leaves(run.state.learner.params)} == {jnp.dtype("float32")}
    for name, column in run.metrics.items():
        assert name.startswith("episode/") or np.isfinite(column).all(), name


def test_a_controller_moves_its_coefficient_by_its_rule(begin, advance):
    run = advance(
        begin(
            "ppo",
            "CartPole-v1",
            entropy_coef="auto(target_entropy=0.3, rate=0.5, value=0.02)",
            learning_rate="adaptive_kl(0.002, target=0.005)",
            clip_range="plateau(0.3, factor=0.5, patience=2, minimum=0.001, metric=loss/value)",
        ),
        30,
    )
    metrics = run.metrics
    entropy, rate, clip = (metrics[f"coef/{name}"] for name in ("entropy_coef", "learning_rate", "clip_range"))
    np.testing.assert_allclose(
        entropy[1:], entropy[:-1] * np.exp(0.5 * (0.3 - metrics["policy/entropy"][:-1])), rtol=1e-5
    )

    divergence = metrics["policy/approximate_kl"][:-1]
    factor = np.where(divergence > 0.01, 1 / 1.5, np.where((divergence > 0) & (divergence < 0.0025), 1.5, 1.0))
    np.testing.assert_allclose(rate[1:], np.clip(rate[:-1] * factor, 1e-5, 1e-2), rtol=1e-5)
    assert len(np.unique(rate)) > 2

    best, waited, expected = -np.inf, 0, [0.3]
    for metric in metrics["loss/value"][:-1]:
        better = metric > best
        best, waited = (metric, 0) if better else (best, waited + 1)
        stalled = waited >= 2
        expected.append(max(expected[-1] * 0.5, 0.001) if stalled else expected[-1])
        waited = 0 if stalled else waited
    np.testing.assert_allclose(clip, expected, rtol=1e-5)
    assert clip[-1] < 0.3
