"""One program on several devices: each has its share of the environments, and a copy of everything else.

A run is traced for one device with its share of the environments, under `jax.shard_map`. Each device steps its own
environments and cuts its own rollout into minibatches; only gradients and a few numbers cross between devices, where
the code calls `lehr.maths.across`. No other file knows about meshes. Checkpoints hold whole arrays, so a run goes on
with any number of devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lehr.envs import HostEnvironment
from lehr.envs.wrappers import ResetPool
from lehr.errors import InputError
from lehr.maths import across
from lehr.training.hosts import ALONE, Hosts
from lehr.training.leaves import placed
from lehr.training.parts import copies, gathered, spread_over_hosts
from lehr.training.program import Program, initial_state
from lehr.types import PyTree, TrainState, shared_between

WHOLE: Any = PartitionSpec()
"""Of an array that every device has a copy of."""


@dataclass(frozen=True)
class RunSharding:
    """How the state of a run is placed on devices. By default on one, as JAX does it."""

    mesh: Mesh | None = None
    specs: Any = None
    """A `TrainState` with the `PartitionSpec` of each leaf."""
    pool: int = 0
    """States in each device's `ResetPool`."""
    hosts: Hosts = field(default=ALONE, compare=False)
    """The processes that the devices belong to."""

    @property
    def devices(self) -> int:
        """The number of devices."""
        return 1 if self.mesh is None else self.mesh.size

    def spread(self, function: Callable[..., Any], returns_state: bool = True) -> Callable[..., Any]:
        """Return a function of whole arrays that runs the given one on each device's share of them.

        Args:
            function: of a state and at most one array that is the same on all devices; it returns a state and an array
                that is the same on all devices, or only the latter.
            returns_state: whether it returns a state.
        """
        if self.mesh is None:
            return function

        def call(state: TrainState, *others: Any) -> Any:
            inputs, output = (self.specs, *([WHOLE] * len(others))), (self.specs, WHOLE) if returns_state else WHOLE
            spread = jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=output, check_vma=False)
            return spread(state, *others)

        return call

    def place(self, state: TrainState) -> TrainState:
        """Return the state of a run, however it is placed, on these devices."""
        if self.mesh is None:
            return state
        if isinstance(pool := state.actor.resets, ResetPool):
            state = state._replace(actor=state.actor._replace(resets=pool.refilled(self.pool, self.devices)))
        shardings = self._shardings
        return jax.device_put(state, shardings) if self.hosts.count == 1 else jax.tree.map(placed, state, shardings)

    def with_memory(self, program: Program, state: TrainState) -> TrainState:
        """Return the initial state of a run with its `memory`, each device's share made there if it has only shapes."""
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state.memories)):
            return state

        def make(*given: Any) -> tuple[PyTree, PyTree]:
            return initial_state(program, *given).memories

        if self.mesh is None:
            return state.with_memories(*jax.jit(make)(*_given(state)))
        copies = jax.tree.map(partial(placed, sharding=NamedSharding(self.mesh, WHOLE)), _given(state))
        with shared_between(self.devices):
            return state.with_memories(*jax.jit(make, out_shardings=self._shardings.memories)(*copies))

    @property
    def _shardings(self) -> Any:
        assert self.mesh is not None
        return jax.tree.map(partial(NamedSharding, self.mesh), self.specs)

    def differing(self, state: TrainState) -> list[str]:
        """Return the paths of the arrays that all devices should have a copy of, but whose copies differ.

        They do if what an algorithm of the user's own computes from a device's rollout goes into its state, and not
        through `lehr.maths.across`. From then on, each device would train another agent.
        """
        if self.mesh is None:
            return []
        self.hosts.order("compare")
        found = [copies(state), *(answer["copies"] for answer in self.hosts.answers())]
        return [path for path in found[0] if len(set().union(*(one[path] for one in found))) > 1]

    def whole(self, state: TrainState, without: Callable[[str], Any] = lambda path: False) -> TrainState:
        """Return the state with all arrays whole in this process, which leads; except those at some paths."""
        if self.hosts.count == 1:
            return state
        paths = [path for path in spread_over_hosts(state) if not without(path)]
        self.hosts.order("send", paths=paths)

        def gather(path: Any, leaf: Any) -> Any:
            return gathered(leaf, self.hosts.answers()) if jax.tree_util.keystr(path) in paths else leaf

        return jax.tree_util.tree_map_with_path(gather, state)


ONE_DEVICE = RunSharding()


