"""Successive halving: members that do worse than others at the same age are stopped, and new ones take their places.

It is part of the compiled program: a few places train at once, and all other members wait as data, their coefficients
and their seeds. Every place has a clock of its own, so a member that is never stopped is the run that it would be
alone. Nothing is random, and decisions fall at fixed updates, so a resumed sweep decides the same again.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr import kernels
from lehr.errors import InputError
from lehr.schedules.bundle import Coefficients
from lehr.sweeps.evolution import in_rows
from lehr.sweeps.sections import HalvingSettings
from lehr.training.course import Course
from lehr.training.plan import Plan
from lehr.training.population import initial_member
from lehr.training.population_record import MEMBER, RUNG_SCORE
from lehr.training.program import Program
from lehr.training.runners.device import measured_inside
from lehr.training.runners.population import Candidates, PopulationState
from lehr.types import Key, Metrics, PyTree, TrainState


class HalvingState(NamedTuple):
    """What a population remembers of its members, those that wait included.

    Axes: `K` rungs, `N` members, `P` places.
    """

    candidates: Candidates
    """All members, `[N, ...]`."""
    begun: jax.Array
    """int32 `[]`: how many of them have begun."""
    member: jax.Array
    """int32 `[P]`: the member in each place; −1 if it is idle."""
    total: jax.Array
    """float32 `[P]`: sum of the returns of the episodes in the second half of the way to the next rung."""
    episodes: jax.Array
    """float32 `[P]`: their number."""
    scores: jax.Array
    """float32 `[K, N]`: the score of each member at each rung; NaN if it has not been there."""


def goes_on(scores: jax.Array, factor: int) -> jax.Array:
    r"""Which members are among the best at a rung, bool `[..., N]`.

    With $n$ scores at the rung so far, the best $\max(1, \lfloor n / factor \rfloor)$ go on; of equal ones, the first.

    Args:
        scores: `[..., N]`: NaN for members that have not been there.
        factor: one of so many goes on.

    >>> goes_on(jnp.array([3.0, jnp.nan, 9.0, 9.0, 5.0, -jnp.inf, 7.0]), 3).tolist()
    [False, False, True, True, False, False, False]
    """
    rank = jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1)  # NaN is last
    count = jnp.sum(~jnp.isnan(scores), axis=-1, keepdims=True)
    return (rank < jnp.maximum(1, count // factor)) & ~jnp.isnan(scores)


@dataclass(frozen=True)
class SuccessiveHalving:
    r"""Asynchronous successive halving (Li et al., 2020), in its stopping form.

    A member that has made $r_k$ updates, $r_k = r_0 \cdot factor^k$, is at rung $k$: it goes on if it is among the best
    $1 / factor$ of all members that were there so far, those that arrive with it included; see `goes_on`. Otherwise it
    is stopped, and the next member that waits begins in its place. Its score is the mean return of the episodes that
    ended in the second half of its updates.
    """

    program: Program
    settings: Any
    """The algorithm's."""
    network: Any
    rungs: tuple[int, ...]
    """Updates of a member at each rung, all below `last`."""
    last: int
    """Updates of a member that is never stopped."""
    factor: int
    most_rejected: int
    """A member with more non-finite updates is stopped."""
    names: ClassVar[tuple[str, ...]] = (MEMBER, RUNG_SCORE)

    @property
    def interval(self) -> int:
        """Members begin and are stopped only after updates whose number is a multiple of this, the first rung."""
        return self.rungs[0]

    def init(self, members: TrainState, candidates: Candidates) -> HalvingState:
        """The first members are in their places, and nobody has a score."""
        size, count = members.updates.shape[0], candidates.keys.shape[0]
        return HalvingState(
            candidates=jax.tree.map(jnp.copy, candidates),  # the members' buffers are donated, too
            begun=jnp.int32(size),
            member=jnp.arange(size, dtype=jnp.int32),
            total=jnp.zeros(size),
            episodes=jnp.zeros(size),
            scores=jnp.full((len(self.rungs), count), jnp.nan),
        )

    def course(self, candidates: int, places: int) -> "HalvingCourse":
        """Members end one by one."""
        whole = -(-self.last // self.interval) * self.interval
        return HalvingCourse(-(-candidates // places) * whole, self.rungs, self.last, self.factor)

    def before(self, state: PopulationState) -> PopulationState:
        """Let members that wait begin in free places, if it is time."""
        memory: HalvingState = state.evolution
        waits = memory.begun < memory.candidates.keys.shape[0]
        is_time = (state.updates % self.interval == 0) & waits & jnp.any(self._is_free(state))
        return jax.lax.cond(is_time, self._filled, lambda state: state, state)

    def __call__(self, state: PopulationState, metrics: Metrics) -> tuple[PopulationState, Metrics]:
        """Stop members that are not among the best, if it is time; tell who trained in each place, and the scores."""
        memory, age = self._watched(state, metrics), state.members.updates
        diverged = state.members.rejected > self.most_rejected
        unjudged = jnp.full(state.size, jnp.nan)
        is_time = state.updates % self.interval == 0
        after, score = jax.lax.cond(is_time, self._judged, lambda same, *_: (same, unjudged), memory, age, diverged)
        return state._replace(evolution=after), {MEMBER: memory.member.astype(jnp.float32), RUNG_SCORE: score}

    def _is_free(self, state: PopulationState) -> jax.Array:
        """The places that are idle, or whose member has just come to its end."""
        return (state.evolution.member < 0) | (state.members.updates >= self.last)

    def _watched(self, state: PopulationState, metrics: Metrics) -> HalvingState:
        """Add the episodes of an update, in the second half of the way to a rung."""
        memory, age = state.evolution, state.members.updates
        member = jnp.where(age > self.last, -1, memory.member)  # it came to its end with the update before
        begins = jnp.isin(age, jnp.array([rung // 2 + 1 for rung in self.rungs], age.dtype))
        count = metrics["episode/count"]
        found = jnp.where(count > 0, metrics["episode/return"] * count, 0.0)
        return memory._replace(
            member=member,
            total=jnp.where(begins, 0.0, memory.total) + found,
            episodes=jnp.where(begins, 0.0, memory.episodes) + count,
        )

    def _judged(self, memory: HalvingState, age: jax.Array, diverged: jax.Array) -> tuple[HalvingState, jax.Array]:
        """Note the scores of members at a rung, and stop those that do not go on.

        Args:
            memory: what is known of the members.
            age: `[P]`: updates of the member in each place.
            diverged: bool `[P]`: it had too many non-finite updates.
        """
        member, count = memory.member, memory.candidates.keys.shape[0]
        here = jnp.where(member >= 0, age, 0)[None] == jnp.array(self.rungs, age.dtype)[:, None]  # [K, P]
        mean = memory.total / jnp.maximum(memory.episodes, 1.0)
        score = jnp.where((memory.episodes > 0) & ~jnp.isnan(mean) & ~diverged, mean, -jnp.inf)
        rungs = jnp.arange(len(self.rungs))[:, None]
        scores = memory.scores.at[rungs, jnp.where(here, member[None], count)].set(score[None], mode="drop")
        stays = jnp.all(~here | goes_on(scores, self.factor)[:, member], axis=0) & ~diverged
        stopped = memory._replace(scores=scores, member=jnp.where(stays, member, -1))
        return stopped, jnp.where(jnp.any(here, axis=0), score, jnp.nan)

    def _filled(self, state: PopulationState) -> PopulationState:
        """Begin the next members in free places."""
        memory: HalvingState = state.evolution
        free, count = self._is_free(state), memory.candidates.keys.shape[0]
        number = memory.begun + jnp.cumsum(free, dtype=jnp.int32) - 1
        filled = free & (number < count)
        chosen = jax.tree.map(lambda leaf: leaf[jnp.where(filled, number, 0)], memory.candidates)
        after = memory._replace(
            begun=memory.begun + jnp.sum(filled, dtype=jnp.int32),
            member=jnp.where(filled, number, jnp.where(free, -1, memory.member)),
            total=jnp.where(filled, 0.0, memory.total),
            episodes=jnp.where(filled, 0.0, memory.episodes),
        )
        return state._replace(members=self._begun(state.members, filled, chosen), evolution=after)

    def _begun(self, members: TrainState, filled: jax.Array, chosen: Candidates) -> TrainState:
        """Put new members into some of the places."""

        def fresh(coefficients: Coefficients, key: Key, data: PyTree) -> TrainState:
            one = initial_member(self.program, self.settings, self.network, coefficients, key, data)
            return measured_inside(self.program, one)

        def one_of(place: tuple[jax.Array, Candidates, TrainState]) -> TrainState:
            is_new, candidate, old = place
            return jax.lax.cond(is_new, lambda: fresh(*candidate, old.reward_model.data), lambda: old)

        if jax.default_backend() == "cpu":  # one after the other, as at the beginning of a population
            return jax.lax.map(one_of, (filled, chosen, members))
        size = filled.shape[0]
        with kernels.together(size):
            new = jax.vmap(fresh)(*chosen, members.reward_model.data)

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(filled.reshape(size, *[1] * (old.ndim - 1)), new, old)

        return jax.tree.map(choose, new, members)


@dataclass(frozen=True)
class HalvingCourse(Course):
    """Members begin at multiples of the first rung, and each comes to its end after `last` updates of its own."""

    rungs: tuple[int, ...]
    last: int
    factor: int

    def next_end(self, update: int) -> int:
        """Return the next multiple of the interval, or the next update `last` after one."""
        interval = self.rungs[0]
        begin, rest = update - update % interval, self.last % interval
        return min(end for end in (begin + rest, begin + interval, begin + interval + rest) if end > update)

    def expected_updates(self, members: int) -> int:
        """The updates of all members, if each rung stops exactly all but one of `factor`."""
        made = before = 0
        for rung in self.rungs:
            made, before = made + members * (rung - before), rung
            members = max(1, members // self.factor)
        return made + members * (self.last - before)

    def members(self, state: Any) -> np.ndarray:
        """The number of the member in each place, int `[P]`; −1 if it is idle."""
        return np.asarray(state.evolution.member)

    def ended(self, state: Any) -> np.ndarray:
        """Which members have made all their updates."""
        return (self.members(state) >= 0) & (np.asarray(state.members.updates) == self.last)

    def is_over(self, done: int, state: Any) -> bool:
        """Whether nobody trains or waits."""
        trains = (self.members(state) >= 0) & (np.asarray(state.members.updates) < self.last)
        return not trains.any() and int(state.evolution.begun) == state.evolution.candidates.keys.shape[0]


def make_halving(settings: HalvingSettings, plan: Plan) -> SuccessiveHalving:
    """Return the successive halving that a sweep defines.

    Args:
        settings: of the sweep.
        plan: that of a member.
    """
    first = in_rows(plan, settings.first)
    rungs: list[int] = []
    while first * settings.factor ** len(rungs) < plan.updates:
        rungs.append(first * settings.factor ** len(rungs))
    if not rungs:
        steps = plan.program.steps_per_update
        raise InputError(
            f"halving.first is {settings.first}, which is {first} of the {plan.updates} updates of a run, each of "
            f"{steps} env steps; give fewer env steps, so that the first rung comes before the end."
        )
    return SuccessiveHalving(
        program=plan.program,
        settings=plan.settings,
        network=plan.network,
        rungs=tuple(rungs),
        last=plan.updates,
        factor=settings.factor,
        most_rejected=plan.run.max_rejected,
    )
