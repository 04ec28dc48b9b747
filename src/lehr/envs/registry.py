"""The registry of environments: `register`, `make` and `names`."""

import contextlib
import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lehr import plugins
from lehr.envs.adapters import ADAPTERS, adapted, adapter, listed, makes_environments, unfolded
from lehr.envs.host.base import AnyEnvironment, HostEnvironment
from lehr.envs.wrappers import TimeLimit
from lehr.errors import InputError, quoted, shortened

Factory = TypeVar("Factory", bound=Callable[..., Any])


class Registration(NamedTuple):
    """A registered environment."""

    factory: Callable[..., Any]
    max_steps: int | None = None
    module: str = ""
    """The module that registered it."""

    @property
    def source(self) -> tuple[str, str]:
        """What it was registered from; a notebook's cell that runs twice registers twice from the same."""
        return self.module, getattr(self.factory, "__qualname__", repr(self.factory))


GROUP = "lehr.environments"
"""The entry points under which an installed package offers environments."""

_registry: dict[str, Registration] = {}
_MODULE_PREFIX = re.compile(r"[A-Za-z_][\w.]*:")


def register(name: str, max_steps: int | None = None) -> Callable[[Factory], Factory]:
    """Register a class, or a function that returns an environment, so that `make(name)` finds it. Use as a decorator.

    `max_steps` is the task's standard time limit, which `make` applies; `None` for tasks that always terminate. To
    register the same class again, as when a notebook's cell runs twice, replaces it.
    """
    module = str(sys._getframe(1).f_globals.get("__name__", ""))

    def add(factory: Factory) -> Factory:
        new, known = Registration(factory, max_steps, module), _registry.get(name)
        if known is not None and known.source != new.source:
            before = ":".join(known.source)
            raise InputError(f"An environment named {name!r} is already registered ({before}): choose another name.")
        _registry[name] = new
        return factory

    return add


def names() -> list[str]:
    """Return the registered names, sorted; those that installed packages offer are not imported, so not among them."""
    return sorted(_registry)


def make(env: Any, **parameters: Any) -> AnyEnvironment:
    """Create an environment by name, with its standard time limit.

    `env` is a registered name (`"CartPole-v1"`), a name that an installed package offers as an entry point of the group
    `lehr.environments`, a prefixed name from another suite (`"brax:ant"`), the import path `"module:Class"` of a class
    or of a function annotated to return an environment, `"module:Name-v0"` for a name that the module registers, or an
    environment itself: an object, or a class or function that creates one. An object that follows Lehr's protocol is
    returned unchanged; one from another suite is adapted. The parameters are passed to the class or function.

    >>> make("MountainCar-v0", force=0.002)
    TimeLimit(env=MountainCar(goal_position=0.5, force=0.002), max_steps=200)
    """
    if not isinstance(env, str):
        made, limits = adapted(env, parameters), list(registered(unfolded(env, {})[0]).values())
        return _limited(made, limits[0] if limits else None)
    prefix, colon, name = env.partition(":")
    if colon and prefix in ADAPTERS:
        return adapter(prefix).make(name, **parameters)
    found = _find(env)
    return _limited(adapted(found.factory, parameters, env), found.max_steps)


def _limited(env: AnyEnvironment, max_steps: int | None) -> AnyEnvironment:
    """Return the environment with its standard time limit."""
    if max_steps is None:
        return env
    return env.limited(max_steps) if isinstance(env, HostEnvironment) else TimeLimit(env, max_steps)


def full_name(name: str) -> str:
    """Return the name under which another process finds a registered environment: with the module that registers it.

    >>> full_name("CartPole-v1"), full_name("brax:ant")
    ('CartPole-v1', 'brax:ant')
    """
    module = _registry[name].module if name in _registry else ""
    if module in ("", "__main__") or plugins.is_lehrs(module) or name in plugins.offered(GROUP):
        return name
    return f"{module}:{name}"


def is_found_elsewhere(name: str) -> bool:
    """Whether another process finds a registered name: not if it was registered in a script or a notebook."""
    return name not in _registry or _registry[name].module != "__main__" or name in plugins.offered(GROUP)


def registered(factory: Any) -> dict[str, int | None]:
    """Return the names under which a class or function is registered, and their time limits."""
    return {name: entry.max_steps for name, entry in _registry.items() if entry.factory is factory}


def own_code(env: str, elsewhere: bool = False) -> str | None:
    """Return the module outside of Lehr and its suites that `make(env)` would import, or `None`.

    What this process has registered need not be imported, except `elsewhere`, in another process.

    >>> own_code("brax:ant"), own_code("CartPole-v1"), own_code("my_package.tasks:Maze")
    (None, None, 'my_package.tasks')
    >>> own_code("gym:my_package:Maze-v0")
    'my_package'
    """
    prefix, colon, name = env.partition(":")
    if not colon or plugins.is_lehrs(prefix):
        return None
    if not elsewhere and (env in _registry or _is_registered(prefix, name)):
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


