"""Runners make the updates of a run: on the device, with environments on the host, or with asynchronous actors.

All runners implement the protocol `Runner`; `make_runner` chooses one for a plan.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lehr.acting.actors import Blueprint, Pool
from lehr.config import describe
from lehr.envs import HostEnvironment
from lehr.training.program import builder
from lehr.training.runners.actors import ActorRunner
from lehr.training.runners.base import MOST_UPDATES, Interrupted, Runner
from lehr.training.runners.device import DeviceRunner
from lehr.training.runners.host import HostRunner

if TYPE_CHECKING:
    from lehr.training.plan import Plan

__all__ = ["MOST_UPDATES", "Interrupted", "Runner", "make_runner"]


def make_runner(plan: "Plan", warn: Callable[[str], object]) -> Runner:
    """Create the runner for a plan; `warn` receives warnings for the user."""
    program, run = plan.program, plan.run
    if plan.runner is not None:
        return plan.runner
    if not isinstance(program.env, HostEnvironment):
        return DeviceRunner(program, plan.state, plan.sharding)
    if run.actors == "none":
        return HostRunner(program, plan.state, run.overlap, warn)
    # Only the learner uses coefficients, and those that are functions cannot be pickled.
    defaults = {field.name: field.default for field in describe(type(plan.settings)) if field.is_coefficient}
    settings = replace(plan.settings, **defaults)
    blueprint = Blueprint(
        env=program.env,
        build=builder(type(program.algorithm), program.env, settings, plan.network),
        num_envs=settings.num_envs,
        horizon=settings.horizon,
        needs=program.needs,
        seed=run.seed,
        noise_steps=settings.noise_steps,
    )
    return ActorRunner(program, plan.state, Pool(run.actors, blueprint, run.num_actors, run.queue_size, warn), warn)
