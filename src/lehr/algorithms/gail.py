"""Generative adversarial imitation learning (Ho & Ermon, 2016): learn from demonstrations what a reward would be.

A discriminator, the reward model `lehr.rewards.discriminator`, learns to tell the expert's steps from the policy's, and
the policy learns to be taken for the expert, with PPO or any other algorithm. See docs/gail.md for the details.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from lehr import algorithms
from lehr.acting.demonstrations import Demonstrations
from lehr.algorithms import base, ppo
from lehr.config import AutoBool, Plugin
from lehr.errors import InputError
from lehr.rewards import EnvironmentReward
from lehr.rewards.discriminator import Discriminator, DiscriminatorSettings
from lehr.spaces import Spaces


@dataclass(frozen=True)
class ImitationSettings(DiscriminatorSettings):
    """Settings of the discriminator, and which algorithm trains the policy."""

    policy_algorithm: Plugin = "ppo"
    """Algorithm that trains the policy: ppo, trpo as in the paper, or any other."""


@dataclass(frozen=True)
class Config(ImitationSettings, ppo.Config):
    """Settings of the discriminator and of PPO."""

    normalise_rewards: AutoBool = False  # the discriminator's rewards have the same scale in every task


class Imitation(base.Algorithm):
    """What an algorithm has more that learns from a discriminator."""

    reward_model: ClassVar[type] = Discriminator

    @classmethod
    def trial_settings(cls, spaces: Spaces, folder: Path) -> dict[str, Any]:
        """Return a tiny discriminator that learns from random steps, whose reward does not count."""

        def samples(seed: int, size: int, space: Any) -> Any:
            drawn = jax.vmap(space.sample)(jax.random.split(jax.random.key(seed), size))
            return jax.tree.map(np.asarray, drawn)

        last = np.arange(1, 17) % 8 == 0
        demonstrations = Demonstrations(
            obs=samples(0, 16, spaces.observation),
            actions=samples(1, 16, spaces.action),
            rewards=np.zeros(16, np.float32),
            terminated=last,
            truncated=np.zeros(16, bool),
            final_obs=samples(2, 2, spaces.observation),
            lengths=np.array([8, 8]),
        )
        return {
            "demonstrations": str(demonstrations.save(folder / "demos.npz")),
            "imitation_coef": 0.0,
            "task_coef": 1.0,
            "discriminator_sizes": (8,),
            "discriminator_updates": 2,
            "discriminator_batch": 16,
        }


@dataclass(frozen=True)
class Algorithm(Imitation, ppo.Algorithm):
    """GAIL over PPO, or over the algorithm that the setting `policy_algorithm` names."""

    Config: ClassVar[type] = Config
    decided_by: ClassVar[tuple[str, ...]] = ("policy_algorithm",)

    @classmethod
    def variant(cls, settings: Mapping[str, Any]) -> type[base.Algorithm]:
        """Return GAIL over the algorithm that trains the policy."""
        named = settings.get("policy_algorithm", "ppo")
        return cls if named == "ppo" else over(algorithms.find(named))


@cache
def over(algorithm: type[base.Algorithm]) -> type[base.Algorithm]:
    """Return GAIL over an algorithm: its class, with the discriminator and its settings."""
    name = algorithms.name_of(algorithm)
    if algorithm.reward_model is not EnvironmentReward:
        raise InputError(
            f"policy_algorithm is {name}, which has a reward model of its own; give an algorithm without one, such as "
            "ppo or trpo."
        )
    described: dict[str, Any] = {"__module__": __name__, "__doc__": f"Settings of the discriminator and of {name}."}
    defaults: dict[str, Any] = {"policy_algorithm": name}
    annotations: dict[str, Any] = {"policy_algorithm": Plugin}
    if algorithm.Config.normalise_rewards == "auto":
        defaults["normalise_rewards"], annotations["normalise_rewards"] = Config.normalise_rewards, AutoBool
    settings = type(
        "Config", (ImitationSettings, algorithm.Config), described | defaults | {"__annotations__": annotations}
    )
    settings.__qualname__ = f"Config_over_{name}"
    made = type(
        "Algorithm",
        (Imitation, algorithm),
        {"Config": dataclass(frozen=True)(settings), "__module__": __name__, "__doc__": f"GAIL over {name}."},
    )
    made.__qualname__ = f"Algorithm_over_{name}"
    return made


def __getattr__(name: str) -> Any:
    """Find the classes of `over` by their names, for a process that unpickles them."""
    kind, between, algorithm = name.partition("_over_")
    if not between or algorithm not in algorithms.names():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = over(algorithms.find(algorithm))
    return found if kind == "Algorithm" else found.Config
