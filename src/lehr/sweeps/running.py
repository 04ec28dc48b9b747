"""Train the members of a sweep: groups that share a program, in waves that fit into memory."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import jax

from lehr import config
from lehr.envs import AnyEnvironment
from lehr.errors import InputError
from lehr.report.loggers.display import waiting
from lehr.report.loggers.population_progress import PopulationProgress
from lehr.sweeps.changes import make_changes
from lehr.sweeps.definition import Configuration, Definition
from lehr.sweeps.directory import Member, SweepDirectory, Wave
from lehr.sweeps.sections import Confirm
from lehr.training import background, checkpoint
from lehr.training.directory import RunDirectory
from lehr.training.loop import ProgressFunction
from lehr.training.plan import Plan, make_plan
from lehr.training.population import (
    Configured,
    Population,
    fast_multiple,
    make_population,
    prepare_population,
    refuse_host,
    trace_update,
)
from lehr.training.population_record import SETTLED_SECONDS
from lehr.training.runners.population import Evolution, TooLarge
from lehr.training.sharding import available

T = TypeVar("T")

FILLED = 4
"""A wave is filled up to an earlier one's size, to share its program, if that is at most this many times its own."""
FILLED_ON_CPU = 1.25
"""The same on a CPU, where every idle place takes as long as a member."""
MOST_FILLED = 1.125
"""A wave is filled up to a number that is faster, if that is at most this many times its own."""


class Stopped(Exception):
    """The user stopped the sweep; what was trained is saved."""


class WaveTooLarge(Exception):
    """A wave needs more memory than its device has; the message says how much."""

    def __init__(self, wave: Wave, needs: str) -> None:
        super().__init__(needs)
        self.wave = wave


class Trained(NamedTuple):
    """How the training of a wave ended."""

    stop_reason: str | None
    """Why it ended early; `None` if it is finished."""
    compile_seconds: float
    """Time spent compiling."""


class WaveTrainer:
    """Trains one wave after the other on the device of this process; waves of a group share a compiled program.

    Args:
        algorithm: its name, `module:Name`, or its class.
        env: the environment, if it is not given by name.
        make_evolution: makes what changes members while they train; members with fresh seeds train without.
        places: if members take turns in the places of a wave: at most so many places, 0 for as many as fit into memory.
        progress: whether to show progress.
    """

    def __init__(
        self,
        algorithm: Any,
        env: AnyEnvironment | None = None,
        make_evolution: Callable[[Plan], Evolution] | None = None,
        progress: bool = True,
        places: int | None = None,
    ) -> None:
        self.algorithm, self.env, self.make_evolution, self.progress = algorithm, env, make_evolution, progress
        self.places = places
        self._bases: dict[Any, Plan] = {}
        self._known: dict[str, Configured] = {}

    def elsewhere(self) -> "WaveTrainer":
        """A copy for another process, which does not show progress."""
        other = copy.copy(self)
        other.progress, other._bases, other._known = False, {}, {}
        return other

    def know(self, configurations: Iterable[Configuration]) -> None:
        """Remember settings that are parsed already."""
        self._known |= {repr(one.settings): one.parsed for one in configurations}

    def use(self, base: "Base") -> None:
        """Train the members of its group with the program of this plan, instead of assembling it again."""
        run = replace(base.plan.run, tensorboard=False, progress=self.progress)
        self._bases = {base.group: replace(base.plan, run=run)}

    def group(self, member: Member) -> Any:
        """What the members of a wave must have in common: the program that they need; seeds do not matter."""
        return self._parsed(member).group

    def _parsed(self, member: Member) -> Configured:
        """The settings of a member, which take milliseconds to parse; equal ones are parsed once."""
        key = repr(member.settings)
        if key not in self._known:
            self._known[key] = Configured.of(self.algorithm, member.settings)
        return self._known[key]

    def settings(self, member: Member) -> dict[str, Any]:
        """All settings of a member, with the defaults of those that are not given."""
        return config.to_mapping(*self._parsed(member).configs)

    def takes_turns(self, member: Member) -> bool:
        """Whether a member shares the places of its wave with all others of its group."""
        return self.places is not None and not member.fresh

    def total_steps(self, member: Member) -> int:
        """The budget of a member in env steps."""
        return self._parsed(member).configs[0].total_steps

    def number_of_devices(self, member: Member) -> int:
        """The number of devices that may share a wave with this member."""
        return len(available(self._parsed(member).configs[0].devices))

    def multiple(self, member: Member) -> int:
        """The number of which a wave with this member should have a multiple on each device, to be fast."""
        base = self._bases.get(self.group(member))
        return 1 if base is None else fast_multiple(base)

    def train(self, wave: Wave, path: Path, title: str = "", report: ProgressFunction | None = None) -> Trained:
        """Train a wave from its beginning, or from its latest checkpoint.

        Args:
            wave: its members.
            path: its directory.
            title: what is trained, in front of the progress.
            report: called after every chunk with the env steps of all members so far, and with the latest metrics; if
                it returns `True`, the wave stops.
        """
        labels = [member.label for member in wave.members]
        with waiting(f"{title}preparing {len(labels)} members", self.progress):
            population = self._population(wave, labels)
        path.mkdir(parents=True, exist_ok=True)
        with RunDirectory(path) as directory:
            progress = partial(PopulationProgress, labels=labels, title=title, share=population.expected_share)
            loop = population.loop(directory, progress, report)
            if wave.number == 0 and not wave.members[0].point:  # seeds alone, which all have these schedules
                for note in loop.plan.schedule_notes:
                    loop.warn(note)
            loop.run()
        reason = None if loop.is_over else loop.verdict.stop_reason or "stopped"
        return Trained(reason, loop.compile_seconds)

    def _population(self, wave: Wave, labels: Sequence[str]) -> Population:
        """Assemble the members of a wave."""
        settings = [self._settings(member) for member in wave.members]
        settings += [settings[-1]] * (wave.size - len(settings))  # so that all waves of a group have the same shapes
        group = self.group(wave.members[0])
        if group not in self._bases:
            self._bases = {group: make_plan(self.algorithm, settings[0], self.env, abstract=True)}
        evolution = None if wave.members[0].fresh else self.make_evolution
        parsed = [self._parsed(member) for member in wave.members]
        parsed += [parsed[-1]] * (wave.size - len(parsed))
        return make_population(
            *(self.algorithm, settings, labels, self.env, evolution),
            base=self._bases[group],
            parsed=parsed,
            places=wave.size,
            begins=True,
        )

    def prepare(self, members: Sequence[Member], size: int) -> None:
        """Begin to compile what a wave of this size with fresh seeds needs, if its program is that of these members."""
        base = self._bases.get(self.group(members[0]))
        if base is not None:
            prepare_population(base, [self._parsed(member).coefficients for member in members[:size]], size)

    def _settings(self, member: Member) -> dict[str, Any]:
        return {"tensorboard": False} | member.settings | {"seed": member.seed, "progress": self.progress}


