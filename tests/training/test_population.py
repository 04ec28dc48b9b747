"""Runs trained together are the runs that they would be alone."""

import re
import signal
import threading
from functools import partial

import jax
import numpy as np
import pytest

import lehr
from lehr.errors import InputError
from lehr.report.loggers.population_progress import PopulationProgress
from lehr.report.loggers.thinning import Thinning
from lehr.schedules import env_steps
from lehr.schedules.bundle import population as stacked
from lehr.training import columns, population_record
from lehr.training import population as populations
from lehr.training.directory import RunDirectory
from lehr.training.plan import make_plan
from lehr.training.population import Configured, make_population, member_state
from lehr.training.runners import population as runner
from lehr.training.runners.population import Combining, PopulationRunner

BASE = {
    "env": "CartPole-v1",
    "total_steps": 32 * 24,
    "num_envs": 4,
    "horizon": 8,
    "hidden_sizes": [8],
    "minibatches": 2,
    "epochs": 2,
    "normalise_observations": True,
    "evaluate_episodes": 4,
    "progress": False,
    "tensorboard": False,
}
MEMBERS = [
    {**BASE, "seed": 3, "entropy_coef": "0.03 -> 0.001", "learning_rate": 1e-3},
    {**BASE, "seed": 4, "entropy_coef": 0.01, "learning_rate": "2e-3 -> 0 cosine until 80%"},
    {**BASE, "seed": 5, "entropy_coef": "0 -> 0.1 over 50%", "learning_rate": 3e-4},
]


def trained(members, path, **more):
    population = make_population("ppo", members, **more)
    with RunDirectory.create(path) if not (path / "status.json").exists() else RunDirectory(path) as directory:
        loop = population.loop(directory, partial(PopulationProgress, labels=population.labels))
        return loop.run()


def table(path, *names):
    return columns.read(path / "metrics", ["update", *names])


def arrays(tree):
    leaves = jax.tree.leaves(
        jax.tree.map(
            lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree
        )
    )
    return [np.asarray(leaf) for leaf in leaves]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    path = tmp_path_factory.mktemp("population") / "all"
    return path, trained(MEMBERS, path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    place = tmp_path_factory.mktemp("alone")
    return [lehr.train("ppo", run_dir=place / str(number), **member) for number, member in enumerate(MEMBERS)]


def test_a_member_is_the_run_that_it_would_be_alone(together, alone):
    path, state = together
    found = table(path, "loss/total", "episode/return", "coef/entropy_coef", "coef/learning_rate", "evaluate/return")
    for index, run in enumerate(alone):
        history = run.metrics
        for name in ("coef/entropy_coef", "coef/learning_rate"):
            np.testing.assert_array_equal(found[name][:, index], history[name].astype(np.float32))
        np.testing.assert_allclose(found["loss/total"][:, index], history["loss/total"], rtol=2e-3, atol=2e-4)
        np.testing.assert_array_equal(found["episode/return"][:, index], history["episode/return"].astype(np.float32))
        assert found["evaluate/return"][-1, index] == pytest.approx(run.final["evaluate/return"])
        for here, there in zip(arrays(member_state(state, index).learner.params), arrays(run.params), strict=True):
            np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-5)


def test_a_member_that_diverges_is_frozen_and_changes_no_bit_of_another(together, tmp_path, caplog):
    _, sound = together
    broken = [*MEMBERS]
    broken[1] = {**broken[1], "learning_rate": 1e38, "max_gradient_norm": 1e38}
    members = [{**member, "max_gradient_norm": member.get("max_gradient_norm", 0.5)} for member in broken]
    state = trained([{**member, "max_rejected": 2} for member in members], tmp_path / "p")
    for index in (0, 2):
        here, there = (arrays(member_state(one, index)._replace(coefficients=())) for one in (state, sound))
        for one, other in zip(here, there, strict=True):
            assert one.tobytes() == other.tobytes()
    assert int(state.members.rejected[1]) > 2
    assert all(np.isfinite(leaf).all() for leaf in arrays(state.members.learner.params))
    assert np.array_equal(table(tmp_path / "p", "update/frozen")["update/frozen"][-1], [0, 1, 0])
    assert len(caplog.messages) == 1
    assert "Member 1 is frozen" in caplog.messages[0]
    assert "learning_rate=1e+38" in caplog.messages[0]


