"""The host loop of a run: while the device computes the next chunk of updates, log the metrics of the last one."""

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from lehr import garbage
from lehr.acting.evaluation import EvaluationStopped
from lehr.envs.host.base import EnvironmentFailed
from lehr.errors import InputError
from lehr.files import refuse_link
from lehr.report.loggers import Progress
from lehr.training import background, checkpoint, compile_times, signals
from lehr.training.checkpoint_files import MEMORY
from lehr.training.course import Course
from lehr.training.directory import RunDirectory
from lehr.training.plan import Plan
from lehr.training.record import Chunk, Pace, Record, RunFailed, Verdict
from lehr.training.run_record import Recorded, RunRecord
from lehr.training.runners import MOST_UPDATES, Interrupted, make_runner
from lehr.types import TrainState

READ_SECONDS = 0.5
"""A program that was compiled before is read in less; then the first updates do not wait for anything else."""
CHUNK_SECONDS = 0.5
"""Target duration of a chunk: how often progress is shown, and how fast the run reacts to a signal."""

ProgressFunction = Callable[[int, dict[str, float]], Any]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_SOUND_META: dict[str, Callable[[Any], bool]] = {
    "env_steps": lambda value: isinstance(value, int) and value >= 0,
    "elapsed": _is_number,
    "best": lambda value: value is None or _is_number(value),
    "best_update": lambda value: value is None or isinstance(value, int),
    "devices": lambda value: value is None or isinstance(value, int),
    "processes": lambda value: value is None or isinstance(value, int),
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
    policy_only: bool = False,
) -> tuple[TrainState, dict[str, Any]]:
    """Return the latest state of a run, with the plan's coefficients, and the metadata of its checkpoint.

    A damaged replay is reported and left out if the state does not need it, to evaluate a policy for example, or if
    the run does without it. With `policy_only`, what belongs to the environment is that of the plan's own state: its
    environment may be another one than that of the run.
    """
    may_lose = not needs_memory or plan.run.checkpoint_replay == "off"
    saved, meta, _ = checkpoint.newest(
        directory.checkpoints, plan.state.saved, report, report if may_lose else None, policy_only
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
    if meta.get("devices", 1) != plan.sharding.devices:  # each device has resets of its own
        saved = saved._replace(actor=saved.actor._replace(resets=plan.state.actor.resets))
    return saved.completed(plan.state), meta


class Kind(NamedTuple):
    """The parts of a loop that differ between a single run and a population."""

    make_runner: Callable[..., Any] = make_runner
    make_record: Callable[..., Record] = RunRecord
    make_progress: Callable[..., Any] = Progress
    restore: Callable[..., tuple[Any, dict[str, Any]]] = restore
    course: Course | None = None
    """When it ends; by default with the last update of the plan."""
    save_seconds: float | None = None
    """If the run sets no interval: seconds between checkpoints, or `None` for ten per run."""


class Loop:
    """The host loop around the compiled chunks of one run.

    Args:
        plan: the run.
        directory: its directory.
        progress_fn: called with the env steps so far and the latest metrics; if it returns `True`, the run stops.
        resumes: whether to go on from the latest checkpoint.
        kind: a single run, or a population.
    """

    def __init__(
        self,
        plan: Plan,
        directory: RunDirectory,
        progress_fn: ProgressFunction | None = None,
        resumes: bool = False,
        kind: Kind = Kind(),  # noqa: B008  immutable
    ) -> None:
        refuse_link(directory.checkpoints)
        self.plan, self.directory, self.progress_fn, self.kind = plan, directory, progress_fn, kind
        self.progress = kind.make_progress(plan.run.total_steps, enabled=plan.run.progress)
        self.runner = kind.make_runner(plan, self.warn)
        self.course = kind.course or Course(plan.updates)
        self.state, self.elapsed = plan.state, 0.0
        self.verdict = Verdict()
        self.saved: int | None = None
        """The update of the latest checkpoint."""
        self.prepared = False
        """Whether the evaluation was compiled, or begun to be."""
        self.compared = False
        """Whether the copies on several devices were compared."""
        meta: dict[str, Any] | None = None
        if resumes:
            self.state, meta = kind.restore(directory, plan, report=self.warn)
            self.saved, self.elapsed = int(self.state.updates), meta["elapsed"]
            self._check_resumed(self.saved, meta)
        self.start = self.done = int(self.state.updates)
        self.is_over = self.course.is_over(self.done, self.state)
        """Whether everything is trained."""
        self.pace = Pace(self.done)
        self.begin = (self.runner.since or time.perf_counter()) - self.elapsed
        self.saved_at = time.perf_counter()
        self.compile_seconds = 0.0
        self.record = kind.make_record(
            Recorded(plan, directory, self.runner.names, self.state, meta, self.verdict, self.warn)
        )

    def _check_resumed(self, update: int, meta: dict[str, Any]) -> None:
        """Refuse a checkpoint that does not fit the plan, and report what changed since."""
        self.plan.check_clock(update, meta["env_steps"])
        if update > self.course.updates:
            raise InputError(
                f"total_steps is {self.plan.run.total_steps}, but '{self.directory.path}' has already made "
                f"{meta['env_steps']} env steps; give at least as many."
            )
        self._report_changed(meta.get("data") or {})
        if (before := meta.get("devices", 1)) != (now := self.plan.sharding.devices):
            self.warn(
                f"The run was on {_counted(before, 'device')} and goes on with {now}: each device has random numbers "
                "of its own, so it will differ from one that was not stopped."
            )
        elif (before := meta.get("processes", 1)) != (now := self.plan.sharding.hosts.count):
            self.warn(
                f"The run had {_counted(before, 'process')} and goes on with {now}: sums over devices are made in "
                "another order, so it may differ by rounding from one that was not stopped."
            )
        if meta.get("without_memory"):
            self.warn(
                f"The checkpoint of update {update} has no replay or stored rollouts: the run goes on with "
                "empty ones, so it will differ from one that was not stopped."
            )

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

    def run(self) -> Any:
        """Run all chunks until the run ends or stops, and return the last state."""
        try:
            stopping = signals.handled(self.stop)
            closing = self._closed("The environments", self.runner), self._closed("A logger", self.record)
            with self._files(), stopping, closing[0], self.progress, closing[1]:
                self.directory.write_status("running")
                if not self.is_over:
                    self._run_chunks()
                    self.save()
            if self.verdict.failure is not None:
                raise self.verdict.failure
            with self._files():
                if self.is_over:
                    self.directory.write_status("finished")
                else:
                    self.directory.write_status("stopped", self.verdict.stop_reason or "")
        except BaseException as error:
            with contextlib.suppress(OSError):  # report the original error, not that the disk is still full
                self.directory.write_status("failed", f"{type(error).__name__}: {error}")
            raise
        return self.state

    def _run_chunks(self) -> None:
        """Dispatch a chunk, and log the previous one while the device computes."""
        self._compile()
        pending: tuple[int, int, Any] | None = None
        count = self.record.unit
        while not self.is_over and self.verdict.stop_reason is None:
            count = min(count, self._next_event() - self.done)
            rows, count = self._advance(count)
            if pending is not None:
                self._log(self._chunk(*pending))
                pending = None
            if count:
                pending = self.done, count, rows
                self.done += count
            if pending is not None and self._is_event():
                self._event(self._chunk(*pending))
                pending = None
            elif pending is not None and isinstance(rows, np.ndarray):  # a host runner has finished already
                self._log(self._chunk(*pending))
                pending = None
            self._report()
            if self.record.latest:
                self._prepare_evaluation(is_busy=True)
            count = _next_count(max(count, 1), self.pace.seconds, self.record.unit, self.runner.most)
        if pending is not None:
            self._log(self._chunk(*pending))
            self._report()

    def _advance(self, count: int) -> tuple[Any, int]:
        """Dispatch `count` updates; return their metrics and how many there are: fewer if an environment failed."""
        self.plan.sharding.hosts.order("advance", updates=count)
        try:
            self.state, rows = self.runner.advance(self.state, count)
        except Interrupted as interrupted:
            self.state, rows = interrupted.state, interrupted.rows
            self.verdict.fail(RunFailed(f"{interrupted} The last good state is saved in '{self.directory.path}'."))
            count = min(count, len(rows))
        return rows, count

    def prepare(self) -> None:
        """Begin to compile the updates in the background, while the caller writes files."""
        if not self.is_over:
            self.runner.prepare(self.state)

    def _prepare_evaluation(self, is_busy: bool = False) -> None:
        """Begin to compile the evaluation in the background, once; while training is busy, trace it there, too."""
        if not self.prepared and self.plan.sharding.hosts.count == 1:
            self.record.prepare(self.state, self.runner.prepare(self.state), is_busy)
        self.prepared = True

    def _compile(self) -> None:
        begin, key = self.runner.since or time.perf_counter(), compile_times.program_key(self.plan, self.state)
        with self.progress.waiting(
            f"compiling {self.plan.algorithm} on {self.plan.run.env.strip('<>')}", compile_times.last_time(key)
        ):
            self.plan.sharding.hosts.order("begin", updates=self.start)
            with garbage.paused():
                compiling = self.runner.prepare(self.state)
                if compiling is not None and not background.is_done_within(compiling, READ_SECONDS):
                    self._prepare_evaluation()
                self.runner.compile(self.state)
        self.compile_seconds = time.perf_counter() - begin
        compile_times.remember(key, self.compile_seconds)
        self.say(f"compiled in {self.compile_seconds:.1f} s")
        self.state = self.runner.begin(self.state)
        self.elapsed = time.perf_counter() - self.begin  # exclude compilation from the first chunk's speed

    # Events: checkpoints and evaluations, at fixed updates, so that a resumed run has the same ones ------------------

    @property
    def _checkpoint_interval(self) -> int | None:
        """Updates between checkpoints; `None` if they are made by time."""
        every = self.plan.run.checkpoint_every
        if every:
            return self._in_units(self.plan.every(every))
        return None if self.kind.save_seconds else max(1, -(-self.plan.updates // 10))

    @property
    def _evaluate_interval(self) -> int | None:
        run = self.plan.run
        if run.evaluate_every:
            return self._in_units(self.plan.every(run.evaluate_every))
        return self._checkpoint_interval if run.target_return is not None else None

    def _in_units(self, updates: int) -> int:
        return -(-updates // self.record.unit) * self.record.unit

    def _next_event(self, update: int | None = None) -> int:
        """Return the next update with an event after `update`, which defaults to the latest update."""
        done = self.done if update is None else update
        intervals = [self._checkpoint_interval, self._evaluate_interval]
        return min(
            [self.course.next_end(done), *((done // interval + 1) * interval for interval in intervals if interval)]
        )

    def _is_event(self) -> bool:
        """Whether there is something to do after the latest update besides logging it."""
        return self.done == self._next_event(self.done - 1) or self._is_due()

    def _is_due(self) -> bool:
        """Whether a checkpoint is due: by its interval, or by time."""
        interval, seconds = self._checkpoint_interval, self.kind.save_seconds
        if interval is not None:
            return self.done % interval == 0
        return seconds is not None and time.perf_counter() - self.saved_at > seconds

    def _event(self, chunk: Chunk) -> None:
        """Evaluate if due, log the chunk, and save if due."""
        is_best = False
        found: dict[str, Any] = {}
        is_end = self.done == self.course.next_end(self.done - 1)
        if is_end or (self._evaluate_interval is not None and self.done % self._evaluate_interval == 0):
            try:
                found = self._evaluate(is_end)
            except EvaluationStopped:
                self.warn(
                    "The last evaluation was stopped by a signal, so the run has no evaluated return; lehr eval "
                    f"'{self.directory.path}' evaluates its policy."
                )
            except EnvironmentFailed as error:
                where = f"The last good state is saved in '{self.directory.path}'."
                self.verdict.fail(RunFailed(f"The evaluation failed: {error} {where}"))
            is_best = self.record.is_best(found, self.done)
        self.is_over = is_end and self.course.is_over(self.done, self.state)
        self.record.log(chunk, found, self.is_over)
        if self.is_over or is_best or self._is_due():
            self.save()
        self.elapsed = time.perf_counter() - self.begin  # exclude the event from the next chunk's speed

    def _evaluate(self, is_end: bool) -> dict[str, Any]:
        """Evaluate the policy; a signal stops the last evaluation of a run, after which nothing depends on it."""
        episodes = self.plan.run.evaluate_episodes
        may_stop = is_end and self.plan.sharding.hosts.count == 1
        with self.progress.waiting(f"evaluating {episodes} episodes", plain=False):
            return self.record.evaluate(self.state, self.done, self._has_signal if may_stop else None)

    def _has_signal(self) -> bool:
        return (self.verdict.stop_reason or "").startswith("signal")

    def save(self) -> None:
        """Sync the metrics and save a checkpoint of the current state, unless it is saved already."""
        if self.saved == self.done:
            return
        self._check_copies()
        meta: dict[str, Any] = {
            "elapsed": time.perf_counter() - self.begin,
            "env_steps": self.done * self.plan.program.steps_per_update,
            "devices": self.plan.sharding.devices,
            **({"processes": hosts.count} if (hosts := self.plan.sharding.hosts).count > 1 else {}),
            **self.record.save(self.done),
        }
        if self.plan.loaded.sources:
            meta["data"] = dict(self.plan.loaded.sources)
        with_memory = self.plan.run.checkpoint_replay == "on"
        checkpoint.save(
            self.directory.checkpoints,
            self.plan.sharding.whole(self.state.saved, without=lambda path: not with_memory and MEMORY.match(path)),
            self.done,
            meta,
            self.plan.run.keep_checkpoints,
            self.record.protected(),
            memory=with_memory,
        )
        self.saved, self.saved_at = self.done, time.perf_counter()

    def _check_copies(self) -> None:
        """Stop a run whose devices do not agree, at its first checkpoint after an update."""
        if self.compared or self.done == self.start or self.plan.sharding.devices == 1:
            return
        self.compared = True
        if differing := self.plan.sharding.differing(self.state):
            raise RunFailed(
                f"The devices do not agree on {differing[0]}: what {self.plan.algorithm} computes from a rollout must "
                "be averaged with lehr.maths.across before it goes into the state; until it is, train with devices=1."
            )

    # Metrics ------------------------------------------------------------------------------------------------------

    def _chunk(self, begin: int, count: int, rows: Any) -> Chunk:
        """Return the metrics of a chunk with its times. Blocks until the device has finished it."""
        table = np.asarray(rows)[: -(-count // self.record.unit)]
        start, self.elapsed = self.elapsed, time.perf_counter() - self.begin
        pace = self.pace.add(self.elapsed - start, begin + count)
        return Chunk(begin, count, table, start, self.elapsed, pace)

    def _log(self, chunk: Chunk) -> None:
        self.record.log(chunk, {}, False)

    def _report(self) -> None:
        """Show the latest logged metrics (perhaps of the previous chunk), and pass them to `progress_fn`."""
        latest = self.record.latest
        if not latest:
            return
        steps = int(latest["env_steps"])
        self.progress.update(steps, latest, latest["time/steps_per_second"])
        if self.progress_fn is None:
            return
        try:
            answer = self.progress_fn(steps, dict(latest))
        except Exception as error:
            self.verdict.fail(error)
            return
        if isinstance(answer, bool | np.bool_) and answer:
            self.verdict.stop_reason = "progress_fn returned True"

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

    def stop(self, reason: str) -> None:
        """Stop the run after the current chunk."""
        self.verdict.stop_reason = reason


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('s') else 's'}"


def _next_count(count: int, pace: float, unit: int = 1, most: int = MOST_UPDATES) -> int:
    """Return the number of updates in the next chunk, so that it takes about `CHUNK_SECONDS`.

    Args:
        count: that of the last chunk.
        pace: seconds per update.
        unit: it is a multiple of this.
        most: at most so many.
    """
    wanted = CHUNK_SECONDS / max(pace, 1e-6)
    return int(min(max(wanted, 1), 4 * count, most)) // unit * unit or unit
