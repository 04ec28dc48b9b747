"""What the networks of reward models see: observations and actions as at most one image and one vector."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lehr.networks import Network, build
from lehr.networks.observations import make_view
from lehr.networks.torsos import CNN, MLP, to_float
from lehr.spaces import Box, Space
from lehr.types import Key, PyTree

Inputs = tuple[jax.Array, ...]
"""An image `[B, H, W, C]` if there is one, then a vector `[B, F]` if there is one; float32."""


class Rows(NamedTuple):
    """A batch of steps, some of which may not count."""

    inputs: Inputs
    weight: jax.Array
    """float32 `[B]`: 0 for steps that do not count."""


def observation_inputs(space: Space, obs: PyTree) -> Inputs:
    """Return an observation as floats; bytes are scaled to [0, 1], integers become one-hot."""
    return tuple(to_float(x) for x in make_view(space, None, "auto").inputs(obs))


def action_inputs(space: Space, action: PyTree) -> jax.Array:
    """Return an action as a vector `[B, A]`; a bounded box is scaled to [−1, 1], integers become one-hot.

    >>> action_inputs(Box(0, 4, (2,)), jnp.array([[1.0, 4.0]])).tolist()
    [[-0.5, 1.0]]
    """
    if isinstance(space, Box) and space.bounded:
        low, high = (jnp.broadcast_to(bound, action.shape) for bound in (space.low, space.high))
        action = 2 * (action - low) / jnp.maximum(high - low, 1e-6) - 1
    return make_view(space, None, "mlp").inputs(action)[0]


def joined(*parts: Inputs) -> Inputs:
    """Join several inputs of the same steps: images along their channels, vectors along their entries.

    >>> [x.shape for x in joined((jnp.ones((5, 8, 8, 3)), jnp.ones((5, 2))), (jnp.ones((5, 4)),))]
    [(5, 8, 8, 3), (5, 6)]
    """
    images, vectors = ([x for part in parts for x in part if x.ndim == axes] for axes in (4, 2))
    return tuple(jnp.concatenate(found, -1) for found in (images, vectors) if found)


@dataclass(frozen=True)
class Shapes:
    """The shapes of inputs without their leading axis; `None` and 0 where there is none."""

    image: tuple[int, ...] | None
    vector: int

    @classmethod
    def of(cls, inputs: Inputs) -> "Shapes":
        """The shapes of a batch."""
        image = next((x.shape[1:] for x in inputs if x.ndim == 4), None)
        vector = next((x.shape[1] for x in inputs if x.ndim == 2), 0)
        return cls(image, vector)


class Judge(nnx.Module):
    """Dense layers over a vector, or convolutions over an image first, and a linear layer to `outputs` numbers."""

    def __init__(
        self, shapes: Shapes, hidden_sizes: tuple[int, ...], outputs: int, activation: str, rngs: nnx.Rngs
    ) -> None:
        self.encoder: MLP | CNN
        if shapes.image is None:
            self.encoder = MLP(shapes.vector, hidden_sizes, activation=activation, rngs=rngs)
        else:
            self.encoder = CNN(shapes.image, hidden_sizes, vector_size=shapes.vector, activation=activation, rngs=rngs)
        self.head = nnx.Linear(self.encoder.out_features, outputs, rngs=rngs)

    def __call__(self, *inputs: jax.Array) -> jax.Array:
        """Return `[B, outputs]`."""
        return self.head(self.encoder(*inputs))


@cache
def judge_network(
    shapes: Shapes, hidden_sizes: tuple[int, ...], outputs: int, activation: str = "tanh"
) -> tuple[Network[Judge], Callable[[Key], PyTree]]:
    """Return the static part of a network, and the function from a key to its first parameters."""
    make = partial(Judge, shapes, hidden_sizes, outputs, activation)

    def initialise(key: Key) -> PyTree:
        return build(make, key)[1]

    return build(make, jax.random.key(0))[0], initialise
