"""The runner for environments on the device: many updates in one compiled program."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr import kernels
from lehr.training import background, compile_options
from lehr.training.iteration import iteration, next_rollout
from lehr.training.program import Program
from lehr.training.runners.base import MOST_UPDATES, is_unmeasured, measured, normalises
from lehr.training.sharding import ONE_DEVICE, RunSharding
from lehr.types import NOTHING, Metrics, TrainState, TreeShapes


class DeviceRunner:
    """Run chunks of updates as one compiled program, with the state donated."""

    def __init__(self, program: Program, state: TrainState, sharding: RunSharding = ONE_DEVICE) -> None:
        self.program, self.sharding = program, sharding
        self.names, self.most = metric_names(program, state, sharding=sharding), MOST_UPDATES
        self.since: float | None = None
        self._compiling: Future | None = None

    def prepare(self, state: TrainState) -> Future:
        """Begin to compile the program in the background, once for chunks of any length."""
        if self._compiling is None:
            self.since = time.perf_counter()
            if self.sharding is ONE_DEVICE:
                self._compiling = _compiling(self.program, TreeShapes.of(state))
            else:
                self._compiling = _begun(self.sharding.spread(partial(chunk, self.program, MOST_UPDATES)), state)
        return self._compiling

    def compile(self, state: TrainState) -> None:
        """Compile the program, or wait until it is compiled."""
        self._compiled = background.finished(self.prepare(state))

    def begin(self, state: TrainState) -> TrainState:
        """Return the state, with statistics of the observations of a first rollout if the run normalises them."""
        return measured_first(lambda state: self._compiled(state, np.int32(1))[0], state)

    def advance(self, state: TrainState, count: int) -> tuple[TrainState, jax.Array]:
        """Dispatch a chunk and return before the device has finished it."""
        return self._compiled(state, np.int32(count))

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


@background.remembered
def _compiling(program: Program, shapes: TreeShapes) -> Future:
    """Compile chunks of updates on one device in the background: runs alike in one process share them."""
    return _begun(partial(chunk, program, MOST_UPDATES), shapes.tree)


def _begun(chunks: Callable[..., Any], state: TrainState) -> Future:
    """Compile chunks of any length in the background."""
    lowered = jax.jit(chunks, donate_argnums=0).lower(state, np.int32(1))
    return background.start(partial(compile_options.compiled, lowered, compile_options.UPDATES))


def measured_first(update: Callable[[TrainState], TrainState], state: TrainState) -> TrainState:
    """Return the state of a run or a population, with statistics of a first rollout if it normalises observations.

    That rollout is an update whose other results are dropped, so that nothing more needs to be compiled; only its
    writes to `memory`, which is donated and not copied, stay there.
    """
    if not is_unmeasured(state):
        return state
    copied = jax.tree.map(lambda x: x.copy(), state.with_memories(NOTHING, NOTHING))
    after = update(copied.with_memories(*state.memories))
    return state._replace(observation_statistics=after.observation_statistics).with_memories(*after.memories)


def measured_inside(program: Program, state: TrainState) -> TrainState:
    """Return the same as `measured_first` for a run before its first update, as a part of a compiled program."""
    return measured(state, next_rollout(program, state)) if normalises(state) else state


def chunk(program: Program, most: int, state: TrainState, count: jax.Array) -> tuple[TrainState, jax.Array]:
    """Make `count` updates, at most `most`; the metrics `[most, M]` have one column per name in `metric_names`.

    `count` is traced: one program works for every length, so a run compiles once.
    """
    names = metric_names(program, state)

    def update(index: jax.Array, carried: tuple[TrainState, jax.Array]) -> tuple[TrainState, jax.Array]:
        state, rows = carried
        state, metrics = traced_once(program, 1, state)
        row = jnp.stack([metrics[name].astype(jnp.float32) for name in names])
        return state, rows.at[index].set(row)

    rows = jnp.zeros((most, len(names)))
    return jax.lax.fori_loop(0, count, update, (state, rows))


def metric_names(program: Program, state: TrainState, sharding: RunSharding = ONE_DEVICE) -> tuple[str, ...]:
    """Return the names of an update's metrics, in column order."""
    _, metrics = jax.eval_shape(sharding.spread(partial(traced_once, program, 1)), state)
    return tuple(sorted(metrics))


@partial(jax.jit, static_argnums=(0, 1))
def traced_once(program: Program, members: int, state: TrainState) -> tuple[TrainState, Metrics]:
    """Run an iteration with a cached trace, so that finding the names of its metrics does not need a second one.

    Args:
        program: that of the run.
        members: number of members of a population, whose caller applies `jax.vmap`; 1 for a run.
        state: of the run, or of one member.
    """
    with kernels.together(members):
        return iteration(program, state)
