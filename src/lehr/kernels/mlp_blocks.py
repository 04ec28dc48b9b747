"""One block of rows through a small MLP and back: the arithmetic that the GPU programs share.

Products of tanh networks have operands in float16, which has the 11 significant bits of TF32. The matrix units take
float16 from shared memory in either order, whereas TF32 has to be transposed for the gradients of weights, which takes
longer than all products together. What float16 lacks is range:

- activations are at most 1;
- weights of hidden layers must be below 22,000, beyond which outputs are not finite; those of the last layer, whose
  outputs may be large, are multiplied by a power of two, and the outputs divided by it;
- the derivatives of a block are multiplied by a power of two, such that no product of them with the weights exceeds the
  range, and the gradients are divided by it; inputs likewise, for the gradients of the first layer;
- the products of the inputs with the first layer are in TF32.

Other activations have no bounds, so their products are in TF32.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from lehr.kernels.mlp_plan import Plan, padded, triton

NARROW = 64
"""The gradient of a layer with fewer inputs than this is computed transposed, to suit the matrix units."""
OPERAND: Any = jnp.float16
"""The type of operands; only tests change it."""
TARGET = 14
"""Blocks are scaled to numbers below 2 ** (TARGET + 1)."""
FAR = 100
"""Nothing is multiplied by more than 2 ** FAR."""


def _gelu_derivative(z: jax.Array, y: jax.Array) -> jax.Array:
    return jax.jvp(jax.nn.gelu, (z,), (jnp.ones_like(z),))[1]


def _silu_derivative(z: jax.Array, y: jax.Array) -> jax.Array:
    gate = jax.nn.sigmoid(z)
    return gate * (1.0 + z * (1.0 - gate))


_Activation: TypeAlias = tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array, jax.Array], jax.Array]]
"""y = f(z), and f'(z) from z and y. A derivative that only uses y keeps z out of the registers."""

ACTIVATIONS: dict[str, _Activation] = {
    "tanh": (jnp.tanh, lambda z, y: 1.0 - y * y),
    "relu": (lambda z: jnp.maximum(z, 0.0), lambda z, y: jnp.where(y > 0.0, 1.0, 0.0)),
    "gelu": (jax.nn.gelu, _gelu_derivative),
    "silu": (jax.nn.silu, _silu_derivative),
    "elu": (jax.nn.elu, lambda z, y: jnp.where(y > 0.0, 1.0, y + 1.0)),
}
"""All of them have f(0) = 0: the padding stays zero from layer to layer."""

RATE = 2.8853900817779268
"""2 / log(2): tanh(z) = 1 - 2 / (1 + 2 ** (RATE z))."""
_TANH = """{
    .reg .f32 t;
    ex2.approx.ftz.f32 t, $1;
    add.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 t, t;
    fma.rn.f32 $0, t, 0fC0000000, 0f3F800000;
}"""
"""1 - 2 / (1 + 2 ** x), with an absolute error below 1e-6 and no branch."""
_TWO_TANHS = """{
    .reg .f32 t, u, r;
    min.NaN.f32 t, $2, 0f42700000;
    min.NaN.f32 u, $3, 0f42700000;
    ex2.approx.ftz.f32 t, t;
    ex2.approx.ftz.f32 u, u;
    add.f32 t, t, 0f3F800000;
    add.f32 u, u, 0f3F800000;
    mul.f32 r, t, u;
    rcp.approx.ftz.f32 r, r;
    mul.f32 u, u, r;
    mul.f32 t, t, r;
    fma.rn.f32 $0, u, 0fC0000000, 0f3F800000;
    fma.rn.f32 $1, t, 0fC0000000, 0f3F800000;
}"""
"""The same of two numbers with one reciprocal, as 1 / t = u / (t u), which does not overflow with exponents up to 60.
These are more instructions, but fewer of those for which a processor has few units."""
_SLOPED = "{ .reg .f32 t; neg.f32 t, $2; fma.rn.f32 t, t, $2, 0f3F800000; mul.f32 $0, $1, t; }"
"""d (1 - y^2), which is not contracted like this otherwise."""


