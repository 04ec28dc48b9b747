"""Feed-forward torsos map observations to features, over any leading axes `...`.

Weights are initialised orthogonal with gain √2, biases with zero. Parameters are float32; `dtype` is that of the
computation.
"""

import itertools
from collections.abc import Callable
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx

from lehr.errors import InputError

Activation: TypeAlias = Callable[[jax.Array], jax.Array]
"""An elementwise function."""

ACTIVATIONS: dict[str, Activation] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "elu": jax.nn.elu,
}

SMALL_IMAGE = ((16, 3, 1),)
"""Convolutions `(filters, width, stride)` for images below 36 pixels, such as MinAtar's 10 × 10."""

LARGE_IMAGE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Convolutions for images of at least 36 pixels, such as Atari's."""

HIDDEN_INIT = nnx.initializers.orthogonal(2**0.5)


class MLP(nnx.Module):
    """Dense layers `y = activation(x W + b)`, optionally with layer normalisation before the activation.

    Without hidden sizes, it is the identity.
    """

    def __init__(
        self,
        in_features: int,
        hidden_sizes: tuple[int, ...],
        *,
        activation: str | Activation = "tanh",
        layer_norm: bool = False,
        dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = (in_features, *hidden_sizes)
        self.activation = activation
        self.out_features = sizes[-1]
        self.layers = nnx.List(
            nnx.Linear(n_in, n_out, kernel_init=HIDDEN_INIT, dtype=dtype, rngs=rngs)
            for n_in, n_out in itertools.pairwise(sizes)
        )
        norms = hidden_sizes if layer_norm else ()
        self.norms = nnx.List(nnx.LayerNorm(size, dtype=dtype, rngs=rngs) for size in norms)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[..., in_features]` to `[..., out_features]`."""
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if self.norms:
                x = self.norms[index](x)
            x = activate(self.activation, x)
        return x


class CNN(nnx.Module):
    """Convolutions over an image, then dense layers over the result and an optional vector.

    Images are `[..., height, width, channels]`. Bytes are scaled to [0, 1] only here, so that they are stored as bytes;
    other images are used as they are.
    """

    def __init__(
        self,
        image_shape: tuple[int, ...],
        hidden_sizes: tuple[int, ...],
        *,
        vector_size: int = 0,
        convolutions: tuple[tuple[int, int, int], ...] | None = None,
        activation: str | Activation = "relu",
        layer_norm: bool = False,
        dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        height, width, channels = image_shape
        if convolutions is None:
            convolutions = SMALL_IMAGE if is_small(image_shape) else LARGE_IMAGE
        self.activation = activation
        self.dtype = dtype
        self.convolutions: nnx.List[nnx.Conv] = nnx.List()
        for filters, size, stride in convolutions:
            if min(height, width) < size:
                raise InputError(
                    f"An image of {image_shape[0]} × {image_shape[1]} is too small for the convolutions "
                    f"{convolutions}: give larger images, or use the torso 'mlp'."
                )
            self.convolutions.append(
                nnx.Conv(
                    channels,
                    filters,
                    (size, size),
                    strides=(stride, stride),
                    padding="VALID",
                    kernel_init=HIDDEN_INIT,
                    dtype=dtype,
                    rngs=rngs,
                )
            )
            height, width, channels = (height - size) // stride + 1, (width - size) // stride + 1, filters
        self.dense = MLP(
            height * width * channels + vector_size,
            hidden_sizes,
            activation=activation,
            layer_norm=layer_norm,
            dtype=dtype,
            rngs=rngs,
        )
        self.out_features = self.dense.out_features

    def __call__(self, image: jax.Array, vector: jax.Array | None = None) -> jax.Array:
        """Map an image `[..., H, W, C]` and a vector `[..., vector_size]` to `[..., out_features]`."""
        batch_shape = image.shape[:-3]
        x = to_float(image, self.dtype).reshape(-1, *image.shape[-3:])
        for convolution in self.convolutions:
            x = activate(self.activation, convolve(convolution, x))
        x = x.reshape(*batch_shape, -1)
        if vector is not None:
            x = jnp.concatenate([x, vector.astype(x.dtype)], -1)
        return self.dense(x)


def activate(activation: str | Activation, x: jax.Array) -> jax.Array:
    """Apply an activation, given by name or as a function."""
    return ACTIVATIONS[activation](x) if isinstance(activation, str) else activation(x)


def convolve(convolution: nnx.Conv, x: jax.Array) -> jax.Array:
    """Apply a convolution without padding, `[N, H, W, C]` to `[N, H', W', F]`.

    On a CPU, compute it as one product of patches and kernel, because XLA has no fast CPU convolution inside a scan,
    where training runs. (Four gradient steps on two cores: 8 instead of 188 ms for 256 MinAtar images, 310 instead of
    5,604 ms for 64 Atari images.)
    """
    if jax.default_backend() != "cpu":
        return convolution(x)
    kernel, bias = convolution.kernel[...].astype(x.dtype), cast(nnx.Param, convolution.bias)[...].astype(x.dtype)
    (height, width, channels, filters), stride = kernel.shape, cast(tuple[int, int], convolution.strides)[0]
    rows, columns = (x.shape[1] - height) // stride + 1, (x.shape[2] - width) // stride + 1
    shifted = [
        x[:, i : i + stride * (rows - 1) + 1 : stride, j : j + stride * (columns - 1) + 1 : stride]
        for i in range(height)
        for j in range(width)
    ]
    patches = jnp.concatenate(shifted, axis=-1).reshape(-1, height * width * channels)
    out = patches @ kernel.reshape(height * width * channels, filters)
    return (out + jnp.broadcast_to(bias, out.shape)).reshape(-1, rows, columns, filters)


def is_small(image_shape: tuple[int, ...]) -> bool:
    """Whether an image is too small for the convolutions of `LARGE_IMAGE`."""
    return min(image_shape[:2]) < 36


def to_float(x: jax.Array, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Convert numbers to floats; divide bytes, which are pixels, by 255."""
    return x.astype(dtype) / 255 if x.dtype == jnp.uint8 else x.astype(dtype)
