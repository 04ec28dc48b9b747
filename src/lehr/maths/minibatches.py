"""Minibatches of a rollout: draw indices, and gather the samples (`take`).

A rollout is a pytree of arrays `[T, N, ...]`. `MinibatchSource` draws and gathers the minibatches of a whole update: of
single steps, of segments, or of segments drawn by priority. It uses the functions below it.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from lehr import kernels
from lehr.errors import InputError
from lehr.types import Key, PyTree

PRIORITY_FLOOR = 1e-6
"""Minimum priority, as a fraction of the largest."""
LEAST_LOGARITHM = -60.0
"""That of the least likely segment, relative to the likeliest: with a large exponent, it would be 0 in float32."""

MOST_PACKED = 2**16
"""The longest permutation whose indices are sorted as parts of their keys on a CPU; beyond, too many keys are alike."""
LEAST_ALONE, MOST_ALONE = 2**15, 16
"""On a GPU, the orders of up to so many passes are sorted one by one from this length on: XLA has a radix sort for one
long array, but compiles a sort of its own for several. (Four orders of 262,144 on one H200: 217 instead of 237 µs.)"""


Kind = Literal["flat", "segments", "prioritised"]
"""Shuffled single steps, whole shuffled segments, or whole segments drawn by priority."""


class Minibatch(NamedTuple):
    """The data of one gradient step."""

    data: PyTree
    """Leaves `[B, ...]` of single steps, or `[T, n, ...]` of segments."""
    carry: PyTree
    """Leaves `[n, ...]`: initial recurrent states of its segments; for single steps, the whole carry."""
    weights: jax.Array | None
    """float32 `[n]`: importance weights of segments drawn by priority."""
    indices: jax.Array
    """Indices of its steps or segments."""

    def as_rows(self) -> "Minibatch":
        """Return a minibatch of segments `[T, n]` as one of single steps `[T · n]`."""
        return self._replace(data=jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self.data))


class MinibatchSource:
    """The minibatches of an update: draws indices, and gathers their samples from one packed array.

    Args:
        kind: what minibatches consist of.
        data: leaves `[T, N, ...]`.
        carry: leaves `[N, ...]`: initial recurrent states of the segments.
        epochs: passes over the data.
        count: minibatches per pass.
        key: random key for the order, and for a key per minibatch.
        replace: draw prioritised segments with replacement.
        prepare: applied to the data of each minibatch.
        ahead: gather and prepare all minibatches in `draws`, as one program instead of one per gradient step; ignored
            for prioritised ones, which are not known before.
    """

    def __init__(
        self,
        kind: Kind,
        data: PyTree,
        carry: PyTree,
        epochs: int,
        count: int,
        key: Key,
        replace: bool = False,
        prepare: Callable[[PyTree], PyTree] = lambda data: data,
        ahead: bool = False,
    ) -> None:
        self.kind, self.carry, self.epochs, self.count, self.replace = kind, carry, epochs, count, replace
        self.prepare, self.is_ahead = prepare, ahead and kind != "prioritised"
        self.steps, self.size = jax.tree.leaves(data)[0].shape[:2]
        if kind == "prioritised" and self.size < count:
            raise InputError(
                f"{self.size} segments cannot fill {count} minibatches; choose at most {self.size} minibatches, or "
                "more environments."
            )
        self.draw_key, self.step_key = jax.random.split(key)
        self.packed, self.unpack = pack(data)
        if kind == "flat":
            self.packed = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self.packed)

    def draws(self) -> tuple[Any, Key]:
        """Return the arguments of `take` and a key for every gradient step; leaves `[epochs · count, ...]`."""
        steps = self.epochs * self.count
        keys = jax.random.split(self.step_key, steps)
        if self.kind == "prioritised":  # drawn later, with the priorities at that step
            return prioritised_draws(self.draw_key, self.size, steps, self.replace), keys
        length = self.steps * self.size if self.kind == "flat" else self.size
        orders = shuffled_epochs(self.draw_key, length, self.count, self.epochs)
        if not self.is_ahead:
            return orders, keys
        data, carry, indices = jax.vmap(self._gathered)(orders)
        # In one array, so that slices of all leaves are one kernel, and not a copy for each.
        packed, self.unpack = pack(data, axes=2 if self.kind == "flat" else 3)
        return (packed, carry, indices), keys

    def take(self, drawn: Any, priorities: Any, exponent: Any = None, importance_exponent: Any = None) -> Minibatch:
        """Return the minibatch of one gradient step; only prioritised ones use the priorities `[N]` and exponents."""
        weights = None
        if self.kind == "prioritised":
            size = self.size // self.count
            drawn, weights = prioritised(drawn, priorities, exponent, importance_exponent, size)
        if self.is_ahead:
            packed, carry, indices = drawn
            data = self.unpack(packed)
        else:
            data, carry, indices = self._gathered(drawn)
        return Minibatch(data, self.carry if self.kind == "flat" else carry, weights, indices)

    def _gathered(self, indices: jax.Array) -> tuple[PyTree, PyTree, jax.Array]:
        """Return the data of a minibatch, the initial states of its segments, and its indices."""
        data = self.unpack(take(self.packed, indices, axis=0 if self.kind == "flat" else 1))
        carry = () if self.kind == "flat" else take(self.carry, indices, axis=0)
        return self.prepare(data), carry, indices


def permutation(key: Key, length: int) -> jax.Array:
    """Return a random permutation of 0 … length − 1, int32 `[length]`, from one sort of random 32-bit numbers.

    Above 1625 elements, `jax.random.permutation` sorts again to break ties. Here ties keep their order: of two
    given elements, the lower one is first with probability ½ + 2⁻³³, and a shuffle contains a tie with
    probability about length² / 2³³, 0.05 % for 2048 elements.

    >>> sorted(permutation(jax.random.key(0), 4).tolist())
    [0, 1, 2, 3]
    """
    keys = jax.random.bits(key, (length,))
    if jax.default_backend() == "cpu" and 1 < length <= MOST_PACKED:
        return _packed_argsort(keys)
    return jax.lax.sort_key_val(keys, jnp.arange(length, dtype=jnp.int32))[1]


def _packed_argsort(keys: jax.Array) -> jax.Array:
    """Return what sorts uint32 keys `[n]`, int32 `[n]`, as a stable sort of pairs would.

    On a CPU, XLA sorts numbers with a loop for their type, and pairs with one that calls a function to compare two of
    them (four orders of 8,192 on one core: 0.8 and 4.2 ms). So each index replaces the lowest bits of its key. Keys
    that only differ in these bits may then be in the wrong order, which a few swaps of neighbours put right.

    >>> _packed_argsort(jnp.array([7, 5, 2**31, 4, 5], jnp.uint32)).tolist()
    [3, 1, 4, 0, 2]
    """
    length = len(keys)
    low = jnp.uint32(2 ** math.ceil(math.log2(length)) - 1)
    packed = jax.lax.sort((keys & ~low) | jnp.arange(length, dtype=jnp.uint32))
    order = (packed & low).astype(jnp.int32)
    places = jnp.arange(length - 1) % 2

    def is_unsorted(carried: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(carried[0][:-1] > carried[0][1:])

    def swapped(carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        for parity in range(2):
            keys, order = carried
            swaps = (keys[:-1] > keys[1:]) & (places == parity)
            carried = _swap_neighbours(swaps, keys), _swap_neighbours(swaps, order)
        return carried

    return jax.lax.while_loop(is_unsorted, swapped, (keys[order], order))[1]


def _swap_neighbours(swaps: jax.Array, x: jax.Array) -> jax.Array:
    """Swap the elements i and i + 1 of `x`, `[n]`, where `swaps`, bool `[n − 1]`, has no neighbouring trues."""
    from_right = jnp.where(jnp.append(swaps, False), jnp.roll(x, -1), x)
    return jnp.where(jnp.append(False, swaps), jnp.roll(x, 1), from_right)


def shuffled(key: Key, length: int, count: int) -> jax.Array:
    """Split 0 … length − 1 in random order into minibatches: int32 `[count, length / count]`.

    >>> shuffled(jax.random.key(0), length=6, count=4)
    Traceback (most recent call last):
    lehr.errors.InputError: 6 samples cannot be split into 4 equal minibatches; choose a divisor of 6.
    """
    if count < 1 or length % count:
        raise InputError(
            f"{length} samples cannot be split into {count} equal minibatches; choose a divisor of {length}."
        )
    return permutation(key, length).reshape(count, -1)


def shuffled_epochs(key: Key, length: int, count: int, epochs: int) -> jax.Array:
    """Return the minibatches of several passes, each in a new order: int32 `[epochs · count, length / count]`.

    >>> sorted(shuffled_epochs(jax.random.key(0), length=3, count=3, epochs=2)[3:].ravel().tolist())
    [0, 1, 2]
    """
    keys = jax.random.split(key, epochs)
    if jax.default_backend() == "gpu" and length >= LEAST_ALONE and epochs <= MOST_ALONE:
        return jnp.concatenate([shuffled(one, length, count) for one in keys])
    return jax.vmap(lambda key: shuffled(key, length, count))(keys).reshape(epochs * count, -1)


def take(rollout: PyTree, indices: jax.Array, axis: int) -> PyTree:
    """Gather along one axis of every leaf, with `0 ≤ indices < length`; the axes of `indices` replace that axis.

    >>> take({"reward": jnp.array([[1, 2, 3], [4, 5, 6]])}, jnp.array([2, 0]), axis=1)["reward"].tolist()
    [[3, 1], [6, 4]]
    """
    return jax.tree.map(lambda x: jnp.take(x, indices, axis=axis, mode="clip"), rollout)


def pack(rollout: PyTree, axes: int = 2) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Pack all small leaves into one float32 array, so that a minibatch is one gather; also return the inverse.

    Leaves of 32-bit types and bools become `[..., D]` after their first `axes` axes; integers keep their bits. Other
    leaves, such as uint8 images, stay unchanged. The inverse works with any number of leading axes.

    >>> rollout = {"action": jnp.array([[1, 2]]), "obs": jnp.ones((1, 2, 3)), "image": jnp.zeros((1, 2), "u1")}
    >>> packed, unpack = pack(rollout)
    >>> [leaf.shape for leaf in jax.tree.leaves(packed)]
    [(1, 2, 4), (1, 2)]
    >>> unpack(packed)["action"].tolist()
    [[1, 2]]
    """
    leaves, structure = jax.tree.flatten(rollout)
    small = [leaf.dtype in (jnp.float32, jnp.int32, jnp.uint32, jnp.bool) for leaf in leaves]
    shapes = [leaf.shape[axes:] for leaf in leaves]
    dtypes = [leaf.dtype for leaf in leaves]

    def to_float(leaf: jax.Array) -> jax.Array:
        leaf = leaf.reshape(*leaf.shape[:axes], -1)
        if leaf.dtype == jnp.bool:
            return leaf.astype(jnp.float32)
        return jax.lax.bitcast_convert_type(leaf, jnp.float32)

    def from_float(part: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        part = part.reshape(*part.shape[:-1], *shape)
        return part != 0 if dtype == jnp.bool else jax.lax.bitcast_convert_type(part, dtype)

    packed = jnp.concatenate([to_float(leaf) for leaf, packs in zip(leaves, small, strict=True) if packs], axis=-1)
    rest = [leaf for leaf, packs in zip(leaves, small, strict=True) if not packs]

    def unpack(taken: tuple[jax.Array, list[jax.Array]]) -> PyTree:
        array, others = taken
        remaining = iter(others)
        whole, begin = [], 0
        for shape, dtype, packs in zip(shapes, dtypes, small, strict=True):
            if not packs:
                whole.append(next(remaining))
                continue
            end = begin + math.prod(shape)
            whole.append(from_float(array[..., begin:end], shape, dtype))
            begin = end
        return jax.tree.unflatten(structure, whole)

    return (packed, rest), unpack


def priorities(advantages: jax.Array) -> jax.Array:
    """Return the priority of each segment, Σ_t |A_t,i|, `[N]` from advantages `[T, N]`.

    >>> priorities(jnp.array([[1.0, -2.0], [-3.0, 0.0]])).tolist()
    [4.0, 2.0]
    """
    return jnp.sum(jnp.abs(advantages), axis=0)


class Order(NamedTuple):
    """What a draw without replacement needs besides the probabilities; see `_systematic`."""

    permutation: jax.Array
    """int32 `[N]`."""
    offset: jax.Array
    """uint32 `[]`: a fraction of 1, in 32 bits."""


def prioritised_draws(key: Key, length: int, count: int, replace: bool) -> Key | Order:
    """Return the randomness of `count` draws of `length` segments, made at once: one sort takes as long as many do."""
    keys = jax.random.split(key, count)
    if replace:
        return keys

    def order(key: Key) -> Order:
        order_key, offset_key = jax.random.split(key)
        return Order(permutation(order_key, length), jax.random.bits(offset_key))

    return jax.vmap(order)(keys)


def prioritised(
    draw: Key | Order,
    priorities: jax.Array,
    exponent: float | jax.Array,
    importance_exponent: float | jax.Array,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Draw segments by priority (Schaul et al., 2016); return indices and importance weights, `[size]` each.

        P(i) = priority_i^α / Σ_j priority_j^α
        weight_i = (size / (N · π_i))^β

    where π_i is how often segment i is expected in a minibatch: size · P(i) with replacement. Without, each segment is
    in it at most once, so π_i is the probability that it is, min(1, c · P(i)) with c such that Σ_i π_i = size. As long
    as no size · P(i) is above 1, both weights are (N · P(i))^−β, and when all segments are drawn, they are 1.

    Priorities are raised to at least 1e-6 of the largest, so that every
    segment can be drawn and every weight is finite; if all are 0, the draw is uniform. The weights are not
    normalised: with β = 1, mean(weight · x) is an unbiased estimate of the mean of x over all segments. Schaul et al.
    divide them by the largest; PufferLib does not, and uses P(i) = (priority_i^α + 1e-6) / (Σ_j priority_j^α + 1e-6).

    Args:
        draw: one of `prioritised_draws`; a key draws with replacement.
        priorities: `[N]`, at least 0.
        exponent: α, a scalar; 0 draws uniformly.
        importance_exponent: β, a scalar; 0 makes every weight 1.
        size: segments per minibatch.

    >>> draws = prioritised_draws(jax.random.key(0), length=4, count=1, replace=False)
    >>> first, unequal = jax.tree.map(lambda leaf: leaf[0], draws), jnp.array([1.0, 2.0, 3.0, 4.0])
    >>> indices, weights = prioritised(first, unequal, 0.8, 0.4, size=4)
    >>> sorted(indices.tolist()), weights.tolist()
    ([0, 1, 2, 3], [1.0, 1.0, 1.0, 1.0])
    """
    if isinstance(draw, Order) and size > len(priorities):
        raise InputError(
            f"Cannot draw {size} of {len(priorities)} segments without replacement; draw fewer, or replace."
        )
    exponents = exponent, importance_exponent
    plain = partial(_prioritised, draw, priorities, *exponents, size)
    if not isinstance(draw, Order):
        return plain()
    least = PRIORITY_FLOOR, LEAST_LOGARITHM
    return kernels.draw_segments(kernels.Draw(*draw, priorities, exponents, *least, size), plain)


def _prioritised(
    draw: Key | Order, priorities: jax.Array, exponent: Any, importance_exponent: Any, size: int
) -> tuple[jax.Array, jax.Array]:
    """The same in plain JAX."""
    length = len(priorities)
    largest = jnp.max(priorities)
    relative = jnp.where(largest == 0, 1.0, priorities / jnp.where(largest == 0, 1.0, largest))
    logarithm = jnp.maximum(exponent * jnp.log(jnp.maximum(relative, PRIORITY_FLOOR)), LEAST_LOGARITHM)
    log_probability = jax.nn.log_softmax(logarithm)
    if isinstance(draw, Order):
        log_expected = _log_inclusion(log_probability, size)
        indices = _systematic(draw, jnp.exp(log_expected), size)
    else:
        log_expected = math.log(size) + log_probability
        indices = _inverse_cdf(draw, jnp.exp(log_probability), size)
    weights = jnp.exp(importance_exponent * (math.log(size / length) - log_expected))
    return indices, take(weights, indices, axis=0)


def _log_inclusion(log_probability: jax.Array, size: int) -> jax.Array:
    """Return log min(1, c · P), `[N]`, with c such that the inclusion probabilities sum to `size`.

    >>> found = jnp.exp(_log_inclusion(jnp.log(jnp.array([0.1, 0.6, 0.3])), size=2))
    >>> [round(float(probability), 3) for probability in found]
    [0.25, 1.0, 0.75]
    """
    length = len(log_probability)
    if size == length:
        return jnp.zeros(length)
    ordered = jnp.sort(log_probability, descending=True)
    # With the m likeliest certain, c is (size − m) / Σ of the others; m is the least that leaves none of them above 1.
    # The sums begin with the least likely, so that float32 loses none of them.
    rest = jnp.log(jnp.flip(jnp.cumsum(jnp.exp(jnp.flip(ordered)))))[:size]
    log_factor = jnp.log(size - jnp.arange(size, dtype=jnp.float32)) - rest
    certain = jnp.argmax(log_factor + ordered[:size] <= 0)
    # By rounding, one that is just certain may be missed; size − 1 certain ones always leave the last below 1.
    certain = jnp.where(jnp.any(log_factor + ordered[:size] <= 0), certain, size - 1)
    return jnp.minimum(log_probability + log_factor[certain], 0.0)


def _systematic(draw: Order, probability: jax.Array, size: int) -> jax.Array:
    """Draw `size` different indices, int32 `[size]`, each with its inclusion probability, which sum to `size`.

    Systematic sampling (Madow, 1949) in random order: lay the probabilities one after another on a line, and take those
    on which one of the points u, u + 1, u + 2, … lies, with u uniform in [0, 1). Positions are 32-bit fractions: where
    their sum overflows, it passes a point.
    """
    order = draw.permutation
    certain = probability[order] >= 1.0
    share = jnp.where(certain, 0.0, probability[order]) * 2.0**32
    steps = jnp.minimum(share, 2.0**32 - 256).astype(jnp.uint32)
    ends = jnp.cumsum(steps, dtype=jnp.uint32) + draw.offset
    is_drawn = certain | (ends < steps)
    # The drawn ones come first, then the others: by rounding, one too many or too few may be drawn, about once in a
    # million draws.
    drawn = jnp.cumsum(is_drawn, dtype=jnp.int32)
    others = jnp.arange(len(order), dtype=jnp.int32) - drawn + drawn[-1]
    place = jnp.where(is_drawn, drawn - 1, others)
    return jnp.zeros_like(order).at[place].set(order, unique_indices=True)[:size]


def _inverse_cdf(key: Key, probability: jax.Array, size: int) -> jax.Array:
    """Draw `size` indices by `probability` `[N]`; sums are integers, because float32 is too coarse near 1."""
    cumulative = jnp.cumsum(jnp.round(probability * 2.0**31).astype(jnp.uint32))
    uniform = jax.random.randint(key, (size,), 0, cumulative[-1], dtype=jnp.uint32)
    return jnp.searchsorted(cumulative, uniform, side="right", method="scan_unrolled")
