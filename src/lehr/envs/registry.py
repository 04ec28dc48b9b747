"""The registry of environments: `register`, `make` and `names`."""

import difflib
import importlib
import importlib.util
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from lehr import plugins
from lehr.envs.base import Environment
from lehr.envs.host.base import AnyEnvironment, HostEnvironment
from lehr.envs.wrappers import TimeLimit
from lehr.errors import InputError, quoted, shortened

Factory = TypeVar("Factory", bound=Callable[..., Environment])

ADAPTERS = {
    "brax": ("suites", "brax"),
    "craftax": ("suites", "craftax"),
    "envpool": ("host", "envpool"),  # before gym, because its environments are also Gymnasium vector environments
    "gym": ("host", "gymnasium"),
    "gymnax": ("suites", "gymnax"),
    "jaxdem": ("suites", "jaxdem"),
    "jumanji": ("suites", "jumanji"),
    "pettingzoo": ("host", "pettingzoo"),
    "playground": ("suites", "mujoco_playground"),
}
"""Prefixes of other ecosystems, as in `PREFIX:NAME`: the folder of the adapter, and the package it adapts."""


class _Entry(NamedTuple):
    factory: Callable[..., Environment]
    max_steps: int | None


GROUP = "lehr.environments"
"""The entry points under which an installed package offers environments."""

_registry: dict[str, _Entry] = {}
_MODULE_PREFIX = re.compile(r"[A-Za-z_][\w.]*:")


def register(name: str, max_steps: int | None = None) -> Callable[[Factory], Factory]:
    """Register a class, or a function that returns an environment, so that `make(name)` finds it. Use as a decorator.

    `max_steps` is the task's standard time limit, which `make` applies; `None` for tasks that always terminate.
    """
    if name in _registry:
        raise InputError(f"An environment named {name!r} is already registered: choose another name.")

    def add(factory: Factory) -> Factory:
        _registry[name] = _Entry(factory, max_steps)
        return factory

    return add


def names() -> list[str]:
    """Return the registered names, sorted; those that installed packages offer are not imported, so not among them."""
    return sorted(_registry)


def make(env: str | AnyEnvironment, **parameters: Any) -> AnyEnvironment:
    """Create an environment by name, with its standard time limit.

    `env` is a registered name (`"CartPole-v1"`), a name that an installed package offers as an entry point of the group
    `lehr.environments`, a prefixed name from another suite (`"brax:ant"`), the import path `"module:Class"` of a class
    or of a function annotated to return an environment, or an environment object. An object that follows Lehr's
    protocol is returned unchanged; one from another suite is adapted. The parameters are passed to the class or
    function.

    >>> make("MountainCar-v0", force=0.002)
    TimeLimit(env=MountainCar(goal_position=0.5, force=0.002), max_steps=200)
    """
    if not isinstance(env, str):
        return _given(env, parameters)
    prefix, colon, name = env.partition(":")
    if colon and prefix in ADAPTERS:
        return adapter(prefix).make(name, **parameters)
    if env not in _registry and env in (offered := plugins.offered(GROUP)):
        factory, max_steps = _load(env, offered[env])
    elif env in _registry:
        factory, max_steps = _registry[env]
    else:
        factory, max_steps = _import(env), None
    made = _given(_call(env, factory, parameters), {})
    if max_steps is None:
        return made
    if isinstance(made, HostEnvironment):
        raise InputError(
            f"{env} is registered with max_steps, but it is a host environment: set the time limit in its own suite."
        )
    return TimeLimit(made, max_steps)


def adapter(prefix: str) -> ModuleType:
    """Return the module that adapts an ecosystem's environments, with `make`, `adapt` and `names`."""
    folder, _ = ADAPTERS[prefix]
    return importlib.import_module(f"lehr.envs.{folder}.{prefix}")


def _given(env: Any, parameters: dict[str, Any]) -> AnyEnvironment:
    """Return an existing environment object, adapted if it comes from another suite."""
    parents = type(env).__mro__
    ours = isinstance(env, HostEnvironment) or Environment in parents
    packages = set() if ours else {parent.__module__.partition(".")[0] for parent in parents}
    for prefix, (_, package) in ADAPTERS.items():
        if package in packages:
            return adapter(prefix).adapt(env, **parameters)
    if not isinstance(env, HostEnvironment) and not _has_reset_and_step(env):
        raise InputError(
            f"{quoted(env, 200)} is not an environment: it must have the methods reset and step; see "
            "lehr.envs.check_env."
        )
    if parameters:
        raise InputError(
            f"Got an environment object together with the parameters {', '.join(parameters)}: pass them to its class, "
            "or give the environment by name."
        )
    return env


