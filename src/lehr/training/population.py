"""Populations: runs that differ in coefficients and seeds, trained together as one run with a member axis."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr import config, garbage
from lehr.envs import AnyEnvironment, HostEnvironment
from lehr.errors import InputError
from lehr.schedules.bundle import Coefficients
from lehr.schedules.bundle import population as stacked
from lehr.schedules.controllers import Controller
from lehr.training import background, checkpoint
from lehr.training.course import Course
from lehr.training.directory import RunDirectory
from lehr.training.loop import Kind, Loop, ProgressFunction
from lehr.training.plan import Plan, RunConfig, make_plan, settings_classes
from lehr.training.population_record import PopulationRecord, evaluation_of
from lehr.training.program import Program, builder, initial_state
from lehr.training.runners.population import (
    AXES,
    Candidates,
    Evolution,
    PopulationRunner,
    PopulationState,
    member_metric_names,
)
from lehr.training.sharding import MEMBERS_ON_ONE_DEVICE, MemberSharding, available
from lehr.types import Key, PyTree, TrainState, TreeShapes, derive

MOST_ROWS = 500
"""By default, a population logs at most this many rows for each member."""
SAVE_SECONDS = 60.0
"""By default, seconds between checkpoints."""
FEWEST_PHASES = 4
"""Schedules have at least so many phases in a population, so that one with longer ones can share its program."""
BLOCK = 512
"""Numbers that a block of threads of XLA's loops takes on a GPU."""


