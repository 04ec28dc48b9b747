"""Gymnasium's environments, `gym:NAME`, through its vector API.

By default Lehr resets the environments, with seeds derived from the run's seed, so that a resumed run can restore them
by replaying the current episodes, whatever language they are written in. Vector environments that reset themselves, in
the step that ends an episode or in the next one, work too, but start new episodes when a run is resumed.
"""

import copy
import functools
import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lehr import plugins, spaces
from lehr.envs.adapters import GYM_OPTIONS, makes_environments, split_options
from lehr.envs.host.base import HostBatch, HostEnvironment, Journal, check_size, says_it_renders
from lehr.envs.host.gym_batches import Seeded, SelfResetting, Singles
from lehr.envs.host.gym_spaces import action_dtype, actions_of, as_32_bit, first_action
from lehr.errors import InputError, closest
from lehr.plugins import require
from lehr.types import PyTree

VECTORIZATIONS = ("sync", "async", "vector")
AUTORESETS = ("seeded", "same_step", "next_step")

LONGEST_LOG = 10_000
"""Number of actions stored per episode if there is no time limit; a longer episode cannot be restored."""


def names() -> list[str]:
    """Return the names of the environments registered with Gymnasium."""
    return sorted(_gymnasium().registry)


def make(name: str, vectorization: str = "sync", autoreset: str = "seeded", **parameters: Any) -> "Gym":
    """Create a Gymnasium environment.

    Args:
        name: the environment ID that `gymnasium.make` takes, including `module:Name`.
        vectorization: `sync` steps the environments one after the other, `async` each in its own process, `vector` uses
            the environment's own vectorised version.
        autoreset: `seeded`, or `same_step` or `next_step` for Gymnasium's own modes, which cannot be resumed exactly.
        parameters: arguments of the environment.
    """
    _check_options(vectorization, autoreset)
    settings = tuple((key, _fixed(value)) for key, value in sorted(parameters.items()))
    _single(name, settings, 1, 1)  # raises an error now if it cannot be created
    if vectorization == "vector" and _spec(name).vector_entry_point is None:
        raise InputError(f"gym:{name} has no vectorised version: choose vectorization=sync or async.")
    return Gym(name, vectorization, autoreset, settings)


def from_factory(
    factory: Callable[..., Any], name: str, parameters: dict[str, Any], made: Any = None
) -> "Gym | HostEnvironment":
    """Return the environments that a class or function creates.

    Args:
        factory: the class or function.
        name: what to call it.
        parameters: those of the factory, and options of `make`.
        made: one of its environments, which is closed. If Gymnasium would create an equal one from its ID, and the
            factory cannot be named in a file, then the ID is used.
    """
    from lehr.envs.host import gym_sources

    options, own = split_options(factory, parameters)
    if made is not None:
        named = plugins.is_reference(plugins.text_of(factory)) and makes_environments(factory)
        by_id = gym_sources.parameters_of(made.spec)
        if by_id is not None and not named:
            found = make(_id(made.spec), **by_id, **options)
            if gym_sources.is_same(found.inspected, made):
                made.close()
                return found
        made.close()
    return _from_source(factory, name, own, **options)


def _from_source(
    source: Callable[..., Any],
    name: str,
    parameters: dict[str, Any],
    vectorization: str = "sync",
    autoreset: str = "seeded",
) -> "Gym":
    _check_options(vectorization, autoreset)
    if vectorization == "vector":
        raise InputError(
            f"vectorization is 'vector', but {name} creates single environments: choose sync or async, or give a "
            "gymnasium.vector.VectorEnv."
        )
    if not all(isinstance(value, Hashable) for value in parameters.values()):
        source, parameters = functools.partial(source, **parameters), {}
    made = Gym(name, vectorization, autoreset, tuple(sorted(parameters.items())), source=source)
    _ = made.inspected  # raises an error now if it cannot be created
    return made


def _check_options(vectorization: str, autoreset: str) -> None:
    for what, given, known in (
        ("vectorization", vectorization, VECTORIZATIONS),
        ("autoreset", autoreset, AUTORESETS),
    ):
        if given not in known:
            raise InputError(f"{what} is {given!r}; {closest(str(given), known)}")


def _spec(name: str) -> Any:
    """The spec of an ID, which may have the module in front that registers it."""
    return _gymnasium().spec(name.rpartition(":")[2])


def _id(spec: Any) -> str:
    """The ID of a spec, with the module that registers it if another process needs that."""
    from lehr.envs.host import gym_sources

    return gym_sources.importable_id(spec) or spec.id


