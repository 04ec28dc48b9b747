"""Observation and action spaces: `Box`, `Discrete`, `MultiDiscrete` and `Dict`.

Spaces are immutable and hashable, so they can be static arguments of `jit`; two spaces are equal if they describe the
same set. A space describes one agent of one environment, without a batch axis.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from lehr.errors import InputError
from lehr.types import Key, PyTree


@dataclass(frozen=True)
class Box:
    """Arrays with `low <= x <= high` elementwise; the bounds are numbers or arrays, and may be infinite.

    >>> Box(-1, 1, shape=(3,))
    Box(-1.0, 1.0, shape=(3,), dtype=float32)
    >>> Box([0, -1], [1, 1]) == Box(np.array([0.0, -1.0]), 1, shape=(2,))
    True
    """

    low: Any = field(compare=False)
    """The lower bound, stored as a read-only array of the space's shape and dtype."""
    high: Any = field(compare=False)
    """The upper bound, stored in the same way."""
    shape: Any = None
    """The shape; by default the shape that the bounds broadcast to."""
    dtype: Any = np.float32
    """A floating-point or integer type, or bool."""
    _bounds: tuple[bytes, bytes] = field(init=False, repr=False, default=(b"", b""))

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype)
        low, high = np.asarray(self.low), np.asarray(self.high)
        try:
            shape = np.broadcast_shapes(low.shape, high.shape) if self.shape is None else tuple(self.shape)
            low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
        except ValueError:
            raise InputError(
                f"Box got bounds of shapes {low.shape} and {high.shape}, which do not broadcast to the shape "
                f"{self.shape}: give numbers, or arrays that broadcast to it."
            ) from None
        if not np.all(low <= high):
            raise InputError(f"Box got low={low} and high={high}; low must not be above high in any entry.")
        if np.issubdtype(dtype, np.integer):
            limits = np.iinfo(dtype)
            if np.any(low < limits.min) or np.any(high > limits.max):
                raise InputError(
                    f"Box got bounds {low.min()} to {high.max()}, outside the range of {dtype}, {limits.min} to "
                    f"{limits.max}: give bounds within it, or another dtype."
                )
        if dtype.kind == "b" and (np.any(low < 0) or np.any(high > 1)):
            raise InputError(
                f"Box got bounds {low.min()} to {high.max()}, but a bool is 0 or 1: give bounds within these."
            )
        low, high = _bound(low, dtype), _bound(high, dtype)
        for name, value in {"low": low, "high": high, "shape": shape, "dtype": dtype}.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_bounds", (_brief(low).tobytes(), _brief(high).tobytes()))

    def __repr__(self) -> str:
        low, high = _brief(self.low).tolist(), _brief(self.high).tolist()
        return f"Box({low}, {high}, shape={self.shape}, dtype={self.dtype})"

    @property
    def bounded(self) -> bool:
        """Whether every bound is finite."""
        return bool(np.all(np.isfinite(self.low)) and np.all(np.isfinite(self.high)))

    def sample(self, key: Key) -> jax.Array:
        """Sample uniformly; unbounded entries are standard normal, entries with one bound exponential from it."""
        low, high = self.low, self.high
        if self.dtype.kind in "biu":
            above = np.minimum(high.astype(np.int64), np.iinfo(np.int32).max - 1).astype(np.int32) + 1
            return jax.random.randint(key, self.shape, low.astype(np.int32), above).astype(self.dtype)
        if self.bounded:
            fraction = jax.random.uniform(key, self.shape, self.dtype)
            return jnp.clip(low * (1 - fraction) + high * fraction, low, high)
        below, above = np.isfinite(low), np.isfinite(high)
        low, high = np.where(below, low, 0), np.where(above, high, 0)
        keys = jax.random.split(key, 3)
        fraction = jax.random.uniform(keys[0], self.shape, self.dtype)
        tail = jax.random.exponential(keys[1], self.shape, self.dtype)
        free = jax.random.normal(keys[2], self.shape, self.dtype)
        one_sided = jnp.where(below, low + tail, jnp.where(above, high - tail, free))
        return jnp.where(below & above, low * (1 - fraction) + high * fraction, one_sided)

    def contains(self, x: Any) -> bool:
        """Whether a concrete array has the right shape and a compatible dtype, and is within the bounds."""
        x = np.asarray(x)
        fits = x.shape == self.shape and np.can_cast(x.dtype, self.dtype, "same_kind")
        return bool(fits and np.all(x >= self.low) and np.all(x <= self.high))


