"""The learning of one update as a compiled program, for rollouts collected on the host."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.acting.rollout import Collected
from lehr.training import compile_options
from lehr.training.iteration import learn
from lehr.training.program import Program
from lehr.types import NOTHING, PyTree, TrainState


class Update:
    """Compiled learning of one update, with the metrics as one row."""

    def __init__(self, program: Program, state: TrainState, watched: tuple[str, ...]) -> None:
        """`watched` names the metrics that the caller measures."""
        self.program, self.watched = program, watched
        shapes = program.collected_shapes(state.learner.params, state.observation_statistics, state.actor)
        self.shapes = shapes._replace(actor=NOTHING)
        _, metrics = jax.eval_shape(lambda *given: learn(program, *given), without_actor(state), self.shapes)
        self.names = tuple(sorted({*metrics, *watched}))

    def compile(self, state: TrainState, keeps: bool = False) -> None:
        """Compile for states of these shapes; unless the caller `keeps` them, the algorithm's `memory` is donated."""
        watched = {name: jnp.float32(0) for name in self.watched}
        update = jax.jit(self._update, donate_argnums=() if keeps else (1,))
        lowered = update.lower(*_apart(state), self.shapes, watched)
        self._compiled = compile_options.compiled(lowered, compile_options.UPDATES)

    def __call__(
        self, state: TrainState, collected: Collected, watched: Mapping[str, float]
    ) -> tuple[TrainState, jax.Array]:
        """Return the state after the update, without its actor, and the row of metrics."""
        given = {name: np.float32(value) for name, value in watched.items()}
        return self._compiled(*_apart(state), collected._replace(actor=NOTHING), given)

    def table(self, rows: list[jax.Array]) -> np.ndarray:
        """Stack rows into one array `[U, M]`."""
        return np.stack(jax.device_get(rows)) if rows else np.zeros((0, len(self.names)), np.float32)

    def _update(
        self, state: TrainState, memory: PyTree, collected: Collected, watched: dict[str, jax.Array]
    ) -> tuple[TrainState, jax.Array]:
        whole = state._replace(learner=state.learner._replace(memory=memory))
        after, metrics = learn(self.program, whole, collected)
        metrics |= watched
        row = jnp.stack([metrics[name].astype(jnp.float32) for name in self.names])
        return without_actor(after), row


def without_actor(state: TrainState) -> TrainState:
    """Return the part of a state that learning changes."""
    return state._replace(actor=NOTHING, pending=())


def _apart(state: TrainState) -> tuple[TrainState, Any]:
    """Split the part of a state that learning changes into everything but `memory`, and `memory`."""
    state = without_actor(state)
    return state._replace(learner=state.learner._replace(memory=NOTHING)), state.learner.memory
