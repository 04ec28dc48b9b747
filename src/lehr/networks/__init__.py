"""Networks: defined with flax.nnx, with parameters as a plain dict of arrays.

`actor_critic(observation_space, action_space, config, key)` builds the network of the on-policy algorithms; `build`
splits any nnx module into a static network and its parameters. Pass your own torso in a `NetworkConfig` (see
`lehr.networks.custom`), or write a whole network with the methods of `ActorCriticLike`.
"""

from lehr.networks.actor_critic import ActorCritic, ActorCriticNetwork, actor_critic
from lehr.networks.build import Network, Params, Stacked, build
from lehr.networks.custom import TorsoMaker
from lehr.networks.memory import GRU, LSTM, MinGRU
from lehr.networks.network_config import NetworkConfig
from lehr.networks.protocol import ActorCriticBuilder, ActorCriticLike
from lehr.networks.torsos import CNN, MLP

__all__ = [
    "CNN",
    "GRU",
    "LSTM",
    "MLP",
    "ActorCritic",
    "ActorCriticBuilder",
    "ActorCriticLike",
    "ActorCriticNetwork",
    "MinGRU",
    "Network",
    "NetworkConfig",
    "Params",
    "Stacked",
    "TorsoMaker",
    "actor_critic",
    "build",
]
