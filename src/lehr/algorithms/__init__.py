"""The algorithms, one file each.

To add one, write a file here with

- a frozen dataclass `Config` with a docstring under each field: its coefficients (annotated `Coef`) become schedulable,
  all of its fields become settings and command-line flags;
- a frozen dataclass `Algorithm` with fields `config` and `network`, and the methods of
  `lehr.training.iteration.Algorithm`: `init(params)` and `learn(learner, rollout, coef, key)`, pure functions;
- where the network has other defaults, a subclass of `lehr.networks.NetworkConfig` of that name that says them.

It is found by the name of its file.
"""

import importlib
import pkgutil
from types import ModuleType

from lehr.errors import InputError, closest


def names() -> list[str]:
    """The algorithms there are."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> ModuleType:
    """The module of an algorithm, with its `Config` and its `Algorithm`.

    >>> find("ppo").Config.__name__
    'Config'
    """
    if name not in names():
        raise InputError(f"There is no algorithm {name!r}; {closest(name, names())}")
    return importlib.import_module(f"lehr.algorithms.{name}")


def settings(name: str) -> list[type]:
    """The classes of the settings of an algorithm: its own, and those of its network, each with its defaults.

    >>> [cls().torso for cls in (settings("ppo")[1], settings("recurrent_ppo")[1])]
    ['auto', 'mingru']
    """
    from lehr.networks import NetworkConfig

    module = find(name)
    return [module.Config, getattr(module, "NetworkConfig", NetworkConfig)]
