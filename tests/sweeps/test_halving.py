"""Successive halving: who goes on, what happens to the places, and that a survivor is the run that it would be alone."""

import itertools
import json
import signal

import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.cli import main
from lehr.errors import InputError
from lehr.sweeps.directory import SweepDirectory
from lehr.sweeps.halving import HalvingCourse, goes_on
from lehr.sweeps.wave_metrics import read_wave
from lehr.training import columns

FIRST, LAST, STEPS = 16, 60, 128
"""The first rung and the end in updates, and the env steps of an update."""
DEFINITION = {
    "algorithm": "ppo",
    "settings": {
        **{"env": "CartPole-v1", "total_steps": LAST * STEPS, "num_envs": 8, "horizon": 16, "hidden_sizes": [16]},
        **{"minibatches": 2, "epochs": 4, "normalise_observations": True, "evaluate_episodes": 4, "max_rejected": 3},
    },
    "parameters": {"learning_rate": [1e-7, 3e-4, 2e-7, 3e-7, "4e-3 -> 1e-3", 1e38]},
    "sampler": "grid",
    "halving": {"places": 3, "first": FIRST * STEPS, "factor": 2},
}


@pytest.fixture(scope="module")
def halved(tmp_path_factory):
    return lehr.sweep(DEFINITION, out=tmp_path_factory.mktemp("sweeps") / "halved", progress=False)


@pytest.fixture(scope="module")
def picked(halved, tmp_path_factory):
    (path,) = lehr.pick(halved, 4, out=tmp_path_factory.mktemp("picked") / "run")
    return path


def by_place(result):
    return columns.read_all(SweepDirectory(result.directory).wave_path(0) / "metrics")


