"""The algorithms, one file each; `base.py` defines the protocol and explains how to add one."""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lehr import plugins
from lehr.errors import InputError, closest, shortened

if TYPE_CHECKING:
    from lehr.algorithms.base import Algorithm

_NOT_ALGORITHMS = ("base", "settings", "vocabulary")
GROUP = "lehr.algorithms"
"""Entry-point group in which installed packages can register algorithms."""


def names() -> list[str]:
    """Return the names of the built-in algorithms."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _NOT_ALGORITHMS)


def find(algorithm: Any, settings: Mapping[str, Any] | None = None) -> "type[Algorithm]":
    """Return the class of an algorithm, given its name, `module:Name`, or the class itself.

    Args:
        algorithm: one of these.
        settings: the user's settings by name, among which may be one that chooses a variant of the algorithm.

    >>> find("ppo").Config.__module__
    'lehr.algorithms.ppo'
    """
    return _found(algorithm).variant(settings or {})


def _found(algorithm: Any) -> "type[Algorithm]":
    if not isinstance(algorithm, str):
        return _checked(algorithm, repr(algorithm))
    if algorithm in names():
        return importlib.import_module(f"lehr.algorithms.{algorithm}").Algorithm
    if algorithm in (offered := plugins.offered(GROUP)):
        return _checked(offered[algorithm].load(), repr(algorithm))
    if ":" in algorithm:
        return _checked(plugins.import_object(algorithm, "algorithm"), repr(algorithm))
    plugins.refuse_file("algorithm", algorithm)
    known = [*names(), *offered]
    module, dot, name = algorithm.rpartition(".")
    if dot and plugins.is_reference(reference := f"{module}:{name}"):
        raise InputError(
            f"There is no algorithm {algorithm!r}; your own is 'module:Class': did you mean {reference!r}?"
        )
    raise InputError(f"There is no algorithm {algorithm!r}; {closest(algorithm, known)}")


def name_of(algorithm: Any) -> str:
    """Return the name under which a run saves an algorithm.

    >>> name_of(find("ppo")), name_of("ppo")
    ('ppo', 'ppo')
    """
    if isinstance(algorithm, str):
        return algorithm
    text = plugins.text_of(algorithm)
    module, _, name = text.rpartition(":")
    package, _, built_in = module.rpartition(".")
    return built_in if package == __name__ and name == "Algorithm" else text


def settings_of(algorithm: Any, settings: Mapping[str, Any] | None = None) -> list[type]:
    """Return the settings classes of an algorithm: its `Config` and its `NetworkConfig`; arguments as in `find`.

    >>> [cls().torso for cls in (settings_of("ppo")[1], settings_of("recurrent_ppo")[1])]
    ['auto', 'mingru']
    """
    found = find(algorithm, settings)
    return [found.Config, found.NetworkConfig]


def _checked(found: Any, what: str) -> "type[Algorithm]":
    """Return the class if it is a complete algorithm, else raise an error."""
    from lehr.algorithms.base import Algorithm  # imported here, so that listing the algorithms does not import JAX

    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        from lehr.envs.adapters import has_reset_and_step, makes_environments  # here, for the same reason

        if has_reset_and_step(found) or makes_environments(found):
            is_text = what != repr(found)
            name = what if is_text else getattr(found, "__name__", shortened(what))
            command = f", or 'lehr train ppo --env {what[1:-1]}'" if is_text else ""
            raise InputError(f"{name} is an environment; name the algorithm first: lehr.train('ppo', {name}){command}.")
        raise InputError(
            f"{what} is {shortened(repr(found))}, which is not an algorithm; give a class that inherits from "
            "lehr.algorithms.base.Algorithm, or its name."
        )
    missing = sorted(found.__abstractmethods__)
    if missing:
        raise InputError(f"{what} does not define {', '.join(missing)}; see lehr.algorithms.base.")
    if not isinstance(getattr(found, "Config", None), type):
        raise InputError(f"{what} has no Config dataclass for its settings; see lehr.algorithms.settings.")
    return found
