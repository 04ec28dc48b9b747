"""Checkpoints: a pytree of arrays in one directory, written atomically and restored bit for bit.

    <directory>/000000409600/state.npz    the leaves as plain arrays
                             meta.json    paths, shapes and dtypes of the leaves, checksums, and the caller's metadata
                memory/                   large arrays of a learner's `memory`, see `lehr.training.chunks`

Nothing is pickled, and loading runs no code. A process killed at any moment leaves the last complete checkpoint.
"""

import contextlib
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from lehr.errors import InputError
from lehr.files import make_directory, refuse_link, sync_directory
from lehr.training import chunks
from lehr.training.checkpoint_files import (
    MEMORY,
    OF_ENVIRONMENT,
    read_arrays,
    read_chunks,
    read_document,
    write_document,
    write_files,
)
from lehr.training.leaves import CheckpointError, check_fits, leaves_by_path, restore
from lehr.types import PyTree

_ADDED = (".actor.resets",)
"""Begins of the paths of leaves that older checkpoints do not have; a state loaded from one keeps the template's. Their
first axis may have another length than the template's, if the run was on another number of devices."""


def save(
    directory: Path,
    state: PyTree,
    step: int,
    meta: Mapping[str, Any],
    keep: int = 3,
    protect: Collection[int] = (),
    memory: bool = True,
) -> Path:
    """Write a checkpoint and return its directory.

    Earlier checkpoints are deleted except the latest `keep - 1` and those in `protect`. Checkpoints of later steps,
    left over when a run went back to an earlier step, are deleted too, so the highest step is always the one saved
    last.

    Args:
        directory: holds all checkpoints of a run, and nothing else.
        state: pytree of JAX or NumPy arrays (including typed PRNG keys and small floats) or Python numbers.
        step: names the checkpoint; saving the same step again replaces it.
        meta: any JSON-serialisable mapping; `load` returns it.
        keep: number of checkpoints to keep, at least 1.
        protect: steps to keep regardless of `keep`, the best one for example.
        memory: whether to save the `memory` of the learner and the reward model.
    """
    if keep < 1 or step < 0:
        raise InputError(f"keep is {keep} and step is {step}; keep must be at least 1 and step at least 0.")
    with written(directory, step) as temporary:
        write_files(temporary, state, step, meta, memory)
    earlier = [other for other in steps(directory) if other <= step]
    keep_only(directory, {*earlier[-keep:], *set(protect).intersection(earlier)})
    return directory / f"{step:012d}"


@contextlib.contextmanager
def written(directory: Path, step: int) -> Iterator[Path]:
    """Give a directory for the files of a checkpoint, which becomes the checkpoint of `step` once they are written."""
    make_directory(directory)
    _clean(directory)
    final = directory / f"{step:012d}"
    temporary = final.with_name(f"{final.name}.tmp")
    temporary.mkdir()
    yield temporary
    if final.exists():
        # Directories cannot be swapped atomically: until the second rename, "<step>.replaced" counts as the step.
        final.rename(final.with_name(f"{final.name}.replaced"))
    temporary.rename(final)
    sync_directory(directory)
    _clean(directory)


def keep_only(directory: Path, wanted: Collection[int]) -> None:
    """Delete the checkpoints of all other steps, and the chunks that only they have."""
    found = _find(directory)
    for step in set(found) - set(wanted):
        _discard(found[step])
    _discard_chunks(directory)


def load(
    path: Path, template: PyTree, memory_lost: Callable[[str], object] | None = None, policy_only: bool = False
) -> tuple[PyTree, dict[str, Any]]:
    """Load one checkpoint and return the state, and the caller's `meta` with the `step` added.

    The template gives the structure, shapes and dtypes; its leaves are arrays, or `jax.ShapeDtypeStruct` from
    `jax.eval_shape`. Each leaf is restored as the template's type: a NumPy array, a Python number, or a JAX array, on
    the template's devices if it specifies any. Weak types are not preserved.

    If the checkpoint was saved without `memory`, the template's is used, and `without_memory` is added to the metadata.
    The same holds if `memory` is damaged and `memory_lost` is given, which is called with the error. With
    `policy_only`, the template's is used of all that belongs to the environment of the run.
    """
    document = read_document(path)
    wanted = leaves_by_path(template)
    wanted |= _resized(document["leaves"], wanted)
    leaves = [leaf for leaf in document["leaves"] if not (policy_only and OF_ENVIRONMENT.match(leaf["path"]))]
    saved = {described["path"] for described in leaves}
    added = {
        name: leaf
        for name, leaf in wanted.items()
        if (name.startswith(_ADDED) and name not in saved) or (policy_only and OF_ENVIRONMENT.match(name))
    }
    first = {name: leaf for name, leaf in wanted.items() if MEMORY.match(name)}
    has_memory = not (document.get("without_memory") or policy_only)
    left_out = {*added, *(() if has_memory else first)}
    read = {name: leaf for name, leaf in wanted.items() if name not in left_out}
    check_fits(path, leaves, read)
    restored = {
        described["path"]: restore(array, described, wanted[described["path"]])
        for described, array in read_arrays(path, document, read)
    }
    if has_memory:
        try:
            for described, array in read_chunks(path, document):
                restored[described["path"]] = restore(array, described, wanted[described["path"]])
        except CheckpointError as error:
            if memory_lost is None:
                raise
            memory_lost(str(error))
            has_memory = False
    if not has_memory:
        restored |= first
    state = jax.tree.unflatten(jax.tree.structure(template), [(added | restored)[name] for name in wanted])
    return state, document["meta"] | {"step": document["step"]} | ({} if has_memory else {"without_memory": True})