def by_hand(scores, diverged, places, rungs, last, factor):
    """Who is in each place after each multiple of the first rung: the rule as sentences, with lists."""
    waiting = list(range(len(scores)))
    here = [[waiting.pop(0), 0] for _ in range(places)]  # member and age
    been = {rung: [] for rung in rungs}
    rows = []
    while any(one is not None for one in here):
        rows.append([-1 if one is None else one[0] for one in here])
        for one in filter(None, here):
            one[1] += rungs[0]
        for member, age in filter(None, here):
            if age in been:
                been[age].append(member)
        stays = []
        for one in here:
            if one is None or one[1] >= last or one[0] in diverged:
                stays.append(False)
                continue
            member, age = one
            better = [other for other in been.get(age, []) if scores[other][age] > scores[member][age]]
            equal = [other for other in been.get(age, []) if scores[other][age] == scores[member][age]]
            place = len(better) + sum(other < member for other in equal)
            stays.append(age not in been or place < max(1, len(been[age]) // factor))
        here = [one if stay else None for one, stay in zip(here, stays, strict=True)]
        here = [[waiting.pop(0), 0] if one is None and waiting else one for one in here]
    return rows


def test_the_best_of_those_at_a_rung_go_on():
    rng = np.random.default_rng(0)
    for count, factor in itertools.product((1, 2, 3, 7, 12), (2, 3, 4)):
        scores = rng.integers(0, 4, 12).astype(np.float32)  # with ties
        scores[rng.permutation(12)[count:]] = np.nan
        been = sorted(np.flatnonzero(~np.isnan(scores)), key=lambda member: (-scores[member], member))
        expected = sorted(been[: max(1, count // factor)])
        assert np.flatnonzero(goes_on(jnp.asarray(scores), factor)).tolist() == expected


def test_places_are_given_to_new_members_as_the_rule_says(halved):
    table = by_place(halved)
    found = {member: {} for member in range(6)}
    ages = dict.fromkeys(range(6), 0)
    for update, members, scores in zip(
        table["update"], table["evolution/member"], table["evolution/score"], strict=True
    ):
        for member, score in zip(members.astype(int), scores, strict=True):
            if member >= 0:
                ages[member] += 1
                if not np.isnan(score):
                    assert update % FIRST == 0
                    found[member][ages[member]] = score
    expected = by_hand(found, {5}, places=3, rungs=[FIRST, 2 * FIRST], last=LAST, factor=2)
    assert expected == [[0, 1, 2], [3, 1, 4], [5, 1, 4], [-1, 1, 4], [-1, -1, 4]]
    assert table["evolution/member"][::FIRST].astype(int).tolist() == expected
    assert sorted(ages.values()) == [FIRST, FIRST, FIRST, FIRST, LAST, LAST]


def test_scores_are_the_returns_of_the_second_half_of_the_way(halved):
    table = read_wave(SweepDirectory(halved.directory), SweepDirectory(halved.directory).read_waves()[0])
    for member, rung in ((0, FIRST), (4, FIRST), (4, 2 * FIRST)):
        rows = slice(rung // 2, rung)
        count, mean = table["episode/count"][rows, member], table["episode/return"][rows, member]
        expected = np.nansum(count * mean) / count.sum()
        assert table["evolution/score"][rung - 1, member] == pytest.approx(expected, rel=1e-5)


def test_results_say_how_far_every_configuration_came(halved):
    results, far = halved.results, halved.results.halved
    assert halved.is_finished
    assert np.flatnonzero(np.isfinite(results.scores.ravel())).tolist() == [1, 4]
    assert far.env_steps.ravel().tolist() == [STEPS * (LAST if c in (1, 4) else FIRST) for c in range(6)]
    assert far.stopped.ravel().tolist() == [True, False, True, True, False, True]
    assert results.frozen.ravel().tolist() == [False] * 5 + [True]
    assert set(halved.ranking.order[:2].tolist()) == {1, 4}
    assert np.isnan(results.returns[FIRST:, [0, 2, 3]]).all()
    assert np.isfinite(results.schedules["learning_rate"][:, [1, 4]]).all()
    assert results.env_steps[-1] == LAST * STEPS
    assert (halved.directory / "report.html").stat().st_size > 10_000


def test_a_survivor_that_began_later_is_the_run_that_it_would_be_alone(halved, picked, tmp_path):
    member = SweepDirectory(halved.directory).read_waves()[0].members[4]
    alone = lehr.train(
        "ppo", run_dir=tmp_path / "run", **member.settings, seed=member.seed, progress=False, tensorboard=False
    )
    run = lehr.load(picked)
    for name in ("update", "env_steps"):
        np.testing.assert_array_equal(run.metrics[name], alone.metrics[name])
    rates = run.metrics["coef/learning_rate"], alone.metrics["coef/learning_rate"]
    np.testing.assert_allclose(*rates, rtol=1e-6)  # 5e-5 apart from update to update: on its own clock
    rows = slice(FIRST + 4)  # past the first rung; later, rounding changes an action
    np.testing.assert_allclose(run.metrics["loss/total"][rows], alone.metrics["loss/total"][rows], rtol=1e-3)
    np.testing.assert_array_equal(run.metrics["episode/return"][rows], alone.metrics["episode/return"][rows])
    assert run.final["evaluate/return"] == pytest.approx(halved.results.scores[4, 0])


def test_only_members_that_ended_are_picked(halved, picked, tmp_path):
    assert int(lehr.resume(picked, total_steps=STEPS * (LAST + 1), progress=False).state.updates) == LAST + 1
    (best,) = lehr.pick(halved, "best", out=tmp_path / "best")
    assert lehr.load(best).final["evaluate/return"] == pytest.approx(np.nanmax(halved.results.scores))
    for which, sentence in (
        (0, r"^Member 0 of the sweep .* was stopped after 2,048 env steps, so its state was not kept; pick one"),
        (
            "c0",
            r"^No member of configuration 0 of the sweep .* has a score, since all of them diverged or were stopped",
        ),
        ("top3", r"^top3 asks for 3 configurations, but halving left only 2 in training to the end; give top2\.$"),
    ):
        with pytest.raises(InputError, match=sentence):
            lehr.pick(halved, which, out=tmp_path / "run")


def test_a_halving_that_is_stopped_and_resumed_ends_with_the_same_bits(halved, tmp_path, monkeypatch):
    monkeypatch.setattr("lehr.training.loop._next_count", lambda *_: 3)

    def interrupt(loop):
        # Members 3 to 5 began in the program, and 1 and 4 have not ended.
        if loop.done > 2 * FIRST and loop.verdict.stop_reason is None:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("lehr.training.loop.Loop._report", interrupt)
        assert not lehr.sweep(DEFINITION, out=tmp_path / "s", progress=False).is_finished
    resumed = lehr.resume_sweep(tmp_path / "s", progress=False)
    here, there = by_place(resumed), by_place(halved)
    assert here.keys() == there.keys()
    for name in here:
        assert here[name].tobytes() == there[name].tobytes(), name


def test_chunks_end_where_members_may_end():
    course = HalvingCourse(240, rungs=(16, 32), last=60, factor=2)
    ends = list(itertools.accumulate(range(8), lambda update, _: course.next_end(update), initial=0))
    assert ends[1:] == [12, 16, 28, 32, 44, 48, 60, 64]
    # 6 · 16 updates to the first rung, 3 · 16 to the second, 1 · 28 to the end.
    assert course.expected_updates(6) == 96 + 48 + 28


def test_the_summary_and_a_dry_run_tell_what_is_saved(halved, capsys, tmp_path):
    assert main(["sweep", "report", str(halved.directory)]) == 0
    output = capsys.readouterr().out
    trained = 2 * LAST + 4 * FIRST
    assert f"4 of 6 members stopped early; {trained / (6 * LAST):.0%} of all env steps trained" in output
    assert "2,048" in output
    (tmp_path / "sweep.yaml").write_text(json.dumps(DEFINITION))
    assert main(["sweep", str(tmp_path / "sweep.yaml"), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "at 2,048, 4,096 of 7,680 env steps; one of 2 goes on at each" in output
    assert f"at most {1 - (96 + 48 + 28) / (6 * LAST):.0%} of {6 * LAST * STEPS:,} env steps" in output


def test_a_first_rung_after_the_last_update_is_one_sentence(tmp_path):
    definition = DEFINITION | {"halving": {"first": LAST * STEPS - 1}}
    with pytest.raises(InputError, match=r"^halving\.first is 7679, which is 60 of the 60 updates of a run"):
        lehr.sweep(definition, out=tmp_path / "s", progress=False)
