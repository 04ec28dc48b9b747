"""Runs on eight simulated devices; `test_sharding.py` starts these tests in a process that has them."""

import shutil
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

import lehr
from bench.collectives import collectives
from lehr import algorithms
from lehr.algorithms import a2c
from lehr.envs import make
from lehr.envs.builtin.classic import CartPole
from lehr.errors import InputError
from lehr.maths import across
from lehr.spaces import Spaces
from lehr.sweeps.api import checked_sampler, members_of
from lehr.sweeps.definition import Definition
from lehr.sweeps.directory import Wave
from lehr.sweeps.evolution import PopulationBasedTraining
from lehr.sweeps.running import WaveTrainer
from lehr.training.hosts import Hosts
from lehr.training.iteration import learn, next_rollout
from lehr.training.plan import make_plan
from lehr.training.population import make_population
from lehr.training.population_record import evaluation_of
from lehr.training.record import RunFailed
from lehr.training.runners import device
from lehr.training.runners.device import DeviceRunner, traced_once
from lehr.training.runners.population import PopulationRunner

SMALL = {"env": "CartPole-v1", "num_envs": 16, "hidden_sizes": (8,), "total_steps": 1024, "progress": False}
QUIET = {"tensorboard": False, "evaluate_episodes": 0}
STEPS = {"horizon": 8, "epochs": 2, "minibatches": 2}
SETTINGS = {
    "ppo": STEPS | {"target_kl": 0.5, "normalise_observations": True, "normalise_rewards": True},
    "recurrent_ppo": STEPS | {"recurrent_size": 8, "torso": "gru"},
    "ppg": STEPS | {"policy_updates": 2, "auxiliary_epochs": 1, "auxiliary_minibatches": 2},
    "appo": STEPS,
    "gail": STEPS,
    "trpo": {"horizon": 8, "value_epochs": 1, "value_minibatches": 2},
    "dreamer": {"horizon": 8, "batch_size": 8, "batch_length": 4, "train_ratio": 1.0, "replay_size": 1024}
    | {"prefill": 64, "imagination_length": 3},
}


def planned(name, folder, **more):
    """The plan of a small run, on one device."""
    env = make("CartPole-v1")
    given = SMALL | SETTINGS.get(name, {}) | more
    given |= algorithms.find(name).trial_settings(Spaces(env.observation_space, env.action_space), folder)
    if name == "dreamer":
        del given["hidden_sizes"]
    return make_plan(name, given)


def test_there_are_eight_devices():
    assert jax.device_count() == 8


def test_automatic_windows_fill_the_minibatches_of_eight_devices(tmp_path):
    def windows(**more):
        """The length of windows, and the number of devices that share them; each has two segments of 64 steps."""
        plan = planned("recurrent_ppo", tmp_path, horizon=64, minibatches=8, **more).on_devices()
        return plan.settings.window, plan.sharding.devices

    assert windows() == (32, 4)
    assert windows(devices=8) == (16, 8)


# What crosses between devices ----------------------------------------------------------------------------------------


