"""The gradient of a loss on top of small MLPs as one GPU kernel: forward pass, loss and backward pass.

`lehr.kernels.mlp` evaluates an actor and a critic with one kernel, and computes their gradients with another, which has
to evaluate them again; between the two, the loss is a handful of small kernels. Here one kernel does all of it. It
reads the weights from the vector in which the optimiser keeps all parameters, and writes the gradient in the same
order: taking the vectors of thousands of members apart and putting them together takes as long as many products.

The loss is a function like any other. It is traced twice: to find its one call of `lehr.kernels.evaluate_mlps`, and
with the outputs of that call as its arguments, see `lehr.kernels.row_loss`. It can be part of the kernel if each term
is arithmetic on the rows of one network's outputs, and only sums over the rows leave it, as in PPO.
"""

import contextvars
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lehr.kernels import lowered, mlp, partial_sums
from lehr.kernels.members import members
from lehr.kernels.mlp_loss_program import Layout, Sums, gradients
from lehr.kernels.mlp_programs import Layer, Plan
from lehr.kernels.row_loss import RowLoss
from lehr.kernels.row_program import CARRIED, Unsupported
from lehr.types import PyTree, in_scope

Loss = Callable[[PyTree], tuple[jax.Array, PyTree]]
"""Maps parameters to a total, float32 `[]`, and any other results."""

MOST_ROWS = 2**15
"""The largest minibatch of an agent for which the kernel is used. It saves launches, and evaluates the networks once
(H200, row 0 of bench/ppo.py --gpu with 32,768 rows: 0.87 instead of 0.98 ms for an update; 25, 128, 512 and 1,024
members of bench/population.py: 0.77, 1.12, 2.25 and 4.12 instead of 0.95, 1.48, 2.98 and 5.33 ms). With 524,288 rows,
evaluating them twice takes no longer than evaluating the loss in the kernel."""
BLOCK_ROWS = 64
"""Rows per block, a power of two."""
FEW_ROWS, FEW_BLOCK_ROWS = 2048, 32
"""Up to so many rows, blocks have fewer of them, so that more processors have work (H200, 1,024 rows: 8.0 instead of
9.7 µs)."""
NUM_WARPS = 4
MEMBER_BLOCK_ROWS = 64
"""As `BLOCK_ROWS`, for each member of a population; fewer if there are fewer."""
MEMBER_NUM_WARPS = 4
MOST_OPERATIONS = 500
"""Longer losses are left to the compiler."""


class Found(NamedTuple):
    """A loss and its gradient."""

    total: jax.Array
    others: PyTree
    """What the loss returns besides."""
    gradient: jax.Array
    """In the order of the packed parameters."""
    norm: jax.Array | None
    """float32 `[]`: the gradient's, if the kernel computes it."""


def fits(packed: PyTree) -> bool:
    """Whether all parameters are one vector of float32."""
    return isinstance(packed, jax.Array) and packed.ndim == 1 and packed.dtype == jnp.float32


