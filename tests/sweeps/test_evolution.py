"""Population-based training, and the schedule that it found."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.errors import InputError
from lehr.schedules import env_steps
from lehr.sweeps.api import paths
from lehr.sweeps.directory import SweepDirectory
from lehr.sweeps.evolution import PopulationBasedTraining, initial
from lehr.sweeps.lineage import ancestors, fit
from lehr.training import columns
from lehr.training.population import make_population

from .conftest import SMALL

PBT = PopulationBasedTraining(
    interval=4, last=100, coefficients=("learning_rate",), low=(1e-4,), high=(1e-2,), share=0.25, factor=2.0
)
RATES = [1e-4, 2e-4, 4e-4, 8e-4, 1e-3, 2e-3, 4e-3, 1e-2]


@pytest.fixture(scope="module")
def population():
    members = [{**SMALL, "learning_rate": rate, "seed": seed, "progress": False} for seed, rate in enumerate(RATES)]
    state = make_population("ppo", members).plan.state
    return state._replace(evolution=initial(8))


def rates(state):
    found = jax.vmap(lambda one: one.values({}, env_steps(0, 1))["learning_rate"])(state.members.coefficients)
    return np.asarray(found)


def after(state, returns, updates):
    metrics = {"episode/count": jnp.full(8, 2.0), "episode/return": jnp.asarray(returns, jnp.float32)}
    return jax.jit(PBT)(state._replace(updates=jnp.uint32(updates)), metrics)


def test_the_worst_quarter_becomes_copies_of_the_best_with_perturbed_coefficients(population):
    returns = [10.0, 80.0, 30.0, 40.0, 50.0, 60.0, 70.0, 20.0]
    state, metrics = after(population, returns, updates=4)
    parents = np.asarray(metrics["evolution/parent"]).astype(int)
    kept = [1, 2, 3, 4, 5, 6]
    assert parents[kept].tolist() == kept
    assert set(parents[[0, 7]]) <= {1, 6}
    for place in (0, 7):
        source = parents[place]
        for here, there in zip(
            jax.tree.leaves(state.members.learner), jax.tree.leaves(population.members.learner), strict=True
        ):
            np.testing.assert_array_equal(here[place], there[source])
        ratio = rates(state)[place] / RATES[source]
        assert any(ratio == pytest.approx(factor, rel=1e-5) for factor in (0.5, 2.0))
    np.testing.assert_allclose(rates(state)[kept], np.array(RATES)[kept], rtol=1e-6)
    np.testing.assert_array_equal(jax.random.key_data(state.members.key), jax.random.key_data(population.members.key))
    assert float(state.evolution.episodes.sum()) == 0


def test_perturbed_coefficients_stay_within_their_range(population):
    state = population
    for updates in range(4, 80, 4):
        state, _ = after(state, np.arange(8.0), updates)
        assert ((rates(state) >= 0.999e-4) & (rates(state) <= 1.001e-2)).all()
    assert rates(state).max() > 2e-3


@pytest.mark.parametrize("updates", [3, 100])
def test_nothing_changes_between_rankings_and_after_the_last(population, updates):
    state, metrics = after(population, np.arange(8.0), updates)
    np.testing.assert_allclose(rates(state), RATES, rtol=1e-6)
    assert np.asarray(metrics["evolution/parent"]).tolist() == list(range(8))
    assert float(state.evolution.total[3]) == 6.0


def test_nobody_is_replaced_by_an_equal_and_a_frozen_member_is_the_worst(population):
    _, metrics = after(population, np.full(8, 5.0), updates=4)
    assert np.asarray(metrics["evolution/parent"]).tolist() == list(range(8))
    members = population.members._replace(rejected=jnp.zeros(8, jnp.uint32).at[7].set(11))
    _, metrics = after(population._replace(members=members), np.full(8, 5.0), updates=4)
    parents = np.asarray(metrics["evolution/parent"]).astype(int)
    assert parents[7] != 7
    assert parents[:7].tolist() == list(range(7))


def test_ancestors_are_followed_through_every_ranking():
    parents = np.array([[0, 1, 2, 3], [2, 1, 2, 2], [0, 1, 2, 3], [0, 0, 2, 3]])
    assert ancestors(parents)[:, 1].tolist() == [2, 2, 0, 0]
    assert ancestors(parents)[:, 3].tolist() == [2, 2, 3, 3]


def test_a_path_of_few_levels_is_fitted_exactly_and_a_longer_one_with_its_error():
    steps = 100.0 * np.arange(1, 31)
    values = np.repeat([3e-3, 1e-3, 5e-4], 10)
    found = fit(steps, values)
    assert found.error < 1e-6
    rows = steps - 100  # the clock of a row's first update
    np.testing.assert_allclose([found.schedule(step) for step in rows], values)
    assert str(lehr.schedule(str(found.schedule))) == str(found.schedule)
    noisy = values * 1.2 ** np.random.default_rng(0).integers(-3, 4, 30)
    found = fit(steps, noisy)
    fitted = np.array([found.schedule(step) for step in rows])
    assert found.error == pytest.approx(np.sqrt(np.mean((fitted / noisy - 1) ** 2)), rel=1e-6)
    assert 0.05 < found.error < 0.5


def test_a_coefficient_that_the_other_settings_leave_unused_is_refused(tmp_path):
    definition = {
        "algorithm": "ppo",
        "settings": SMALL,
        "parameters": {"priority_exponent": {"low": 0.5, "high": 1.0}},
        "samples": 2,
        "evolution": {},
    }
    with pytest.raises(InputError, match="priority_exponent has no effect with the other settings, so evolution"):
        lehr.sweep(definition, out=tmp_path / "s", progress=False)
    assert not (tmp_path / "s").exists()


EVOLVING = {
    "algorithm": "ppo",
    "settings": {**SMALL, "total_steps": 32 * 40},
    "parameters": {"learning_rate": {"low": 1e-5, "high": 1e-2, "scale": "log"}},
    "sampler": "latin_hypercube",
    "samples": 8,
    "evolution": {"interval": "10%", "factor": 1.5},
    "confirm": {"top": 1, "seeds": 2},
}


@pytest.fixture(scope="module")
def evolved(tmp_path_factory):
    return lehr.sweep(EVOLVING, out=tmp_path_factory.mktemp("sweeps") / "pbt", progress=False)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Two seeds of each of four points, and the schedules of the best five members again: two are of one point."""
    definition = {**EVOLVING, "samples": 4, "seeds": 2, "confirm": {"top": 5, "seeds": 2}}
    return lehr.sweep(definition, out=tmp_path_factory.mktemp("sweeps") / "several", progress=False)


