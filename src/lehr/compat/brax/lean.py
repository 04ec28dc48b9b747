"""The state of an environment without what no step reads.

Brax's `State` holds much that a step computes anew: metrics, rewards, most of the world frame. In a scan each such
array would be written at every step, for no one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from lehr.envs.optional import settle
from lehr.types import PyTree

Seen = Callable[[Any], PyTree]


@dataclass(frozen=True, eq=False)
class LeanStep:
    """A batch of environments as a function of the arrays that it really reads."""

    call: Callable[[list[jax.Array], jax.Array], tuple[list[jax.Array], PyTree]]
    """All leaves of the state and the actions, to all leaves of the next state and what is seen of it."""
    structure: Any
    """The tree of Brax's `State`."""
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    """Its leaves, as they are after a step."""
    is_read: tuple[bool, ...]
    """Which of them a step or the policy reads."""

    def kept(self, leaves: list[jax.Array]) -> tuple[jax.Array, ...]:
        """Those of all leaves that are read, with the types that they have from the first step on."""
        parts = zip(leaves, self.leaves, self.is_read, strict=True)
        return tuple(settle(x, like.dtype) for x, like, read in parts if read)

    def whole(self, kept: tuple[jax.Array, ...]) -> list[jax.Array]:
        """All leaves, with zeros in the place of those that no one reads."""
        rest = iter(kept)
        parts = zip(self.leaves, self.is_read, strict=True)
        return [next(rest) if read else jnp.zeros(x.shape, x.dtype) for x, read in parts]

    def obs(self, kept: tuple[jax.Array, ...]) -> PyTree:
        """What is acted on next."""
        return self.structure.unflatten(self.whole(kept)).obs

    def step(self, kept: tuple[jax.Array, ...], action: jax.Array) -> tuple[tuple[jax.Array, ...], PyTree]:
        """Act once."""
        after, seen = self.call(self.whole(kept), action)
        return self.kept(after), seen


def lean_step(env: Any, begun: Any, action: jax.ShapeDtypeStruct, seen: Seen) -> LeanStep:
    """Find out what a step reads.

    Args:
        env: wrapped for training, so it steps all environments at once.
        begun: the shapes of its state after a reset.
        action: the shape of all actions.
        seen: what training looks at in the state after a step.
    """
    structure: Any = jax.tree.structure(begun)

    def call(leaves: list[jax.Array], action: jax.Array) -> tuple[list[jax.Array], PyTree]:
        after = env.step(structure.unflatten(leaves), action)
        return jax.tree.leaves(after), seen(after)

    jitted = jax.jit(call)  # its trace is remembered: the scan that calls it does not trace the environment again
    leaves = jax.tree.leaves(begun)
    after, _ = jitted.eval_shape(leaves, action)
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in after)
    program = jitted.trace(list(types), action).jaxpr
    outputs = len(program.out_avals)

    eliminate = getattr(partial_eval, "dce_jaxpr", None)
    nothing, everything = jax.tree.map(lambda _: False, begun), jax.tree.map(lambda _: True, begun.obs)
    acted_on = jax.tree.leaves(nothing.replace(obs=everything))
    # A key has no zeros to put in its place.
    is_read = [
        eliminate is None or here or jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        for here, leaf in zip(acted_on, types, strict=True)
    ]
    while eliminate is not None:
        _, used = eliminate(program.jaxpr, is_read + [True] * (outputs - len(is_read)))
        reads = [old or new for old, new in zip(is_read, used, strict=False)]
        if reads == is_read:
            break
        is_read = reads
    return LeanStep(jitted, structure, types, tuple(is_read))
