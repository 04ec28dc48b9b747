"""The entry point to hand-written kernels and rewritten programs; each can be turned off and falls back to plain JAX.

| name | what it does | where |
|---|---|---|
| drawn_ahead | computes a rollout's random numbers before its loop, see `lehr.kernels.drawn_ahead` | CPU |
| gated_scan | runs all steps of a MinGRU as one GPU kernel, see `lehr.kernels.gated_scan` | CUDA, on each device |
| mlp | evaluates a small actor and critic as one GPU kernel, see `lehr.kernels.mlp` | CUDA, on each device |
| mlp_cpu | differentiates a small actor and critic by hand, see `lehr.kernels.mlp_cpu` | CPU |
| mlp_loss | differentiates a loss on such an actor and critic as one GPU kernel, see `lehr.kernels.mlp_loss` | CUDA |
| mlp_tangent | differentiates such an actor in forward mode as one GPU kernel, see `lehr.kernels.mlp_tangent` | CUDA |
| recurrence | solves a linear recurrence over time in few passes, see `lehr.kernels.recurrence` | accelerators |
| row_loop | runs all steps of a rollout as one GPU kernel, see `lehr.kernels.row_loop` | CUDA, on each device |
| row_step | runs a whole step of physics as one GPU kernel, see `lehr.kernels.row_step` | CUDA, Hopper or later |
| segment_draw | draws segments by priority as one GPU kernel, see `lehr.kernels.segment_draw` | CUDA, on each device |
| steps_ahead | takes out of gradient steps what need not be in each of them, see `lehr.kernels.steps_ahead` | GPUs |
| wide_mlp | evaluates a wide actor and critic in few GPU kernels, see `lehr.kernels.wide_mlp` | CUDA, on each device |
| written_out | writes out small gathers and products of a physics step, see `lehr.kernels.written_out` | everywhere |

Only `is_chosen` decides whether a kernel is used: code outside this package calls `evaluate_mlps`, `value_and_grad`,
`linearise`, `linear_recurrence`, `scan`, `gated`, `draw_segments` or `rewrite` without checking. A kernel that JAX
cannot compile is replaced by plain JAX, with one warning on the logger "lehr".

The environment variable LEHR_KERNELS turns kernels off: `off` turns off all of them, `no-mlp` or
`no-mlp,no-written_out` the named ones. It is read whenever a program is traced.
"""

import contextvars
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from lehr.errors import InputError, closest
from lehr.kernels import (
    drawn_ahead,
    gated_scan,
    mlp,
    mlp_cpu,
    mlp_loss,
    mlp_tangent,
    recurrence,
    row_loop,
    row_step,
    segment_draw,
    steps_ahead,
    wide_mlp,
)
from lehr.kernels import written_out as rewriting
from lehr.kernels.lowered import load
from lehr.kernels.members import together
from lehr.kernels.row_program import Unsupported
from lehr.kernels.segment_draw import Draw, Drawn
from lehr.types import Packed, PyTree, check_same_shape, in_scope

__all__ = [
    "Draw",
    "draw_segments",
    "evaluate_mlps",
    "gated",
    "gathers_ahead",
    "gradient_steps",
    "linear_recurrence",
    "linearise",
    "load",
    "plain",
    "rewrite",
    "scan",
    "stepper",
    "switched_off",
    "together",
    "value_and_grad",
]

VARIABLE = "LEHR_KERNELS"


@dataclass(frozen=True)
class Kernel:
    """The conditions for using a kernel, besides its switch."""

    is_able: Callable[[], bool]
    """Whether the installed JAX and its backend support the kernel."""
    fits: Callable[..., bool]
    """Whether the kernel supports these arguments."""
    can_be_split: bool
    """Whether XLA can partition it over devices."""


KERNELS: dict[str, Kernel] = {
    "drawn_ahead": Kernel(drawn_ahead.is_able, drawn_ahead.fits, can_be_split=True),
    "gated_scan": Kernel(gated_scan.is_able, gated_scan.fits, can_be_split=False),
    "mlp": Kernel(mlp.is_able, mlp.fits, can_be_split=False),
    "mlp_cpu": Kernel(mlp_cpu.is_able, mlp_cpu.fits, can_be_split=True),
    "mlp_loss": Kernel(mlp.is_able, mlp_loss.fits, can_be_split=False),
    "mlp_tangent": Kernel(mlp.is_able, mlp_tangent.fits, can_be_split=False),
    "recurrence": Kernel(recurrence.is_able, lambda *arguments: True, can_be_split=True),
    "row_loop": Kernel(row_loop.is_able, row_loop.fits, can_be_split=False),
    "row_step": Kernel(row_step.is_able, row_step.fits, can_be_split=False),
    "segment_draw": Kernel(segment_draw.is_able, segment_draw.fits, can_be_split=False),
    "steps_ahead": Kernel(steps_ahead.is_able, lambda *arguments: True, can_be_split=True),
    "wide_mlp": Kernel(wide_mlp.is_able, wide_mlp.fits, can_be_split=False),
    "written_out": Kernel(lambda: True, lambda *arguments: True, can_be_split=True),
}


