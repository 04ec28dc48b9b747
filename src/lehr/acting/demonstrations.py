"""Demonstrations: whole episodes of an expert, read from a file or a Minari data set and checked against the spaces.

The layout of a file `demos.npz`, with `S` steps of `E` episodes, one after another; nothing in it is pickled:

    obs          [S, ...]   the observation that each action is based on; `obs/<key>` for each entry of a Dict space
    actions      [S, ...]   the action as the environment took it
    rewards      [S]        the environment's reward
    terminated   [S]        bool: the episode ended with this step in a terminal state
    truncated    [S]        bool: the episode was cut off with this step
    final_obs    [E, ...]   the observation after the last step of each episode; `final_obs/<key>` as above
    lengths      [E]        the number of steps of each episode; their sum is S
"""

import hashlib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lehr.envs.host.answers import beyond
from lehr.envs.host.base import layout, same_structure
from lehr.errors import InputError
from lehr.files import replaced
from lehr.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Spaces
from lehr.types import PyTree

MINARI = "minari:"
"""Prefix of the id of a Minari data set."""
_FLAT = ("actions", "rewards", "terminated", "truncated", "lengths")
_WHAT = "give a file that 'lehr record' wrote"


@dataclass(frozen=True)
class Demonstrations:
    """`S` steps of `E` episodes, as NumPy arrays; the fields are those of the file."""

    obs: PyTree
    actions: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_obs: PyTree
    lengths: np.ndarray

    def __repr__(self) -> str:
        return f"Demonstrations({self.summary if len(self.lengths) else 'no episodes'})"

    @property
    def last(self) -> np.ndarray:
        """Index of the last step of each episode, `[E]`."""
        return np.cumsum(self.lengths) - 1

    @property
    def returns(self) -> np.ndarray:
        """The sum of rewards of each episode, `[E]`."""
        return np.add.reduceat(self.rewards, self.last - self.lengths + 1, dtype=np.float64)

    @property
    def next_obs(self) -> PyTree:
        """The observation after each step, `[S, ...]`; after the last of an episode, its final one."""

        def following(obs: np.ndarray, final: np.ndarray) -> np.ndarray:
            shifted = np.roll(obs, -1, axis=0)
            shifted[self.last] = final
            return shifted

        return jax.tree.map(following, self.obs, self.final_obs)

    @property
    def summary(self) -> str:
        """The number of episodes and steps, and their mean return, in words."""
        returns, number = self.returns, len(self.lengths)
        ends = f"{int(self.terminated.sum())} terminated"
        return (
            f"{number} episode{'s' if number > 1 else ''} of {self.lengths.min()} to {self.lengths.max()} steps "
            f"({ends}), mean return {returns.mean():.6g} ({returns.min():.6g} to {returns.max():.6g})"
        )

    def first(self, episodes: int) -> "Demonstrations":
        """The first episodes."""
        steps = int(self.lengths[:episodes].sum())
        few = {name: jax.tree.map(lambda x: x[:steps], getattr(self, name)) for name in ("obs", *_FLAT[:-1])}
        final = jax.tree.map(lambda x: x[:episodes], self.final_obs)
        return replace(self, **few, final_obs=final, lengths=self.lengths[:episodes])

    def save(self, path: str | Path) -> Path:
        """Write a file `.npz`, in place of one of this name or of a link, once it is complete; return its path."""
        place = Path(path)
        if place.suffix != ".npz":
            raise InputError(f"The demonstrations would be saved in '{path}'; give a file name that ends in .npz.")
        arrays = {name: getattr(self, name) for name in _FLAT}
        arrays |= dict(_named("obs", self.obs)) | dict(_named("final_obs", self.final_obs))
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with replaced(place) as file:
                np.savez_compressed(file, **arrays)
        except OSError as error:
            raise InputError(
                f"Cannot write '{path}': {error.strerror or error}; fix that, or choose another file."
            ) from error
        return place


def joined(episodes: list[Demonstrations]) -> Demonstrations:
    """Several demonstrations as one."""

    def field(name: str) -> PyTree:
        return jax.tree.map(lambda *parts: np.concatenate(parts), *(getattr(one, name) for one in episodes))

    names = ("obs", "actions", "rewards", "terminated", "truncated", "final_obs", "lengths")
    return Demonstrations(**{name: field(name) for name in names})


