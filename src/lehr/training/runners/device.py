"""Many updates as one compiled program, for environments on the device."""

from functools import partial

import jax
import jax.numpy as jnp

from lehr.training.iteration import iteration
from lehr.training.program import Program
from lehr.types import Metrics, TrainState

MOST_UPDATES = 1024
"""Updates in one chunk at the most; their metrics are held on the device until the chunk is over."""


class DeviceRunner:
    """Chunks of updates as one compiled program, with the state donated."""

    def __init__(self, program: Program, state: TrainState) -> None:
        self.program = program
        self.names = metric_names(program, state)

    def compile(self, state: TrainState) -> None:
        """Compile the program, once for chunks of all lengths."""
        program = jax.jit(partial(chunk, self.program, MOST_UPDATES), donate_argnums=0)
        self._compiled = program.lower(state, jnp.int32(1)).compile()

    def begin(self, state: TrainState) -> TrainState:
        """The state says everything."""
        return state

    def advance(self, state: TrainState, count: int) -> tuple[TrainState, jax.Array]:
        """Dispatch a chunk; the device works on it when this returns."""
        return self._compiled(state, jnp.int32(count))

    def close(self) -> None:
        """There is nothing to let go of."""


def chunk(program: Program, most: int, state: TrainState, count: jax.Array) -> tuple[TrainState, jax.Array]:
    """`count` updates, `most` at the most, and their metrics `[most, M]`, a column for each of `metric_names`.

    `count` is traced: one program serves every length, so a run is compiled once.
    """
    names = metric_names(program, state)

    def update(index: jax.Array, carried: tuple[TrainState, jax.Array]) -> tuple[TrainState, jax.Array]:
        state, rows = carried
        state, metrics = _traced_once(program, state)
        row = jnp.stack([metrics[name].astype(jnp.float32) for name in names])
        return state, rows.at[index].set(row)

    rows = jnp.zeros((most, len(names)))
    return jax.lax.fori_loop(0, count, update, (state, rows))


def metric_names(program: Program, state: TrainState) -> tuple[str, ...]:
    """The metrics of an update, in the order of the columns."""
    _, metrics = _traced_once.eval_shape(program, state)
    return tuple(sorted(metrics))


@partial(jax.jit, static_argnums=0)
def _traced_once(program: Program, state: TrainState) -> tuple[TrainState, Metrics]:
    """An iteration whose trace is remembered: to look at its metrics costs no second one."""
    return iteration(program, state)