def is_chosen(name: str, *arguments: PyTree) -> bool:
    """Whether a kernel is used: it is not turned off, and supports the backend, the devices and the arguments."""
    kernel = KERNELS[name]
    return (
        not _plain.get()
        and name not in switched_off()
        and kernel.is_able()
        and (kernel.can_be_split or not _is_split(arguments))
        and kernel.fits(*arguments)
    )


def evaluate_mlps(
    x: jax.Array, layers: Sequence[mlp.Layer], heads: Mapping[int, mlp.Layer], activation: Any, dtype: Any = jnp.float32
) -> tuple[jax.Array, ...] | None:
    """Return the outputs `[..., O]`, float32, of MLPs with separate heads; `None` if plain JAX should compute them.

    Args:
        x: `[..., F]`, the input of all MLPs.
        layers: kernels `[M, i, o]` and biases `[M, o]` of the hidden layers of M MLPs, with an activation after each.
        heads: kernel `[i, O]` and bias `[O]` of the last layer, by the index of each MLP to evaluate.
        activation: its name; a user's own function is left to plain JAX.
        dtype: that of the hidden layers' computation.
    """
    wide: Callable[..., tuple[jax.Array, ...]] = functools.partial(wide_mlp.evaluate, dtype=dtype)
    for name, evaluate in (("mlp", mlp.evaluate), ("wide_mlp", wide), ("mlp_cpu", mlp_cpu.evaluate)):
        given = (jnp.dtype(dtype),) if name == "wide_mlp" else ()
        if (not given and dtype != jnp.float32) or not is_chosen(name, x, layers, heads, activation, *given):
            continue
        if name == "mlp" and (intercept := mlp_loss.interceptor()):
            return intercept(x, layers, heads, activation)
        if name == "mlp":
            mlp_tangent.note(is_chosen("mlp_tangent", x, layers, heads, activation))
            if mlp_tangent.is_forward_mode():
                return mlp_tangent.evaluate(x, layers, heads, activation)
        try:
            return evaluate(x, layers, heads, activation)
        except Exception as error:  # any error that another JAX version may raise
            _warn_once(name, error)
    return None


def value_and_grad(
    loss: mlp_loss.Loss, packed: PyTree, unpack: Callable[[PyTree], PyTree], by_rows: mlp_loss.Loss | None = None
) -> tuple[tuple[jax.Array, PyTree], Packed | PyTree]:
    """As `jax.value_and_grad(loss, has_aux=True)(unpack(packed))`; the gradients may be packed like the parameters.

    Args:
        loss: a function of parameters that returns a total, float32 `[]`, and any other results.
        packed: the parameters, as the optimiser keeps them.
        unpack: the inverse of packing them.
        by_rows: the same loss for inputs with one batch axis, `[B, F]`, if those of `loss` have more.
    """

    def in_plain_jax(loss: mlp_loss.Loss = loss) -> Any:
        return jax.value_and_grad(loss, has_aux=True)(unpack(packed))

    def in_one_vector() -> mlp_loss.Found:
        (total, others), gradients = in_plain_jax(by_rows or loss)
        return mlp_loss.Found(total, others, ravel_pytree(gradients)[0], None)

    def by_kernel() -> Any:
        found = mlp_loss.value_and_grad(by_rows or loss, packed, unpack, in_one_vector)
        return (found.total, found.others), Packed(found.gradient, found.norm)

    if not is_chosen("mlp_loss", packed):
        return in_plain_jax()
    return _tried("mlp_loss", by_kernel, in_plain_jax)


def gathers_ahead(data: PyTree, epochs: int) -> bool:
    """Whether to gather the minibatches of `epochs` passes over the data before the first gradient step."""
    return is_chosen("steps_ahead") and steps_ahead.is_small(data, epochs)


