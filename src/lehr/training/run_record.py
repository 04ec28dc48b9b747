"""The record of a single run: `metrics.jsonl`, TensorBoard and other loggers, the best evaluation."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from lehr.acting.evaluation import EpisodeResults, Evaluator, HostEvaluator, evaluation_metrics, make_evaluator
from lehr.acting.policy import PolicyParameters
from lehr.files import refuse_link
from lehr.report import curves
from lehr.report.loggers import JsonLines, Loggers, TensorBoard, WeightsAndBiases, make_logger
from lehr.report.loggers import ledger as ledgers
from lehr.report.loggers.jsonl import truncate_after
from lehr.report.loggers.ledger import Ledger, Mark
from lehr.report.loggers.thinning import Thinning
from lehr.training import background, checkpoint, cores, settings_file
from lehr.training.directory import RunDirectory
from lehr.training.plan import Plan
from lehr.training.record import Chunk, RunFailed, Verdict
from lehr.training.sharding import first_copy
from lehr.types import Key, TrainState, TreeShapes, derive

_OBSERVED = ("episode", "rollout")
"""Metrics under these names describe what the environment did, and are no cause of a non-finite update."""


class Recorded(NamedTuple):
    """What a record writes about: a run, or a population."""

    plan: Plan
    """That of the loop."""
    directory: RunDirectory
    names: tuple[str, ...]
    """The names of the metrics, in column order."""
    state: Any
    """The state that training goes on from."""
    meta: dict[str, Any] | None
    """The metadata of its checkpoint, if it is resumed."""
    verdict: Verdict
    """Stops the run."""
    warn: Callable[[str], object]
    """Receives warnings for the user."""


class RunRecord:
    """Writes down the updates of a run."""

    unit = 1

    def __init__(self, run: Recorded) -> None:
        plan, directory, names, state, meta, verdict, warn = run
        for path in (directory.metrics, directory.tensorboard, directory.path / "wandb"):
            refuse_link(path)
        self.plan, self.directory, self.names, self.verdict, self.warn = plan, directory, names, verdict, warn
        update = int(state.updates)
        self.latest: dict[str, float] = {}
        self.rejected = int(state.rejected)
        self.best: float | None = None
        self.best_update: int | None = None
        every = None if plan.run.log_every is None else plan.every(plan.run.log_every)
        self.thinning = Thinning(every)
        self.ledger = Ledger((Mark(update),))
        """The rows of `metrics.jsonl` at the latest checkpoint."""
        if meta is not None:
            self.best, self.best_update = meta["best"], meta["best_update"]
            self.ledger = self._check_metrics(meta, update)
            self.thinning = Thinning(every, meta.get("waiting"))
        self.settings = settings_file.to_json(plan.mapping)
        self.evaluator = make_evaluator(plan.evaluation_env, plan.policy(state).program, plan.run.evaluate_episodes)
        self.evaluation: Future | None = None
        """Its program, which is compiled in the background."""
        self.drawing: Future | None = None
        # Loggers that may fail to start come first, before any file is open.
        project = plan.run.wandb_project
        online: list[Any] = [WeightsAndBiases(directory.path, plan.mapping, project)] if plan.run.wandb else []
        online += [make_logger(given, directory.path, plan.mapping) for given in plan.run.loggers]
        self.history = JsonLines(directory.metrics, self.ledger.now)
        backends: list[Any] = [self.history]
        if plan.run.tensorboard:
            after = None if meta is None else update * plan.program.steps_per_update
            backends.append(TensorBoard(directory.tensorboard, after=after))
        self.loggers = Loggers(*backends, *online)

    def _check_metrics(self, meta: dict[str, Any], update: int) -> Ledger:
        """Cut `metrics.jsonl` after the rows of the checkpoint, and report rows that are missing or damaged."""
        path: Path = self.directory.metrics
        known = Ledger.from_json(meta.get("metrics"))
        if known is None:  # the checkpoint of an older version
            truncate_after(path, update)
            return Ledger.read(path, update)
        found = ledgers.restore(path, known, self.warn)
        if found is not known:  # the checkpoints learn what is left, so that the damage is reported once

            def change(meta: dict[str, Any]) -> dict[str, Any]:
                left = found.until(meta["step"])
                return meta if left is None else meta | {"metrics": left.to_json()}

            checkpoint.amend(self.directory.checkpoints, change)
        return found

    def prepare(self, state: TrainState, after: Future | None, is_busy: bool = False) -> None:
        """Do in the background what the end of the run needs: compile the evaluation, and import matplotlib.

        On few cores, that begins after what training waits for.
        """
        if self.plan.run.evaluate_episodes and isinstance(self.evaluator, Evaluator):
            given = self.plan.policy(state).learned, first_copy(state.key), np.uint32(0), np.bool_(True)
            first = after if cores.are_few() else None
            if self.plan.sharding.devices == 1:
                self.evaluation = _compiling(self.evaluator, TreeShapes.of(given), after=first, is_busy=is_busy)
            else:
                lowered = jax.jit(partial(_evaluation, self.evaluator)).lower(*given)
                self.evaluation = background.start(lowered.compile, first)
        if after is not None:
            self.drawing = background.start(curves.load, self.evaluation or after)

    def evaluate(self, state: TrainState, done: int, stops: Callable[[], bool] | None = None) -> dict[str, float]:
        """Evaluate the current policy and return the metrics, which are logged with the last update's.

        On the host, where episodes may take long, `stops` is asked between their steps.
        """
        if stops is not None and isinstance(self.evaluator, HostEvaluator):
            self.evaluator.stops = stops
        if self.plan.run.evaluate_episodes == 0:
            return {}
        learned, key = self.plan.policy(state).learned, first_copy(state.key)
        if self.evaluation is None:
            results = [self.evaluator(learned, derive(key, "evaluate", done), greedy) for greedy in (True, False)]
        else:
            run = partial(background.finished(self.evaluation), learned, key, np.uint32(done))
            results = [EpisodeResults.of(run(np.bool_(greedy))) for greedy in (True, False)]
        greedy, sampled = results
        return {name: float(value) for name, value in evaluation_metrics(greedy, sampled).items()}

    def is_best(self, evaluation: dict[str, float], done: int) -> bool:
        """Whether this is the best evaluation so far; also stop the run if it reaches the target return."""
        found, target = evaluation.get("evaluate/return", float("nan")), self.plan.run.target_return
        if target is not None and found >= target:
            self.verdict.stop_reason = f"reached the target return {target:g}"
        if not np.isfinite(found) or (self.best is not None and found <= self.best):
            return False
        self.best, self.best_update = found, done
        return True

    def log(self, chunk: Chunk, evaluation: dict[str, float], is_whole: bool) -> None:
        """Log the updates of a chunk that have a row, the last one in any case if it `is_whole`."""
        rows = self._rows(chunk)
        rows[-1] |= evaluation
        is_whole |= "evaluate/return" in evaluation
        for number, row in enumerate(rows, 1):
            logged = self.thinning.add(row, always=is_whole and number == len(rows))
            if logged is not None:
                self.loggers.log(logged)
            if row["update/rejected"] > self.rejected:
                self._reject(row)
            if row.get("environment/broken_masks") and not self.latest.get("environment/broken_masks"):
                self.warn(
                    f"The environment {self.plan.run.env} returned {row['environment/broken_masks']:g} observations "
                    f"whose action_mask allows no action, in update {row['update']}; there, any action may be taken."
                )
            self.latest |= {name: value for name, value in row.items() if not np.isnan(value)}
        self.loggers.flush()

    def log_row(self, row: dict[str, Any]) -> None:
        """Log one row as it is."""
        self.loggers.log(row)

    def _rows(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the metrics of a chunk, one row per update."""
        steps = self.plan.program.steps_per_update
        found = []
        for number, values in enumerate(chunk.table, start=1):
            update = chunk.begin + number
            row: dict[str, Any] = {"update": update, "env_steps": update * steps}
            row |= {name: value.item() for name, value in zip(self.names, values, strict=True)}
            row["time/elapsed"] = chunk.start + (chunk.end - chunk.start) / chunk.updates * number
            row["time/steps_per_second"] = steps / max(chunk.pace, 1e-9)
            found.append(row)
        return found

    def _reject(self, row: dict[str, Any]) -> None:
        """Report why an update was not applied, and stop the run if there were too many."""
        self.rejected = int(row["update/rejected"])
        if self.verdict.failure is not None:
            return
        causes = [name for name in self.names if not np.isfinite(row[name]) and name.split("/")[0] not in _OBSERVED]
        applied = ", ".join(f"{name[5:]}={row[name]:g}" for name in self.names if name.startswith("coef/"))
        what = ", ".join(f"{name} is {row[name]}" for name in causes) or "the parameters would not be finite"
        for field, kind in (("rewards", "non-finite rewards"), ("obs", "non-finite obs"), ("masks", "empty masks")):
            if broken := row.get(f"environment/broken_{field}"):
                what = f"the environment {self.plan.run.env} returned {broken:g} {kind}, so {what}"
        self.warn(f"Update {row['update']} was not applied: {what}; the coefficients were {applied}.")
        if self.rejected > self.plan.run.max_rejected:
            self.verdict.fail(
                RunFailed(
                    f"{self.rejected} updates were non-finite, more than max_rejected={self.plan.run.max_rejected}; "
                    f"the last good state is saved in '{self.directory.path}'."
                )
            )

    def save(self, done: int) -> dict[str, Any]:
        """Sync the metrics to disk, and return what a checkpoint remembers of them."""
        self.loggers.flush()
        self.history.sync()
        self.ledger = self.ledger.add(self.history.mark._replace(update=done))
        meta: dict[str, Any] = {
            "best": self.best,
            "best_update": self.best_update,
            "metrics": self.ledger.to_json(),
            "settings": self.settings,
        }
        if self.thinning.waiting:
            meta["waiting"] = self.thinning.waiting
        return meta

    def protected(self) -> tuple[int, ...]:
        """The best checkpoint."""
        return () if self.best_update is None else (self.best_update,)

    def close(self) -> None:
        """Close all loggers."""
        for task in (self.drawing, self.evaluation):
            if task is not None:
                task.cancel()  # if it has not begun
        self.loggers.close()


@background.remembered
def _compiling(evaluator: Evaluator, shapes: TreeShapes, *, after: Future | None, is_busy: bool) -> Future:
    """Compile an evaluation for arguments of these shapes in the background, once for runs alike in one process."""
    lower = partial(jax.jit(partial(_evaluation, evaluator)).lower, *shapes.tree)
    if is_busy and background.shares_scopes():
        return background.start(lambda: lower().compile(), after)
    return background.start(lower().compile, after)


def _evaluation(evaluator: Evaluator, learned: PolicyParameters, key: Key, done: Any, greedy: Any) -> Any:
    """Evaluate a policy after `done` updates, with the run's key."""
    return evaluator.run(learned, derive(key, "evaluate", done), greedy)
