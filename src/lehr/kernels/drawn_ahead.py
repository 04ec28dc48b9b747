"""Compute what a loop draws at random before the loop, for all of its steps at once.

A step of a rollout hashes random keys into the noise of its actions and into the first states of episodes that may
begin. XLA's CPU backend runs such a hash as a loop of many small operations, and calling them takes longer than their
work. All keys are known before the first step, so everything that follows from them alone is computed there, in large
operations. (One core, rollout of 128 steps of CartPole: 0.52 ms in the loop and 0.35 ms ahead for 4 environments.)

The program of a step is walked through twice in the same order, by `_walk`: first for what is computed ahead, then for
the rest.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from lehr.kernels.members import members
from lehr.kernels.row_program import Unsupported
from lehr.types import PyTree

MOST_BYTES = 2**25
"""The limit on what is computed ahead, over all steps and members."""

_CALLS = "jit", "pjit"

_NAMES = (
    "random_bits random_fold_in random_split random_unwrap random_wrap threefry2x32 "
    "abs add and bitcast_convert_type broadcast_in_dim ceil clamp concatenate convert_element_type copy cos div eq erf "
    "erf_inv exp exp2 expand_dims expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne "
    "neg nextafter not or pad pow rem reshape rev round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin slice split sqrt square squeeze stack sub tan tanh transpose unstack xor"
)
_MOVABLE = frozenset(_NAMES.split())
"""What may be computed ahead: random bits, arithmetic on each number, and changes of shape."""


def is_able() -> bool:
    """Whether programs are compiled for a CPU; elsewhere, what a loop reads costs more than what it computes."""
    return jax.default_backend() == "cpu"


def fits(start: PyTree, rows: PyTree) -> bool:
    """Whether some of the rows are random keys."""
    return any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(rows))


def scan(body: Callable[[PyTree, PyTree], Any], start: PyTree, rows: PyTree, unroll: int = 1) -> Any:
    """As `jax.lax.scan`, with everything that follows from the rows alone computed ahead.

    Raises `Unsupported` if there is nothing to compute ahead, or too much.

    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> step = lambda total, key: (total + jax.random.uniform(key), total)
    >>> bool(scan(step, jnp.float32(0), keys)[0] == jax.lax.scan(step, jnp.float32(0), keys)[0])
    True
    """
    leaves, length = jax.tree.leaves(rows), len(jax.tree.leaves(rows)[0])
    first = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)
    program, shape = jax.make_jaxpr(body, return_shape=True)(start, first)
    if program.effects:
        raise Unsupported("the step has side effects")
    carries = len(jax.tree.leaves(start))
    needed: list[int] = []

    def ahead(*row: Any) -> list[Any]:
        drawn = _Drawn()
        _walk(program, [*[_LATER] * carries, *map(drawn.add, row)], drawn)
        needed[:] = sorted(drawn.used)
        return [drawn.values[number] for number in needed]

    sizes = jax.eval_shape(ahead, *jax.tree.leaves(first))
    if not any(number >= len(leaves) for number in needed):
        raise Unsupported("the step computes nothing from its keys alone")
    size = sum(math.prod(leaf.shape) * _itemsize(leaf.dtype) for leaf in sizes) * length * members()
    if size > MOST_BYTES:
        raise Unsupported(f"what the steps draw takes {size} bytes")
    given = jax.vmap(ahead)(*leaves)

    def rest(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        drawn = _Drawn(dict(zip(needed, row, strict=True)), is_done=True)
        inputs = [*map(_Later, carry), *(drawn.add(None) for _ in leaves)]
        outputs = [drawn.value_of(one) for one in _walk(program, inputs, drawn)]
        return outputs[:carries], outputs[carries:]

    carry, outputs = jax.lax.scan(rest, jax.tree.leaves(start), given, length=length, unroll=unroll)
    return jax.tree.unflatten(jax.tree.structure(shape), [*carry, *outputs])


def _itemsize(dtype: Any) -> int:
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.dtype(dtype).itemsize


@dataclass(frozen=True)
class _Known:
    """A value that does not depend on the step."""

    value: Any


@dataclass(frozen=True)
class _Ahead:
    """A value that follows from the rows alone, by its number in the order of the walk."""

    number: int


@dataclass(frozen=True)
class _Later:
    """Any other value; it is missing while computing ahead."""

    value: Any = None


_LATER = _Later()


@dataclass
class _Drawn:
    """The values that are computed ahead, by number."""

    values: dict[int, Any] = field(default_factory=dict)
    is_done: bool = False
    """Whether they have been computed, so that this walk computes the rest."""
    used: set[int] = field(default_factory=set)
    """Those that the rest of the step uses."""
    count: int = 0

    def add(self, value: Any) -> _Ahead:
        """Give the next number to a value, which is `None` in the second walk."""
        if not self.is_done:
            self.values[self.count] = value
        self.count += 1
        return _Ahead(self.count - 1)

    def value_of(self, given: _Known | _Ahead | _Later) -> Any:
        return self.values[given.number] if isinstance(given, _Ahead) else given.value


def _walk(program: ClosedJaxpr, arguments: Sequence[Any], drawn: _Drawn) -> list[Any]:
    """Go through a program: compute what is ahead, or the rest; return its outputs."""
    outputs = _walk_inside(program, arguments, drawn)
    drawn.used |= {one.number for one in outputs if isinstance(one, _Ahead)}
    return outputs


def _walk_inside(program: ClosedJaxpr, arguments: Sequence[Any], drawn: _Drawn) -> list[Any]:
    jaxpr = program.jaxpr
    consts = [_Later(value) if isinstance(value, jax.core.Tracer) else _Known(value) for value in program.consts]
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(variable: Any) -> Any:
        return _Known(variable.val) if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        inputs = [read(one) for one in equation.invars]
        with equation.ctx.manager:  # settings such as the PRNG implementation
            if equation.primitive.name in _CALLS:
                outputs = _walk_inside(equation.params["jaxpr"], inputs, drawn)
            else:
                outputs = _outputs(equation, inputs, drawn)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(one) for one in jaxpr.outvars]


def _outputs(equation: JaxprEqn, inputs: Sequence[Any], drawn: _Drawn) -> list[Any]:
    """Return the outputs of one equation, computed if this walk computes them."""
    is_movable = equation.primitive.name in _MOVABLE and not any(isinstance(one, _Later) for one in inputs)
    if is_movable and not any(isinstance(one, _Ahead) for one in inputs):
        return [_Known(value) for value in _bound(equation, [one.value for one in inputs])]
    if is_movable:
        if drawn.is_done:
            return [drawn.add(None) for _ in equation.outvars]
        return [drawn.add(value) for value in _bound(equation, [drawn.value_of(one) for one in inputs])]
    if drawn.is_done:
        return [_Later(value) for value in _bound(equation, [drawn.value_of(one) for one in inputs])]
    drawn.used |= {one.number for one in inputs if isinstance(one, _Ahead)}
    return [_LATER for _ in equation.outvars]


def _bound(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    outputs = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
    return list(outputs) if equation.primitive.multiple_results else [outputs]
