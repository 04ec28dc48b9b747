"""Your own torso in an actor-critic network.

A torso is an nnx module, created by a class or function `(observation_space, rngs) -> module`, with the number of its
features in `out_features`:

- feed-forward: `module(obs)` maps a batch of observations, leaves `[N, ...]`, to features `[N, out_features]`;
- recurrent: `initial_carry(batch_shape)`, `step(carry, obs)` and `unroll(carry, obs, reset)`, as in
  `lehr.networks.memory`. Leaves of a carry are `[*batch_shape, size]`, and zeros are the initial state.

Observations have the dtypes of the environment's space: bytes stay bytes, integers stay integers. If `actor_obs` or
`critic_obs` selects keys of a `Dict`, the torso only sees these keys.

>>> class Squares(nnx.Module):
...     def __init__(self, observation_space, rngs):
...         self.out_features = 8
...         self.layer = nnx.Linear(observation_space.shape[0], 8, rngs=rngs)
...     def __call__(self, obs):
...         return jnp.square(self.layer(obs))
>>> from lehr.networks import NetworkConfig, actor_critic
>>> from lehr.spaces import Box, Discrete
>>> network, params = actor_critic(Box(-1, 1, (4,)), Discrete(2), NetworkConfig(torso=Squares), jax.random.key(0))
>>> network.feature_sizes, network.value(params, network.initial_carry((3,)), jnp.ones((3, 4))).shape
((8, 8), (3,))
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from lehr.errors import InputError
from lehr.networks.observations import batch_shape, select
from lehr.spaces import Space
from lehr.types import PyTree

TorsoMaker: TypeAlias = Callable[..., nnx.Module]
"""Maps `(observation_space, rngs)` to a module, for example a subclass of `nnx.Module` with these arguments."""

_MEMORY = "initial_carry", "step", "unroll"


class CustomTorso(nnx.Module):
    """The user's own module, with the methods of a `Torso`."""

    def __init__(
        self, observation_space: Space, keys: tuple[str, ...] | None, make: TorsoMaker, rngs: nnx.Rngs
    ) -> None:
        self.space = select(observation_space, keys)
        self.keys = keys
        name = getattr(make, "__name__", repr(make))
        self.module = _made(make, name, self.space, rngs)
        self.out_features = _out_features(self.module, name)
        self.is_recurrent = _has_memory(self.module, name)
        _check(self, name)

    def initial_carry(self, batch_shape: tuple[int, ...]) -> PyTree:
        """Return zeros, or `()` if the torso is not recurrent."""
        return self._module.initial_carry(batch_shape) if self.is_recurrent else ()

    def step(self, carry: PyTree, obs: PyTree) -> tuple[PyTree, jax.Array]:
        """Return the next carry and features `[N, F]`; a feed-forward torso accepts any leading axes."""
        return self._module.step(carry, self._seen(obs)) if self.is_recurrent else (carry, self._encode(obs))

    def unroll(self, carry: PyTree, obs: PyTree, reset: jax.Array) -> tuple[PyTree, jax.Array]:
        """Return the last carry and features `[T, N, F]` of `T` steps."""
        if not self.is_recurrent:
            return carry, self._encode(obs)
        return self._module.unroll(carry, self._seen(obs), reset)

    @property
    def _module(self) -> Any:
        return self.module

    def _seen(self, obs: PyTree) -> PyTree:
        return obs if self.keys is None else {key: obs[key] for key in self.keys}

    def _encode(self, obs: PyTree) -> jax.Array:
        """Return features of single observations. The module always sees one leading axis."""
        obs, encode = self._seen(obs), self._module.__call__
        axes = len(batch_shape(self.space, obs))
        if axes == 0:
            return encode(jax.tree.map(lambda x: x[None], obs))[0]
        for _ in range(axes - 1):
            encode = jax.vmap(encode)
        return encode(obs)


