"""Every shape against optax, in float64 so that only the formulas can differ."""

import jax
import numpy as np
import optax
import pytest

from lehr.schedules import constant, cosine, exponential, join, linear, piecewise, polynomial, warmup

DRAWS = 1000


@pytest.fixture
def random():
    return np.random.default_rng(0)


def agree(ours, theirs, length, random):
    """Compare at the start, at the end, around it, far beyond it, and at random steps."""
    steps = np.concatenate([[0, 1, length - 1, length, length + 1, 3 * length], random.integers(0, 2 * length, 6)])
    steps = steps.astype(float)
    with jax.enable_x64(True):
        expected = np.broadcast_to(np.asarray(jax.vmap(theirs)(steps)), steps.shape)
        assert expected.dtype == np.float64
    # optax cancels near an end of 0, so what is nearly 0 is compared with the scale of the schedule.
    scale = np.abs(expected).max()
    np.testing.assert_allclose(ours(steps), expected, rtol=1e-6, atol=1e-12 * scale)


def draw(random):
    start, end = 10 ** random.uniform(-5, 1, 2)
    return start, end, int(random.integers(2, 10**6))


def test_linear(random):
    for _ in range(DRAWS):
        start, end, length = draw(random)
        agree(linear(start, end, length), optax.linear_schedule(start, end, length), length, random)


def test_linear_that_begins_later(random):
    for _ in range(DRAWS):
        start, end, length = draw(random)
        begin = int(random.integers(1, 10**6))
        theirs = optax.linear_schedule(start, end, length, transition_begin=begin)
        agree(linear(start, end, length, begin=begin), theirs, begin + length, random)


def test_cosine_with_alpha_and_exponent(random):
    for _ in range(DRAWS):
        start, _, length = draw(random)
        alpha, exponent = random.uniform(0, 1), random.choice([1.0, 0.5, 2.0, 3.3])
        theirs = optax.cosine_decay_schedule(start, length, alpha, exponent)
        agree(cosine(start, alpha * start, length, exponent=exponent), theirs, length, random)


def test_exponential(random):
    for _ in range(DRAWS):
        start, _, length = draw(random)
        rate, cycles = random.uniform(0.1, 1.2), int(random.integers(1, 5))
        end = start * rate**cycles
        # optax decays by `rate` every `length` steps, without end but for a bound.
        theirs = optax.exponential_decay(start, length, rate, end_value=end)
        agree(exponential(start, end, length * cycles), theirs, length * cycles, random)


def test_polynomial(random):
    for _ in range(DRAWS):
        start, end, length = draw(random)
        power = random.uniform(1, 4)  # below 1, optax's rounding of 1 - count/length grows beyond 1e-6 at the end
        theirs = optax.polynomial_schedule(start, end, power, length)
        agree(polynomial(start, end, power, length), theirs, length, random)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_piecewise_interpolation(random, shape):
    for _ in range(DRAWS):
        steps = np.cumsum(random.integers(1, 10**5, random.integers(1, 6)))
        scales = random.uniform(0.1, 2, len(steps))
        start = 10 ** random.uniform(-4, 0)
        theirs = optax.piecewise_interpolate_schedule(shape, start, dict(zip(steps.tolist(), scales, strict=True)))
        points = zip([0, *steps], start * np.cumprod([1, *scales]), strict=True)
        agree(piecewise(list(points), shape), theirs, int(steps[-1]), random)


@pytest.mark.slow
def test_warmup_cosine(random):
    for _ in range(DRAWS):
        peak, end, length = draw(random)
        ramp, exponent = int(random.integers(1, length)), random.choice([1.0, 2.0])
        theirs = optax.warmup_cosine_decay_schedule(0.0, peak, ramp, length, end, exponent)
        ours = warmup(ramp, cosine(peak, end, length - ramp, exponent=exponent))
        agree(ours, theirs, length, random)


@pytest.mark.slow
def test_join(random):
    """Schedules that the next one cuts short, and ones that hold their end until then."""
    for _ in range(DRAWS):
        (a, b, first), (c, d, second), (e, _, _) = draw(random), draw(random), draw(random)
        boundaries = np.cumsum(random.integers(1, 10**6, 2)).tolist()
        ours = join([cosine(a, b, first), polynomial(c, d, 2, second), constant(e)], boundaries)
        theirs = optax.join_schedules(
            [
                optax.cosine_decay_schedule(a, first, b / a),
                optax.polynomial_schedule(c, d, 2, second),
                optax.constant_schedule(e),
            ],
            boundaries,
        )
        agree(ours, theirs, boundaries[-1], random)