class Devices(Protocol):
    """Other devices than that of this process, on which waves are trained at the same time."""

    compile_seconds: float
    """Time spent compiling, on the device that spent most."""

    def count(self) -> int:
        """The number of devices."""

    def train(self, directory: SweepDirectory, waves: Sequence[Wave], total: int) -> None:
        """Train some of the `total` waves of a sweep, each in its directory; raise `Stopped` or `WaveTooLarge`."""


class Waves:
    """Trains members in waves, and remembers them in the directory of the sweep.

    Args:
        directory: of the sweep.
        trainer: trains the waves.
        size: at most this many members in a wave; by default as many as fit into memory.
        devices: train on these instead of here.
        meanwhile: called once, in a thread, while the first members train here: the processor has little to do then.
        confirm: what is trained again at the end; what that needs is compiled meanwhile, too.
    """

    def __init__(
        self,
        directory: SweepDirectory,
        trainer: WaveTrainer,
        size: int | None = None,
        devices: Devices | None = None,
        meanwhile: Callable[[], object] | None = None,
        confirm: Confirm = Confirm(0, 0),  # noqa: B008  immutable
    ) -> None:
        self.directory, self.trainer, self.size, self.devices = directory, trainer, size, devices
        self._meanwhile, self._confirm = meanwhile, confirm
        self._programs: Future | None = None
        self._begun: list[Future] = []
        self.waves = directory.read_waves()
        self._compile_seconds = 0.0

    @property
    def compile_seconds(self) -> float:
        """Time spent compiling, in all waves."""
        return self._compile_seconds if self.devices is None else self.devices.compile_seconds

    def close(self) -> None:
        """Wait until what was begun while members trained is done."""
        wait(self._begun)

    def meanwhile(self, function: Callable[[], T]) -> "Future[T] | None":
        """Call a function in a thread while members with fresh seeds train here; not at all if there will be none."""
        if self.devices is not None or not self._confirm.top or not self._confirm.seeds:
            return None
        found = background.start(function)
        self._begun.append(found)
        return found

    def train(self, members: Sequence[Member]) -> None:
        """Train members, unless they are trained already."""
        known = {member.number for wave in self.waves for member in wave.members}
        new = [member for member in members if member.number not in known]
        if new:
            groups = self._groups(new)
            for group in groups:
                self._append(group, self._least(len(groups)))
            self.directory.write_waves(self.waves)
        wanted = {member.number for member in members}
        while left := [wave for wave in self.waves if self._is_left(wave, wanted)]:
            try:
                if self.devices is None:
                    self._train(left[0])
                else:
                    self.devices.train(self.directory, left, len(self.waves))
            except WaveTooLarge as error:
                self._split(error.wave, str(error))

    def _is_left(self, wave: Wave, wanted: set[int]) -> bool:
        is_wanted = any(member.number in wanted for member in wave.members)
        return is_wanted and not self.directory.is_finished(wave)

    def _groups(self, members: Iterable[Member]) -> list[list[Member]]:
        """Members by the program they need, in the order in which programs first appear."""
        found: dict[Any, list[Member]] = {}
        for member in members:
            found.setdefault(self.trainer.group(member), []).append(member)
        return list(found.values())

    def _least(self, groups: int) -> int:
        """The least number of waves in each group, so that every device has work; an evolution is not divided."""
        if self.devices is None or self.size is not None or self.trainer.make_evolution is not None:
            return 1
        return max(1, -(-self.devices.count() // groups))

    def _append(self, members: list[Member], least: int) -> None:
        """Plan at least `least` waves of one group, of the same size, so that they share a compiled program."""
        if self.trainer.takes_turns(members[0]):
            size = min(len(members), self.size or len(members), self.trainer.places or len(members))
            self.waves.append(Wave(len(self.waves), tuple(members), size, takes_turns=True))
            return
        size = self._size_of(len(members), members[0], least)
        for begin in range(0, len(members), size):
            self.waves.append(Wave(len(self.waves), tuple(members[begin : begin + size]), size))

    def _size_of(self, number: int, member: Member, least: int = 1) -> int:
        """The size of at least `least` waves for so many members of the group of this one."""
        count = max(-(-number // (self.size or number)), min(least, number))
        size = self._filled(-(-number // count), member)
        group = self.trainer.group(member)
        sizes = [wave.size for wave in self.waves if self.trainer.group(wave.members[0]) == group]
        filled = FILLED_ON_CPU if jax.default_backend() == "cpu" else FILLED
        if sizes and size < sizes[-1] <= filled * size and self.trainer.make_evolution is None:
            size = sizes[-1]  # some idle places take less time than compiling again
        return size

    def _filled(self, size: int, member: Member) -> int:
        """The size of a wave with idle places, so that all devices of this machine have equally many members.

        A few more fill it up to a number that is faster.
        """
        if self.devices is not None or (self.trainer.make_evolution is not None and not member.fresh):
            return size
        devices = self.trainer.number_of_devices(member)
        filled = shared_equally(size, devices, self.trainer.multiple(member))
        return filled if self.size is None or filled <= self.size else shared_equally(size, devices)

    def _split(self, wave: Wave, needs: str) -> None:
        """Halve a wave, or drop its idle places, and all others of its group that are as large and have not begun.

        A wave keeps its number and its first half; the second halves become new waves at the end, because waves with
        other numbers may be under way or finished. Where members take turns, only the number of places is halved.
        """
        if wave.size == 1:
            raise InputError(f"One member of the sweep needs {needs}; reduce num_envs, horizon or the network's sizes.")
        if self._has_begun(wave):
            raise InputError(
                f"Wave {wave.number + 1} of the sweep needs {needs}, and has begun on a device with more memory; "
                "resume it there."
            )
        group = self.trainer.group(wave.members[0])
        self.size = wave.size // 2 + wave.size % 2
        fewest = shared_equally(len(wave.members), self.trainer.number_of_devices(wave.members[0]))
        if not wave.takes_turns and fewest < wave.size:  # without its idle places, it may fit
            self.size = max(self.size, fewest)
        for other in list(self.waves):
            alike = other.size >= wave.size and self.trainer.group(other.members[0]) == group
            if alike and not self._has_begun(other) and not self.directory.is_finished(other):
                kept = len(other.members) if other.takes_turns else self.size
                first, rest = other.members[:kept], other.members[kept:]
                self.waves[other.number] = replace(other, members=first, size=self.size)
                for begin in range(0, len(rest), self.size):
                    self.waves.append(Wave(len(self.waves), rest[begin : begin + self.size], self.size))
        self.directory.write_waves(self.waves)

    def _has_begun(self, wave: Wave) -> bool:
        return bool(checkpoint.steps(RunDirectory(self.directory.wave_path(wave.number)).checkpoints))

    def _train(self, wave: Wave) -> None:
        """Train a wave here."""
        title = f"wave {wave.number + 1} of {len(self.waves)}  " if len(self.waves) > 1 else ""
        if wave.members[0].fresh and self._programs is not None:
            wait([self._programs])  # otherwise its program might be compiled twice
        try:
            trained = self.trainer.train(wave, self.directory.wave_path(wave.number), title, self._begin_meanwhile)
        except TooLarge as error:
            raise WaveTooLarge(wave, str(error)) from error
        self._compile_seconds += trained.compile_seconds
        if trained.stop_reason is not None:
            raise Stopped(trained.stop_reason)

    def _begin_meanwhile(self, steps: int, latest: dict[str, Any]) -> None:
        if self._programs is not None or latest["time/trained"] <= SETTLED_SECONDS:
            return
        self._programs = background.start(self._prepare_fresh if background.shares_scopes() else lambda: None)
        self._begun.append(self._programs)
        if self._meanwhile is not None:
            self._begun.append(background.start(self._meanwhile, self._programs))

    def _prepare_fresh(self) -> None:
        """Begin to compile what the members with fresh seeds need, if all members have one program."""
        members = [member for wave in self.waves for member in wave.members]
        count = min(self._confirm.top, len({member.configuration for member in members})) * self._confirm.seeds
        programs = {self.trainer.group(wave.members[0]) for wave in self.waves}
        if count and len(programs) == 1:
            self.trainer.prepare(members, self._size_of(count, replace(members[0], fresh=True)))


def shared_equally(size: int, devices: int, multiple: int = 1) -> int:
    """The size of a wave, with idle places so that all devices have equally many members.

    Args:
        size: the number of members.
        devices: that may share them.
        multiple: of which each device should have one, unless too many places would be idle.

    >>> shared_equally(5, devices=2), shared_equally(1000, 1, multiple=512), shared_equally(600, 1, multiple=512)
    (6, 1024, 600)
    """
    used = min(size, devices)
    each = -(-size // used)
    filled = -(-each // multiple) * multiple
    return used * (filled if filled <= MOST_FILLED * each else each)


class Base(NamedTuple):
    """A program that is assembled already."""

    group: Any
    """What the members that can be trained with it have in common."""
    plan: Plan
    """That of one of them."""


class Estimate(NamedTuple):
    """What a sweep needs, before anything is compiled."""

    groups: int
    """Number of programs."""
    bytes: int
    """The state of a member of the largest group."""
    evolution: Evolution | None
    """What changes the members of the first group while they train."""
    base: Base
    """The program of the first group."""


def estimate(
    definition: Definition,
    configurations: Sequence[Configuration],
    env: AnyEnvironment | None,
    wave_size: int | None = None,
) -> Estimate:
    """Estimate what a sweep needs; the rollouts and the gradients come on top.

    One configuration of each program is assembled and traced, so what cannot be trained is an error here, before
    anything is.
    """
    groups: dict[Any, list[Configuration]] = {}
    for configuration in configurations:
        groups.setdefault(configuration.parsed.group, []).append(configuration)
    sizes, found = [], []
    base: Base | None = None
    changes = make_changes(definition)
    for group, alike in groups.items():
        plan = make_plan(definition.algorithm, alike[0].settings, env, abstract=True)
        refuse_host(plan)
        # Minibatches of unequal size fail here.
        trace_update(plan, [one.parsed.coefficients for one in alike], *_probably(definition, plan, alike, wave_size))
        sizes.append(sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(plan.state)))
        found.append(None if changes is None else changes(plan))
        base = base or Base(group, plan)
    assert base is not None
    return Estimate(len(groups), max(sizes), found[0], base)


def _probably(
    definition: Definition, plan: Plan, alike: Sequence[Configuration], wave_size: int | None
) -> tuple[int, list[Any]]:
    """The size of the first wave and the devices that share it, probably; if not, an update is traced once more."""
    total = len(alike) * len(definition.seeds)
    places = definition.halving.places if definition.halving is not None else None
    size = min(total, wave_size or total, places or total)
    wanted, devices = plan.run.devices, jax.local_devices()
    devices = devices if wanted == "all" else devices[:wanted]
    if make_changes(definition) is None:
        multiple = 1 if wave_size else fast_multiple(plan)
        size = shared_equally(-(-total // -(-total // size)), len(devices), multiple)
    return size, devices
