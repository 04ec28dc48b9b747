"""The record of a population: the metrics of all members, in columns."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lehr.acting.evaluation import Evaluator, evaluate_many, evaluation_metrics
from lehr.envs import HostEnvironment
from lehr.files import refuse_link
from lehr.training import columns
from lehr.training.directory import RunDirectory
from lehr.training.plan import Plan
from lehr.training.record import Chunk, Verdict
from lehr.training.runners.population import PopulationState
from lehr.types import derive

EVALUATIONS = ("evaluate/return", "evaluate/return_std", "evaluate/length", "evaluate/return_sampled")


class PopulationRecord:
    """Writes down the updates of a population.

    Args:
        labels: the name of each member, for the user; members beyond these only fill the population up.
        window: number of updates of a row.
        plan: that of the loop.
        directory: the directory.
        names: the names of the metrics, in column order.
        state: the state that the population goes on from.
        meta: the metadata of its checkpoint, if it is resumed.
        verdict: not used: a member that diverges does not stop the others.
        warn: receives warnings for the user.
    """

    def __init__(
        self,
        labels: Sequence[str],
        window: int,
        plan: Plan,
        directory: RunDirectory,
        names: tuple[str, ...],
        state: PopulationState,
        meta: dict[str, Any] | None,
        verdict: Verdict,
        warn: Callable[[str], object],
    ) -> None:
        self.labels, self.unit, self.plan, self.names, self.warn = labels, window, plan, names, warn
        self.directory = directory.path / "metrics"
        refuse_link(self.directory)
        self.latest: dict[str, Any] = {}
        self.written = int(state.updates)
        """The update up to which rows are on disk."""
        columns.cut(self.directory, self.written)
        self.waiting: list[dict[str, np.ndarray]] = []
        """Rows that are not on disk yet."""
        self.frozen = np.asarray(state.members.rejected) > plan.run.max_rejected
        assert not isinstance(plan.env, HostEnvironment)
        self.evaluator = Evaluator(plan.env, plan.policy(state.members).program, plan.run.evaluate_episodes)

    def evaluate(self, state: PopulationState, done: int) -> dict[str, np.ndarray]:
        """Evaluate all members, each as a run of its own would be."""
        if self.plan.run.evaluate_episodes == 0:
            return {}
        learned = self.plan.policy(state.members).learned
        keys = jax.vmap(lambda key: derive(key, "evaluate", done))(state.members.key)
        greedy, sampled = (evaluate_many(self.evaluator, learned, keys, greedy) for greedy in (True, False))
        return evaluation_metrics(greedy, sampled)

    def is_best(self, evaluation: dict[str, Any], done: int) -> bool:
        """No member's checkpoint is kept apart."""
        return False

    def log(self, chunk: Chunk, evaluation: dict[str, Any], is_whole: bool) -> None:
        """Keep the rows until the next checkpoint, and report members that were frozen."""
        rows, size = chunk.table.shape[:2]
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
        self._report_frozen(found)
        shown = len(self.labels)
        steps = self.plan.program.steps_per_update * shown
        self.latest = {
            "env_steps": int(ends[-1]) * steps,
            "time/steps_per_second": steps / max(chunk.pace, 1e-9),
            "returns": _last_known(found["episode/return"][:, :shown], self.latest.get("returns")),
            "rewards": found["rollout/reward"][-1, :shown],
        }

    def _report_frozen(self, found: dict[str, np.ndarray]) -> None:
        now = found["update/frozen"][-1] > 0
        for index in map(int, np.flatnonzero((now & ~self.frozen)[: len(self.labels)])):
            applied = ", ".join(
                f"{name[5:]}={found[name][-1, index]:g}" for name in self.names if name.startswith("coef/")
            )
            self.warn(
                f"Member {self.labels[index]} is frozen by update {found['update'][-1]}: more than "
                f"max_rejected={self.plan.run.max_rejected} of its updates were non-finite; its coefficients were "
                f"{applied}. The others go on."
            )
        self.frozen = now

    def save(self, done: int) -> dict[str, Any]:
        """Write the rows since the last checkpoint."""
        if self.waiting:
            joined = {name: np.concatenate([part[name] for part in self.waiting]) for name in self.waiting[0]}
            columns.write(self.directory, self.written, joined)
            self.waiting, self.written = [], done
        return {"members": len(self.labels)}

    def protected(self) -> tuple[int, ...]:
        """None."""
        return ()

    def close(self) -> None:
        """Do nothing: rows are written with checkpoints only, since a resumed population makes the others again."""


def _last_known(rows: np.ndarray, before: np.ndarray | None) -> np.ndarray:
    """The last value of each column `[rows, members]` that is not NaN."""
    found = np.full(rows.shape[1], math.nan) if before is None else before
    for row in rows:
        found = np.where(np.isnan(row), found, row)
    return found
