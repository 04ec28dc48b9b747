"""The runner for a population: many updates of all members in one compiled program."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lehr.report.loggers.thinning import is_latest, is_per_episode, is_sum
from lehr.schedules.bundle import Coefficients
from lehr.training import background, compile_options
from lehr.training.course import Course
from lehr.training.program import Program
from lehr.training.runners.base import MOST_UPDATES
from lehr.training.runners.device import measured_first, traced_once
from lehr.training.sharding import MEMBERS_ON_ONE_DEVICE, MemberSharding
from lehr.types import Key, Metrics, PyTree, TrainState, TreeShapes, memory_size

MOST_BYTES = 16 << 20
"""Maximum size of the metrics of a chunk, which stay on the device until it ends and are then copied as a whole."""


class PopulationState(NamedTuple):
    """The full state of a population."""

    members: TrainState
    """The states of the members, each leaf with a leading member axis `[P, ...]`."""
    updates: jax.Array
    """uint32 `[]`: updates so far. A member that began later has made fewer."""
    evolution: PyTree = ()
    """State of what changes members while they train; `()` if nothing does."""

    @property
    def size(self) -> int:
        """The number of members."""
        return self.members.updates.shape[0]

    @property
    def saved(self) -> "PopulationState":
        """The part that a checkpoint stores: all but data. Coefficients may change during training, so they are in."""
        return self._replace(members=self.members.saved._replace(coefficients=self.members.coefficients))

    def completed(self, other: "PopulationState") -> "PopulationState":
        """Return this saved part together with the parts of another state that are not saved."""
        whole = self.members.completed(other.members)
        return self._replace(members=whole._replace(coefficients=self.members.coefficients))


AXES = PopulationState._make((0, None, None))
"""Where the arrays of each part have their member axis; what an evolution remembers is the same on all devices."""


class Candidates(NamedTuple):
    """The runs that a population trains: one for each of its places, or more, if some of them wait."""

    coefficients: Coefficients
    """Bound coefficients, each leaf `[N, ...]`."""
    keys: Key
    """`[N]`: the random seeds as keys."""


class Evolution(Protocol):
    """Changes members while they train: a static, hashable value, whose methods are part of the compiled program."""

    names: ClassVar[tuple[str, ...]]
    """Names of its metrics, sorted."""

    @property
    def interval(self) -> int:
        """It changes members only after updates whose number is a multiple of this."""

    def init(self, members: TrainState, candidates: Candidates) -> PyTree:
        """Return its state before the first update; the members are the first of the candidates."""

    def course(self, candidates: int, places: int) -> Course:
        """Return when a population with so many candidates and places ends."""

    def before(self, state: PopulationState) -> PopulationState:
        """Return the population that makes the next update."""

    def __call__(self, state: PopulationState, metrics: Metrics) -> tuple[PopulationState, Metrics]:
        """Return the population after an update with these metrics, `[P]` each, and metrics of what changed, `[P]`."""


class Chunks(NamedTuple):
    """What is static about the chunks of a population: hashable, so that populations alike share a program."""

    program: Program
    """That of every member."""
    names: tuple[str, ...]
    """The names of the metrics, in column order."""
    window: int
    """Number of updates that a row of the metrics stands for."""
    most: int
    """Maximum number of updates of a chunk."""
    evolution: Evolution | None
    sharding: MemberSharding


class TooLarge(Exception):
    """The compiled program needs more memory than the device has."""


class PopulationRunner:
    """Run chunks of updates of all members as one compiled program, with the state donated.

    Args:
        program: that of every member.
        state: with a leading member axis.
        window: number of updates that a row of the metrics stands for.
        evolution: what changes members while they train.
        sharding: how the state is placed on devices.
    """

    def __init__(
        self,
        program: Program,
        state: PopulationState,
        window: int = 1,
        evolution: Evolution | None = None,
        sharding: MemberSharding = MEMBERS_ON_ONE_DEVICE,
    ) -> None:
        self.program, self.window, self.evolution, self.sharding = program, window, evolution, sharding
        names = member_metric_names(program, state.members, sharding)
        self.names = (*names, *(evolution.names if evolution is not None else ()))
        rows = max(1, min(MOST_UPDATES, MOST_BYTES // (4 * state.size * len(self.names))))
        self.most = rows * window
        self.since: float | None = None

    def prepare(self, state: PopulationState) -> Future:
        """Begin to compile the program in the background, once for chunks of any length.

        All populations of the same shapes share it.
        """
        self.since = self.since or time.perf_counter()
        chunks = Chunks(self.program, self.names, self.window, self.most, self.evolution, self.sharding)
        return _compiling(chunks, TreeShapes.of(state))

    def compile(self, state: PopulationState) -> None:
        """Compile the program, or wait until it is compiled."""
        self._compiled = background.finished(self.prepare(state))
        need = needed_memory(self._compiled)
        if jax.default_backend() == "cpu":  # its devices share one memory
            need *= self.sharding.devices
        if need > memory_size():
            raise TooLarge(f"{need / 2**30:.1f} GiB of {memory_size() / 2**30:.1f} GiB")

    def begin(self, state: PopulationState) -> PopulationState:
        """Return the state, with statistics of the observations of a first rollout if the runs normalise them."""

        def update(members: TrainState) -> TrainState:
            updates, evolution = jax.tree.map(lambda x: x.copy(), (state.updates, state.evolution))
            return self._compiled(PopulationState(members, updates, evolution), np.int32(1))[0].members

        return state._replace(members=measured_first(update, state.members))

    def advance(self, state: PopulationState, count: int) -> tuple[PopulationState, jax.Array]:
        """Dispatch a chunk, which begins with a new window; return before the device has finished it."""
        return self._compiled(state, np.int32(count))

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


def update_of_all(program: Program, size: int, sharding: MemberSharding) -> Callable[[TrainState], Any]:
    """Return an update of so many members, each device's at once."""
    return sharding.spread(jax.vmap(partial(traced_once, program, size // sharding.devices)), (0,), 0)


def member_metric_names(program: Program, members: TrainState, sharding: MemberSharding) -> tuple[str, ...]:
    """Return the names of an update's metrics, in column order.

    The update is traced as it is for a chunk, which then need not do it again.
    """
    _, metrics = jax.eval_shape(update_of_all(program, members.updates.shape[0], sharding), members)
    return tuple(sorted(metrics))


@background.remembered
def _compiling(chunks: Chunks, shapes: TreeShapes) -> Future:
    """Compile the program for states of these shapes in the background."""
    sharding = chunks.sharding
    chunk: Any = partial(population_chunk, chunks)
    if chunks.evolution is None:  # no member knows of another, so each device runs a chunk of its own
        chunk = partial(population_chunk, chunks._replace(sharding=MEMBERS_ON_ONE_DEVICE))
        chunk = sharding.spread(chunk, (AXES, None), (AXES, 1))
    options: dict[str, Any] = {}
    if sharding.devices > 1:
        states = PopulationState._make(map(sharding.of, AXES))
        options = {"in_shardings": (states, sharding.of(None)), "out_shardings": (states, sharding.of(1))}
    lowered = jax.jit(chunk, donate_argnums=0, **options).lower(shapes.tree, jax.ShapeDtypeStruct((), jnp.int32))
    return background.start(partial(compile_options.compiled, lowered, compile_options.UPDATES))


def needed_memory(compiled: Any) -> int:
    """The bytes that a compiled program needs at once; 0 if the backend does not tell."""
    found = compiled.memory_analysis()
    if found is None:
        return 0
    own = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return own + found.argument_size_in_bytes


def population_chunk(chunks: Chunks, state: PopulationState, count: jax.Array) -> tuple[PopulationState, jax.Array]:
    """Make `count` updates of all members; the metrics are `[most / window, P, M]`, a row for each window of updates.

    A row stands for its updates as a row of a thinned log does: see `lehr.report.loggers.thinning`.
    """
    program, names, window, most, evolution, sharding = chunks
    update_all = update_of_all(program, state.size, sharding)
    rule = Combining.of(names)

    def update(index: jax.Array, carried: tuple[PopulationState, jax.Array, jax.Array]) -> tuple:
        state, totals, weights = carried
        if evolution is not None:
            state = evolution.before(state)
        members, metrics = update_all(state.members)
        state = state._replace(members=members, updates=state.updates + 1)
        if evolution is not None:
            state, changes = evolution(state, metrics)
            metrics |= changes
        row = jnp.stack([metrics[name].astype(jnp.float32) for name in names], axis=-1)
        slot = index // window
        total, weight = rule.add(totals[slot], weights[slot], row)
        return state, totals.at[slot].set(total), weights.at[slot].set(weight)

    zeros = jnp.zeros((most // window, state.size, len(names)))
    state, totals, weights = jax.lax.fori_loop(0, count, update, (state, zeros, zeros))
    return state, rule.result(totals, weights)


@dataclass(frozen=True)
class Combining:
    """How the metrics of several updates become one row, for each column `[M]`."""

    latest: np.ndarray
    summed: np.ndarray
    per_episode: np.ndarray
    episodes: int | None
    """The column with the number of episodes."""

    @classmethod
    def of(cls, names: tuple[str, ...]) -> "Combining":
        """The rule for metrics of these names."""

        def where(is_so: Callable[[str], bool]) -> np.ndarray:
            return np.array([is_so(name) for name in names])

        episodes = names.index("episode/count") if "episode/count" in names else None
        return cls(where(is_latest), where(is_sum), where(is_per_episode), episodes)

    def add(self, total: jax.Array, weight: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Add an update's row `[..., M]` to the sums and weights of its window."""
        finite = jnp.isfinite(row)
        count = 1.0 if self.episodes is None else row[..., self.episodes, None]
        more = jnp.where(finite, jnp.where(self.per_episode, count, 1.0), 0.0)
        added = total + jnp.where(finite, row, 0.0) * more
        return jnp.where(self.latest, row, added), jnp.where(self.latest, 1.0, weight + more)

    def result(self, total: jax.Array, weight: jax.Array) -> jax.Array:
        """The rows: sums, the latest values, or means; NaN without a finite value."""
        mean = jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), jnp.nan)
        return jnp.where(self.summed, total, mean)
