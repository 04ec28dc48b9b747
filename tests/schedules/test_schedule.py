"""Schedules on the host: values worked out by hand."""

import copy
import math
import pickle

import numpy as np
import pytest

import lehr
from lehr.schedules import (
    Schedule,
    constant,
    cosine,
    exponential,
    join,
    linear,
    parse,
    piecewise,
    polynomial,
    repeat,
    schedule,
    warmup,
)


def values(member, *steps):
    return pytest.approx([member(step) for step in steps])


def test_a_constant_holds():
    assert constant(0.01)(0) == constant(0.01)(10**12) == 0.01
    assert constant(0.01).is_bound


def test_equal_texts_and_numbers_share_a_schedule_that_nobody_can_change():
    assert schedule("1 -> 0", 100) is schedule("1 -> 0", 100)
    assert schedule("1 -> 0", 100) is not schedule("1 -> 0", 200)
    with pytest.raises(ValueError, match="read-only"):
        schedule("1 -> 0", 100).start[0] = 2.0
    assert [math.copysign(1, schedule(zero)(0)) for zero in (0.0, -0.0, 0.0)] == [1, -1, 1]


def test_linear_by_hand():
    assert values(linear(1, 0, over=100), 0, 25, 100, 101, 10**9) == [1, 0.75, 0, 0, 0]


def test_linear_holds_its_start_before_it_begins():
    assert values(linear(1, 0, over=100, begin=50), 0, 50, 100, 150) == [1, 1, 0.5, 0]


def test_cosine_by_hand():
    assert values(cosine(1, 0, over=100), 0, 50, 100) == [1, 0.5, 0]
    assert cosine(1, 0, over=3)(1) == pytest.approx(0.75)  # cos(π/3) = 1/2
    assert cosine(1, 0, over=3, exponent=2)(1) == pytest.approx(0.75**2)


def test_exponential_by_hand():
    assert values(exponential(1, 1e-4, over=100), 0, 25, 50, 75, 100) == [1, 0.1, 0.01, 0.001, 0.0001]
    assert exponential(-1, -100, over=2)(1) == pytest.approx(-10)


def test_polynomial_by_hand():
    assert values(polynomial(2, 1, 3, over=10), 0, 5, 10) == [2, 1.125, 1]


def test_piecewise_by_hand():
    points = [(0, 0.1), (10, 0.05), (50, 0.01)]
    assert values(piecewise(points), 0, 5, 10, 30, 50, 99) == [0.1, 0.075, 0.05, 0.03, 0.01, 0.01]
    assert values(piecewise(points, "step"), 0, 9, 10, 49, 50, 99) == [0.1, 0.1, 0.05, 0.05, 0.01, 0.01]
    assert values(piecewise([(10, 1), (20, 2)]), 0, 10, 15) == [1, 1, 1.5]


def test_join_gives_each_schedule_a_clock_of_its_own():
    joined = join([linear(1, 0, over=10), linear(5, 6, over=10, begin=5)], boundaries=[4])
    assert values(joined, 0, 2, 3.999999, 4, 8, 9, 14, 19, 50) == [1, 0.8, 0.6000001, 5, 5, 5, 5.5, 6, 6]


def test_warmup_moves_steps_and_squeezes_shares():
    assert values(warmup(10, linear(1, 0, over=100)), 0, 5, 10, 60, 110) == [0, 0.5, 1, 0.5, 0]
    squeezed = warmup("20%", parse("1 until 50%, 1 -> 0")).bind(100)
    assert values(squeezed, 0, 10, 20, 60, 80, 100) == [0, 0.5, 1, 1, 0.5, 0]
    assert warmup(10, constant(1), start=0.5)(5) == 0.75