def share(
    program: Program,
    state: TrainState,
    wanted: int | Literal["all"],
    trace: Callable[[RunSharding], object],
    hosts: Hosts = ALONE,
) -> tuple[RunSharding, tuple[str, ...]]:
    """Choose the devices of a run; return how its state is placed on them, and what to tell the user.

    Args:
        program: of the run.
        state: its initial state.
        wanted: a number of devices, or all; then fewer are used if they cannot share the run equally.
        trace: traces an update; an `InputError` says what the devices cannot share equally.
        hosts: the processes of the run, each of which gives equally many devices.
    """
    found = available(wanted, hosts)
    most = len(found)
    if isinstance(program.env, HostEnvironment):
        if wanted not in ("all", 1):
            raise InputError(
                f"devices is {wanted}, but {program.env.name} runs on the host, and a run with host environments "
                "learns on one device; drop devices."
            )
        if hosts.count > 1:
            raise InputError(
                f"This run has {hosts.count} processes, but {program.env.name} runs on the host, and a run with host "
                "environments learns on one device; drop distributed, or use actors."
            )
        most = 1
    for number in range(most, max(1, hosts.count - 1), -hosts.count):
        try:
            sharding = replace(_over(_first_of_each(found, number, hosts), program, state), hosts=hosts)
            trace(sharding)
        except InputError as error:
            if wanted == "all" and number > hosts.count:
                continue
            raise InputError(f"With devices={number}, each device has a share of the run: {error}") from error
        return sharding, _fewer(number, most)
    return ONE_DEVICE, _fewer(1, most)


def _fewer(used: int, most: int) -> tuple[str, ...]:
    """What to tell the user if some devices stay idle."""
    if used == most:
        return ()
    return (f"This run uses {used} of {most} devices: more cannot share its environments and batches equally.",)


def _over(devices: Sequence[Any], program: Program, state: TrainState) -> RunSharding:
    """Split a run over devices; an error says if they cannot share its state equally."""
    number, whole = len(devices), jax.eval_shape(lambda state: state, state)

    def own(*given: Any) -> TrainState:
        return initial_state(program, *given)

    each = jax.eval_shape(jax.vmap(own, in_axes=None, axis_name=across.AXIS, axis_size=number), *_given(state))
    specs = jax.tree.map(lambda leaf, own: _spec(leaf.shape, own.shape[1:], number), whole, each)
    pool = 0
    if isinstance(resets := each.actor.resets, ResetPool):
        starts = jax.tree.map(lambda leaf: PartitionSpec(across.AXIS), resets.starts)
        specs = specs._replace(actor=specs.actor._replace(resets=ResetPool(starts, WHOLE, WHOLE)))
        pool = jax.tree.leaves(resets.starts)[0].shape[1]
    return RunSharding(Mesh(np.array(devices), (across.AXIS,)), specs, pool)


def _given(state: TrainState) -> tuple[Any, ...]:
    """What `initial_state` makes the rest of a state from."""
    return state.coefficients, state.learner.params, state.key, state.reward_model.data


def _spec(whole: tuple[int, ...], own: tuple[int, ...], devices: int) -> PartitionSpec:
    """The axis along which an array is split, from the shape of the whole and that of each device.

    >>> tuple(_spec((3, 16, 5), (3, 4, 5), devices=4))
    (None, 'devices', None)
    """
    return PartitionSpec(*(across.AXIS if size != part else None for size, part in zip(whole, own, strict=True)))


def first_copy(tree: PyTree) -> PyTree:
    """Return what all devices have a copy of on the first of them; other leaves stay as they are."""

    def one(leaf: Any) -> Any:
        is_copied = isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1 and leaf.is_fully_replicated
        return leaf.addressable_data(0) if is_copied else leaf

    return jax.tree.map(one, tree)