def _resized(saved: list[dict[str, Any]], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return templates of those leaves whose first axis depends on the number of devices, as long as in the file."""
    found = {}
    for described in saved:
        like = wanted.get(described["path"])
        if described["path"].startswith(_ADDED) and like is not None and like.ndim:
            length, *rest = described["shape"] or [0]
            if isinstance(length, int) and 0 < length < 2**32 and length != like.shape[0] and rest == [*like.shape[1:]]:
                found[described["path"]] = jax.ShapeDtypeStruct((length, *rest), like.dtype)
    return found


def newest(
    directory: Path,
    template: PyTree,
    report: Callable[[str], object] = warnings.warn,
    memory_lost: Callable[[str], object] | None = None,
    policy_only: bool = False,
) -> tuple[PyTree, dict[str, Any], Path]:
    """Load the latest intact checkpoint and return its state, meta and path. Damaged ones are reported and skipped."""
    found = _find(directory)
    if not found:
        raise InputError(f"There is no checkpoint in '{directory}'; the run ended before its first; start it again.")
    for path in reversed(found.values()):
        try:
            return *load(path, template, memory_lost, policy_only), path
        except CheckpointError as error:
            report(f"{error} Trying the one before.")
    raise CheckpointError(f"None of the {len(found)} checkpoints in '{directory}' can be read; start the run again.")


def amend(directory: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Change the metadata of every intact checkpoint; `change` gets it as `load` returns it."""
    refuse_link(directory)
    for path in _find(directory).values():
        try:
            document = read_document(path)
        except CheckpointError:
            continue
        changed = dict(change(document["meta"] | {"step": document["step"]}))
        changed.pop("step", None)
        if changed != document["meta"]:
            write_document(path, document | {"format": max(document["format"], 2), "meta": changed})


def latest_meta(directory: Path) -> dict[str, Any]:
    """Return the metadata of the latest checkpoint whose metadata is intact; empty if there is none."""
    for path in reversed(_find(directory).values()):
        try:
            document = read_document(path)
        except CheckpointError:
            continue
        return document["meta"] | {"step": document["step"]}
    return {}


def steps(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in a directory, in order; an empty list if there are none."""
    return list(_find(directory))


def _find(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints by step, in order. Links are ignored, since metadata is changed in place."""
    found: dict[int, Path] = {}
    for path in sorted(directory.glob("*")):  # "<step>" sorts before "<step>.replaced", which counts only if alone
        match = re.fullmatch(r"(\d{12,})(\.replaced)?", path.name)
        if match and not path.is_symlink():
            found.setdefault(int(match[1]), path)
    return dict(sorted(found.items()))


def _clean(directory: Path) -> None:
    """Remove unfinished files of a killed process."""
    for path in directory.glob("*.tmp"):
        _remove(path)
    for path in directory.glob("*.replaced"):
        if path.with_suffix("").exists():
            _discard(path)


def _discard(path: Path) -> None:
    """Remove a checkpoint; if killed halfway, what remains does not look like a checkpoint."""
    _remove(path.rename(path.with_name(f"{path.name}.tmp")))


def _remove(path: Path) -> None:
    """Remove a directory, or whatever has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def _discard_chunks(directory: Path) -> None:
    """Delete the chunks that no checkpoint has."""
    if not (directory / "memory").is_dir():
        return
    used: set[str] = set()
    for path in _find(directory).values():
        with contextlib.suppress(CheckpointError):  # a damaged checkpoint cannot be loaded, with or without its chunks
            used.update(name for leaf in read_document(path)["leaves"] for name in leaf.get("chunks", ()))
    chunks.discard(directory / "memory", used)
