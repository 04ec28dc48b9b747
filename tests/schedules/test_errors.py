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
    "": "The schedule is an empty text; give a number or phases, for example '0.03 -> 0.001 cosine'.",
    "   ": "The schedule is an empty text; give a number or phases, for example '0.03 -> 0.001 cosine'.",
    "cosine": "The schedule 'cosine' is a shape without values; write its ends too, '0.03 -> 0.001 cosine'.",
    "0.03 -> 0.001 cosin": "character 15: 'cosin' is unknown here; did you mean 'cosine'?",
    "0.03 -> 0.001 spline": "character 15: 'spline' is unknown here; known: warmup, from, over, until,",
    "-> 0.001": "character 1: '->' stands where a value is wanted.",
    "0.03 ->": "character 8: the value after the arrow is missing.",
    "0.03 -> cosine": "character 9: 'cosine' stands where the value after the arrow is wanted.",
    "0.03 -> 0.001 over": "character 19: a number of steps or a share is missing.",
    "0.03 -> 0.001 over 120%": "character 20: '120%' is beyond 100% of the budget.",
    "0.03 until 101%, 1": "character 12: '101%' is beyond 100% of the budget.",
    "0 -> 1 over 80%, 1 -> 0 over 80%": "Phase 2 ends at 160% of the budget; give lengths that add up to 100% at most.",
    "0.03 -> 0.001 over 0": "character 1: a phase has the length 0; it must be above 0.",
    "0.03 -> 0.001 over 0%": "character 1: a phase has the length 0; it must be above 0.",
    "0.03 until 0, 1": "character 1: a phase ends at 0, which is not after 0, where it begins.",
    "0.03 until 50%, 0.03 -> 0 until 20%": "character 17: a phase ends at 20%, which is not after 50%, where it begins.",
    "1 -> 0 over 50%, 1 -> 0 from 20%": "character 18: a phase begins at 20%, before 50%, where the one before it ends.",
    "1 -> 0, 1 -> 0": "character 9: nothing of the budget is left for a phase; end the one in front of it earlier.",
    "nan": "character 1: 'nan' is not a finite number.",
    "0.03 -> inf": "character 9: 'inf' is not a finite number.",
    "1e999": "Phase 1 has the start inf; it must be a finite number.",
    "1e39": "Phase 1 has the start 1e+39, which float32 cannot hold;",
    "1e-60 -> 1": "Phase 1 has the start 1e-60, which float32 cannot hold;",
    "0.03 -> 0 exponential": "Phase 1 is exponential from 0.03 to 0; an exponential can neither reach 0 nor change sign,",
    "0 -> 1 exponential": "Phase 1 is exponential from 0 to 1; an exponential can neither reach 0 nor change sign,",
    "-1 -> 1 exponential": "Phase 1 is exponential from -1 to 1; an exponential can neither reach 0 nor change sign,",
    "1e-30 -> 1e30 exponential": "the ratio of its ends is more than float32 can hold, so cut it into two phases.",
    "1 -> 0 repeat 0": "character 1: a phase cannot repeat 0 times; repeat it 1 or more whole times.",
    "1 -> 0 repeat 2.5": "character 1: a phase cannot repeat 2.5 times; repeat it 1 or more whole times.",
    "1 -> 0 repeat -1": "character 1: a phase cannot repeat -1 times; repeat it 1 or more whole times.",
    "1 -> 0 repeat 20k": "character 1: a phase cannot repeat 20000 times; 10000 is the most.",
    "1 -> 0 over 5 until 9 repeat 2, 1": "character 1: a repeated phase takes 'over' or 'until', not both.",
    "1 -> 0 over 80% until 40%": "character 26: with 'over', 'until' says where the next phase begins, and none follows;",
    "1 -> 0 over 5 over 6": "character 15: 'over' stands twice in one phase.",
    "0.03, 0.03 -> 0.001": "character 5: the value before this comma needs 'over' or 'until', to say when the next",
    "0.03 -> 0.001,": "character 15: a value is missing.",
    "0.03 -> 0.001 cosine over 5% 7": "character 30: '7' stands where a comma or the end is wanted.",
    "0.03 0.001": "character 6: '0.001' stands where a comma or the end is wanted.",
    "0.03 cosine": "character 1: 'cosine' needs two values, start -> end.",
    "0.03 -> 0.001 constant": "character 1: 'constant' has one value, without an arrow.",
    "1 -> 0 polynomial": "character 18: polynomial needs its power, for example polynomial(2).",
    "1 -> 0 polynomial(0)": "Phase 1 has the power 0; it must be above 0.",
    "1 -> 0 polynomial(2": "character 20: ')' is missing.",
    "1 -> 0 cosine(-1)": "Phase 1 has the power -1; it must be above 0.",
    "1 -> 0 over 5m": "character 13: '5m' has the unknown unit 'm'; known: k, M, B, %.",
    "0.03cosine": "character 1: '0.03cosine' needs a space before 'cosine'.",
    "20%": "character 1: '20%' is a share of the budget where a value is wanted.",
    "1 -> 0 over -5": "character 13: '-' stands where a number of steps or a share is wanted.",
    "warmup 5%": "character 10: a comma and the phases after the warm-up are missing.",
    "1 until 5%, warmup 5%, 1": "character 13: 'warmup' may stand only at the front.",
    "warmup 0, 1 -> 0": "Phase 1 has the length 0; it must be above 0.",
    "0.1 at 0, 0.05 -> 0": "character 16: 'at' is wanted: a schedule is either all points, 'value at step', or all phases.",
    "0.1 at 0, 0.05 at 0": "The point at 0 stands after the one at 0; give the points in the order of their steps,",
    "0.1 at 1M, 0.05 at 500k": "The point at 500k stands after the one at 1M; give the points in the order of their steps,",
    "0.1 at 0, 0.05 at 1M stair": "character 22: 'stair' stands where a comma, a curve or the end is wanted.",
    "__import__('os').system('true')": "The controller '__import__' of \"__import__('os').system('true')\" is unknown;",
    "lambda step: 0.1": "character 12: the character ':' has no meaning in a schedule.",
    "0.1; import os": "character 4: the character ';' has no meaning in a schedule.",
    "0.1 ** 2": "character 5: the character '*' has no meaning in a schedule.",
    "auto()": "'auto()' lacks target_entropy; write auto(target_entropy=...).",
    "auto(target=1, rat=2)": "The argument 'target' of 'auto(target=1, rat=2)' is unknown; did you mean 'target_entropy'?",
    "auto(0.5)": "The argument '0.5' of 'auto(0.5)' has no name; write name=value.",
    "auto(target_entropy=0.5, rate=0)": "TargetEntropy was given rate=0.0; it must be above 0.",
    "plateu(0.03)": "The controller 'plateu' of 'plateu(0.03)' is unknown; did you mean 'plateau'?",
    "plateau(0.03, patience=0)": "Plateau was given patience=0.0; it must be 1 or more.",
    "plateau(0.03, 0.5, factor=0.1)": "The argument 'factor' stands twice in 'plateau(0.03, 0.5, factor=0.1)'; remove one.",
    "adaptive_kl(1, target=0.01)": "AdaptiveKL starts at 1 with limits 1e-05 to 0.01; start between them.",
    "adaptive_kl(3e-4, target=x)": "In the schedule 'x', character 1: 'x' stands where a value is wanted.",
}


