"""Take the body of a loop apart: what must be computed step by step, and what can be computed beforehand.

The body of a rollout draws random numbers and slices weights besides acting and stepping environments. Whatever does
not depend on the state that is carried from step to step is computed before the loop, for all steps at once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from lehr.types import PyTree

STATIC, FIXED, PER_STEP, CARRIED = range(4)
"""When a value is known: while tracing, before the loop, before the loop for each step, only in the loop."""

MOST_PLACES = 64
"""Integer constants with more entries are not read while tracing."""

MOST_STATIC = 2**16
"""Larger arrays are not computed while tracing."""

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
"""Equations that call a program, and the name of the program among their parameters."""


class Unsupported(Exception):
    """The body of the loop contains something that the kernel has no rule for."""


def _broadcast(x: np.ndarray, *, shape: tuple[int, ...], broadcast_dimensions: tuple[int, ...], **_: Any) -> np.ndarray:
    sizes = dict(zip(broadcast_dimensions, x.shape, strict=True))
    return np.broadcast_to(x.reshape([sizes.get(axis, 1) for axis in range(len(shape))]), shape)


def _converted(x: np.ndarray, *, new_dtype: Any, **_: Any) -> np.ndarray:
    return x.astype(new_dtype)


BY_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda x, y, **_: x + y,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _converted,
    "mul": lambda x, y, **_: x * y,
    "neg": lambda x, **_: -x,
    "sub": lambda x, y, **_: x - y,
}
"""Operations on arrays that are known while tracing, whose results are those of JAX to the bit, except denormals."""


@dataclass(frozen=True)
class Value:
    """A value of the body: its number, its type, and when it is known."""

    number: int
    shape: tuple[int, ...]
    dtype: Any
    level: int
    static: Any = field(default=None, compare=False, repr=False)
    """The value, if it is known while tracing; a value of the level `STATIC` is the same number everywhere."""


@dataclass(frozen=True)
class Operation:
    """An equation with its inputs and outputs."""

    primitive: Any
    parameters: dict[str, Any]
    context: Any
    """Settings of JAX under which it was traced, such as the PRNG implementation."""
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...] = ()

    def apply(self, values: Sequence[Any]) -> list[Any]:
        """Evaluate it in plain JAX."""
        with self.context.manager:
            found = self.primitive.bind(*values, **self.primitive.get_bind_params(self.parameters))
        return list(found) if self.primitive.multiple_results else [found]

    def known(self, values: Sequence[np.ndarray]) -> list[Any]:
        """Evaluate it while tracing: common ones by NumPy, since JAX compiles a program for each of them."""
        kinds = [value.dtype.kind for value in values] + [np.dtype(self.parameters.get("new_dtype") or bool).kind]
        is_rounded = self.primitive.name == "convert_element_type" and "f" in kinds[:-1] and kinds[-1] != "f"
        if self.primitive.name in BY_NUMPY and set(kinds) <= set("biuf") and not is_rounded:
            with np.errstate(all="ignore"):
                return [BY_NUMPY[self.primitive.name](*values, **self.parameters)]
        with jax.ensure_compile_time_eval():
            return self.apply(values)

    @property
    def level(self) -> int:
        """When its outputs are known."""
        given = self.outputs or self.inputs
        return max((value.level for value in given), default=STATIC)


@dataclass
class Program:
    """The body of a loop as a list of operations, without calls and without what nothing needs."""

    operations: list[Operation]
    consts: dict[int, Any]
    """The values that the body closes over, by number."""
    carry: list[Value]
    row: list[Value]
    """What each step is given."""
    next_carry: list[Value]
    outputs: list[Value]
    text: str
    """What was traced, to tell programs apart."""

    @classmethod
    def of(cls, body: Callable[[PyTree, PyTree], Any], start: PyTree, row: PyTree) -> tuple["Program", Any]:
        """Trace a body `(carry, row) -> (carry, outputs)`; also return the structure of what it returns."""
        closed, shape = jax.make_jaxpr(body, return_shape=True)(start, row)
        if closed.jaxpr.effects:
            raise Unsupported("side effects")
        count = len(jax.tree.leaves(start))
        reader = _Reader()
        carry = [reader.value(variable, CARRIED) for variable in closed.jaxpr.invars[:count]]
        rows = [reader.value(variable, PER_STEP) for variable in closed.jaxpr.invars[count:]]
        outputs = reader.read(closed, [*carry, *rows])
        program = cls(
            reader.operations, reader.consts, carry, rows, outputs[:count], outputs[count:], str(closed.jaxpr)
        )
        program._drop_unused()
        return program, jax.tree.structure(shape)

    def _drop_unused(self) -> None:
        needed = {value.number for value in (*self.next_carry, *self.outputs)}
        kept = []
        for operation in reversed(self.operations):
            if any(value.number in needed for value in operation.outputs):
                needed.update(value.number for value in operation.inputs)
                kept.append(operation)
        self.operations = kept[::-1]

    @property
    def in_loop(self) -> list[Operation]:
        """The operations that depend on the carried state."""
        return [operation for operation in self.operations if operation.level == CARRIED]

    def needed(self, level: int) -> list[Value]:
        """The values of a level that the loop or the outputs use."""
        used = [value for operation in self.in_loop for value in operation.inputs] + self.next_carry + self.outputs
        return list({value.number: value for value in used if value.level == level}.values())

    def before_loop(self, rows: Sequence[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Compute what the loop needs: fixed values, and values `[T, ...]` that are different in each step.

        Args:
            rows: what the steps are given, `[T, ...]` each.
        """
        fixed = dict(self.consts)
        self._evaluate(FIXED, fixed)
        wanted = self.needed(PER_STEP)

        def one_step(given: Sequence[Any]) -> list[Any]:
            values = {**fixed, **{value.number: x for value, x in zip(self.row, given, strict=True)}}
            self._evaluate(PER_STEP, values)
            return [values[value.number] for value in wanted]

        found = jax.vmap(one_step)(list(rows)) if wanted else []
        per_step = {value.number: x for value, x in zip(wanted, found, strict=True)}
        return {value.number: fixed[value.number] for value in self.needed(FIXED)}, per_step

    def _evaluate(self, level: int, values: dict[int, Any]) -> None:
        """Evaluate the operations of a level, adding their outputs to the values."""
        for operation in self.operations:
            if operation.level == level:
                inputs = [one.static if one.level == STATIC else values[one.number] for one in operation.inputs]
                for one, found in zip(operation.outputs, operation.apply(inputs), strict=True):
                    values[one.number] = found