def draw_segments(draw: Draw, plain: Callable[[], Drawn]) -> Drawn:
    """Draw segments by priority, without replacement; `plain` does so in plain JAX."""
    if not is_chosen("segment_draw", draw):
        return plain()
    return _tried("segment_draw", lambda: segment_draw.draw_segments(draw, plain), plain)


def gradient_steps(body: Callable[[PyTree, PyTree], Any], start: PyTree, rows: PyTree) -> Any:
    """As `jax.lax.scan` over gradient steps."""

    def in_plain_jax() -> Any:
        return jax.lax.scan(body, start, rows)

    if not is_chosen("steps_ahead"):
        return in_plain_jax()
    return _tried("steps_ahead", lambda: steps_ahead.scan(body, start, rows), in_plain_jax)


def gated(carry: jax.Array, gates: jax.Array, bias: jax.Array, reset: jax.Array) -> jax.Array:
    """Return the states `[T, N, S]` of a minimal gated recurrent unit; arguments as in `gated_scan.unroll`."""
    given = carry, gates, bias, reset
    if not is_chosen("gated_scan", *given):
        return gated_scan.plain(*given)
    return _tried("gated_scan", lambda: gated_scan.unroll(*given), lambda: gated_scan.plain(*given))


def linear_recurrence(decay: jax.Array, increment: jax.Array, *, reverse: bool = True) -> jax.Array:
    """Solve x_t = decay_t · x_{t+1} + increment_t along the first axis, with x_T = 0.

    Args:
        decay: `[T, ...]`.
        increment: `[T, ...]`; the result has its dtype.
        reverse: solve from the last row to the first; `False` solves x_t = decay_t · x_{t−1} + increment_t from
            x_{−1} = 0.

    >>> linear_recurrence(jnp.array([0.5, 0.5, 0.5]), jnp.array([1.0, 0.0, 8.0])).tolist()
    [3.0, 4.0, 8.0]
    """
    check_same_shape(decay=decay, increment=increment)
    given = decay.astype(increment.dtype), increment
    plain, in_strides = (functools.partial(f, reverse=reverse) for f in (recurrence.plain, recurrence.in_strides))
    if not is_chosen("recurrence", *given):
        return plain(*given)
    # A program for the processor of a machine with a GPU is traced with the GPU as the default.
    return jax.lax.platform_dependent(*given, cpu=plain, default=in_strides)


class Linear(NamedTuple):
    """A function at a point, and its Jacobian J there."""

    value: PyTree
    forward: Callable[[PyTree], PyTree]
    """v ↦ J v."""
    transposed: Callable[[PyTree], PyTree]
    """u ↦ Jᵀ u."""
    function: Callable[[PyTree], PyTree]
    """The function with which all of them were computed, whose values elsewhere are rounded alike."""


def linearise(
    function: Callable[[PyTree], PyTree], point: PyTree, in_forward_mode: Callable[[PyTree], PyTree]
) -> Linear:
    """Return a function's value at a point, and products with its Jacobian there.

    Args:
        function: maps parameters to outputs; if it evaluates small MLPs, their inputs do not depend on the parameters.
        point: the parameters.
        in_forward_mode: the same function, without kernels, which have no forward mode but for the one here.
    """

    def in_plain_jax() -> Linear:
        value, forward = jax.linearize(in_forward_mode, point)
        transposed = jax.linear_transpose(forward, point)
        return Linear(value, forward, lambda cotangent: transposed(cotangent)[0], in_forward_mode)

    def forward(tangent: PyTree) -> PyTree:
        with mlp_tangent.forward_mode():
            return jax.jvp(function, (point,), (tangent,))[1]

    def by_kernel() -> Linear:
        value, transposed = jax.vjp(function, point)
        jax.eval_shape(forward, point)  # an error is raised here, and not where the product is used
        return Linear(value, forward, lambda cotangent: transposed(cotangent)[0], function)

    if not mlp_tangent.supports(function, point):
        return in_plain_jax()
    return _tried("mlp_tangent", by_kernel, in_plain_jax)


def scan(body: Callable[[PyTree, PyTree], Any], start: PyTree, rows: PyTree, unroll: int = 1) -> Any:
    """As `jax.lax.scan` over the steps of a rollout, whose rows do not depend on each other."""

    def in_plain_jax() -> Any:
        return jax.lax.scan(body, start, rows, unroll=unroll)

    def as_one_kernel() -> Any:
        with plain():  # so that products are visible
            return row_loop.scan(body, start, rows, in_plain_jax)

    def ahead() -> Any:
        return drawn_ahead.scan(body, start, rows, unroll)

    for name, loop in (("row_loop", as_one_kernel), ("drawn_ahead", ahead)):
        if is_chosen(name, start, rows):
            return _tried(name, loop, in_plain_jax)
    return in_plain_jax()