def value_and_grad(
    loss: Loss, packed: jax.Array, unpack: Callable[[jax.Array], PyTree], otherwise: Callable[[], Found]
) -> Found:
    """Return the loss and its gradient; raise `Unsupported` if it cannot be such a kernel, or another error if JAX
    refuses it.

    Args:
        loss: a function of the unpacked parameters.
        packed: all parameters, `[size]`.
        unpack: takes the vector apart, in order.
        otherwise: computes the same in plain JAX, for programs that are not compiled for CUDA; without the norm.
    """
    leaves, structure = jax.tree.flatten(unpack(packed))
    call = _call_in(loss, leaves, structure)
    others = [index for index in range(len(leaves)) if index not in call.leaves]

    def of_outputs(outputs: Sequence[jax.Array]) -> Any:
        def of(outputs: Sequence[jax.Array], given: Sequence[jax.Array]) -> Any:
            parameters = list(leaves)
            for index, leaf in zip(others, given, strict=True):
                parameters[index] = leaf
            seen: list[jax.Array] = []

            def intercept(x: jax.Array, *_: Any) -> tuple[jax.Array, ...]:
                seen.append(x)
                return tuple(outputs)

            with in_scope(_interceptor, intercept):
                total, results = loss(jax.tree.unflatten(structure, parameters))
            return total, (results, seen[0])

        total, pull, (results, x) = jax.vjp(of, outputs, [leaves[index] for index in others], has_aux=True)
        by_outputs, by_others = pull(jnp.ones_like(total))
        return by_outputs, (total, results, by_others, x)

    row_loss = RowLoss(of_outputs, call.plan.widths, call.plan.rows)
    if len(row_loss.program.in_loop) > MOST_OPERATIONS:
        raise Unsupported(f"{len(row_loss.program.in_loop)} operations")
    begins = list(itertools.accumulate((leaf.size for leaf in leaves), initial=0))
    layout = call.layout(begins)

    known, later = row_loss.known(), _Later(row_loss, call.plan)
    holes = [(begins[index], begins[index + 1]) for index in others]

    def by_kernel(packed: jax.Array, known: Mapping[int, Any]) -> _Summed:
        sums = gradients(call.plan, layout, row_loss, row_loss.last(known), packed, known)
        gradient, squares = _added(sums, holes, call.plan.interpret)
        by_others = row_loss.others(known, jnp.sum(sums.terms, axis=0))[2] if others else ()
        for index, leaf in zip(others, by_others, strict=True):
            gradient = lax.dynamic_update_slice(gradient, leaf.reshape(-1), (begins[index],))
            squares = jnp.append(squares, jnp.sum(jnp.square(leaf)))
        return _Summed(gradient, jnp.sqrt(_sum(squares)), later.padded([sums.terms]))

    def plain(packed: jax.Array, known: Mapping[int, Any]) -> _Summed:
        found = otherwise()
        return _Summed(found.gradient, jnp.linalg.norm(found.gradient), later.numbers(found))

    if call.plan.interpret:
        summed = by_kernel(packed, known)
        results = later.from_terms(summed.numbers, row_loss.known_after(known))
    else:
        lowered.check(f"mlp_loss {members()} {(call.plan, layout, row_loss.text)}", by_kernel, packed, known)
        summed = lax.platform_dependent(packed, known, cuda=by_kernel, default=plain)
        results = lax.platform_dependent(
            summed.numbers, row_loss.known_after(known), cuda=later.from_terms, default=later.from_numbers
        )
    total, rest, _, _ = row_loss.completed(known, results)
    return Found(total, rest, summed.gradient, summed.norm)


class _Summed(NamedTuple):
    """A gradient, its norm, and the numbers that total and metrics follow from."""

    gradient: jax.Array
    norm: jax.Array
    numbers: jax.Array


def _added(sums: Sums, holes: Sequence[tuple[int, int]], interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Return the gradient `[size]`, and sums of squares that add up to that of its norm; holes are left out."""
    if len(sums.gradient) == 1:
        return sums.gradient[0], sums.squares[0]
    return partial_sums.added(sums.gradient, holes, interpret)


def _sum(numbers: jax.Array) -> jax.Array:
    """The sum of a short vector, added one by one: XLA computes that where it is used, without a launch of its own."""
    return functools.reduce(jnp.add, list(numbers))


@dataclass(frozen=True)
class _Later:
    """What follows from sums over the rows, computed apart from them: that can wait until all gradient steps are done.

    On CUDA, the numbers that it needs are the sums of each program; elsewhere, they are the results themselves.
    """

    loss: RowLoss
    plan: Plan

    @property
    def _terms(self) -> tuple[int, int, int]:
        return self.plan.backward_programs, self.plan.networks, max(1, len(self.loss.owners))

    def padded(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Arrays as one vector, equally long on all platforms."""
        results = sum(math.prod(value.shape) for value in self.loss.summed_outputs)
        vector = jnp.concatenate([jnp.zeros(0), *(array.astype(jnp.float32).reshape(-1) for array in arrays)])
        return jnp.pad(vector, (0, max(math.prod(self._terms), results) - len(vector)))

    def from_terms(self, numbers: jax.Array, known: Mapping[int, Any]) -> list[jax.Array]:
        """Compute the results from the sums of each program."""
        terms = numbers[: math.prod(self._terms)].reshape(self._terms)
        return self.loss.summed(known, jnp.sum(terms, axis=0))

    def numbers(self, found: Found) -> jax.Array:
        """The results of plain JAX."""
        leaves = zip(jax.tree.leaves((found.total, found.others)), self.loss.program.outputs, strict=False)
        return self.padded([leaf for leaf, value in leaves if value.level == CARRIED])

    def from_numbers(self, numbers: jax.Array, known: Mapping[int, Any]) -> list[jax.Array]:
        """Undo `numbers`; what is not in total and metrics is not used."""
        found, begin = [], 0
        for value in self.loss.summed_outputs:
            end = begin + math.prod(value.shape)
            found.append(numbers[begin:end].reshape(value.shape).astype(value.dtype))
            begin = end
        return found


class _Call(NamedTuple):
    """A call of `lehr.kernels.evaluate_mlps` in a loss."""

    plan: Plan
    kernels: tuple[int, ...]
    """Which parameters are kernels: those of the hidden layers of all networks, then that of each network's head."""
    biases: tuple[int, ...]

    @property
    def leaves(self) -> frozenset[int]:
        """The parameters of the networks."""
        return frozenset((*self.kernels, *self.biases))

    def layout(self, begins: Sequence[int]) -> Layout:
        """Where the layers are in the vector in which the parameters have these begins."""
        networks, sizes, depth = self.plan.networks, self.plan.sizes, len(self.plan.hidden)

        def of(leaves: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], ...]:
            hidden = [
                tuple(begins[leaf] + network * stride for network in range(networks))
                for leaf, stride in zip(leaves, strides, strict=False)
            ]
            return (*hidden, tuple(begins[leaf] for leaf in leaves[depth:]))

        areas = [math.prod(pair) for pair in itertools.pairwise(sizes[:-1])]
        return Layout(begins[-1], of(self.kernels, areas), of(self.biases, self.plan.hidden))