def _fixed(value: Any) -> Any:
    """Convert lists to tuples, which are hashable; dicts are refused."""
    if isinstance(value, dict):
        raise InputError(
            f"An environment parameter is the dict {value}, which is not supported: register a variant in Gymnasium "
            "that sets it."
        )
    return tuple(_fixed(item) for item in value) if isinstance(value, list | tuple) else value


def adapt(env: Any, **parameters: Any) -> HostEnvironment:
    """Adapt an environment, or use a vector environment.

    It is created again from its ID, as often as needed, if that gives an equal one; otherwise it is copied.
    """
    from lehr.envs.host import gym_sources

    gymnasium = _gymnasium()
    if isinstance(env, gymnasium.vector.VectorEnv):
        given = GivenVector(env)
        others = [name for name, value in parameters.items() if given.saved_options.get(name) != value]
        if others:
            raise InputError(
                f"Got an existing vector environment together with the parameters {', '.join(others)}: set them when "
                "creating it."
            )
        return given
    source = gym_sources.source_of(env)
    found = gym_sources.parameters_of(env.spec)
    if found is not None:
        made = make(_id(env.spec), **{**found, **parameters})
        copies = isinstance(source, gym_sources.Copies)
        if not copies or gym_sources.is_same(make(_id(env.spec), **found).inspected, source()):
            return made
    strange = [name for name in parameters if name not in GYM_OPTIONS]
    if strange:
        raise InputError(
            f"Got an environment object together with the parameters {', '.join(strange)}: pass them to its class, or "
            "give a class or function instead."
        )
    return _from_source(source, type(env.unwrapped).__name__, {}, **parameters)