def test_repeat_runs_through_it_again():
    assert values(repeat(linear(1, 0, over=10), 3), 0, 5, 9, 10, 15, 25, 30, 99) == [1, 0.5, 0.1, 1, 0.5, 0.5, 0, 0]
    sawtooth = repeat(parse("0 -> 1 over 50%, 1 -> 0"), 2).bind(100)
    assert values(sawtooth, 0, 12.5, 25, 50, 75, 100) == [0, 0.5, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("text", "expected"),  # at 0, 5, 10, 20, 50, 80, 100 % of the budget
    [
        ("0.01", [0.01] * 7),
        ("1 -> 0", [1, 0.95, 0.9, 0.8, 0.5, 0.2, 0]),
        ("1 -> 0 polynomial(2)", [1, 0.9025, 0.81, 0.64, 0.25, 0.04, 0]),
        ("0 -> 1 over 5%, 1 -> 0.05", [0, 1, 0.95, 0.85, 0.55, 0.25, 0.05]),
        ("warmup 5%, 1 -> 0.05", [0, 1, 0.95, 0.85, 0.55, 0.25, 0.05]),
        ("1 until 20%, 1 -> 0.01 exponential until 80%", [1, 1, 1, 1, 0.1, 0.01, 0.01]),
        ("1 -> 0 repeat 4", [1, 0.8, 0.6, 0.2, 1, 0.8, 0]),
        ("1 -> 0 over 10% repeat 2", [1, 0.5, 1, 0, 0, 0, 0]),
        ("1 -> 0 until 20% repeat 2", [1, 0.5, 1, 0, 0, 0, 0]),
        ("4 at 0, 2 at 200k, 0 at 1M", [4, 3.5, 3, 2, 1.25, 0.5, 0]),
        ("4 at 0, 2 at 200k, 0 at 1M step", [4, 4, 4, 2, 2, 2, 0]),
        ("1 -> 0 from 50% until 100%", [1, 1, 1, 1, 1, 0.4, 0]),
        ("1 -> 0 over 20% until 10%, 7", [1, 0.75, 7, 7, 7, 7, 7]),
        ("1 -> 0 over 10% until 80%, 7", [1, 0.5, 0, 0, 0, 7, 7]),
        ("1 until 10%+100k, 1 -> 0 over 50%-200k until 1B, 7", [1, 1, 1, 1, 0, 0, 0]),
        ("-1 → +1", [-1, -0.9, -0.8, -0.6, 0, 0.6, 1]),
        ("2k -> 1_000 linear", [2000, 1950, 1900, 1800, 1500, 1200, 1000]),
        ("1.5B constant", [1.5e9] * 7),
        ("1 over 5, 100", [1, 100, 100, 100, 100, 100, 100]),
        ("1 over 200k,100", [1, 1, 1, 100, 100, 100, 100]),
    ],
)
def test_texts_by_hand(text, expected):
    total = 1_000_000
    member = schedule(text, total)
    assert values(member, *(total * share // 100 for share in (0, 5, 10, 20, 50, 80, 100))) == expected


@pytest.mark.parametrize(
    "text",
    [
        "0.01",
        "0.03 -> 0.001",
        "0.03 -> 0.001 cosine",
        "0.03 -> 0 polynomial(2)",
        "0 -> 0.03 over 5%, 0.03 -> 0.001 cosine",
        "0.03 until 20%, 0.03 -> 0.001 exponential until 80%",
        "0.03 -> 0.003 cosine repeat 4",
        "0.1 -> 0.05 over 1M, 0.05 -> 0.01 over 4M",
        "0.1 until 1M, 0.05 until 5M, 0.01",
        "1 -> 0 cosine(2) from 500k over 1.5M until 1M, 3",
    ],
)
def test_what_people_write_is_what_is_printed(text):
    assert str(parse(text)) == text
    assert repr(parse(text)) == f"Schedule({text!r})"


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({"shape": "constant", "value": 0.01}, "0.01"),
        ({"type": "constant", "start": "1e-2"}, "0.01"),
        ({"value": 0.01}, "0.01"),
        ({"shape": "cosine", "start": 0.03, "end": 0.001}, "0.03 -> 0.001 cosine"),
        ({"kind": "linear", "start": "3e-2", "end": 0, "over": "80%"}, "0.03 -> 0 over 80%"),
        ({"start": 1, "end": 0, "until": "500k"}, "1 -> 0 until 500k"),
        (
            {"shape": "cosine", "start": 0.03, "end": 0.001, "warmup": "5%", "over": "80%"},
            "warmup 5%, 0.03 -> 0.001 cosine over 80%",
        ),
        ({"shape": "cosine", "start": 1, "end": 0.1, "exponent": 2, "repeat": 4}, "1 -> 0.1 cosine(2) repeat 4"),
        ({"shape": "polynomial", "start": 1, "end": 0, "power": 3, "from": 100}, "1 -> 0 polynomial(3) from 100"),
        ({"value": 0.5, "warmup": 1000}, "warmup 1k, 0.5"),
    ],
)
def test_mappings_say_the_same_as_texts(mapping, text):
    assert schedule(mapping) == parse(text)


