"""What holds for every schedule, over random ones."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from lehr.schedules import Schedule, parse, stack
from lehr.schedules.steps import split
from tests.schedules.strategies import bound_schedules, texts, unbound_schedules

evaluate = jax.jit(lambda schedule, step: schedule(step))


evaluate_all = jax.jit(lambda schedule, steps: jax.vmap(schedule)(steps))


def five_phases(schedule):
    """The schedule, padded so that one compiled program serves all."""
    return jax.tree.map(lambda leaf: leaf[0], stack([schedule, parse("0 -> 1 over 1 repeat 5")]))


def interesting_steps(schedule):
    """The ends of all phases and their neighbours, places inside, before the first and after the last."""
    steps = [0.0]
    for phase in schedule.phases:
        begin, length = phase.begin.steps, phase.length.steps
        steps += [
            begin - 1,
            begin,
            begin + 1,
            begin + length / 3,
            begin + length - 1,
            begin + length,
            begin + length + 1,
        ]
    steps.append(2 * max(steps) + 10)
    return np.unique(np.clip(np.floor(steps), 0, None))


@given(texts())
def test_text_to_schedule_to_text_is_stable(text):
    schedule = parse(text)
    assert parse(str(schedule)) == schedule
    assert str(parse(str(schedule))) == str(schedule)


@given(bound_schedules())
def test_printed_form_of_any_schedule_parses_back_to_it(schedule):
    assert parse(str(schedule)) == schedule


@given(unbound_schedules(), st.integers(20_000, 10**12))
def test_printed_form_of_a_bound_schedule_parses_back_to_it(schedule, total):
    bound = schedule.bind(total)
    assert parse(str(bound)) == bound
    assert bound.is_bound


@given(bound_schedules())
@example(parse("0 -> 3 over 268 until 2, 0.0625"))
def test_numpy_and_traced_evaluation_agree(schedule):
    padded = five_phases(schedule)
    steps = interesting_steps(schedule)
    # Rounding is relative to the ends of a phase, also of one that is cut before it comes near its end.
    scale = max(abs(value) for phase in schedule.phases for value in (phase.start, phase.end))
    for step in steps[:12]:
        traced = float(evaluate(padded, jnp.int32(step)))
        np.testing.assert_allclose(traced, schedule(step), rtol=1e-6, atol=1e-6 * scale)


@given(bound_schedules())
def test_one_step_and_an_array_of_steps_agree(schedule):
    steps = interesting_steps(schedule)
    alone = [schedule(step) for step in steps.tolist()]
    np.testing.assert_allclose(schedule(steps), alone, rtol=1e-14, atol=1e-300)


@given(bound_schedules())
def test_bounds_bound_tightly(schedule):
    low, high = schedule.bounds()
    phases = schedule.phases
    # The last instant before the next phase cuts a curve short counts as reached, hence the steps just before.
    ends = [np.nextafter(phase.begin.steps, 0) for phase in phases[1:]]
    begins = [phase.begin.steps for phase in phases]
    steps = np.concatenate([interesting_steps(schedule), begins, ends, np.linspace(0, begins[-1] + 10**7 + 1, 500)])
    found = schedule(steps)
    scale = max(abs(low), abs(high))
    rounding = 4 * np.spacing(scale)
    assert low <= found.min() + rounding
    assert found.max() <= high + rounding
    # The instant before the end of a root is the root of a rounding of the step away from it.
    instants = [np.spacing(p.begin.steps + p.length.steps) / p.length.steps for p in phases if p.length.steps]
    apart = 1e-7 + 2 * np.sqrt(max(instants, default=0.0))
    np.testing.assert_allclose([found.min(), found.max()], [low, high], rtol=1e-7, atol=apart * scale)


@given(bound_schedules(), st.lists(st.floats(0, 1e9), min_size=8, max_size=8))
def test_a_schedule_never_leaves_the_range_of_its_phases(schedule, steps):
    ends = [value for phase in schedule.phases for value in (phase.start, phase.end)]
    found = schedule(np.array(steps))
    assert min(ends) <= found.min()
    assert found.max() <= max(ends)
    traced = evaluate_all(five_phases(schedule), jnp.array(steps, jnp.float32))
    assert np.float32(min(ends)) <= traced.min()
    assert traced.max() <= np.float32(max(ends))


@given(unbound_schedules(), st.integers(20_000, 10**9), st.integers(0, 100))
def test_bind_then_evaluate_equals_evaluate_in_shares(schedule, total, percent):
    if any(phase.begin.steps or phase.length.steps for phase in schedule.phases):
        return  # it has phases in plain steps, which are other shares of another budget
    in_shares = schedule.bind(1.0)(percent / 100)
    scale = np.abs(schedule.bounds()).max()
    np.testing.assert_allclose(schedule.bind(total)(total * percent / 100), in_shares, rtol=1e-6, atol=1e-6 * scale)


@given(unbound_schedules())
def test_bounds_of_an_unbound_schedule_are_those_of_the_bound_one(schedule):
    np.testing.assert_allclose(schedule.bounds(), schedule.bind(10**8).bounds(), rtol=1e-9)


@given(bound_schedules())
def test_flattening_and_back_gives_an_equal_schedule(schedule):
    leaves, structure = jax.tree.flatten(schedule)
    back = jax.tree.unflatten(structure, leaves)
    assert isinstance(back, Schedule)
    assert back == schedule
    assert hash(back) == hash(schedule)


@given(st.integers(0, 2**47))
def test_splitting_a_step_loses_nothing(step):
    high, low = split(step)
    assert int(high) + int(low) == step