def exchanged(jaxpr):
    """The collectives of a traced program: kind and bytes of each."""
    for equation in jaxpr.eqns:
        kind = equation.primitive.name
        if kind in ("psum", "pmax", "pmin", "all_gather", "all_to_all", "ppermute", "reduce_scatter"):
            yield kind, sum(out.aval.size * out.aval.dtype.itemsize for out in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from exchanged(inner)


@pytest.mark.parametrize("name", algorithms.names())
def test_only_gradients_and_numbers_cross_between_devices(name, tmp_path):
    plan = planned(name, tmp_path).on_devices()
    assert plan.sharding.devices == 8
    update = plan.sharding.spread(partial(traced_once, plan.program, 1))
    found = list(exchanged(jax.make_jaxpr(update)(plan.state).jaxpr))
    assert {kind for kind, _ in found} <= {"psum", "pmax", "pmin"}
    trained = 4 * sum(
        leaf.size for leaf in jax.tree.leaves((plan.state.learner.params, plan.state.reward_model.params))
    )
    gradients, numbers = ([size for _, size in found if (size > 128) == is_large] for is_large in (True, False))
    assert 1 <= len(gradients) <= 3
    assert max(gradients) <= trained + 4 * 9  # 9: PPG's second value head
    assert len(numbers) <= 20
    for leaf in jax.tree.leaves((plan.state.actor, plan.state.learner.memory)):
        assert leaf.ndim == 0 or leaf.addressable_shards[0].data.size == leaf.size / 8


def test_a_gradient_step_of_the_compiled_program_exchanges_the_parameters_once(tmp_path):
    plan = planned("ppo", tmp_path).on_devices()
    runner = DeviceRunner(plan.program, plan.state, plan.sharding)
    runner.compile(plan.state)
    found = collectives(runner._compiled.as_text())
    assert {one.kind for one in found} == {"all-reduce"}
    parameters = 4 * sum(leaf.size for leaf in jax.tree.leaves(plan.state.learner.params))
    (gradients,) = (one for one in found if one.bytes > 200)
    step = [one for one in found if one.computation == gradients.computation]
    assert gradients.times == 4  # 2 epochs of 2 minibatches
    assert len(step) <= 4
    assert parameters <= sum(one.bytes for one in step) <= parameters + 4 * 4  # mean and deviation, divergence


@pytest.mark.long
@pytest.mark.parametrize("name", algorithms.names())
def test_xla_adds_no_other_exchange(name, tmp_path):
    plan = planned(name, tmp_path).on_devices()
    runner = DeviceRunner(plan.program, plan.state, plan.sharding)
    runner.compile(plan.state)
    found = collectives(runner._compiled.as_text())
    assert {one.kind for one in found} == {"all-reduce"}
    trained = (plan.state.learner.params, plan.state.reward_model.params)
    largest = max(found, key=lambda one: one.bytes)
    assert largest.bytes <= 4 * sum(leaf.size for leaf in jax.tree.leaves(trained)) + 4 * 9  # PPG's second value head
    assert len([one for one in found if one.computation == largest.computation]) <= 6


# Eight devices learn what one does -----------------------------------------------------------------------------------

WHOLE = {"minibatches": 1, "epochs": 1}
PLAIN = {"optimiser": "sgd", "learning_rate": 1.0, "max_grad_norm": None}
SAME = {
    "ppo": PLAIN | WHOLE | {"normalise_observations": True, "normalise_rewards": True},
    "prioritised": PLAIN | WHOLE | {"minibatching": "prioritised", "advantage": "vtrace", "normalise_rewards": True},
    "a2c": PLAIN | {"standardise_advantages": True},
    "impala": PLAIN | {"horizon": 8},
    "appo": PLAIN | WHOLE,
    "recurrent_ppo": PLAIN | WHOLE,
    "ppg": PLAIN | WHOLE | {"policy_updates": 1, "auxiliary_minibatches": 1, "auxiliary_learning_rate": 0.1},
    "trpo": {"optimiser": "sgd", "value_minibatches": 1, "conjugate_steps": 3, "damping": 0.5},
    "gail": PLAIN | WHOLE | {"discriminator_learning_rate": 0.0},
}
IN_CI = ("ppo", "trpo")


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.long) for name in SAME]
)
def test_eight_devices_learn_the_same_from_a_rollout(name, tmp_path):
    chosen = {"prioritised": "ppo"}.get(name, name)
    one = planned(chosen, tmp_path, **{"target_kl": None} if chosen == "ppo" else {}, **SAME[name])
    eight = one.on_devices()
    collected = jax.jit(partial(next_rollout, one.program))(one.state)
    expected, metrics = jax.jit(partial(learn, one.program))(one.state, collected)

    def split(path, leaf):
        first = jax.tree_util.keystr(path).startswith(".rollout.carry")
        return PartitionSpec(across.AXIS) if first else PartitionSpec(None, across.AXIS)

    specs = jax.tree_util.tree_map_with_path(split, collected)
    share = jax.tree.map(lambda x: x / 8, collected.finished)  # what all devices add up to
    specs = specs._replace(actor=eight.sharding.specs.actor, finished=jax.tree.map(lambda _: PartitionSpec(), share))
    sharding = jax.tree.map(partial(NamedSharding, eight.sharding.mesh), specs)
    spread = jax.shard_map(
        partial(learn, one.program),
        mesh=eight.sharding.mesh,
        in_specs=(eight.sharding.specs, specs),
        out_specs=(eight.sharding.specs, PartitionSpec()),
        check_vma=False,
    )
    placed = jax.device_put(collected._replace(finished=share), sharding)
    found, measured = jax.jit(spread)(eight.state, placed)
    assert eight.sharding.differing(found) == []
    for part in ("learner", "observation_statistics", "reward_scaling", "controllers"):
        pair = (jax.tree.map(np.asarray, getattr(state, part)) for state in (found, expected))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6), *pair)
    moved = jax.tree.map(
        lambda new, old: float(jnp.abs(new - old).max()), expected.learner.params, one.state.learner.params
    )
    assert max(jax.tree.leaves(moved)) > 1e-3
    drawn = ("discriminator/",)  # from batches that each device draws for itself
    for metric, value in ((metric, value) for metric, value in metrics.items() if not metric.startswith(drawn)):
        np.testing.assert_allclose(measured[metric], value, rtol=1e-3, atol=1e-5, err_msg=metric)


