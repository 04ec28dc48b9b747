"""Take out of a loop of gradient steps what need not be computed step by step.

On a GPU, a gradient step on a small minibatch takes as long as its launches. Gathering its rows, the statistics of its
advantages, arithmetic on coefficients and the metrics are most of them. Here

- the minibatches of all steps are gathered before the loop, see `gathers_ahead` in `lehr.kernels`;
- what does not depend on the step, such as arithmetic on coefficients, is computed before the loop (`scan`);
- what only the results of the steps need, such as metrics, is computed after the loop for all steps at once (`scan`):
  each step stores the few numbers that it follows from, as one row.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal

from lehr.kernels.members import members
from lehr.kernels.row_program import Unsupported
from lehr.types import PyTree

MOST_BYTES = 2**26
"""The most memory for the minibatches of all steps; 64 MiB. Measured to be faster for 4 and 8 MiB; large minibatches
take longer than their launches, and would be written and read once more."""
MOST_FIXED = 2**17
"""Larger arrays are computed in each step, where a kernel may not have to store them."""
MOST_STORED = 2**15
"""Larger arrays are not stored for what is computed after the loop."""
MOST_STORED_BYTES = 2**24
"""Nor are any but single numbers, if all steps and members would need more than 16 MiB."""
UNROLL, MOST_UNROLLED = 4, 100
"""Steps of few equations are put into the loop four at a time: slices, counters and stored rows of four are one kernel.
Longer ones would take longer to compile, and gain less."""


def is_able() -> bool:
    """Whether launches cost time: everywhere but on a CPU."""
    return jax.default_backend() != "cpu"


def is_small(data: PyTree, epochs: int) -> bool:
    """Whether `epochs` copies of the data are small enough; a population shares the launches between its members."""
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(data))
    return members() == 1 and size * epochs <= MOST_BYTES


def scan(body: Callable[[PyTree, PyTree], Any], start: PyTree, rows: PyTree) -> Any:
    """As `jax.lax.scan`, with all that can be computed before and after the loop.

    >>> def step(total, row):
    ...     return total + 2.0 * factor * row, {"root": jnp.sqrt(total)}
    >>> factor, rows = jnp.float32(0.5), jnp.array([1.0, 3.0, 5.0])
    >>> total, outputs = scan(step, jnp.float32(0), rows)
    >>> float(total), outputs["root"].tolist()
    (9.0, [0.0, 1.0, 2.0])
    """
    first = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)
    program, shape = jax.make_jaxpr(body, return_shape=True)(start, first)
    if program.effects:
        raise Unsupported("a step with side effects")
    jaxpr, carries = program.jaxpr, len(jax.tree.leaves(start))
    length = len(jax.tree.leaves(rows)[0])
    fixed: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    equations = _varying(jaxpr, fixed)
    parts = _Parts.of(equations, jaxpr.outvars, carries, fixed, MOST_STORED)
    if 4 * sum(map(_size, parts.stored)) * length * members() > MOST_STORED_BYTES:
        parts = _Parts.of(equations, jaxpr.outvars, carries, fixed, most=1)

    def in_loop(carry: Sequence[Any], row: Sequence[Any]) -> tuple[list[Any], Any]:
        values = {**fixed, **dict(zip(jaxpr.invars, [*carry, *row], strict=True))}
        _evaluate(parts.in_loop, values)
        stored = jnp.concatenate([values[one].reshape(-1) for one in parts.stored]) if parts.stored else ()
        return [_read(one, values) for one in jaxpr.outvars[:carries]], (stored, [values[one] for one in parts.whole])

    def after(stored: Any, whole: Sequence[Any]) -> list[Any]:
        values, begin = {**fixed, **dict(zip(parts.whole, whole, strict=True))}, 0
        for one in parts.stored:
            end = begin + math.prod(one.aval.shape)
            values[one], begin = stored[begin:end].reshape(one.aval.shape), end
        _evaluate(parts.after, values)
        return [_read(one, values) for one in jaxpr.outvars[carries:]]

    is_short = len(parts.in_loop) <= MOST_UNROLLED and length % UNROLL == 0 and members() == 1
    unroll = UNROLL if is_short else 1
    carry, found = jax.lax.scan(in_loop, jax.tree.leaves(start), jax.tree.leaves(rows), length=length, unroll=unroll)
    outputs = jax.vmap(after, axis_size=length)(*found)
    return jax.tree.unflatten(jax.tree.structure(shape), [*carry, *outputs])


@dataclass(frozen=True)
class _Parts:
    """What is left of the program of a step, in parts."""

    in_loop: list[JaxprEqn]
    after: list[JaxprEqn]
    stored: list[Any]
    """Values of a step that are needed after the loop: small float32 arrays, which are stored as one row."""
    whole: list[Any]
    """Other values that it returns."""

    @classmethod
    def of(
        cls, equations: Sequence[JaxprEqn], outputs: Sequence[Any], carries: int, fixed: Mapping[Any, Any], most: int
    ) -> "_Parts":
        """Divide equations whose first outputs are carried to the next step; at `most` so large arrays are stored."""
        free = set(fixed)  # known before the loop, or as cheap to compute again as to store
        for equation in equations:
            if free.issuperset(_variables(equation.invars)):
                free.update(equation.outvars)
        in_loop = _needed(equations, outputs[:carries])
        while True:
            later, more = _later(equations, in_loop, free, most)
            if not more:
                break
            in_loop |= _needed(equations, more)
        first = [one for one in equations if later.isdisjoint(one.outvars)]
        after = [one for one in equations if not (later | free).isdisjoint(one.outvars)]
        wanted = [*(one for equation in after for one in equation.invars), *outputs[carries:]]
        found = [one for one in dict.fromkeys(_variables(wanted)) if one not in later and one not in free]
        stored = [one for one in found if _is_storable(one, most)]
        return cls(first, after, stored, [one for one in found if not _is_storable(one, most)])


def _varying(jaxpr: Any, fixed: dict[Any, Any]) -> list[JaxprEqn]:
    """Compute what does not depend on the step, and add it to the fixed values; return the other equations."""
    used, found = _needed(jaxpr.eqns, jaxpr.outvars), []
    for equation in jaxpr.eqns:
        inputs = _variables(equation.invars)
        if used.isdisjoint(equation.outvars):
            continue
        if inputs and all(one in fixed for one in inputs) and max(map(_size, equation.outvars)) <= MOST_FIXED:
            _evaluate([equation], fixed)
        else:
            found.append(equation)
    return found


def _needed(equations: Sequence[JaxprEqn], outputs: Sequence[Any]) -> set[Any]:
    """These values, and all that they follow from."""
    found = set(_variables(outputs))
    for equation in reversed(equations):
        if not found.isdisjoint(equation.outvars):
            found.update(_variables(equation.invars))
    return found


def _later(equations: Sequence[JaxprEqn], in_loop: set[Any], free: set[Any], most: int) -> tuple[set[Any], list[Any]]:
    """The values that can be computed after the loop, and those of them that something in the loop needs after all."""
    later: set[Any] = set()
    for equation in equations:
        inputs = [one for one in _variables(equation.invars) if one not in free]
        if not inputs or not in_loop.isdisjoint(equation.outvars):
            continue
        if all(one in later or _is_storable(one, most) for one in inputs):
            later.update(equation.outvars)
        elif more := [one for one in inputs if one in later]:
            return later, more
    return later, []


def _variables(given: Sequence[Any]) -> list[Any]:
    return [one for one in given if not isinstance(one, Literal)]


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)


def _is_storable(variable: Any, most: int) -> bool:
    return variable.aval.dtype == jnp.float32 and _size(variable) <= most


def _read(variable: Any, values: Mapping[Any, Any]) -> Any:
    return variable.val if isinstance(variable, Literal) else values[variable]


def _evaluate(equations: Sequence[JaxprEqn], values: dict[Any, Any]) -> None:
    """Evaluate equations, adding their outputs to the values."""
    for equation in equations:
        inputs = [_read(one, values) for one in equation.invars]
        with equation.ctx.manager:  # settings such as the PRNG implementation
            found = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
        outputs = found if equation.primitive.multiple_results else [found]
        values.update(zip(equation.outvars, outputs, strict=True))