def _find(env: str) -> Registration:
    """Return the environment with this name; nothing is imported for a registered one."""
    if env in _registry:
        return _registry[env]
    if env in (offered := plugins.offered(GROUP)):
        return _load(env, offered[env])
    plugins.refuse_file("environment", env)
    module, colon, name = env.partition(":")
    if not colon:
        raise InputError(_unknown(env))
    if plugins.is_reference(f"{module}:name") and name.strip(":") and not plugins.is_reference(env):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise InputError(
                f"The environment {quoted(env)} could not be imported ({error}); give 'module:Name' with a module that "
                "Python finds and a name in it."
            ) from error
        if not _is_registered(module, name):
            raise InputError(f"The module {module!r} registers no environment {quoted(name)}; correct the name.")
    if _is_registered(module, name):
        return _registry[name]
    found = _checked(env, plugins.import_object(env, "environment"))
    entries = [entry for entry in _registry.values() if entry.factory is found]
    return entries[0] if entries else Registration(found)


def _is_registered(module: str, name: str) -> bool:
    """Whether this module has registered an environment with this name."""
    return name in _registry and _registry[name].module == module


def _unknown(name: str) -> str:
    """Say that there is no such environment, and which one may be meant."""
    offered = sorted(plugins.offered(GROUP))
    known = {word.lower(): word for word in sorted([*_registry, *offered], key=len)}
    theirs = {word.lower(): f"gym:{word}" for word in _names_in_gymnasium()}
    starting = [word for word in known if word.startswith(name.lower())]
    close = [known[word] for word in starting or difflib.get_close_matches(name.lower(), known, n=1)]
    if not close or (name.lower() in theirs and name.lower() not in known):
        near = difflib.get_close_matches(name.lower(), theirs, n=1, cutoff=0.8)
        close = ([] if name.lower() in theirs else _in_a_suite(name)) or [theirs[word] for word in near] or close
    if _GYMNASIUM_ID.fullmatch(name) and not difflib.get_close_matches(name.lower(), known | theirs, n=1, cutoff=0.8):
        close = [f"gym:{name}"]
    close = close[:1]
    if close and close[0].startswith("gym:"):
        close += _in_brax(name)
    if close and len(name) > 1:  # anything is close to a single letter
        meant = " or ".join(map(repr, close))
        return (
            f"There is no environment named {quoted(name)} (did you mean {meant}?): 'lehr list envs' and "
            "'lehr list suites' show the names, and your own is 'module:Class'."
        )
    shown = [word for word in names() if not word.startswith("Probe-")]  # which are for tests of algorithms
    return (
        f"There is no environment named {quoted(name)}: choose one of {', '.join([*shown, *offered])}, "
        "one from another suite with its prefix, as in gym:Ant-v5 ('lehr list suites' shows them), or your own "
        "as 'module:Class'."
    )


_GYMNASIUM_ID = re.compile(r"(?:\w+/)?[A-Z]\w*-v\d+")
"""What names of Gymnasium look like, which are suggested with their prefix also where Gymnasium is not installed."""


def _in_brax(name: str) -> list[str]:
    """Return Brax's environment of the same task as one of Gymnasium's, if Brax is installed; or nothing."""
    words = re.findall(r"[A-Z][a-z]*|[A-Z0-9]+", re.sub(r"-v\d+$", "", name))
    return [f"brax:{task}" for joint in ("", "_") if words and (task := joint.join(words).lower()) in listed("brax")][
        :1
    ]


def _in_a_suite(name: str) -> list[str]:
    """Return an environment of exactly this name in an installed suite, with its prefix; or nothing."""
    for prefix, (_, package) in ADAPTERS.items():
        with contextlib.suppress(InputError):  # a package that cannot be imported
            if importlib.util.find_spec(package) and name in (listed(prefix) or adapter(prefix).names()):
                return [f"{prefix}:{name}"]
    return []


def _names_in_gymnasium() -> list[str]:
    """Return the names of Gymnasium's environments, if it is installed."""
    return adapter("gym").names() if importlib.util.find_spec("gymnasium") else []


def _load(name: str, point: EntryPoint) -> Registration:
    """Import what an installed package offers; if it registers itself under that name, its time limit is known too."""
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        package = point.dist.name if point.dist else point.module
        raise InputError(
            f"The environment {name!r} is offered by the package {package}, but {point.value!r} could not be imported "
            f"({error}); reinstall the package, or tell its authors."
        ) from error
    return _registry.get(name) or Registration(_checked(name, found))


def _checked(name: str, found: Any) -> Callable[..., Any]:
    """Return what was imported, unless it does not create environments."""
    if any(entry.factory is found for entry in _registry.values()) or makes_environments(found):
        return found
    raise InputError(
        f"{name!r} is {shortened(repr(found))}, which does not create environments; give a class with the "
        "methods reset and step, or a function annotated to return an environment, as in 'def make() -> Environment'."
    )