def _call_in(loss: Loss, leaves: Sequence[jax.Array], structure: Any) -> _Call:
    """Find the one call of `evaluate_mlps` in a loss; raise `Unsupported` if there is none, or not such a one."""
    calls: list[_Call] = []

    def of(leaves: Sequence[jax.Array]) -> Any:
        def intercept(x: jax.Array, layers: Sequence[Layer], heads: Mapping[int, Layer], activation: str) -> Any:
            calls.append(_call(leaves, x, layers, heads, activation))
            return tuple(jnp.zeros((x.shape[0], bias.shape[-1])) for _, bias in heads.values())

        with in_scope(_interceptor, intercept):
            return loss(jax.tree.unflatten(structure, list(leaves)))

    jax.eval_shape(of, list(leaves))
    if len(calls) != 1:
        raise Unsupported(f"{len(calls)} evaluations of small MLPs in the loss")
    return calls[0]


def _call(
    leaves: Sequence[jax.Array], x: jax.Array, layers: Sequence[Layer], heads: Mapping[int, Layer], activation: str
) -> _Call:
    if x.ndim != 2:
        raise Unsupported(f"inputs {x.shape}, which are not rows")
    if len(x) > MOST_ROWS:
        raise Unsupported(f"{len(x)} rows, for which it is not known to be faster")
    if list(heads) != list(range(layers[0][0].shape[0])):
        raise Unsupported("a network without a head")
    numbers = {id(leaf): index for index, leaf in enumerate(leaves)}
    parts = list(zip(*layers, *heads.values(), strict=True))
    if any(id(part) not in numbers for one in parts for part in one):
        raise Unsupported("layers that are not parameters themselves")
    kernels, biases = (tuple(numbers[id(part)] for part in one) for one in parts)
    return _Call(_plan(mlp.plan_of(x, layers, heads, activation)), kernels, biases)


def _plan(plan: Plan) -> Plan:
    """The plan of the MLPs, tuned for this kernel."""
    if members() == 1:
        rows = FEW_BLOCK_ROWS if plan.rows <= FEW_ROWS else BLOCK_ROWS
        return replace(plan, backward_block_rows=min(rows, BLOCK_ROWS), backward_num_warps=NUM_WARPS)
    rows = min(MEMBER_BLOCK_ROWS, max(mlp.FEWEST_ROWS, plan.block_rows))
    return replace(plan, backward_block_rows=rows, backward_num_warps=MEMBER_NUM_WARPS)


_interceptor: contextvars.ContextVar[Callable[..., Any] | None] = contextvars.ContextVar("interceptor", default=None)


def interceptor() -> Callable[..., Any] | None:
    """What takes the place of `lehr.kernels.evaluate_mlps` in the loss that is being traced, if one is."""
    return _interceptor.get()