def line_of(parents, place):
    """The places of a member's ancestors, followed back by hand."""
    found = []
    for row in parents[::-1]:
        place = int(row[place])
        found.insert(0, place)
    return found


def test_the_winning_path_is_what_was_applied_and_is_trained_again(evolved):
    directory = SweepDirectory(evolved.directory)
    table = columns.read(
        directory.wave_path(0) / "metrics", ["evolution/parent", "coef/learning_rate", "evaluate/return", "update"]
    )
    moved = table["evolution/parent"] != np.arange(8)
    assert set(np.flatnonzero(moved.any(1)) + 1) <= {4, 8, 12, 16, 20, 24, 28, 32, 36}
    assert moved.any()
    best = int(np.argmax(table["evaluate/return"][-1]))
    path = table["coef/learning_rate"][np.arange(40), line_of(table["evolution/parent"], best)]
    changes = path[1:] / path[:-1]
    assert all(min(abs(c - f) for f in (1.0, 1.5, 1 / 1.5)) < 1e-3 or path.min() < 1.01e-5 for c in changes)
    found = evolved.winning_paths["learning_rate"]
    fitted = np.array([found.schedule(32 * row) for row in range(40)])
    assert np.sqrt(np.mean((fitted / path - 1) ** 2)) == pytest.approx(found.error, rel=1e-3)
    fresh = directory.read_waves()[1].members
    assert [member.settings["learning_rate"] for member in fresh] == [str(found.schedule)] * 2


def test_the_rows_of_a_member_are_those_of_its_ancestors(evolved, tmp_path):
    """Those of its place begin with members that were given up."""
    names = ["evolution/parent", "coef/learning_rate", "episode/return", "loss/total"]
    table = columns.read(SweepDirectory(evolved.directory).wave_path(0) / "metrics", names)
    lines = {place: line_of(table["evolution/parent"], place) for place in range(8)}
    copied = next(place for place, line in lines.items() if len(set(line)) > 1)
    rows = np.arange(40)
    for name in names[1:]:
        assert (table[name][rows, lines[copied]] != table[name][:, copied]).any()
    (run,) = lehr.pick(evolved, copied, out=tmp_path / "run")
    found = lehr.load(run)
    for name in names[1:]:
        np.testing.assert_array_equal(found.metrics[name], table[name][rows, lines[copied]])
    fitted = lehr.schedule(found.config["learning_rate"], 32 * 40)
    np.testing.assert_allclose([fitted(32 * row) for row in rows], found.metrics["coef/learning_rate"], rtol=0.2)
    for place, line in lines.items():
        np.testing.assert_array_equal(evolved.results.returns[:, place, 0], table["episode/return"][rows, line])
        rates = table["coef/learning_rate"][rows, line]
        np.testing.assert_array_equal(evolved.results.schedules["learning_rate"][:, place], rates)


