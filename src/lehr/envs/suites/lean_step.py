"""The state of an environment of others without what no step reads.

Brax's `State`, for one, holds much that a step computes anew: metrics, rewards, most of the world frame. In a scan each
such array would be written at every step, for no one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from lehr import kernels
from lehr.envs.suites.foreign import settle
from lehr.errors import InputError
from lehr.types import PyTree


@dataclass(frozen=True, eq=False)
class LeanStep:
    """A step as a function of the arrays that it really reads."""

    call: Callable[[list[jax.Array], PyTree], tuple[list[jax.Array], PyTree]]
    """All leaves of the state and the action, to all leaves of the next state and what is seen of it."""
    structure: Any
    """The tree of the state."""
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    """Its leaves, as they are after a step."""
    is_kept: tuple[bool, ...]
    """Which of them a step reads, or whoever acts."""

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of what is kept, in the tree of the state."""
        paths, _ = jax.tree_util.tree_flatten_with_path(self.structure.unflatten(self.is_kept))
        return tuple(jax.tree_util.keystr(path) for path, keep in paths if keep)

    def kept(self, state: PyTree) -> tuple[jax.Array, ...]:
        """What is kept of a state, with the types that it has from the first step on."""
        parts = zip(jax.tree.leaves(state), self.leaves, self.is_kept, strict=True)
        return tuple(settle(x, like.dtype) for x, like, keep in parts if keep)

    def whole(self, kept: tuple[jax.Array, ...]) -> Any:
        """The state, with zeros in the place of what is not kept."""
        rest = iter(kept)
        parts = zip(self.leaves, self.is_kept, strict=True)
        return self.structure.unflatten([next(rest) if keep else jnp.zeros(x.shape, x.dtype) for x, keep in parts])

    def step(self, kept: tuple[jax.Array, ...], action: PyTree) -> tuple[tuple[jax.Array, ...], PyTree]:
        """Act once: what is kept of the next state, and what is seen of it."""
        after, seen = self.call(jax.tree.leaves(self.whole(kept)), action)
        return self.kept(after), seen


def lean_step(
    name: str,
    step: Callable[[Any, Any], Any],
    begun: Any,
    action: PyTree,
    seen: Callable[[Any], PyTree],
    acted_on: Callable[[Any], PyTree] = lambda state: (),
) -> LeanStep:
    """Find out what a step reads.

    Args:
        name: of the environment, for what is said of it.
        step: a state and an action to the next state.
        begun: the shapes of the state after a reset.
        action: the shapes of an action.
        seen: what training looks at in the state after a step.
        acted_on: what is kept in any case.
    """
    structure: Any = jax.tree.structure(begun)

    def call(leaves: list[jax.Array], action: PyTree) -> tuple[list[jax.Array], PyTree]:
        after = step(structure.unflatten(leaves), action)
        if structure != jax.tree.structure(after):
            raise InputError(
                f"The state of {name} has other entries after a step than after a reset: give info and metrics the "
                "same keys in both."
            )
        return jax.tree.leaves(after), seen(after)

    jitted = jax.jit(kernels.rewrite(call))  # its trace is remembered: the scan that calls it does not trace it again
    after, _ = jitted.eval_shape(jax.tree.leaves(begun), action)
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in after)
    # A key has no zeros to put in its place.
    always = {*jax.tree.leaves(acted_on(structure.unflatten(range(len(types)))))}
    kept = [index in always or jnp.issubdtype(x.dtype, jax.dtypes.extended) for index, x in enumerate(types)]
    eliminate = getattr(partial_eval, "dce_jaxpr", None)
    if eliminate is None:
        return LeanStep(jitted, structure, types, tuple(True for _ in types))
    program = jitted.trace(list(types), action).jaxpr
    rest = [True] * (len(program.out_avals) - len(kept))
    while True:  # what is kept must be computed, so what it is computed of must be kept
        _, used = eliminate(program.jaxpr, kept + rest)
        more = [old or new for old, new in zip(kept, used, strict=False)]
        if more == kept:
            return LeanStep(jitted, structure, types, tuple(kept))
        kept = more