@pytest.mark.slow
def test_one_of_64_members_that_diverges_changes_no_bit_of_the_others(tmp_path):
    short = {**BASE, "total_steps": 32 * 8, "evaluate_episodes": 1, "max_rejected": 2}
    sound = [{**short, "seed": seed, "learning_rate": f"{10 ** (-4 + seed / 32):.4g} -> 0"} for seed in range(64)]
    broken = [{**member, "learning_rate": 1e38} if member["seed"] == 17 else member for member in sound]
    found, expected = (trained(members, tmp_path / name) for name, members in (("a", broken), ("b", sound)))
    assert np.flatnonzero(table(tmp_path / "a", "update/frozen")["update/frozen"][-1]).tolist() == [17]
    others = np.arange(64) != 17
    for one, other in zip(*(arrays(state.members) for state in (found, expected)), strict=True):
        assert one[others].tobytes() == other[others].tobytes()


@pytest.mark.parametrize("seeds", [[0, 5, 2**31 - 1], [-3, 2**31, 2**40]])
def test_the_keys_of_members_are_those_of_runs_alone(seeds):
    alone = [jax.random.key_data(jax.random.key(seed)) for seed in seeds]
    np.testing.assert_array_equal(jax.random.key_data(populations._keys(seeds)), alone)


@pytest.mark.parametrize("seeds", [[0, 7], [-1, 2**31], [2**32 + 5, -(2**63)], [2**63 - 1, 1]])
def test_members_begin_as_runs_of_these_seeds(seeds):
    settings = [{**BASE, "seed": seed} for seed in seeds]
    population = make_population("ppo", settings)
    for number, one in enumerate(settings):
        found, alone = member_state(population.plan.state, number), make_plan("ppo", one).state
        assert np.array_equal(*(jax.random.key_data(state.key) for state in (found, alone)))
        jax.tree.map(np.testing.assert_array_equal, *(arrays(state.learner.params) for state in (found, alone)))


def test_a_population_that_is_stopped_and_resumed_ends_with_the_same_bits(together, tmp_path, monkeypatch):
    path, whole = together
    monkeypatch.setattr("lehr.training.loop._next_count", lambda *_: 5)
    population = make_population("ppo", MEMBERS)
    calls = []

    def stop(*_):
        calls.append(1)
        return len(calls) == 2

    with RunDirectory.create(tmp_path / "p") as directory:
        loop = population.loop(directory, partial(PopulationProgress, labels=population.labels), progress_fn=stop)
        loop.run()
        assert 0 < loop.done < population.plan.updates
    state = trained(MEMBERS, tmp_path / "p")
    for one, other in zip(arrays(state), arrays(whole), strict=True):
        assert one.tobytes() == other.tobytes()
    names = "loss/total", "episode/return", "evaluate/return"
    here, there = table(tmp_path / "p", *names), table(path, *names)
    for name in here:
        np.testing.assert_array_equal(here[name], there[name])


def test_a_signal_stops_a_population_after_its_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("lehr.training.loop._next_count", lambda *_: 1)
    population = make_population("ppo", [{**member, "total_steps": 32 * 10**6} for member in MEMBERS])
    with RunDirectory.create(tmp_path / "p") as directory:
        loop = population.loop(directory, partial(PopulationProgress, labels=population.labels))
        begin = loop._compile
        monkeypatch.setattr(
            loop, "_compile", lambda: (begin(), threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start())
        )
        loop.run()
        assert RunDirectory(tmp_path / "p").read_status()["status"] == "stopped"
        assert loop.saved == loop.done > 0


