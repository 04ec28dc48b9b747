"""Loops of gradient steps with parts of them before and after: the same results as `jax.lax.scan`, and less inside."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from lehr import kernels
from lehr.algorithms import ppo
from lehr.kernels import steps_ahead
from lehr.kernels.equations import scan_counts
from lehr.kernels.row_program import Unsupported
from lehr.maths import across
from tests.algorithms.rollouts import COEF, STEPS, learned_from, made_up, network_of
from tests.small import quick_first

LIMITED = {**COEF, "max_grad_norm": 0.5}
SIZE = 4


@pytest.fixture
def able(monkeypatch):
    """As on a GPU."""
    monkeypatch.setitem(kernels.KERNELS, "steps_ahead", replace(kernels.KERNELS["steps_ahead"], is_able=lambda: True))


def rows(length=5):
    return {
        "x": jnp.asarray(np.random.default_rng(0).normal(size=(length, SIZE)), jnp.float32),
        "key": jax.random.split(jax.random.key(0), length),
        "count": jnp.arange(length),
    }


def many_kinds(coefficient):
    """A step with results of every kind: before, in and after the loop, of several types, and constants."""

    def step(carry, row):
        vector, count = carry
        rate = jnp.exp(coefficient)  # before
        noise = jax.random.normal(row["key"], (SIZE,))
        vector = vector + rate * jnp.tanh(row["x"] + vector) + 0.1 * noise
        smallest, total = jnp.min(vector), jnp.sum(vector)
        mixed = jnp.log1p(jnp.square(total)) * jnp.outer(vector, vector)  # after, from what is small
        results = {
            "after": jnp.log1p(jnp.square(total)) * rate,
            "mixed": jnp.sum(mixed),
            "vector": vector,
            "bool": smallest > 0,
            "int": count * row["count"],
            "constant": jnp.float32(3.0),
            "before": rate,
            "key": row["key"],
        }
        return (vector, count + 1), results

    return step


def assert_same(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(found) == jax.tree.structure(expected)


@pytest.mark.parametrize(
    ("most", "length"), [(1, 5), (4, 5), (100, 5), (100, 8)], ids=["numbers", "vectors", "all", "four at a time"]
)
def test_results_are_those_of_a_plain_scan(monkeypatch, most, length):
    monkeypatch.setattr(steps_ahead, "MOST_STORED", most)
    start = jnp.zeros(SIZE), jnp.int32(0)

    def run(scan, coefficient):
        return scan(many_kinds(coefficient), start, rows(length))

    for coefficients, transform in ((jnp.float32(0.3), lambda f: f), (jnp.array([0.3, -1.0]), jax.vmap)):
        found = jax.jit(transform(lambda one: run(steps_ahead.scan, one)))(coefficients)
        assert_same(found, jax.jit(transform(lambda one: run(jax.lax.scan, one)))(coefficients))


def primitives(jaxpr):
    """The names of all primitives in a program, those of programs inside of it too."""
    inside = [name for equation in jaxpr.eqns for one in jaxprs_in_params(equation.params) for name in primitives(one)]
    return [*(equation.primitive.name for equation in jaxpr.eqns), *inside]


def loop_of(function, *arguments):
    """The names of the primitives in the one loop of a program, and of those around it."""
    program = jax.make_jaxpr(function)(*arguments).jaxpr
    (loop,) = [equation for equation in program.eqns if equation.primitive.name == "scan"]
    around = [equation.primitive.name for equation in program.eqns if equation is not loop]
    return primitives(loop.params["jaxpr"].jaxpr), around


def test_the_loop_has_only_what_the_next_step_needs():
    def run(coefficient, rows):
        def step(total, x):
            return total + jnp.exp(coefficient) * x, jnp.log(total) * jnp.cos(coefficient)

        return steps_ahead.scan(step, jnp.float32(1), rows)

    inside, around = loop_of(run, jnp.float32(0.3), jnp.arange(4.0))
    assert {"exp", "log", "cos"}.isdisjoint(inside)
    assert {"exp", "log", "cos"} <= set(around)
    assert inside.count("mul") == 1


def test_each_step_stores_one_row():
    def step(total, x):
        return total + jnp.sum(x), {"mean": jnp.mean(x) ** 2, "total": jnp.sqrt(total), "sum": 2.0 * jnp.sum(x)}

    program = jax.make_jaxpr(lambda rows: steps_ahead.scan(step, jnp.float32(0), rows))(jnp.ones((3, 5)))
    (loop,) = [one for one in program.jaxpr.eqns if one.primitive.name == "scan"]
    assert len(loop.outvars) == scan_counts(loop.params)[1] + 1


@pytest.mark.parametrize(("length", "members", "unroll"), [(8, 1, 4), (6, 1, 1), (8, 2, 1)])
def test_short_steps_of_a_run_are_four_at_a_time(length, members, unroll):
    """Those of a population would need four times the memory for its minibatches."""
    with kernels.together(members):
        program = jax.make_jaxpr(lambda rows: steps_ahead.scan(lambda x, row: (x + row, ()), 0.0, rows))(
            jnp.ones(length)
        )
    (loop,) = [one for one in program.jaxpr.eqns if one.primitive.name == "scan"]
    assert loop.params["unroll"] == unroll


def test_large_arrays_stay_in_the_loop(monkeypatch):
    def step(total, x):
        wide = jnp.broadcast_to(x[:, None], (SIZE, 8)) * total
        return total + jnp.sum(x), jnp.sqrt(jnp.sum(jnp.sin(wide) * jnp.tanh(total)))

    def inside(most, most_bytes=2**24):
        monkeypatch.setattr(steps_ahead, "MOST_STORED", most)
        monkeypatch.setattr(steps_ahead, "MOST_STORED_BYTES", most_bytes)
        return set(loop_of(lambda rows: steps_ahead.scan(step, jnp.float32(1), rows), jnp.ones((3, SIZE)))[0])

    assert {"sin", "tanh", "sqrt"}.isdisjoint(inside(most=32))
    assert {"sin", "tanh"} <= inside(most=1), "tanh alone is small, but what needs it is not"
    assert {"sin", "tanh"} <= inside(most=32, most_bytes=3 * 4)
    assert "sqrt" not in inside(most=1)


def test_a_step_with_side_effects_is_refused():
    def step(total, x):
        jax.debug.callback(lambda: None)
        return total + x, total

    with pytest.raises(Unsupported, match="side effects"):
        steps_ahead.scan(step, jnp.float32(0), jnp.ones(3))


SETTINGS = {
    "flat": {"standardise_advantages": False},
    "segments": {"minibatching": "segments", "value_clip_range": 0.2},
    "windows": {"window": 3, "torso": "gru", "minibatches": 2},
    "burn-in": {"window": 2, "burn_in": 1, "torso": "lstm"},
    "vtrace": {"advantage": "vtrace", "torso": "mingru"},
    "prioritised": {"minibatching": "prioritised", "priority_exponent": 0.6},
    "in parts": {"accumulate": 2},
    "a target": {"target_kl": 1e-3, "learning_rate": 0.02},
    "a penalty": {"kl_coef": 0.3},
}


def learned(name, masked):
    settings = {"horizon": STEPS, "epochs": 2, "minibatches": 2, "optimiser": "adam"} | SETTINGS[name]
    torso = settings.pop("torso", "mlp")
    algorithm = ppo.Algorithm(ppo.Config(**settings), network_of(torso)[0])
    rollout = made_up(torso)
    if masked:
        rollout = rollout._replace(valid=jnp.arange(rollout.reward.size).reshape(rollout.reward.shape) % 4 > 0)
    coef = LIMITED | {"importance_exponent": 0.5, "rho_clip": 1.0, "c_clip": 1.0}
    coef |= {key: value for key, value in settings.items() if isinstance(value, float)}
    return learned_from(algorithm, rollout, coef, torso, None)


@pytest.mark.parametrize("masked", quick_first([False, True]), ids=["all valid", "partly valid"])
@pytest.mark.parametrize("name", quick_first(SETTINGS, 4))
def test_an_update_is_the_same(able, monkeypatch, name, masked):
    """Everything that PPO can draw, cut, estimate and stop early."""
    scans = []
    scan = steps_ahead.scan
    monkeypatch.setattr(steps_ahead, "scan", lambda *given: (scans.append(1), scan(*given))[1])
    found = learned(name, masked)
    assert scans == [1]
    monkeypatch.setenv("LEHR_KERNELS", "no-steps_ahead")
    expected = learned(name, masked)
    assert scans == [1]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6), found, expected)


def test_too_much_data_and_populations_are_not_gathered_ahead(able, monkeypatch):
    data = {"obs": jnp.zeros((4, 8, 2)), "image": jnp.zeros((4, 8), jnp.uint8)}
    size = 4 * 8 * (2 * 4 + 1)
    monkeypatch.setattr(steps_ahead, "MOST_BYTES", 3 * size)
    assert kernels.gathers_ahead(data, epochs=3)
    assert not kernels.gathers_ahead(data, epochs=4)
    with kernels.together(2):
        assert not kernels.gathers_ahead(data, epochs=1)


def test_advantages_of_all_minibatches_are_standardised_over_all_devices(able):
    """As one device with the minibatches of both: in NumPy, step by step."""
    rng = np.random.default_rng(0)
    advantages = rng.normal(size=(2, 6, 4)).astype(np.float32)  # devices, steps, samples
    config = ppo.Config(epochs=1, minibatches=1, minibatching="flat")
    algorithm = ppo.Algorithm(config, network_of()[0])
    nothing = made_up()._replace(valid=())

    def standardised(own):
        return jax.vmap(lambda one: algorithm._standardised(ppo.Samples(nothing, one, one)).advantage)(own)

    found = jax.vmap(standardised, axis_name=across.AXIS)(jnp.asarray(advantages))
    whole = advantages.transpose(1, 0, 2).reshape(6, 8).astype(np.float64)
    expected = (whole - whole.mean(1, keepdims=True)) / whole.std(1, keepdims=True)
    np.testing.assert_allclose(np.asarray(found).transpose(1, 0, 2).reshape(6, 8), expected, rtol=1e-4, atol=1e-5)
