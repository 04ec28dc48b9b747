"""The record of a population: the metrics of all members, in columns."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import numpy as np

from lehr.acting.evaluation import EpisodeResults, Evaluator, evaluation_metrics, run_many
from lehr.acting.policy import PolicyParameters
from lehr.envs import HostEnvironment
from lehr.files import refuse_link
from lehr.training import background, checkpoint, columns, cores
from lehr.training.course import Course
from lehr.training.plan import Plan
from lehr.training.record import Chunk
from lehr.training.run_record import Recorded
from lehr.training.runners.population import PopulationState
from lehr.training.sharding import MemberSharding
from lehr.types import Key, TrainState, TreeShapes, derive

ENDED = "ended"
"""The directory of the members that came to their end before the others, each with a checkpoint."""
MEMBER = "evolution/member"
"""The metric that says which member is in each place, for populations whose places change members."""
RUNG_SCORE = "evolution/score"
"""The metric with the score of a member where it is compared with others; NaN elsewhere."""
SETTLED_SECONDS = 1.0
"""Seconds of training after which the evaluation is compiled. By then chunks are long, and it delays them less."""
EVALUATIONS = ("evaluate/return", "evaluate/return_std", "evaluate/length", "evaluate/return_sampled")


class PopulationRecord:
    """Writes down the updates of a population.

    Args:
        labels: the name of each member, for the user; members beyond these only fill the population up.
        window: number of updates of a row.
        course: when members come to their end.
        sharding: how the members are placed on devices.
        population: what is trained. Its verdict is not used: a member that diverges does not stop the others.
    """

    def __init__(
        self,
        labels: Sequence[str],
        window: int,
        course: Course,
        sharding: MemberSharding,
        population: Recorded,
    ) -> None:
        plan, directory, names, state, meta, _, warn = population
        self.labels, self.unit, self.plan, self.names, self.warn = labels, window, plan, names, warn
        self.course, self.ended = course, directory.path / ENDED
        self.directory = directory.path / "metrics"
        for path in (self.directory, self.ended):
            refuse_link(path)
        self.latest: dict[str, Any] = {}
        self.written = int(state.updates)
        """The update up to which rows are on disk."""
        columns.cut(self.directory, self.written)
        self.waiting: list[dict[str, np.ndarray]] = []
        """Rows that are not on disk yet."""
        self.warned = False
        """Whether members that were compared without an episode were reported."""
        self.seconds = 0.0
        """Time of training, in this process."""
        self.trained = 0 if meta is None else meta["trained"]
        """Updates of all members together."""
        frozen = np.asarray(state.members.rejected) > plan.run.max_rejected
        self.frozen = set(course.members(state)[frozen].tolist())
        """The members whose freezing was reported."""
        self.sharding = sharding
        self._evaluation = evaluation_of(plan, state.members, sharding)

    def prepare(self, state: PopulationState, after: Future | None, is_busy: bool = False) -> None:
        """Begin to compile the evaluation in the background, unless few cores are busy with the updates.

        Then it is compiled once training has settled.
        """
        if self.plan.run.evaluate_episodes and not cores.are_few():
            self._evaluation()

    def evaluate(
        self, state: PopulationState, done: int, stops: Callable[[], bool] | None = None
    ) -> dict[str, np.ndarray]:
        """Evaluate the members, each as a run of its own would be, and save those that do not keep their places."""
        ended = self.course.ended(state)
        if self.plan.run.evaluate_episodes == 0 or (ended is not None and not ended.any()):
            return {}
        found = evaluation_metrics(*(self._results(state.members, greedy) for greedy in (True, False)))
        if ended is None:
            return found
        self._save_ended(state, ended)
        return {name: np.where(ended, values, np.nan) for name, values in found.items()}

    def _results(self, members: TrainState, greedy: bool) -> EpisodeResults:
        """The episodes of all members, `[P, episodes]`."""
        place = self.sharding.place
        given = self.plan.policy(members).learned, members.key, members.updates
        returns, lengths = background.finished(self._evaluation())(*place(given, 0), place(np.bool_(greedy), None))
        return EpisodeResults(*(np.asarray(x).reshape(len(members.updates), -1) for x in (returns, lengths)))

    def _save_ended(self, state: PopulationState, ended: np.ndarray) -> None:
        """Save the states of members whose places are given away, each in a directory with its number."""
        members = self.course.members(state)
        for place in map(int, np.flatnonzero(ended)):
            one = jax.tree.map(lambda leaf, place=place: leaf[place], state.members)
            meta = {"env_steps": int(one.updates) * self.plan.program.steps_per_update}
            memory = self.plan.run.checkpoint_replay == "on"
            checkpoint.save(self.ended / str(members[place]), one.saved, int(one.updates), meta, memory=memory)

    def is_best(self, evaluation: dict[str, Any], done: int) -> bool:
        """No member's checkpoint is kept apart."""
        return False

    def log(self, chunk: Chunk, evaluation: dict[str, Any], is_whole: bool) -> None:
        """Keep the rows until the next checkpoint, and report members that were frozen."""
        rows, size = chunk.table.shape[:2]
        self.seconds += chunk.end - chunk.start
        if self.plan.run.evaluate_episodes and self.seconds > SETTLED_SECONDS:
            self._evaluation()
        ends = np.minimum(chunk.begin + self.unit * np.arange(1, rows + 1), chunk.begin + chunk.updates)
        found = {"update": ends, "env_steps": ends * self.plan.program.steps_per_update}
        found |= {name: chunk.table[:, :, index] for index, name in enumerate(self.names)}
        for name in EVALUATIONS:
            column = np.full((rows, size), np.nan, np.float32)
            if name in evaluation:
                column[-1] = evaluation[name]
            found[name] = column
        found["update/frozen"] = (found["update/rejected"] > self.plan.run.max_rejected).astype(np.float32)
        self.waiting.append(found)
        members = self._members(found)
        self._report_frozen(found, members[-1])
        self._report_unseen(found)
        steps, training = self.plan.program.steps_per_update, members >= 0
        self.trained += int(training.sum(axis=1) @ np.diff(ends, prepend=chunk.begin))
        unknown = np.full(len(self.labels), np.nan)
        before, rewards = (self.latest.get(name, unknown) for name in ("returns", "rewards"))
        self.latest = {
            "env_steps": self.trained * steps,
            "time/trained": self.seconds,
            "time/steps_per_second": int(training[-1].sum()) * steps / max(chunk.pace, 1e-9),
            "returns": _last_known(found["episode/return"], members, before),
            "rewards": _last_known(found["rollout/reward"], members, rewards),
        }

    def _members(self, found: dict[str, np.ndarray]) -> np.ndarray:
        """The member in each place, int `[rows, P]`; −1 for a place that is idle or only fills the population up."""
        rows, size = found["update/frozen"].shape
        if MEMBER in found:
            return found[MEMBER].astype(int)
        own = np.arange(size)
        return np.broadcast_to(np.where(own < len(self.labels), own, -1), (rows, size))

    def _report_frozen(self, found: dict[str, np.ndarray], members: np.ndarray) -> None:
        for index in map(int, np.flatnonzero((found["update/frozen"][-1] > 0) & (members >= 0))):
            if members[index] in self.frozen:
                continue
            self.frozen.add(int(members[index]))
            applied = ", ".join(
                f"{name[5:]}={found[name][-1, index]:g}" for name in self.names if name.startswith("coef/")
            )
            self.warn(
                f"Member {self.labels[members[index]]} is frozen by update {found['update'][-1]}: more than "
                f"max_rejected={self.plan.run.max_rejected} of its updates were non-finite; its coefficients were "
                f"{applied}. The others go on."
            )

    def _report_unseen(self, found: dict[str, np.ndarray]) -> None:
        """Warn once if members are compared before an episode of theirs has ended."""
        unseen = np.isneginf(found.get(RUNG_SCORE, np.zeros(1))) & ~(found["update/frozen"] > 0)
        if unseen.any() and not self.warned:
            self.warned = True
            self.warn(
                f"{int(unseen.sum())} members had no episode that ended in the second half of their way to a rung, by "
                f"update {found['update'][-1]}, and count as the worst there; give a larger halving.first."
            )

    def save(self, done: int) -> dict[str, Any]:
        """Write the rows since the last checkpoint."""
        if self.waiting:
            joined = {name: np.concatenate([part[name] for part in self.waiting]) for name in self.waiting[0]}
            columns.write(self.directory, self.written, joined)
            self.waiting, self.written = [], done
        return {"members": len(self.labels), "trained": self.trained}

    def protected(self) -> tuple[int, ...]:
        """None."""
        return ()

    def close(self) -> None:
        """Do nothing: rows are written with checkpoints only, since a resumed population makes the others again."""


