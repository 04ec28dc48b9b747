"""Take a loss apart: what is computed for each row, sums over the rows, and what is computed from these sums.

The loss of a minibatch and its derivatives by the outputs of the networks consist of arithmetic on each row, of means
over the rows, and of a little arithmetic on these means, for the metrics. The first two can be part of the kernel that
evaluates the networks, see `lehr.kernels.mlp_loss`; the rest is computed after it. What does not depend on the outputs
at all, such as standardised advantages, is computed before.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.kernels.row_program import CARRIED, STATIC, Operation, Program, Unsupported, Value
from lehr.kernels.row_rules import evaluate
from lehr.kernels.row_values import Columns, Loader, Span, cells_of, filled, without_rows
from lehr.types import PyTree


@dataclass(frozen=True)
class Terms:
    """What a loss is on one block of rows."""

    derivatives: list[list[jax.Array]]
    """By each output of each network, `[B]`."""
    sums: list[jax.Array]
    """The terms of each sum over the rows, `[B]`."""


class RowLoss:
    """A loss and its derivatives by the outputs of N networks, as a function of one block of rows.

    Args:
        function: `outputs -> (derivatives, others)`: outputs and derivatives are N arrays `[rows, O]`; others is any
            tree of arrays that are not computed for each row, but from sums over the rows, or independently of them.
        widths: the number of outputs O of each network.
        rows: the number of rows.
    """

    def __init__(self, function: Callable[[Sequence[jax.Array]], Any], widths: Sequence[int], rows: int) -> None:
        given = [jax.ShapeDtypeStruct((rows, width), jnp.float32) for width in widths]
        self.program, self.structure = Program.of(lambda outputs, _: function(outputs), given, ())
        self.widths = list(widths)
        self.sums: list[Operation] = []
        self.after: list[Operation] = []
        self._used: dict[int, Value] = {}
        # Which operations are sums over the rows is known once the rules have found where the rows are.
        cells = [jax.ShapeDtypeStruct((rows,), jnp.float32)] * sum(widths)
        jax.eval_shape(lambda cells: self.terms(cells, _Zeros(rows, self._used)).sums, cells)
        self.owners = self._owners()

    @property
    def inputs(self) -> list[Value]:
        """What is known before and needed for the rows."""
        return list(self._used.values())

    @property
    def text(self) -> str:
        """What was traced, to tell losses apart."""
        return self.program.text

    def known(self) -> dict[int, Any]:
        """Compute what does not depend on the outputs, by number."""
        return self.program.before_loop([])[0]

    def terms(self, cells: Sequence[jax.Array], loader: Loader) -> Terms:
        """Evaluate the loss on one block of rows.

        Args:
            cells: the outputs of all networks, `[B]` each.
            loader: loads what is known before.
        """
        values: dict[int, Any] = {}
        for value in self.program.carry:
            shape = without_rows(value.shape, 0)
            values[value.number] = Columns(0, filled(shape, cells[: math.prod(shape)]))
            cells = cells[math.prod(shape) :]
        sums, after = {}, {}
        for operation in self.program.in_loop:
            inputs = [values.get(value.number, value) for value in operation.inputs]
            numbers = {value.number for value in operation.inputs if value.level == CARRIED}
            if numbers.isdisjoint(values):
                after[operation.outputs[0].number] = operation
            elif not numbers <= values.keys():
                raise Unsupported("rows that depend on sums over the rows")
            elif (terms := _terms_of_sum(operation, inputs)) is not None:
                sums[operation.outputs[0].number] = operation, terms
            else:
                found = evaluate(operation, inputs, loader)
                values.update(zip((value.number for value in operation.outputs), found, strict=True))
        self.sums, self.after = [operation for operation, _ in sums.values()], list(after.values())
        derivatives = [
            list(cells_of(values.get(value.number, value), 0, loader).flat) for value in self.program.next_carry
        ]
        if any(value.number in values for value in self.program.outputs):
            raise Unsupported("an output for each row")
        vectors = [_vector(cell, loader) for _, terms in sums.values() for cell in terms]
        return Terms([[_vector(cell, loader) for cell in cells] for cells in derivatives], vectors)

    def last(self, known: Mapping[int, Any]) -> Any:
        """Return the last of the others, which must not depend on the outputs."""
        return self._output(self.program.outputs[-1], known)

    def others(self, known: Mapping[int, Any], sums: jax.Array) -> PyTree:
        """Return what `function` returns besides the derivatives.

        Args:
            known: from `known`.
            sums: `[N, S]`: the sums over all rows, in their order, as found with the outputs of each network.
        """
        return self.completed(known, self.summed(known, sums))

    def summed(self, known: Mapping[int, Any], sums: jax.Array) -> list[jax.Array]:
        """Return those of the others that follow from sums over the rows, as `summed_outputs` lists them.

        Args:
            known: from `known`; what `known_after` selects is enough.
            sums: as for `others`.
        """
        values = dict(known)
        sums = sums[np.asarray(self.owners, int), np.arange(len(self.owners))]
        for operation in self.sums:
            shape = operation.outputs[0].shape
            values[operation.outputs[0].number] = sums[: math.prod(shape)].reshape(shape)
            sums = sums[math.prod(shape) :]
        for operation in self.after:
            inputs = [one.static if one.level == STATIC else values[one.number] for one in operation.inputs]
            values |= {one.number: x for one, x in zip(operation.outputs, operation.apply(inputs), strict=True)}
        return [self._output(one, values) for one in self.summed_outputs]

    @property
    def summed_outputs(self) -> list[Value]:
        """Those of the others that follow from sums over the rows."""
        return [value for value in self.program.outputs if value.level == CARRIED]

    def known_after(self, known: Mapping[int, Any]) -> dict[int, Any]:
        """Return what is known and needed after the sums over the rows."""
        needed = {value.number for operation in self.after for value in operation.inputs}
        return {number: value for number, value in known.items() if number in needed}

    def completed(self, known: Mapping[int, Any], summed: Sequence[jax.Array]) -> PyTree:
        """Return all of the others, from `summed`."""
        values = dict(known) | {one.number: x for one, x in zip(self.summed_outputs, summed, strict=True)}
        found = [self._output(one, values) for one in self.program.outputs]
        # The derivatives come first in the structure of what the function returns.
        return jax.tree.unflatten(self.structure, [None] * len(self.widths) + found)[1]

    @staticmethod
    def _output(value: Value, values: Mapping[int, Any]) -> Any:
        return jnp.asarray(value.static, value.dtype) if value.level == STATIC else values[value.number]

    def _owners(self) -> list[int]:
        """The network whose outputs each term of a sum depends on; each derivative must depend on its own network's."""
        depends = {value.number: frozenset({index}) for index, value in enumerate(self.program.carry)}

        def of(values: Sequence[Value]) -> frozenset[int]:
            return frozenset().union(*(depends.get(value.number, frozenset()) for value in values))

        for operation in self.program.in_loop:
            depends |= dict.fromkeys((value.number for value in operation.outputs), of(operation.inputs))
        if any(of([value]) - {index} for index, value in enumerate(self.program.next_carry)):
            raise Unsupported("a loss in which the outputs of the networks are not terms of their own")
        found = []
        for operation in self.sums:
            owners = of(operation.outputs)
            if len(owners) != 1:
                raise Unsupported("a sum over outputs of several networks")
            found += [*owners] * math.prod(operation.outputs[0].shape)
        return found


