"""An optimiser and an activation of your own: a chain of optax transformations, and any function of an array.

Run it with `python examples/own_optimiser.py`, or
`lehr train ppo --env CartPole-v1 --optimiser examples.own_optimiser:decayed_adam
--activation examples.own_optimiser:squared_relu`.
"""

import jax
import jax.numpy as jnp
import optax

import lehr


def decayed_adam(learning_rate):
    """Adam on gradients that are clipped one by one, with weight decay.

    Lehr calls this with a learning rate of 1 and multiplies the scheduled `learning_rate` in at each update.
    """
    return optax.chain(
        optax.clip(0.1),
        optax.scale_by_adam(eps=1e-5),
        optax.add_decayed_weights(1e-4),
        optax.scale_by_learning_rate(learning_rate),
    )


def squared_relu(x):
    """max(0, x)², elementwise."""
    return jnp.square(jax.nn.relu(x))


if __name__ == "__main__":
    own = {"optimiser": decayed_adam, "activation": squared_relu}
    result = lehr.train("ppo", "CartPole-v1", **own, learning_rate="1e-3 -> 0", total_steps=100_000)
    print(f"Mean return of 100 episodes: {result.final['evaluate/return']:.0f}")
