"""Networks: written with flax.nnx, carried as a plain dict of arrays.

`actor_critic(observation_space, action_space, config, key)` makes the network of the on-policy algorithms; `build`
turns any nnx module into such a pair of a static network and its parameters. A torso of your own goes into a
`NetworkConfig`, see `lehr.networks.custom`; a whole network of your own has the methods of `ActorCriticLike`.
"""

from lehr.networks.actor_critic import ActorCritic, ActorCriticNetwork, NetworkConfig, actor_critic
from lehr.networks.build import Network, Params, Stacked, build
from lehr.networks.custom import TorsoMaker
from lehr.networks.memory import GRU, LSTM, MinGRU
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
