"""The one door to hand-written kernels and to rewritten programs; each has a switch, and plain JAX to fall back on.

| name | what it does | where |
|---|---|---|
| mlp | evaluates a small actor and critic as one GPU kernel, see `lehr.kernels.mlp` | CUDA, one device |
| written_out | writes out small gathers and products of a physics step, see `lehr.kernels.written_out` | everywhere |

`is_chosen` decides, and nothing else does: code outside this package calls `evaluate_mlps` or `rewrite` and does not
ask whether a kernel is on. A kernel that JAX refuses is replaced by plain JAX, with one warning on the logger "lehr".

The environment variable LEHR_KERNELS turns kernels off: `off` all of them, `no-mlp` or `no-mlp,no-written_out` those
that are named. It is read whenever a program is traced.
"""

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from lehr.errors import InputError, closest
from lehr.kernels import mlp
from lehr.kernels import written_out as rewriting
from lehr.types import PyTree

VARIABLE = "LEHR_KERNELS"


@dataclass(frozen=True)
class Kernel:
    """What the choice of a kernel depends on, besides its switch."""

    is_able: Callable[[], bool]
    """Whether this JAX and its backend have what the kernel needs."""
    fits: Callable[..., bool]
    """Whether it suits these arguments."""
    can_be_split: bool
    """Whether XLA can split it over devices."""


KERNELS: dict[str, Kernel] = {
    "mlp": Kernel(mlp.is_able, mlp.fits, can_be_split=False),
    "written_out": Kernel(lambda: True, lambda *arguments: True, can_be_split=True),
}


def is_chosen(name: str, *arguments: PyTree) -> bool:
    """Whether a kernel is used: it is switched on, the backend is able, one device runs it, and its arguments fit."""
    kernel = KERNELS[name]
    return (
        name not in switched_off()
        and kernel.is_able()
        and (kernel.can_be_split or not _is_split(arguments))
        and kernel.fits(*arguments)
    )


def evaluate_mlps(
    x: jax.Array, layers: Sequence[mlp.Layer], heads: Mapping[int, mlp.Layer], activation: Any
) -> tuple[jax.Array, ...] | None:
    """The outputs `[..., O]` of MLPs with heads of their own, float32; `None` where plain JAX is to compute them.

    Args:
        x: `[..., F]`, the input of all.
        layers: kernels `[M, i, o]` and biases `[M, o]` of the hidden layers of M MLPs, an activation after each.
        heads: kernel `[i, O]` and bias `[O]` of the last layer, for each MLP to evaluate, under its number.
        activation: its name. One of the user's own is left to plain JAX.
    """
    if not is_chosen("mlp", x, layers, heads, activation):
        return None
    try:
        return mlp.evaluate(x, layers, heads, activation)
    except Exception as error:  # whatever a later JAX has against it
        _warn_once("mlp", error)
        return None


def rewrite(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The same function of positional arguments, written out where it is traced; see `lehr.kernels.written_out`."""
    rewritten = rewriting.written_out(function)

    @functools.wraps(function)
    def call(*arguments: PyTree) -> PyTree:
        if not is_chosen("written_out", *arguments):
            return function(*arguments)
        try:
            return rewritten(*arguments)
        except Exception as error:  # whatever it has not been written for
            failure = error
        outputs = function(*arguments)  # a mistake in the function itself is raised here, without a warning
        _warn_once("written_out", failure)
        return outputs

    return call


def switched_off() -> frozenset[str]:
    """The kernels that the environment variables turn off."""
    older = {"mlp"} if os.environ.get("LEHR_FUSED") == "off" else set()  # what the switch was called before
    return _parse(os.environ.get(VARIABLE, "")) | older


@functools.cache
def _parse(text: str) -> frozenset[str]:
    """The kernels that a text such as `no-mlp,no-written_out` turns off.

    >>> sorted(_parse("off")), sorted(_parse("no-mlp")), sorted(_parse(""))
    (['mlp', 'written_out'], ['mlp'], [])
    """
    meanings = {"off": set(KERNELS), **{f"no-{name}": {name} for name in KERNELS}}
    words = list(filter(None, map(str.strip, text.split(","))))
    for word in words:
        if word not in meanings:
            raise InputError(f"{VARIABLE} is {text!r}, of which {word!r} is unknown; {closest(word, meanings)}")
    return frozenset().union(*(meanings[word] for word in words))


def _is_split(arguments: PyTree) -> bool:
    """Whether the program being traced runs on several devices: a mesh of many is in scope, or an argument lies on one.

    How many devices the machine has does not matter: most programs use one of them.
    """
    types = [getattr(jax.typeof(x), "sharding", None) for x in jax.tree.leaves(arguments) if hasattr(x, "dtype")]
    meshes = [jax.sharding.get_abstract_mesh(), *(getattr(sharding, "mesh", None) for sharding in types)]
    return any(mesh is not None and mesh.size > 1 for mesh in meshes)


_warned: set[str] = set()


def _warn_once(name: str, error: Exception) -> None:
    if name not in _warned:
        _warned.add(name)
        reason = (str(error).strip().splitlines() or [""])[0]
        logging.getLogger("lehr").warning(
            "The kernel %s does not work here (%s: %s), so plain JAX is used, which gives the same results; "
            "%s=no-%s turns it off without this warning.",
            *(name, type(error).__name__, reason, VARIABLE, name),
        )