def test_members_may_differ_in_controllers_of_one_kind(tmp_path):
    members = [{**BASE, "learning_rate": f"adaptive_kl({rate}, target=0.02)"} for rate in (1e-3, 1e-4)]
    trained(members, tmp_path / "p")
    rates = table(tmp_path / "p", "coef/learning_rate")["coef/learning_rate"]
    np.testing.assert_allclose(rates[0], [1e-3, 1e-4])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_envs": 8}, "num_envs"),
        ({"hidden_sizes": [4]}, "hidden_sizes"),
        ({"learning_rate": "adaptive_kl(1e-3)"}, "learning_rate"),
    ],
)
def test_members_that_need_another_program_are_refused(change, name):
    with pytest.raises(InputError, match=rf"Member 1 of the population differs from member 0 in {name};"):
        make_population("ppo", [MEMBERS[0], {**MEMBERS[1], **change}])


def test_host_environments_and_empty_populations_are_refused():
    with pytest.raises(InputError, match="runs on the host, but a population is one compiled program"):
        make_population("ppo", [{**BASE, "env": "gym:CartPole-v1"}])
    with pytest.raises(InputError, match="A population has 0 members"):
        make_population("ppo", [])


def test_a_window_of_updates_is_combined_as_a_thinned_log_is():
    rng = np.random.default_rng(0)
    names = (
        "coef/discount",
        "environment/broken_masks",
        "episode/count",
        "episode/length",
        "episode/return",
        "loss/total",
    )
    updates = rng.normal(size=(4, 3, len(names))).astype(np.float32)
    updates[:, :, 2] = rng.integers(0, 3, size=(4, 3))
    updates[..., 3:5][updates[:, :, 2] == 0] = np.nan
    updates[1, 0, 5] = np.inf
    rule = Combining.of(names)
    total = weight = np.zeros((3, len(names)), np.float32)
    for row in updates:
        total, weight = rule.add(total, weight, row)
    found = np.asarray(rule.result(total, weight))
    for member in range(3):
        thinning = Thinning(every=4)
        rows = [
            {"update": number, **dict(zip(names, map(float, row[member]), strict=True))}
            for number, row in enumerate(updates, 1)
        ]
        (expected,) = [row for row in map(thinning.add, rows) if row is not None]
        np.testing.assert_allclose(found[member], [expected[name] for name in names], rtol=1e-5)


def test_rows_of_windows_end_at_the_last_update(tmp_path):
    state = trained([{**member, "log_every": 32 * 5} for member in MEMBERS], tmp_path / "p")
    found = table(tmp_path / "p", "coef/entropy_coef", "update/rejected")
    assert found["update"].tolist() == [5, 10, 15, 20, 24]
    assert int(state.updates) == 24
    clock = (found["update"] - 1) * 32
    np.testing.assert_allclose(found["coef/entropy_coef"][:, 0], 0.03 - 0.029 * clock / (32 * 24), rtol=1e-5)


def test_a_population_larger_than_memory_is_noticed_when_it_is_compiled(monkeypatch):
    population = make_population("ppo", MEMBERS)
    monkeypatch.setattr(runner, "memory_size", lambda: 10_000)
    made = PopulationRunner(population.plan.program, population.plan.state)
    with pytest.raises(runner.TooLarge, match="GiB"):
        made.compile(population.plan.state)


def test_populations_with_the_same_base_share_a_compiled_program(count_traces):
    first = make_population("ppo", MEMBERS)
    other = make_population(
        "ppo",
        [{**member, "seed": 9, "clip_range": "0.3 until 20%, 0.2 until 50%, 0.1"} for member in MEMBERS],
        base=first.plan,
    )
    made = [PopulationRunner(one.plan.program, one.plan.state) for one in (first, other)]
    made[0].compile(first.plan.state)
    made[1].compile(other.plan.state)
    assert made[0]._compiled is made[1]._compiled


