"""Small MLPs on a CPU: plain products, with a gradient that is written by hand.

What JAX derives for the gradient of a kernel is a product over the rows of two arrays that lie row by row. XLA's CPU
backend has no fast path for it. Here the narrower array is transposed first. (One core, 64 × 64 actor and critic with 4
inputs, 2,048 rows in segments `[T, n]`: the gradients of the hidden kernels took 1.18 ms with their copies, and take
0.21 ms with their transposes.)

Only the first derivative in reverse mode is supported, as in `lehr.kernels.mlp`.

>>> layers = [(jnp.ones((1, 3, 8)), jnp.zeros((1, 8)))]
>>> (output,) = evaluate(jnp.ones((5, 3)), layers, {0: (jnp.ones((8, 2)), jnp.zeros(2))}, "relu")
>>> output.shape, float(output[0, 0])
((5, 2), 24.0)
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from lehr.kernels import mlp

Layer: TypeAlias = tuple[jax.Array, jax.Array]
"""A kernel and a bias."""

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "elu": jax.nn.elu,
}


def is_able() -> bool:
    """Whether programs are compiled for a CPU, and not to try out the GPU's kernels."""
    return jax.default_backend() == "cpu" and not mlp.INTERPRET


def fits(x: jax.Array, layers: Sequence[Layer], heads: Mapping[int, Layer], activation: Any) -> bool:
    """Whether all MLPs are evaluated, in float32, with a built-in activation; arguments as in `evaluate`.

    A single MLP is evaluated to act or to value a rollout, which needs no gradient.
    """
    is_known = isinstance(activation, str) and activation in ACTIVATIONS
    is_whole = list(heads) == list(range(len(layers[0][0])))
    return is_known and is_whole and all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((x, layers, heads)))


def evaluate(
    x: jax.Array, layers: Sequence[Layer], heads: Mapping[int, Layer], activation: str
) -> tuple[jax.Array, ...]:
    """Evaluate M MLPs of equal hidden sizes, each with its own last layer.

    Args:
        x: `[..., F]`.
        layers: `[M, i, o]` and `[M, o]` each.
        heads: `[i, O]` and `[O]` by the index of each MLP, in ascending order.
        activation: its name.

    Returns:
        The outputs of each head, `[..., O]`.
    """
    outputs = _mlps(activation, x.reshape(-1, x.shape[-1]), tuple(layers), tuple(heads.values()))
    return tuple(output.reshape(*x.shape[:-1], -1) for output in outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlps(activation: str, x: jax.Array, layers: tuple[Layer, ...], heads: tuple[Layer, ...]) -> tuple[jax.Array, ...]:
    return _forward(activation, x, layers, heads)[0]


def _forward(
    activation: str, x: jax.Array, layers: tuple[Layer, ...], heads: tuple[Layer, ...]
) -> tuple[tuple[jax.Array, ...], Any]:
    """Return the outputs, and the input and the derivative of the activation of each layer."""
    inputs, pulls = [jnp.broadcast_to(x, (len(heads), *x.shape))], []
    for kernel, bias in layers:
        z = jax.lax.batch_matmul(inputs[-1], kernel)
        y, pull = jax.vjp(ACTIVATIONS[activation], z + jnp.broadcast_to(bias[:, None], z.shape))
        inputs.append(y)
        pulls.append(pull)
    outputs = [y @ kernel for y, (kernel, _) in zip(inputs[-1], heads, strict=True)]
    outputs = [y + jnp.broadcast_to(bias, y.shape) for y, (_, bias) in zip(outputs, heads, strict=True)]
    return tuple(outputs), (inputs, pulls, layers, heads)


def _backward(activation: str, saved: Any, gradients: tuple[jax.Array, ...]) -> Any:
    """Return the gradients of the inputs, the hidden layers and the heads."""
    inputs, pulls, layers, heads = saved
    of_heads = [
        jax.tree.map(lambda leaf: leaf[0], _of_layer(y[None], gradient[None]))
        for y, gradient in zip(inputs[-1], gradients, strict=True)
    ]
    gradient = jnp.stack(
        [
            _times_transposed(gradient[None], kernel[None])[0]
            for gradient, (kernel, _) in zip(gradients, heads, strict=True)
        ]
    )
    of_layers = []
    for y, pull, (kernel, _) in zip(inputs[-2::-1], pulls[::-1], layers[::-1], strict=True):
        (gradient,) = pull(gradient)
        of_layers.append(_of_layer(y, gradient))
        gradient = _times_transposed(gradient, kernel)
    return jnp.sum(gradient, 0), tuple(of_layers[::-1]), tuple(of_heads)


_mlps.defvjp(_forward, _backward)


def _times_transposed(gradient: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return `[M, B, i]` from `[M, B, o]` and `[M, i, o]`."""
    return jax.lax.dot_general(gradient, kernel, (((2,), (2,)), ((0,), (0,))))


def _of_layer(x: jax.Array, gradient: jax.Array) -> Layer:
    """Return the gradients of kernels and biases, from inputs `[M, B, i]` and the gradients of outputs `[M, B, o]`.

    The barriers keep XLA from merging the transposes into the product.
    """
    barrier, bias = jax.lax.optimization_barrier, jnp.sum(gradient, 1)
    if x.shape[2] <= gradient.shape[2]:
        return jax.lax.batch_matmul(barrier(x.mT), gradient), bias
    return barrier(jax.lax.batch_matmul(barrier(gradient.mT), x)).mT, bias