# Whole runs ----------------------------------------------------------------------------------------------------------

SHORT = SMALL | QUIET | {"horizon": 8, "total_steps": 128 * 4, "checkpoint_every": 128 * 2}


def arrays(result):
    state = result.state._replace(key=(), coefficients=())
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def same(one, other):
    return all(np.array_equal(x, y) for x, y in zip(arrays(one), arrays(other), strict=True))


def test_a_run_on_eight_devices_is_resumed_exactly_on_eight_and_goes_on_with_fewer(tmp_path, caplog):
    whole = lehr.train("a2c", run_dir=tmp_path / "whole", **SHORT)
    assert whole.state.actor.reset.sharding.device_set == set(jax.devices())
    stopped = lehr.train("a2c", run_dir=tmp_path / "8", progress_fn=lambda steps, _: steps >= 256, **SHORT)
    assert int(stopped.state.updates) < 4
    for devices in (2, 1):
        shutil.copytree(tmp_path / "8", tmp_path / str(devices))
    for devices in (8, 2, 1):
        caplog.clear()
        found = lehr.resume(tmp_path / str(devices), devices=devices)
        assert int(found.state.updates) == 4
        assert len(found.state.actor.reset.sharding.device_set) == devices
        assert same(found, whole) == (devices == 8)
        told = [record.getMessage() for record in caplog.records]
        assert told == ([] if devices == 8 else [
            f"The run was on 8 devices and goes on with {devices}: each device has random numbers of its own, so it will "
            "differ from one that was not stopped."
        ])  # fmt: skip
    assert lehr.evaluate(tmp_path / "whole", episodes=2).returns.shape == (2,)


@dataclass(frozen=True)
class SharedResets(CartPole):
    environments_per_reset = 4


def test_each_device_has_resets_of_its_own(tmp_path):
    settings = {name: value for name, value in SHORT.items() if name != "env"} | {"num_envs": 24}
    lehr.train("a2c", SharedResets(), run_dir=tmp_path / "run", **settings)
    found = lehr.load(tmp_path / "run", env=SharedResets()).state.actor.resets
    assert jax.tree.leaves(found.starts)[0].shape[0] == 24
    eight = make_plan("a2c", settings, SharedResets()).on_devices()
    assert jax.tree.leaves(eight.state.actor.resets.starts)[0].shape[0] == 8 * 4  # 3 environments need 4 resets
    assert int(eight.state.actor.resets.unread) == 4
    more = {"total_steps": 24 * 8 * 6, "devices": 4}
    resumed = lehr.resume(tmp_path / "run", env=SharedResets(), **more)
    assert int(resumed.state.updates) == 6
    assert jax.tree.leaves(resumed.state.actor.resets.starts)[0].shape[0] == 4 * 8


def test_ppo_learns_on_eight_devices(tmp_path):
    settings = {"num_envs": 16, "horizon": 32, "minibatches": 4, "epochs": 8, "learning_rate": "2e-3 -> 0"}
    annealed = {"entropy_coef": 0.01, "discount": 0.98, "gae_lambda": 0.9, "total_steps": 40_000}
    quiet = {"progress": False, "tensorboard": False, "evaluate_episodes": 20}
    result = lehr.train("ppo", "CartPole-v1", run_dir=tmp_path / "run", **settings, **annealed, **quiet)
    assert result.final["evaluate/return"] > 400


