"""Any optax optimiser by name, without its learning rate, which is multiplied in at the update.

This way, a learning rate can be scheduled, swept with `vmap`, stopped and resumed like every other coefficient. Weight
decay and the betas are coefficients too, if they are given. An elementwise optimiser works on all parameters as one
flat vector: on a GPU, one kernel instead of one per array.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from lehr import plugins
from lehr.errors import InputError, closest, shortened
from lehr.maths import across
from lehr.maths.laprop import laprop
from lehr.maths.muon import muon
from lehr.types import Packed, PyTree

_ELEMENTWISE = (
    "adabelief adadelta adagrad adam adamax adamw adan amsgrad laprop lion nadam nadamw radam rmsprop sgd yogi"
)
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
"""Optimisers whose update of a parameter depends only on that parameter's gradients."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"eps": 1e-5},
    "adamw": {"eps": 1e-5},
    "rmsprop": {"decay": 0.99, "eps": 1e-5},
}
"""Options that differ from optax's, as is usual in reinforcement learning."""

OWN: dict[str, Any] = {"laprop": laprop, "muon": muon}
"""Optimisers that optax does not have, or that are faster here."""


_INSIDE = "its learning rate is not a factor of its steps, so it cannot be multiplied in from a schedule"
_LOSS = "it evaluates the loss itself, which algorithms do not pass to it"
REFUSED: dict[str, str] = {
    **dict.fromkeys(["cocob", "dadapt_adamw", "fromage", "lars", "madgrad", "prodigy", "rprop"], _INSIDE),
    **dict.fromkeys(["schedule_free", "schedule_free_adamw", "schedule_free_sgd"], _INSIDE),
    **dict.fromkeys(["scale_by_madgrad", "scale_by_rprop"], _INSIDE),
    **dict.fromkeys(["lbfgs", "momo", "momo_adam", "sophia"], _LOSS),
    "dpsgd": "it needs the gradient of each sample, which algorithms do not compute",
}
"""Functions of optax with a learning rate that do not work here, with the reason."""

NO_COEFFICIENTS: Mapping[str, Any] = MappingProxyType({})

BETAS = {"beta1": "b1", "beta2": "b2"}
"""Coefficients that are options of an optimiser, with optax's names."""


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

    def check(self, coefficients: Collection[str]) -> None:
        """Raise an error if an option has a wrong value, or one that these coefficients set is missing or set twice."""
        name, factory = _factory(self.name)
        known = _options(factory)
        if self.options:
            self._try_out(name)
        for coefficient, option in {"weight_decay": "weight_decay", **BETAS}.items():
            if coefficient not in coefficients:
                continue
            if option in dict(self.options):
                raise InputError(
                    f"{coefficient} is given, and {option} in optimiser_options too, which set the same; drop one."
                )
            if coefficient in BETAS and option not in known:
                able = f"it has {', '.join(known)}" if known else "it has no options"
                raise InputError(
                    f"{coefficient} is given, but the optimiser {name!r} has no option {option!r}; {able}; drop "
                    f"{coefficient}, or choose another optimiser, such as adam."
                )

    def _try_out(self, name: str) -> None:
        """Trace one step, which finds values that optax does not accept."""
        example = {"kernel": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
        try:
            tried = self.transformation
            jax.eval_shape(lambda params: tried.update(params, tried.init(params), params), example)
        except Exception as error:
            given = ", ".join(f"{option}={value}" for option, value in self.options)
            said = shortened(str(error).partition("\n")[0])
            raise InputError(
                f"The optimiser {name!r} does not work with the options {given}: {said} Give other values, as optax's "
                "documentation describes them."
            ) from error

    def _at(self, coef: Mapping[str, Any]) -> optax.GradientTransformation:
        """Return the transformation with the betas of this update, and without a weight decay of its own if one is."""
        chosen = dict(self.options) | {option: coef[name] for name, option in BETAS.items() if name in coef}
        if "weight_decay" in coef and _options(_factory(self.name)[1]).get("weight_decay"):
            chosen["weight_decay"] = 0.0
        return _transformation(self.name, chosen)

    def pack(self, params: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
        """Return the parameters in the form that this optimiser works on, and the inverse function."""
        if isinstance(self.name, str) and self.name in ELEMENTWISE:
            return ravel_pytree(params)
        return params, lambda packed: packed

    def init(self, params: PyTree) -> PyTree:
        """Return the initial state for unpacked parameters."""
        return self.transformation.init(self.pack(params)[0])

    def step(
        self,
        packed: PyTree,
        state: PyTree,
        gradients: PyTree,
        learning_rate: Any,
        max_grad_norm: Any,
        coef: Mapping[str, Any] = NO_COEFFICIENTS,
        reduced: bool = False,
    ) -> Step:
        """Update packed parameters.

            g ← g · min(1, max_grad_norm / ‖g‖)
            θ ← θ − learning_rate · (direction(g, state) + weight_decay · θ)

        Args:
            packed: the parameters, from `pack`.
            state: from `init` or the last step.
            gradients: like the parameters before packing, or `Packed`.
            learning_rate: a scalar.
            max_grad_norm: a scalar, or `None` for no clipping.
            coef: scalars by name; `weight_decay`, `beta1` and `beta2` count. Without `weight_decay`, the optimiser's
                own applies.
            reduced: whether the gradients are already the mean over all devices; otherwise it is taken here.
        """
        given = gradients if isinstance(gradients, Packed) else Packed(self.pack(gradients)[0])
        gradients = given.gradients if reduced else across.mean(given.gradients)
        is_whole = reduced or across.devices() == 1
        norm = given.norm if given.norm is not None and is_whole else optax.tree.norm(gradients)
        if max_grad_norm is not None:
            # Avoid dividing by a norm of 0; a non-finite norm stays visible and is not clipped away.
            scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12))
            gradients = jax.tree.map(lambda gradient: gradient * scale, gradients)
        directions, state = self._at(coef).update(gradients, state, packed)
        if "weight_decay" in coef:
            directions = jax.tree.map(lambda d, p: d - coef["weight_decay"] * p, directions, packed)

        def moved(parameter: jax.Array, direction: jax.Array) -> jax.Array:
            return parameter + (learning_rate * direction).astype(parameter.dtype)

        return Step(jax.tree.map(moved, packed, directions), state, norm)

    def improve(
        self,
        params: PyTree,
        state: PyTree,
        gradients: PyTree,
        learning_rate: Any,
        max_grad_norm: Any,
        coef: Mapping[str, Any] = NO_COEFFICIENTS,
    ) -> Step:
        """Update unpacked parameters; see `step`."""
        packed, unpack = self.pack(params)
        step = self.step(packed, state, gradients, learning_rate, max_grad_norm, coef)
        return step._replace(params=unpack(step.params))