def evaluation_of(plan: Plan, members: TrainState, sharding: MemberSharding) -> Callable[[], Future]:
    """Return what compiles the evaluation of members of these shapes in the background, once.

    Args:
        plan: that of a member.
        members: their states, or the shapes of them.
        sharding: how they are placed on devices.
    """
    assert not isinstance(plan.env, HostEnvironment)
    policy = plan.policy(members)
    evaluator = Evaluator(plan.env, policy.program, plan.run.evaluate_episodes)
    shapes = TreeShapes.of((policy.learned, members.key, members.updates))
    return partial(compiling_evaluation, evaluator, sharding, shapes)


@background.remembered
def compiling_evaluation(evaluator: Evaluator, sharding: MemberSharding, shapes: TreeShapes) -> Future:
    """Compile an evaluation of policies, keys and clocks of these shapes in the background, once.

    Each device evaluates its own members.
    """
    run = sharding.spread(partial(_evaluated, evaluator), (0, 0, 0, None), (0, 0))
    options: dict[str, Any] = {}
    if sharding.devices > 1:
        whole = sharding.of(0)
        options = {"in_shardings": (whole, whole, whole, sharding.of(None)), "out_shardings": whole}

    def lowered() -> Any:
        return jax.jit(run, **options).lower(*shapes.tree, jax.ShapeDtypeStruct((), bool))

    if background.shares_scopes():
        return background.start(lambda: lowered().compile())
    return background.start(lowered().compile)


def _evaluated(
    evaluator: Evaluator, learned: PolicyParameters, keys: Key, updates: jax.Array, greedy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Evaluate members, each with the key that a run of its own would have after so many updates."""
    derived = jax.vmap(lambda key, done: derive(key, "evaluate", done))(keys, updates)
    return run_many(evaluator, learned, derived, greedy)


def _last_known(rows: np.ndarray, members: np.ndarray, before: np.ndarray) -> np.ndarray:
    """The last value of each member that is not NaN.

    Args:
        rows: `[rows, P]`.
        members: `[rows, P]`: the member that each value belongs to, −1 for none.
        before: `[members]`: what was known before these rows.
    """
    found, known = before.copy(), ~np.isnan(rows) & (members >= 0)
    found[members[known]] = rows[known]  # row by row: the last value of a member stays
    return found
