"""PPO with a recurrent network: minibatches of whole segments, or windows with burn-in, from stored recurrent states.

The code is PPO's, with other defaults; see docs/recurrent_ppo.md.
"""

from dataclasses import dataclass
from typing import ClassVar

from lehr import networks
from lehr.algorithms import ppo
from lehr.config import AutoBool, Coef
from lehr.errors import InputError


@dataclass(frozen=True)
class Config(ppo.Config):
    """PPO's settings, with defaults for recurrent networks."""

    num_envs: int = 8
    horizon: int = 32
    epochs: int = 20
    minibatches: int = 1
    normalise_observations: AutoBool = True
    normalise_rewards: AutoBool = True
    entropy_coef: Coef = 0.0
    clip_range: Coef = "0.2 -> 0.001"
    discount: Coef = 0.98
    gae_lambda: Coef = 0.8
    value_coef: Coef = 1.0  # with the factor of ½ in the loss, the 0.5 of Stable-Baselines3


@dataclass(frozen=True)
class NetworkConfig(networks.NetworkConfig):
    """Architecture of a recurrent actor and critic."""

    torso: str = "mingru"
    recurrent_size: int = 64


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