class Forgetful(a2c.Algorithm):
    """Stores what it computed from its device's rollout alone."""

    def learn(self, learner, rollout, coef, key):
        learner, metrics = super().learn(learner, rollout, coef, key)
        return learner._replace(auxiliary=jnp.mean(rollout.obs)), metrics

    def init(self, key, params, example):
        return super().init(key, params, example)._replace(auxiliary=jnp.zeros(()))


def test_an_algorithm_whose_devices_would_part_is_stopped(tmp_path):
    with pytest.raises(
        RunFailed, match=r"The devices do not agree on \.learner\.auxiliary: what .*Forgetful.* computes"
    ):
        lehr.train(Forgetful, run_dir=tmp_path / "run", **SHORT)


# Populations ---------------------------------------------------------------------------------------------------------

MEMBERS = [SHORT | {"seed": seed, "learning_rate": 1e-3 * (1 + seed)} for seed in range(16)]


def population_run(devices, count, **more):
    """Train a population for some updates; return its state, its metrics, and the text of the program."""
    population = make_population("a2c", [member | {"devices": devices} for member in MEMBERS], **more)
    assert population.sharding.devices == devices
    runner = PopulationRunner(
        population.plan.program, population.plan.state, evolution=population.evolution, sharding=population.sharding
    )
    runner.compile(population.plan.state)
    text = runner._compiled.as_text()
    state, rows = runner.advance(population.plan.state, count)
    return state, np.asarray(rows)[:count], text


def close(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-5)


def test_members_of_a_population_are_shared_without_communication():
    (one, rows, _), (eight, same_rows, text) = (population_run(devices, 4) for devices in (1, 8))
    assert collectives(text) == []
    assert {shard.data.shape for shard in eight.members.updates.addressable_shards} == {(2,)}
    close(one.members.learner, eight.members.learner)
    close(rows, same_rows)


def test_automatic_windows_of_members_do_not_depend_on_the_devices_that_share_them():
    settings = SMALL | SETTINGS["recurrent_ppo"] | {"horizon": 64, "minibatches": 8, "devices": 8}
    population = make_population("recurrent_ppo", [settings | {"seed": seed} for seed in range(8)])
    assert (population.plan.settings.window, population.sharding.devices) == (32, 8)


def test_each_device_evaluates_its_own_members():
    found = []
    for devices in (1, 8):
        settings = [{**SMALL, **STEPS, "devices": devices, "seed": seed, "evaluate_episodes": 2} for seed in range(16)]
        population = make_population("ppo", settings)
        state = population.plan.state
        compiled = evaluation_of(population.plan, state.members, population.sharding)().result()
        assert collectives(compiled.as_text()) == []
        place = population.sharding.place
        given = population.plan.policy(state.members).learned, state.members.key, state.members.updates
        found.append(compiled(*place(given, 0), place(np.bool_(True), None)))
    close(*found)


def test_a_sweep_that_devices_share_traces_an_update_once(monkeypatch):
    traced = []
    iteration = device.iteration
    monkeypatch.setattr(device, "iteration", lambda *given: traced.append(given) or iteration(*given))
    definition = Definition.from_mapping(
        {"algorithm": "a2c", "settings": {**SMALL, "horizon": 24}, "parameters": {"lr": [1e-3, 1e-4]}, "seeds": 8}
        | {"sampler": "grid"}
    )
    sampler, need = checked_sampler(definition)
    trainer = WaveTrainer("a2c", progress=False)
    trainer.use(need.base)
    members = members_of(sampler.ask(2), definition.seeds)
    made = trainer._population(Wave(0, tuple(members), 16), [member.label for member in members])
    assert made.sharding.devices == 8
    assert len(traced) == 1


@pytest.mark.long
def test_members_on_eight_devices_evolve_as_on_one():
    made = partial(PopulationBasedTraining, 2, 8, ("learning_rate",), low=(1e-5,), high=(1.0,), share=0.5)
    (one, rows, _), (eight, same_rows, _) = (
        population_run(devices, 5, make_evolution=lambda plan: made()) for devices in (1, 8)
    )
    assert (rows[..., -1] != np.arange(16)).any()  # somebody was replaced
    close(one.members.learner, eight.members.learner)
    close(rows, same_rows)


