"""The algorithms, one file each; `base.py` says what an algorithm is and how to add one."""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from lehr import plugins
from lehr.errors import InputError, closest, shortened

if TYPE_CHECKING:
    from lehr.algorithms.base import Algorithm

_NOT_ALGORITHMS = ("base", "settings", "vocabulary")
GROUP = "lehr.algorithms"
"""The entry points under which an installed package offers algorithms."""


def names() -> list[str]:
    """The built-in algorithms."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _NOT_ALGORITHMS)


def find(algorithm: Any) -> "type[Algorithm]":
    """The class of an algorithm, from its name, from `module:Name`, or from the class itself.

    >>> find("ppo").Config.__module__
    'lehr.algorithms.ppo'
    """
    if not isinstance(algorithm, str):
        return _checked(algorithm, repr(algorithm))
    if algorithm in names():
        return importlib.import_module(f"lehr.algorithms.{algorithm}").Algorithm
    if algorithm in (offered := plugins.offered(GROUP)):
        return _checked(offered[algorithm].load(), repr(algorithm))
    if ":" in algorithm:
        return _checked(plugins.import_object(algorithm, "algorithm"), repr(algorithm))
    known = [*names(), *offered]
    raise InputError(f"There is no algorithm {algorithm!r}; {closest(algorithm, known)}")


def name_of(algorithm: Any) -> str:
    """The text by which a run remembers an algorithm.

    >>> name_of(find("ppo")), name_of("ppo")
    ('ppo', 'ppo')
    """
    if isinstance(algorithm, str):
        return algorithm
    text = plugins.text_of(algorithm)
    module, _, name = text.rpartition(":")
    package, _, built_in = module.rpartition(".")
    return built_in if package == __name__ and name == "Algorithm" else text


def settings_of(algorithm: Any) -> list[type]:
    """The classes of the settings of an algorithm: its own, and those of its network, each with its defaults.

    >>> [cls().torso for cls in (settings_of("ppo")[1], settings_of("recurrent_ppo")[1])]
    ['auto', 'mingru']
    """
    found = find(algorithm)
    return [found.Config, found.NetworkConfig]


def _checked(found: Any, what: str) -> "type[Algorithm]":
    """The class, if it is an algorithm's."""
    from lehr.algorithms.base import Algorithm  # only here: listing the algorithms needs no JAX

    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise InputError(
            f"{what} is {shortened(repr(found))}, which is no algorithm; give a class that inherits from "
            "lehr.algorithms.base.Algorithm, or the name of one."
        )
    missing = sorted(found.__abstractmethods__)
    if missing:
        raise InputError(f"{what} lacks {', '.join(missing)}, which an algorithm must have; see lehr.algorithms.base.")
    if not isinstance(getattr(found, "Config", None), type):
        raise InputError(f"{what} has no Config, the dataclass of its settings; see lehr.algorithms.settings.")
    return found