def test_anything_becomes_a_schedule():
    assert schedule(0.5) == schedule(np.float32(0.5)) == schedule(np.array(0.5)) == schedule("0.5") == constant(0.5)
    assert schedule([[0, 1.0], ["1M", 0.5]]) == piecewise([(0, 1.0), (10**6, 0.5)])
    assert schedule(((0, 1.0), (10, 0.5))) == schedule(np.array([[0, 1.0], [10, 0.5]]))
    member = linear(1, 0)
    assert schedule(member) is member
    assert schedule(member, 100) == linear(1, 0, over=100)
    assert schedule(lambda step: 2 * step)(3) == 6.0
    assert lehr.schedule is schedule


def test_a_function_can_be_warmed_up():
    warmed = warmup(10, schedule(lambda step: 5.0 + step))
    assert values(warmed, 0, 5, 10, 12) == [0, 2.5, 5, 7]


def test_bounds_look_at_what_is_reached():
    assert linear(1, 0, over=10).bounds() == (0, 1)
    assert parse("1 -> 0 over 10 until 5, 3").bounds() == (0.5, 3)
    assert parse("1 -> 0 over 50% until 25%, 3").bounds() == (0.5, 3)
    assert parse("-1 -> 5 cosine").bounds() == (-1, 5)


def test_binding_leaves_no_noise_in_positions():
    for begin in range(0, 100, 5):
        for end in range(begin + 5, 105, 5):
            bound = parse(f"1 -> 0 from {begin}% until {end}%").bind(1_000_000)
            assert bound(end * 10_000) == 0
            assert "." not in str(bound).replace("M", "")


def test_bind_again_changes_nothing():
    member = parse("0.03 -> 0.001 cosine").bind(100)
    assert member.bind(7) is member


def test_schedules_are_values():
    member = parse("warmup 5%, 0.03 -> 0.001 cosine")
    assert member == parse("0 -> 0.03 over 5%, 0.03 -> 0.001 cosine")
    assert member != parse("0 -> 0.03 over 6%, 0.03 -> 0.001 cosine")
    assert member != member.bind(100)
    assert member != "0.03"
    assert {member: 1}[copy.deepcopy(member)] == 1
    assert pickle.loads(pickle.dumps(member)) == member
    with pytest.raises(ValueError, match="read-only"):
        member.start[0] = 5


def test_a_constant_has_one_form():
    assert parse("0.5 until 20%") == parse("0.5 -> 0.5 cosine") == constant(0.5)
    assert Schedule(parse("0.5").phases) == constant(0.5)


def test_a_schedule_can_be_called_with_fractions_of_a_step():
    assert linear(1, 0, over=2)(0.5) == 0.75
    assert math.isclose(linear(1, 0, over=2)(np.float32(0.5)), 0.75)
