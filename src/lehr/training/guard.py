"""The guard: what an algorithm returns is checked when it is traced, and non-finite updates are not applied."""

from typing import Any

import jax
import jax.numpy as jnp

from lehr.algorithms.base import Algorithm
from lehr.errors import InputError
from lehr.maths import across
from lehr.types import Learner, Metrics, PyTree, TrainState

SMALL = 1 << 16
"""Arrays with fewer numbers cost less to copy than to check by themselves."""


def checked(algorithm: Algorithm, before: Learner, found: Any) -> tuple[Learner, Metrics]:
    """Return what `learn` of an algorithm returned for a learner, if it is what the trainer needs."""
    name = f"learn of {type(algorithm).__name__}"
    parts = (found,) if isinstance(found, Learner) or not isinstance(found, tuple) else found
    if not (len(parts) == 2 and isinstance(parts[0], Learner) and isinstance(parts[1], dict)):
        given = ", ".join(type(part).__name__ for part in parts) or "an empty tuple"
        raise InputError(f"{name} must return two things, the learner and a dict of metrics; it returned {given}.")
    learner, metrics = parts
    for key, value in metrics.items():
        if not (isinstance(key, str) and _kind(value).endswith("[]")):
            raise InputError(
                f"{name} returned the metric {key!r} as {_kind(value)}; metrics are single numbers, such as a mean, "
                "and their names are texts."
            )
    if "loss/total" not in metrics:
        raise InputError(
            f"{name} returned no metric 'loss/total', which says whether the update is finite; its metrics are "
            f"{', '.join(sorted(metrics)) or 'none'}."
        )
    was, now = _kinds(before), _kinds(learner)
    for path in [*was, *now]:
        if was.get(path) != now.get(path):
            raise InputError(
                f"{name} returned learner{path} as {now.get(path, 'nothing')}, but got it as "
                f"{was.get(path, 'nothing')}; structure, shapes and dtypes of the learner must stay as init made them."
            )
    return learner, {key: jnp.asarray(value, jnp.float32) for key, value in metrics.items()}


def _kinds(learner: Learner) -> dict[str, str]:
    """What there is at each path of a learner, containers included; except in `data`, which is never changed."""
    found: dict[str, str] = {}

    def visit(path: Any, node: Any) -> bool:
        found[jax.tree_util.keystr(path)] = _kind(node)
        return False

    jax.tree_util.tree_leaves_with_path(learner._replace(data=()), is_leaf=visit, is_leaf_takes_path=True)
    return found


def _kind(value: Any) -> str:
    """The dtype and shape of a number or an array, such as `float32[4, 64]`, or the class of anything else."""
    try:
        found = jax.typeof(value)
    except TypeError:
        return type(value).__name__
    return f"{found.dtype}{list(found.shape)}"


def guarded(before: TrainState, after: TrainState, loss: jax.Array, most_rejected: int | None = None) -> TrainState:
    """Return the state after an update; if the loss or anything learned is not finite, undo the learning.

    The rollout was collected either way, so the actor and the clock advance. `memory` may be large and is not checked;
    `data` never changes. After more than `most_rejected` such updates, a run learns nothing any more: that is how a
    population goes on without a member that diverged, where a run of its own would stop.
    """
    sound = is_finite((after.learner.params, after.learner.optimiser, after.learner.auxiliary))
    sound &= is_finite(after.reward_model._replace(memory=(), data=())) & jnp.isfinite(loss)
    sound = across.all(sound)  # an environment of one device may have returned what is not finite
    if most_rejected is not None:
        sound &= before.rejected <= most_rejected

    def kept(new: PyTree, old: PyTree) -> PyTree:
        if jax.default_backend() == "cpu":  # copies need no compiling; a GPU would wait for the host to choose
            return jax.lax.cond(sound, lambda: new, lambda: old)
        return jax.tree.map(lambda new, old: jnp.where(sound, new, old), new, old)

    def learner(new: TrainState, old: TrainState, name: str) -> PyTree:
        learned, before = getattr(new, name), getattr(old, name)
        unseen = kept(learned._replace(memory=(), data=()), before._replace(memory=(), data=()))
        return unseen._replace(memory=learned.memory, data=before.data)

    return after._replace(
        learner=learner(after, before, "learner"),
        reward_model=learner(after, before, "reward_model"),
        observation_statistics=kept(after.observation_statistics, before.observation_statistics),
        reward_scaling=kept(after.reward_scaling, before.reward_scaling),
        controllers=kept(after.controllers, before.controllers),
        rejected=before.rejected + ~sound,
    )


def is_finite(tree: PyTree) -> jax.Array:
    """Whether every number in a pytree is finite, bool `[]`.

    Small arrays are checked as one: each check is a kernel to compile and to launch.
    """
    small: dict[Any, list[jax.Array]] = {}
    checked: list[jax.Array] = []
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            (small.setdefault(leaf.dtype, []) if leaf.size < SMALL else checked).append(leaf)
    checked += [jnp.concatenate([leaf.reshape(-1) for leaf in leaves]) for leaves in small.values()]
    return jnp.all(jnp.stack([jnp.bool(True), *(jnp.all(jnp.isfinite(leaf)) for leaf in checked)]))
