"""Running statistics against NumPy over the whole data, at counts far beyond float32's integers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.maths.normalise import (
    RunningStatistics,
    denormalise,
    initial_scaling,
    initial_statistics,
    normalise,
    scale_rewards,
    update_statistics,
)


def count_of(stats: RunningStatistics) -> int:
    high, low = np.asarray(stats.count).tolist()
    return high * 2**32 + low


def after(count: int, mean: float, variance: float) -> RunningStatistics:
    """The statistics of `count` samples that nobody wants to draw."""
    words = jnp.array([count // 2**32, count % 2**32], jnp.uint32)
    return RunningStatistics(words, jnp.float32(mean), jnp.float32(variance))


@pytest.mark.parametrize(("offset", "spread"), [(0.0, 1.0), (1e4, 1.0), (-3.0, 1e-3)])
def test_batches_of_any_leading_axes_add_up_to_the_whole(offset, spread):
    rng = np.random.default_rng(0)
    batches = [rng.normal(offset, spread, (*leading, 3)).astype(np.float32) for leading in [(), (5,), (2, 7), (400,)]]
    stats = initial_statistics(batches[0])
    for batch in batches:
        stats = update_statistics(stats, jnp.asarray(batch))
    whole = np.concatenate([batch.reshape(-1, 3) for batch in batches]).astype(np.float64)
    assert count_of(stats) == len(whole)
    np.testing.assert_allclose(stats.mean, whole.mean(axis=0), rtol=1e-6, atol=1e-6 * spread)
    np.testing.assert_allclose(stats.variance, whole.var(axis=0), rtol=2e-3)


def test_only_floating_leaves_have_statistics():
    sample = {"speed": jnp.zeros(2), "pixels": jnp.zeros((4, 4), jnp.uint8), "level": jnp.zeros((), jnp.int32)}
    batch = {
        "speed": jnp.array([[1.0, 2.0], [3.0, 6.0]]),
        "pixels": jnp.full((2, 4, 4), 200, jnp.uint8),
        "level": jnp.array([7, 9]),
    }
    stats = update_statistics(initial_statistics(sample), batch)
    assert count_of(stats) == 2
    assert stats.mean["speed"].tolist() == [2.0, 4.0]
    assert stats.variance["speed"].tolist() == [1.0, 4.0]
    for transform in (normalise, denormalise):
        result = transform(stats, batch)
        assert jax.tree.map(lambda x: x.dtype, result) == jax.tree.map(lambda x: x.dtype, batch)
        np.testing.assert_array_equal(result["pixels"], batch["pixels"])
        np.testing.assert_array_equal(result["level"], batch["level"])
    np.testing.assert_allclose(normalise(stats, batch)["speed"], [[-1, -1], [1, 1]], rtol=1e-6)


def test_statistics_of_nothing_change_nothing():
    x = jnp.array([3.0, -4.0])
    np.testing.assert_allclose(normalise(initial_statistics(x), x), x, rtol=1e-6)


def test_normalised_values_are_clipped_and_come_back():
    stats = after(1000, mean=5.0, variance=4.0)
    x = jnp.array([-3.0, 5.0, 8.0])
    np.testing.assert_allclose(normalise(stats, x), [-4.0, 0.0, 1.5], rtol=1e-6)
    np.testing.assert_allclose(normalise(stats, x, clip=1.0), [-1.0, 0.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(denormalise(stats, normalise(stats, x)), x, rtol=1e-6)
    assert normalise(stats, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("count", [2**24, 2**32 - 3, 10**11, 10**15])
def test_the_count_neither_stalls_nor_overflows(count):
    """In float32, 10^11 + 1 is 10^11, and so is 2^24 + 1."""
    stats = after(count, 0.0, 1.0)
    step = jax.jit(update_statistics)
    for _ in range(5):
        stats = step(stats, jnp.zeros(1))
    assert count_of(stats) == count + 5
    np.testing.assert_allclose(stats.samples, count + 5, rtol=1e-6)


def test_a_batch_weighs_its_share_after_1e11_samples():
    """100 batches of 10^6 samples, of mean 1 and variance 4, on top of 10^11 of mean 0 and variance 1."""
    stats, batch = after(10**11, 0.0, 1.0), jnp.array([3.0, -1.0])
    step = jax.jit(lambda stats: update_statistics(stats, jnp.broadcast_to(batch, (500_000, 2))))
    for _ in range(100):
        stats = step(stats)
    share = 10**8 / (10**11 + 10**8)
    assert count_of(stats) == 10**11 + 10**8
    np.testing.assert_allclose(stats.mean, share, rtol=1e-3)
    np.testing.assert_allclose(stats.variance, (1 - share) + 4 * share + share * (1 - share), rtol=1e-4)


def test_the_variance_does_not_drift_over_many_updates_at_a_great_count():
    batch = jnp.array([1.0, -1.0])
    many = jax.jit(lambda stats: jax.lax.fori_loop(0, 10_000, lambda _, stats: update_statistics(stats, batch), stats))
    stats = many(after(10**11, 0.0, 1.0))
    np.testing.assert_allclose([stats.mean, stats.variance], [0.0, 1.0], atol=1e-5)


def test_a_broken_sample_spoils_nothing():
    stats = update_statistics(initial_statistics(jnp.zeros(2)), jnp.array([[1.0, 1.0], [3.0, 3.0]]))
    broken = update_statistics(stats, jnp.array([[jnp.nan, 5.0], [1.0, 5.0]]))
    assert broken.mean.tolist() == [2.0, 3.5]
    assert broken.variance[0] == 1.0
    assert update_statistics(stats, jnp.full((1, 2), jnp.inf)).mean.tolist() == [2.0, 2.0]


def test_leaves_must_agree_on_their_batch_axes():
    stats = initial_statistics((jnp.zeros(2), jnp.zeros(())))
    with pytest.raises(ValueError, match=r"batch axes \[\(3,\), \(4,\)\]; give all leaves the same batch axes"):
        update_statistics(stats, (jnp.zeros((3, 2)), jnp.zeros(4)))


def test_members_of_a_population_keep_their_own_statistics():
    samples = jnp.arange(12.0).reshape(2, 6)
    stats = jax.vmap(lambda x: update_statistics(initial_statistics(x[0]), x))(samples)
    np.testing.assert_allclose(stats.mean, samples.mean(axis=1))
    np.testing.assert_array_equal(stats.samples, 6.0)


def rewards_and_ends(steps: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(2.0, 3.0, (steps, 4)).astype(np.float32), rng.uniform(size=(steps, 4)) < 0.2


def returns_by_a_loop(rewards: np.ndarray, done: np.ndarray, discount: float) -> np.ndarray:
    running, returns = np.zeros(rewards.shape[1]), []
    for reward, end in zip(rewards, done, strict=True):
        running = discount * running + reward
        returns.append(running)
        running = np.where(end, 0.0, running)
    return np.stack(returns)


def test_rewards_are_scaled_by_the_deviation_of_the_discounted_return():
    rewards, done = rewards_and_ends(30)
    deviation = returns_by_a_loop(rewards, done, 0.9).std()
    scaling, scaled = scale_rewards(initial_scaling(4), jnp.asarray(rewards), jnp.asarray(done), 0.9)
    np.testing.assert_allclose(scaled, rewards / deviation, rtol=1e-4)
    assert count_of(scaling.statistics) == 120
    tight = scale_rewards(initial_scaling(4), jnp.asarray(rewards), jnp.asarray(done), 0.9, clip=0.5)[1]
    np.testing.assert_allclose(tight, np.clip(rewards / deviation, -0.5, 0.5), rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 6])
def test_an_episode_goes_on_in_the_next_rollout(chunk):
    rewards, done = rewards_and_ends(12)
    returns = returns_by_a_loop(rewards, done, 0.9)
    scaling, step = initial_scaling(4), jax.jit(scale_rewards)
    for start in range(0, 12, chunk):
        rows = slice(start, start + chunk)
        scaling, scaled = step(scaling, jnp.asarray(rewards[rows]), jnp.asarray(done[rows]), jnp.float32(0.9))
        expected = np.clip(rewards[rows] / np.sqrt(returns[: rows.stop].var() + 1e-8), -10.0, 10.0)
        np.testing.assert_allclose(scaled, expected, rtol=1e-4)
    np.testing.assert_allclose(scaling.returns, np.where(done[-1], 0.0, returns[-1]), rtol=1e-4)


def test_the_scaling_keeps_its_dtypes_in_double_precision_too():
    with jax.enable_x64(True):
        before = initial_scaling(2)
        rewards, done = jnp.ones((3, 2), jnp.float32), jnp.zeros((3, 2), bool)
        after, scaled = scale_rewards(before, rewards, done, jnp.float32(0.9))
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, before)
    assert scaled.dtype == jnp.float32


def test_a_broken_reward_is_seen_once_and_forgotten():
    rewards, done = (jnp.asarray(x) for x in rewards_and_ends(4))
    scaling, scaled = scale_rewards(initial_scaling(4), rewards.at[1, 2].set(jnp.nan), done, 0.9)
    without, _ = scale_rewards(initial_scaling(4), rewards.at[1, 2].set(0.0), done, 0.9)
    assert jnp.isnan(scaled).sum() == 1
    assert jnp.isnan(scaled[1, 2])
    for given, expected in zip(jax.tree.leaves(scaling), jax.tree.leaves(without), strict=True):
        np.testing.assert_array_equal(given, expected)


def test_statistics_are_a_pytree_of_arrays():
    stats = initial_statistics({"a": jnp.zeros(2)})
    leaves, structure = jax.tree.flatten(stats)
    assert [leaf.shape for leaf in leaves] == [(2,), (2,), (2,)]
    assert dataclasses.asdict(jax.tree.unflatten(structure, leaves)).keys() == {"count", "mean", "variance"}


def test_samples_that_do_not_count_change_nothing():
    rng = np.random.default_rng(3)
    batch, valid = rng.normal(3.0, 2.0, size=(6, 5, 2)).astype(np.float32), rng.random((6, 5)) < 0.6
    stats = update_statistics(initial_statistics(jnp.zeros(2)), jnp.asarray(batch), jnp.asarray(valid))
    chosen = batch[valid]
    assert float(stats.samples) == len(chosen)
    np.testing.assert_allclose(stats.mean, chosen.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats.variance, chosen.var(0), rtol=1e-5)
    same = update_statistics(stats, jnp.asarray(batch), jnp.zeros((6, 5), bool))
    np.testing.assert_array_equal(same.mean, stats.mean)
    np.testing.assert_array_equal(same.variance, stats.variance)
