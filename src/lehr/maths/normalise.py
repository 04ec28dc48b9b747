"""Running mean and variance as a pytree, to normalise observations and scale rewards.

The statistics are arrays and part of a run's state: `update` merges a batch into them, `normalise` applies them.
Only floating-point leaves have statistics; others (uint8 pixels, categories, masks) are returned unchanged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from lehr.kernels import linear_recurrence
from lehr.maths import across
from lehr.types import PyTree, check_same_shape

EPSILON = 1e-8
"""Added to the variance before taking the square root, to avoid division by 0 for constant entries."""


CLIP = 10.0
"""The largest magnitude of a normalised number, by default."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunningStatistics:
    """Mean and variance of all samples so far."""

    count: jax.Array
    """uint32 `[2]`, high and low word: in a long run a float32 would stop growing and an int32 would overflow."""
    mean: PyTree
    """Like one sample, float32; a scalar 0 for leaves that are not floating-point."""
    variance: PyTree
    """Like `mean`; 1 before the first sample."""

    @property
    def samples(self) -> jax.Array:
        """float32 `[]`: the count, rounded to float32."""
        words = self.count.astype(jnp.float32)
        return words[..., 0] * 2.0**32 + words[..., 1]


def initial_statistics(sample: PyTree) -> RunningStatistics:
    """Return statistics without any samples, mean 0 and variance 1, for samples like this one (arrays or shapes).

    >>> stats = update_statistics(initial_statistics(jnp.zeros(2)), jnp.array([[1.0, 5.0], [3.0, 5.0]]))
    >>> float(stats.samples), stats.mean.tolist(), stats.variance.tolist()
    (2.0, [2.0, 5.0], [1.0, 0.0])
    """

    def fill(value: float) -> PyTree:
        return jax.tree.map(lambda x: jnp.full(x.shape if _is_floating(x) else (), value, jnp.float32), sample)

    return RunningStatistics(count=jnp.zeros(2, jnp.uint32), mean=fill(0.0), variance=fill(1.0))


