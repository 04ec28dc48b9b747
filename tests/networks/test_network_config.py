"""The settings of an actor-critic network."""

import pytest

from lehr.errors import InputError
from lehr.networks import NetworkConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torso": "lstmm"}, r"torso is 'lstmm'; did you mean 'lstm'\?"),
        ({"activation": "swish"}, "activation is 'swish'; known: auto, tanh"),
        ({"precision": "float16"}, "precision is 'float16'"),
        ({"hidden_sizes": (64, 0)}, "at least 1"),
        ({"critic_hidden_sizes": (-1,)}, r"critic_hidden_sizes is \(-1,\)"),
        ({"shared": True, "critic_torso": "mlp"}, "shared is True, but critic_torso"),
        ({"shared": True, "critic_hidden_sizes": (8,)}, "shared is True, but critic_torso"),
    ],
)
def test_mistakes_in_the_config_are_explained(options, message):
    with pytest.raises(InputError, match=message):
        NetworkConfig(**options)
