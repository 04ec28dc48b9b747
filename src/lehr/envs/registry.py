"""Environments by name: `register` one, `make` one, list the `names`."""

import difflib
import importlib
import importlib.util
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from lehr import plugins
from lehr.envs.base import Environment
from lehr.envs.host.base import AnyEnvironment, HostEnvironment
from lehr.envs.wrappers import TimeLimit
from lehr.errors import InputError

Factory = TypeVar("Factory", bound=Callable[..., Environment])

ADAPTERS = {
    "brax": ("suites", "brax"),
    "craftax": ("suites", "craftax"),
    "envpool": ("host", "envpool"),  # before gym, since its pools are vector environments of Gymnasium too
    "gym": ("host", "gymnasium"),
    "gymnax": ("suites", "gymnax"),
    "jaxdem": ("suites", "jaxdem"),
    "jumanji": ("suites", "jumanji"),
    "pettingzoo": ("host", "pettingzoo"),
    "playground": ("suites", "mujoco_playground"),
}
"""`PREFIX:NAME` names an environment of another ecosystem: the folder of its adapter, and the package it adapts."""


class _Entry(NamedTuple):
    factory: Callable[..., Environment]
    max_steps: int | None


_registry: dict[str, _Entry] = {}
_NAMES_CODE = re.compile(r"[A-Za-z_][\w.]*:")


def register(name: str, max_steps: int | None = None) -> Callable[[Factory], Factory]:
    """Decorate a class, or a function that returns an environment, so that `make(name)` finds it.

    `max_steps` is the task's standard time limit, which `make` applies; `None` for a task that always ends by itself.
    """
    if name in _registry:
        raise InputError(f"An environment named {name!r} is registered already: choose another name.")

    def add(factory: Factory) -> Factory:
        _registry[name] = _Entry(factory, max_steps)
        return factory

    return add


def names() -> list[str]:
    """The registered names, sorted."""
    return sorted(_registry)


def make(env: str | AnyEnvironment, **parameters: Any) -> AnyEnvironment:
    """An environment by its name, with its standard time limit applied.

    `env` is a registered name (`"CartPole-v1"`), a name of another suite behind its prefix (`"brax:ant"`), an import
    path `"module:Class"` of a class or of a function annotated to return an environment, or an environment, which is
    returned as it is if it is one of Lehr's kind, and adapted if it is another suite's. The parameters go to the class
    or function.

    >>> make("MountainCar-v0", force=0.002)
    TimeLimit(env=MountainCar(force=0.002, goal_position=0.5), max_steps=200)
    """
    if not isinstance(env, str):
        return _given(env, parameters)
    prefix, colon, name = env.partition(":")
    if colon and prefix in ADAPTERS:
        return adapter(prefix).make(name, **parameters)
    if env in _registry:
        factory, max_steps = _registry[env]
    else:
        factory, max_steps = _import(env), None
    made = _given(_call(env, factory, parameters), {})
    if max_steps is None:
        return made
    if isinstance(made, HostEnvironment):
        raise InputError(f"{env} is registered with max_steps, but runs on the host: give the limit to its suite.")
    return TimeLimit(made, max_steps)


def adapter(prefix: str) -> ModuleType:
    """The module that adapts an ecosystem's environments, with `make`, `adapt` and `names`."""
    folder, _ = ADAPTERS[prefix]
    return importlib.import_module(f"lehr.envs.{folder}.{prefix}")


def _given(env: Any, parameters: dict[str, Any]) -> AnyEnvironment:
    """An environment that exists already."""
    parents = type(env).__mro__
    ours = isinstance(env, HostEnvironment) or Environment in parents
    packages = set() if ours else {parent.__module__.partition(".")[0] for parent in parents}
    for prefix, (_, package) in ADAPTERS.items():
        if package in packages:
            return adapter(prefix).adapt(env, **parameters)
    if not isinstance(env, HostEnvironment) and not _steps(env):
        raise InputError(f"An environment has the methods reset and step, but {env!r} has not: see check_env.")
    if parameters:
        raise InputError(
            f"The parameters {', '.join(parameters)} came with an environment that exists already: give them "
            "to its class, or name the environment by a text."
        )
    return env


def own_code(env: str) -> str | None:
    """The module outside Lehr and its suites that making this environment would import; `None` where there is none.

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
    """The module that a text among an environment's parameters names: some suites import what they are told to wrap.

    >>> own_code_in({"env_id": "my_package:Maze-v0"}), own_code_in({"backend": "spring"})
    ('my_package', None)
    """
    return next((text.partition(":")[0] for text in _texts(parameters) if _NAMES_CODE.match(text)), None)


def _is_pettingzoos(name: str) -> bool:
    """Whether a module is one of PettingZoo's own, seen from its files."""
    suites = adapter("pettingzoo").SUITES
    places = [f"pettingzoo.{name}", *(name for suite in suites if name.partition(".")[0] == suite)]
    for place in places:
        root, *path = place.split(".")
        spec = importlib.util.find_spec(root)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if Path(folder, *path).with_suffix(".py").is_file():
                return True
    return False


def _texts(tree: Any) -> list[str]:
    """All texts in a nest of mappings and lists."""
    if isinstance(tree, Mapping):
        return [text for pair in tree.items() for part in pair for text in _texts(part)]
    if isinstance(tree, list | tuple):
        return [text for item in tree for text in _texts(item)]
    return [tree] if isinstance(tree, str) else []


def _import(name: str) -> Callable[..., Environment]:
    """The class or function that `module:attribute` names; what makes no environments is refused, and not called."""
    if ":" not in name:
        known = {registered.lower(): registered for registered in sorted(_registry, key=len)}
        near = [word for word in known if word.startswith(name.lower())]
        near = near or difflib.get_close_matches(name.lower(), known, n=1)
        meant = f" (did you mean {known[near[0]]!r}?)" if near else ""
        raise InputError(
            f"There is no environment named {name!r}{meant}: choose one of {', '.join(names())}, one of another suite "
            f"behind its prefix ({', '.join(f'{prefix}:' for prefix in ADAPTERS)}), or one of your own as "
            "'module:Class'."
        )
    found = plugins.import_object(name, "environment")
    if any(entry.factory is found for entry in _registry.values()) or _makes_environments(found):
        return found
    raise InputError(
        f"{name!r} is {plugins.shortened(repr(found))}, which makes no environments; give a class with the methods "
        "reset and step, or a function whose return type says that it makes one, as in 'def make() -> Environment'."
    )


def _makes_environments(factory: Any) -> bool:
    """Whether it is an environment's class, or a function annotated to return one."""
    if isinstance(factory, type):
        return issubclass(factory, HostEnvironment) or _steps(factory)
    if not callable(factory):
        return False
    try:
        made = typing.get_type_hints(factory).get("return")
    except Exception:  # an annotation that names what is not there says nothing
        return False
    return isinstance(made, type) and (issubclass(made, HostEnvironment) or _steps(made))


def _steps(thing: Any) -> bool:
    return callable(getattr(thing, "reset", None)) and callable(getattr(thing, "step", None))


def _call(name: str, factory: Callable[..., Environment], parameters: dict[str, Any]) -> Environment:
    """The environment that the factory makes, or one sentence about the parameters it does not take."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**parameters)
    except TypeError as error:
        known = ", ".join(signature.parameters) or "none"
        raise InputError(f"{name} cannot be made like this ({error}); its parameters are: {known}.") from None
    return factory(**parameters)
