"""The entry point to hand-written kernels and rewritten programs; each can be turned off and falls back to plain JAX.

| name | what it does | where |
|---|---|---|
| drawn_ahead | computes a rollout's random numbers before its loop, see `lehr.kernels.drawn_ahead` | CPU |
| mlp | evaluates a small actor and critic as one GPU kernel, see `lehr.kernels.mlp` | CUDA, on each device |
| mlp_cpu | differentiates a small actor and critic by hand, see `lehr.kernels.mlp_cpu` | CPU |
| mlp_loss | differentiates a loss on such an actor and critic as one GPU kernel, see `lehr.kernels.mlp_loss` | CUDA |
| row_loop | runs all steps of a rollout as one GPU kernel, see `lehr.kernels.row_loop` | CUDA, on each device |
| written_out | writes out small gathers and products of a physics step, see `lehr.kernels.written_out` | everywhere |

Only `is_chosen` decides whether a kernel is used: code outside this package calls `evaluate_mlps`, `value_and_grad`,
`scan` or `rewrite` without checking. A kernel that JAX cannot compile is replaced by plain JAX, with one warning on the
logger "lehr".

The environment variable LEHR_KERNELS turns kernels off: `off` turns off all of them, `no-mlp` or
`no-mlp,no-written_out` the named ones. It is read whenever a program is traced.
"""

import contextlib
import contextvars
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.flatten_util import ravel_pytree

from lehr.errors import InputError, closest
from lehr.kernels import drawn_ahead, mlp, mlp_cpu, mlp_loss, row_loop
from lehr.kernels import written_out as rewriting
from lehr.kernels.members import together
from lehr.kernels.row_program import Unsupported
from lehr.maths.optimise import Packed
from lehr.types import PyTree

__all__ = ["evaluate_mlps", "plain", "rewrite", "scan", "switched_off", "together", "value_and_grad"]

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
    "mlp": Kernel(mlp.is_able, mlp.fits, can_be_split=False),
    "mlp_cpu": Kernel(mlp_cpu.is_able, mlp_cpu.fits, can_be_split=True),
    "mlp_loss": Kernel(mlp.is_able, mlp_loss.fits, can_be_split=False),
    "row_loop": Kernel(row_loop.is_able, row_loop.fits, can_be_split=False),
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
    x: jax.Array, layers: Sequence[mlp.Layer], heads: Mapping[int, mlp.Layer], activation: Any
) -> tuple[jax.Array, ...] | None:
    """Return the outputs `[..., O]`, float32, of MLPs with separate heads; `None` if plain JAX should compute them.

    Args:
        x: `[..., F]`, the input of all MLPs.
        layers: kernels `[M, i, o]` and biases `[M, o]` of the hidden layers of M MLPs, with an activation after each.
        heads: kernel `[i, O]` and bias `[O]` of the last layer, by the index of each MLP to evaluate.
        activation: its name; a user's own function is left to plain JAX.
    """
    for name, evaluate in (("mlp", mlp.evaluate), ("mlp_cpu", mlp_cpu.evaluate)):
        if not is_chosen(name, x, layers, heads, activation):
            continue
        if name == "mlp" and (intercept := mlp_loss.interceptor()):
            return intercept(x, layers, heads, activation)
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


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Trace plain JAX in this scope, for a program that is run elsewhere."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def rewrite(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the same function of positional arguments, rewritten when traced; see `lehr.kernels.written_out`."""
    rewritten = rewriting.written_out(function)

    @functools.wraps(function)
    def call(*arguments: PyTree) -> PyTree:
        if not is_chosen("written_out", *arguments):
            return function(*arguments)
        return _tried("written_out", lambda: rewritten(*arguments), lambda: function(*arguments))

    return call


def switched_off() -> frozenset[str]:
    """Return the kernels that environment variables turn off."""
    older = {"mlp"} if os.environ.get("LEHR_FUSED") == "off" else set()  # the old name of the switch
    return _parse(os.environ.get(VARIABLE, "")) | older


@functools.cache
def _parse(text: str) -> frozenset[str]:
    """Return the kernels that a text such as `no-mlp,no-written_out` turns off.

    >>> sorted(_parse("off")), sorted(_parse("no-mlp")), sorted(_parse(""))
    (['drawn_ahead', 'mlp', 'mlp_cpu', 'mlp_loss', 'row_loop', 'written_out'], ['mlp'], [])
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
