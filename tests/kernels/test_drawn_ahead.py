"""Loops whose random numbers are drawn ahead: the same results as `jax.lax.scan`, with no key left inside."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr import kernels
from lehr.acting.rollout import collect
from lehr.algorithms import ppo
from lehr.kernels import drawn_ahead
from lehr.kernels.row_program import Unsupported
from lehr.networks import NetworkConfig
from lehr.training.program import assemble

STEPS = 5
KEYS = jax.random.split(jax.random.key(0), STEPS), jax.random.split(jax.random.key(1), (STEPS, 3))


@pytest.fixture(autouse=True)
def _from_the_start(monkeypatch):
    monkeypatch.delenv("LEHR_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "_warned", set())


def walk(scale):
    """A step with noise, resets, a part that depends on outer values, and one that follows from the keys alone."""

    def step(carried, keys):
        place, count = carried
        key, env_keys = keys
        fresh = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (2,)))(env_keys)
        noise = jax.random.normal(key, (3, 2)) * scale
        choice = jax.random.categorical(jax.random.fold_in(key, 7), place)
        place = jnp.where((place.sum(-1) > 1)[:, None], fresh, place + noise)
        return (place, count + choice), {"place": place, "fresh": fresh, "noise": jax.random.bits(key)}

    return step


START = jnp.zeros((3, 2)), jnp.zeros(3, jnp.int32)


def inside(function, *arguments):
    """The primitives in the body of the loop of a function."""
    names = []

    def go_through(jaxpr, within):
        for equation in jaxpr.eqns:
            if within:
                names.append(equation.primitive.name)
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    go_through(inner, within or equation.primitive.name == "scan")

    go_through(jax.make_jaxpr(function)(*arguments).jaxpr, False)
    return names


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
    assert [leaf.dtype for leaf in jax.tree.leaves(found)] == [leaf.dtype for leaf in jax.tree.leaves(expected)]


def test_results_are_those_of_a_plain_scan():
    def run(scan, scale):
        return scan(walk(scale), START, KEYS)

    found, expected = (jax.jit(run, static_argnums=0)(scan, 0.5) for scan in (drawn_ahead.scan, jax.lax.scan))
    assert_equal(found, expected)
    np.testing.assert_array_equal(found[1]["noise"], expected[1]["noise"])


def test_nothing_random_is_left_in_the_loop():
    def run(scan):
        return inside(lambda scale: scan(walk(scale), START, KEYS), 0.5)

    left, before = run(drawn_ahead.scan), run(jax.lax.scan)
    assert any(name.startswith("random") for name in before)
    assert not any(name.startswith("random") for name in left)
    assert "argmax" in left  # it depends on the carry


def test_a_key_that_something_else_uses_stays_a_row():
    def step(total, key):
        # A loop is not moved, so it gets the key itself.
        drawn = jax.lax.fori_loop(0, 3, lambda i, x: x + jax.random.uniform(jax.random.fold_in(key, i)), 0.0)
        return total + drawn * jax.random.uniform(key), drawn

    assert_equal(drawn_ahead.scan(step, jnp.float32(0), KEYS[0], unroll=2), jax.lax.scan(step, jnp.float32(0), KEYS[0]))


def test_members_of_a_population_draw_their_own():
    keys = jax.vmap(lambda key: jax.random.split(key, STEPS))(jax.random.split(jax.random.key(2), 4))

    def run(scan, keys):
        return scan(lambda total, key: (total + jax.random.normal(key), total), jnp.float32(0), keys)[0]

    found, expected = (
        jax.vmap(lambda keys, scan=scan: run(scan, keys))(keys) for scan in (drawn_ahead.scan, jax.lax.scan)
    )
    assert len(set(found.tolist())) == 4
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_what_is_too_large_stays_in_the_loop(monkeypatch):
    monkeypatch.setattr(drawn_ahead, "MOST_BYTES", 4 * STEPS * (3 * 2 + 3 * 2 + 3 * 2 + 1) - 1)
    with pytest.raises(Unsupported, match="bytes"):
        drawn_ahead.scan(walk(0.5), START, KEYS)
    with kernels.together(2):
        monkeypatch.setattr(drawn_ahead, "MOST_BYTES", 4 * STEPS * (3 * 2 + 3 * 2 + 3 * 2 + 1))
        with pytest.raises(Unsupported, match="bytes"):
            drawn_ahead.scan(walk(0.5), START, KEYS)
    assert_equal(kernels.scan(walk(0.5), START, KEYS), jax.lax.scan(walk(0.5), START, KEYS))


def test_a_step_that_draws_nothing_stays_as_it_is():
    def step(total, key):
        return total + 1, key

    with pytest.raises(Unsupported, match="nothing"):
        drawn_ahead.scan(step, jnp.int32(0), KEYS[0])
    assert kernels.scan(step, jnp.int32(0), KEYS[0])[0] == STEPS


def test_side_effects_stay_in_their_order():
    seen = []

    def step(total, key):
        jax.debug.callback(lambda x: seen.append(int(x)), total, ordered=True)
        return total + 1, jax.random.uniform(key)

    jax.block_until_ready(kernels.scan(step, jnp.int32(0), KEYS[0]))
    jax.effects_barrier()
    assert seen == list(range(STEPS))


def test_a_failure_falls_back_to_a_plain_scan_with_one_warning(monkeypatch, caplog):
    def fail(*arguments):
        raise RuntimeError("another JAX")

    monkeypatch.setattr(drawn_ahead, "scan", fail)
    with caplog.at_level(logging.WARNING, "lehr"):
        for _ in range(2):
            assert_equal(kernels.scan(walk(0.5), START, KEYS), jax.lax.scan(walk(0.5), START, KEYS))
    assert [record.message for record in caplog.records] == [
        "The kernel drawn_ahead does not work here (RuntimeError: another JAX); using plain JAX instead, with the same "
        "results. Set LEHR_KERNELS=no-drawn_ahead to turn the kernel off and hide this warning."
    ]


def test_only_a_cpu_draws_ahead(monkeypatch):
    assert kernels.is_chosen("drawn_ahead", START, KEYS)
    assert not kernels.is_chosen("drawn_ahead", START, (jnp.zeros(3),))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not kernels.is_chosen("drawn_ahead", START, KEYS)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_rollout_is_the_same(monkeypatch, env):
    config = ppo.Config(num_envs=4, horizon=32, minibatches=2, normalise_observations=False)
    program, state = assemble("ppo", env, config, NetworkConfig(hidden_sizes=(8, 8)), 10**6)

    def rollout():
        return jax.jit(
            lambda key: collect(program.env, program.algorithm, state.acting, state.actor, (), 32, key, program.needs)
        )(jax.random.key(3)).rollout

    ahead = rollout()
    monkeypatch.setenv("LEHR_KERNELS", "no-drawn_ahead")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ahead, rollout())
