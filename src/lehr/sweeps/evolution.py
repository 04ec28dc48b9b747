"""Population-based training: a population whose worst members become copies of the best while it trains.

It is part of the compiled program: members are ranked by the return of their episodes since the last ranking, and
randomness comes from a seed and the clock, so that a resumed sweep does the same again.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from lehr.errors import InputError
from lehr.schedules.bundle import Coefficients
from lehr.schedules.constructors import position
from lehr.sweeps.lineage import PARENT
from lehr.sweeps.sections import EvolutionSettings
from lehr.sweeps.space import Space
from lehr.training.course import Course
from lehr.training.plan import Plan
from lehr.training.population import default_window
from lehr.training.runners.population import Candidates, PopulationState
from lehr.types import NOTHING, Key, Metrics, TrainState, derive


class EvolutionState(NamedTuple):
    """What a population remembers between rankings."""

    total: jax.Array
    """float32 `[P]`: sum of the returns of the episodes since the last ranking."""
    episodes: jax.Array
    """float32 `[P]`: their number."""
    parent: jax.Array
    """int32 `[P]`: the member that each place continues after the last update; another one if it was copied then."""

    @property
    def fitness(self) -> jax.Array:
        """Mean return, `[P]`; minus infinity without an episode."""
        known = self.episodes > 0
        return jnp.where(known, self.total / jnp.where(known, self.episodes, 1.0), -jnp.inf)


def initial(size: int) -> EvolutionState:
    """The state before the first update of a population of this size."""
    return EvolutionState(jnp.zeros(size), jnp.zeros(size), jnp.arange(size, dtype=jnp.int32))


def watched(state: EvolutionState, metrics: Metrics) -> EvolutionState:
    """Add the episodes of an update."""
    count = metrics["episode/count"]
    found = jnp.where(count > 0, metrics["episode/return"] * count, 0.0)
    return state._replace(total=state.total + found, episodes=state.episodes + count)


@dataclass(frozen=True)
class PopulationBasedTraining:
    r"""Population-based training (Jaderberg et al., 2017), with truncation selection.

    Every `interval` updates, each of the worst `share` of the members becomes a copy of one of the best `share`, drawn
    at random; then each of its swept coefficients $c$ becomes $c \cdot f$ or $c / f$, with equal probability, within
    the limits of the coefficient.
    """

    interval: int
    """Updates between rankings."""
    last: int
    """There is no ranking after this update, the last one: a copy would not be trained any more."""
    coefficients: tuple[str, ...]
    """The names of those that are perturbed."""
    low: tuple[float, ...]
    """Their least values."""
    high: tuple[float, ...]
    share: float = 0.25
    factor: float = 1.2
    seed: int = 0
    most_rejected: int = 10
    """A member with more non-finite updates is the worst."""
    names: ClassVar[tuple[str, ...]] = (PARENT,)

    def init(self, members: TrainState, candidates: Candidates) -> EvolutionState:
        """Nobody was copied yet."""
        return initial(members.updates.shape[0])

    def course(self, candidates: int, places: int) -> Course:
        """All members end with the last update."""
        return Course(self.last)

    def before(self, state: PopulationState) -> PopulationState:
        """Nothing changes before an update."""
        return state

    def __call__(self, state: PopulationState, metrics: Metrics) -> tuple[PopulationState, Metrics]:
        """Rank the members and replace the worst, if it is time; tell which member each place now continues."""
        seen = state._replace(evolution=watched(state.evolution, metrics))
        own = jnp.arange(state.size, dtype=jnp.int32)
        kept = seen._replace(evolution=seen.evolution._replace(parent=own))
        is_time = (seen.updates % self.interval == 0) & (seen.updates < self.last)
        after = jax.lax.cond(is_time, self._replaced, lambda state: state, kept)
        return after, {PARENT: after.evolution.parent.astype(jnp.float32)}

    def _replaced(self, state: PopulationState) -> PopulationState:
        size, members = state.size, state.members
        key = derive(jax.random.key(self.seed), "evolution", state.updates)
        count = max(1, int(self.share * size)) if size > 1 else 0
        fitness = jnp.where(members.rejected > self.most_rejected, -jnp.inf, state.evolution.fitness)
        order = jnp.argsort(-fitness, stable=True)
        best, worst = order[:count], order[size - count :]
        drawn = best[jax.random.randint(derive(key, "source"), (count,), 0, max(count, 1))]
        worse = fitness[worst] < fitness[drawn]  # nobody is replaced by an equal
        own = jnp.arange(size, dtype=jnp.int32)
        source = own.at[worst].set(jnp.where(worse, drawn, worst).astype(jnp.int32))
        moved = source != own
        after = copied(members, source)
        after = after._replace(coefficients=self._perturbed(after.coefficients, moved, derive(key, "perturb")))
        zeros = jnp.zeros(size)
        return state._replace(members=after, evolution=EvolutionState(zeros, zeros, source))

    def _perturbed(self, coefficients: Coefficients, moved: jax.Array, key: Key) -> Coefficients:
        """Multiply or divide the swept coefficients of the members that moved."""
        schedules = coefficients.scheduled
        assert schedules is not None
        size = moved.shape[0]
        start, end = schedules.start, schedules.end
        for number, name in enumerate(self.coefficients):
            index = coefficients.names.index(name)
            up = jax.random.bernoulli(jax.random.fold_in(key, number), 0.5, (size,))
            scale = jnp.where(moved, jnp.where(up, self.factor, 1 / self.factor), 1.0)[:, None]
            limits = self.low[number], self.high[number]
            change = moved[:, None]
            start = start.at[:, index].set(
                jnp.where(change, jnp.clip(start[:, index] * scale, *limits), start[:, index])
            )
            end = end.at[:, index].set(jnp.where(change, jnp.clip(end[:, index] * scale, *limits), end[:, index]))
        return replace(coefficients, scheduled=schedules.with_values(start, end))


def copied(members: TrainState, source: jax.Array) -> TrainState:
    """Put a copy of member `source[i]` into each place `i`; only its random key stays that of the place."""
    taken = jax.tree.map(lambda leaf: leaf[source], members._replace(key=NOTHING))
    return taken._replace(key=members.key)


def in_rows(plan: Plan, given: float | str) -> int:
    """Convert a share of the budget, or env steps, to updates; longer than a row, so many that they end with one."""
    window = default_window(plan)
    every = plan.every(round(position(given).bound(plan.run.total_steps)))
    return every if every < window else -(-every // window) * window


def make_evolution(settings: EvolutionSettings, space: Space, seed: int, plan: Plan) -> PopulationBasedTraining:
    """Return the population-based training that a sweep defines.

    Args:
        settings: of the sweep.
        space: the ranges of the swept coefficients.
        seed: random seed.
        plan: that of a member.
    """
    ranges: dict[str, Any] = dict(space.domains)
    for name in ranges:
        if name not in plan.state.coefficients.names:
            raise InputError(
                f"{name} has no effect with the other settings, so evolution cannot change it; remove it from "
                "parameters, or change the settings."
            )
    return PopulationBasedTraining(
        interval=in_rows(plan, settings.interval),
        last=plan.updates,
        coefficients=tuple(ranges),
        low=tuple(domain.low for domain in ranges.values()),
        high=tuple(domain.high for domain in ranges.values()),
        share=settings.share,
        factor=settings.factor,
        seed=seed,
        most_rejected=plan.run.max_rejected,
    )
