"""Any optax optimiser by name, without its learning rate, which is multiplied in at the update.

This way, a learning rate can be scheduled, swept with `vmap`, stopped and resumed like every other coefficient. An
elementwise optimiser works on all parameters as one flat vector: on a GPU, one kernel instead of one per array.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from lehr import plugins
from lehr.errors import InputError, closest
from lehr.maths.laprop import laprop
from lehr.types import PyTree

_ELEMENTWISE = (
    "adabelief adadelta adagrad adam adamax adamw adan amsgrad laprop lion nadam nadamw radam rmsprop rprop sgd yogi"
)
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
"""Optimisers whose update of a parameter depends only on that parameter's gradients."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"eps": 1e-5},
    "adamw": {"eps": 1e-5},
    "rmsprop": {"decay": 0.99, "eps": 1e-5},
}
"""Options that differ from optax's, as is usual in reinforcement learning."""

OWN: dict[str, Any] = {"laprop": laprop}
"""Optimisers that optax does not have."""


class Step(NamedTuple):
    """The result of one optimiser step."""

    params: PyTree
    state: PyTree
    gradient_norm: jax.Array
    """float32 `[]`, before clipping."""


@dataclass(frozen=True)
class Optimiser:
    """An optax transformation with learning rate 1; elementwise ones work on one flat vector."""

    name: Any
    """A name in optax, `optax.contrib` or `OWN`, `module:Name`, an optax transformation with learning rate 1, or a
    function of `learning_rate` that returns one, like `optax.adam`."""
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        _transformation(self.name, dict(self.options))

    @property
    def transformation(self) -> optax.GradientTransformation:
        """The optax transformation, with learning rate 1."""
        return _transformation(self.name, dict(self.options))

    def pack(self, params: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
        """Return the parameters in the form that this optimiser works on, and the inverse function."""
        if isinstance(self.name, str) and self.name in ELEMENTWISE:
            return ravel_pytree(params)
        return params, lambda packed: packed

    def init(self, params: PyTree) -> PyTree:
        """Return the initial state for unpacked parameters."""
        return self.transformation.init(self.pack(params)[0])

    def step(self, packed: PyTree, state: PyTree, gradients: PyTree, learning_rate: Any, max_grad_norm: Any) -> Step:
        """Update packed parameters.

            g ← g · min(1, max_grad_norm / ‖g‖)
            θ ← θ − learning_rate · direction(g, state)

        Args:
            packed: the parameters, from `pack`.
            state: from `init` or the last step.
            gradients: like the parameters before packing.
            learning_rate: a scalar.
            max_grad_norm: a scalar, or `None` for no clipping.
        """
        gradients = self.pack(gradients)[0]
        norm = optax.tree.norm(gradients)
        if max_grad_norm is not None:
            # Avoid dividing by a norm of 0; a non-finite norm stays visible and is not clipped away.
            scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12))
            gradients = jax.tree.map(lambda gradient: gradient * scale, gradients)
        directions, state = self.transformation.update(gradients, state, packed)

        def moved(parameter: jax.Array, direction: jax.Array) -> jax.Array:
            return parameter + (learning_rate * direction).astype(parameter.dtype)

        return Step(jax.tree.map(moved, packed, directions), state, norm)

    def improve(self, params: PyTree, state: PyTree, gradients: PyTree, learning_rate: Any, max_grad_norm: Any) -> Step:
        """Update unpacked parameters; see `step`."""
        packed, unpack = self.pack(params)
        step = self.step(packed, state, gradients, learning_rate, max_grad_norm)
        return step._replace(params=unpack(step.params))


def optimiser(name: str, options: dict[str, Any] | None = None) -> Optimiser:
    """Return the optimiser with this name in optax or `optax.contrib`, with options.

    >>> adam = optimiser("adam", {"b1": 0.5})
    >>> packed, unpack = adam.pack({"w": jnp.ones(2)})
    >>> step = adam.step(packed, adam.init({"w": jnp.ones(2)}), {"w": jnp.array([3.0, 4.0])}, 0.1, max_grad_norm=None)
    >>> float(step.gradient_norm), [round(float(w), 3) for w in unpack(step.params)["w"]]
    (5.0, [0.9, 0.9])
    """
    return Optimiser(name, tuple(sorted((options or {}).items())))


def _transformation(given: Any, options: dict[str, Any]) -> optax.GradientTransformation:
    if isinstance(given, optax.GradientTransformation):
        return given
    name = given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
    factory: Any = given
    if isinstance(given, str):
        factory = OWN.get(given) or getattr(optax, given, None) or getattr(optax.contrib, given, None)
        if ":" in given:
            factory = plugins.import_object(given, "optimiser")
    if isinstance(factory, optax.GradientTransformation):
        return factory
    parameters = inspect.signature(factory).parameters if callable(factory) else {}
    if "learning_rate" not in parameters:
        raise InputError(f"There is no optimiser {name!r}; {closest(name, sorted({*ELEMENTWISE, 'muon'}))}")
    for option in options:
        if option not in parameters or option == "learning_rate":
            known = [parameter for parameter in parameters if parameter != "learning_rate"]
            raise InputError(f"The optimiser {name!r} has no option {option!r}; {closest(option, known)}")
    chosen = {**DEFAULTS.get(name, {}), **options}
    if name == "muon":
        chosen.setdefault("muon_weight_dimension_numbers", _matrices)
    return factory(learning_rate=1.0, **chosen)


def _matrices(params: PyTree) -> PyTree:
    """Return the axes of each kernel that muon orthogonalises; `None` for biases and scales, which use adam."""

    def axes(path: Any, leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        if getattr(path[-1], "key", None) != "kernel" or leaf.ndim < 2:
            return None
        inputs = tuple(range(leaf.ndim - 1)) if leaf.ndim == 4 else (leaf.ndim - 2,)  # a convolution sums over three
        return optax.contrib.MuonDimensionNumbers(reduction_axis=inputs, output_axis=(leaf.ndim - 1,))

    return jax.tree_util.tree_map_with_path(axes, params)
