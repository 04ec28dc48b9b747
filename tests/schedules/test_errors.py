"""Malformed input: each gets one sentence that says what was given, where, and what is allowed."""

import jax.numpy as jnp
import numpy as np
import pytest

from lehr.errors import InputError
from lehr.schedules import (
    adaptive_kl,
    constant,
    cosine,
    exponential,
    join,
    linear,
    parse,
    piecewise,
    plateau,
    polynomial,
    repeat,
    schedule,
    stack,
    target_entropy,
    warmup,
)

TEXTS = {
    "0.1 over 1,000": "character 10: '1,000' has a comma for its thousands; write 1000, or a space after a comma that ends a phase.",
    "0.2 -> 0.1 over 12,500": "character 17: '12,500' has a comma for its thousands; write 12500, or a space after",
    "1 -> 0 over 1,234,567 repeat 2": "character 13: '1,234,567' has a comma for its thousands; write 1234567, or",
    "1,000 -> 3": "character 1: '1,000' has a comma for its thousands; write 1000, or a space after",
    "1 at 0, 0 at 1,500k": "character 14: '1,500' has a comma for its thousands; write 1500, or a space after",
    "": "The schedule is an empty string; give a number or phases, for example '0.03 -> 0.001 cosine'.",
    "   ": "The schedule is an empty string; give a number or phases, for example '0.03 -> 0.001 cosine'.",
    "cosine": "The schedule 'cosine' is a shape without values; add them, for example '0.03 -> 0.001 cosine'.",
    "0.03 -> 0.001 cosin": "character 15: unknown word 'cosin'; did you mean 'cosine'?",
    "0.03 -> 0.001 spline": "character 15: unknown word 'spline'; known: warmup, from, over, until,",
    "0.03 -> 0.001 after 20%": "character 15: unknown word 'after'; did you mean 'from'?",
    "0.03 -> 0.001 for 10%": "character 15: unknown word 'for'; did you mean 'over'?",
    "0.03 until 10% then 0.01": "character 16: unknown word 'then'; did you mean ','?",
    "3e-4 to 0": "character 6: unknown word 'to'; did you mean '->'?",
    "lin_3e-4": "The schedule 'lin_3e-4' is RL Zoo's; write '3e-4 -> 0'.",
    "lin_high": "character 1: expected a value, got 'lin_high'.",
    "auto": "'auto' needs the entropy to aim at; write, for example, auto(target_entropy=0.5).",
    "auto_0.1": "'auto_0.1' needs the entropy to aim at; write, for example, auto(value=0.1, target_entropy=0.5).",
    "cosine(0.03, 0.001)": "There is no controller 'cosine'; did you mean '0.03 -> 0.001 cosine'?",
    "cosine(0.03)": "There is no controller 'cosine'; did you mean '0.03 -> 0 cosine'?",
    "linear(start=3e-4, end=1e-5)": "There is no controller 'linear'; did you mean '3e-4 -> 1e-5'?",
    "constant(0.1)": "There is no controller 'constant'; did you mean '0.1'?",
    "polynomial(0.1, 0, 2)": "did you mean '0.1 -> 0 polynomial(2)'?",
    "polynomial(2)": "'polynomial'; a shape comes last, as in '0.1 -> 0 polynomial(2)'.",
    "exponential(0.1)": "'exponential'; a shape comes last, as in '0.1 -> 0.01 exponential'.",
    "linear()": "There is no controller 'linear'; a shape comes last, as in '0.1 -> 0 linear'.",
    "-> 0.001": "character 1: expected a value, got '->'.",
    "linear 0.1 -> 0": "character 1: expected a value, got 'linear'; a shape comes last, as in '0.1 -> 0 linear'.",
    "0.1 => 0": "character 6: unexpected character '>'; did you mean '->'?",
    "0.1 ⇒ 0": "character 5: unexpected character '⇒'; did you mean '->'?",
    "0.03 ->": "character 8: expected a value after '->', but the schedule ends here.",
    "0.03 -> cosine": "character 9: expected a value after '->', got 'cosine'; a shape comes last, as in '0.1 -> 0 cosine'.",
    "0.03 -> 0.001 over": "character 19: expected a number of steps or a percentage, but the schedule ends here.",
    "0.03 -> 0.001 over 120%": "character 20: '120%' is more than 100% of the budget.",
    "0.03 until 101%, 1": "character 12: '101%' is more than 100% of the budget.",
    "0 -> 1 over 80%, 1 -> 0 over 80%": "Phase 2 ends at 160% of the budget; the lengths may add up to at most 100%.",
    "0.03 -> 0.001 over 0": "character 1: a phase has length 0; it must be above 0.",
    "0.03 -> 0.001 over 0%": "character 1: a phase has length 0; it must be above 0.",
    "0.03 until 0, 1": "character 1: a phase begins at 0 and ends at 0; it must end after it begins.",
    "0.03 until 50%, 0.03 -> 0 until 20%": "character 17: a phase begins at 50% and ends at 20%; it must end after it begins.",
    "1 -> 0 over 50%, 1 -> 0 from 20%": "character 18: a phase begins at 20%, before the previous one ends at 50%; phases must not overlap.",
    "1 -> 0, 1 -> 0": "character 9: a phase begins when no budget is left; begin it earlier, or end the previous phase earlier.",
    "nan": "character 1: 'nan' is not a finite number.",
    "0.03 -> inf": "character 9: 'inf' is not a finite number.",
    "1e999": "character 1: '1e999' is too large for a number.",
    "1e39": "The start of phase 1 is 1e+39, outside the range of float32; it must be 0 or have a magnitude",
    "1e-60 -> 1": "The start of phase 1 is 1e-60, outside the range of float32; it must be 0 or have a magnitude",
    "0.03 -> 0 exponential": "Phase 1 is exponential from 0.03 to 0, but an exponential cannot reach 0 or change sign; use",
    "0 -> 1 exponential": "Phase 1 is exponential from 0 to 1, but an exponential cannot reach 0 or change sign; use",
    "-1 -> 1 exponential": "Phase 1 is exponential from -1 to 1, but an exponential cannot reach 0 or change sign; use",
    "1e-30 -> 1e30 exponential": "to 1e+30, and the ratio of the two is outside the range of float32; split it into two phases.",
    "1 -> 0 repeat 0": "character 1: a phase cannot repeat 0 times; give a whole number, 1 or more.",
    "1 -> 0 repeat 2.5": "character 1: a phase cannot repeat 2.5 times; give a whole number, 1 or more.",
    "1 -> 0 repeat -1": "character 1: a phase cannot repeat -1 times; give a whole number, 1 or more.",
    "1 -> 0 repeat 20k": "character 1: a phase cannot repeat 20000 times; the maximum is 10000.",
    "1 -> 0 over 5 until 9 repeat 2, 1": "character 1: a repeated phase takes 'over' or 'until', not both.",
    "1 -> 0 over 80% until 40%": "character 26: 'until' together with 'over' says where the next phase begins, but no phase follows; remove one of them.",
    "1 -> 0 over 5 over 6": "character 15: 'over' appears twice in one phase; remove one of them.",
    "0.03, 0.03 -> 0.001": "character 5: the value before this comma needs 'over' or 'until' to say when the next phase",
    "0.03 -> 0.001,": "character 15: expected a value, but the schedule ends here.",
    "0.03 -> 0.001 cosine over 5% 7": "character 30: expected a comma or the end, got '7'.",
    "0.03 0.001": "character 6: expected a comma or the end, got '0.001'.",
    "0.03 cosine": "character 1: 'cosine' needs two values, start -> end.",
    "0.03 -> 0.001 constant": "character 1: 'constant' takes one value, without '->'.",
    "1 -> 0 polynomial": "character 18: 'polynomial' needs a power, for example polynomial(2).",
    "1 -> 0 polynomial(0)": "The power of phase 1 is 0; it must be above 0.",
    "1 -> 0 polynomial(2": "character 20: expected ')', but the schedule ends here.",
    "1 -> 0 cosine(-1)": "The power of phase 1 is -1; it must be above 0.",
    "1 -> 0 over 5m": "character 13: '5m' has the unknown unit 'm'; did you mean 'M'?",
    "1 -> 0 over 5x": "character 13: '5x' has the unknown unit 'x'; known: k, M, B, %.",
    "1 -> 0 over 5k steps": "character 16: positions are env steps; leave out the word 'steps'.",
    "1 at 0, 0 at 5k timesteps": "character 17: positions are env steps; leave out the word 'timesteps'.",
    "1 -> 0 over 5k step": "character 16: 'step' is only for points, as in '0.1 at 0, 0.01 at 20% step'.",
    "1 -> 0 over 5k cosine": "character 16: 'cosine' comes right after the values, and only once, as in '0.1 -> 0 linear over 20%'.",
    "1 -> 0 linear warmup 5%": "character 15: 'warmup' comes first, as in 'warmup 5%, 1e-3 -> 1e-4 linear'.",
    "0.03cosine": "character 1: '0.03cosine' needs a space before 'cosine'.",
    "20%": "character 1: expected a value, got the share of the budget '20%'.",
    "1 -> 0 over -5": "character 13: expected a number of steps or a percentage, got '-'.",
    "warmup 5%": "character 10: expected a comma and a phase after the warm-up, but the schedule ends here.",
    "1 until 5%, warmup 5%, 1": "character 13: 'warmup' comes first, as in 'warmup 5%, 1e-3 -> 1e-4 linear'.",
    "warmup 0, 1 -> 0": "The length of phase 1 is 0; it must be above 0.",
    "0.1 at 0, 0.05 -> 0": "character 16: expected 'at'; write the schedule either as points, 'value at step', or as phases, not both.",
    "0.1 at 0, 0.05 at 0": "The point at 0 comes after the point at 0; list points in increasing order of steps, without",
    "0.1 at 1M, 0.05 at 500k": "The point at 500k comes after the point at 1M; list points in increasing order of steps, without",
    "0.1 at 0, 0.05 at 1M stair": "character 22: expected a comma, a shape or the end, got 'stair'.",
    "__import__('os').system('true')": "Unknown controller '__import__' in \"__import__('os').system('true')\"; known: auto, plateau,",
    "lambda step: 0.1": "character 12: unexpected character ':'.",
    "0.1; import os": "character 4: unexpected character ';'.",
    "0.1 ** 2": "character 5: unexpected character '*'.",
    "auto()": "'auto()' is missing target_entropy; write auto(target_entropy=...).",
    "auto(target=1, rat=2)": "Unknown argument 'target' in 'auto(target=1, rat=2)'; did you mean 'target_entropy'?",
    "auto(0.5)": "The argument '0.5' in 'auto(0.5)' has no name; write name=value with one of target_entropy, rate,",
    "auto(target_entropy=0.5, rate=0)": "TargetEntropy got rate=0.0; it must be above 0.",
    "plateu(0.03)": "Unknown controller 'plateu' in 'plateu(0.03)'; did you mean 'plateau'?",
    "plateau(0.03, patience=0)": "Plateau got patience=0.0; it must be 1 or more.",
    "plateau(0.03, 0.5, factor=0.1)": "The argument 'factor' appears twice in 'plateau(0.03, 0.5, factor=0.1)'; remove one.",
    "adaptive_kl(1, target=0.01)": "AdaptiveKL starts at 1; it must start at a finite value within its limits, 1e-05 to 0.01.",
    "adaptive_kl(3e-4, target=x)": "In the schedule 'x', character 1: expected a value, got 'x'.",
}