_plain: contextvars.ContextVar[bool] = contextvars.ContextVar("plain", default=False)


def plain() -> AbstractContextManager[None]:
    """Trace plain JAX in this scope, for a program that is run elsewhere."""
    return in_scope(_plain, True)


def rewrite(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the same function of positional arguments, rewritten when traced; see `lehr.kernels.written_out`."""
    rewritten = rewriting.written_out(function)

    @functools.wraps(function)
    def call(*arguments: PyTree) -> PyTree:
        if not is_chosen("written_out", *arguments):
            return function(*arguments)
        return _tried("written_out", lambda: rewritten(*arguments), lambda: function(*arguments))

    return call


def stepper(
    function: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], kept: PyTree, action: PyTree
) -> row_step.Stepper:
    """Return a step of many environments with the form in which it keeps their states between steps.

    Args:
        function: a state and an action, to the next state and what is seen of it; leaves `[N, ...]`, and the rows do
            not depend on each other.
        kept: a state, or its shapes.
        action: an action, or its shapes.
    """

    def as_it_is() -> row_step.Stepper:
        return row_step.Stepper(lambda kept: kept, lambda kept: kept, function)

    if not is_chosen("row_step", kept, action):
        return as_it_is()
    return _tried("row_step", lambda: row_step.stepper(function, kept, action), as_it_is)


def switched_off() -> frozenset[str]:
    """Return the kernels that environment variables turn off."""
    older = {"mlp"} if os.environ.get("LEHR_FUSED") == "off" else set()  # the old name of the switch
    return _parse(os.environ.get(VARIABLE, "")) | older


@functools.cache
def _parse(text: str) -> frozenset[str]:
    """Return the kernels that a text such as `no-mlp,no-written_out` turns off.

    >>> _parse("off") == set(KERNELS), sorted(_parse("no-mlp,no-row_loop")), sorted(_parse(""))
    (True, ['mlp', 'row_loop'], [])
    """
    meanings = {"off": set(KERNELS), **{f"no-{name}": {name} for name in KERNELS}}
    words = list(filter(None, map(str.strip, text.split(","))))
    for word in words:
        if word not in meanings:
            raise InputError(f"{VARIABLE} is {text!r}, but {word!r} is unknown; {closest(word, meanings)}")
    return frozenset().union(*(meanings[word] for word in words))


def _is_split(arguments: PyTree) -> bool:
    """Whether the traced program runs on several devices: in the scope of a mesh, or with an argument on a mesh.

    The number of devices of the machine does not matter: most programs use one of them. Nor does a mesh under
    `jax.shard_map`, where the program is that of one device.
    """
    types = [getattr(jax.typeof(x), "sharding", None) for x in jax.tree.leaves(arguments) if hasattr(x, "dtype")]
    meshes = [jax.sharding.get_abstract_mesh(), *(getattr(sharding, "mesh", None) for sharding in types)]
    return any(mesh is not None and mesh.size > 1 and not mesh.are_all_axes_manual for mesh in meshes)


def _tried(name: str, by_kernel: Callable[[], Any], in_plain_jax: Callable[[], Any]) -> Any:
    """Return what a kernel computes, or plain JAX if it cannot."""
    failure: Exception | None = None
    try:
        return by_kernel()
    except Unsupported as reason:
        logging.getLogger("lehr").debug("The kernel %s does not fit here: %s.", name, reason)
    except Exception as error:  # any error that another JAX version may raise
        failure = error
    found = in_plain_jax()  # an error in the user's own code is raised here, without a warning
    if failure is not None:
        _warn_once(name, failure)
    return found


_warned: set[str] = set()


def _warn_once(name: str, error: Exception) -> None:
    if name not in _warned:
        _warned.add(name)
        reason = (str(error).strip().splitlines() or [""])[0]
        logging.getLogger("lehr").warning(
            "The kernel %s does not work here (%s: %s); using plain JAX instead, with the same results. "
            "Set %s=no-%s to turn the kernel off and hide this warning.",
            *(name, type(error).__name__, reason, VARIABLE, name),
        )
