"""Small MLPs on a CPU: plain products, with a gradient that is written by hand.

What JAX derives for the gradient of a kernel is a product over the rows of two arrays that lie row by row, and of two
networks at once. XLA's CPU backend has no fast path for it. Here the narrower array is transposed first, and each
network has its own products, which the backend hands to its library. (One core, gradient of a 64 × 64 actor and critic
with 4 inputs and 2 actions, of which derived and by hand: 52 and 49 µs for 128 rows, 870 and 780 µs for 2,048; for
rows in segments `[T, n]` derived products are slower still, 70 µs for 128 and 1.8 ms for 2,048.)

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
    """Return the outputs, and for each MLP the input and the derivative of the activation of each layer."""
    outputs, kept = [], []
    for index, head in enumerate(heads):
        inputs, pulls, y = [x], [], x
        for kernel, bias in layers:
            y, pull = jax.vjp(ACTIVATIONS[activation], _affine(y, kernel[index], bias[index]))
            inputs.append(y)
            pulls.append(pull)
        outputs.append(_affine(y, *head))
        kept.append((inputs, pulls))
    return tuple(outputs), (kept, layers, heads)


def _backward(activation: str, saved: Any, gradients: tuple[jax.Array, ...]) -> Any:
    """Return the gradients of the inputs, the hidden layers and the heads."""
    kept, layers, heads = saved
    of_x: list[jax.Array] = []
    of_layers: list[list[Layer]] = [[] for _ in layers]
    of_heads: list[Layer] = []
    for index, (head, (inputs, pulls), gradient) in enumerate(zip(heads, kept, gradients, strict=True)):
        of_heads.append(_of_layer(inputs[-1], gradient))
        gradient = _times_transposed(gradient, head[0])
        for number in reversed(range(len(layers))):
            (gradient,) = pulls[number](gradient)
            of_layers[number].append(_of_layer(inputs[number], gradient))
            gradient = _times_transposed(gradient, layers[number][0][index])
        of_x.append(gradient)
    stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *found) for found in of_layers]
    return functools.reduce(jnp.add, of_x), tuple(stacked), tuple(of_heads)


_mlps.defvjp(_forward, _backward)


def _affine(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    y = x @ kernel
    return y + jnp.broadcast_to(bias, y.shape)


def _times_transposed(gradient: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.dot_general(gradient, kernel, (((1,), (1,)), ((), ())))


def _of_layer(x: jax.Array, gradient: jax.Array) -> Layer:
    """Return the gradients of a layer's kernel and bias, from its inputs `[B, i]` and its outputs' gradient `[B, o]`.

    The barriers keep XLA from merging the transposes into the product. As a product, the sum over rows is faster too.
    """
    barrier = jax.lax.optimization_barrier
    is_narrow = x.shape[1] <= gradient.shape[1]
    kernel = barrier(x.T) @ gradient if is_narrow else barrier(barrier(gradient.T) @ x).T
    return kernel, (jnp.ones((1, len(gradient))) @ gradient)[0]