def read_demonstrations(source: str, spaces: Spaces) -> tuple[Demonstrations, str]:
    """Read demonstrations and check them; return them, in the dtypes of the spaces, and their SHA-256.

    Args:
        source: path of a file, or `minari:` and the id of a data set that Minari has on this machine.
        spaces: of the environment that they must fit.
    """
    if source.startswith(MINARI):
        found = _from_minari(source.removeprefix(MINARI))
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(vars(found)):
            digest.update(np.ascontiguousarray(leaf).tobytes())
        return checked(found, spaces, source), digest.hexdigest()
    try:
        content = Path(source).read_bytes()
    except OSError as error:
        raise InputError(
            f"The demonstrations '{source}' cannot be read: {error.strerror}; record some with 'lehr record RUN "
            "--out demos.npz', or give minari:ID."
        ) from error
    return checked(_from_file(source, spaces.observation), spaces, source), hashlib.sha256(content).hexdigest()


def checked(given: Demonstrations, spaces: Spaces, source: str) -> Demonstrations:
    """Return demonstrations in the dtypes of the spaces; raise an error if they do not fit or are not whole."""
    name = f"The demonstrations '{source}'"
    lengths = np.asarray(given.lengths)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not lengths.size or lengths.min() < 1:
        raise InputError(f"{name} are empty: lengths is {_text(lengths)}, without a step in every episode; {_WHAT}.")
    steps, episodes = int(lengths.sum()), len(lengths)
    for field, space in (("obs", spaces.observation), ("final_obs", spaces.observation), ("actions", spaces.action)):
        size = episodes if field == "final_obs" else steps
        _check_members(name, field, getattr(given, field), space, size, f"{steps} steps of {episodes} episodes")
    for field, kinds in (("rewards", "fiu"), ("terminated", "b"), ("truncated", "b")):
        array = np.asarray(getattr(given, field))
        if array.shape != (steps,) or array.dtype.kind not in kinds:
            kind = "numbers" if field == "rewards" else "bools"
            raise InputError(f"{name} have {_text(array)} as {field}, but lengths require {steps} {kind}; {_WHAT}.")
    if not np.isfinite(given.rewards).all():
        raise InputError(f"{name} have rewards that are not finite; {_WHAT}.")
    inside = np.ones(steps, bool)
    inside[np.cumsum(lengths) - 1] = False
    if np.any((given.terminated | given.truncated) & inside):
        raise InputError(f"{name} have an episode that ends before its last step; check lengths, or {_WHAT}.")

    def cast(tree: PyTree, space: Space) -> PyTree:
        return jax.tree.map(lambda x, like: np.asarray(x, like.dtype), tree, layout(space))

    return Demonstrations(
        obs=cast(given.obs, spaces.observation),
        actions=cast(given.actions, spaces.action),
        rewards=np.asarray(given.rewards, np.float32),
        terminated=np.asarray(given.terminated),
        truncated=np.asarray(given.truncated),
        final_obs=cast(given.final_obs, spaces.observation),
        lengths=lengths.astype(np.int64),
    )


