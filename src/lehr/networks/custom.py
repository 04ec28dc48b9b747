"""A torso of the user's own in an actor-critic: everything around it stays as it is.

Such a torso is an nnx module, made by a class or function `(observation_space, rngs) -> module`, that says the size of
its features as `out_features`:

- without memory: `module(obs)`, a batch of observations, leaves `[N, ...]`, to features `[N, out_features]`;
- with memory: `initial_carry(batch_shape)`, `step(carry, obs)` and `unroll(carry, obs, reset)`, with the meaning that
  they have in `lehr.networks.memory`. Leaves of a carry are `[*batch_shape, size]`, and zeros are an empty memory.

Observations come as they are in the environment's space, bytes as bytes and integers as integers; where `actor_obs` or
`critic_obs` selects keys of a `Dict`, with these keys alone.

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
"""`(observation_space, rngs)` to a module, such as a subclass of `nnx.Module` with these arguments."""

_MEMORY = "initial_carry", "step", "unroll"


class CustomTorso(nnx.Module):
    """A module of the user's own, under the methods of a `Torso`."""

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
        """Zeros, or `()` without memory."""
        return self._module.initial_carry(batch_shape) if self.is_recurrent else ()

    def step(self, carry: PyTree, obs: PyTree) -> tuple[PyTree, jax.Array]:
        """One step: the next carry and features `[N, F]`; without memory of any leading axes."""
        return self._module.step(carry, self._seen(obs)) if self.is_recurrent else (carry, self._encode(obs))

    def unroll(self, carry: PyTree, obs: PyTree, reset: jax.Array) -> tuple[PyTree, jax.Array]:
        """`T` steps: the last carry and features `[T, N, F]`."""
        if not self.is_recurrent:
            return carry, self._encode(obs)
        return self._module.unroll(carry, self._seen(obs), reset)

    @property
    def _module(self) -> Any:
        return self.module

    def _seen(self, obs: PyTree) -> PyTree:
        return obs if self.keys is None else {key: obs[key] for key in self.keys}

    def _encode(self, obs: PyTree) -> jax.Array:
        """Features of single observations. The module sees one leading axis, whatever there are."""
        obs, encode = self._seen(obs), self._module.__call__
        axes = len(batch_shape(self.space, obs))
        if axes == 0:
            return encode(jax.tree.map(lambda x: x[None], obs))[0]
        for _ in range(axes - 1):
            encode = jax.vmap(encode)
        return encode(obs)


def _made(make: TorsoMaker, name: str, space: Space, rngs: nnx.Rngs) -> nnx.Module:
    try:
        if inspect.isclass(make):  # nnx calls it by a metaclass, which takes anything
            inspect.signature(make.__init__).bind(None, space, rngs=rngs)
        else:
            inspect.signature(make).bind(space, rngs=rngs)
    except TypeError as error:
        raise InputError(
            f"The torso {name} is called as {name}(observation_space, rngs=rngs), but {error}: give it these arguments."
        ) from None
    module: Any = make(space, rngs=rngs)
    if not isinstance(module, nnx.Module):
        raise InputError(
            f"The torso {name} made a {type(module).__name__}, but a torso is an nnx.Module: return one, or give a "
            "subclass of nnx.Module."
        )
    return module


def _out_features(module: nnx.Module, name: str) -> int:
    size = getattr(module, "out_features", None)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        given = "has no out_features" if size is None else f"has {size!r} as its out_features"
        raise InputError(
            f"The torso {name} {given}: set self.out_features to the number of features that it gives, such as 64."
        )
    return size


def _has_memory(module: nnx.Module, name: str) -> bool:
    """Whether the module has the methods of a memory; some of them are too few."""
    found = [method for method in _MEMORY if hasattr(module, method)]
    if found and len(found) < len(_MEMORY):
        missing = [method for method in _MEMORY if method not in found]
        raise InputError(
            f"The torso {name} has {' and '.join(found)} but not {' and '.join(missing)}: a memory needs "
            f"{', '.join(_MEMORY)}; one without memory needs __call__ alone."
        )
    if not found and not callable(module):
        raise InputError(f"The torso {name} has no __call__: define __call__(self, obs), which gives the features.")
    return bool(found)


def _check(torso: CustomTorso, name: str) -> None:
    """Try the torso on shapes: what does not fit is said here, and not by a layer after it."""
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
            raise InputError(f"The torso {name} must give the next carry and the features, two things, in {method}.")
        after, features = outputs
        _require(name, method, features, shape)
        if _layout(after) != _layout(carry):
            raise InputError(
                f"The torso {name} begins with the carry {_layout(carry)[1]}, but {method} gives {_layout(after)[1]}: "
                "a carry keeps its structure, its shapes and its dtypes."
            )


def _require(name: str, method: str, features: Any, shape: tuple[int, ...]) -> None:
    found = getattr(features, "shape", None)
    if found is None:
        raise InputError(f"The torso {name} gave a {type(features).__name__} in {method}, but features are one array.")
    if found != shape:
        raise InputError(
            f"The torso {name} gave features of shape {found} in {method}, but {shape} is expected, whose last axis is "
            "out_features: correct either."
        )
    if not jnp.issubdtype(features.dtype, jnp.floating):
        raise InputError(f"The torso {name} gave features of type {features.dtype} in {method}: make them floats.")


def _layout(carry: PyTree) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(carry)
    return structure, [(x.shape, str(x.dtype)) for x in leaves]
