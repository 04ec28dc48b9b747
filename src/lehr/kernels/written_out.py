"""Rewrite small gathers, scatters and products as slices, sums and concatenations.

Rigid-body physics is full of them: the parent of each link, the force on each link, a rotation by a 3 × 3 matrix. An
accelerator runs each in a separate kernel, with copies before and after, and launching a kernel takes longer than its
work. Written out, they are elementwise, and the compiler fuses them with the surrounding operations.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun

from lehr.kernels.equations import BY_NUMPY, scan_counts, type_of
from lehr.types import PyTree

MOST_PLACES = 64
"""Larger gathers and scatters are left unchanged."""

MOST_TERMS = 4
"""Products and sums over more terms are left unchanged."""


def written_out(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the same function of positional arguments, rewritten; sums and products may round differently.

    Gathers and scatters are written out if their indices do not depend on the arguments. Branches and `while` loops are
    left unchanged. `lehr.kernels.rewrite` adds a switch and a fallback.

    >>> function = written_out(lambda x: x[jnp.array([2, 0, 1, 2])] + jnp.zeros(4).at[jnp.array([1, 1])].add(x[:2]))
    >>> function(jnp.array([1.0, 2.0, 3.0])).tolist()
    [3.0, 4.0, 2.0, 3.0]
    """

    @functools.wraps(function)
    def call(*arguments: PyTree) -> PyTree:
        program, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        leaves = jax.tree.leaves(arguments)
        # Trace into a separate program first: a failure must leave nothing, such as a callback, in the outer one.
        rewritten = jax.make_jaxpr(lambda *leaves: _evaluate(program, leaves, [None] * len(leaves))[0])(*leaves)
        if (found := _types(rewritten)) != (wanted := _types(program)):
            raise TypeError(f"the program returns {wanted}, but {found} when written out")
        return jax.tree.unflatten(jax.tree.structure(shape), jaxpr_as_fun(rewritten)(*leaves))

    return call


def _types(program: ClosedJaxpr) -> list[tuple[Any, Any]]:
    """Return the shape and dtype of each output."""
    return [(getattr(kind, "shape", None), getattr(kind, "dtype", None)) for kind in program.out_avals]