def default_window(plan: Plan) -> int:
    """Number of updates of a row: as the user says, or enough for at most `MOST_ROWS` rows."""
    every = plan.run.log_every
    return max(1, -(-plan.updates // MOST_ROWS)) if every is None else plan.every(every)


def _window(plan: Plan, evolution: Evolution | None) -> int:
    """Number of updates of a row of a population, in which an evolution may change members."""
    window = default_window(plan)
    return window if evolution is None else math.gcd(window, evolution.interval)


@dataclass(frozen=True)
class Population:
    """Everything about a population except its directory."""

    plan: Plan
    """That of the first member, but with the state of all members."""
    labels: tuple[str, ...]
    """The name of each member, for the user; members beyond these only fill the population up."""
    course: Course
    evolution: Evolution | None = None
    sharding: MemberSharding = MEMBERS_ON_ONE_DEVICE
    """How the members are placed on devices."""
    runner: PopulationRunner | None = field(default=None, repr=False, compare=False)
    """The runner, if it was made along with the population and compiles in the background."""

    @property
    def window(self) -> int:
        """Number of updates that a row of the metrics stands for."""
        return _window(self.plan, self.evolution)

    @property
    def expected_share(self) -> float:
        """The share of the updates of all members that will be made, as far as that is known before."""
        return self.course.expected_updates(len(self.labels)) / (len(self.labels) * self.plan.updates)

    def loop(
        self, directory: RunDirectory, make_progress: Callable[..., Any], progress_fn: ProgressFunction | None = None
    ) -> Loop:
        """The loop that trains the population; it goes on from the latest checkpoint, if there is one."""
        kind = Kind(
            make_runner=lambda plan, warn: (
                self.runner or PopulationRunner(plan.program, plan.state, self.window, self.evolution, self.sharding)
            ),
            make_record=partial(PopulationRecord, self.labels, self.window, self.course, self.sharding),
            make_progress=make_progress,
            restore=_restore,
            course=self.course,
            save_seconds=SAVE_SECONDS,
        )
        return Loop(self.plan, directory, progress_fn, bool(checkpoint.steps(directory.checkpoints)), kind)


@dataclass(frozen=True)
class Configured:
    """The parsed settings of a member."""

    configs: tuple[Any, ...]
    """Of the run, the algorithm, the network and the reward model."""
    coefficients: dict[str, Any]
    """Its bound coefficients by name."""
    group: tuple[Any, ...] = field(repr=False)
    """What it must have in common with the other members of a population."""

    @classmethod
    def of(cls, algorithm: Any, settings: Mapping[str, Any], classes: list[type] | None = None) -> "Configured":
        """Parse and check the settings of a member, whose classes may be known already."""
        return cls.checked(
            config.build(settings_classes(algorithm, settings) if classes is None else classes, settings)
        )

    @classmethod
    def checked(cls, configs: tuple[Any, ...]) -> "Configured":
        """Bind and check the coefficients of a member's configs."""
        run, own, _, reward = configs
        found = config.coefficients(own, run.total_steps) | config.coefficients(reward, run.total_steps)
        used = {name: one for name, one in found.items() if name not in own.unused}
        kinds = {name: _kind(one) for name, one in used.items()}
        fixed = [
            (entry.name, repr(getattr(one, entry.name)))
            for one in configs
            for entry in config.describe(type(one))
            if not entry.is_coefficient and entry.name != "seed"
        ]
        return cls(configs, used, (tuple(fixed), tuple(sorted(kinds.items()))))


def configured(algorithm: Any, members: Iterable[Mapping[str, Any]]) -> list[Configured]:
    """Parse the settings of members; those that differ in their seeds alone are parsed once."""
    known: dict[str, Configured] = {}
    found = []
    for settings in members:
        text = repr(sorted((name, value) for name, value in settings.items() if name != "seed"))
        if text not in known:
            known[text] = Configured.of(algorithm, settings)
        found.append(known[text])
    return found


def _kind(coefficient: Any) -> str:
    """What a coefficient must have in common in all members: schedules stack with schedules, controllers of a kind."""
    if isinstance(coefficient, Controller):
        return f"{type(coefficient).__name__} {getattr(coefficient, 'metric', '')}"
    return type(coefficient).__name__


@garbage.paused()
def make_population(
    algorithm: Any,
    members: Sequence[Mapping[str, Any]],
    labels: Sequence[str] | None = None,
    env: AnyEnvironment | None = None,
    make_evolution: Callable[[Plan], Evolution] | None = None,
    base: Plan | None = None,
    parsed: Sequence[Configured] | None = None,
    places: int | None = None,
    begins: bool = False,
) -> Population:
    """Assemble a population.

    Args:
        algorithm: its name, `module:Name`, or its class.
        members: the settings of each; they may differ in coefficients and seeds.
        labels: the name of each member, for messages; by default its number. Members beyond these only fill the
            population up, and are not shown.
        env: the environment, if it is not given by name.
        make_evolution: makes what changes members while they train, from the plan of a member.
        base: the plan of a run that may be a member, made here if omitted; populations with the same base share one
            compiled program.
        parsed: the parsed settings of each member, if they are known.
        places: train at most so many at once; the others wait until the evolution gives them a place. By default, all.
        begins: whether to compile its updates in the background while its state is made.
    """
    if not members:
        raise InputError("A population has 0 members; give at least one.")
    plan = make_plan(algorithm, members[0], env, abstract=True) if base is None else base
    refuse_host(plan)
    found = configured(algorithm, members) if parsed is None else parsed
    for number, one in enumerate(found):
        if one.group != found[0].group:
            raise InputError(
                f"Member {number} of the population differs from member 0 in {_difference(one, found[0])}; members may "
                "differ in coefficients and seeds, and everything else makes another population."
            )
    program, evolution = _program(plan), None if make_evolution is None else make_evolution(plan)
    coefficients, seeds = _stacked(plan, [one.coefficients for one in found]), [_seed(one) for one in members]
    size = len(members) if places is None else min(places, len(members))
    sharding = MemberSharding.over(available(plan.run.devices), size)
    runner: PopulationRunner | None = None
    if begins:
        shapes = _shapes(plan, coefficients, len(members), size, evolution)
        runner = PopulationRunner(program, shapes, _window(plan, evolution), evolution, sharding)
        runner.prepare(shapes)
    first = jax.tree.map(lambda leaf: leaf[:size], coefficients)
    whole = _begun(plan, program, first, np.array(seeds[:size], np.int64))
    if evolution is not None:
        candidates = Candidates(jax.tree.map(jnp.asarray, coefficients), _keys(seeds))
        whole = whole._replace(evolution=evolution.init(whole.members, candidates))
    whole = PopulationState._make(map(sharding.place, whole, AXES))
    course = Course(plan.updates) if evolution is None else evolution.course(len(members), whole.size)
    names = tuple(labels) if labels is not None else tuple(str(number) for number in range(len(members)))
    return Population(replace(plan, program=program, state=whole), names, course, evolution, sharding, runner)


def _program(plan: Plan) -> Program:
    """That of a member: one with too many non-finite updates is frozen."""
    return replace(plan.program, most_rejected=plan.run.max_rejected)


def _seed(settings: Mapping[str, Any]) -> int:
    given = settings.get("seed", 0)
    return given if type(given) is int else config.build([RunConfig], {"seed": given})[0].seed


def fast_multiple(plan: Plan) -> int:
    """The number of members, or a multiple of it, with which a population is fast on a GPU.

    XLA's loops over all parameters of all members are twice as fast on a GPU if these are whole blocks of its threads
    (H200, bench/population.py: 1,000 members take 5.4 ms for an update, 1,024 take 4.1 ms).

    Args:
        plan: of a member.
    """
    if jax.default_backend() != "gpu":
        return 1
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(plan.state.learner.params))
    return BLOCK // math.gcd(BLOCK, parameters)


def refuse_host(plan: Plan) -> None:
    """Refuse an environment that cannot be part of the compiled program of a population."""
    if isinstance(plan.program.env, HostEnvironment):
        raise InputError(
            f"{plan.run.env} runs on the host, but a population is one compiled program; train its members one by one "
            "with 'lehr train', or choose an environment that is compiled."
        )


def _difference(one: Configured, other: Configured) -> str:
    """The name of the first setting that differs."""
    for here, there in zip(one.group, other.group, strict=True):
        differs = set(here) ^ set(there)
        if differs:
            return sorted(name for name, _ in differs)[0]
    return "nothing"


def _keys(seeds: Sequence[int]) -> Key:
    """The key of each seed; those that fit into 32 bits, as nearly all do, are made at once."""
    if all(0 <= seed < 2**31 for seed in seeds):
        return jax.vmap(jax.random.key)(np.asarray(seeds, np.int32))
    return jnp.stack([jax.random.key(seed) for seed in seeds])


def _stacked(plan: Plan, coefficients: Sequence[Mapping[str, Any]]) -> Coefficients:
    """The coefficients of all members, with a number of phases that most populations have in common.

    The plan is that of a member. It adds the coefficients that its settings leave to the spaces of the environment.
    """
    chosen = config.coefficients(plan.settings, plan.run.total_steps)
    used = {name: one for name, one in chosen.items() if name not in plan.settings.unused}
    return stacked([{**used, **one} for one in coefficients], FEWEST_PHASES)


def prepare_population(plan: Plan, coefficients: Sequence[Mapping[str, Any]], size: int) -> None:
    """Begin to compile what a population needs that is not known yet, in the background.

    Args:
        plan: the base of the population.
        coefficients: those of some of its members, or of others like them.
        size: the number of its members.
    """
    program, known = _program(plan), list(coefficients[:size])
    together = _stacked(plan, known + known[-1:] * (size - len(known)))
    shapes = _shapes(plan, together, size, size)
    sharding = MemberSharding.over(available(plan.run.devices), size)
    PopulationRunner(program, shapes, _window(plan, None), None, sharding).prepare(shapes)
    _beginning(plan, program, together, np.zeros(size, np.int64))
    if plan.run.evaluate_episodes:
        evaluation_of(plan, shapes.members, sharding)()


def _begun(plan: Plan, program: Program, coefficients: Coefficients, seeds: np.ndarray) -> PopulationState:
    """Return a population before its first update, without an evolution; coefficients and seeds have a member axis."""
    return background.finished(_beginning(plan, program, coefficients, seeds))(coefficients, seeds, plan.loaded.data)


def _beginning(plan: Plan, program: Program, coefficients: Coefficients, seeds: np.ndarray) -> Future:
    """Compile what makes the state of a population of these shapes, in the background."""
    given = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, (coefficients, seeds, plan.loaded.data)))
    return _compiling_initial(program, plan.settings, plan.network, TreeShapes.of(given))