@pytest.mark.parametrize("text", TEXTS)
def test_malformed_texts(text):
    with pytest.raises(InputError) as error:
        schedule(text)
    message = str(error.value)
    assert TEXTS[text] in message
    assert "\n" not in message


OTHERS = [
    (
        lambda: schedule(None),
        "None is no schedule; give a number, a text, a mapping, [step, value] pairs or a function.",
    ),
    (lambda: schedule(True), "True is no schedule; give a number, a text, a mapping,"),
    (lambda: schedule(object()), "of type object is no schedule; give a number, a text, a mapping,"),
    (lambda: schedule(float("nan")), "The start is nan; it must be a finite number."),
    (lambda: schedule(float("inf")), "The start is inf; it must be a finite number."),
    (lambda: schedule([]), "A schedule of points has no point; give at least one, for example [[0, 0.01]]."),
    (lambda: schedule([0.1, 0.2]), "0.1 is no point of a schedule; give pairs of [step, value]."),
    (lambda: schedule([[0, 1, 2]]), "[0, 1, 2] is no point of a schedule; give pairs of [step, value]."),
    (lambda: schedule([[-5, 1]]), "The position -5 is below 0; the first step is 0."),
    (lambda: schedule([[0, "x"]]), "In the schedule 'x', character 1: 'x' stands where a value is wanted."),
    (
        lambda: piecewise([(0, 1), (9, 2)], "spline"),
        "Points cannot be joined by 'spline'; known: step, constant, linear",
    ),
    (lambda: schedule({"shape": "cosin", "start": 1, "end": 0}), "unknown shape 'cosin'; did you mean 'cosine'?"),
    (lambda: schedule({"shape": "cosine", "strat": 1, "end": 0}), "the unknown key 'strat'; did you mean 'start'?"),
    (lambda: schedule({"shape": "cosine", "end": 0}), "has no start; say the value it starts from."),
    (lambda: schedule({"shape": "cosine", "start": 1}), "has no end; say the value it goes to."),
    (lambda: schedule({"shape": "linear", "type": "linear", "start": 1}), "gives 'shape' twice, under two names"),
    (
        lambda: schedule({"shape": "linear", "start": 1, "end": 0, "power": 2}),
        "has a power, which 'linear' does not take",
    ),
    (lambda: schedule({"shape": "polynomial", "start": 1, "end": 0}), "has no power, which a polynomial needs"),
    (lambda: schedule({"start": 1, "end": 0, "over": "120%"}), "'120%' is beyond 100% of the budget."),
    (lambda: schedule({"start": 1, "end": 0, "over": -3}), "The position -3 is below 0; the first step is 0."),
    (
        lambda: schedule({"start": 1, "end": 0, "over": None, "repeat": 0}),
        "A phase cannot repeat 0 times; repeat it 1 or",
    ),
    (lambda: schedule({"start": 1, "end": 0, "over": 0}), "A phase has the length 0; it must be above 0."),
    (lambda: schedule({"start": 1, "end": 0, "warmup": 10, "from": 5}), "begins before its warm-up is over"),
    (lambda: schedule({"shape": "constant", "start": 1, "end": 0}), "Phase 1 is constant but goes from 1 to 0;"),
    (lambda: schedule({}), "has no start; say the value it starts from."),
    (lambda: linear(1, 0)(5), "'1 -> 0' has positions that are shares of the budget; call bind(total_steps) before"),
    (lambda: linear(1, 0)(jnp.int32(5)), "has positions that are shares of the budget; call bind(total_steps) before"),
    (lambda: linear(1, 0, over=10)(-1), "A schedule was called with step -1; a step is a finite number, 0 or more."),
    (
        lambda: linear(1, 0, over=10)(np.nan),
        "A schedule was called with step nan; a step is a finite number, 0 or more.",
    ),
    (
        lambda: linear(1, 0, over=10)(np.array([3, -1])),
        "called with steps that are negative or not finite; steps are 0",
    ),
    (lambda: linear(1, 0).bind(0), "total_steps is 0; the budget must be finite and above 0."),
    (lambda: linear(1, 0).bind(-5), "total_steps is -5; the budget must be finite and above 0."),
    (lambda: linear(1, 0).bind(np.inf), "total_steps is inf; the budget must be finite and above 0."),
    (lambda: linear(1, 0).bind("1M"), "total_steps is '1M'; it must be a number of env steps, above 0."),
    (lambda: parse("1 until 2M, 1 -> 0").bind(10**6), "would last -1e+06 steps with a budget of 1e+06; give a larger"),
    (
        lambda: parse("1 until 2M, 1 -> 0 over 1k until 50%, 3").bind(10**6),
        "would begin at step 500000, but phase 2 begins at 2e+06, with a budget of 1e+06; phases must follow one another.",
    ),
    (
        lambda: parse("1 -> 0 over 10% until 1k, 3").bounds(),
        "depends on the budget; call bind(total_steps) before asking",
    ),
    (lambda: linear("abc", 0), "In the schedule 'abc', character 1: 'abc' stands where a value is wanted."),
    (lambda: linear(None, 0), "The start is None; it must be a finite number."),
    (lambda: linear(1, 0, over="5x"), "'5x' has the unknown unit 'x'; known: k, M, B, %."),
    (
        lambda: linear(1, 0, over=[1]),
        "[1] is no position; give a number of env steps, or a text such as '500k' or '20%'.",
    ),
    (lambda: exponential(1, 0, over=5), "an exponential can neither reach 0 nor change sign"),
    (lambda: polynomial(1, 0, -2, over=5), "Phase 1 has the power -2; it must be above 0."),
    (lambda: cosine(1, 0, over=5, exponent=0), "Phase 1 has the power 0; it must be above 0."),
    (lambda: repeat(linear(1, 0), 0), "A schedule cannot repeat 0 times; repeat it 1 or more whole times."),
    (lambda: repeat(constant(1), 3), "'1' has no end, so it cannot repeat; let its last phase move, over a length."),
    (lambda: warmup(0, linear(1, 0)), "The warm-up is 0 long; it must be above 0."),
    (lambda: warmup("5%", schedule(lambda step: 1.0)), "The warm-up of a function must be in env steps"),
    (
        lambda: join([constant(1)], [5]),
        "join was given 1 schedules and 1 boundaries; n schedules have n - 1 boundaries",
    ),
    (lambda: join([constant(1), linear(1, 0)], [5]), "Schedule 2 of a join is Schedule('1 -> 0'); join takes bound"),
    (lambda: join([constant(1)] * 3, [5, 5]), "The boundaries of a join are [5, 5]; they must grow."),
    (lambda: schedule(lambda step: "x")(0), "gave 'x' at step 0; it must give one number."),
    (
        lambda: schedule(lambda step: 1 / (step - 5) if step != 5 else np.nan)(5),
        "gave nan at step 5; it must be finite",
    ),
    (lambda: schedule(lambda step: 1.0)(-2), "A schedule was called with step -2;"),
    (lambda: schedule(lambda step: 1.0).bounds(), "depend on the budget; call bind(total_steps) first."),
    (lambda: target_entropy(float("nan")), "TargetEntropy was given target=nan; it must be finite."),
    (lambda: adaptive_kl(3e-4, target=-1), "AdaptiveKL was given target=-1; it must be above 0."),
    (lambda: plateau(0.03, factor=-1), "Plateau was given factor=-1; it must be above 0."),
    (
        lambda: plateau(0.03).update(plateau(0.03).init(), {"episode/returns": 1.0}),
        "looks at the metric 'episode/return', which is not measured; did you mean 'episode/returns'?",
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