def _bound(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a read-only bound; adding zero turns -0.0 into 0.0, so that equal bounds have equal bytes."""
    value = np.add(value.astype(dtype), np.zeros((), dtype))
    value.setflags(write=False)
    return value


def _brief(bound: np.ndarray) -> np.ndarray:
    """Return one number if all entries of a bound are equal, otherwise the array itself."""
    return bound.flat[0] if bound.size and np.all(bound == bound.flat[0]) else bound


@dataclass(frozen=True)
class Discrete:
    """The integers `start, ..., start + n - 1`.

    Networks count from 0: `lehr.acting.agent.act` adds `start`, so that environments, policies and files have members
    of the space.
    """

    n: int
    start: int = 0

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InputError(f"Discrete got n={self.n}; it must be 1 or more.")
        limits = np.iinfo(np.int32)
        if self.start < limits.min or self.start + self.n - 1 > limits.max:
            raise InputError(
                f"Discrete got n={self.n} and start={self.start}; its integers must be from {limits.min} to "
                f"{limits.max}."
            )

    def __repr__(self) -> str:
        return f"Discrete(n={self.n}, start={self.start})" if self.start else f"Discrete(n={self.n})"

    @property
    def shape(self) -> tuple[int, ...]:
        """`()`: one integer."""
        return ()

    @property
    def dtype(self) -> np.dtype:
        """int32."""
        return np.dtype(np.int32)

    def sample(self, key: Key) -> jax.Array:
        """Sample uniformly, int32 `[]`."""
        drawn = jax.random.randint(key, (), 0, self.n, jnp.int32)
        return drawn + self.start if self.start else drawn

    def contains(self, x: Any) -> bool:
        """Whether a concrete value is an integer from `start` to `start + n - 1`."""
        x = np.asarray(x)
        return bool(
            x.shape == () and np.issubdtype(x.dtype, np.integer) and self.start <= x and x - self.start < self.n
        )


@dataclass(frozen=True)
class MultiDiscrete:
    """Vectors of integers, where entry i is one of `0, ..., nvec[i] - 1`."""

    nvec: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nvec", tuple(int(n) for n in self.nvec))
        if not self.nvec or min(self.nvec) < 1:
            raise InputError(
                f"MultiDiscrete got nvec={self.nvec}; it needs at least one entry, and each must be 1 or more."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """`(len(nvec),)`."""
        return (len(self.nvec),)

    @property
    def dtype(self) -> np.dtype:
        """int32."""
        return np.dtype(np.int32)

    def sample(self, key: Key) -> jax.Array:
        """Sample uniformly, int32 `[len(nvec)]`."""
        return jax.random.randint(key, self.shape, 0, np.array(self.nvec, np.int32), jnp.int32)

    def contains(self, x: Any) -> bool:
        """Whether a concrete value is a vector of integers within the ranges."""
        x = np.asarray(x)
        fits = x.shape == self.shape and np.issubdtype(x.dtype, np.integer)
        return bool(fits and np.all(x >= 0) and np.all(x < np.array(self.nvec)))


@dataclass(frozen=True)
class Dict:
    """Mappings from names to members of other spaces, which may be nested `Dict` spaces."""

    spaces: Mapping[str, "Space"] = field(compare=False)
    """Sorted by name, as JAX sorts a dict."""
    _items: tuple[tuple[str, "Space"], ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        items = tuple(sorted(self.spaces.items()))
        object.__setattr__(self, "spaces", dict(items))
        object.__setattr__(self, "_items", items)

    @property
    def shape(self) -> dict[str, Any]:
        """The shape of each member."""
        return {name: space.shape for name, space in self._items}

    @property
    def dtype(self) -> dict[str, Any]:
        """The dtype of each member."""
        return {name: space.dtype for name, space in self._items}

    def sample(self, key: Key) -> dict[str, PyTree]:
        """Sample every member independently."""
        keys = jax.random.split(key, len(self._items))
        return {name: space.sample(k) for (name, space), k in zip(self._items, keys, strict=True)}

    def contains(self, x: Any) -> bool:
        """Whether a concrete mapping has exactly these names, each with a member of its space."""
        if not isinstance(x, Mapping) or set(x) != set(self.spaces):
            return False
        return all(space.contains(x[name]) for name, space in self._items)


Space: TypeAlias = Box | Discrete | MultiDiscrete | Dict


class Spaces(NamedTuple):
    """What an agent sees, and what it does."""

    observation: Space
    action: Space


def leaves(space: Space) -> list[Box | Discrete | MultiDiscrete]:
    """Return the spaces of which a space is made, in order: those of a dict, or itself.

    >>> leaves(Dict({"gear": Discrete(3), "position": Box(-1, 1, (2,))}))
    [Discrete(n=3), Box(-1.0, 1.0, shape=(2,), dtype=float32)]
    """
    return [leaf for part in space.spaces.values() for leaf in leaves(part)] if isinstance(space, Dict) else [space]


def check_actions(space: Space) -> None:
    """Raise an error for a Box of integers as an action space: a policy draws numbers with fractions for a Box."""
    if isinstance(space, Box) and space.dtype.kind in "biu":
        raise InputError(
            f"Actions are in {space}, a Box of whole numbers, but a policy gives numbers with fractions to a Box: make "
            "the action space, in a wrapper for example, a MultiDiscrete, or a Box of floats that the environment "
            "rounds."
        )


def flatten(space: Space, x: PyTree) -> jax.Array:
    """Flatten a member of a space to a float32 vector: boxes ravelled, integers one-hot, dicts concatenated by name.

    >>> flatten(Dict({"position": Box(-1, 1, (2,)), "gear": Discrete(3)}), {"position": jnp.zeros(2), "gear": 1})
    Array([0., 1., 0., 0., 0.], dtype=float32)
    """
    match space:
        case Box():
            return jnp.ravel(x).astype(jnp.float32)
        case Discrete():
            return jax.nn.one_hot(x - space.start if space.start else x, space.n, dtype=jnp.float32)
        case MultiDiscrete():
            return jnp.concatenate([jax.nn.one_hot(x[i], n, dtype=jnp.float32) for i, n in enumerate(space.nvec)])
        case Dict():
            return jnp.concatenate([flatten(inner, x[name]) for name, inner in space.spaces.items()])


def flatten_space(space: Space) -> Box:
    """Return the one-dimensional float32 box that `flatten` maps a space to."""
    match space:
        case Box():
            return Box(space.low.ravel(), space.high.ravel())
        case Discrete():
            return Box(0, 1, (space.n,))
        case MultiDiscrete():
            return Box(0, 1, (sum(space.nvec),))
        case Dict():
            boxes = [flatten_space(inner) for inner in space.spaces.values()]
            return Box(np.concatenate([b.low for b in boxes]), np.concatenate([b.high for b in boxes]))


def to_gymnasium(space: Space) -> Any:
    """Convert to a Gymnasium space."""
    spaces = _gymnasium_spaces()
    match space:
        case Box():
            return spaces.Box(space.low, space.high, space.shape, space.dtype.type)
        case Discrete():
            return spaces.Discrete(space.n, start=space.start)
        case MultiDiscrete():
            return spaces.MultiDiscrete(space.nvec)
        case Dict():
            return spaces.Dict({name: to_gymnasium(inner) for name, inner in space.spaces.items()})


def from_gymnasium(space: Any) -> Space:
    """Convert a Gymnasium space."""
    spaces = _gymnasium_spaces()
    match space:
        case spaces.Box():
            return Box(space.low, space.high, space.shape, space.dtype)
        case spaces.Discrete():
            return Discrete(int(space.n), int(space.start))
        case spaces.MultiDiscrete() if space.nvec.ndim == 1 and not space.start.any():
            return MultiDiscrete(tuple(space.nvec))
        case spaces.MultiBinary():
            return Box(0, 1, space.shape, np.int8)
        case spaces.Dict():
            return Dict({name: from_gymnasium(inner) for name, inner in space.spaces.items()})
    raise InputError(
        f"The Gymnasium space {space} is not supported: wrap the environment so that its space is a Box, a "
        "MultiBinary, a Discrete, a one-dimensional MultiDiscrete that starts at 0, or a Dict of these."
    )


def _gymnasium_spaces() -> Any:
    try:
        from gymnasium import spaces
    except ImportError:
        raise ImportError(
            "Converting a space needs Gymnasium, which is not installed: run pip install gymnasium."
        ) from None
    return spaces