def _check_members(name: str, field: str, given: PyTree, space: Space, size: int, count: str) -> None:
    """Raise an error unless this is a batch of `size` members of the space."""
    wanted = layout(space)
    if not same_structure(given, wanted):
        raise InputError(f"{name} have other {field} than the environment's space, {space}; {_WHAT} for this task.")
    for (path, like), leaf in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(given), strict=True):
        array, what = np.asarray(leaf), field + jax.tree_util.keystr(path)
        if array.shape[1:] != like.shape or not np.can_cast(array.dtype, like.dtype, "same_kind"):
            raise InputError(
                f"{name} have {_text(array)} as {what}, but the environment's space requires {like.dtype}"
                f"{list(like.shape)} at each step; {_WHAT} for this task."
            )
        if len(array) != size:
            raise InputError(f"{name} have {len(array)} {what}, but lengths say {count}; {_WHAT}.")
        if (bad := beyond(array, like.dtype)) is not None:
            raise InputError(
                f"{name} have {bad} in {what}, which does not fit into {like.dtype}; {_WHAT} for this task."
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InputError(f"{name} have {what} that are not finite; {_WHAT}.")
    for part, values in _members(space, given):
        _check_range(name, field, part, values)


def _members(space: Space, given: PyTree) -> Iterator[tuple[Box | Discrete | MultiDiscrete, np.ndarray]]:
    if isinstance(space, Dict):
        for key, inner in space.spaces.items():
            yield from _members(inner, given[key])
    else:
        yield space, np.asarray(given)


def _check_range(name: str, field: str, space: Box | Discrete | MultiDiscrete, values: np.ndarray) -> None:
    """Raise an error for actions, or integers, outside of the space; observations may be a little beyond a box."""
    low: Any = 0
    high: Any = 0
    match space:
        case Discrete():
            low, high = space.start, space.start + space.n - 1
        case MultiDiscrete():
            high = np.array(space.nvec) - 1
        case Box():
            if field != "actions":
                return
            slack = 1e-4 * np.where(np.isfinite(space.high - space.low), space.high - space.low, 0)
            low, high = space.low - slack, space.high + slack
    if np.any(values < low) or np.any(values > high):
        raise InputError(
            f"{name} have {field} from {values.min()} to {values.max()}, outside of the environment's space, {space}; "
            f"{_WHAT} for this task."
        )


# Sources -------------------------------------------------------------------------------------------------------------


def _from_file(path: str, observation: Space) -> Demonstrations:
    """Read a file, with the structure of the observation space."""
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("it is one array")
        with archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            f"The demonstrations '{path}' are not a file of plain arrays in NumPy's format .npz ({error}); {_WHAT}."
        ) from error
    wanted = layout(observation)
    names = [*_FLAT, *(name for prefix in ("obs", "final_obs") for name, _ in _named(prefix, wanted))]
    if missing := [name for name in names if name not in arrays]:
        raise InputError(
            f"The demonstrations '{path}' have no {', '.join(missing)}, but {', '.join(sorted(arrays)) or 'nothing'}; "
            f"{_WHAT} for this task."
        )

    def tree(prefix: str) -> PyTree:
        leaves = [arrays[name] for name, _ in _named(prefix, wanted)]
        return jax.tree.unflatten(jax.tree.structure(wanted), leaves)

    return Demonstrations(obs=tree("obs"), final_obs=tree("final_obs"), **{name: arrays[name] for name in _FLAT})


def _named(prefix: str, tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves of an observation by their names in a file: `obs`, or `obs/<key>`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [("/".join([prefix, *(str(key.key) for key in path)]), leaf) for path, leaf in leaves]


def _from_minari(name: str) -> Demonstrations:
    """Read a data set that Minari has on this machine."""
    try:
        import minari
    except ImportError:
        raise InputError(
            f"demonstrations is 'minari:{name}', but Minari is not installed; run pip install 'lehr[minari]'."
        ) from None
    try:
        dataset = minari.load_dataset(name)
        episodes = [_minari_episode(episode) for episode in dataset.iterate_episodes()]
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise InputError(
            f"Minari cannot load {name!r} ({error}); 'minari list local' shows what is on this machine, and 'minari "
            f"download {name}' fetches it."
        ) from error
    if not episodes:
        raise InputError(f"The demonstrations 'minari:{name}' are empty; give a data set with episodes.")
    return joined(episodes)


def _minari_episode(episode: Any) -> Demonstrations:
    """One episode of Minari's, which has one observation more than actions."""
    rewards = np.asarray(episode.rewards, np.float32)
    return Demonstrations(
        obs=jax.tree.map(lambda x: np.asarray(x)[:-1], episode.observations),
        actions=np.asarray(episode.actions),
        rewards=rewards,
        terminated=np.asarray(episode.terminations, bool),
        truncated=np.asarray(episode.truncations, bool),
        final_obs=jax.tree.map(lambda x: np.asarray(x)[-1:], episode.observations),
        lengths=np.array([len(rewards)]),
    )


def _text(array: np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)}"