def schedule_of(found, number):
    directory = SweepDirectory(found.directory)
    member = next(one for wave in directory.read_waves() for one in wave.members if one.number == number)
    return str(paths(directory, found.definition, member)["learning_rate"].schedule)


def test_every_schedule_is_judged_by_its_own_fresh_scores(several):
    results, ranking = several.results, several.ranking
    assert results.members.tolist() == [[number] for number in range(8)]
    best = np.argsort(-results.scores[:, 0], kind="stable")[:5].tolist()
    fresh = SweepDirectory(several.directory).read_waves()[1].members
    assert [one.configuration for one in fresh] == [number for number in best for _ in range(2)]
    assert [one.settings["learning_rate"] for one in fresh] == [
        schedule_of(several, number) for number in best for _ in range(2)
    ]
    assert len({one.settings["learning_rate"] for one in fresh}) > 1
    table = columns.read(SweepDirectory(several.directory).wave_path(1) / "metrics", ["evaluate/return"])
    scores = table["evaluate/return"][-1, :10].reshape(5, 2)
    assert {number: again.tolist() for number, again in results.again.items()} == dict(
        zip(best, scores.tolist(), strict=True)
    )
    assert ranking.winner in np.array(best)[scores.mean(axis=1) == scores.mean(axis=1).max()]
    assert str(several.winning_paths["learning_rate"].schedule) == schedule_of(several, ranking.winner)


def as_an_earlier_version(found, path, waves):
    """A copy of a sweep with the configurations of an earlier version, which had the seeds of a point in common."""
    shutil.copytree(found.directory, path)
    read = json.loads((path / "waves.json").read_text())[:waves]
    for member in (member for wave in read for member in wave["members"]):
        member["configuration"] //= 2
    (path / "waves.json").write_text(json.dumps(read))
    for number in range(waves, 2):
        shutil.rmtree(path / "waves" / f"{number:03d}")
    return path


@pytest.mark.parametrize("waves", [2, 1])
def test_a_sweep_of_an_earlier_version_is_judged_by_the_schedule_of_its_best_member(several, waves, tmp_path):
    """It pooled the fresh scores of all schedules of a configuration; it goes on with its own numbers."""
    path = as_an_earlier_version(several, tmp_path / "s", waves)
    found = lehr.load_sweep(path) if waves == 2 else lehr.resume_sweep(path, progress=False)
    assert found.is_finished
    assert found.results.members.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    best = np.argsort(-several.results.scores[:, 0], kind="stable")[:5].tolist()
    judged = {number // 2: number for number in reversed(best)}  # the first of them stays
    assert {row: again.tolist() for row, again in found.results.again.items()} == {
        row: several.results.again[number].tolist() for row, number in judged.items()
    }
    winner = judged[found.ranking.winner]
    assert str(found.winning_paths["learning_rate"].schedule) == schedule_of(several, winner)
    (run,) = lehr.pick(found, "best", out=tmp_path / "run")
    assert str(lehr.schedule(lehr.load(run).config["learning_rate"])) == schedule_of(several, winner)


@pytest.mark.parametrize("changes", [{"evolution": {"interval": "25%"}}, {"halving": {"places": 2, "first": "25%"}}])
def test_the_files_of_seeds_are_those_of_the_members(changes, tmp_path):
    definition = {"algorithm": "ppo", "settings": SMALL, "seeds": 4, **changes}
    found = lehr.sweep(definition, out=tmp_path / "s", progress=False)
    ends, halved = np.full(4, 640), found.results.halved
    if halved is not None:
        ends = halved.env_steps[0]
        assert ends.min() < 640
    for seed in range(4):
        rows = [json.loads(line) for line in (found.directory / "seeds" / f"{seed}.jsonl").read_text().splitlines()]
        assert [row["env_steps"] for row in rows] == list(range(32, int(ends[seed]) + 1, 32))
        returns = [row.get("episode/return") for row in rows if row.get("episode/return") != "NaN"]
        known = found.results.returns[: len(rows), 0, seed]
        np.testing.assert_allclose(returns, known[~np.isnan(known)], rtol=1e-6)


def test_a_picked_member_has_the_path_as_its_schedule(evolved, tmp_path):
    (path,) = lehr.pick(evolved, 0, out=tmp_path / "run")
    run = lehr.load(path)
    directory = SweepDirectory(evolved.directory)
    member = directory.read_waves()[0].members[0]
    path_there = paths(directory, evolved.definition, member)["learning_rate"].schedule
    assert str(lehr.schedule(run.config["learning_rate"])) == str(path_there)
    assert int(lehr.resume(path, total_steps=32 * 42, progress=False).state.updates) == 42
