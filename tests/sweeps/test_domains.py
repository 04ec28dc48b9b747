"""Ranges and lists of choices."""

import numpy as np
import pytest

from lehr.errors import InputError
from lehr.sweeps.domains import Choices, Range


def test_linear_grid():
    assert Range(0.0, 1.0, steps=5).grid == (0.0, 0.25, 0.5, 0.75, 1.0)


def test_log_grid():
    assert Range(1e-4, 1e-2, "log", steps=5).grid == (1e-4, 3.1623e-4, 1e-3, 3.1623e-3, 1e-2)


def test_whole_grid_takes_every_number():
    assert Range(2, 5, unit="whole").grid == (2, 3, 4, 5)


def test_powers_of_two():
    assert Range(16, 256, "log", steps=5, unit="whole").grid == (16, 32, 64, 128, 256)


def test_whole_steps_that_round_to_the_same_number_are_one_value():
    assert Range(1, 8, "log", steps=8, unit="whole").grid == (1, 2, 3, 4, 6, 8)


def test_continuous_range_has_no_grid():
    assert Range(0.0, 1.0).grid is None


@pytest.mark.parametrize(
    ("low", "high", "scale"), [(0.0, 0.01, "linear"), (0.9, 0.9999, "linear"), (1e-5, 1e-1, "log")]
)
def test_values_stay_in_the_range_and_near_the_exact_ones(low, high, scale):
    found = np.array([Range(low, high, scale).at(place) for place in np.linspace(0, 1, 999)])
    exact = np.geomspace(low, high, 999) if scale == "log" else np.linspace(low, high, 999)
    assert (found[0], found[-1]) == (low, high)
    assert ((found >= low) & (found <= high)).all()
    assert np.diff(found).min() > 0
    np.testing.assert_allclose(found, exact, atol=1e-4 * (high - low), rtol=1e-4)


def test_values_are_short():
    assert Range(1e-4, 1e-2, "log").at(0.123456789) == 1.7657e-4  # 1e-4 · 100^0.123456789 = 1.76568…e-4
    assert Range(0.0, 0.01).at(1e-9) == 1e-11  # only the end itself is 0


def test_whole_numbers_have_equal_chances():
    values = [Range(1, 4, unit="whole").at(place) for place in (np.arange(400) + 0.5) / 400]
    assert [values.count(number) for number in (1, 2, 3, 4)] == [100, 100, 100, 100]
    assert all(type(value) is int for value in values)


def test_choices_have_equal_chances():
    values = [Choices(("a", "b", "c")).at(place) for place in (np.arange(300) + 0.5) / 300]
    assert values == ["a"] * 100 + ["b"] * 100 + ["c"] * 100


def test_range_with_steps_only_gives_these_values():
    values = [Range(0.1, 0.3, steps=3).at(place) for place in (0, 0.3, 0.4, 0.6, 0.7, 1)]
    assert values == [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]


def test_shares_of_the_budget():
    over = Range.read("entropy_coef.over", {"low": "20%", "high": "100%"}, "position")
    assert [over.at(place) for place in (0, 0.5, 1)] == ["20%", "60%", "100%"]
    assert over.at(1 / 3) == "46.667%"


def test_warmup_from_zero_is_a_share():
    assert Range.read("entropy_coef.warmup", {"low": 0, "high": "10%"}, "position").at(0.5) == "5%"


def test_positions_in_env_steps_are_whole():
    over = Range.read("entropy_coef.over", {"low": "100k", "high": 300_000}, "position")
    assert over.unit == "whole"
    assert over.at(0.5) == 200_000


@pytest.mark.parametrize(
    ("given", "unit", "message"),
    [
        ({"low": 0, "hihg": 1}, "number", "unknown key 'hihg'; did you mean 'high'?"),
        ({"low": 0}, "number", "rate has no high; give both"),
        ({"high": 0}, "number", "rate has no low; give both"),
        ({"low": 0, "high": 1, "scale": "logg"}, "number", "'logg'; did you mean 'log'?"),
        ({"low": 0, "high": 1, "scale": 2}, "number", "scale of rate is 2; known: linear, log"),
        ({"low": 0, "high": 1, "steps": 1}, "number", "steps of rate are 1; give a whole number of values, 2 or more"),
        ({"low": 0, "high": 1, "steps": True}, "number", "steps of rate are True"),
        ({"low": 1, "high": 1}, "number", "rate goes from 1 to 1, so it is empty; low must be below high"),
        ({"low": 2, "high": "1e-3"}, "number", "rate goes from 2 to 1e-3, so it is empty"),
        ({"low": 0, "high": 1, "scale": "log"}, "number", "log scale cannot reach 0"),
        ({"low": "a", "high": 1}, "number", "range of rate: "),
        ({"low": [1], "high": 2}, "number", r"low is \[1\]; it must be a finite number"),
        ({"low": 0, "high": float("inf")}, "number", "high is inf; it must be a finite number"),
        ({"low": 0.5, "high": 2}, "whole", "has the end 0.5; give whole numbers"),
        ({"low": 1, "high": 3, "steps": 4}, "whole", "4 steps, but only 3 whole numbers"),
        ({"low": "10%", "high": "100k"}, "position", "one end is a share of the budget, the other is in env steps"),
    ],
)
def test_bad_ranges(given, unit, message):
    with pytest.raises(InputError, match=message):
        Range.read("rate", given, unit)
