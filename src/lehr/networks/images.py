"""Convolutions that halve an image step by step, and their mirror image, which draws one from features."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from lehr.errors import InputError
from lehr.networks.block_gru import EPSILON
from lehr.networks.torsos import convolve

FACTORS = (2, 3, 4, 4)
"""Channels after each halving, in units of the depth."""

SMALLEST, LARGEST = 3, 16
"""The least and the most pixels of a side after all halvings."""


def halvings(height: int, width: int) -> int:
    """Return how often an image can be halved: at most four times, while its sides are even, to 3 pixels at least.

    >>> halvings(64, 64), halvings(10, 10), halvings(96, 64)
    (4, 1, 4)
    >>> halvings(84, 84)
    Traceback (most recent call last):
    lehr.errors.InputError: Images are 84 × 84 pixels and can be halved to 21 × 21, but must be halved at least once, \
to sides of 3 to 16 pixels; resize or pad them, to 64 × 64 for example.
    """
    count, (rows, columns) = 0, (height, width)
    while count < len(FACTORS) and rows % 2 == columns % 2 == 0 and min(rows, columns) >= 2 * SMALLEST:
        count, rows, columns = count + 1, rows // 2, columns // 2
    if count == 0 or max(rows, columns) > LARGEST:
        raise InputError(
            f"Images are {height} × {width} pixels and can be halved to {rows} × {columns}, but must be halved at "
            f"least once, to sides of {SMALLEST} to {LARGEST} pixels; resize or pad them, to 64 × 64 for example."
        )
    return count


class _Convolution(nnx.Module):
    """A convolution that keeps the size of the image; optionally normalised over channels, then SiLU."""

    def __init__(self, channels: int, filters: int, kernel: int, *, activate: bool, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(channels, filters, (kernel, kernel), strides=(1, 1), padding="VALID", rngs=rngs)
        self.around = ((kernel - 1) // 2, kernel // 2)
        self.norm = nnx.RMSNorm(filters, epsilon=EPSILON, rngs=rngs) if activate else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = convolve(self.conv, jnp.pad(x, ((0, 0), self.around, self.around, (0, 0))))
        return x if self.norm is None else jax.nn.silu(self.norm(x))


class ImageEncoder(nnx.Module):
    """Convolutions, each followed by the maximum of two by two pixels; the result is flattened."""

    def __init__(self, shape: tuple[int, int, int], depth: int, kernel: int, *, rngs: nnx.Rngs) -> None:
        height, width, channels = shape
        count = halvings(height, width)
        filters = [depth * factor for factor in FACTORS[:count]]
        inputs = [channels, *filters[:-1]]
        self.stages = nnx.List(
            _Convolution(n_in, n_out, kernel, activate=True, rngs=rngs)
            for n_in, n_out in zip(inputs, filters, strict=True)
        )
        self.out_features = (height >> count) * (width >> count) * filters[-1]

    def __call__(self, image: jax.Array) -> jax.Array:
        """Map `[..., H, W, C]`, from 0 to 1, to `[..., out_features]`."""
        x = image.reshape(-1, *image.shape[-3:]) - 0.5
        for stage in self.stages:
            x = stage(x)
            rows, height, width, channels = x.shape
            x = x.reshape(rows, height // 2, 2, width // 2, 2, channels).max((2, 4))
        return x.reshape(*image.shape[:-3], -1)


class ImageDecoder(nnx.Module):
    """A linear layer to a small image, then convolutions, before each of which every pixel is doubled in both ways."""

    def __init__(
        self, in_features: int, shape: tuple[int, int, int], depth: int, kernel: int, *, rngs: nnx.Rngs
    ) -> None:
        height, width, channels = shape
        count = halvings(height, width)
        filters = [depth * factor for factor in reversed(FACTORS[:count])]
        self.smallest = height >> count, width >> count, filters[0]
        self.linear = nnx.Linear(in_features, math.prod(self.smallest), rngs=rngs)
        self.norm = nnx.RMSNorm(filters[0], epsilon=EPSILON, rngs=rngs)
        outputs = [*filters[1:], channels]
        self.stages = nnx.List(
            _Convolution(n_in, n_out, kernel, activate=index < count - 1, rngs=rngs)
            for index, (n_in, n_out) in enumerate(zip(filters, outputs, strict=True))
        )

    def __call__(self, features: jax.Array) -> jax.Array:
        """Map `[..., in_features]` to an image `[..., H, W, C]`, before any squashing."""
        x = self.linear(features.reshape(-1, features.shape[-1])).reshape(-1, *self.smallest)
        x = jax.nn.silu(self.norm(x))
        for stage in self.stages:
            x = stage(jnp.repeat(jnp.repeat(x, 2, 1), 2, 2))
        return x.reshape(*features.shape[:-1], *x.shape[1:])