def optimiser(name: Any, options: Mapping[str, Any] | None = None) -> Optimiser:
    """Return the optimiser with this name in optax or `optax.contrib`, with options.

    >>> adam = optimiser("adam", {"b1": 0.5})
    >>> packed, unpack = adam.pack({"w": jnp.ones(2)})
    >>> step = adam.step(packed, adam.init({"w": jnp.ones(2)}), {"w": jnp.array([3.0, 4.0])}, 0.1, max_grad_norm=None)
    >>> float(step.gradient_norm), [round(float(w), 3) for w in unpack(step.params)["w"]]
    (5.0, [0.9, 0.9])
    """
    return Optimiser(name, tuple(sorted((options or {}).items())))


def _factory(given: Any) -> tuple[str, Any]:
    """Return the name of an optimiser, and the transformation or the function that makes it."""
    if not isinstance(given, str):
        return getattr(given, "__name__", type(given).__name__), given
    if ":" in given:
        return given, plugins.import_object(given, "optimiser")
    return given, OWN.get(given) or vars(optax).get(given) or vars(optax.contrib).get(given)


def _options(factory: Any) -> dict[str, Any]:
    """Return the options of a function that makes an optimiser, without the learning rate, with their defaults."""
    if isinstance(factory, optax.GradientTransformation) or not callable(factory):
        return {}
    parameters = inspect.signature(factory).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "learning_rate"}


def _transformation(given: Any, options: dict[str, Any]) -> optax.GradientTransformation:
    name, factory = _factory(given)
    if isinstance(factory, optax.GradientTransformation):
        if options:
            raise InputError(
                f"optimiser_options is {options}, but the optimiser is a transformation that is already made; set its "
                "options there."
            )
        return factory
    known_as = getattr(factory, "__name__", "")
    if known_as in REFUSED and factory.__module__.startswith("optax."):
        raise InputError(
            f"The optimiser {known_as!r} cannot be used: {REFUSED[known_as]}; choose another, such as adam."
        )
    if not callable(factory) or "learning_rate" not in inspect.signature(factory).parameters:
        raise InputError(f"There is no optimiser {name!r}; {closest(name, sorted({*ELEMENTWISE, 'muon'}))}")
    known = _options(factory)
    for option, value in options.items():
        if option not in known:
            raise InputError(f"The optimiser {name!r} has no option {option!r}; {closest(option, known)}")
        is_number = isinstance(known[option], int | float) and not isinstance(known[option], bool)
        if is_number and isinstance(value, str | bool | None):
            raise InputError(f"The option {option!r} of the optimiser {name!r} is {value!r}; give a number.")
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
