"""Environments of other ecosystems, and environments given as objects, classes or functions."""

import functools
import importlib
import importlib.util
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from lehr.envs.base import Environment
from lehr.envs.host.base import AnyEnvironment, HostEnvironment
from lehr.errors import InputError, quoted
from lehr.plugins import ADAPTERS, is_reference, text_of

_KEY, _ID = r"""^ +["']([\w-]+)["'](?::|,$)""", r"""\bid=["']([^"']+)["']"""
_LISTS = {
    "brax": ("envs/__init__.py", _KEY),
    "gym": ("envs/__init__.py", _ID),
    "gymnax": ("registration.py", _KEY),
    "jumanji": ("__init__.py", _ID),
    "pgx": ("core.py", r'^ +"(?!bridge_bidding)([\w-]+)",$'),  # which Pgx names, but does not make
    "playground": ("_src/*/__init__.py", _KEY),
}
"""The files of a package that list its environments, and how they write a name."""

GYM_OPTIONS = ("vectorization", "autoreset")
"""Parameters of Gymnasium's adapter, which are not passed to a class or function that creates an environment."""


def adapter(prefix: str) -> ModuleType:
    """Return the module that adapts an ecosystem's environments, with `make`, `adapt` and `names`."""
    folder, _ = ADAPTERS[prefix]
    return importlib.import_module(f"lehr.envs.{folder}.{prefix}")


def listed(prefix: str) -> list[str]:
    """Return the names of an installed suite that are found without a slow import, most of them by reading its files.

    Empty if they cannot be found in this way, or if the suite is not installed.
    """
    spec = importlib.util.find_spec(ADAPTERS[prefix][1])
    if spec is None or spec.origin is None:
        return []
    if prefix in ("craftax", "pettingzoo"):
        return adapter(prefix).names()
    files, pattern = _LISTS.get(prefix, ("", ""))
    texts = [file.read_text(encoding="utf-8") for file in Path(spec.origin).parent.glob(files)] if files else []
    return sorted({name for text in texts for name in re.findall(pattern, text, re.MULTILINE)})


def is_factory(thing: Any) -> bool:
    """Whether this is a class or a function, rather than an environment."""
    return isinstance(thing, type) or (callable(thing) and not has_reset_and_step(thing))


def adapted(env: Any, parameters: Mapping[str, Any], name: str | None = None) -> AnyEnvironment:
    """Return an environment that follows Lehr's protocol.

    Args:
        env: an environment of Lehr or of another suite, or a class or function that creates one.
        parameters: passed to the class or function; for an object, options of its suite's adapter.
        name: what to call the class or function in error messages.
    """
    if not is_factory(env):
        return _adapted_object(env, dict(parameters))
    factory, parameters = unfolded(env, parameters)
    text = text_of(factory)
    name = name or (text if is_reference(text) else str(getattr(factory, "__name__", type(factory).__name__)))
    if _is_single_gym(getattr(factory, "__mro__", ())):
        return adapter("gym").from_factory(factory, name, dict(parameters))
    options = _options(factory, parameters)
    made = _call(name, factory, {key: value for key, value in parameters.items() if key not in options})
    if _is_single_gym(type(made).__mro__):
        return adapter("gym").from_factory(factory, name, dict(parameters), made)
    return _adapted_object(made, {key: parameters[key] for key in options})


def unfolded(env: Any, parameters: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the function inside a `functools.partial` without positional arguments, and all parameters.

    >>> unfolded(functools.partial(dict, size=3), {"speed": 2})
    (<class 'dict'>, {'size': 3, 'speed': 2})
    """
    if isinstance(env, functools.partial) and not env.args:
        return unfolded(env.func, {**env.keywords, **parameters})
    return env, dict(parameters)


def split_options(factory: Callable[..., Any], parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of Gymnasium's adapter among the parameters, and the parameters of the factory."""
    options = _options(factory, parameters)
    return (
        {key: parameters[key] for key in options},
        {key: value for key, value in parameters.items() if key not in options},
    )


def _options(factory: Callable[..., Any], parameters: Mapping[str, Any]) -> list[str]:
    own = _signature(factory)
    return [key for key in GYM_OPTIONS if key in parameters and (own is None or key not in own.parameters)]


def makes_environments(factory: Any) -> bool:
    """Whether this is an environment class, or a function annotated to return an environment."""
    if isinstance(factory, type):
        return issubclass(factory, HostEnvironment) or has_reset_and_step(factory)
    if not callable(factory):
        return False
    try:
        made = typing.get_type_hints(factory).get("return")
    except Exception:  # annotations that cannot be resolved are ignored
        return False
    made = typing.get_origin(made) or made
    return isinstance(made, type) and (issubclass(made, HostEnvironment) or has_reset_and_step(made))


def has_reset_and_step(thing: Any) -> bool:
    """Whether a class or an object has these methods."""
    return callable(getattr(thing, "reset", None)) and callable(getattr(thing, "step", None))


def _suite(parents: tuple[type, ...]) -> str | None:
    """Return the prefix of the suite that a class with these parents comes from; `None` if it is Lehr's or nobody's."""
    if HostEnvironment in parents or Environment in parents:
        return None
    packages = {parent.__module__.partition(".")[0] for parent in parents}
    return next((prefix for prefix, (_, package) in ADAPTERS.items() if package in packages), None)


def _is_single_gym(parents: tuple[type, ...]) -> bool:
    """Whether a class with these parents is one of Gymnasium's, and not a vector environment."""
    return _suite(parents) == "gym" and not any(parent.__name__ == "VectorEnv" for parent in parents)


def _adapted_object(env: Any, parameters: dict[str, Any]) -> AnyEnvironment:
    """Return an existing environment object, adapted if it comes from another suite."""
    prefix = _suite(type(env).__mro__)
    if prefix is not None:
        return adapter(prefix).adapt(env, **parameters)
    if not isinstance(env, HostEnvironment) and not has_reset_and_step(env):
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


def _call(name: str, factory: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Call the factory, or raise an error that lists the parameters it takes."""
    problem = problem_with(factory, parameters)
    if problem is not None:
        raise InputError(f"{name} cannot be created with these parameters ({problem[0]}); it takes: {problem[1]}.")
    return factory(**parameters)


def problem_with(factory: Callable[..., Any], parameters: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return why a factory does not take these parameters, and those it takes; `None` if it takes them.

    >>> problem_with(lambda size: None, {"sizes": 3})
    ("missing a required argument: 'size'", 'size')
    """
    signature = _signature(factory)
    if signature is None:
        return None
    try:
        signature.bind(**parameters)
    except TypeError as error:
        return str(error), ", ".join(signature.parameters) or "none"
    return None


def _signature(factory: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(factory)
    except (TypeError, ValueError):  # written in C
        return None
