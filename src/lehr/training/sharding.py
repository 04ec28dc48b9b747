"""One program on several devices: each has its share of the environments, and a copy of everything else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lehr.errors import InputError
from lehr.types import PyTree

AXIS = "envs"
"""The name of the mesh axis that environments are split over."""


@dataclass(frozen=True)
class EnvironmentSharding:
    """How the arrays of a run are placed on the devices.

    An array with one row per environment, `[num_envs, ...]`, is split along its first axis; any other array is
    replicated. On one device nothing is placed: both shardings are `None`, which `jit` reads as its default.
    """

    num_envs: int
    split: NamedSharding | None = None
    """For arrays with one row per environment."""
    replicated: NamedSharding | None = None
    """For arrays that every device has a copy of."""

    @classmethod
    def over(
        cls, devices: Sequence[Any], num_envs: int, setting: str = "the number of devices"
    ) -> "EnvironmentSharding":
        """Split the environments equally over some devices.

        Args:
            devices: of this process.
            num_envs: the number of environments.
            setting: what the user would change to get fewer devices, for the error message.

        >>> EnvironmentSharding.over(["gpu:0", "gpu:1"], num_envs=3)
        Traceback (most recent call last):
        lehr.errors.InputError: num_envs is 3, which 2 devices cannot share equally; choose a multiple of 2, or lower \
the number of devices.
        >>> EnvironmentSharding.over(jax.devices()[:1], num_envs=3)
        EnvironmentSharding(num_envs=3, split=None, replicated=None)
        """
        if len(devices) == 1:
            return cls(num_envs)
        if num_envs % len(devices):
            raise InputError(
                f"num_envs is {num_envs}, which {len(devices)} devices cannot share equally; choose a multiple of "
                f"{len(devices)}, or lower {setting}."
            )
        mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
        return cls(num_envs, NamedSharding(mesh, PartitionSpec(AXIS)), NamedSharding(mesh, PartitionSpec()))

    def of(self, tree: PyTree) -> Any:
        """The sharding of every leaf: split if it has a row per environment, else replicated; `None` on one device."""
        if self.replicated is None:
            return None
        return jax.tree.map(lambda x: self.split if x.shape[:1] == (self.num_envs,) else self.replicated, tree)

    def replicate(self, tree: PyTree) -> PyTree:
        """Copy a tree to all devices."""
        return tree if self.replicated is None else jax.device_put(tree, self.replicated)