def update_statistics(stats: RunningStatistics, batch: PyTree, valid: Any = ()) -> RunningStatistics:
    """Merge a batch with any leading axes, the same for every leaf (Chan et al., 1983).

    `valid`, bool with the same leading axes, marks the samples that count; `()` counts all.

        w = n_batch / (n + n_batch),  δ = mean_batch − mean
        mean ← mean + w δ
        variance ← variance + w (variance_batch − variance + (1 − w) δ²)

    Entries that would become infinite or NaN keep their old values, so that one bad sample does not ruin a run. On
    several devices, the batch is that of all of them.
    """
    leading = {
        x.shape[: x.ndim - mean.ndim]
        for x, mean in zip(jax.tree.leaves(batch), jax.tree.leaves(stats.mean), strict=True)
        if _is_floating(x)
    }
    if not leading:
        return stats
    if len(leading) > 1:
        raise ValueError(f"the leaves have batch axes {sorted(leading)}; give all leaves the same batch axes.")
    mask = None if isinstance(valid, tuple) else valid
    own: Any
    if mask is None:
        own = math.prod(leading.pop())
        size = jnp.uint32(own * across.devices())
    else:
        own = jnp.sum(mask, dtype=jnp.uint32)
        size = across.sum(own)
    low = stats.count[1] + size
    count = jnp.stack([stats.count[0] + (low < stats.count[1]), low])
    weight = size / jnp.maximum(replace(stats, count=count).samples, 1.0)

    def measure(x: jax.Array, mean: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not _is_floating(x):
            return jnp.zeros(()), jnp.zeros(())
        axes = tuple(range(x.ndim - mean.ndim))
        centred = x - jnp.expand_dims(mean, axes)
        counts = None if mask is None else mask.reshape(mask.shape + (1,) * mean.ndim)
        return jnp.mean(centred, axes, where=counts), jnp.var(centred, axes, where=counts)

    def merge(
        x: jax.Array, shift: jax.Array, spread: jax.Array, mean: jax.Array, variance: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if not _is_floating(x):
            return mean, variance
        new_mean = mean + weight * shift
        new_variance = variance + weight * (spread - variance + (1.0 - weight) * shift**2)
        finite = jnp.isfinite(new_mean) & jnp.isfinite(new_variance)
        return jnp.where(finite, new_mean, mean), jnp.where(finite, new_variance, variance)

    def both(pairs: PyTree) -> tuple[PyTree, PyTree]:
        return jax.tree.transpose(jax.tree.structure(batch), jax.tree.structure((0, 0)), pairs)

    found = across.moments(*both(jax.tree.map(measure, batch, stats.mean)), own, size)
    mean, variance = both(jax.tree.map(merge, batch, *found, stats.mean, stats.variance))
    return RunningStatistics(count, mean, variance)


def normalise(stats: RunningStatistics, x: PyTree, clip: float | jax.Array = CLIP) -> PyTree:
    """clip((x − mean) / √(variance + ε), −clip, clip), leaf by leaf, with any leading axes.

    >>> stats = update_statistics(initial_statistics(jnp.zeros(())), jnp.array([1.0, 5.0]))
    >>> normalise(stats, jnp.array([3.0, 5.0, 99.0])).tolist()
    [0.0, 1.0, 10.0]
    """
    return _map_floating(lambda x, mean, std: jnp.clip((x - mean) / std, -clip, clip), stats, x)


def denormalise(stats: RunningStatistics, x: PyTree) -> PyTree:
    """x √(variance + ε) + mean, leaf by leaf: the inverse of `normalise` where it did not clip.

    >>> stats = update_statistics(initial_statistics(jnp.zeros(())), jnp.array([1.0, 5.0]))
    >>> denormalise(stats, jnp.array([0.0, 1.0])).tolist()
    [3.0, 5.0]
    """
    return _map_floating(lambda x, mean, std: x * std + mean, stats, x)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RewardScaling:
    """Statistics of the discounted return; rewards are divided by its standard deviation, without centring."""

    returns: jax.Array
    """float32 `[N]`: R, the discounted return so far of each environment's current episode."""
    statistics: RunningStatistics
    """Statistics of these returns over all steps of all environments."""


def initial_scaling(environments: int) -> RewardScaling:
    """Return the scaling before the first reward."""
    return RewardScaling(jnp.zeros(environments, jnp.float32), initial_statistics(jnp.zeros((), jnp.float32)))


def scale_rewards(
    scaling: RewardScaling,
    rewards: jax.Array,
    done: jax.Array,
    discount: float | jax.Array,
    valid: Any = (),
    clip: float | jax.Array = CLIP,
) -> tuple[RewardScaling, jax.Array]:
    """Update the statistics with the rewards of T steps and scale them: the new scaling and rewards `[T, N]`.

        R_t = γ (1 − done_{t−1}) R_{t−1} + r_t
        scaled_t = clip(r_t / √(Var R + ε), −clip, clip)

    Args:
        scaling: the scaling of `N` environments.
        rewards: `[T, N]`; for a single step, `rewards[None]`.
        done: `[T, N]`, whether the episode ended with step t.
        discount: γ, a scalar.
        valid: bool `[T, N]`, the steps to include in the statistics; `()` for all.
        clip: the largest magnitude of a scaled reward.

    >>> rewards, done = jnp.array([[0.0, 4.0]]), jnp.array([[False, True]])
    >>> scaling, scaled = scale_rewards(initial_scaling(2), rewards, done, discount=0.9)
    >>> scaling.returns.tolist(), scaled.tolist()
    ([0.0, 0.0], [[0.0, 2.0]])
    """
    check_same_shape(rewards=rewards, done=done)
    # A NaN would stay in R for the rest of the episode. The scaled rewards keep it, so that it is noticed.
    increment = jnp.where(jnp.isfinite(rewards), rewards, 0.0).at[0].add(discount * scaling.returns)
    decay = jnp.roll(jnp.where(done, 0.0, discount), 1, axis=0)  # row 0 decays x_{−1} = 0; R_{−1} is added above
    returns = linear_recurrence(decay, increment, reverse=False)
    statistics = update_statistics(scaling.statistics, returns, valid)
    scaled = jnp.clip(rewards / jnp.sqrt(statistics.variance + EPSILON), -clip, clip)
    return RewardScaling(jnp.where(done[-1], 0.0, returns[-1]), statistics), scaled


def _map_floating(
    f: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], stats: RunningStatistics, x: PyTree
) -> PyTree:
    """Apply f(x, mean, standard deviation) to every floating-point leaf, keeping its dtype."""

    def apply(x: jax.Array, mean: jax.Array, variance: jax.Array) -> jax.Array:
        if not _is_floating(x):
            return x
        x = jnp.asarray(x)
        mean, std = jnp.broadcast_to(mean, x.shape), jnp.broadcast_to(jnp.sqrt(variance + EPSILON), x.shape)
        return f(x, mean, std).astype(x.dtype)

    return jax.tree.map(apply, x, stats.mean, stats.variance)


def _is_floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
