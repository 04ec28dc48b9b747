"""Minibatches hold what they should, and random draws follow their distribution (chi-square, fixed seeds)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from lehr.errors import InputError
from lehr.maths import minibatches as module
from lehr.maths.minibatches import (
    MOST_PACKED,
    MinibatchSource,
    _packed_argsort,
    permutation,
    priorities,
    prioritised,
    prioritised_draws,
    shuffled_epochs,
    take,
)
from tests.algorithms.rollouts import inclusion

PRIORITIES = jnp.array([0.5, 4.0, 1.0, 2.0, 3.0])
LEAST_P = 1e-3
"""The seeds are fixed, so a right sampler passes always; a wrong one falls below by many orders of magnitude."""


def rollout() -> dict[str, jax.Array]:
    """T = 4, N = 6; every entry says which step of which environment it is."""
    time, environment = jnp.meshgrid(jnp.arange(4), jnp.arange(6), indexing="ij")
    return {"time": time, "pair": jnp.stack([time, environment], axis=-1)}


def probabilities(exponent: float) -> np.ndarray:
    powers = np.asarray(PRIORITIES, np.float64) ** exponent
    return powers / powers.sum()


def draw(exponent=0.7, beta=0.4, *, count=20_000, size=3, replace=False, seed=0, values=PRIORITIES):
    @jax.jit
    def sample(key, values, exponent, beta):
        draws = prioritised_draws(key, len(values), count, replace)
        return jax.vmap(lambda one: prioritised(one, values, exponent, beta, size))(draws)

    return tuple(map(np.asarray, sample(jax.random.key(seed), values, exponent, beta)))


def minibatches(kind, count, epochs=1):
    """The data of all minibatches of a source, stacked; with the carry of each, which names its segments."""
    source = MinibatchSource(kind, rollout(), jnp.arange(6), epochs, count, jax.random.key(0))
    drawn, _ = source.draws()
    taken = [source.take(indices, ()) for indices in drawn]
    assert all(one.weights is None for one in taken)
    return jax.tree.map(lambda *parts: jnp.stack(parts), *(one.data for one in taken)), [one.carry for one in taken]


def test_flat_minibatches_hold_every_step_once():
    batches, carries = minibatches("flat", count=3)
    assert all(carry.shape == (6,) for carry in carries)
    assert batches["time"].shape == (3, 8)
    assert batches["pair"].shape == (3, 8, 2)
    np.testing.assert_array_equal(batches["pair"][..., 0], batches["time"])
    pairs = batches["pair"].reshape(-1, 2).tolist()
    assert sorted(pairs) == [[t, i] for t in range(4) for i in range(6)]
    assert pairs != sorted(pairs)


@pytest.mark.parametrize("kind", ["flat", "segments"])
def test_minibatches_that_are_gathered_ahead_are_the_same(kind):
    data = rollout() | {
        "image": jnp.arange(24, dtype=jnp.uint8).reshape(4, 6),
        "flag": jnp.arange(24).reshape(4, 6) % 3 > 0,
    }

    def doubled(data):
        return data | {"pair": 2 * data["pair"], "sum": jnp.sum(data["time"]) + jnp.zeros_like(data["time"])}

    def taken(ahead):
        given = data, jnp.arange(6), 2, 3, jax.random.key(0), False, doubled, ahead
        source = MinibatchSource(kind, *given)
        drawn, _ = source.draws()
        steps = [jax.tree.map(lambda leaf, step=step: leaf[step], drawn) for step in range(6)]
        return [source.take(one, ()) for one in steps]

    for found, expected in zip(taken(True), taken(False), strict=True):
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def test_segments_stay_whole_and_in_order():
    batches, carries = minibatches("segments", count=2)
    assert batches["pair"].shape == (2, 4, 3, 2)
    np.testing.assert_array_equal(batches["time"], np.arange(4)[None, :, None] * np.ones((2, 1, 3)))
    environments = np.asarray(batches["pair"][..., 1])
    assert (environments == environments[:, :1]).all()
    assert sorted(environments[:, 0].ravel().tolist()) == list(range(6))
    np.testing.assert_array_equal(environments[:, 0], np.stack(carries), err_msg="each has the memory it began with")


def test_every_epoch_has_an_order_of_its_own():
    batches, _ = minibatches("segments", count=2, epochs=2)
    first, second = np.asarray(batches["pair"][:, 0, :, 1]).reshape(2, 6)
    assert sorted(first) == sorted(second) == list(range(6))
    assert first.tolist() != second.tolist()
    orders = shuffled_epochs(jax.random.split(jax.random.key(0))[0], 6, count=2, epochs=2)
    np.testing.assert_array_equal(take(rollout(), orders[1], axis=1)["pair"], batches["pair"][1])


def test_every_permutation_is_equally_likely():
    orders = jax.vmap(lambda key: permutation(key, 4))(jax.random.split(jax.random.key(0), 24_000))
    _, counts = np.unique(np.asarray(orders), axis=0, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > LEAST_P


def test_a_long_permutation_mixes_from_end_to_end():
    order = np.asarray(permutation(jax.random.key(0), 4096))
    np.testing.assert_array_equal(np.sort(order), np.arange(4096))
    assert abs(np.corrcoef(order, np.arange(4096))[0, 1]) < 4 / np.sqrt(4096)
    # The ascents of a uniform order have mean (n − 1) / 2 and variance (n + 1) / 12; ties would add to them.
    assert abs((np.diff(order) > 0).sum() - 4095 / 2) < 4 * np.sqrt(4097 / 12)


@pytest.mark.parametrize("length", [1, 2, 5, 128, 1000, 8192, MOST_PACKED, MOST_PACKED + 1])
def test_a_cpu_sorts_faster_into_the_same_order(monkeypatch, length):
    found = permutation(jax.random.key(length), length)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    np.testing.assert_array_equal(found, permutation(jax.random.key(length), length))


@pytest.mark.parametrize("values", [1, 2, 50, 2**32])
def test_keys_that_are_alike_keep_their_order(values):
    keys = np.random.default_rng(0).integers(0, values, (3, 500), np.uint32)
    found = jax.vmap(_packed_argsort)(jnp.asarray(keys))
    np.testing.assert_array_equal(found, np.argsort(keys, axis=1, kind="stable"))


@pytest.mark.parametrize("count", [0, 5])
def test_minibatches_must_be_equal(count):
    with pytest.raises(
        InputError, match=f"24 samples cannot be split into {count} equal minibatches; choose a divisor"
    ):
        MinibatchSource("flat", rollout(), (), 1, count, jax.random.key(0)).draws()


def test_priorities_sum_the_size_of_advantages():
    advantages = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    np.testing.assert_allclose(priorities(jnp.asarray(advantages)), np.abs(advantages).sum(axis=0), rtol=1e-6)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 2.0])
def test_draws_with_replacement_follow_the_priorities(exponent):
    indices, _ = draw(exponent, replace=True)
    counts = np.bincount(indices.ravel(), minlength=5)
    assert stats.chisquare(counts, probabilities(exponent) * indices.size).pvalue > LEAST_P
    pairs = np.bincount(indices[:, 0] * 5 + indices[:, 1], minlength=25)
    independent = np.outer(probabilities(exponent), probabilities(exponent)).ravel()
    assert stats.chisquare(pairs, independent * len(indices)).pvalue > LEAST_P


@pytest.mark.parametrize("size", [1, 3, 4, 5])
@pytest.mark.parametrize("exponent", [0.0, 0.7, 2.0])
def test_draws_without_replacement_follow_their_inclusion_probabilities(exponent, size):
    indices, _ = draw(exponent, size=size)
    assert (np.diff(np.sort(indices, axis=1), axis=1) > 0).all(), "a segment is drawn twice"
    included = np.bincount(indices.ravel(), minlength=5) / len(indices)
    expected = inclusion(probabilities(exponent), size)
    np.testing.assert_allclose(included, expected, atol=4 * 0.5 / np.sqrt(len(indices)))
    assert (included[expected == 1] == 1).all()


def test_equal_segments_are_drawn_in_all_combinations():
    indices, weights = draw(0.0, 1.0, size=3)
    drawn, counts = np.unique(np.sort(indices, axis=1), axis=0, return_counts=True)
    assert len(drawn) == 10
    assert stats.chisquare(counts).pvalue > LEAST_P
    np.testing.assert_allclose(weights, 1.0, rtol=1e-6)


def test_rare_segments_are_drawn_equally_often():
    """At P = 6e-8 they lie closer than the float32 numbers below 1: such a CDF would draw but half of them, twice."""
    values = jnp.zeros(20_000).at[0].set(1.0)
    indices, _ = draw(1.2, count=64, size=2**14, replace=True, values=values)
    rare = indices[indices > 0]
    probability = 1e-6**1.2 / (1 + 19_999 * 1e-6**1.2)
    assert stats.binomtest(len(rare), indices.size, 19_999 * probability).pvalue > LEAST_P
    counts = np.bincount(rare, minlength=20_000)
    pairs, expected = (counts * (counts - 1)).sum() / 2, len(rare) * (len(rare) - 1) / 2 / 19_999
    assert abs(pairs - expected) < 4 * np.sqrt(expected)


@pytest.mark.parametrize("replace", [True, False])
def test_weights_are_the_plain_power(replace):
    indices, weights = draw(0.7, 0.4, count=10, replace=replace)
    np.testing.assert_allclose(weights, (5 * probabilities(0.7)[indices]) ** -0.4, rtol=1e-5)
    np.testing.assert_array_equal(draw(0.7, 0.0, count=10, replace=replace)[1], 1.0)


@pytest.mark.parametrize(
    ("segments", "size", "replace"),
    [(5, 3, True), (5, 3, False), (8, 8, False), (8, 7, False), (8, 5, False), (32, 4, False)],
)
def test_full_weights_make_the_mean_unbiased(segments, size, replace):
    """Against the mean over all segments, also where a minibatch is most or all of them."""
    rng = np.random.default_rng(segments)
    values = rng.exponential(size=segments) + 0.1
    x = values + rng.normal(size=segments)
    indices, weights = draw(1.0, 1.0, size=size, replace=replace, values=jnp.float32(values))
    estimates = (weights * x[indices]).mean(axis=1)
    error = estimates.std() / np.sqrt(len(estimates)) + 1e-6
    assert abs(estimates.mean() - x.mean()) < 4 * error
    if not replace:
        p = values / values.sum()
        np.testing.assert_allclose(weights, (size / segments / inclusion(p, size))[indices], rtol=1e-4)
        plain = (((segments * p[indices]) ** -1) * x[indices]).mean()
        assert abs(plain - x.mean()) > 4 * error or (size * p < 1).all(), "which the plain power is not"


def test_weights_of_all_segments_are_one():
    """Whatever their priorities and the exponent: nothing was left out that the others would have to stand for."""
    np.testing.assert_array_equal(draw(0.8, 0.6, size=5, count=10)[1], 1.0)


@pytest.mark.parametrize("exponent", [0.4, 1.0])
def test_weights_of_a_small_share_are_the_plain_power(exponent):
    values = np.random.default_rng(0).uniform(0.5, 2, size=64)
    indices, weights = draw(1.0, exponent, size=8, count=10, values=jnp.float32(values))
    np.testing.assert_allclose(weights, (64 * values / values.sum())[indices] ** -exponent, rtol=1e-4)


@pytest.mark.parametrize("replace", [True, False])
def test_priorities_of_zero_are_drawn_uniformly(replace):
    indices, weights = draw(values=jnp.zeros(5), replace=replace)
    assert stats.chisquare(np.bincount(indices.ravel(), minlength=5)).pvalue > LEAST_P
    np.testing.assert_allclose(weights, 1.0, rtol=1e-6)


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("values", [[0.0, 0.0, 7.0], [1e-30, 1e-38, 1e-30], [1e30, 3e38, 0.0]])
def test_extreme_priorities_give_finite_weights(values, replace):
    indices, weights = draw(1.0, 1.0, count=50, size=3, values=jnp.array(values), replace=replace)
    assert np.isfinite(weights).all()
    assert ((indices >= 0) & (indices < 3)).all()
    if not replace:
        assert (np.sort(indices, axis=1) == np.arange(3)).all()


def test_minibatches_are_drawn_apart_from_each_other():
    indices, _ = draw(0.0, count=20_000, size=1)
    pairs = np.bincount(indices[:-1:2, 0] * 5 + indices[1::2, 0], minlength=25)
    assert stats.chisquare(pairs).pvalue > LEAST_P


def test_exponents_are_numbers_of_the_program():
    """Other exponents compile nothing anew, and members of a population may differ in them."""
    traces = []
    first = jax.tree.map(lambda leaf: leaf[0], prioritised_draws(jax.random.key(0), len(PRIORITIES), 1, False))

    @jax.jit
    def sample(exponent, beta):
        traces.append(None)
        return prioritised(first, PRIORITIES, exponent, beta, 3)

    alone = [sample(jnp.float32(exponent), jnp.float32(beta)) for exponent, beta in ((0.2, 1.0), (0.9, 0.5))]
    assert len(traces) == 1
    indices, weights = jax.vmap(sample)(jnp.array([0.2, 0.9]), jnp.array([1.0, 0.5]))
    for member in range(2):
        np.testing.assert_array_equal(indices[member], alone[member][0])
        np.testing.assert_allclose(weights[member], alone[member][1], rtol=1e-6)


def test_more_segments_than_there_are_need_replacement():
    with pytest.raises(InputError, match="Cannot draw 6 of 5 segments without replacement; draw fewer"):
        draw(size=6, count=1)
    assert draw(size=6, count=1, replace=True)[0].shape == (1, 6)


def test_long_orders_that_a_gpu_sorts_one_by_one_are_the_same(monkeypatch):
    key, expected = jax.random.key(3), module.shuffled_epochs(jax.random.key(3), 40, 4, 3)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(module, "LEAST_ALONE", 40)
    text = str(jax.make_jaxpr(lambda key: module.shuffled_epochs(key, 40, 4, 3))(key))
    assert text.count(" sort[") == 3
    np.testing.assert_array_equal(module.shuffled_epochs(key, 40, 4, 3), expected)
    monkeypatch.setattr(module, "MOST_ALONE", 2)
    text = str(jax.make_jaxpr(lambda key: module.shuffled_epochs(key, 40, 4, 3))(key))
    assert text.count(" sort[") == 1
