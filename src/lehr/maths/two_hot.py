"""Numbers of any size as distributions over bins, and the returns of imagined and replayed steps.

A network cannot regress rewards of unknown size directly. Instead it predicts a distribution over bins that are spaced
exponentially, and is trained with a cross-entropy, whose gradient does not depend on the size of the number.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr.kernels import linear_recurrence
from lehr.maths import across
from lehr.types import check_same_shape

LIMIT = 20.0
"""The outermost bins are ±symexp(20), about ±4.9 · 10⁸."""


def symlog(x: jax.Array) -> jax.Array:
    """sign(x) log(1 + |x|): a logarithm for both signs, close to the identity around 0.

    >>> [round(float(y), 4) for y in symlog(jnp.array([-1.0, 0.0, np.e - 1]))]
    [-0.6931, 0.0, 1.0]
    """
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def symexp(x: jax.Array) -> jax.Array:
    """sign(x) (exp |x| − 1): the inverse of `symlog`.

    >>> [round(float(y), 4) for y in symexp(symlog(jnp.array([-300.0, 0.5])))]
    [-300.0, 0.5]
    """
    return jnp.sign(x) * jnp.expm1(jnp.abs(x))


def bins(count: int) -> np.ndarray:
    """Return the positions of the bins, float32 `[count]`: symexp of equal steps from −20 to 20, exactly symmetric.

    >>> [round(float(x), 1) for x in bins(5)]
    [-485165184.0, -22025.5, 0.0, 22025.5, 485165184.0]
    """
    half = np.expm1(np.linspace(LIMIT, -LIMIT, count)[: count // 2]).astype(np.float32)
    return np.concatenate([-half, np.zeros(count % 2, np.float32), half[::-1]])


def two_hot(x: jax.Array, count: int) -> jax.Array:
    """Return the weights `[..., count]` of the bins for numbers `[...]`: two neighbours share 1, so that the mean is x.

        w_k = (b_{k+1} − x) / (b_{k+1} − b_k),  w_{k+1} = 1 − w_k     with b_k ≤ x < b_{k+1}

    >>> two_hot(jnp.array([0.0, 22025.4658 / 4, 1e12]), 5).tolist()
    [[0.0, 0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.75, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]]
    """
    low, high = (jnp.broadcast_to(places, (*x.shape, count - 1)) for places in (bins(count)[:-1], bins(count)[1:]))
    # Which part of the way from each bin to the next is below x: to search for the bin takes longer to compile.
    passed = jnp.clip((x[..., None] - low) / (high - low), 0, 1)
    sides = [(0, 0)] * x.ndim
    return jnp.pad(passed, [*sides, (1, 0)], constant_values=1) - jnp.pad(passed, [*sides, (0, 1)])


def two_hot_mean(logits: jax.Array) -> jax.Array:
    """Return the mean `[...]` of the distributions over the bins, given their logits `[..., count]`.

    Bins of opposite sign are added first, so that equal logits give exactly 0, although the outer bins are huge.

    >>> float(two_hot_mean(jnp.zeros(255))), round(float(two_hot_mean(jnp.log(two_hot(jnp.float32(3.5), 255)))), 4)
    (0.0, 3.5)
    """
    count = logits.shape[-1]
    half, places = count // 2, bins(count)
    probs = jax.nn.softmax(logits)
    pairs = probs[..., count - half :] - jnp.flip(probs[..., :half], -1)
    return jnp.dot(pairs, jnp.asarray(places[count - half :]), precision="highest")


def two_hot_loss(logits: jax.Array, target: jax.Array) -> jax.Array:
    """Return the cross-entropy `[...]` of distributions with logits `[..., count]` and the two-hot of a target `[...]`.

    >>> round(float(two_hot_loss(jnp.zeros(5), jnp.float32(7.0)) / np.log(5)), 4)
    1.0
    """
    check_same_shape(predictions=logits[..., 0], target=target)
    return cross_entropy(logits, two_hot(target, logits.shape[-1]))


def cross_entropy(logits: jax.Array, weights: jax.Array) -> jax.Array:
    """Return −Σ weights · log softmax(logits), `[...]`, for logits and weights `[..., count]`."""
    return -jnp.sum(jax.lax.stop_gradient(weights) * jax.nn.log_softmax(logits), -1)


def lambda_returns(
    reward: jax.Array, bootstrap: jax.Array, live: jax.Array, last: jax.Array, discount: Any, mixing: Any
) -> jax.Array:
    """Return λ-returns, `[T, ...]`, of `T + 1` steps, each with the reward that was received on arriving in it.

        R_t = r_{t+1} + γ live_{t+1} ((1 − λ_{t+1}) v_{t+1} + λ_{t+1} R_{t+1}),  R_T = v_T
        λ_t = λ (1 − last_t)

    Args:
        reward: r, `[T + 1, ...]`; the first is not used.
        bootstrap: v, values of the steps.
        live: 1 where the episode goes on from a step, 0 in a terminal state, or the probability of it.
        last: 1 in the last step of an episode, terminal or truncated, whose successor belongs to the next episode.
        discount: γ.
        mixing: λ.

    >>> reward, value = jnp.array([0.0, 1.0, 2.0]), jnp.array([9.0, 9.0, 10.0])
    >>> lambda_returns(reward, value, jnp.ones(3), jnp.zeros(3), 0.5, 1.0).tolist()
    [4.5, 7.0]
    >>> lambda_returns(reward, value, jnp.ones(3), jnp.array([0.0, 1.0, 0.0]), 0.5, 1.0).tolist()
    [5.5, 7.0]
    """
    check_same_shape(reward=reward, bootstrap=bootstrap, live=live, last=last)
    keep, share = discount * live[1:], mixing * (1 - last[1:])
    increment = reward[1:] + keep * (1 - share) * bootstrap[1:]
    # The recurrence starts from R_T = v_T, which the last increment contains.
    increment = increment.at[-1].add(keep[-1] * share[-1] * bootstrap[-1])
    return linear_recurrence(keep * share, increment)


class ReturnRange(NamedTuple):
    """Moving averages of the 5th and the 95th percentile of the returns, float32 `[]` each."""

    low: jax.Array
    high: jax.Array

    @property
    def scale(self) -> jax.Array:
        """The divisor of advantages, max(1, high − low): small returns are not blown up."""
        return jnp.maximum(1.0, self.high - self.low)


def update_range(known: ReturnRange, returns: jax.Array, rate: Any) -> ReturnRange:
    """Move the range towards the percentiles of these returns.

        low ← low + rate (P₅ − low),  high ← high + rate (P₉₅ − high)

    On several devices, these are the means of each device's percentiles: those of all returns would need all of them.

    >>> found = update_range(ReturnRange(jnp.float32(0), jnp.float32(0)), jnp.arange(101.0), 0.1)
    >>> round(float(found.low), 6), round(float(found.high), 6), round(float(found.scale), 6)
    (0.5, 9.5, 9.0)
    """
    low, high = across.mean(jnp.percentile(returns, jnp.array([5.0, 95.0])))
    return ReturnRange(known.low + rate * (low - known.low), known.high + rate * (high - known.high))