@pytest.mark.long
def test_a_sweep_has_idle_places_so_that_all_devices_have_equally_many_members(tmp_path):
    trained = lehr.train("a2c", seeds=10, run_dir=tmp_path / "seeds", **SHORT | {"evaluate_episodes": 2})
    assert trained.is_finished
    saved = np.load(next((tmp_path / "seeds").rglob("state.npz")))
    assert {len(saved[name]) for name in saved if saved[name].ndim} == {16}  # 2 on each device, 6 of them idle


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 9}, "devices is 9, but there are 8; give a number from 1 to 8, or all."),
        ({"devices": 0}, "devices is 0; it must be 1 or more."),
        ({"devices": "most"}, "devices is 'most'; give a whole number, or all."),
        (
            {"devices": 8, "num_envs": 12},
            "With devices=8, each device has a share of the run: num_envs is 12, which 8 devices cannot share equally; "
            "choose a multiple of 8.",
        ),
        (
            {"devices": 8, "minibatches": 32},
            "With devices=8, each device has a share of the run: 16 samples cannot be split into 32 equal minibatches; "
            "choose a divisor of 16.",
        ),
    ],
)
def test_devices_that_cannot_share_a_run_are_refused_in_one_sentence(settings, message):
    with pytest.raises(InputError) as error:
        make_plan("ppo", SMALL | STEPS | settings).on_devices()
    assert str(error.value) == message


class TwoHosts(Hosts):
    """The eight devices as if they were those of two processes."""

    def __init__(self):
        super().__init__(0, 2)

    def devices(self):
        return [jax.devices()[:4], jax.devices()[4:]]


def test_every_host_gives_equally_many_devices():
    for num_envs, numbers in ((16, [0, 1, 2, 3, 4, 5, 6, 7]), (12, [0, 1, 2, 4, 5, 6]), (2, [0, 4])):
        plan = make_plan("a2c", SMALL | {"num_envs": num_envs}).on_devices(TwoHosts())
        assert [device.id for device in plan.sharding.mesh.devices] == numbers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_envs": 15},
            "With devices=2, each device has a share of the run: num_envs is 15, which 2 devices cannot",
        ),
        ({"devices": 3}, "devices is 3, which 2 processes cannot share equally; choose a multiple of 2, or all."),
        ({"env": "gym:CartPole-v1"}, "This run has 2 processes, but gym:CartPole-v1 runs on the host, and a run with"),
    ],
)
def test_hosts_that_cannot_share_a_run_are_refused_in_one_sentence(settings, message):
    with pytest.raises(InputError) as error:
        make_plan("a2c", SMALL | settings).on_devices(TwoHosts())
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("devices", ["all", 1])
def test_a_replay_is_made_in_shares_since_one_device_may_be_too_small_for_it(devices, tmp_path):
    settings = SMALL | SETTINGS["dreamer"] | {"devices": devices, "total_steps": 128}
    del settings["hidden_sizes"]
    begun = make_plan("dreamer", settings, spreads=True)
    on_none = devices == "all"
    assert {isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(begun.state.memories)} == {on_none}
    found, expected = begun.on_devices().state, make_plan("dreamer", settings).on_devices().state
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.sharding == other.sharding
        bits = (jax.random.key_data(x) if x is found.key or x is expected.key else x for x in (one, other))
        np.testing.assert_array_equal(*bits)


def test_the_program_that_makes_a_replay_holds_a_share_of_it_on_each_device():
    settings = {name: value for name, value in (SMALL | SETTINGS["dreamer"]).items() if name != "hidden_sizes"}
    plan = make_plan("dreamer", settings | {"replay_size": 2**20}, spreads=True)
    compiled = []
    jit = jax.jit

    def watched(function, **options):
        made = jit(function, **options)
        return lambda *given: compiled.append(made.lower(*given).compile()) or made(*given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jax, "jit", watched)
        state = plan.on_devices().state
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.memories))
    (found,) = (one.memory_analysis() for one in compiled)
    assert size > 2**24
    assert size / 8 <= found.output_size_in_bytes < size / 7
    assert found.temp_size_in_bytes < size / 100
    assert collectives(found_text := compiled[0].as_text()) == [], found_text


def test_by_default_as_many_devices_are_used_as_can_share_the_run():
    plan = make_plan("ppo", SMALL | STEPS | {"num_envs": 12, "minibatches": 1}).on_devices()
    assert plan.sharding.devices == 6
    assert plan.notes == ("This run uses 6 of 8 devices: more cannot share its environments and batches equally.",)
    assert replace(plan.run, devices=1).devices == 1
