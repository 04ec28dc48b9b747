"""How the updates of a run are made: many in one compiled program, or one by one around environments on the host."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from lehr.acting.actors import ActorRunner, Blueprint, Pool
from lehr.config import describe
from lehr.envs import HostEnvironment
from lehr.schedules.bundle import Coefficients
from lehr.training.iteration import Program, chunk, metric_names
from lehr.training.plan import Plan
from lehr.training.runners.host import HostRunner
from lehr.types import TrainState

MOST_UPDATES = 1024
"""Updates in one chunk at the most; their metrics are held on the device until the chunk is over."""


class Runner(Protocol):
    """What makes the updates of one run."""

    names: tuple[str, ...]
    """The metrics of an update, in the order of the columns."""

    def compile(self, state: TrainState) -> None:
        """Compile all that is needed, for states like this one."""

    def begin(self, state: TrainState) -> TrainState:
        """Make everything ready to go on from this state."""

    def advance(self, state: TrainState, count: int) -> tuple[TrainState, Any]:
        """The state after `count` updates, and their metrics `[count or more, M]`, perhaps still being computed."""

    def close(self) -> None:
        """Let go of what the run needed."""


class DeviceRunner:
    """Chunks of updates as one compiled program, with the state donated."""

    def __init__(self, program: Program, coefficients: Coefficients, state: TrainState) -> None:
        self.program, self.coefficients = program, coefficients
        self.names = metric_names(program, coefficients, state)

    def compile(self, state: TrainState) -> None:
        """Compile the program, once for chunks of all lengths."""
        program = jax.jit(partial(chunk, self.program, MOST_UPDATES), donate_argnums=1)
        self._compiled = program.lower(self.coefficients, state, jnp.int32(1)).compile()

    def begin(self, state: TrainState) -> TrainState:
        """The state says everything."""
        return state

    def advance(self, state: TrainState, count: int) -> tuple[TrainState, jax.Array]:
        """Dispatch a chunk; the device works on it when this returns."""
        return self._compiled(self.coefficients, state, jnp.int32(count))

    def close(self) -> None:
        """There is nothing to let go of."""


def make_runner(plan: Plan, warn: Callable[[str], object]) -> Runner:
    """The runner for where the environments are; `warn` is told what the user should not miss."""
    what = plan.program, plan.coefficients, plan.state
    if not isinstance(plan.program.env, HostEnvironment):
        return DeviceRunner(*what)
    run = plan.run
    if run.actors == "none":
        return HostRunner(*what, run.overlap, warn)
    # Coefficients are the learner's affair; those that are functions could not be sent anywhere.
    defaults = {field.name: field.default for field in describe(type(plan.settings)) if field.is_coefficient}
    settings = replace(plan.settings, **defaults)
    blueprint = Blueprint(plan.program.env, plan.algorithm, settings, plan.network, run.seed)
    return ActorRunner(*what, Pool(run.actors, blueprint, run.num_actors, run.queue_size, warn), warn)
