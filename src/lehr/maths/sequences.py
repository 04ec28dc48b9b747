"""Windows: segments cut into shorter pieces, each with its initial memory.

A rollout `[T, N]` becomes `[L, W · N]` with `W = T / L`: column `w · N + n` holds steps `w · L … w · L + L − 1` of
segment `n`. The rollout only stores the memory before step 0; the initial memory of the other windows is computed by
unrolling the network over the preceding steps.

With a burn-in of `b ≤ L` steps, a window stores the memory from `b` steps earlier together with those steps, and each
gradient step recomputes the initial memory with its own parameters (Kapturowski et al., 2019). The first window of a
segment has no preceding steps and starts from the stored memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lehr.errors import InputError
from lehr.types import PyTree

Unroll = Callable[[PyTree, PyTree, jax.Array], tuple[PyTree, Any, Any]]
"""A network's `unroll`: from a carry `[N, ...]`, observations and resets `[T, N, ...]` to the last carry and more."""

LEAST_AUTO, MOST_AUTO = 8, 32
"""The shortest and the longest windows that `auto` cuts segments into."""


class BurnIn(NamedTuple):
    """The inputs from which the initial memory of windows is computed, once the parameters are known."""

    carry: PyTree
    """Leaves `[M, ...]`: the memory `b` steps before each window, or the initial memory of a first window."""
    obs: PyTree
    """Leaves `[M, b, ...]`: the `b` observations before each window."""
    reset: jax.Array
    """bool `[M, b]`: the resets of these steps."""
    is_first: jax.Array
    """bool `[M]`: whether this is the first window of a segment, whose `obs` and `reset` are ignored."""


def check(horizon: int, window: int | None, burn_in: int) -> None:
    """Raise an error if windows do not divide a segment of `horizon` steps, or a burn-in does not fit.

    >>> check(horizon=64, window=24, burn_in=0)
    Traceback (most recent call last):
    lehr.errors.InputError: window is 24, which does not divide horizon=64; choose a divisor of 64.
    """
    if window is not None and window < 1:
        raise InputError(f"window is {window}; it must be 1 or more, or none.")
    if burn_in < 0:
        raise InputError(f"burn_in is {burn_in}; it must be 0 or more.")
    if window is not None and horizon % window:
        raise InputError(f"window is {window}, which does not divide horizon={horizon}; choose a divisor of {horizon}.")
    if burn_in and (window is None or window == horizon):
        raise InputError(
            f"burn_in is {burn_in}, but a window is a whole segment and has no preceding steps; set window to a "
            f"smaller divisor of horizon={horizon}, or burn_in to 0."
        )
    if window is not None and burn_in > window:
        raise InputError(f"burn_in is {burn_in}, which is longer than window={window}; it must be at most {window}.")


def auto_window(horizon: int, segments: int, minibatches: int) -> int | None:
    """Return the largest divisor of `horizon` from 8 to 32; `None` if that is `horizon` itself, or if there is none.

    Divisors whose windows give minibatches of equal size come first.

    Args:
        horizon: length of a segment.
        segments: number of segments in a rollout.
        minibatches: number of parts that the windows of all segments are split into.

    >>> [auto_window(horizon, segments=8, minibatches=8) for horizon in (256, 100, 32, 37)]
    [32, 25, None, None]
    >>> auto_window(256, segments=1, minibatches=16)
    16
    """
    divisors = [length for length in range(min(horizon, MOST_AUTO), LEAST_AUTO - 1, -1) if horizon % length == 0]
    equal = [length for length in divisors if horizon // length * segments % minibatches == 0]
    chosen = (equal or divisors or [horizon])[0]
    return None if chosen == horizon else chosen


def cut(tree: PyTree, window: int) -> PyTree:
    """Cut leaves `[T, N, ...]` into windows, `[L, W · N, ...]`.

    >>> cut(jnp.arange(6)[:, None], window=3).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """

    def columns(x: jax.Array) -> jax.Array:
        pieces = x.reshape(-1, window, *x.shape[1:])
        return jnp.moveaxis(pieces, 0, 1).reshape(window, -1, *x.shape[2:])

    return jax.tree.map(columns, tree)


def carries(unroll: Unroll, carry: PyTree, obs: PyTree, reset: jax.Array, window: int, burn_in: int = 0) -> PyTree:
    """Return the memory `burn_in` steps before each window, or the initial memory of a first window: `[W · N, ...]`.

    Args:
        unroll: the network's `unroll`, with its parameters.
        carry: leaves `[N, ...]`, the memory before step 0.
        obs: leaves `[T, N, ...]`.
        reset: bool `[T, N]`.
        window: L, the steps of a window, a divisor of T.
        burn_in: b, from 0 to L.

    With a memory that sums its observations, two windows of three steps, and a burn-in of two steps:

    >>> total = lambda carry, obs, reset: (carry + obs.sum(0), None, None)
    >>> carries(total, jnp.array([10]), jnp.arange(1, 7)[:, None], jnp.zeros((6, 1), bool), 3, burn_in=2).tolist()
    [10, 11]
    """
    early = window - burn_in

    def pass_window(carry: PyTree, steps: tuple[PyTree, jax.Array]) -> tuple[PyTree, PyTree]:
        found = _remembered(unroll, carry, *jax.tree.map(lambda x: x[:early], steps))
        return _remembered(unroll, found, *jax.tree.map(lambda x: x[early:], steps)), found

    # The last window is not needed, since no window follows it.
    before = jax.tree.map(lambda x: x.reshape(-1, window, *x.shape[1:])[:-1], (obs, reset))
    _, found = jax.lax.scan(pass_window, carry, before)
    together = jax.tree.map(lambda first, others: jnp.concatenate([first[None], others]), carry, found)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), together)


def burn_ins(unroll: Unroll, carry: PyTree, obs: PyTree, reset: jax.Array, window: int, burn_in: int) -> BurnIn:
    """Return the inputs for `burnt_in`; the arguments are those of `carries`, with a `burn_in` of 1 or more."""

    def steps_before(x: jax.Array) -> jax.Array:
        ends = cut(x, window)[window - burn_in :]
        return jnp.moveaxis(
            jnp.roll(ends, x.shape[1], axis=1), 0, 1
        )  # shift by one window: these are the steps before the next one

    found = carries(unroll, carry, obs, reset, window, burn_in)
    is_first = jnp.arange(reset.size // window) < reset.shape[1]
    return BurnIn(found, jax.tree.map(steps_before, obs), steps_before(reset), is_first)


def burnt_in(unroll: Unroll, start: BurnIn) -> PyTree:
    """Compute the initial memory of windows with the current parameters: leaves `[M, ...]`.

    >>> total = lambda carry, obs, reset: (carry + obs.sum(0), None, None)
    >>> start = BurnIn(jnp.array([10, 20]), jnp.array([[1, 2], [3, 4]]), jnp.zeros((2, 2), bool), jnp.array([1, 0]))
    >>> burnt_in(total, start).tolist()
    [10, 27]
    """
    obs, reset = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (start.obs, start.reset))
    carry, _, _ = unroll(start.carry, obs, reset)

    def chosen(stored: jax.Array, found: jax.Array) -> jax.Array:
        return jnp.where(start.is_first.reshape(-1, *[1] * (stored.ndim - 1)), stored, found)

    return jax.tree.map(chosen, start.carry, carry)


def _remembered(unroll: Unroll, carry: PyTree, obs: PyTree, reset: jax.Array) -> PyTree:
    """Return the carry after these steps, of which there may be none."""
    return unroll(carry, obs, reset)[0] if len(reset) else carry
