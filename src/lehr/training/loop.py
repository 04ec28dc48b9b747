"""The host loop of a run: while the device computes the next chunk of updates, log the metrics of the last one."""

import collections
import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lehr.acting.evaluation import make_evaluator
from lehr.envs.host.base import EnvironmentFailed
from lehr.errors import InputError
from lehr.files import refuse_link
from lehr.report.loggers import JsonLines, Loggers, Progress, TensorBoard, WeightsAndBiases, make_logger
from lehr.report.loggers import ledger as ledgers
from lehr.report.loggers.jsonl import truncate_after
from lehr.report.loggers.ledger import Ledger, Mark
from lehr.report.loggers.thinning import Thinning
from lehr.training import checkpoint, settings_file, signals
from lehr.training.directory import RunDirectory
from lehr.training.plan import Plan
from lehr.training.runners import MOST_UPDATES, Interrupted, make_runner
from lehr.types import TrainState, derive

CHUNK_SECONDS = 0.5
"""Target duration of a chunk: how often progress is shown, and how fast the run reacts to a signal."""

PACE_SECONDS = 2.0
"""The speed is averaged over at least this many seconds."""

ProgressFunction = Callable[[int, dict[str, float]], Any]


class RunFailed(RuntimeError):
    """The run could not continue; its last good state is saved."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_SOUND_META: dict[str, Callable[[Any], bool]] = {
    "env_steps": lambda value: isinstance(value, int) and value >= 0,
    "elapsed": _is_number,
    "best": lambda value: value is None or _is_number(value),
    "best_update": lambda value: value is None or isinstance(value, int),
    "data": lambda value: (
        value is None or (isinstance(value, dict) and all(isinstance(x, str) for x in value.values()))
    ),
    "waiting": lambda value: (
        value is None
        or (
            isinstance(value, dict)
            and all(isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair)) for pair in value.values())
        )
    ),
}
"""What the metadata of a checkpoint must be, by name; it may come from a stranger."""


def restore(
    directory: RunDirectory,
    plan: Plan,
    report: Callable[[str], object] = warnings.warn,
    needs_memory: bool = True,
) -> tuple[TrainState, dict[str, Any]]:
    """Return the latest state of a run, with the plan's coefficients, and the metadata of its checkpoint.

    A damaged replay is reported and left out if the state does not need it, to evaluate a policy for example, or if
    the run does without it.
    """
    may_lose = not needs_memory or plan.run.checkpoint_replay == "off"
    saved, meta, _ = checkpoint.newest(
        directory.checkpoints, plan.state.saved, report, memory_lost=report if may_lose else None
    )
    if wrong := [name for name, is_sound in _SOUND_META.items() if not is_sound(meta.get(name))]:
        raise InputError(
            f"The checkpoint of update {meta['step']} in '{directory.path}' is not one of a run: its metadata has no "
            f"valid {wrong[0]}; restore the run from a copy."
        )
    if meta.get("without_memory"):
        saved = saved._replace(
            learner=plan.program.algorithm.forget(saved.learner),
            reward_model=plan.program.reward_model.forget(saved.reward_model),
        )
    return saved.completed(plan.state), meta


class Loop:
    """The host loop around the compiled chunks of one run."""

    def __init__(
        self, plan: Plan, directory: RunDirectory, progress_fn: ProgressFunction | None, resumes: bool = False
    ) -> None:
        for path in (directory.metrics, directory.checkpoints, directory.tensorboard, directory.path / "wandb"):
            refuse_link(path)
        self.plan, self.directory, self.progress_fn = plan, directory, progress_fn
        self.progress = Progress(plan.run.total_steps, enabled=plan.run.progress)
        self.runner = make_runner(plan, self.warn)
        self.names = self.runner.names
        self.state, self.elapsed = plan.state, 0.0
        self.best: float | None = None
        self.best_update: int | None = None
        every = None if plan.run.log_every is None else plan.every(plan.run.log_every)
        self.thinning = Thinning(every)
        self.saved: int | None = None
        """The update of the latest checkpoint."""
        self.ledger = Ledger((Mark(int(self.state.updates)),))
        """The rows of `metrics.jsonl` at the latest checkpoint."""
        if resumes:
            self.state, meta = restore(directory, plan, report=self.warn)
            self.saved = int(self.state.updates)
            plan.check_clock(self.saved, meta["env_steps"])
            if self.saved > plan.updates:
                raise InputError(
                    f"total_steps is {plan.run.total_steps}, but '{directory.path}' has already made "
                    f"{meta['env_steps']} env steps; give at least as many."
                )
            self._report_changed(meta.get("data") or {})
            self.best, self.best_update, self.elapsed = meta["best"], meta["best_update"], meta["elapsed"]
            if meta.get("without_memory"):
                self.warn(
                    f"The checkpoint of update {self.saved} has no replay or stored rollouts: the run goes on with "
                    "empty ones, so it will differ from one that was not stopped."
                )
            self.ledger = self._check_metrics(meta)
            self.thinning = Thinning(every, meta.get("waiting"))
        self.done = int(self.state.updates)
        self.rejected = int(self.state.rejected)
        self.last: dict[str, float] = {}
        """The latest value of each logged metric."""
        self.pace = float("inf")
        """Seconds per update, averaged over the last seconds of training."""
        self.marks = collections.deque([(0.0, self.done)])
        """Seconds of training, excluding events, and the updates made by then."""
        self.stop_reason: str | None = None
        self.failure: Exception | None = None
        """The error that stops the run; raised once everything is written."""
        self.begin = time.perf_counter() - self.elapsed
        policy = plan.policy(self.state).program
        self.evaluator = make_evaluator(plan.env, policy, plan.run.evaluate_episodes)
        # Loggers that may fail to start come first, before any file is open.
        online: list[Any] = [WeightsAndBiases(directory.path, plan.mapping)] if plan.run.wandb else []
        online += [make_logger(given, directory.path, plan.mapping) for given in plan.run.loggers]
        self.history = JsonLines(directory.metrics, self.ledger.now)
        backends: list[Any] = [self.history]
        if plan.run.tensorboard:
            after = self.done * plan.program.steps_per_update if resumes else None
            backends.append(TensorBoard(directory.tensorboard, after=after))
        self.loggers = Loggers(*backends, *online)

    def _check_metrics(self, meta: dict[str, Any]) -> Ledger:
        """Cut `metrics.jsonl` after the rows of the checkpoint, and report rows that are missing or damaged."""
        path, update = self.directory.metrics, int(self.state.updates)
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

    def say(self, text: str) -> None:
        """Print a message above the progress bar."""
        self.progress.message(text)

    def warn(self, text: str) -> None:
        """Print a warning, or log it if progress is not shown."""
        if self.plan.run.progress:
            self.say(text)
        else:
            logging.getLogger("lehr").warning(text)

    def _report_changed(self, before: dict[str, str]) -> None:
        """Warn if the data that a resumed run loads is not what it learned from before."""
        now = dict(self.plan.loaded.sources)
        for name in sorted({*before, *now}):
            old, new = before.get(name, "none")[:12], now.get(name, "none")[:12]
            if old != new:
                self.warn(
                    f"The data '{name}' changed since the last checkpoint (SHA-256 {old} before, {new} now): the run "
                    "goes on with what it finds now, so it is not the run that it would have been."
                )

    def run(self) -> TrainState:
        """Run all chunks until the run ends or stops, and return the last state."""
        try:
            stopping = signals.handled(self._stop)
            closing = self._closed("The environments", self.runner), self._closed("A logger", self.loggers)
            with self._files(), stopping, closing[0], self.progress, closing[1]:
                self.directory.write_status("running")
                if self.done < self.plan.updates:
                    self._run_chunks()
                    self.save()
            if self.failure is not None:
                raise self.failure
            with self._files():
                if self.done < self.plan.updates:
                    self.directory.write_status("stopped", self.stop_reason or "")
                else:
                    self.directory.write_status("finished")
        except BaseException as error:
            with contextlib.suppress(OSError):  # report the original error, not that the disk is still full
                self.directory.write_status("failed", f"{type(error).__name__}: {error}")
            raise
        return self.state

    def _run_chunks(self) -> None:
        """Dispatch a chunk, and log the previous one while the device computes."""
        plan = self.plan
        self._compile()
        pending: tuple[int, int, Any] | None = None
        count = 1
        while self.done < plan.updates and self.stop_reason is None:
            count = min(count, self._next_event() - self.done)
            rows = self._advance(count)
            count = min(count, len(rows))  # fewer if an environment failed
            if pending is not None:
                self._log(self._rows(*pending))
                pending = None
            if count:
                pending = self.done, count, rows
                self.done += count
            if pending is not None and self.done == self._next_event(self.done - 1):
                self._event(self._rows(*pending))
                pending = None
            elif pending is not None and isinstance(rows, np.ndarray):  # a host runner has finished already
                self._log(self._rows(*pending))
                pending = None
            self._report()
            count = _next_count(max(count, 1), self.pace)
        if pending is not None:
            self._log(self._rows(*pending))
            self._report()

    def _advance(self, count: int) -> Any:
        """Dispatch `count` updates and return their metrics, one row each. If an environment fails, the run stops."""
        try:
            self.state, rows = self.runner.advance(self.state, count)
        except Interrupted as interrupted:
            self.state, rows = interrupted.state, interrupted.rows
            self._fail(RunFailed(f"{interrupted} The last good state is saved in '{self.directory.path}'."))
        return rows

    def _compile(self) -> None:
        begin = time.perf_counter()
        self.runner.compile(self.state)
        self.compile_seconds = time.perf_counter() - begin
        self.say(f"compiled in {self.compile_seconds:.1f} s")
        self.state = self.runner.begin(self.state)
        self.elapsed = time.perf_counter() - self.begin  # exclude compilation from the first chunk's speed

    # Events: checkpoints and evaluations, at fixed updates, so that a resumed run has the same ones ------------------

    @property
    def _checkpoint_interval(self) -> int:
        every = self.plan.run.checkpoint_every
        return self.plan.every(every) if every else max(1, -(-self.plan.updates // 10))

    @property
    def _evaluate_interval(self) -> int | None:
        run = self.plan.run
        if run.evaluate_every:
            return self.plan.every(run.evaluate_every)
        return self._checkpoint_interval if run.target_return is not None else None

    def _next_event(self, update: int | None = None) -> int:
        """Return the next update with an event after `update`, which defaults to the latest update."""
        done = self.done if update is None else update
        intervals = [self._checkpoint_interval, self._evaluate_interval or self.plan.updates]
        return min([self.plan.updates, *((done // interval + 1) * interval for interval in intervals)])

    def _event(self, rows: list[dict[str, Any]]) -> None:
        """Evaluate if due, log the chunk's rows, and save if due."""
        is_last = self.done >= self.plan.updates
        is_best = False
        if is_last or (self._evaluate_interval is not None and self.done % self._evaluate_interval == 0):
            try:
                found = self._evaluate()
            except EnvironmentFailed as error:
                found = {}
                where = f"The last good state is saved in '{self.directory.path}'."
                self._fail(RunFailed(f"The evaluation failed: {error} {where}"))
            rows[-1] |= found
            is_best = self._is_best(found)
        self._log(rows, whole=is_last or "evaluate/return" in rows[-1])
        if is_last or is_best or self.done % self._checkpoint_interval == 0:
            self.save()
        self.elapsed = time.perf_counter() - self.begin  # exclude the event from the next chunk's speed

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the current policy and return the metrics, which are logged with the last update's."""
        if self.plan.run.evaluate_episodes == 0:
            return {}
        learned = self.plan.policy(self.state).learned
        key = derive(self.state.key, "evaluate", self.done)
        greedy, sampled = (self.evaluator(learned, key, greedy) for greedy in (True, False))
        return {
            "evaluate/return": float(greedy.returns.mean()),
            "evaluate/return_std": float(greedy.returns.std()),
            "evaluate/length": float(greedy.lengths.mean()),
            "evaluate/return_sampled": float(sampled.returns.mean()),
        }

    def _is_best(self, evaluation: dict[str, float]) -> bool:
        """Whether this is the best evaluation so far; also stop the run if it reaches the target return."""
        found, target = evaluation.get("evaluate/return", float("nan")), self.plan.run.target_return
        if target is not None and found >= target:
            self.stop_reason = f"reached the target return {target:g}"
        if not np.isfinite(found) or (self.best is not None and found <= self.best):
            return False
        self.best, self.best_update = found, self.done
        return True

    def save(self) -> None:
        """Flush the metrics and save a checkpoint of the current state, unless it is saved already."""
        if self.saved == self.done:
            return
        self.loggers.flush()
        self.history.sync()
        self.ledger = self.ledger.add(self.history.mark._replace(update=self.done))
        meta: dict[str, Any] = {
            "best": self.best,
            "best_update": self.best_update,
            "elapsed": time.perf_counter() - self.begin,
            "env_steps": self.done * self.plan.program.steps_per_update,
            "metrics": self.ledger.to_json(),
            "settings": settings_file.to_json(self.plan.mapping),
        }
        if self.thinning.waiting:
            meta["waiting"] = self.thinning.waiting
        if self.plan.loaded.sources:
            meta["data"] = dict(self.plan.loaded.sources)
        protect = () if self.best_update is None else (self.best_update,)
        checkpoint.save(
            self.directory.checkpoints,
            self.state.saved,
            self.done,
            meta,
            self.plan.run.keep_checkpoints,
            protect,
            memory=self.plan.run.checkpoint_replay == "on",
        )
        self.saved = self.done

    # Metrics ------------------------------------------------------------------------------------------------------

    def _rows(self, begin: int, count: int, rows: Any) -> list[dict[str, Any]]:
        """Return the metrics of a chunk, one row per update. Blocks until the device has finished the chunk."""
        table = np.asarray(rows)[:count]
        now = time.perf_counter() - self.begin
        steps = self.plan.program.steps_per_update
        before, self.elapsed = self.elapsed, now
        # The host may notice late that a chunk has finished; averaging over a few chunks evens that out.
        self.marks.append((self.marks[-1][0] + now - before, begin + count))
        while len(self.marks) > 2 and self.marks[-1][0] - self.marks[1][0] > PACE_SECONDS:
            self.marks.popleft()
        (first, updates), (last, _) = self.marks[0], self.marks[-1]
        self.pace = (last - first) / (begin + count - updates)
        found = []
        for number, values in enumerate(table, start=1):
            row: dict[str, Any] = {"update": begin + number, "env_steps": (begin + number) * steps}
            row |= {name: value.item() for name, value in zip(self.names, values, strict=True)}
            row["time/elapsed"] = before + (now - before) / count * number
            row["time/steps_per_second"] = steps / max(self.pace, 1e-9)
            found.append(row)
        return found

    def _log(self, rows: list[dict[str, Any]], whole: bool = False) -> None:
        """Log the updates of a chunk that have a row, the last one in any case if it is `whole`."""
        for number, row in enumerate(rows, 1):
            logged = self.thinning.add(row, always=whole and number == len(rows))
            if logged is not None:
                self.loggers.log(logged)
            if row["update/rejected"] > self.rejected:
                self._reject(row)
            if row.get("environment/broken_masks") and not self.last.get("environment/broken_masks"):
                self.warn(
                    f"The environment {self.plan.run.env} returned {row['environment/broken_masks']:g} observations "
                    f"whose action_mask allows no action, in update {row['update']}; there, any action may be taken."
                )
            self.last |= {name: value for name, value in row.items() if not np.isnan(value)}
        self.loggers.flush()

    def _report(self) -> None:
        """Show the latest logged metrics (perhaps of the previous chunk), and pass them to `progress_fn`."""
        if not self.last:
            return
        steps = int(self.last["env_steps"])
        self.progress.update(steps, self.last, self.last["time/steps_per_second"])
        if self.progress_fn is None:
            return
        try:
            answer = self.progress_fn(steps, dict(self.last))
        except Exception as error:
            self._fail(error)
            return
        if isinstance(answer, bool | np.bool_) and answer:
            self.stop_reason = "progress_fn returned True"

    def _reject(self, row: dict[str, Any]) -> None:
        """Report why an update was not applied, and stop the run if there were too many."""
        self.rejected = int(row["update/rejected"])
        if self.failure is not None:
            return
        causes = [name for name in self.names if not np.isfinite(row[name]) and name.split("/")[0] != "episode"]
        applied = ", ".join(f"{name[5:]}={row[name]:g}" for name in self.names if name.startswith("coef/"))
        what = ", ".join(f"{name} is {row[name]}" for name in causes) or "the parameters would not be finite"
        for field, kind in (("rewards", "non-finite rewards"), ("obs", "non-finite obs"), ("masks", "empty masks")):
            if broken := row.get(f"environment/broken_{field}"):
                what = f"the environment {self.plan.run.env} returned {broken:g} {kind}, so {what}"
        self.warn(f"Update {row['update']} was not applied: {what}; the coefficients were {applied}.")
        if self.rejected > self.plan.run.max_rejected:
            self._fail(
                RunFailed(
                    f"{self.rejected} updates were non-finite, more than max_rejected={self.plan.run.max_rejected}; "
                    f"the last good state is saved in '{self.directory.path}'."
                )
            )

    def _fail(self, error: Exception) -> None:
        """Stop like a run stopped by the user, so that nothing is lost, and raise the error afterwards."""
        self.failure = self.failure or error
        self.stop_reason = "failed"

    @contextlib.contextmanager
    def _files(self) -> Iterator[None]:
        """Turn an `OSError` into a one-sentence error."""
        try:
            yield
        except OSError as error:
            raise RunFailed(
                f"Cannot write the run '{self.directory.path}': {error.strerror or error}; once that is fixed, resume "
                f"it from update {self.saved}."
            ) from error

    @contextlib.contextmanager
    def _closed(self, what: str, thing: Any) -> Iterator[None]:
        """Close a thing at the end; by then everything is saved, so an error in its `close` is only a warning."""
        try:
            yield
        finally:
            try:
                thing.close()
            except Exception as error:
                self.warn(f"{what} could not be closed ({type(error).__name__}: {error}); the run is not affected.")

    def _stop(self, reason: str) -> None:
        """Stop the run after the current chunk."""
        self.stop_reason = reason


def _next_count(count: int, pace: float) -> int:
    """Return the number of updates in the next chunk, so that it takes about `CHUNK_SECONDS` at `pace` s per update."""
    wanted = CHUNK_SECONDS / max(pace, 1e-6)
    return int(min(max(wanted, 1), 4 * count, MOST_UPDATES))