def _terms_of_sum(operation: Operation, inputs: Sequence[Any]) -> list[jax.Array] | None:
    """The terms of each entry of a sum over the rows; `None` for any other operation."""
    if operation.primitive.name != "reduce_sum" or not isinstance(inputs[0], Columns):
        return None
    (given,), axes = inputs, operation.parameters["axes"]
    if given.axis not in axes:
        return None
    kept = [axis for axis in range(given.cells.ndim) if axis not in axes]
    cells = given.cells.transpose(*kept, *axes).reshape(math.prod(operation.outputs[0].shape), -1)
    return [sum(row[1:], start=row[0]) for row in cells]


def _vector(cell: jax.Array, loader: Loader) -> jax.Array:
    return jnp.broadcast_to(cell, (loader.block,))


class WithoutMatrices:
    """A loader for a loss, which has no weights."""

    def part(self, value: Value, axis: int | None, index: tuple[int | Span, ...]) -> jax.Array:
        """Refuse."""
        raise Unsupported("a matrix in the loss")


class _Zeros(WithoutMatrices):
    """A loader of zeros, which notes what is loaded."""

    def __init__(self, rows: int, used: dict[int, Value]) -> None:
        self.rows = self.block = rows
        self.used = used

    def cell(self, value: Value, axis: int | None, index: tuple[int, ...]) -> jax.Array:
        """A zero for the entry, or one for each row."""
        self.used[value.number] = value
        return jnp.zeros(() if axis is None else self.block, value.dtype)