class _Reader:
    """Reads a jaxpr into operations, with calls inlined."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.consts: dict[int, Any] = {}
        self._count = 0

    def value(self, variable: Any, level: int, static: Any = None) -> Value:
        """A new value of the type of a variable."""
        self._count += 1
        kind = variable.aval
        return Value(self._count, tuple(kind.shape), kind.dtype, level, static)

    def read(self, closed: ClosedJaxpr, arguments: Sequence[Value]) -> list[Value]:
        """Read a program with its arguments; return its outputs."""
        known: dict[Any, Value] = dict(zip(closed.jaxpr.invars, arguments, strict=True))
        for variable, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            known[variable] = self._const(variable, const)

        def of(variable: Any) -> Value:
            if isinstance(variable, Literal):
                return self.value(variable, STATIC, np.asarray(variable.val, getattr(variable.aval, "dtype", None)))
            return known[variable]

        for equation in closed.jaxpr.eqns:
            inputs = tuple(map(of, equation.invars))
            name, parameters = equation.primitive.name, equation.params
            if name in CALLS:
                called = parameters[CALLS[name]]
                called = called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ())
                outputs = self.read(called, inputs)
            else:
                outputs = self._operation(equation, inputs)
            known.update(zip(equation.outvars, outputs, strict=True))
        return [of(variable) for variable in closed.jaxpr.outvars]

    def _const(self, variable: Any, const: Any) -> Value:
        is_data = isinstance(const, jax.core.Tracer) or const.size > MOST_PLACES or const.dtype.kind not in "iu"
        if isinstance(const, jax.core.Tracer | jax.Array) and is_data:
            value = self.value(variable, FIXED)
            self.consts[value.number] = const
            return value
        return self._known(variable, np.asarray(const))

    def _known(self, variable: Any, static: np.ndarray) -> Value:
        """A value that is known while tracing."""
        if static.size and (static == static.flat[0]).all():
            return self.value(variable, STATIC, static)
        value = self.value(variable, FIXED, static)
        self.consts[value.number] = static
        return value

    def _operation(self, equation: Any, inputs: tuple[Value, ...]) -> list[Value]:
        operation = Operation(equation.primitive, equation.params, equation.ctx, inputs)
        level = operation.level
        has_keys = any(jax.dtypes.issubdtype(one.aval.dtype, jax.dtypes.extended) for one in equation.outvars)
        is_known = all(value.static is not None for value in inputs)
        if is_known and not has_keys and all(math.prod(one.aval.shape) <= MOST_STATIC for one in equation.outvars):
            found = operation.known([value.static for value in inputs])
            return [self._known(variable, np.asarray(x)) for variable, x in zip(equation.outvars, found, strict=True)]
        outputs = tuple(self.value(variable, max(level, FIXED)) for variable in equation.outvars)
        self.operations.append(replace(operation, outputs=outputs))
        return list(outputs)