def _first_of_each(devices: Sequence[Any], number: int, hosts: Hosts) -> list[Any]:
    """Choose a number of the devices, equally many of each process, in the order of processes."""
    each = len(devices) // hosts.count
    return [device for place, device in enumerate(devices) if place % each < number // hosts.count]


def available(wanted: int | Literal["all"], hosts: Hosts = ALONE) -> list[Any]:
    """Return the devices that a run may use, equally many of each process: a number of them, or all."""
    each = hosts.devices()
    least = min(map(len, each))
    found = [device for devices in each for device in devices[:least]]
    if wanted == "all":
        return found
    if wanted % hosts.count:
        raise InputError(
            f"devices is {wanted}, which {hosts.count} processes cannot share equally; choose a multiple of "
            f"{hosts.count}, or all."
        )
    if not 1 <= wanted <= len(found):
        are, allowed = ("is 1", "1") if len(found) == 1 else (f"are {len(found)}", f"a number from 1 to {len(found)}")
        raise InputError(f"devices is {wanted}, but there {are}; give {allowed}, or all.")
    return _first_of_each(found, wanted, hosts)


# Populations ---------------------------------------------------------------------------------------------------------

MEMBERS = "members"
"""The name of the mesh axis that the members of a population are split over."""


@dataclass(frozen=True)
class MemberSharding:
    """How the members of a population are placed on devices, which need not know of each other: a hashable value."""

    mesh: Mesh | None = None

    @classmethod
    def over(cls, devices: Sequence[Any], members: int) -> "MemberSharding":
        """Share members equally between as many of the devices as can."""
        number = max(count for count in range(1, len(devices) + 1) if members % count == 0)
        return cls() if number == 1 else cls(Mesh(np.array(devices[:number]), (MEMBERS,)))

    @property
    def devices(self) -> int:
        """The number of devices."""
        return 1 if self.mesh is None else self.mesh.size

    def spread(self, function: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        """Return a function that runs the given one on each device's members.

        Args:
            function: of arrays with a member axis, and of others that are the same on all devices.
            inputs: for each argument the place of its member axis, or `None`; a prefix of its pytree.
            outputs: the same for its results.
        """
        if self.mesh is None:
            return function
        specs = (jax.tree.map(_member_axis, places, is_leaf=lambda x: x is None) for places in (inputs, outputs))
        return jax.shard_map(function, mesh=self.mesh, in_specs=next(specs), out_specs=next(specs), check_vma=False)

    def place(self, tree: PyTree, axis: int | None) -> PyTree:
        """Split arrays along their member axis, or copy them to all devices if they have none."""
        return tree if self.mesh is None else jax.device_put(tree, self.of(axis))

    def of(self, axis: int | None) -> NamedSharding | None:
        """The sharding of an array with its member axis at this place; `None` on one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, _member_axis(axis))


MEMBERS_ON_ONE_DEVICE = MemberSharding()


def _member_axis(axis: int | None) -> PartitionSpec:
    return WHOLE if axis is None else PartitionSpec(*[None] * axis, MEMBERS)


# The drop-in for Brax, which XLA partitions by itself ----------------------------------------------------------------


@dataclass(frozen=True)
class EnvironmentSharding:
    """How the arrays of a run are placed on the devices.

    An array with one row per environment, `[num_envs, ...]`, is split along its first axis; any other array is
    replicated. On one device nothing is placed: both shardings are `None`, which `jit` reads as its default.
    """

    num_envs: int
    split: NamedSharding | None = None
    """For arrays with one row per environment."""
    replicated: NamedSharding | None = None
    """For arrays that every device has a copy of."""

    @classmethod
    def over(
        cls, devices: Sequence[Any], num_envs: int, setting: str = "the number of devices"
    ) -> "EnvironmentSharding":
        """Split the environments equally over some devices.

        Args:
            devices: of this process.
            num_envs: the number of environments.
            setting: what the user would change to get fewer devices, for the error message.

        >>> EnvironmentSharding.over(["gpu:0", "gpu:1"], num_envs=3)
        Traceback (most recent call last):
        lehr.errors.InputError: num_envs is 3, which 2 devices cannot share equally; choose a multiple of 2, or lower \
the number of devices.
        >>> EnvironmentSharding.over(jax.devices()[:1], num_envs=3)
        EnvironmentSharding(num_envs=3, split=None, replicated=None)
        """
        if len(devices) == 1:
            return cls(num_envs)
        if num_envs % len(devices):
            raise InputError(
                f"num_envs is {num_envs}, which {len(devices)} devices cannot share equally; choose a multiple of "
                f"{len(devices)}, or lower {setting}."
            )
        mesh = jax.sharding.Mesh(np.array(devices), (across.AXIS,))
        return cls(num_envs, NamedSharding(mesh, PartitionSpec(across.AXIS)), NamedSharding(mesh, PartitionSpec()))

    def of(self, tree: PyTree) -> Any:
        """The sharding of every leaf: split if it has a row per environment, else replicated; `None` on one device."""
        if self.replicated is None:
            return None
        return jax.tree.map(lambda x: self.split if x.shape[:1] == (self.num_envs,) else self.replicated, tree)

    def replicate(self, tree: PyTree) -> PyTree:
        """Copy a tree to all devices."""
        return tree if self.replicated is None else jax.device_put(tree, self.replicated)
