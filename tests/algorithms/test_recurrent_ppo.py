"""Recurrent PPO: its windows and their memory against loops over single steps, and its defaults."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr import algorithms, config, zoo
from lehr.algorithms import ppo, recurrent_ppo
from lehr.cli import main
from lehr.errors import InputError
from lehr.maths import sequences
from lehr.maths.losses import value_loss
from lehr.networks import NetworkConfig
from lehr.spaces import Box, Discrete, Spaces
from lehr.training.plan import make_plan, settings_classes
from tests.algorithms.rollouts import (
    SEGMENTS,
    STEPS,
    assert_params_close,
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
from tests.algorithms.test_ppo import COEF, numpy_losses
from tests.small import SMALL

MEMORIES = ["lstm", "gru", "mingru"]
SPACES = Spaces(Box(-1, 1, (3,)), Discrete(2))
PLAIN = {"horizon": STEPS, "epochs": 1, "minibatches": 1, "optimiser": "sgd", "max_grad_norm": None}


def algorithm_of(torso="gru", module=recurrent_ppo, **settings):
    return module.Algorithm(module.Config(**{**PLAIN, **settings}), network_of(torso)[0])


def learn(algorithm, torso="gru", rollout=None, **coef):
    return learned_from(algorithm, made_up(torso) if rollout is None else rollout, {**COEF, **coef}, torso)


def walk(torso, params, carry, begin, end):
    """The carries before each of some steps and after the last, the log probabilities and the values, step by step."""
    network, rollout = network_of(torso)[0], made_up(torso)
    step = jax.jit(network.step)
    carries, log_probs, values = [carry], [], []
    for t in range(begin, end):
        carry, policy, value = step(params, carry, rollout.obs[t], rollout.reset[t])
        carries.append(carry)
        logits = np.asarray(policy.logits, np.float64)
        log_probs.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        values.append(np.asarray(value, np.float64))
    return carries, log_probs, values


# Windows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 3, 6])
def test_windows_are_complete_disjoint_and_in_order(window):
    steps, segments = np.meshgrid(np.arange(STEPS), np.arange(SEGMENTS), indexing="ij")
    pairs = jnp.stack([jnp.asarray(steps), jnp.asarray(segments)], -1)
    found = np.asarray(sequences.cut({"pairs": pairs}, window)["pairs"])
    assert found.shape == (window, STEPS // window * SEGMENTS, 2)
    assert sorted(map(tuple, found.reshape(-1, 2))) == [(t, n) for t in range(STEPS) for n in range(SEGMENTS)]
    for column in range(found.shape[1]):
        begin, segment = divmod(column, SEGMENTS)
        np.testing.assert_array_equal(found[:, column, 0], begin * window + np.arange(window))
        assert (found[:, column, 1] == segment).all()


@pytest.mark.parametrize("torso", MEMORIES)
@pytest.mark.parametrize(("window", "burn_in"), [(1, 0), (6, 0), (3, 1), (3, 3)])
def test_the_memory_of_a_window_is_the_one_lived_through(torso, window, burn_in):
    (network, params), rollout = network_of(torso), made_up(torso)
    lived_through, _, _ = walk(torso, params, rollout.carry, 0, STEPS)

    @jax.jit
    def carries():
        unroll = partial(network.unroll, params)
        return sequences.carries(unroll, rollout.carry, rollout.obs, rollout.reset, window, burn_in)

    found = carries()
    for index in range(STEPS // window):
        columns = jax.tree.map(lambda x, i=index: x[i * SEGMENTS : (i + 1) * SEGMENTS], found)
        assert_params_close(columns, lived_through[max(index * window - burn_in, 0)])


@pytest.mark.parametrize(
    ("torso", "window", "burn_in"), [("mlp", 2, 0), ("gru", 1, 0), ("lstm", 3, 2), ("mingru", 2, 2)]
)
def test_every_step_is_learned_from_once_per_epoch_and_with_its_memory(torso, window, burn_in):
    """With a rate of 0, the mean of the losses of all minibatches of windows is that of whole segments."""
    algorithm = algorithm_of(torso, ppo, window=window, burn_in=burn_in, minibatches=4, epochs=2)
    _, metrics = learn(algorithm, torso, learning_rate=0.0)
    advantages, targets = numpy_gae(made_up(torso), COEF["discount"], COEF["gae_lambda"])
    expected = numpy_losses(made_up(torso), *outputs(torso), advantages, targets, COEF)
    for name in ("loss/value", "policy/entropy", "policy/ratio", "policy/approximate_kl"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name


def test_a_window_as_long_as_a_segment_changes_nothing():
    settings = {"minibatches": 4, "epochs": 2, "optimiser": "adam"}
    whole, metrics = learn(algorithm_of(**settings))
    found, found_metrics = learn(algorithm_of(window=STEPS, **settings))
    assert_params_close(found, whole, rtol=0, atol=1e-6)
    assert found_metrics == pytest.approx(metrics, abs=1e-6)


# The loss, by hand ---------------------------------------------------------------------------------------------------


def losses_by_hand(torso, window, burn_in, before, now, coef=COEF):
    """The losses of all windows with parameters `now`, where the memories are of those `before` the update."""
    rollout = made_up(torso)
    lived_through, _, _ = walk(torso, before, rollout.carry, 0, STEPS)
    log_probs, values = [], []
    for begin in range(0, STEPS, window):
        first = max(begin - burn_in, 0) if begin else 0
        carries, _, _ = walk(torso, now, lived_through[first], first, begin)
        _, more_log_probs, more_values = walk(torso, now, carries[-1], begin, begin + window)
        log_probs += more_log_probs
        values += more_values
    advantages, targets = numpy_gae(rollout, coef["discount"], coef["gae_lambda"])
    return numpy_losses(rollout, np.stack(log_probs), np.stack(values), advantages, targets, coef)


@pytest.mark.parametrize(
    ("torso", "window", "burn_in"),
    [
        pytest.param("gru", 2, 0, marks=pytest.mark.slow),
        ("gru", 2, 2),
        pytest.param("lstm", 3, 2, marks=pytest.mark.slow),
        ("mingru", 2, 1),
    ],
)
def test_the_second_gradient_step_burns_in_with_the_parameters_after_the_first(torso, window, burn_in):
    """Whole rollouts are one minibatch, so that two epochs are two steps, and their losses are averaged."""
    coef, settings = {**COEF, "learning_rate": 3.0}, {"window": window, "burn_in": burn_in}
    before = network_of(torso)[1]
    after, _ = learn(algorithm_of(torso, **settings), torso, **coef)
    _, metrics = learn(algorithm_of(torso, epochs=2, **settings), torso, **coef)
    first = losses_by_hand(torso, window, burn_in, before, before, coef)
    second = losses_by_hand(torso, window, burn_in, before, after, coef)
    expected = {name: (first[name] + second[name]) / 2 for name in first}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    other = losses_by_hand(torso, window, 0 if burn_in else 2, before, after, coef)
    assert abs(other["loss/total"] - second["loss/total"]) > 1e-2


def test_no_gradient_flows_through_a_burn_in():
    """In the first step it finds the memory that was there without it; so the gradients are the same, if it has none."""
    without, _ = learn(algorithm_of(window=2))
    found, _ = learn(algorithm_of(window=2, burn_in=2))
    assert_params_close(found, without, rtol=1e-5, atol=1e-6)
    whole, _ = learn(algorithm_of())
    assert distance(whole, without) > 1e-3  # where gradients flow from window to window


def test_a_reset_inside_the_burn_in_clears_the_memory():
    """Step 2 begins an episode: the window from step 3 on knows that step alone, whatever was before."""
    (network, params), rollout = network_of("lstm"), made_up("lstm")
    never = jnp.zeros((STEPS, SEGMENTS), bool)
    reset, other = never.at[2].set(True), rollout.obs.at[:2].add(1.0)
    unroll = partial(network.unroll, params)

    @jax.jit
    def memory(obs, reset):
        start = sequences.burn_ins(unroll, rollout.carry, obs, reset, window=3, burn_in=2)
        return jax.tree.map(lambda x: x[SEGMENTS:], sequences.burnt_in(unroll, start))

    expected, _, _ = network.step(params, network.initial_carry((SEGMENTS,)), rollout.obs[2], never[2])
    assert_params_close(memory(rollout.obs, reset), expected)
    assert_params_close(memory(other, reset), expected)
    assert distance(memory(other, never), memory(rollout.obs, never)) > 1e-2


# With other options --------------------------------------------------------------------------------------------------


def test_windows_are_drawn_by_their_own_priorities():
    coef = {**COEF, "priority_exponent": 0.7, "importance_exponent": 0.6, "learning_rate": 0.0}
    algorithm = algorithm_of(window=2, burn_in=1, minibatching="prioritised", minibatches=2)
    _, metrics = learn(algorithm, **coef)
    given = (made_up("gru").action, made_up("gru").log_prob, *outputs("gru"))
    advantages, targets = numpy_gae(made_up("gru"), coef["discount"], coef["gae_lambda"])
    cut = [np.moveaxis(np.reshape(x, (3, 2, *x.shape[1:])), 0, 1) for x in (*given, advantages, targets)]
    windows = [x.reshape(2, 3 * SEGMENTS, *x.shape[3:]) for x in cut]
    losses = []
    for step in range(2):
        indices, weights = drawn(step, 2, np.abs(windows[4]).sum(0), 0.7, 0.6, 12)
        action, log_prob, *rest = (x[:, indices] for x in windows)
        part = made_up("gru")._replace(action=action, log_prob=log_prob)
        losses.append(numpy_losses(part, *rest, coef, weights=weights))
        losses[-1] |= {"priority/weight": weights.mean(), "priority/weight_max": weights.max()}
    expected = {name: (losses[0][name] + losses[1][name]) / 2 for name in losses[0]}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_accumulated_gradients_of_windows_are_those_of_the_whole_minibatch():
    settings = {"window": 2, "burn_in": 2, "minibatches": 2, "epochs": 2, "kl_coef": 0.1}
    whole, metrics = learn(algorithm_of(**settings), kl_coef=0.1)
    parts, metrics_of_parts = learn(algorithm_of(accumulate=3, **settings), kl_coef=0.1)
    assert_params_close(parts, whole, rtol=1e-3, atol=1e-5)
    assert metrics_of_parts == pytest.approx(metrics, rel=1e-3, abs=1e-5)


def test_what_is_not_valid_teaches_nothing():
    assert_steps_not_taken_teach_nothing(algorithm_of(window=2, burn_in=2), COEF, "gru")


def test_at_the_begin_of_an_update_the_policy_of_a_window_is_the_one_that_acted():
    _, metrics = learn(algorithm_of(window=2, burn_in=2), rollout=lived("gru"))
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/approximate_kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "window is 0; it must be 1 or more, or none"),
        ({"window": 4}, "window is 4, which does not divide horizon=6; choose a divisor of 6"),
        ({"window": 3, "burn_in": -1}, "burn_in is -1; it must be 0 or more"),
        ({"window": 3, "burn_in": 4}, "burn_in is 4, which is longer than window=3; it must be at most 3"),
        ({"burn_in": 4}, "burn_in is 4, but a window is a whole segment and has no preceding steps"),
        ({"window": 6, "burn_in": 4}, "burn_in is 4, but a window is a whole segment and has no preceding steps"),
        ({"window": 3, "advantage": "vtrace"}, "window is 3, but advantage is 'vtrace', which needs whole segments"),
        ({"window": 3, "minibatching": "flat"}, "window is 3, but minibatching is 'flat', which shuffles single steps"),
        ({"minibatching": "flat"}, "minibatching is 'flat', but the network is recurrent"),
    ],
)
def test_windows_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        algorithm_of(**settings)


def test_without_a_memory_there_is_nothing_to_burn_in():
    assert algorithm_of("mlp", ppo, window=3).config.minibatching == "segments"
    with pytest.raises(InputError, match="burn_in is 2, but the network is not recurrent"):
        algorithm_of("mlp", ppo, window=3, burn_in=2)
    assert algorithm_of("mlp", ppo, horizon=64, window="auto", burn_in="auto").config.burn_in == 0
    plan = make_plan("ppo", {**SMALL, "horizon": 64, "window": 16, "burn_in": "auto", "torso": "mlp"})
    assert (plan.mapping["window"], plan.mapping["burn_in"]) == (16, 0)


# What `auto` means ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "window", "burn_in"),
    [
        ({}, 32, 8),
        ({"horizon": 128}, 32, 8),
        ({"horizon": 100}, 25, 6),
        ({"horizon": 296}, 8, 2),
        ({"horizon": 32}, None, 0),  # a window would be the whole segment
        ({"horizon": 5}, None, 0),
        ({"horizon": 74}, None, 0),  # its divisors are 2 and 37
        ({"num_envs": 1, "minibatches": 16}, 16, 4),  # windows of 32 would be too few for them
        ({"num_envs": 1, "minibatches": 4, "accumulate": 4}, 16, 4),
        ({"minibatching": "prioritised"}, 32, 8),
        ({"advantage": "vtrace"}, None, 0),
        ({"preset": "puffer", "horizon": 256, "window": "auto", "burn_in": "auto"}, None, 0),
        ({"window": "AUTO", "burn_in": 16}, 32, 16),
        ({"window": 64}, 64, 16),
        ({"window": 256}, 256, 0),
        ({"window": 3, "horizon": 9, "burn_in": 0}, 3, 0),
        ({"window": "none"}, None, 0),
        ({"window": None, "burn_in": "auto"}, None, 0),
    ],
)
def test_auto_takes_the_largest_windows_that_fit(settings, window, burn_in):
    asked, _ = config.build(algorithms.settings_of("recurrent_ppo"), settings)
    chosen = asked.for_network(is_recurrent=True)
    assert (chosen.window, chosen.burn_in) == (window, burn_in)
    assert asked.for_devices(1).window == window  # known before the network is
    assert chosen.for_devices(1).for_network(is_recurrent=True) == chosen


@pytest.mark.parametrize("segments", [1, 4, 7])
def test_automatic_windows_divide_any_segment_and_fill_the_minibatches_if_they_can(segments):
    for horizon in range(1, 300):
        window = sequences.auto_window(horizon, segments, minibatches=8)
        divisors = [length for length in range(8, 33) if horizon % length == 0]
        filling = [length for length in divisors if segments * horizon // length % 8 == 0]
        assert window in (divisors or [None]) or (window is None and horizon in divisors)
        if filling:
            assert window == (None if max(filling) == horizon else max(filling))


def test_a_run_states_its_windows():
    def windows(**settings):
        mapping = make_plan("recurrent_ppo", {**SMALL, "num_envs": 1, "horizon": 64, **settings}).mapping
        return mapping["window"], mapping["burn_in"]

    assert windows() == (32, 8)
    assert windows(window="none") == (None, 0)
    assert windows(window=16) == (16, 4)


@pytest.mark.parametrize(
    ("settings", "devices", "window"),
    [
        ({}, 8, 32),
        ({"minibatches": 16}, 4, 32),
        ({"minibatches": 16}, 8, 16),  # a device has 8 windows of 32
        ({"minibatches": 8, "accumulate": 4}, 8, 8),
        ({"minibatches": 16}, 16, 16),  # more than can share the environments, which is refused elsewhere
        ({"minibatches": 16, "window": 32}, 8, 32),
    ],
)
def test_automatic_windows_fill_the_minibatches_of_each_device(settings, devices, window):
    asked, _ = config.build(algorithms.settings_of("recurrent_ppo"), settings)
    assert asked.for_devices(devices).window == window


def test_a_run_cuts_windows_for_the_devices_that_it_asks_for():
    settings = {**SMALL, "num_envs": 8, "horizon": 64, "minibatches": 4}
    assert make_plan("recurrent_ppo", settings).mapping["window"] == 32
    assert make_plan("recurrent_ppo", {**settings, "devices": 8}).mapping["window"] == 16
    member = make_plan("recurrent_ppo", {**settings, "devices": 8}, abstract=True)  # devices share members
    assert member.mapping["window"] == 32


def test_an_algorithm_cuts_the_windows_that_its_settings_leave_open():
    algorithm = algorithm_of(horizon=64, window="auto", burn_in="auto")
    assert (algorithm.config.window, algorithm.config.burn_in) == (32, 8)
    assert algorithm_of(module=ppo, horizon=64).config.window is None  # PPO's segments are whole


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"horizon": 32, "burn_in": 4}, "burn_in is 4, but a window is a whole segment and has no preceding steps"),
        ({"horizon": 64, "burn_in": 33}, "burn_in is 33, which is longer than window=32; it must be at most 32"),
        ({"window": 32, "horizon": 48}, "window is 32, which does not divide horizon=48; choose a divisor of 48"),
        ({"window": 32, "preset": "puffer"}, "window is 32, but advantage is 'vtrace', which needs whole segments"),
        ({"window": "all"}, "window is 'all'; give a whole number, or auto, or none"),
        ({"burn_in": "none"}, "burn_in is 'none'; give a whole number, or auto"),
    ],
)
def test_what_is_given_beside_auto_is_checked(settings, message):
    with pytest.raises(InputError, match=message):
        config.build(algorithms.settings_of("recurrent_ppo"), settings)


# Its own defaults ----------------------------------------------------------------------------------------------------


def test_it_is_ppo_with_other_defaults():
    own, network = config.build(algorithms.settings_of("recurrent_ppo"), {})
    assert (own, network) == (recurrent_ppo.Config(), recurrent_ppo.NetworkConfig())
    described = {field.name: field._replace(default=None, config=ppo.Config) for field in config.describe(type(own))}
    expected = {field.name: field._replace(default=None) for field in config.describe(ppo.Config)}
    for name in ("discount", "learning_rate"):  # which depend on the actions
        assert described.pop(name).optional
        assert not expected.pop(name).optional
    assert described == expected
    built = NetworkConfig(**config.to_mapping(network))
    assert built == NetworkConfig(torso="mingru", recurrent_size=64, initial_log_std=None)
    assert algorithms.settings_of("ppo") == [ppo.Config, NetworkConfig]


def test_presets_are_what_they_were_with_short_whole_segments():
    expected = {"classic": ((4, 128), (0.98, 0.8, 0.0, 1.0)), "puffer": ((8, 32), (0.995, 0.9, 0.001, 2.0))}
    for preset, (sizes, coefficients) in expected.items():
        own, network = config.build(algorithms.settings_of("recurrent_ppo"), {"preset": preset})
        assert (own.num_envs, own.horizon, own.window, own.burn_in, own.clip_range) == (*sizes, None, 0, "0.2 -> 0.001")
        assert (own.discount, own.gae_lambda, own.entropy_coef, own.value_coef) == coefficients
        assert network.initial_log_std == 0.0


def test_entries_of_the_zoo_leave_no_windows_open():
    assert all({"window", "burn_in"} <= set(entry.settings) for entry in zoo.entries("recurrent_ppo"))


def test_without_velocities_the_settings_are_rl_zoos():
    """RL Zoo's hyperparameters of RecurrentPPO for CartPole without velocities, and SB3's own vf_coef of 0.5."""
    hidden = zoo.find("recurrent_ppo", "CartPole-Hidden-v1").learning
    own, _ = config.build(algorithms.settings_of("recurrent_ppo"), hidden)
    assert (own.window, own.burn_in) == (None, 0)
    assert (own.num_envs, own.horizon, own.epochs, own.minibatches) == (8, 32, 20, 8 * 32 // 256)
    assert (own.normalise_observations, own.normalise_rewards) == (True, True)  # normalize: True is both
    assert (own.discount, own.gae_lambda, own.entropy_coef, own.max_grad_norm) == (0.98, 0.8, 0.0, 0.5)
    assert lehr.schedule(own.learning_rate, 100)(50) == pytest.approx(0.0005)
    assert lehr.schedule(own.clip_range, 100)(0) == 0.2
    # SB3's value loss is mean (V − R)², ours half of that: the same weighted loss, 0.5 · mean (V − R)².
    errors = np.array([1.0, 3.0])
    ours = own.value_coef * float(value_loss(jnp.asarray(errors), jnp.zeros(2)))
    assert ours == pytest.approx(0.5 * np.mean(errors**2))


def test_the_help_shows_its_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    for algorithm, torso in (("recurrent_ppo", "mingru"), ("ppo", "auto")):
        with pytest.raises(SystemExit):
            main(["train", algorithm, "--help"])
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("--torso"))
        assert line.endswith(f"(default: {torso})")


@pytest.mark.parametrize("torso", ["mlp", "auto"])
def test_without_a_memory_it_is_refused(torso):
    with pytest.raises(InputError, match="Neither torso nor critic_torso is recurrent, but recurrent_ppo needs one"):
        make_plan("recurrent_ppo", {"torso": torso})


def test_what_is_given_holds_above_the_defaults(tmp_path):
    file = tmp_path / "settings.yaml"
    config.to_yaml(file, {"torso": "lstm"})
    given = config.merge(settings_classes("recurrent_ppo"), config.from_yaml(file), {"recurrent-size": 8})
    assert make_plan("recurrent_ppo", given).network == recurrent_ppo.NetworkConfig(torso="lstm", recurrent_size=8)


@pytest.mark.slow
def test_a_run_keeps_its_memory_and_goes_on(tmp_path):
    small = SMALL | {"window": 4, "burn_in": 2, "recurrent_size": 8}
    run = lehr.train("recurrent_ppo", total_steps=64, run_dir=tmp_path / "run", **small)
    saved = config.from_yaml(tmp_path / "run" / "config.yaml")
    assert (saved["algorithm"], saved["torso"], saved["window"], saved["burn_in"]) == ("recurrent_ppo", "mingru", 4, 2)
    loaded = lehr.load(tmp_path / "run")
    assert [leaf.shape for leaf in jax.tree.leaves(loaded.state.actor.carry)] == [(4, 8)] * 2  # actor and critic
    assert_params_close(loaded.params, run.params, rtol=0, atol=0)
    longer = lehr.resume(tmp_path / "run", total_steps=128)
    assert (longer.final["env_steps"], longer.config["torso"]) == (128, "mingru")


# It learns -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_was_shown_before_is_learned_in_windows_too(recall, begin, advance):
    """Whose memory comes from windows before: an episode is three steps, a window four."""
    cut = {"horizon": 12, "window": 4, "burn_in": 2, "num_envs": 16, "critic_torso": None}
    run = begin("recurrent_ppo", recall, total_steps=150 * 192, learning_rate="0.01 -> 0", entropy_coef=0.0, **cut)
    run = advance(run, 150)
    assert run.metrics["episode/return"][-20:].mean() > 0.9
    assert run.metrics["update/rejected"][-1] == 0