@background.remembered
def _compiling_initial(program: Program, settings: Any, network: Any, shapes: TreeShapes) -> Future:
    return background.start(_initial.lower(program, settings, network, *shapes.tree).compile)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _initial(
    program: Program, settings: Any, network: Any, coefficients: Coefficients, seeds: Any, data: PyTree
) -> PopulationState:
    """Return a population before its first update, without an evolution; coefficients and seeds have a member axis."""

    def init(member: tuple[Coefficients, Any]) -> TrainState:
        one, seed = member
        return initial_member(program, settings, network, one, jax.random.key(seed), data)

    members = (coefficients, seeds)
    if jax.default_backend() == "cpu":
        # One after the other: orthogonal weights of several members at once are batched QR factorisations, and two of
        # those at the same time can wait for each other's threads for ever.
        return PopulationState(jax.lax.map(init, members), jnp.uint32(0))
    return PopulationState(jax.vmap(init)(members), jnp.uint32(0))


def initial_member(
    program: Program, settings: Any, network: Any, coefficients: Coefficients, key: Key, data: PyTree
) -> TrainState:
    """Return the state of one member before its first update.

    Args:
        program: that of every member.
        settings: the algorithm's.
        network: the network architecture.
        coefficients: bound ones.
        key: the random seed as a key.
        data: that of the reward model.
    """
    build = builder(type(program.algorithm), program.env, settings, network)
    return initial_state(program, coefficients, build(derive(key, "network"))[1], key, data)