@pytest.mark.parametrize("text", TEXTS)
def test_malformed_texts(text):
    with pytest.raises(InputError) as error:
        schedule(text)
    message = str(error.value)
    assert TEXTS[text] in message
    assert "\n" not in message
    assert len(message) < 600, "what is quoted is shortened"


OTHERS = [
    (lambda: schedule("1e9999999"), "'1e9999999' is too large for a number."),
    (
        lambda: schedule("1e-3 -> 0 over 1e39"),
        "Phase 1 reaches 1e+39 env steps; positions go up to 2^48, about 2.8e14.",
    ),
    (lambda: schedule("1 -> 0 over 1e400"), "character 13: '1e400' is too large for a number."),
    (lambda: schedule("1 -> 0 repeat 1e400"), "'1e400' is too large for a number."),
    (lambda: schedule("1 -> 0 repeat 1e30"), "a phase cannot repeat 1e+30 times;"),
    (lambda: schedule("9" * 5000), "is too large for a number."),
    (lambda: schedule(10**400), "it must be a finite number."),
    (lambda: schedule({"start": 1, "end": 0, "over": 10**400}), "is not a position;"),
    (lambda: schedule([[0, 1], [10**400, 0]]), "is not a position;"),
    (lambda: schedule(np.datetime64("2020")), "of type datetime64 is not a schedule;"),
    (lambda: schedule("1 -> 0", 10**400), "the budget must be finite, above 0 and at most 2^48 env steps."),
    (lambda: schedule("1 -> 0", 2**49), "total_steps is 5.6295e+14; the budget must be finite,"),
    (lambda: repeat(linear(1, 0, over=5), 10**9), "cannot repeat 1000000000 times; the maximum is 10000 phases."),
    (
        lambda: schedule(None),
        "None is not a schedule; give a number, a string, a mapping, [step, value] pairs or a function.",
    ),
    (lambda: schedule(True), "True is not a schedule; give a number, a string, a mapping,"),
    (lambda: schedule(object()), "of type object is not a schedule; give a number, a string, a mapping,"),
    (lambda: schedule(float("nan")), "The start is nan; it must be a finite number."),
    (lambda: schedule(float("inf")), "The start is inf; it must be a finite number."),
    (lambda: schedule([]), "A schedule of points needs at least one point; give, for example, [[0, 0.01]]."),
    (lambda: schedule([0.1, 0.2]), "0.1 is not a point of a schedule; give [step, value] pairs."),
    (lambda: schedule([[0, 1, 2]]), "[0, 1, 2] is not a point of a schedule; give [step, value] pairs."),
    (lambda: schedule([[-5, 1]]), "The position -5 is below 0; the first step is 0."),
    (lambda: schedule([[0, "x"]]), "In the schedule 'x', character 1: expected a value, got 'x'."),
    (
        lambda: piecewise([(0, 1), (9, 2)], "spline"),
        "Unknown shape 'spline' between points; known: step, constant, linear",
    ),
    (lambda: schedule({"shape": "cosin", "start": 1, "end": 0}), "unknown shape 'cosin'; did you mean 'cosine'?"),
    (lambda: schedule({"shape": "cosine", "strat": 1, "end": 0}), "the unknown key 'strat'; did you mean 'start'?"),
    (lambda: schedule({"shape": "cosine", "end": 0}), "has no start; add the value it starts from."),
    (lambda: schedule({"shape": "cosine", "start": 1}), "has no end; add the value it goes to."),
    (lambda: schedule({"shape": "linear", "type": "linear", "start": 1}), "sets 'shape' twice, under two names"),
    (
        lambda: schedule({"shape": "linear", "start": 1, "end": 0, "power": 2}),
        "has a power, which 'linear' does not take",
    ),
    (lambda: schedule({"shape": "polynomial", "start": 1, "end": 0}), "has no power, which a polynomial needs"),
    (lambda: schedule({"start": 1, "end": 0, "over": "120%"}), "'120%' is more than 100% of the budget."),
    (lambda: schedule({"start": 1, "end": 0, "over": -3}), "The position -3 is below 0; the first step is 0."),
    (
        lambda: schedule({"start": 1, "end": 0, "over": None, "repeat": 0}),
        "A phase cannot repeat 0 times; give a whole number, 1 or more.",
    ),
    (lambda: schedule({"start": 1, "end": 0, "over": 0}), "A phase has length 0; it must be above 0."),
    (
        lambda: schedule({"start": 1, "end": 0, "warmup": 10, "from": 5}),
        "begins before its warm-up ends; begin later, or shorten the warm-up.",
    ),
    (
        lambda: schedule({"shape": "constant", "start": 1, "end": 0}),
        "Phase 1 is constant but goes from 1 to 0; give one value or another shape.",
    ),
    (lambda: schedule({}), "has no start; add the value it starts from."),
    (lambda: linear(1, 0)(5), "'1 -> 0' has positions that are shares of the budget; call bind(total_steps) before"),
    (lambda: linear(1, 0)(jnp.int32(5)), "has positions that are shares of the budget; call bind(total_steps) before"),
    (lambda: linear(1, 0, over=10)(-1), "A schedule was called with step -1; steps must be finite and 0 or more."),
    (
        lambda: linear(1, 0, over=10)(np.nan),
        "A schedule was called with step nan; steps must be finite and 0 or more.",
    ),
    (
        lambda: linear(1, 0, over=10)(np.array([3, -1])),
        "A schedule was called with steps from -1 to 3; steps must be finite and 0 or more.",
    ),
    (lambda: linear(1, 0).bind(0), "total_steps is 0; the budget must be finite, above 0 and at most 2^48 env steps."),
    (
        lambda: linear(1, 0).bind(-5),
        "total_steps is -5; the budget must be finite, above 0 and at most 2^48 env steps.",
    ),
    (
        lambda: linear(1, 0).bind(np.inf),
        "total_steps is inf; the budget must be finite, above 0 and at most 2^48 env steps.",
    ),
    (lambda: linear(1, 0).bind("1M"), "total_steps is '1M'; it must be a number of env steps above 0."),
    (lambda: parse("1 until 2M, 1 -> 0").bind(10**6), "would last -1e+06 steps with a budget of 1e+06; give a larger"),
    (
        lambda: parse("1 until 2M, 1 -> 0 over 1k until 50%, 3").bind(10**6),
        "would begin at step 500000, but phase 2 begins at 2e+06, with a budget of 1e+06; each phase must begin "
        "after the previous one.",
    ),
    (
        lambda: parse("1 -> 0 over 10% until 1k, 3").bounds(),
        "depends on the budget; call bind(total_steps) before bounds().",
    ),
    (lambda: linear("abc", 0), "In the schedule 'abc', character 1: expected a value, got 'abc'."),
    (lambda: linear(None, 0), "The start is None; it must be a finite number."),
    (lambda: linear(1, 0, over="5x"), "'5x' has the unknown unit 'x'; known: k, M, B, %."),
    (
        lambda: linear(1, 0, over=[1]),
        "[1] is not a position; give a number of env steps, or a string such as '500k' or '20%'.",
    ),
    (lambda: exponential(1, 0, over=5), "an exponential cannot reach 0 or change sign"),
    (lambda: polynomial(1, 0, -2, over=5), "The power of phase 1 is -2; it must be above 0."),
    (lambda: cosine(1, 0, over=5, exponent=0), "The power of phase 1 is 0; it must be above 0."),
    (lambda: repeat(linear(1, 0), 0), "A schedule cannot repeat 0 times; give a whole number, 1 or more."),
    (
        lambda: repeat(constant(1), 3),
        "'1' ends in a constant of no fixed length, so it cannot repeat; end it with a curve, for example '1 -> 0 "
        "over 100k'.",
    ),
    (lambda: warmup(0, linear(1, 0)), "The warm-up has length 0; it must be above 0."),
    (
        lambda: warmup("5%", schedule(lambda step: 1.0)),
        "The warm-up of a function has length 5%; give it in env steps, since a function has no budget.",
    ),
    (
        lambda: join([constant(1)], [5]),
        "join got 1 schedules and 1 boundaries; n schedules need n - 1 boundaries.",
    ),
    (
        lambda: join([constant(1), linear(1, 0)], [5]),
        "Schedule 2 of a join is Schedule('1 -> 0'); join only takes bound",
    ),
    (lambda: join([constant(1)] * 3, [5, 5]), "The boundaries of a join are [5, 5]; they must be increasing."),
    (lambda: schedule(lambda step: "x")(0), "returned 'x' at step 0; it must return one number."),
    (
        lambda: schedule(lambda step: 1 / (step - 5) if step != 5 else np.nan)(5),
        "returned nan at step 5; it must be finite at every step.",
    ),
    (lambda: schedule(lambda step: 1.0)(-2), "A schedule was called with step -2;"),
    (lambda: schedule(lambda step: 1.0).bounds(), "depend on the budget; call bind(total_steps) first."),
    (lambda: target_entropy(float("nan")), "TargetEntropy got target=nan; it must be finite."),
    (lambda: adaptive_kl(3e-4, target=-1), "AdaptiveKL got target=-1; it must be above 0."),
    (lambda: plateau(0.03, factor=-1), "Plateau got factor=-1; it must be above 0."),
    (
        lambda: plateau(0.03).update(plateau(0.03).init(), {"episode/returns": 1.0}),
        "needs the metric 'episode/return', which is not measured; did you mean 'episode/returns'?",
    ),
    (lambda: stack([linear(1, 0)]), "Schedule 1 of a stack, '1 -> 0', is not bound; call bind(total_steps) first."),
]


@pytest.mark.parametrize("index", range(len(OTHERS)))
def test_malformed_calls(index):
    call, expected = OTHERS[index]
    with pytest.raises(InputError) as error:
        call()
    message = str(error.value)
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text", ["lin_3e-4", "cosine(0.03, 0.001)", "cosine(3, 1, 2)", "linear(0.1)", "polynomial(1, 0, 2)", "cosine()"]
)
def test_what_is_suggested_for_another_librarys_text_is_a_schedule(text):
    with pytest.raises(InputError) as error:
        schedule(text)
    schedule(str(error.value).split("'")[-2])