def activate(plan: Plan, z: jax.Array, *, in_pairs: bool = False) -> jax.Array:
    """The activation of a plan; in float16 of z / RATE."""
    if not plan.is_half:
        return ACTIVATIONS[plan.activation][0](z)
    if plan.interpret:
        return 1.0 - 2.0 / (1.0 + jnp.exp2(z))
    return _assembled(_TWO_TANHS, "=&f,=&f,f,f", 2, z) if in_pairs else _assembled(_TANH, "=f,f", 1, z)


def _sloped(plan: Plan, d: jax.Array, y: jax.Array) -> jax.Array:
    """From the derivatives by tanh's values y, those by its arguments."""
    return d * (1.0 - y * y) if plan.interpret else _assembled(_SLOPED, "=f,f,f", 1, d, y)


def _assembled(text: str, constraints: str, at_once: int, *arguments: jax.Array) -> jax.Array:
    (found,) = triton.elementwise_inline_asm(
        text,
        args=arguments,
        constraints=constraints,
        pack=at_once,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arguments[0].shape, jnp.float32)],
    )
    return found


def dot(plan: Plan, a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Multiply two matrices over one axis of each."""
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, axes, precision=plan.precision, preferred_element_type=jnp.float32)


def half(plan: Plan, x: jax.Array) -> jax.Array:
    """What is in range, as an operand of products."""
    return x.astype(OPERAND) if plan.is_half else x


class Weights(NamedTuple):
    """A network, as a program holds it."""

    first: jax.Array
    """The kernel of the first layer."""
    kernels: list[jax.Array]
    """Of the other layers, as operands."""
    biases: list[jax.Array]
    """`[o]` each; in float16, if there is room, as in `_tile` for hidden layers, the first one within its kernel."""
    reach: Any
    """How many times larger than those of the outputs the derivatives of any layer can be; `None` in TF32."""
    head_scale: Any
    """The power of two that the last kernel is multiplied by; `None` in TF32."""

    @staticmethod
    def of(plan: Plan, layers: Sequence[tuple[jax.Array, jax.Array]]) -> "Weights":
        """Prepare layers, padded with zeros."""
        (first, _), *others = layers
        biases = [bias for _, bias in layers]
        kernels = [kernel for kernel, _ in others]
        if not plan.is_half:
            return Weights(first, kernels, biases, None, None)
        *hidden, head = kernels
        head_scale = _scale(_largest(head), 0)
        hidden = [kernel * RATE for kernel in hidden]
        reach = one = jnp.float32(2.0 * head.shape[1])
        for kernel in hidden[::-1]:
            one = one * (_largest(kernel) * kernel.shape[1])
            reach = jnp.maximum(reach, one)
        kernels = [half(plan, kernel) for kernel in (*hidden, head * head_scale)]
        biases = [*(bias * RATE for bias in biases[:-1]), biases[-1]]
        first = first * RATE
        if plan.has_spare_input:
            biases = [*(_tile(plan, bias) for bias in biases[:-1]), biases[-1]]
            first = first + biases[0]
        return Weights(first, kernels, biases, reach, head_scale)


def _largest(matrix: jax.Array) -> jax.Array:
    """The largest magnitude. Along the first axis first: a thread holds parts of few columns."""
    return jnp.max(jnp.max(jnp.abs(matrix), axis=0))


def _tile(plan: Plan, bias: jax.Array) -> jax.Array:
    """A matrix `[F, o]` whose product with inputs that have a column of ones is the bias."""
    row = lax.broadcasted_iota(jnp.int32, (padded(plan.inputs), *bias.shape), 0)
    return jnp.where(row == plan.inputs, bias[None, :], 0.0)


class Pass(NamedTuple):
    """A block of rows, forward."""

    x: jax.Array
    before: list[jax.Array]
    """Of each hidden layer, before its activation."""
    after: list[jax.Array]
    outputs: Any
    """`[B, O]`, or `None` if not wanted."""


def forward_block(
    plan: Plan, weights: Weights, x: jax.Array, *, wants_outputs: bool = True, is_alone: bool = False
) -> Pass:
    """Evaluate the network.

    Args:
        plan: sizes and tuning.
        weights: the network.
        x: a block of inputs `[B, F]`.
        wants_outputs: whether to evaluate the last layer.
        is_alone: whether the program does nothing else, so that its activations take most of the time.
    """
    before: list[jax.Array] = []
    after: list[jax.Array] = []
    if plan.is_half and plan.has_spare_input:
        x = jnp.where(_is_spare(plan, x, 1), 1.0, x)
    y, kernel = x, weights.first
    for bias, following in zip(weights.biases, weights.kernels, strict=False):
        z = dot(plan, y, kernel)
        if not (plan.is_half and plan.has_spare_input):
            z += bias[None, :]
        elif before:  # a sum with the bias itself makes Triton compute the activation twice, in two layouts
            z += dot(plan, x, bias)
        before.append(z)
        after.append(activate(plan, z, in_pairs=is_alone))
        y, kernel = half(plan, after[-1]), following
    if not wants_outputs:
        return Pass(x, before, after, None)
    outputs = dot(plan, y, kernel)
    if plan.is_half:
        outputs *= _inverse(weights.head_scale)
    return Pass(x, before, after, outputs + weights.biases[-1][None, :])


class Sums(NamedTuple):
    """The gradients of a program's weights, of the blocks so far."""

    kernels: list[jax.Array]
    """In the shapes of `gradient_shape`."""
    biases: list[jax.Array]
    """`[o]` each; in float16 as `_backward_half` sums them up."""
    scales: tuple[jax.Array, ...]
    """By what inputs and derivatives are multiplied in these sums, in float16."""


def no_sums(plan: Plan, weights: Weights) -> Sums:
    """Zeros."""
    shapes = [bias.shape[-1:] for bias in weights.biases]
    if plan.is_half and plan.has_spare_input:
        shapes = [(), *((width, padded(plan.inputs)) for (width,) in shapes[1:])]
    if plan.is_half:
        shapes[-1] = (plan.backward_block_rows, *weights.biases[-1].shape)
    kernels = [gradient_shape(kernel.shape) for kernel in (weights.first, *weights.kernels)]
    scales = (jnp.float32(2.0**FAR),) * 2 if plan.is_half else ()
    return Sums([jnp.zeros(shape) for shape in kernels], [jnp.zeros(shape) for shape in shapes], scales)


def backward_block(plan: Plan, weights: Weights, forward: Pass, d: jax.Array, sums: Sums) -> tuple[Sums, jax.Array]:
    """Return the sums with a block added, and the derivatives by what the first layer adds up, `[B, o]`.

    Args:
        plan: sizes and tuning.
        weights: the network.
        forward: the block.
        d: the derivatives by the outputs `[B, O]`; zeros for rows that do not count.
        sums: of the blocks before.
    """
    return (_backward_half if plan.is_half else _backward)(plan, weights, forward, d, sums)


def _backward(plan: Plan, weights: Weights, forward: Pass, d: jax.Array, sums: Sums) -> tuple[Sums, jax.Array]:
    inputs, derivative = [forward.x, *forward.after], ACTIVATIONS[plan.activation][1]
    kernels, biases = list(sums.kernels), list(sums.biases)
    for number in reversed(range(len(kernels))):
        kernels[number] += kernel_gradient(plan, inputs[number], d)
        biases[number] += jnp.sum(d, axis=0)
        if number > 0:
            kernel = weights.kernels[number - 1]
            d = dot(plan, d, kernel, (1, 1)) * derivative(forward.before[number - 1], inputs[number])
    return Sums(kernels, biases, ()), d


def _backward_half(plan: Plan, weights: Weights, forward: Pass, d: jax.Array, sums: Sums) -> tuple[Sums, jax.Array]:
    """Products sum up biases too, if there is room for a column of ones among the inputs.

    Scales only decrease from block to block, and the sums so far are adapted to each, so that products add to them.
    """
    scales = _scale(jnp.max(jnp.abs(forward.x)), TARGET), _scale(jnp.max(jnp.abs(d)) * weights.reach, TARGET)
    x_scale, scale = map(jnp.minimum, sums.scales, scales)
    x_change, change = (new * _inverse(old) for new, old in zip((x_scale, scale), sums.scales, strict=True))
    x = forward.x * jnp.where(_is_spare(plan, forward.x, 1), 1.0, x_scale)
    inputs = [half(plan, y) for y in (x, *forward.after)]
    kernels, biases, last = list(sums.kernels), list(sums.biases), len(sums.kernels) - 1
    kernels[0] *= jnp.where(_is_spare(plan, kernels[0], _input_axis(plan)), 1.0, x_change)
    biases[-1] += d
    d = d * scale
    for number in reversed(range(last + 1)):
        operand = half(plan, d)
        kernels[number] = kernels[number] * change + kernel_gradient(plan, inputs[number], operand)
        if number < last and not plan.has_spare_input:
            biases[number] = biases[number] * change + jnp.sum(d, axis=0)
        elif 0 < number < last:
            biases[number] = biases[number] * change + dot(plan, operand, inputs[0], (0, 0))
        if number > 0:
            before = dot(plan, operand, weights.kernels[number - 1], (1, 1))
            d = _sloped(plan, before, forward.after[number - 1])
    back = _inverse(scale) * _inverse(weights.head_scale) * RATE**-last
    return Sums(kernels, biases, (x_scale, scale)), d * back


def _scale(largest: jax.Array, target: int) -> jax.Array:
    """The power of two that brings a number between 2 ** target and 2 ** (target + 1)."""
    power = lax.bitcast_convert_type(jnp.clip(largest, 2.0 ** (target - FAR), 2.0**FAR), jnp.int32) & 0x7F800000
    return 2.0**target * _inverse(lax.bitcast_convert_type(power, jnp.float32))


def _inverse(power: jax.Array) -> jax.Array:
    """Of a power of two."""
    return lax.bitcast_convert_type((254 << 23) - lax.bitcast_convert_type(power, jnp.int32), jnp.float32)


def _is_spare(plan: Plan, array: jax.Array, axis: int) -> jax.Array:
    """Where an array is in the column of ones among the inputs, which are one of its axes."""
    return lax.broadcasted_iota(jnp.int32, array.shape, axis) == plan.inputs


def _input_axis(plan: Plan) -> int:
    """Which axis of the gradient of the first kernel the inputs are."""
    return 1 if is_transposed(padded(plan.inputs)) else 0


def totals(plan: Plan, weights: Weights, sums: Sums) -> list[tuple[jax.Array, jax.Array]]:
    """The gradients of each layer: of its kernel, in the shape of `gradient_shape`, and of its bias, `[o]`."""
    if not plan.is_half:
        return list(zip(sums.kernels, sums.biases, strict=True))
    x_back, back = map(_inverse, sums.scales)
    # Derivatives went through the last kernel, which is scaled, and through hidden ones, which RATE is a factor of.
    through = back * _inverse(weights.head_scale)
    depth = len(sums.kernels) - 1
    factors = [*(through * RATE ** (number - depth + 1) for number in range(depth)), back]
    kernels = [kernel * factor for kernel, factor in zip(sums.kernels, factors, strict=True)]
    biases = [bias * factor for bias, factor in zip(sums.biases[:-1], factors, strict=False)]
    if plan.has_spare_input:
        axes = [_input_axis(plan)] + [1] * (depth - 1)
        biases = [
            jnp.sum(jnp.where(_is_spare(plan, part, axis), part, 0.0), axis=axis)
            for part, axis in zip([kernels[0], *biases[1:]], axes, strict=True)
        ]
        kernels[0] = jnp.where(_is_spare(plan, kernels[0], axes[0]), 0.0, kernels[0])
    kernels[0] *= x_back
    return list(zip(kernels, [*biases, jnp.sum(sums.biases[-1], axis=0)], strict=True))


def is_transposed(n_in: int) -> bool:
    """Whether the gradient of a kernel with so many inputs, padded, is computed transposed."""
    return n_in < NARROW


def gradient_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which the gradient of a kernel is computed."""
    return shape[::-1] if is_transposed(shape[0]) else shape


def kernel_gradient(plan: Plan, inputs: jax.Array, d: jax.Array) -> jax.Array:
    """Return the sum over rows of inputs ⊗ d, `[i, o]` or transposed."""
    if is_transposed(inputs.shape[1]):
        return dot(plan, d, inputs, (0, 0))
    return dot(plan, inputs, d, (0, 0))