def own_code(env: str) -> str | None:
    """Return the module outside of Lehr and its suites that `make(env)` would import, or `None`.

    >>> own_code("brax:ant"), own_code("CartPole-v1"), own_code("my_package.tasks:Maze")
    (None, None, 'my_package.tasks')
    >>> own_code("gym:my_package:Maze-v0")
    'my_package'
    """
    prefix, colon, name = env.partition(":")
    if env in _registry or not colon or plugins.is_lehrs(prefix):
        return None
    if prefix not in ADAPTERS:
        return prefix
    if prefix == "pettingzoo":
        return None if _is_pettingzoos(name) else name
    module, colon, _ = name.partition(":")
    return module if colon else None


def own_code_in(parameters: Any) -> str | None:
    """Return the module that a string in an environment's parameters names, which some suites would import.

    >>> own_code_in({"env_id": "my_package:Maze-v0"}), own_code_in({"backend": "spring"})
    ('my_package', None)
    """
    return next((text.partition(":")[0] for text in _strings(parameters) if _MODULE_PREFIX.match(text)), None)


def _is_pettingzoos(name: str) -> bool:
    """Whether a module belongs to PettingZoo, judged by its files, without importing it."""
    suites = adapter("pettingzoo").SUITES
    places = [f"pettingzoo.{name}", *(name for suite in suites if name.partition(".")[0] == suite)]
    for place in places:
        root, *path = place.split(".")
        spec = importlib.util.find_spec(root)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if Path(folder, *path).with_suffix(".py").is_file():
                return True
    return False


def _strings(tree: Any) -> list[str]:
    """Return all strings in nested mappings and lists."""
    if isinstance(tree, Mapping):
        return [string for pair in tree.items() for part in pair for string in _strings(part)]
    if isinstance(tree, list | tuple):
        return [string for item in tree for string in _strings(item)]
    return [tree] if isinstance(tree, str) else []


def _import(name: str) -> Callable[..., Environment]:
    """Import `module:attribute`; anything that does not create environments is refused without calling it."""
    if ":" not in name:
        offered = sorted(plugins.offered(GROUP))
        known = {word.lower(): word for word in sorted([*_registry, *offered], key=len)}
        close = [word for word in known if word.startswith(name.lower())]
        close = close or difflib.get_close_matches(name.lower(), known, n=1)
        meant = f" (did you mean {known[close[0]]!r}?)" if close else ""
        raise InputError(
            f"There is no environment named {quoted(name)}{meant}: choose one of {', '.join([*names(), *offered])}, "
            f"one from another suite with its prefix ({', '.join(f'{prefix}:' for prefix in ADAPTERS)}), or your own "
            "as 'module:Class'."
        )
    return _checked(name, plugins.import_object(name, "environment"))


def _load(name: str, point: EntryPoint) -> _Entry:
    """Import what an installed package offers; if it registers itself under that name, its time limit is known too."""
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        package = point.dist.name if point.dist else point.module
        raise InputError(
            f"The environment {name!r} is offered by the package {package}, but {point.value!r} could not be imported "
            f"({error}); reinstall the package, or tell its authors."
        ) from error
    return _registry.get(name) or _Entry(_checked(name, found), None)


def _checked(name: str, found: Any) -> Callable[..., Environment]:
    """Return what was imported, unless it does not create environments."""
    if any(entry.factory is found for entry in _registry.values()) or _makes_environments(found):
        return found
    raise InputError(
        f"{name!r} is {shortened(repr(found))}, which does not create environments; give a class with the "
        "methods reset and step, or a function annotated to return an environment, as in 'def make() -> Environment'."
    )


def _makes_environments(factory: Any) -> bool:
    """Whether this is an environment class, or a function annotated to return an environment."""
    if isinstance(factory, type):
        return issubclass(factory, HostEnvironment) or _has_reset_and_step(factory)
    if not callable(factory):
        return False
    try:
        made = typing.get_type_hints(factory).get("return")
    except Exception:  # annotations that cannot be resolved are ignored
        return False
    return isinstance(made, type) and (issubclass(made, HostEnvironment) or _has_reset_and_step(made))


def _has_reset_and_step(thing: Any) -> bool:
    return callable(getattr(thing, "reset", None)) and callable(getattr(thing, "step", None))


def _call(name: str, factory: Callable[..., Environment], parameters: dict[str, Any]) -> Environment:
    """Call the factory, or raise an error that lists the parameters it takes."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**parameters)
    except TypeError as error:
        known = ", ".join(signature.parameters) or "none"
        raise InputError(f"{name} cannot be created with these parameters ({error}); it takes: {known}.") from None
    return factory(**parameters)
