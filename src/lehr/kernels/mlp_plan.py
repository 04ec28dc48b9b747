"""What is static about a call of the fused MLP: sizes and tuning; see `lehr.kernels.mlp`."""

import functools
import importlib
import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

pl: Any
triton: Any
try:
    pl, triton = map(importlib.import_module, ("jax.experimental.pallas", "jax.experimental.pallas.triton"))
except ImportError:  # later JAX versions may drop this backend: use plain JAX
    pl = triton = None


def has_triton(interpret: bool) -> bool:
    """Whether JAX has Pallas's Triton backend, and a GPU; the interpreter needs none."""
    return triton is not None and (interpret or jax.default_backend() == "gpu")


class Place(NamedTuple):
    """Where a gradient is stored."""

    array: int
    begin: int


@dataclass(frozen=True)
class NetworksPlan:
    """Abstract base class of what is static about a call that evaluates MLPs of equal hidden sizes on the same rows."""

    rows: int
    first: int
    """The first of the networks to evaluate, among those that the hidden layers hold."""
    inputs: int
    hidden: tuple[int, ...]
    widths: tuple[int, ...]
    """The number of outputs of each network to evaluate."""
    activation: str
    block_rows: int
    num_warps: int
    backward_block_rows: int
    backward_num_warps: int
    interpret: bool

    @property
    def networks(self) -> int:
        """The number of networks to evaluate."""
        return len(self.widths)

    @property
    def outputs(self) -> int:
        """The outputs of the widest head."""
        return max(self.widths)


@dataclass(frozen=True)
class Plan(NetworksPlan):
    """Everything static about a call: sizes and tuning."""

    precision: Any
    is_half: bool
    """Whether operands of products are rounded to float16, which has as many digits as TF32; see `mlp_blocks`."""
    forward_programs: int
    """Of the forward program, over all networks, at most; for each member of a population."""
    programs: int
    """Of the backward program, for each member of a population."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The inputs of each layer, and the outputs of the widest head."""
        return (self.inputs, *self.hidden, self.outputs)

    @property
    def has_spare_input(self) -> bool:
        """Whether a block of inputs, padded, has a column of zeros."""
        return self.inputs < padded(self.inputs)

    @property
    def blocks_per_forward_program(self) -> int:
        """Blocks of rows per forward program."""
        return pl.cdiv(pl.cdiv(self.rows, self.block_rows), max(1, self.forward_programs // self.networks))

    @property
    def backward_programs(self) -> int:
        """The number of backward programs of each network."""
        return pl.cdiv(self.rows, self.blocks_per_program * self.backward_block_rows)

    @functools.cached_property
    def gradient_places(self) -> list[tuple[Place, Place]]:
        """Of each layer: where the backward program stores the gradients of its kernel and its bias, padded.

        Partial sums of several programs are one array, so that they are added by one launch; otherwise every gradient
        is an array of its own, which nothing has to be cut out of.
        """
        found, array, begin = [], 0, 0
        for n_in, n_out in itertools.pairwise(map(padded, self.sizes)):
            if self.backward_programs == 1:
                found.append((Place(array, 0), Place(array + 1, 0)))
                array += 2
            else:
                found.append((Place(0, begin), Place(0, begin + n_in * n_out)))
                begin += (n_in + 1) * n_out
        return found

    @functools.cached_property
    def gradient_sizes(self) -> list[int]:
        """The length of each array of gradients."""
        pairs = list(itertools.pairwise(map(padded, self.sizes)))
        if self.backward_programs == 1:
            return [size for n_in, n_out in pairs for size in (n_in * n_out, n_out)]
        return [sum((n_in + 1) * n_out for n_in, n_out in pairs)]

    @property
    def probe(self) -> "Plan":
        """The smallest plan with the same programs: with masks, and loops over blocks and partial sums as here."""
        return replace(
            self,
            rows=max(self.block_rows, self.backward_block_rows) + 1,
            forward_programs=(2 if self.blocks_per_forward_program == 1 else 1) * self.networks,
            programs=(1 if self.backward_programs == 1 else 2) * self.networks,
        )

    @property
    def blocks_per_program(self) -> int:
        """Blocks of rows per backward program."""
        return pl.cdiv(pl.cdiv(self.rows, self.backward_block_rows), max(1, self.programs // self.networks))


def padded(size: int) -> int:
    """The size that is computed with: a power of two from 16 on, as the matrix units require."""
    return max(16, pl.next_power_of_2(size))
