"""The ranking: order, failed members, configurations with fewer seeds, fresh scores."""

from dataclasses import replace

import numpy as np
import pytest

from lehr.sweeps.ranking import rank
from lehr.sweeps.results import Halved, Results
from lehr.sweeps.statistics import bootstrap, interquartile_mean, mean, probability_of_improvement
from tests.sweeps.example_results import example_results


def results_of(scores, **others):
    scores = np.array(scores, dtype=float)
    configurations, seeds = scores.shape
    given = {
        "title": "small",
        "env": "CartPole-v1",
        "algorithm": "ppo",
        "parameters": {},
        "texts": [{}] * configurations,
        "members": np.arange(scores.size).reshape(scores.shape),
        "env_steps": np.array([100.0]),
        "returns": np.zeros((1, configurations, seeds)),
        "scores": scores,
    }
    return Results(**given | others)


def test_the_order_is_by_the_statistic_over_seeds():
    results = results_of([[0, 0, 0, 0, 100], [5, 5, 5, 5, 5], [4, 4, 6, 6, 6]])
    by_mean, by_iqm = rank(results, mean), rank(results)
    assert by_mean.order.tolist() == [0, 2, 1]
    assert by_mean.selected.value.tolist() == [20, 5, pytest.approx(5.2)]
    assert by_iqm.order.tolist() == [2, 1, 0]
    assert by_iqm.place.tolist() == [3, 2, 1]
    assert (by_iqm.winner, by_iqm.runner_up, by_iqm.median) == (2, 1, 1)


def test_intervals_are_those_of_the_bootstrap():
    results = example_results(7, 5, failures=0, again=0)
    expected = bootstrap(interquartile_mean, results.scores, resamples=500, confidence=0.8, seed=3)
    np.testing.assert_array_equal(rank(results, resamples=500, confidence=0.8, seed=3).selected, expected)


@pytest.mark.parametrize("failure", [np.nan, np.inf, -np.inf])
def test_a_failed_member_counts_as_the_worst_score(failure):
    ranking = rank(results_of([[10, failure], [3, 4], [-2, 6]]))
    assert ranking.worst == -2
    assert ranking.selected.value.tolist() == [4, 3.5, 2]
    assert ranking.failed.tolist() == [1, 0, 0]
    assert np.isnan(ranking.runs[0]).tolist() == [False, True]


def test_configurations_that_were_stopped_come_last_by_how_far_they_came():
    stopped = np.array([[1, 1], [0, 0], [1, 1], [0, 1], [1, 1]], bool)
    scores = np.where(stopped, np.nan, [[0, 0], [6, 8], [0, 0], [9, 0], [0, 0]])
    steps = np.array([[100, 100], [900, 900], [300, 100], [900, 300], [300, 100]])
    rungs = np.array([[50, 60], [20, 20], [30, 10], [20, 20], [40, 10]])
    ranking = rank(results_of(scores, halved=Halved(steps, rungs, stopped)))
    assert ranking.order.tolist() == [3, 1, 4, 2, 0]  # 4 and 2 came further than 0, and 4 was better there than 2
    assert ranking.selected.value[[3, 1]].tolist() == [7.5, 7]  # the stopped one counts as the worst, 6
    assert np.isnan(ranking.selected.value[[0, 2, 4]]).all()
    assert ranking.failed.tolist() == [0] * 5


def test_a_place_without_a_member_is_no_run():
    results = results_of([[10, np.nan, np.nan], [3, 4, 5]], members=np.array([[0, -1, -1], [1, 2, 3]]))
    ranking = rank(results)
    assert ranking.selected.value.tolist() == [10, 4]
    assert ranking.failed.tolist() == [0, 0]
    assert [len(runs) for runs in ranking.runs] == [1, 3]
    assert np.isnan(ranking.selected.low).tolist() == [True, False]  # one seed has no interval


def test_a_configuration_without_members_is_last():
    ranking = rank(results_of([[np.nan], [3.0], [2.0]], members=np.array([[-1], [0], [1]])))
    assert ranking.order.tolist() == [1, 0, 2]  # it counts as the worst, 2, and equal ones keep their order
    assert np.isnan(ranking.improvement(1, 0)).all()


def test_fresh_scores_choose_the_winner():
    """The first was selected with 9 and is worth 5; the second is worth 6. The third was not looked at again."""
    results = results_of([[9, 9], [8, 8], [7, 7]], again={0: np.array([4.0, 6.0]), 1: np.array([6.0, 6.0])})
    ranking = rank(results)
    assert ranking.order.tolist() == [1, 0, 2]
    assert ranking.optimism == ((9 - 5) + (8 - 6)) / 2
    assert ranking.estimate(1) == (6, 6, 6)
    assert ranking.estimate(0) == (5, 4, 6)
    assert ranking.estimate(2) == (7, 7, 7)


def test_a_fresh_run_that_failed_counts_as_the_worst():
    results = results_of([[9, 9], [1, 3]], again={0: np.array([9.0, np.nan])})
    assert rank(results).fresh[0].value == (9 + 1) / 2


def test_the_winner_of_noise_is_told_to_be_optimistic():
    """All configurations are equal: the best of 200 looks good, and fresh seeds do not confirm it."""
    generator = np.random.default_rng(0)
    scores = generator.normal(size=(200, 5))
    best = np.argsort(-scores.mean(axis=1))[:10]
    ranking = rank(results_of(scores, again={int(c): generator.normal(size=5) for c in best}), mean)
    assert ranking.selected.value[best].mean() > 0.7
    assert abs(np.mean([estimate.value for estimate in ranking.fresh.values()])) < 0.4
    assert ranking.optimism > 0.5


def test_improvement_compares_the_scores_that_decide():
    results = results_of([[9, 9], [1, 2]], again={0: np.array([1.0, 3.0, 2.0])})
    expected = bootstrap(probability_of_improvement, np.array([1.0, 3.0, 2.0]), np.array([1.0, 2.0]))
    assert rank(results).improvement(0, 1) == pytest.approx(expected)
    assert expected.value == (0.5 + 0 + 1 + 1 + 1 + 0.5) / 6


def test_all_failed():
    ranking = rank(results_of(np.full((3, 2), np.nan), again={1: np.array([np.nan])}))
    assert np.isnan(ranking.selected).all()
    assert np.isnan(ranking.worst)
    assert ranking.order.tolist() == [1, 0, 2]
    assert ranking.failed.tolist() == [2, 2, 2]
    assert ranking.improvement(1, 0).value == 0.5


def test_one_configuration_with_one_seed():
    ranking = rank(results_of([[3.0]]))
    assert (ranking.winner, ranking.runner_up, ranking.median) == (0, None, None)
    assert ranking.estimate(0)[0] == 3
    assert np.isnan(ranking.estimate(0)[1:]).all()


def test_ranking_does_not_depend_on_what_is_not_a_score():
    results = example_results(20, 3)
    other = replace(results, returns=results.returns * np.nan, texts=[{}] * 20, frozen=None)
    np.testing.assert_array_equal(rank(results).order, rank(other).order)
