"""Run a sweep from its definition to its report."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lehr import algorithms, config, garbage
from lehr.acting.actors.links import ray_cluster
from lehr.envs import AnyEnvironment
from lehr.envs.naming import adopt
from lehr.errors import InputError, quoted
from lehr.report.loggers.display import waiting
from lehr.sweeps.changes import make_changes
from lehr.sweeps.cluster import RayDevices
from lehr.sweeps.definition import Configuration, Definition, check_trust
from lehr.sweeps.directory import ROOT, Member, SweepDirectory
from lehr.sweeps.domains import Range
from lehr.sweeps.gathering import gather, scores
from lehr.sweeps.headline import verdict
from lehr.sweeps.lineage import Fit, fit
from lehr.sweeps.ranking import Ranking, rank
from lehr.sweeps.report import prepare_report, write_report
from lehr.sweeps.report_data import study
from lehr.sweeps.results import Results
from lehr.sweeps.running import Estimate, Stopped, Waves, WaveTrainer, estimate
from lehr.sweeps.samplers import ListSampler, Sampler, configurations, make_sampler
from lehr.sweeps.sections import MOST_CONFIGURATIONS, OPTUNA
from lehr.sweeps.seed_files import write_seeds
from lehr.sweeps.statistics import interquartile_mean
from lehr.sweeps.wave_metrics import read_wave
from lehr.training import background
from lehr.training.compilation_cache import use_compilation_cache
from lehr.training.directory import Status, unused_path

ROUNDS = 8
"""A sampler that learns from scores is asked about this many times."""


@dataclass(frozen=True)
class SweepResult:
    """A sweep: its definition, its directory, and what it found so far."""

    directory: Path
    definition: Definition
    is_finished: bool
    seconds: float = 0.0
    """How long this call took."""
    compile_seconds: float = 0.0
    """How much of that was spent compiling."""
    env: AnyEnvironment | None = field(default=None, repr=False)

    @cached_property
    def results(self) -> Results:
        """The results as arrays."""
        swept = [name for name in self.definition.parameters if not self.definition.is_static(name)]
        stays = " that is not stopped" if self.definition.halving is not None else ""
        notes = {"total steps": f"{self.definition.space.total_steps:,} env steps for each member{stays}"}
        name = algorithms.name_of(self.definition.algorithm)
        env = str(self.definition.settings.get("env", "CartPole-v1"))
        shared = {key: value for key, value in self.definition.settings.items() if key != "env"}
        log_scaled = [
            key
            for key, domain in self.definition.space.domains.items()
            if isinstance(domain, Range) and domain.scale == "log"
        ]
        return gather(SweepDirectory(self.directory), name, env, swept, shared, log_scaled, notes)

    @cached_property
    def ranking(self) -> Ranking:
        """The configurations from the best to the worst, with how sure that is."""
        return rank(self.results)

    @property
    def winning_paths(self) -> dict[str, Fit]:
        """If members changed while they trained: by coefficient, the path that led to the winner of the ranking."""
        directory = SweepDirectory(self.directory)
        numbers = set(self.results.members[self.ranking.winner].tolist())
        members = [member for wave in directory.read_waves() for member in wave.members if member.number in numbers]
        # A sweep of an earlier version may have several in a row: the best of them was trained again first.
        return paths(directory, self.definition, members[_best_first(scores(directory, members))[0]])

    @property
    def summary(self) -> str:
        """What was found, in one sentence."""
        return verdict(self.ranking)


def sweep(
    definition: str | Path | Mapping[str, Any] | Definition,
    *,
    out: str | Path | None = None,
    env: str | AnyEnvironment | None = None,
    wave_size: int | None = None,
    on: str | None = None,
    progress: bool = True,
    trust: bool = False,
) -> SweepResult:
    """Train all members of a sweep, the best ones again with fresh seeds, and write a report.

    Args:
        definition: a sweep file, or a mapping with its keys; see docs/sweeps.md.
        out: directory of the sweep; by default `sweeps/<algorithm>-<env>-<time>`.
        env: an environment or its name, instead of the one in the settings.
        wave_size: train at most this many members at once on a device; by default as many as fit into memory, with
            work for every device.
        on: "ray" trains on the devices of the Ray cluster in `RAY_ADDRESS`, or of a new local one; by default, on the
            device of this process.
        progress: show progress.
        trust: allow the file to run code from outside Lehr.
    """
    begin = time.perf_counter()
    read = _read(definition, trust)
    check_size(wave_size)
    if env is not None:
        read = replace(read, settings=_with_environment(read.settings, env))
    config.checked_yaml(read.to_mapping())
    made = None if isinstance(env, str) else env
    trainer = _trainer(read, made, progress)
    use_compilation_cache()
    background.start_device()
    with waiting("preparing the members", progress):
        sampler, need = checked_sampler(read, made, wave_size)
    trainer.use(need.base)
    name = f"{algorithms.name_of(read.algorithm)}-{str(read.settings.get('env', 'CartPole-v1')).strip('<>')}"
    path = Path(out) if out is not None else unused_path(name, ROOT)
    with _connected(on) as make_devices, _locked(SweepDirectory.create(path)) as directory:
        config.to_yaml(directory.definition, read.to_mapping())
        return _run(read, sampler, directory, trainer, wave_size, make_devices, begin)


def resume_sweep(
    path: str | Path,
    *,
    env: AnyEnvironment | None = None,
    wave_size: int | None = None,
    on: str | None = None,
    progress: bool = True,
    trust: bool = False,
) -> SweepResult:
    """Continue a sweep that was stopped, as if it had never stopped.

    `path` is its directory, or its name under `sweeps/`. The other arguments are those of `sweep` and may differ from
    before: `env` is needed if the sweep was given an object, and `wave_size` is only for members that are not assigned
    to a wave yet.
    """
    begin = time.perf_counter()
    directory = SweepDirectory.open(path)
    read = Definition.read(directory.definition, trust)
    check_size(wave_size)
    with _connected(on) as make_devices, _locked(directory):
        _check_members(directory, trust)
        if on is None:
            background.start_device()
        trainer = _trainer(read, env, progress)
        return _run(read, make_sampler(read), directory, trainer, wave_size, make_devices, begin)


def load_sweep(path: str | Path, *, trust: bool = False) -> SweepResult:
    """Load a sweep: its definition, and what its members found so far.

    Args:
        path: its directory, or its name under `sweeps/`.
        trust: allow the sweep to run code from outside Lehr.
    """
    directory = SweepDirectory.open(path)
    definition = Definition.read(directory.definition, trust)
    _check_members(directory, trust)
    return SweepResult(directory.path, definition, directory.is_complete)


def _with_environment(settings: Mapping[str, Any], env: Any) -> dict[str, Any]:
    """The settings with an environment that was passed, by a name and parameters that make an equal one if possible."""
    if isinstance(env, str):
        return {**settings, "env": env}
    adopted = adopt(env, settings.get("env_parameters", {}))
    parameters = {"env_parameters": adopted.parameters} if adopted.parameters else {}
    return {**settings, "env": adopted.name, **parameters}


@garbage.paused()
def checked_sampler(
    definition: Definition, env: AnyEnvironment | None = None, wave_size: int | None = None
) -> tuple[Sampler, Estimate]:
    """Return the sampler of a sweep, and what the sweep needs.

    Configurations that cannot be trained are an error, as far as they are known.
    """
    if definition.sampler.startswith(OPTUNA):
        return make_sampler(definition), estimate(definition, make_sampler(definition).ask(1), env, wave_size)
    listed = configurations(definition)
    return ListSampler(listed), estimate(definition, listed, env, wave_size)


def _trainer(definition: Definition, env: AnyEnvironment | None, progress: bool) -> WaveTrainer:
    """What trains the members of a sweep."""
    places = None if definition.halving is None else definition.halving.places or 0
    return WaveTrainer(definition.algorithm, env, make_changes(definition), progress, places)


def _check_members(directory: SweepDirectory, trust: bool) -> None:
    """Refuse members whose settings would run code from outside Lehr, as those of the definition are."""
    for wave in [] if trust else directory.read_waves():
        for member in wave.members:
            check_trust({"settings": member.settings}, f"The sweep '{directory.path}'", trust)


def members_of(chosen: Sequence[Configuration], seeds: Sequence[int], first: int = 0) -> list[Member]:
    """Every configuration with every seed; numbers begin with `first`."""
    pairs = itertools.product(chosen, seeds)
    return [
        Member(number, configuration.number, seed, configuration.point, configuration.settings)
        for number, (configuration, seed) in enumerate(pairs, first)
    ]


def _read(definition: str | Path | Mapping[str, Any] | Definition, trust: bool) -> Definition:
    if isinstance(definition, Definition):
        return definition
    if isinstance(definition, Mapping):
        return Definition.from_mapping(definition)
    return Definition.read(definition, trust)


def check_size(wave_size: int | None) -> None:
    """Refuse waves without members."""
    if wave_size is not None and wave_size < 1:
        raise InputError(f"wave_size is {wave_size}; it must be 1 or more.")


@contextlib.contextmanager
def _connected(on: str | None) -> Iterator[Callable[[WaveTrainer], RayDevices] | None]:
    """Connect to the devices to train on, and yield what makes them; `None` for the device of this process."""
    if on is None:
        yield None
        return
    if on != "ray":
        raise InputError(f"on is {quoted(on)}; it must be 'ray', or left out to train on this machine.")
    with ray_cluster("--on ray"):
        yield RayDevices


@contextlib.contextmanager
def _locked(directory: SweepDirectory) -> Iterator[SweepDirectory]:
    """Hold the lock of a sweep, and write down how it ends."""
    with directory.run:
        try:
            yield directory
        except BaseException as error:
            status: Status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            with contextlib.suppress(OSError):
                directory.run.write_status(status, f"{type(error).__name__}: {error}")
            raise


def _run(
    definition: Definition,
    sampler: Sampler,
    directory: SweepDirectory,
    trainer: WaveTrainer,
    wave_size: int | None,
    make_devices: Callable[[WaveTrainer], RayDevices] | None,
    begin: float,
) -> SweepResult:
    """Train what is not trained yet, and write the report; the call began at `begin`."""
    directory.run.write_status("running")
    is_finished, studied = False, None
    with contextlib.ExitStack() as stack:
        devices = None if make_devices is None else stack.enter_context(contextlib.closing(make_devices(trainer)))
        waves = Waves(directory, trainer, wave_size, devices, prepare_report, definition.confirm)
        stack.callback(waves.close)
        try:
            tried = _search(definition, sampler, directory, waves)
            so_far = SweepResult(directory.path, definition, False)
            studied = waves.meanwhile(lambda: study(so_far.results, so_far.ranking))
            _confirm(definition, directory, waves, tried)
            is_finished = True
            directory.run.write_status("finished")
        except Stopped as stopped:
            directory.run.write_status("stopped", str(stopped))
    result = SweepResult(directory.path, definition, is_finished, 0.0, waves.compile_seconds, trainer.env)
    if result.results.members.size:
        with contextlib.suppress(InputError):  # without its packages there is no report; the summary says so
            write_report(result.results, directory.report, None if studied is None else studied.result())
        if not definition.parameters:
            write_seeds(directory, result.results)
    timed = replace(result, seconds=time.perf_counter() - begin)
    vars(timed).update({name: value for name, value in vars(result).items() if name in ("results", "ranking")})
    return timed


def _search(definition: Definition, sampler: Sampler, directory: SweepDirectory, waves: Waves) -> list[Member]:
    """Train the configurations that the sampler asks for, and return the members.

    If members change while they train, equal values at the beginning say nothing about the end: two seeds of them
    become copies of different members. So each is a configuration of its own.
    """
    adapts = definition.sampler.startswith(OPTUNA)
    count = -(-(definition.samples or 1) // ROUNDS) if adapts else MOST_CONFIGURATIONS
    tried: list[Member] = []
    while asked := sampler.ask(count):
        members = members_of(asked, definition.seeds, len(tried))
        if definition.evolution is not None and definition.parameters:
            members = [replace(member, configuration=member.number) for member in members]
        waves.trainer.know(asked)
        if not tried:
            directory.check_settings(waves.trainer.settings(members[0]))
        waves.train(members)
        known = {member.number: member for wave in waves.waves for member in wave.members}
        tried += [known[member.number] for member in members]  # as an earlier version may have numbered them
        if adapts:
            sampler.tell(asked, _estimates(directory, members, len(asked)).tolist())
    return tried


def _estimates(directory: SweepDirectory, members: Sequence[Member], configurations: int) -> np.ndarray:
    """The score of each configuration, as the ranking estimates it; a failed member counts as the lowest among them."""
    found = scores(directory, members).reshape(configurations, -1)
    lowest = np.nanmin(found) if np.isfinite(found).any() else np.nan
    return interquartile_mean(np.where(np.isnan(found), lowest, found))


def _best_first(found: np.ndarray) -> np.ndarray:
    """The indices of scores from the best to the worst; those that failed come last, equal ones keep their order."""
    return np.argsort(-np.nan_to_num(found, nan=-np.inf), kind="stable")


def _confirm(definition: Definition, directory: SweepDirectory, waves: Waves, tried: list[Member]) -> None:
    """Train the best configurations again with fresh seeds: the best of many was in part the luckiest.

    If members changed while they trained, the paths of the best ones are trained again, as schedules.
    """
    top, count = definition.confirm
    if not top or not count:
        return
    found = scores(directory, tried)
    if definition.evolution is not None:
        best = [tried[index] for index in _best_first(found)[:top]]
        chosen = [replace(one, settings=final_settings(directory, definition, one)) for one in best]
    else:
        size = len(definition.seeds)
        order = _best_first(_estimates(directory, tried, len(tried) // size))
        if definition.halving is not None:  # those that nobody trained to the end are not among the best
            order = order[np.isfinite(found).reshape(-1, size).any(axis=1)[order]]
        chosen = [tried[index * size] for index in order[:top]]
    first = max(definition.seeds) + 1
    pairs = itertools.product(chosen, range(first, first + count))
    waves.train(
        [replace(one, number=number, seed=seed, fresh=True) for number, (one, seed) in enumerate(pairs, len(tried))]
    )


def final_settings(directory: SweepDirectory, definition: Definition, member: Member) -> dict[str, Any]:
    """The settings of a member; if its coefficients changed while it trained, with their path as schedules."""
    if definition.evolution is None or member.fresh:
        return member.settings
    found = paths(directory, definition, member)
    return {**member.settings, **{name: str(path.schedule) for name, path in found.items()}}


def paths(directory: SweepDirectory, definition: Definition, member: Member) -> dict[str, Fit]:
    """By coefficient, the path that led to a member of an evolution, fitted with a few phases."""
    wave = next(wave for wave in directory.read_waves() if member.number in [one.number for one in wave.members])
    place = [one.number for one in wave.members].index(member.number)
    table = read_wave(directory, wave, ["env_steps", *(f"coef/{name}" for name in definition.parameters)])
    return {name: fit(table["env_steps"], table[f"coef/{name}"][:, place]) for name in definition.parameters}
