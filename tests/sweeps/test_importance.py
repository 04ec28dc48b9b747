"""Importance: known functions of the parameters, and tables worked by hand."""

import sys

import numpy as np
import pytest

from lehr.errors import InputError
from lehr.sweeps.importance import _drops, marginals, permutation_importance
from lehr.sweeps.statistics import bootstrap, mean

pytest.importorskip("sklearn", reason="needs lehr[sweeps]")


@pytest.fixture
def generator():
    return np.random.default_rng(3)


def test_the_parameter_that_matters_comes_first(generator):
    number, other = generator.random(120), generator.random(120)
    parameters = {
        "constant": [0.5] * 120,
        "irrelevant": other.tolist(),
        "entropy_coef.start": number.tolist(),
        "activation": generator.choice(["tanh", "relu"], 120).tolist(),
    }
    found = permutation_importance(parameters, np.sin(3 * number))
    drops = dict(zip(found.names, found.drops, strict=True))
    assert found.names[0] == "entropy_coef.start"
    assert drops["entropy_coef.start"] > 1  # shuffled, the prediction is worse than the mean
    assert drops["constant"] == 0
    assert abs(drops["irrelevant"]) < 0.02
    assert abs(drops["activation"]) < 0.02
    assert found.r_squared > 0.97
    assert (np.diff(found.drops) <= 0).all()


def test_a_category_that_is_not_in_order_is_found(generator):
    shape = generator.choice(["cosine", "linear", "poly", "step"], 200).tolist()
    scores = np.array([{"cosine": 0, "linear": 10, "poly": 0, "step": 10}[name] for name in shape], dtype=float)
    found = permutation_importance({"noise": generator.random(200).tolist(), "shape": shape}, scores)
    assert found.names[0] == "shape"
    assert found.r_squared > 0.97


def test_noise_is_not_believed(generator):
    parameters = {name: generator.random(80).tolist() for name in "abc"}
    found = permutation_importance(parameters, generator.normal(size=80))
    assert found.r_squared < 0.1
    assert np.abs(found.drops).max() < 0.25


def test_a_parameter_that_some_do_not_have(generator):
    """Half of the configurations have a warm-up; those score 1."""
    warm_up = [None if generator.random() < 0.5 else generator.random() for _ in range(100)]
    scores = np.array([float(value is not None) for value in warm_up])
    found = permutation_importance({"warm_up": warm_up, "other": generator.random(100).tolist()}, scores)
    assert found.names[0] == "warm_up"
    assert found.r_squared > 0.9


def test_the_same_seed_gives_the_same_importance(generator):
    parameters, scores = {name: generator.random(40).tolist() for name in "ab"}, generator.random(40)
    first, same, other = (permutation_importance(parameters, scores, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.drops, same.drops)
    assert not np.array_equal(first.drops, other.drops)


def test_equal_scores_show_nothing(generator):
    found = permutation_importance({"a": generator.random(30).tolist()}, np.full(30, 2.0))
    assert found.drops.tolist() == [0]
    assert np.isnan(found.r_squared)


@pytest.mark.parametrize(
    ("scores", "message"), [(np.ones(4), "with 4 configurations; sweep at least 20"), (np.full(30, np.nan), "finite")]
)
def test_what_no_forest_can_learn_from_is_refused(scores, message):
    with pytest.raises(InputError, match=message):
        permutation_importance({"a": list(range(len(scores)))}, scores)


def test_without_scikit_learn_the_error_tells_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with pytest.raises(InputError, match=r"pip install 'lehr\[sweeps\]'"):
        permutation_importance({"a": list(range(30))}, np.arange(30.0))


def test_bins_hold_equally_many_configurations(generator):
    values = generator.permutation(np.logspace(-4, -1, 100))
    scores = np.log10(values)
    found = marginals(values.tolist(), scores)
    assert [each.configurations for each in found] == [20] * 5
    ascending = np.sort(scores).reshape(5, 20)
    np.testing.assert_allclose([each.score.value for each in found], ascending.mean(axis=1))
    np.testing.assert_allclose(np.log10([each.centre for each in found]), np.median(ascending, axis=1), atol=0.02)
    assert found[0].label == f"0.0001 – {10 ** ascending[0, -1]:.3g}"


def test_few_values_are_shown_one_by_one():
    found = marginals([4, None, 2, 4, 2, 2], np.array([1.0, 9.0, 2.0, 5.0, 4.0, 6.0]))
    assert [(each.label, each.configurations, each.score.value) for each in found] == [
        ("2", 3, 4.0),
        ("4", 2, 3.0),
        ("not set", 1, 9.0),
    ]
    assert found[0].score == pytest.approx(bootstrap(mean, np.array([2.0, 4.0, 6.0])))
    assert np.isnan(found[2].score.low)  # one configuration has no spread


def test_categories_are_shown_by_name():
    found = marginals(["tanh", "relu", True, "relu"], np.array([1.0, 2.0, 3.0, 4.0]))
    assert [(each.label, each.score.value) for each in found] == [("True", 3.0), ("relu", 3.0), ("tanh", 1.0)]


def test_the_drops_are_those_of_scikit_learn(generator, monkeypatch):
    """The same forest on the same data: only the shuffles differ, so there are many of them."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance as theirs

    columns = generator.random((400, 3))
    scores = 2 * columns[:, 0] + columns[:, 1]
    forest = RandomForestRegressor(20, random_state=0).fit(columns[:200], scores[:200])
    expected = theirs(forest, columns[200:], scores[200:], n_repeats=100, random_state=0).importances_mean
    monkeypatch.setattr("lehr.sweeps.importance._REPEATS", 100)
    found = _drops(forest, columns[200:], scores[200:], generator).mean(axis=1)
    np.testing.assert_allclose(found, expected, atol=0.05)