def population_shapes(plan: Plan, coefficients: Sequence[Mapping[str, Any]], evolution: Any = None) -> PopulationState:
    """The shapes of the state of a population with these coefficients, from the plan of one of its members."""
    count = len(coefficients)
    return _shapes(plan, _stacked(plan, coefficients), count, count, evolution)


def _shapes(
    plan: Plan, coefficients: Coefficients, count: int, size: int, evolution: Evolution | None = None
) -> PopulationState:
    """The shapes of the state of a population with so many places, from the stacked coefficients of `count` members."""

    def stacked(tree: PyTree, count: int) -> PyTree:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), tree)

    together = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, coefficients))
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), together)
    members = stacked(plan.state._replace(coefficients=one), size)
    candidates = Candidates(together, stacked(plan.state.key, count))
    changes = () if evolution is None else jax.eval_shape(evolution.init, members, candidates)
    return PopulationState(members, jax.eval_shape(lambda: jnp.uint32(0)), changes)


def trace_update(plan: Plan, coefficients: Sequence[Mapping[str, Any]], size: int, devices: Sequence[Any]) -> None:
    """Trace an update of a population as its runner will, which then need not do it again.

    Args:
        plan: that of one of its members.
        coefficients: those of some or all of them.
        size: the number of members.
        devices: those that may share the members.
    """
    shapes = _shapes(plan, _stacked(plan, coefficients), len(coefficients), size)
    member_metric_names(_program(plan), shapes.members, MemberSharding.over(devices, size))


def member_state(state: PopulationState, index: int) -> TrainState:
    """Return the state of one member, as that of a run of its own."""
    return jax.tree.map(lambda leaf: leaf[index], state.members)


def _restore(
    directory: RunDirectory, plan: Plan, report: Callable[[str], object]
) -> tuple[PopulationState, dict[str, Any]]:
    """Return the latest state of a population, and the metadata of its checkpoint."""
    saved, meta, _ = checkpoint.newest(directory.checkpoints, plan.state.saved, report)
    if meta.get("without_memory"):
        members = saved.members
        saved = saved._replace(
            members=members._replace(
                learner=jax.vmap(plan.program.algorithm.forget)(members.learner),
                reward_model=jax.vmap(plan.program.reward_model.forget)(members.reward_model),
            )
        )
    return saved.completed(plan.state), meta