def _evaluate(
    program: ClosedJaxpr, arguments: Sequence[Any], known_arguments: Sequence[np.ndarray | None]
) -> tuple[list[Any], list[np.ndarray | None]]:
    """Trace a program, written out; return its outputs, and their values where they are known at trace time.

    Args:
        program: the program.
        arguments: its arguments.
        known_arguments: their values if known at trace time, else `None`.
    """
    jaxpr, consts = program.jaxpr, program.consts
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    known_consts = [None if isinstance(value, jax.core.Tracer) else value for value in consts]
    known: dict[Any, np.ndarray] = {
        variable: np.asarray(value)
        for variable, value in zip([*jaxpr.constvars, *jaxpr.invars], [*known_consts, *known_arguments], strict=True)
        if value is not None and _may_be_index(variable)
    }

    def value_of(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    def known_of(variable: Any) -> np.ndarray | None:
        return np.asarray(variable.val) if isinstance(variable, Literal) else known.get(variable)

    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, [value_of(one) for one in equation.invars]
        known_inputs = [known_of(one) for one in equation.invars]
        with equation.ctx.manager:  # settings such as the PRNG implementation
            if name in _CALLS:  # inline it
                outputs, known_outputs = _evaluate(equation.params["jaxpr"], inputs, known_inputs)
            else:
                rewritten = _RULES[name](equation, inputs, known_inputs) if name in _RULES else None
                outputs = _as_it_is(equation, inputs) if rewritten is None else rewritten
                known_outputs = _at_once(equation, known_inputs)
        values.update(zip(equation.outvars, outputs, strict=True))
        for variable, value in zip(equation.outvars, known_outputs, strict=True):
            if value is not None and value.dtype == type_of(variable).dtype:
                known[variable] = value
    return [value_of(one) for one in jaxpr.outvars], [known_of(one) for one in jaxpr.outvars]


def _as_it_is(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    outputs = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def _at_once(equation: JaxprEqn, inputs: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Return an equation's outputs if they may be indices and are known at trace time; else `None` for each output."""
    name, outputs = equation.primitive.name, equation.outvars
    if any(x is None for x in inputs) or not all(map(_may_be_index, outputs)):
        return [None] * len(outputs)
    if name in _ELEMENTWISE:
        return [_ELEMENTWISE[name](*inputs)]
    if name in _WITH_PARAMETERS:
        return [_WITH_PARAMETERS[name](equation.params, *inputs)]
    if name in _BY_JAX:
        with jax.ensure_compile_time_eval():
            return [np.asarray(x) for x in _as_it_is(equation, inputs)]
    return [None] * len(outputs)


def _may_be_index(variable: Any) -> bool:
    """Whether a variable may be part of an index: a few integers or booleans."""
    kind = type_of(variable)
    dtype = getattr(kind, "dtype", None)  # a token has none
    is_whole = dtype == jnp.bool_ or (dtype is not None and jnp.issubdtype(dtype, jnp.integer))
    return is_whole and math.prod(kind.shape) <= MOST_PLACES


def _remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Remainder with the sign of x; modulo 0 it is x, as in XLA."""
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y))).astype(x.dtype)


_CALLS = "jit", "pjit"
_ELEMENTWISE: dict[str, Callable[..., np.ndarray]] = {**BY_NUMPY, "rem": _remainder}
"""Operations on indices before they are used, such as resolving negative ones."""

_WITH_PARAMETERS: dict[str, Callable[..., np.ndarray]] = {
    "select_n": lambda _, which, *cases: np.choose(which.astype(int), cases),
    "convert_element_type": lambda parameters, x: x.astype(parameters["new_dtype"]),
    "concatenate": lambda parameters, *parts: np.concatenate(parts, parameters["dimension"]),
    "squeeze": lambda parameters, x: np.squeeze(x, parameters["dimensions"]),
    "reshape": lambda parameters, x: x.reshape(parameters["new_sizes"]),
    "broadcast_in_dim": lambda parameters, x: np.broadcast_to(
        np.expand_dims(x, tuple(set(range(len(parameters["shape"]))) - set(parameters["broadcast_dimensions"]))),
        parameters["shape"],
    ),
}

_BY_JAX = {
    *("gather", "slice", "dynamic_slice", "split", "unstack", "stack", "tile", "transpose", "rev"),
    *("iota", "sort", "cumsum", "div", "clamp"),
}
"""Other operations on indices without side effects; JAX evaluates them at trace time."""


# Rewriting rules ------------------------------------------------------------------------------------------------------


def _scan(equation: JaxprEqn, inputs: Sequence[Any], known: Sequence[Any]) -> list[Any] | None:
    """Rewrite the body of a loop."""
    parameters, program = equation.params, equation.params["jaxpr"]
    if (counts := scan_counts(parameters)) is None:
        return None
    consts, carries = counts
    start, rows = inputs[consts : consts + carries], inputs[consts + carries :]
    told = [*known[:consts], *[None] * (len(inputs) - consts)]

    def body(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs, _ = _evaluate(program, [*inputs[:consts], *carry, *row], told)
        return outputs[:carries], outputs[carries:]

    options = {name: parameters[name] for name in ("length", "reverse", "unroll")}
    carry, outputs = jax.lax.scan(body, list(start), list(rows), **options)
    return [*carry, *outputs]


def _gather(equation: JaxprEqn, inputs: Sequence[Any], known: Sequence[Any]) -> list[Any] | None:
    """Rewrite `x[..., indices, ...]` on one axis as concatenated slices."""
    x, indices, numbers = inputs[0], known[1], equation.params["dimension_numbers"]
    if indices is None or numbers.operand_batching_dims or len(numbers.start_index_map) != 1:
        return None
    (axis,), shape = numbers.start_index_map, type_of(equation.outvars[0]).shape
    whole = tuple(1 if one == axis else size for one, size in enumerate(x.shape))
    if numbers.collapsed_slice_dims != (axis,) or equation.params["slice_sizes"] != whole:
        return None
    places = indices.ravel().astype(np.int64)  # small unsigned ones would wrap
    if not 0 < len(places) <= MOST_PLACES or not _are_inside(places, x.shape[axis]):
        return None
    batch = [one for one in range(len(shape)) if one not in numbers.offset_dims]
    if batch != list(range(axis, axis + len(batch))):
        return None
    return [_taken(x, places, axis).reshape(shape)]


def _scatter_add(equation: JaxprEqn, inputs: Sequence[Any], known: Sequence[Any]) -> list[Any] | None:
    """Rewrite `x.at[..., indices, ...].add(updates)` on one axis as one sum per place."""
    x, _, updates = inputs
    indices, numbers = known[1], equation.params["dimension_numbers"]
    if indices is None or numbers.operand_batching_dims or len(numbers.scatter_dims_to_operand_dims) != 1:
        return None
    (axis,) = numbers.scatter_dims_to_operand_dims
    places = indices.ravel().astype(np.int64)  # small unsigned ones would wrap
    if numbers.inserted_window_dims != (axis,) or len(places) > MOST_PLACES or not 0 < x.shape[axis] <= MOST_PLACES:
        return None
    window = [updates.shape[one] for one in numbers.update_window_dims]
    if window != [size for one, size in enumerate(x.shape) if one != axis]:
        return None
    drops = equation.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    if not (drops or _are_inside(places, x.shape[axis])):
        return None
    batch = [one for one in range(updates.ndim) if one not in numbers.update_window_dims]
    if batch != list(range(axis, axis + len(batch))):
        return None
    updates = updates.reshape(*x.shape[:axis], len(places), *x.shape[axis + 1 :])
    pieces = []
    for place in range(x.shape[axis]):
        piece = _piece(x, place, 1, axis)
        for one in np.flatnonzero(places == place):
            piece = piece + _piece(updates, int(one), 1, axis)
        pieces.append(piece)
    return [jnp.concatenate(pieces, axis)]


def _product(equation: JaxprEqn, inputs: Sequence[Any], known: Sequence[Any]) -> list[Any] | None:
    """Rewrite a product over a few elements, with a vector or a small matrix on one side, as a sum of its terms."""
    (over, batch), out = equation.params["dimension_numbers"], type_of(equation.outvars[0])
    if jnp.issubdtype(out.dtype, jnp.floating) and jnp.finfo(out.dtype).bits < 32:
        return None  # a matrix product accumulates with more bits than a sum of its terms would
    sides = list(zip(map(jnp.asarray, inputs), over, batch, strict=True))
    free = [[one for one in range(x.ndim) if one not in (*gone, *shared)] for x, gone, shared in sides]
    sizes = [[x.shape[one] for one in left] for (x, _, _), left in zip(sides, free, strict=True)]
    terms = math.prod(sides[0][0].shape[one] for one in over[0])
    if not 0 < terms <= MOST_TERMS or min(map(math.prod, sizes)) > MOST_TERMS:
        return None
    aligned = []  # both as [batch, free of the first, free of the second, terms], with 1 for the other side's axes
    for number, ((x, gone, shared), own) in enumerate(zip(sides, free, strict=True)):
        own_sizes = [[size if number == whose else 1 for size in sizes[whose]] for whose in range(2)]
        x = jnp.transpose(x, (*shared, *own, *gone)).astype(out.dtype)
        aligned.append(x.reshape(*x.shape[: len(shared)], *own_sizes[0], *own_sizes[1], terms))
    return [_added(aligned[0][..., one] * aligned[1][..., one] for one in range(terms))]


def _sum(equation: JaxprEqn, inputs: Sequence[Any], known: Sequence[Any]) -> list[Any] | None:
    """Rewrite a sum over one short axis as a sum of slices."""
    (x,), axes = inputs, equation.params["axes"]
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32:
        return None
    if len(axes) != 1 or not 0 < x.shape[axes[0]] <= MOST_TERMS:
        return None
    return [_added(jax.lax.index_in_dim(x, one, axes[0], keepdims=False) for one in range(x.shape[axes[0]]))]


def _added(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)


def _are_inside(places: np.ndarray, size: int) -> bool:
    """Whether all indices are within the axis; others follow special rules."""
    return bool(np.all((places >= 0) & (places < size)))


def _taken(x: jax.Array, places: np.ndarray, axis: int) -> jax.Array:
    """Return `x` at these indices of an axis, with one slice per run of consecutive indices."""
    starts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1), len(places)]
    pieces = [_piece(x, int(places[begin]), end - begin, axis) for begin, end in itertools.pairwise(starts)]
    return jnp.concatenate(pieces, axis) if len(pieces) > 1 else pieces[0]


def _piece(x: jax.Array, begin: int, length: int, axis: int) -> jax.Array:
    return jax.lax.slice_in_dim(x, begin, begin + int(length), axis=axis)


_RULES: dict[str, Callable[[JaxprEqn, Sequence[Any], Sequence[Any]], list[Any] | None]] = {
    "scan": _scan,
    "gather": _gather,
    "scatter-add": _scatter_add,
    "dot_general": _product,
    "reduce_sum": _sum,
}