@dataclass(frozen=True)
class Gym(HostEnvironment):
    """A Gymnasium environment, created by name, or by a class or function."""

    id: str
    """Its name in Gymnasium; if it has a `source`, only for messages."""
    vectorization: str = "sync"
    autoreset: str = "seeded"
    parameters: tuple[tuple[str, Any], ...] = ()
    action_repeat: int = 1
    frame_stack: int = 1
    source: Callable[..., Any] | None = None
    """Creates one environment; `None` if Gymnasium does, by name."""

    @property
    def name(self) -> str:
        """`gym:` and the Gymnasium ID, or the name of what creates it."""
        return f"gym:{self.id}" if self.source is None else self.id

    @property
    def reference(self) -> tuple[str, dict[str, Any]] | None:
        """Its name and parameters; `None` if Gymnasium does not create it."""
        if self.source is not None:
            return None
        options = {"vectorization": self.vectorization, "autoreset": self.autoreset}
        changed = {key: value for key, value in options.items() if value != getattr(Gym, key)}
        return self.name, {**_lists(dict(self.parameters)), **changed}

    @property
    def is_found_elsewhere(self) -> bool:
        """Whether another process can create it from its reference."""
        from lehr.envs.host import gym_sources

        return self.reference is not None and gym_sources.importable_id(_spec(self.id)) is not None

    @property
    def fixed_size(self) -> int | None:
        """1 if it is an object that can be neither copied nor created again."""
        from lehr.envs.host import gym_sources

        return 1 if isinstance(self.source, gym_sources.OnlyOne) else None

    def for_evaluation(self) -> HostEnvironment | None:
        """Return itself, unless there is only one environment."""
        return self if self.fixed_size is None else None

    def limited(self, max_steps: int) -> "Gym":
        """Return the environment with a time limit."""
        from lehr.envs.host import gym_sources

        if self.source is None:
            limit = {**dict(self.parameters), "max_episode_steps": max_steps}
            return replace(self, parameters=tuple(sorted(limit.items())))
        return replace(self, source=gym_sources.Limited(self.source, max_steps))

    @property
    def env_steps_per_step(self) -> int:
        """The number of times each action is repeated."""
        return self.action_repeat

    @property
    def renders(self) -> bool:
        """Whether the environment lists pixels among what it renders."""
        return says_it_renders(self.inspected)

    @functools.cached_property
    def masks(self) -> bool:
        """Whether some steps are only resets."""
        if self.vectorization == "vector":
            batch = self.start(1)
            batch.close()
            return isinstance(batch, SelfResetting) and batch.late
        return self.autoreset == "next_step"

    @functools.cached_property
    def observation_space(self) -> spaces.Space:
        """Gymnasium's space, with 64-bit numbers in 32 bits."""
        return as_32_bit(self.inspected.observation_space)

    @functools.cached_property
    def action_space(self) -> spaces.Space:
        """Gymnasium's action space."""
        return actions_of(self.inspected.action_space)

    @property
    def inspected(self) -> Any:
        """One of the environments, to inspect it; it is not stepped."""
        from lehr.envs.host import info_masks

        found = _single(self.source or self.id, self.parameters, self.action_repeat, self.frame_stack)
        if self.vectorization != "vector":
            return found
        # A vectorised version may give masks where single environments give none, or the other way round.
        alone = found.env if hasattr(found, "mask_shape") else found
        return alone if self._vector_mask_shape is None else info_masks.MaskFromInfo(alone, self._vector_mask_shape)

    @functools.cached_property
    def _vector_mask_shape(self) -> tuple[int, ...] | None:
        """The shape of a mask in the `info` of the vectorised version."""
        from lehr.envs.host import info_masks

        made = self._vectorised(1, dict(self.parameters))
        shape = info_masks.shape_in_vector(made)
        made.close()
        return shape

    def _vectorised(self, num_envs: int, parameters: dict[str, Any]) -> Any:
        mode = "vector_entry_point"
        return _gymnasium().make_vec(self.id, num_envs=num_envs, vectorization_mode=mode, **parameters)

    def with_wrappers(self, action_repeat: int, frame_stack: int) -> "Gym":
        """Return the environment with repeated actions, and observations stacked along their last axis."""
        if self.vectorization == "vector":
            raise InputError(
                f"{self.name} does not support action_repeat or frame_stack with vectorization=vector: use sync or "
                "async."
            )
        wrapped = replace(self, action_repeat=action_repeat, frame_stack=frame_stack)
        try:
            _ = wrapped.inspected
        except ValueError as error:
            raise InputError(f"{self.name} cannot be wrapped: {error}.") from None
        return wrapped

    def start(self, num_envs: int, render: bool = False) -> HostBatch:
        """Create the environments."""
        parameters = dict(self.parameters) | (self._render_mode if render else {})
        if self.vectorization == "vector":
            return SelfResetting(self._vectorised(num_envs, parameters), mask_shape=self._vector_mask_shape)
        group = self._group(num_envs, parameters)
        dtype = action_dtype(self.inspected.action_space)
        if self.autoreset == "seeded":
            blank = self.initial_state(np.zeros(num_envs, np.uint32))
            return Seeded(group, dtype, blank, first_action(self.action_space))
        return Singles(group, dtype, num_envs, late=self.masks)

    @property
    def _render_mode(self) -> dict[str, str]:
        """The parameter that lets environments be drawn, if their source takes it."""
        from lehr.envs.host import gym_sources

        if self.source is None or gym_sources.takes(self.source, "render_mode"):
            return {"render_mode": "rgb_array"}
        if self.inspected.render_mode != "rgb_array":
            raise InputError(
                f"{self.name} cannot be drawn: create it with render_mode='rgb_array', or let its class or function "
                "take a parameter render_mode."
            )
        return {}

    def _group(self, num_envs: int, parameters: dict[str, Any]) -> Any:
        """Create the environments, in this process or in processes of their own."""
        from lehr.envs.host import group

        mask_shape = getattr(self.inspected, "mask_shape", None)
        source = self.source or self.id
        settings = source, parameters, self.action_repeat, self.frame_stack, os.getpid(), self.autoreset, mask_shape
        if self.vectorization == "sync":
            return group.Local([_one_of_many(*settings) for _ in range(num_envs)])
        functions = [functools.partial(_one_of_many, *settings)] * num_envs
        return group.Workers(self.name, functions, self.inspected.observation_space, self.step_timeout)

    def initial_state(self, seeds: np.ndarray) -> PyTree:
        """Return the seeds and room for the actions of an episode."""
        if self.autoreset != "seeded" or self.vectorization == "vector":
            return ()
        limit = -(-(_time_limit(self.inspected) or LONGEST_LOG) // self.action_repeat)
        return Journal.blank(seeds, self.action_space, limit)


@dataclass(frozen=True, eq=False)
class GivenVector(HostEnvironment):
    """A vector environment that the user created."""

    env: Any

    @property
    def name(self) -> str:
        """The Gymnasium ID, or the name of its class."""
        spec = getattr(self.env, "spec", None)
        return type(self.env).__name__ if spec is None else f"gym:{spec.id}"

    @property
    def reference(self) -> tuple[str, dict[str, Any]] | None:
        """The name and parameters of equal environments, if Gymnasium has created these by name."""
        from lehr.envs.host import gym_sources

        spec = getattr(self.env, "spec", None)
        if spec is None or self.env.unwrapped is not self.env or {"wrappers", "vector_kwargs"} & set(spec.kwargs):
            return None
        kwargs = {key: value for key, value in spec.kwargs.items() if key not in ("num_envs", "vectorization_mode")}
        mode = spec.kwargs.get("vectorization_mode")
        single = copy.copy(spec)
        single.kwargs = kwargs
        found = gym_sources.parameters_of(single)
        if found is None or mode not in ("sync", "async", "vector_entry_point"):
            return None
        if mode == "vector_entry_point":
            return f"gym:{_id(spec)}", {**found, "vectorization": "vector"}
        return f"gym:{_id(spec)}", {**found, "vectorization": mode, **self.saved_options}

    @property
    def is_found_elsewhere(self) -> bool:
        """Whether another process can create equal environments from their reference."""
        from lehr.envs.host import gym_sources

        return self.reference is not None and gym_sources.importable_id(self.env.spec) is not None

    @property
    def saved_options(self) -> dict[str, Any]:
        """How it resets: environments that reset in the same way have no state in a checkpoint either."""
        return {"autoreset": "next_step" if self.masks else "same_step"}

    def for_evaluation(self) -> HostEnvironment | None:
        """Return environments like these that can be created anew; `None` if that is not known."""
        if self.reference is not None:
            name, parameters = self.reference
            return make(name.removeprefix("gym:"), **parameters)
        functions = getattr(self.env, "env_fns", None)
        if isinstance(functions, list | tuple) and functions:  # a vector of Gymnasium's own, without wrappers
            return _from_source(functions[0], self.name, {})
        return None

    @property
    def masks(self) -> bool:
        """Whether some steps are only resets."""
        return SelfResetting(self.env).late

    @functools.cached_property
    def observation_space(self) -> spaces.Space:
        """Gymnasium's space, with 64-bit numbers in 32 bits."""
        from lehr.envs.host import info_masks

        space = self.env.single_observation_space
        return as_32_bit(space if self._mask_shape is None else info_masks.masked_space(space, self._mask_shape))

    @functools.cached_property
    def _mask_shape(self) -> tuple[int, ...] | None:
        """The shape of a mask in their `info`, for which they are reset once."""
        from lehr.envs.host import info_masks

        return info_masks.shape_in_vector(self.env)

    @functools.cached_property
    def action_space(self) -> spaces.Space:
        """Gymnasium's action space."""
        return actions_of(self.env.single_action_space)

    @property
    def fixed_size(self) -> int:
        """The number of environments in the vector environment."""
        return self.env.num_envs

    def start(self, num_envs: int, render: bool = False) -> HostBatch:
        """Use the existing environments; closing them is left to the user."""
        check_size(self, num_envs)
        return SelfResetting(self.env, stays_open=True, mask_shape=self._mask_shape)


def _gymnasium() -> Any:
    return require("gymnasium", extra="gym")


def _lists(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters as a file holds them."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in parameters.items()}


def _time_limit(env: Any) -> int | None:
    """The maximum number of steps of an episode."""
    if env.spec is not None and env.spec.max_episode_steps is not None:
        return env.spec.max_episode_steps
    return env.get_wrapper_attr("_max_episode_steps") if env.has_wrapper_attr("_max_episode_steps") else None


@functools.lru_cache(maxsize=8)
def _single(name: Any, parameters: tuple[tuple[str, Any], ...], action_repeat: int, frame_stack: int) -> Any:
    """Create a single environment, by its name or by a function, to inspect its spaces."""
    gymnasium = _gymnasium()
    from lehr.envs.host import info_masks, worker

    try:
        made = worker.make_env(name, dict(parameters), action_repeat, frame_stack, os.getpid())
        mask_shape = info_masks.shape_in_reset(made)
        return made if mask_shape is None else info_masks.MaskFromInfo(made, mask_shape)
    except gymnasium.error.NameNotFound:
        raise InputError(f"Gymnasium has no environment {name!r}; {closest(name, names(), 'gym:')}") from None
    except gymnasium.error.Error as error:
        raise InputError(f"Gymnasium cannot create {name!r}: {str(error).splitlines()[0]}") from None
    except TypeError as error:
        if not isinstance(name, str):
            raise
        raise InputError(f"gym:{name} cannot be created with these parameters: {error}.") from None
    except ImportError as error:
        raise InputError(f"gym:{name} needs a package that is not installed: {error}.") from None


def _one_of_many(
    source: Any,
    parameters: dict[str, Any],
    action_repeat: int,
    frame_stack: int,
    trainer: int,
    autoreset: str,
    mask_shape: tuple[int, ...] | None,
) -> Any:
    """Create one environment of a batch, in this process or in another."""
    from lehr.envs.host import info_masks, worker

    made = worker.make_env(source, parameters, action_repeat, frame_stack, trainer)
    return worker.Single(made if mask_shape is None else info_masks.MaskFromInfo(made, mask_shape), autoreset)
