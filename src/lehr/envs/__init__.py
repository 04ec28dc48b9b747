"""Environments: the protocol, the registry, the built-in tasks and the wrappers."""

from lehr.envs.adapters import ADAPTERS
from lehr.envs.base import Environment
from lehr.envs.builtin import chain, classic, probes, swarm
from lehr.envs.check import check_env
from lehr.envs.host.base import AnyEnvironment, HostEnvironment
from lehr.envs.registry import make, names, register
from lehr.envs.wrappers import (
    ActionRepeat,
    AutoReset,
    Batch,
    ClipAction,
    EpisodeStatistics,
    FlattenObservation,
    FrameStack,
    HideObservation,
    RescaleAction,
    StackChannels,
    TimeLimit,
    Wrapper,
)

__all__ = [
    "ADAPTERS",
    "ActionRepeat",
    "AnyEnvironment",
    "AutoReset",
    "Batch",
    "ClipAction",
    "Environment",
    "EpisodeStatistics",
    "FlattenObservation",
    "FrameStack",
    "HideObservation",
    "HostEnvironment",
    "RescaleAction",
    "StackChannels",
    "TimeLimit",
    "Wrapper",
    "chain",
    "check_env",
    "classic",
    "make",
    "names",
    "probes",
    "register",
    "swarm",
]