@pytest.mark.slow
def test_a_program_that_could_not_be_compiled_is_compiled_again(monkeypatch):
    population = make_population("ppo", [{**member, "horizon": 12} for member in MEMBERS])
    made = PopulationRunner(population.plan.program, population.plan.state)

    def fails(*given):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as changed:
        changed.setattr(runner.compile_options, "compiled", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            made.compile(population.plan.state)
    made.compile(population.plan.state)
    assert int(made.advance(population.plan.state, 1)[0].updates) == 1


def test_what_is_prepared_for_a_population_is_what_it_uses():
    """Its program, its state and its evaluation are compiled before its members are known, and not again."""
    base = make_plan("ppo", {**BASE, "horizon": 24}, abstract=True)
    members = [{**BASE, "horizon": 24, "seed": seed, "learning_rate": 1e-3 * (seed + 1)} for seed in range(3)]
    others = [Configured.of("ppo", {**member, "learning_rate": "1e-2 -> 0"}).coefficients for member in members]
    caches = runner._compiling, populations._compiling_initial, population_record.compiling_evaluation
    for cache in caches:
        cache.latest.made.clear()
    populations.prepare_population(base, others[:1], 3)
    assert [len(cache.latest.made) for cache in caches] == [1, 1, 1]
    population = make_population("ppo", members, base=base, begins=True)
    state = population.plan.state
    population.runner.compile(state)
    population_record.evaluation_of(population.plan, state.members, population.sharding)().result()
    assert [len(cache.latest.made) for cache in caches] == [1, 1, 1]
    assert int(population.runner.advance(state, 2)[0].updates) == 2


@pytest.mark.slow
def test_members_that_fill_a_population_up_are_not_shown(tmp_path, caplog):
    broken = {**BASE, "learning_rate": 1e38, "max_rejected": 1}
    population = make_population("ppo", [{**BASE, "max_rejected": 1}, broken], labels=["the only one"])
    with RunDirectory.create(tmp_path / "p") as directory:
        loop = population.loop(directory, partial(PopulationProgress, labels=population.labels))
        loop.run()
    assert table(tmp_path / "p", "update/frozen")["update/frozen"][-1].tolist() == [0.0, 1.0]
    assert loop.record.latest["env_steps"] == BASE["total_steps"]
    assert len(loop.record.latest["returns"]) == 1
    assert "frozen" not in caplog.text


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices factorise in batches")
def test_no_two_batched_factorisations_wait_for_each_others_threads():
    """Batched QR factorisations of a CPU use the threads that they run on: two at once can stop for ever."""
    plan, members = make_plan("ppo", BASE), [Configured.of("ppo", member).coefficients for member in MEMBERS]
    lowered = populations._initial.lower(
        plan.program, plan.settings, plan.network, stacked(members), np.arange(len(members)), plan.loaded.data
    )
    calls = [line for line in lowered.as_text().splitlines() if "geqrf" in line and "custom_call" in line]
    assert calls
    for call in calls:
        result = re.search(r"-> \(?tensor<([0-9x]*)x?f32>", call)
        assert result
        sizes = [int(size) for size in result[1].strip("x").split("x")]
        assert len(sizes) == 2 or sizes[0] == 1


@pytest.mark.parametrize(("env", "first", "last"), [("Pendulum-v1", 0.95, 0.99), ("CartPole-v1", 0.99, 0.99)])
def test_members_have_the_coefficients_that_their_settings_leave_to_the_spaces(env, first, last):
    shared = {"env": env, "total_steps": 640, "num_envs": 4, "horizon": 8, "hidden_sizes": [8]}
    population = make_population("a2c", [{**shared, "learning_rate": rate} for rate in (1e-3, "2e-3 -> 0")])
    for number in range(2):
        state = member_state(population.plan.state, number)
        found = [state.coefficients.values(state.controllers, env_steps(n, 32))["discount"] for n in (0, 20)]
        np.testing.assert_allclose(found, [first, last], rtol=1e-6)
