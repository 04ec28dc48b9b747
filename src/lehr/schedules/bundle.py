"""All coefficients of a run as one pytree, evaluated together once per update inside the compiled program."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from lehr.errors import InputError
from lehr.schedules import Controller, FunctionSchedule, Schedule, Steps, stack

AnyCoefficient = Schedule | FunctionSchedule | Controller


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coefficients:
    """The coefficients of a run.

    Their numbers and shapes are leaves, so changing them does not recompile anything unless the largest number of
    phases changes.

    >>> from lehr.schedules import env_steps, schedule
    >>> coefficients = bundle({"entropy_coef": schedule("0.2 -> 0.1", 100), "discount": schedule(0.5)})
    >>> values = coefficients.values(coefficients.init(), env_steps(10, 5))
    >>> {name: round(float(value), 3) for name, value in values.items()}
    {'discount': 0.5, 'entropy_coef': 0.15}
    """

    scheduled: Schedule | None
    """All schedules stacked, `[C, K]`, so that one evaluation with few kernels covers them all."""
    others: dict[str, Any]
    """Controllers and function schedules."""
    names: tuple[str, ...] = field(metadata={"static": True})
    """The names of the stacked schedules, in order."""

    def init(self) -> dict[str, Any]:
        """Return the initial states of the controllers; they are part of the run's state."""
        return {name: other.init() for name, other in self.others.items()}

    def values(self, states: Mapping[str, Any], clock: Steps) -> dict[str, jax.Array]:
        """Return the coefficients for this update: a float32 `[]` for each name."""
        found: dict[str, Any] = {}
        for name, other in self.others.items():
            try:
                found[name] = other.value(states[name], clock)
            except InputError as error:
                raise InputError(f"{name}: {error}") from None
        if self.scheduled is not None:
            together = jax.vmap(lambda one: one(clock))(self.scheduled)
            found |= {name: together[index] for index, name in enumerate(self.names)}
        return {name: jnp.asarray(value, jnp.float32) for name, value in sorted(found.items())}

    def update(self, states: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the controllers' states after an update that produced these metrics."""
        return {name: other.update(states[name], metrics) for name, other in self.others.items()}


def bundle(coefficients: Mapping[str, AnyCoefficient]) -> Coefficients:
    """Combine bound coefficients into one pytree."""
    schedules = {name: one for name, one in sorted(coefficients.items()) if isinstance(one, Schedule)}
    others = {name: one for name, one in coefficients.items() if name not in schedules}
    return Coefficients(stack(list(schedules.values())) if schedules else None, others, tuple(schedules))


def population(members: Sequence[Mapping[str, AnyCoefficient]], phases: int = 1) -> Coefficients:
    """Combine the coefficients of many runs, with a leading member axis on every array, for `jax.vmap` of an iteration.

    All members must have the same names. A name must be a schedule in every member, or the same kind of controller in
    every member. Schedules are padded to at least `phases` phases.

    >>> from lehr.schedules import env_steps, schedule
    >>> both = population([{"entropy_coef": schedule(0.5)}, {"entropy_coef": schedule("1 -> 0", 100)}])
    >>> jax.vmap(lambda member: member.values({}, env_steps(25, 1))["entropy_coef"])(both).tolist()
    [0.5, 0.75]
    """
    first = bundle(members[0])
    for number, member in enumerate(members, 1):
        if set(member) != set(members[0]):
            raise InputError(
                f"Member {number} of a population has the coefficients {sorted(member)}, but member 1 has "
                f"{sorted(members[0])}; give all members the same coefficients."
            )
    scheduled = None
    if first.names:
        stacked = stack([member[name] for member in members for name in first.names], phases)
        scheduled = jax.tree.map(lambda leaf: leaf.reshape(len(members), len(first.names), -1), stacked)
    others = {name: stack([member[name] for member in members]) for name in first.others}
    return Coefficients(scheduled, others, first.names)
