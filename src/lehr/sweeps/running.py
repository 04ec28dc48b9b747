"""Train the members of a sweep: groups that share a program, in waves that fit into memory."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from lehr.envs import AnyEnvironment
from lehr.errors import InputError
from lehr.report.loggers.population_progress import PopulationProgress
from lehr.sweeps.definition import Configuration, Definition
from lehr.sweeps.directory import Member, SweepDirectory, Wave
from lehr.training.directory import RunDirectory
from lehr.training.plan import Plan, make_plan
from lehr.training.population import Configured, make_population, refuse_host
from lehr.training.runners.device import metric_names
from lehr.training.runners.population import Evolution, TooLarge

FILLED = 4
"""A wave is filled up to an earlier one's size, to share its program, if that is at most this many times its own."""
FILLED_ON_CPU = 1.25
"""The same on a CPU, where every idle place takes as long as a member."""


class Stopped(Exception):
    """The user stopped the sweep; what was trained is saved."""


class Waves:
    """Trains members in waves, and remembers them in the directory of the sweep.

    Args:
        directory: of the sweep.
        algorithm: its name, `module:Name`, or its class.
        env: the environment, if it is not given by name.
        make_evolution: makes what changes members while they train; members with fresh seeds train without.
        size: at most this many members in a wave; by default as many as fit into memory.
        progress: whether to show progress.
    """

    def __init__(
        self,
        directory: SweepDirectory,
        algorithm: Any,
        env: AnyEnvironment | None = None,
        make_evolution: Callable[[Plan], Evolution] | None = None,
        size: int | None = None,
        progress: bool = True,
    ) -> None:
        self.directory, self.algorithm, self.env = directory, algorithm, env
        self.make_evolution, self.size, self.progress = make_evolution, size, progress
        self.waves = directory.read_waves()
        self.compile_seconds = 0.0
        """Time spent compiling, in all waves."""
        self._bases: dict[Any, Plan] = {}
        self._known: dict[tuple[int, bool], Any] = {}

    def train(self, members: Sequence[Member]) -> None:
        """Train members, unless they are trained already."""
        known = {member.number for wave in self.waves for member in wave.members}
        new = [member for member in members if member.number not in known]
        if new:
            for group in self._groups(new):
                self._append(group)
            self.directory.write_waves(self.waves)
        wanted = {member.number for member in members}
        index = 0
        while index < len(self.waves):
            if wanted & {member.number for member in self.waves[index].members} and not self._is_finished(index):
                try:
                    self._train(self.waves[index])
                except TooLarge as error:
                    self._split(index, str(error))
                    continue
            index += 1

    def _groups(self, members: Iterable[Member]) -> list[list[Member]]:
        """Members by the program they need, in the order in which programs first appear."""
        found: dict[Any, list[Member]] = {}
        for member in members:
            found.setdefault(self._group(member), []).append(member)
        return list(found.values())

    def _group(self, member: Member) -> Any:
        """What members of one wave have in common; that of a configuration is the same for all its seeds."""
        key = member.configuration, member.fresh
        if key not in self._known:
            self._known[key] = Configured.of(self.algorithm, member.settings).group
        return self._known[key]

    def _append(self, members: list[Member]) -> None:
        """Plan waves of one group, of the same size, so that they share a compiled program."""
        count = -(-len(members) // (self.size or len(members)))
        size = -(-len(members) // count)
        group = self._group(members[0])
        sizes = [wave.size for wave in self.waves if self._group(wave.members[0]) == group]
        filled = FILLED_ON_CPU if jax.default_backend() == "cpu" else FILLED
        if sizes and size < sizes[-1] <= filled * size and self.make_evolution is None:
            size = sizes[-1]  # some idle places take less time than compiling again
        for begin in range(0, len(members), size):
            self.waves.append(Wave(len(self.waves), tuple(members[begin : begin + size]), size))

    def _split(self, index: int, needs: str) -> None:
        """Train the members of this and the following waves of its group in waves half as large."""
        wave = self.waves[index]
        if wave.size == 1:
            raise InputError(f"One member of the sweep needs {needs}; reduce num_envs, horizon or the network's sizes.")
        group = self._group(wave.members[0])
        rest = [other for other in self.waves[index:] if self._group(other.members[0]) == group]
        others = [other for other in self.waves[index:] if other not in rest]
        self.waves = self.waves[:index]
        self.size = wave.size // 2 + wave.size % 2
        self._append([member for other in rest for member in other.members])
        for other in others:
            self.waves.append(Wave(len(self.waves), other.members, other.size))
        self.directory.write_waves(self.waves)

    def _is_finished(self, index: int) -> bool:
        return self.directory.is_finished(self.waves[index])

    def _train(self, wave: Wave) -> None:
        """Train a wave from its beginning, or from its latest checkpoint."""
        path = self.directory.wave_path(wave.number)
        settings = [self._settings(member) for member in wave.members]
        settings += [settings[-1]] * (wave.size - len(settings))  # so that all waves of a group have the same shapes
        group = self._group(wave.members[0])
        if group not in self._bases:
            self._bases = {group: make_plan(self.algorithm, settings[0], self.env)}
        labels = [member.label for member in wave.members]
        evolution = None if wave.members[0].fresh else self.make_evolution
        population = make_population(self.algorithm, settings, labels, self.env, evolution, base=self._bases[group])
        path.mkdir(parents=True, exist_ok=True)
        title = f"wave {wave.number + 1} of {len(self.waves)}  " if len(self.waves) > 1 else ""
        with RunDirectory(path) as directory:
            loop = population.loop(directory, partial(PopulationProgress, labels=labels, title=title))
            loop.run()
        self.compile_seconds += getattr(loop, "compile_seconds", 0.0)
        if loop.done < population.plan.updates:
            raise Stopped(loop.verdict.stop_reason)

    def _settings(self, member: Member) -> dict[str, Any]:
        return {"tensorboard": False} | member.settings | {"seed": member.seed, "progress": self.progress}


class Estimate(NamedTuple):
    """What a sweep needs, before anything is compiled."""

    groups: int
    """Number of programs."""
    bytes: int
    """The state of a member of the largest group."""


def estimate(definition: Definition, configurations: Sequence[Configuration], env: AnyEnvironment | None) -> Estimate:
    """Estimate what a sweep needs; the rollouts and the gradients come on top.

    One configuration of each program is assembled and traced, so what cannot be trained is an error here, before
    anything is.
    """
    first: dict[Any, Configuration] = {}
    for configuration in configurations:
        first.setdefault(definition.space.group(configuration.point), configuration)
    sizes = []
    for configuration in first.values():
        plan = make_plan(definition.algorithm, configuration.settings, env)
        refuse_host(plan)
        metric_names(plan.program, plan.state, members=2)  # traces an update: minibatches of unequal size fail there
        sizes.append(sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(plan.state)))
    return Estimate(len(first), max(sizes))