def _made(make: TorsoMaker, name: str, space: Space, rngs: nnx.Rngs) -> nnx.Module:
    kind: Any = make
    if inspect.isclass(kind) and not issubclass(kind, nnx.Module):
        raise InputError(
            f"The torso {name} is a class, but not a subclass of nnx.Module: give one, or a function that returns an "
            "nnx.Module."
        )
    try:
        if inspect.isclass(make):  # nnx's metaclass has a signature that accepts anything
            inspect.signature(make.__init__).bind(None, space, rngs=rngs)
        else:
            inspect.signature(make).bind(space, rngs=rngs)
    except TypeError as error:
        raise InputError(
            f"The torso {name} is called as {name}(observation_space, rngs=rngs), but {error}: accept these arguments."
        ) from None
    module: Any = make(space, rngs=rngs)
    if not isinstance(module, nnx.Module):
        raise InputError(
            f"The torso {name} returned a {type(module).__name__}, but a torso must be an nnx.Module: return one, or "
            "give a subclass of nnx.Module."
        )
    return module


def _out_features(module: nnx.Module, name: str) -> int:
    size = getattr(module, "out_features", None)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        given = "has no out_features" if size is None else f"has out_features {size!r}"
        raise InputError(
            f"The torso {name} {given}: set self.out_features to the number of features it returns, such as 64."
        )
    return size


def _has_memory(module: nnx.Module, name: str) -> bool:
    """Whether the module has the methods of a recurrent torso; an error if it has only some of them."""
    found = [method for method in _MEMORY if hasattr(module, method)]
    if found and len(found) < len(_MEMORY):
        missing = [method for method in _MEMORY if method not in found]
        raise InputError(
            f"The torso {name} has {' and '.join(found)} but not {' and '.join(missing)}: a recurrent torso needs "
            f"{', '.join(_MEMORY)}; a feed-forward torso only needs __call__."
        )
    if not found and not callable(module):
        raise InputError(f"The torso {name} has no __call__: define __call__(self, obs), which returns the features.")
    return bool(found)


def _check(torso: CustomTorso, name: str) -> None:
    """Trace the torso on shapes, so that a mismatch is reported here and not by a later layer."""
    one = jax.eval_shape(torso.space.sample, jax.random.key(0))
    seen, seen_over_time = (
        jax.tree.map(lambda x, lead=lead: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), one)
        for lead in ((2,), (3, 2))
    )
    if not torso.is_recurrent:
        _require(name, "__call__", jax.eval_shape(torso.module, seen), (2, torso.out_features))
        return
    memory: Any = torso.module
    carry = jax.eval_shape(lambda: memory.initial_carry((2,)))
    reset = jax.ShapeDtypeStruct((3, 2), jnp.bool_)
    calls = {
        "step": (jax.eval_shape(memory.step, carry, seen), (2, torso.out_features)),
        "unroll": (jax.eval_shape(memory.unroll, carry, seen_over_time, reset), (3, 2, torso.out_features)),
    }
    for method, (outputs, shape) in calls.items():
        if not isinstance(outputs, tuple) or len(outputs) != 2:
            raise InputError(f"The torso {name} must return two values from {method}: the next carry and the features.")
        after, features = outputs
        _require(name, method, features, shape)
        if _layout(after) != _layout(carry):
            raise InputError(
                f"The torso {name} starts with the carry {_layout(carry)[1]}, but {method} returns "
                f"{_layout(after)[1]}: a carry must keep its structure, shapes and dtypes."
            )


def _require(name: str, method: str, features: Any, shape: tuple[int, ...]) -> None:
    found = getattr(features, "shape", None)
    if found is None:
        raise InputError(f"The torso {name} returned a {type(features).__name__} from {method}: return one array.")
    if found != shape:
        raise InputError(
            f"The torso {name} returned features of shape {found} from {method}, expected {shape}, whose last axis is "
            "out_features: correct one of them."
        )
    if not jnp.issubdtype(features.dtype, jnp.floating):
        raise InputError(f"The torso {name} returned features of type {features.dtype} from {method}: return floats.")


def _layout(carry: PyTree) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(carry)
    return structure, [(x.shape, str(x.dtype)) for x in leaves]
