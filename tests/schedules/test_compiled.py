"""Schedules inside compiled programs: traces, stacks, precision, exact clocks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lehr.errors import InputError
from lehr.schedules import Schedule, constant, env_steps, linear, parse, schedule, stack
from lehr.schedules.steps import split

TEXTS = [
    "0.01",
    "0.03 -> 0.001",
    "0.03 -> 0.001 cosine",
    "0.03 -> 0 polynomial(2)",
    "0.03 -> 0.001 polynomial(0.5)",
    "0.03 -> 0.001 exponential",
    "1e-6 -> 1 exponential",
    "warmup 5%, 0.03 -> 0.001 cosine(2)",
    "0.03 until 20%, 0.03 -> 0.001 exponential until 80%",
    "0.03 -> 0.003 cosine repeat 7",
    "0.1 at 0, 0.05 at 30%, 0.01 at 70%",
    "0.1 at 0, 0.05 at 30%, 0.01 at 70% step",
    "1 -> -1 cosine over 90% until 35%, 0.2",
]


def population(count, total):
    """The texts above, then random single curves."""
    random = np.random.default_rng(0)
    members = [parse(text).bind(total) for text in TEXTS]
    while len(members) < count:
        start, end = (float(number) for number in 10 ** random.uniform(-4, 0, 2))
        shape, length = random.choice(["linear", "cosine", "exponential"]), random.integers(1, total)
        members.append(parse(f"{start} -> {end} {shape} over {length}"))
    return members[:count]


def test_256_mixed_schedules_are_one_program_and_each_equals_itself_alone_bit_for_bit(count_traces):
    members = population(256, 1_000_000)
    assert len({len(member.phases) for member in members}) > 2
    together = count_traces(lambda stacked, step: jax.vmap(lambda member: member(step))(stacked))
    compiled = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})  # as users have it
    evaluate_all, evaluate_one = compiled(together), compiled(lambda member, step: member(step))
    stacked = stack(members)
    for step in (0, 1, 123_456, 349_999, 350_000, 777_777, 1_000_000, 5_000_000):
        values = np.asarray(evaluate_all(stacked, step))
        alone = np.array([evaluate_one(member, step) for member in members])
        assert values.dtype == alone.dtype == np.float32
        np.testing.assert_array_equal(values, alone)
    assert together.traces == 1


def test_changing_the_numbers_and_even_the_shape_does_not_retrace(count_traces):
    evaluate = count_traces(lambda member, step: member(step))
    compiled = jax.jit(evaluate)
    for text in (
        "0.03 -> 0.001 over 10",
        "1 -> 2 over 99 ",
        "3 -> 4 cosine(2) over 1M",
        "5 -> 6 exponential over 7",
        "8",
    ):
        member = parse(text)
        assert compiled(member, 5) == pytest.approx(member(5), rel=1e-6)
    assert evaluate.traces == 1


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("total", [10**11, 10**9, 10**6])
def test_float32_is_within_1e_6_of_float64_everywhere(text, total):
    member = parse(text).bind(total)
    per_update = 2**10
    last = total // per_update
    updates = np.unique(
        np.concatenate([np.linspace(0, last * 1.1, 4001), last * 0.35 + np.arange(-4, 4)]).astype(np.int64)
    )
    exact = member((updates * per_update).astype(float))
    traced = jax.jit(jax.vmap(lambda update: member(env_steps(update, per_update))))(jnp.asarray(updates, jnp.uint32))
    largest = np.abs(member.bounds()).max()
    np.testing.assert_allclose(np.asarray(traced, float), exact, rtol=1e-6, atol=1e-6 * largest)
    assert np.abs(traced - exact).max() < 1e-6 * max(largest, 1)


def test_a_short_phase_late_in_a_long_run_stays_exact():
    """One float32 counts in steps of 8192 at 10^11: the phase would have 12 values. Two count in ones."""
    begin, length = 99_900_000_007, 100_000
    member = linear(1.0, 0.0, over=length, begin=begin)
    traced = jax.jit(lambda step: member(step))
    for step in range(begin - 500, begin + length + 1000, 997):
        assert float(traced(split(step))) == pytest.approx(member(step), abs=1e-6)


@pytest.mark.parametrize("per_update", [1, 7, 2048, 65_536 * 64, 2**31 + 12345])
def test_the_clock_counts_exactly_beyond_32_bits(per_update):
    updates = np.array([0, 1, 2, 1000, 65_535, 65_536, 2**24 + 1, 2**31 - 1], np.uint64)
    updates = updates[updates.astype(float) * per_update < 2**48]
    high, low = jax.jit(lambda count: env_steps(count, per_update))(updates.astype(np.uint32))
    counted = np.asarray(high).astype(np.uint64) + np.asarray(low).astype(np.uint64)
    np.testing.assert_array_equal(counted, updates * np.uint64(per_update))


def test_integer_steps_are_exact_where_float32_is_not():
    member = linear(0.0, 1.0, over=16, begin=2**24)
    values = [float(jax.jit(member)(jnp.int32(2**24 + step))) for step in range(17)]
    np.testing.assert_allclose(values, np.arange(17) / 16, rtol=1e-6)


def test_under_x64_the_value_is_float64():
    member = parse("0.03 -> 0.001 cosine").bind(10**6)
    with jax.enable_x64(True):
        value = jax.jit(member)(jnp.float64(123_456.5))
        assert value.dtype == jnp.float64
        assert float(value) == pytest.approx(member(123_456.5), rel=1e-14)


def test_a_batch_of_steps_gives_a_batch_of_values():
    member = parse("0.03 -> 0.001 cosine").bind(100)
    steps = np.arange(12).reshape(3, 4)
    np.testing.assert_allclose(member(jnp.asarray(steps)), member(steps), rtol=1e-6)


def test_a_function_works_where_a_schedule_does():
    fn = optax.cosine_decay_schedule(0.03, 1000, alpha=0.1)
    ours, theirs = schedule("0.03 -> 0.003 cosine", 1000), schedule(fn, 1000)
    assert theirs.is_bound
    for step in (0, 10, 500, 1000, 2000):
        assert theirs(step) == pytest.approx(ours(step), rel=1e-5)
        for traced in (jnp.int32(step), env_steps(step, 1)):
            assert float(jax.jit(lambda m, s: m(s))(theirs, traced)) == pytest.approx(ours(step), rel=1e-5)
        assert float(theirs.value(theirs.init(), step)) == pytest.approx(ours(step), rel=1e-5)
    np.testing.assert_allclose(theirs(np.arange(0, 1000, 100)), ours(np.arange(0, 1000, 100)), rtol=1e-5)
    assert theirs.bounds() == pytest.approx((0.003, 0.03), rel=1e-5)
    assert isinstance(theirs(3), float)


def test_a_schedule_holds_no_device_arrays_and_numpy_answers():
    member = parse("0.03 -> 0.001 cosine").bind(1000)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(member))
    assert type(member(10)) is float
    assert type(member(np.int64(10))) is float
    assert type(member(np.arange(3))) is np.ndarray


def test_a_schedule_that_has_been_on_a_device_still_answers_on_the_host():
    member = parse("0.03 -> 0.001 cosine").bind(10**11)
    back = jax.tree.map(jnp.asarray, member)
    assert back(10**10) == pytest.approx(member(10**10), rel=1e-6)


def test_stack_refuses_what_it_cannot_hold():
    with pytest.raises(InputError, match="functions cannot be stacked, so write it as phases"):
        stack([constant(1), schedule(lambda step: step)])
    with pytest.raises(InputError, match="is not bound; call bind"):
        stack([constant(1), linear(1, 0)])
    with pytest.raises(InputError, match="no schedules"):
        stack([])
    with pytest.raises(InputError, match="all members of a stack must have the same type"):
        stack([constant(1), schedule("auto(target_entropy=0.5)")])


def test_a_stack_called_as_if_it_were_one_schedule_says_how_to_call_it():
    stacked = stack([constant(1), constant(2)])
    for step in (5, jnp.int32(5)):
        with pytest.raises(InputError, match=r"stack of 2 schedules.*jax\.vmap"):
            stacked(step)


def test_members_of_a_stack_come_back_equal():
    members = population(22, 10**6)
    stacked = stack(members)
    for index, member in enumerate(members):
        assert jax.tree.map(lambda leaf, index=index: leaf[index], stacked) == member


def test_printing_a_schedule_that_is_being_traced_does_not_fail():
    shown = []
    jax.jit(lambda member: shown.append(repr(member)))(constant(1.0))
    assert shown[0].startswith("Schedule(<")
    assert isinstance(constant(1.0), Schedule)
