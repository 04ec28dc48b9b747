"""Action masks: the entry `action_mask` of an observation says which discrete actions are possible.

A mask holds integers or bools, not 0 where an action is possible. Its shape follows from the action space:

- `Discrete(n)`: `[n]`;
- `MultiDiscrete(nvec)` of K components: `[Σ nvec]`, the masks of the components one after the other, or
  `[K, max nvec]`, a row for each component, whose surplus entries are ignored.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.errors import InputError
from lehr.spaces import Box, Dict, Discrete, MultiDiscrete, Space
from lehr.types import Key, PyTree

MASK = "action_mask"
"""The entry of an observation that says which actions are possible, by the convention of PettingZoo and Jumanji."""


def has_mask(observation_space: Space, action_space: Space) -> bool:
    """Whether observations have a mask of the actions; an error if they have one that does not fit the actions.

    >>> has_mask(Dict({"action_mask": Box(0, 1, (2,), np.int8)}), Discrete(2)), has_mask(Box(0, 1, (2,)), Discrete(2))
    (True, False)
    """
    if not isinstance(observation_space, Dict) or MASK not in observation_space.spaces:
        return False
    mask = observation_space.spaces[MASK]
    advice = "rename the entry, or set action_mask=False to treat it like any other"
    if not isinstance(action_space, Discrete | MultiDiscrete):
        raise InputError(
            f"The observation has an action_mask, but actions are in {action_space}, and only Discrete and "
            f"MultiDiscrete actions can be masked: {advice}."
        )
    if not _fits(mask, action_space):
        shapes = " or ".join(map(str, _shapes(action_space)))
        raise InputError(
            f"The action_mask of the observation is {mask}, but for actions in {action_space} it must be a Box of "
            f"integers or bools, such as np.int8, with the shape {shapes}: convert it, {advice}."
        )
    return True


def is_masked(observation_space: Space, action_space: Space) -> bool:
    """Whether observations have a mask that fits the actions; one that does not fit is an entry like any other."""
    found = observation_space.spaces.get(MASK) if isinstance(observation_space, Dict) else None
    return found is not None and isinstance(action_space, Discrete | MultiDiscrete) and _fits(found, action_space)


def size(action_space: Discrete | MultiDiscrete) -> int:
    """Number of actions of all components together."""
    return sum(_components(action_space))


def possible(action_space: Discrete | MultiDiscrete, mask: Any) -> Any:
    """Return which actions a mask allows, bool `[..., n]` or `[..., Σ nvec]`; NumPy for NumPy, JAX for JAX.

    >>> possible(MultiDiscrete((1, 2)), np.array([[1, 1], [0, 1]])).tolist()
    [True, False, True]
    """
    widths = _components(action_space)
    allowed = mask != 0
    if mask.shape[-1] != sum(widths):  # a row for each component
        rows = np.concatenate([row * max(widths) + np.arange(width) for row, width in enumerate(widths)])
        allowed = allowed.reshape(*mask.shape[:-2], len(widths) * max(widths))[..., rows]
    return allowed


def forbid(action_space: Discrete | MultiDiscrete, logits: jax.Array, allowed: jax.Array) -> jax.Array:
    """Return logits `[..., n]` or `[..., Σ nvec]` that are −inf where an action is not possible.

    A component without any possible action keeps its logits: that has no solution, and the environment is reported.

    >>> forbid(Discrete(3), jnp.array([1.0, 2.0, 3.0]), jnp.array([True, False, True])).tolist()
    [1.0, -inf, 3.0]
    """
    parts = [part | ~part.any(-1, keepdims=True) for part in _split(action_space, allowed)]
    return jnp.where(jnp.concatenate(parts, -1), logits, -jnp.inf)


def sample(observation_space: Space, action_space: Space, obs: PyTree, key: Key) -> PyTree:
    """Sample an action uniformly from those that one observation allows; from all if it has no mask."""
    if not is_masked(observation_space, action_space):
        return action_space.sample(key)
    assert isinstance(action_space, Discrete | MultiDiscrete)
    logits = forbid(action_space, jnp.zeros(size(action_space)), possible(action_space, jnp.asarray(obs[MASK])))
    keys = jax.random.split(key, len(_components(action_space)))
    parts = zip(keys, _split(action_space, logits), strict=True)
    drawn = jnp.stack([jax.random.categorical(k, part) for k, part in parts]).astype(action_space.dtype)
    return drawn[0] + action_space.start if isinstance(action_space, Discrete) else drawn


def without_action(observation_space: Space, action_space: Space, obs: Any) -> Any:
    """Where no action is possible, or none in a component: bool `[...]`, NumPy or JAX.

    `None` if observations have no mask that fits the actions.

    >>> space = Dict({"action_mask": Box(0, 1, (2,), np.int8)})
    >>> without_action(space, Discrete(2), {"action_mask": np.array([[0, 1], [0, 0]], np.int8)}).tolist()
    [False, True]
    """
    if not is_masked(observation_space, action_space):
        return None
    assert isinstance(action_space, Discrete | MultiDiscrete)
    stuck = [~part.any(-1) for part in _split(action_space, possible(action_space, obs[MASK]))]
    return stuck[0] if len(stuck) == 1 else sum(stuck) > 0


def _fits(mask: Space, action_space: Discrete | MultiDiscrete) -> bool:
    return isinstance(mask, Box) and mask.dtype.kind in "biu" and mask.shape in _shapes(action_space)


def _shapes(action_space: Discrete | MultiDiscrete) -> list[tuple[int, ...]]:
    widths = _components(action_space)
    return [(sum(widths),)] + ([(len(widths), max(widths))] if len(widths) > 1 else [])


def _components(action_space: Discrete | MultiDiscrete) -> tuple[int, ...]:
    return (action_space.n,) if isinstance(action_space, Discrete) else action_space.nvec


def _split(action_space: Discrete | MultiDiscrete, x: Any) -> list[Any]:
    """Split the last axis into components."""
    stops = np.cumsum(_components(action_space)).tolist()
    return [x[..., start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
