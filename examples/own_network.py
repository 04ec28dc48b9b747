"""A network of your own: a torso of Fourier features; everything around it stays as it is.

Run it with `python examples/own_network.py`, or
`lehr train ppo --env CartPole-v1 --torso examples.own_network:Fourier`.
"""

import jax.numpy as jnp
from flax import nnx

import lehr


class Fourier(nnx.Module):
    """Features sin(Bx) and cos(Bx) of an observation x, with frequencies B that are learned, and one dense layer."""

    def __init__(self, observation_space, rngs):
        self.out_features = 64  # Lehr reads this to build the heads of the policy and the value
        self.frequencies = nnx.Linear(observation_space.shape[0], 32, rngs=rngs)
        self.dense = nnx.Linear(64, self.out_features, rngs=rngs)

    def __call__(self, obs):
        """From observations `[N, size]` to features `[N, out_features]`."""
        angles = self.frequencies(obs)
        return nnx.tanh(self.dense(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)))


if __name__ == "__main__":
    result = lehr.train("ppo", "CartPole-v1", torso=Fourier, total_steps=100_000, gae_lambda=0.9)
    print(f"Mean return of 100 episodes: {result.final['evaluate/return']:.0f}")
