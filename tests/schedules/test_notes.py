"""What a schedule does that its writer may not have meant: said where it is so, and only there."""

import math

import pytest
from hypothesis import given

import lehr
from lehr.schedules.notes import surprises
from tests.schedules.strategies import bound_schedules

BUDGET = 20_000


def notes(name, value):
    return surprises(name, lehr.schedule(value), BUDGET)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("0.2 -> 0.1 over 5M", "ends after 5M env steps, later than the run: its last value will be 0.1996."),
        ("0.2 -> 0.1 over 5M, 0.1", "ends after 5M env steps, later than the run: its last value will be 0.1996."),
        ("0.1 -> 0.2 over 40k, 0.3 over 5k, 0.1", "ends after 45k env steps, later than the run"),
        ("0.1 over 5M, 0.2", "ends after 5M env steps, later than the run: its last value will be 0.1."),
        ("0.1 until 100%, 0.2", "ends after 20k env steps, when the run is over: its last value will be 0.1."),
        ("0.2 -> 0.1 over 10k repeat 3", "ends after 30k env steps, later than the run"),
        ("0.2 -> 0.1 over 0.5", "goes from 0.2 to 0.1 within 0.5 env steps; a share of the budget is written as 50%."),
        ("0.2 over 0.5, 0.1", "stays at 0.2 for 0.5 env steps; a share of the budget is written as 50%."),
        ("0.2 -> 0.1 over 1", "within 1 env step; a share of the budget is written as 100%."),
        ("0.2 -> 0.1 over 0.01 repeat 9", "within 0.01 env steps; a share of the budget is written as 1%."),
        ("0.2 -> 0.1 over 0.002%", "goes from 0.2 to 0.1 within 0.4 env steps."),
        ("1.5 -> 0", "The learning rate reaches 1.5."),
        (lambda step: step / 1000, "it is called with the env steps so far"),
    ],
)
def test_what_is_hardly_meant_is_said(value, sentence):
    (note,) = notes("learning_rate", value)
    assert sentence in note


def test_a_function_of_the_share_that_is_left_is_noticed_for_other_coefficients_too():
    (note,) = notes("clip_range", lambda left: 0.1 + 0.1 * left)
    assert note.startswith("The schedule of clip_range reaches 2000. If you gave a function: it is called with the env")
    assert notes("clip_range", lambda step: 0.2 - step / 1e6) == []
    assert notes("kl_coef", 500.0) == notes("kl_coef", "500 -> 0") == []


@pytest.mark.parametrize(
    "value",
    [
        3e-4,
        "3e-4 -> 0 cosine",
        "warmup 5%, 3e-4 -> 0",
        "3e-4 until 20%, 3e-4 -> 0 repeat 4",
        "3e-4 -> 1e-4 over 10k, 1e-4",
        "3e-4 -> 1e-4 over 100%, 1e-4",
        "3e-4 -> 1e-4 over 5M until 50%, 1e-4",
        "3e-4 over 5M, 3e-4",
        [[0, 3e-4], [9999, 3e-4], [10_000, 1e-4]],
        lambda step: 3e-4,
        "adaptive_kl(1e-3, target=0.01)",
        "plateau(0.9)",
    ],
)
@pytest.mark.parametrize("name", ["learning_rate", "entropy_coef"])
def test_nothing_is_said_of_what_is_usual(name, value):
    assert notes(name, value) == []


@given(bound_schedules())
def test_every_schedule_can_be_looked_at(schedule):
    for note in surprises("learning_rate", schedule, 10**6):
        assert "nan" not in note
        assert math.isfinite(schedule(10**6))
