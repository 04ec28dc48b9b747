"""How a run remembers its environment: by a name, and parameters, with which another process can create it."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from lehr import plugins
from lehr.envs import registry
from lehr.envs.adapters import adapted, is_factory, makes_environments, problem_with, split_options, unfolded
from lehr.envs.host.base import AnyEnvironment, HostEnvironment
from lehr.envs.wrappers import TimeLimit
from lehr.errors import InputError

Reference = tuple[str, dict[str, Any]]
"""A name that `lehr.envs.make` accepts, and parameters."""


class Adopted(NamedTuple):
    """The environment of a run, and what its files say about it."""

    env: AnyEnvironment
    name: str
    """A name that `lehr.envs.make` accepts, or a description in angle brackets."""
    parameters: dict[str, Any]
    is_found_elsewhere: bool
    """Whether another process can create the environment from its name and parameters."""


def adopt(env: Any, parameters: Mapping[str, Any]) -> Adopted:
    """Create or adapt the environment of a run, and name it.

    Args:
        env: a name, an environment, or a class or function that creates one.
        parameters: of the environment.
    """
    if isinstance(env, str):
        if plugins.is_placeholder(env):
            raise InputError(
                f"The environment was {env}, which cannot be created from the files of the run; pass it as env=, or on "
                "the command line as --env module:Class."
            )
        made = registry.make(env, **parameters)
        return Adopted(made, registry.full_name(env), dict(parameters), registry.is_found_elsewhere(env))
    if not is_factory(env):
        return _adopted_object(env, parameters)
    factory, whole = unfolded(env, parameters)
    if problem_with(factory, split_options(factory, whole)[1]) is not None:
        parameters = _others(registry.make(env), parameters)
        factory, whole = unfolded(env, parameters)
    made = registry.make(env, **parameters)
    names, text = list(registry.registered(factory)), plugins.text_of(factory)
    if plugins.is_plain(whole) and names:
        return Adopted(made, registry.full_name(names[0]), whole, registry.is_found_elsewhere(names[0]))
    if plugins.is_plain(whole) and plugins.is_reference(text) and makes_environments(factory):
        return Adopted(made, text, whole, True)
    shown = getattr(factory, "__name__", type(factory).__name__).strip("<>")
    return _named(made, _reference(made), f"<{shown}>", whole)


def _adopted_object(env: Any, parameters: Mapping[str, Any]) -> Adopted:
    """Adapt and name an object."""
    made = adapted(env, {})
    others = _others(made, parameters)
    if others:
        made = adapted(env, others)
    inner = getattr(env, "unwrapped", env)
    return _named(made, _reference(made), f"<{type(inner).__name__}>", dict(parameters))


def _others(made: AnyEnvironment, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are not those with which a run has saved this environment."""
    reference = _reference(made)
    own = {} if reference is None else reference[1]
    return {key: value for key, value in parameters.items() if key not in own or own[key] != value}


def _named(made: AnyEnvironment, reference: Reference | None, described: str, parameters: dict[str, Any]) -> Adopted:
    if reference is None:
        plain = {name: value for name, value in parameters.items() if plugins.is_plain(value)}
        options = made.saved_options if isinstance(made, HostEnvironment) else {}
        return Adopted(made, described, {**plain, **options}, False)
    if isinstance(made, HostEnvironment):
        return Adopted(made, *reference, made.is_found_elsewhere)
    return Adopted(made, *reference, registry.is_found_elsewhere(reference[0]))


def _reference(made: AnyEnvironment) -> Reference | None:
    return made.reference if isinstance(made, HostEnvironment) else _device_reference(made)


def _device_reference(env: Any) -> Reference | None:
    """Return a reference to an environment of Lehr's kind, a dataclass with plain fields: by its name or its class."""
    inner: Any
    inner, limit = (env.env, env.max_steps) if isinstance(env, TimeLimit) else (env, None)
    cls: Any = type(inner)
    if not dataclasses.is_dataclass(inner):
        return None
    given = {field.name: (getattr(inner, field.name, None), field.default) for field in dataclasses.fields(cls)}
    if not all(plugins.is_plain(value) for value, _ in given.values()):
        return None
    changed = {
        name: value for name, (value, default) in given.items() if default is dataclasses.MISSING or value != default
    }
    parameters = json.loads(json.dumps(changed))  # as a file holds them
    names = [name for name, max_steps in registry.registered(cls).items() if max_steps == limit]
    for name in [*names, plugins.text_of(cls)]:
        try:
            if registry.make(name, **parameters) == env:
                return registry.full_name(name), parameters
        except Exception:  # it is found by another name or not at all, or its class does not take its own fields
            continue
    return None
