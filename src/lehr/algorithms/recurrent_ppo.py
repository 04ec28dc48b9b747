"""PPO with a recurrent network: minibatches of windows with burn-in, or whole segments, from stored recurrent states.

The code is PPO's, with other defaults; see docs/recurrent_ppo.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lehr.algorithms import ppo
from lehr.algorithms.base import HalfBoxNetworkConfig
from lehr.algorithms.settings import OpenDiscountSettings
from lehr.config import AutoBool, Coef, CountOrAuto
from lehr.errors import InputError

_LEFT_OPEN: dict[str, Any] = {
    "horizon": 32,
    "window": None,
    "burn_in": 0,
    "entropy_coef": 0.0,
    "clip_range": "0.2 -> 0.001",
    "discount": 0.98,
    "gae_lambda": 0.8,
}
"""What PPO's presets leave open: here, SB3 Zoo's settings for CartPole without velocities."""


@dataclass(frozen=True)
class Config(OpenDiscountSettings, ppo.Config):
    """PPO's settings, with defaults for recurrent networks."""

    num_envs: int = 8
    horizon: int = 256
    epochs: int = 10
    window: CountOrAuto | None = "auto"
    burn_in: CountOrAuto = "auto"
    normalise_observations: AutoBool = False  # a memory learns better from observations whose scale does not change
    normalise_rewards: AutoBool = True
    learning_rate: Coef | None = None
    """Learning rate of the optimiser; none is 1e-3 -> 0 if actions are continuous, else 2e-3 -> 0."""
    entropy_coef: Coef = "0.01 -> 0"
    value_coef: Coef = 1.0  # with the factor of ½ in the loss, the 0.5 of Stable-Baselines3

    by_actions: ClassVar[Mapping[str, tuple[Any, Any]]] = {"learning_rate": ("1e-3 -> 0", "2e-3 -> 0")}
    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        name: _LEFT_OPEN | preset for name, preset in ppo.Config.PRESETS.items()
    }


@dataclass(frozen=True)
class NetworkConfig(HalfBoxNetworkConfig):
    """Architecture of a recurrent actor and critic."""

    torso: str = "mingru"
    recurrent_size: int = 64

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {name: {"initial_log_std": 0.0} for name in Config.PRESETS}


@dataclass(frozen=True)
class Algorithm(ppo.Algorithm):
    """PPO with a recurrent network."""

    Config: ClassVar[type] = Config
    NetworkConfig: ClassVar[type] = NetworkConfig

    def __post_init__(self) -> None:
        if not self.network.is_recurrent:
            raise InputError(
                "Neither torso nor critic_torso is recurrent, but recurrent_ppo needs one; set torso to lstm, gru or "
                "mingru, or train ppo."
            )
        super().__post_init__()
