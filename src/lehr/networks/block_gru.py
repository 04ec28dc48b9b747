"""A recurrent layer in blocks: several small gated units side by side, which see the same inputs.

A state of `D` numbers in `G` blocks has D² / G recurrent weights per gate instead of D²: a large memory is cheap.
"""

import jax
import jax.numpy as jnp
from flax import nnx

EPSILON = 1e-4
"""Added to the mean square in normalisations."""


@jax.custom_vjp
def normalised_silu(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return silu(scale · x / √(mean x² + ε)), with the mean over the last axis.

    The gradient is written out: derived by JAX, it is half as many kernels again, and a scan stores five arrays for it.

    Args:
        x: `[..., *shape]`.
        scale: `shape`.
    """
    return jax.nn.silu(x * _inverse_size(x) * jnp.broadcast_to(scale, x.shape))


def _inverse_size(x: jax.Array) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + EPSILON)


def _forwards(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return normalised_silu(x, scale), (x, scale)


def _backwards(given: tuple[jax.Array, jax.Array], change: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradients by x and by scale.

    n = x / √(mean x² + ε),  u = scale · n,  d = σ(u) (1 + u (1 − σ(u))) · change
    ∂x = (scale d − n mean(scale d n)) / √(mean x² + ε),  ∂scale = Σ d n
    """
    x, scale = given
    wide, inverse = jnp.broadcast_to(scale, x.shape), _inverse_size(x)
    n = x * inverse
    u = n * wide
    s = jax.nn.sigmoid(u)
    d = change * s * (1 + u * (1 - s))
    by_n = d * wide
    by_x = inverse * (by_n - n * jnp.mean(by_n * n, -1, keepdims=True))
    return by_x, jnp.sum(d * n, tuple(range(x.ndim - scale.ndim)))


normalised_silu.defvjp(_forwards, _backwards)


class Dense(nnx.Module):
    """A linear layer, normalised by its root mean square, then SiLU."""

    def __init__(self, in_features: int, out_features: int, *, rngs: nnx.Rngs) -> None:
        self.out_features = out_features
        self.linear = nnx.Linear(in_features, out_features, rngs=rngs)
        self.norm = nnx.RMSNorm(out_features, epsilon=EPSILON, rngs=rngs)

    def __call__(self, *inputs: jax.Array) -> jax.Array:
        """Map `[..., in_features]` to `[..., out_features]`; several inputs are put together along the first axis."""
        products = [self.linear(x) for x in inputs]
        return self.activated(products[0] if len(inputs) == 1 else jnp.concatenate(products))

    def activated(self, x: jax.Array) -> jax.Array:
        """Normalise and activate the linear layer's output `[..., out_features]`."""
        assert self.norm.scale is not None
        return normalised_silu(x, self.norm.scale[...])


class BlockLinear(nnx.Module):
    """`G` linear layers side by side, `[..., G, in_features]` to `[..., G, out_features]`."""

    def __init__(self, blocks: int, in_features: int, out_features: int, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.kernel = nnx.Param(init(rngs.params(), (blocks, in_features, out_features)))
        self.bias = nnx.Param(jnp.zeros((blocks, out_features)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map each block with its own layer."""
        product = jnp.einsum("...gi,gio->...go", x, self.kernel[...])
        return product + jnp.broadcast_to(self.bias[...], product.shape)


class BlockGRU(nnx.Module):
    """Gated recurrent units in `G` blocks, each with its part of the state `h` and with all of the input `x`.

    For each block, with its own weights and its own normalisation:

        y = silu(norm([h, x] W + b)),  r, n, z = y V + d
        h ← σ(z − 1) tanh(σ(r) n) + (1 − σ(z − 1)) h

    The −1 makes the unit keep most of its state at first.
    """

    def __init__(self, in_features: int, size: int, blocks: int, *, rngs: nnx.Rngs) -> None:
        self.blocks = blocks
        width = size // blocks
        self.hidden = BlockLinear(blocks, width + in_features, width, rngs=rngs)
        self.scale = nnx.Param(jnp.ones((blocks, width)))
        self.gates = BlockLinear(blocks, width, 3 * width, rngs=rngs)

    def __call__(self, h: jax.Array, x: jax.Array) -> jax.Array:
        """Return the next state `[..., size]`, given the state and an input `[..., in_features]`."""
        parts = h.reshape(*h.shape[:-1], self.blocks, -1)
        seen = jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], self.blocks, x.shape[-1]))
        y = self.hidden(jnp.concatenate([parts, seen], -1))
        y = normalised_silu(y, self.scale[...])
        reset, candidate, update = jnp.split(self.gates(y), 3, -1)
        update = jax.nn.sigmoid(update - 1)
        parts = update * jnp.tanh(jax.nn.sigmoid(reset) * candidate) + (1 - update) * parts
        return parts.reshape(h.shape)
