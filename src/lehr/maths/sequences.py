"""Windows: segments cut into shorter pieces, each with the memory that it begins with.

A rollout `[T, N]` becomes `[L, W · N]` with `W = T / L`: column `w · N + n` holds steps `w · L … w · L + L − 1` of
segment `n`. Collecting has kept the memory before step 0 alone; that of the other windows is found by unrolling the
network over the steps before them.

With a burn-in of `b ≤ L` steps, a window keeps the memory of `b` steps earlier and those steps: the parameters of each
gradient step bring it up to the window's begin (Kapturowski et al., 2019). The first window of a segment has no steps
before it, and begins with the memory that was kept.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lehr.errors import InputError
from lehr.types import PyTree

Unroll = Callable[[PyTree, PyTree, jax.Array], tuple[PyTree, Any, Any]]
"""From a carry `[N, ...]`, observations and resets `[T, N, ...]` to the last carry and more: a network's `unroll`."""


class BurnIn(NamedTuple):
    """Where the memory of windows comes from: what stands in for their carry until the parameters are known."""

    carry: PyTree
    """Leaves `[M, ...]`: the memory `b` steps before each window; a first window's own."""
    obs: PyTree
    """Leaves `[M, b, ...]`: the observations before each window."""
    reset: jax.Array
    """bool `[M, b]`."""
    is_first: jax.Array
    """bool `[M]`: nothing is before this window, so that its `obs` are not its own."""


def check(horizon: int, window: int | None, burn_in: int) -> None:
    """Refuse windows that do not fill a segment of `horizon` steps, and burn-ins that they have no room for.

    >>> check(horizon=64, window=24, burn_in=0)
    Traceback (most recent call last):
    lehr.errors.InputError: horizon is 64, which cannot be cut into windows of 24 steps; choose a divisor of 64.
    """
    if window is not None and window < 1:
        raise InputError(f"window is {window}; it must be 1 or more, or none.")
    if burn_in < 0:
        raise InputError(f"burn_in is {burn_in}; it must be 0 or more.")
    if window is not None and horizon % window:
        raise InputError(
            f"horizon is {horizon}, which cannot be cut into windows of {window} steps; choose a divisor of {horizon}."
        )
    if burn_in and (window is None or window == horizon):
        raise InputError(
            f"burn_in is {burn_in}, but a window is a whole segment, with no steps before it; set window to a divisor "
            f"of horizon={horizon} below it, or burn_in to 0."
        )
    if window is not None and burn_in > window:
        raise InputError(f"burn_in is {burn_in}, which is longer than a window of {window} steps; give at most those.")


def cut(tree: PyTree, window: int) -> PyTree:
    """Leaves `[T, N, ...]` in windows, `[L, W · N, ...]`.

    >>> cut(jnp.arange(6)[:, None], window=3).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """

    def columns(x: jax.Array) -> jax.Array:
        pieces = x.reshape(-1, window, *x.shape[1:])
        return jnp.moveaxis(pieces, 0, 1).reshape(window, -1, *x.shape[2:])

    return jax.tree.map(columns, tree)


def carries(unroll: Unroll, carry: PyTree, obs: PyTree, reset: jax.Array, window: int, burn_in: int = 0) -> PyTree:
    """The memory `burn_in` steps before each window, a first one's own: leaves `[W · N, ...]`.

    Args:
        unroll: of the network, with its parameters.
        carry: leaves `[N, ...]`, before step 0.
        obs: leaves `[T, N, ...]`.
        reset: bool `[T, N]`.
        window: L, steps of a window, a divisor of T.
        burn_in: b, 0 … L.

    A memory that sums what it sees, two windows of three steps, the memory two steps before the second:

    >>> total = lambda carry, obs, reset: (carry + obs.sum(0), None, None)
    >>> carries(total, jnp.array([10]), jnp.arange(1, 7)[:, None], jnp.zeros((6, 1), bool), 3, burn_in=2).tolist()
    [10, 11]
    """
    early = window - burn_in

    def pass_window(carry: PyTree, steps: tuple[PyTree, jax.Array]) -> tuple[PyTree, PyTree]:
        found = _remembered(unroll, carry, *jax.tree.map(lambda x: x[:early], steps))
        return _remembered(unroll, found, *jax.tree.map(lambda x: x[early:], steps)), found

    # No window follows the last one.
    before = jax.tree.map(lambda x: x.reshape(-1, window, *x.shape[1:])[:-1], (obs, reset))
    _, found = jax.lax.scan(pass_window, carry, before)
    together = jax.tree.map(lambda first, others: jnp.concatenate([first[None], others]), carry, found)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), together)


def burn_ins(unroll: Unroll, carry: PyTree, obs: PyTree, reset: jax.Array, window: int, burn_in: int) -> BurnIn:
    """What the memory of each window is found from; arguments as for `carries`, with a `burn_in` of 1 or more."""

    def steps_before(x: jax.Array) -> jax.Array:
        ends = cut(x, window)[window - burn_in :]
        return jnp.moveaxis(jnp.roll(ends, x.shape[1], axis=1), 0, 1)  # each window's to the one after it

    found = carries(unroll, carry, obs, reset, window, burn_in)
    is_first = jnp.arange(reset.size // window) < reset.shape[1]
    return BurnIn(found, jax.tree.map(steps_before, obs), steps_before(reset), is_first)


def burnt_in(unroll: Unroll, start: BurnIn) -> PyTree:
    """The memory with which windows begin, by the parameters of now: leaves `[M, ...]`.

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
    """The carry after some steps, or after none."""
    return unroll(carry, obs, reset)[0] if len(reset) else carry
