"""Coefficients that react to training instead of following the clock.

A controller is a few numbers and three pure functions, the same three that a schedule has:

    state = controller.init()                       arrays, part of the run's state
    coefficient = controller.value(state, step)     the coefficient for this update
    state = controller.update(state, metrics)       after the update, from its metrics

Its numbers are pytree leaves: controllers can be stacked and vmapped, and changing the numbers never recompiles. A
non-finite metric, for example because no episode has ended yet, leaves the state unchanged.

A controller of your own is a subclass of `Controller`, a frozen dataclass registered as a pytree, given as an object or
as the text `module:Class(field=value, ...)`; see docs/extend.md.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr import plugins
from lehr.errors import InputError, closest, quoted, shortened
from lehr.schedules.phases import number_text
from lehr.schedules.text import parse_number


class Value(NamedTuple):
    """The state of a controller that only remembers its coefficient."""

    value: jax.Array
    """float32 `[]`."""


class PlateauState(NamedTuple):
    """The coefficient, the best metric so far, and the updates counted without improvement."""

    value: jax.Array
    """float32 `[]`."""
    best: jax.Array
    """float32 `[]`; larger is better."""
    waited: jax.Array
    """int32 `[]`."""


def _name(default: str) -> Any:
    """Declare a metric's name, which is static and not a pytree leaf."""
    return field(default=default, metadata={"static": True})


class Controller:
    """Base class of controllers: the part of the schedule protocol besides `init` and `update`.

    A subclass is a `@dataclass(frozen=True)` under `@jax.tree_util.register_dataclass`. It has `init`, `update`, and
    its limits: `minimum` and `maximum`, or a method `bounds`. The state that `init` gives has a field `value`, unless
    the subclass has its own method `value`.
    """

    metric: str
    minimum: Any
    maximum: Any

    @property
    def is_bound(self) -> bool:
        """Always true: a controller does not depend on the budget."""
        return True

    def bind(self, total_steps: float) -> "Controller":
        """Return the controller itself: it does not depend on the budget."""
        _check_protocol(self)
        return self

    def bounds(self) -> tuple[float, float]:
        """Return the limits of the coefficient."""
        return float(getattr(self, "minimum", -math.inf)), float(getattr(self, "maximum", math.inf))

    def value(self, state: Any, step: Any) -> jax.Array:
        """Return the current coefficient, whatever the step."""
        return state.value

    def __call__(self, step: Any) -> Any:
        """Raise an error: unlike a schedule, a controller has no value at a step."""
        raise InputError(
            f"'{self!s}' is a controller, whose value depends on the run's metrics and not on the step; read it from "
            "the column coef/<name> of the run's metrics."
        )

    def __str__(self) -> str:
        return to_text(self)

    def _observed(self, metrics: Mapping[str, Any]) -> jax.Array:
        if self.metric not in metrics:
            raise InputError(
                f"{type(self).__name__} needs the metric {self.metric!r}, which is not measured; "
                f"{closest(self.metric, metrics)}"
            )
        return jnp.asarray(metrics[self.metric], jnp.float32)


class Remembered(Controller, ABC):
    """Abstract base class of controllers that remember nothing but the coefficient, which `_moved` changes."""

    initial: Any

    def init(self) -> Value:
        """Return the initial coefficient."""
        return Value(jnp.asarray(self.initial, jnp.float32))

    def update(self, state: Value, metrics: Mapping[str, Any]) -> Value:
        """Move the coefficient, unless the metric is not finite."""
        observed = self._observed(metrics)
        moved = self._moved(state.value, observed)
        return Value(jnp.where(jnp.isfinite(observed), moved, state.value))

    @abstractmethod
    def _moved(self, value: jax.Array, observed: jax.Array) -> jax.Array:
        """Return the coefficient after an update with this metric."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TargetEntropy(Remembered):
    r"""An entropy coefficient that keeps the policy's entropy near a target.

    $c \leftarrow \mathrm{clip}(c \exp(\eta\,(H^* - H)), c_{min}, c_{max})$: it grows while the entropy $H$ is below the
    target $H^*$ and shrinks while it is above, at rate $\eta$ per update and unit of entropy.

    >>> controller = TargetEntropy(target=0.5, rate=0.1, initial=0.01)
    >>> state = controller.update(controller.init(), {"policy/entropy": 0.0})
    >>> round(float(controller.value(state, 0)), 6)
    0.010513
    """

    target: Any
    rate: Any = 0.01
    initial: Any = 0.01
    minimum: Any = 1e-6
    maximum: Any = 1.0
    metric: str = _name("policy/entropy")

    def __post_init__(self) -> None:
        """Check the arguments, unless they are tracers."""
        _check(self, "rate", self.rate, above=0)
        _check(self, "target", self.target)
        _check_limits(self)

    def _moved(self, value: jax.Array, observed: jax.Array) -> jax.Array:
        """Raise the coefficient if the entropy is below the target, lower it if above."""
        moved = value * jnp.exp(self.rate * (self.target - observed))
        return jnp.clip(moved, self.minimum, self.maximum)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plateau(Controller):
    r"""A coefficient that is multiplied by a factor when a metric stops improving.

    A metric improves when it exceeds the best so far by more than `threshold`. After `patience` updates in a row
    without improvement, $c \leftarrow \mathrm{clip}(c \cdot factor, c_{min}, c_{max})$, and the count restarts.

    >>> controller = Plateau(initial=0.03, factor=0.5, patience=2)
    >>> state = controller.init()
    >>> for episode_return in (1.0, 1.0, 1.0):
    ...     state = controller.update(state, {"episode/return": episode_return})
    >>> round(float(controller.value(state, 0)), 6)
    0.015
    """

    initial: Any
    factor: Any = 0.5
    patience: Any = 10
    threshold: Any = 0.0
    minimum: Any = 0.0
    maximum: Any = math.inf
    metric: str = _name("episode/return")

    def __post_init__(self) -> None:
        """Check the arguments, unless they are tracers."""
        _check(self, "factor", self.factor, above=0)
        _check(self, "patience", self.patience, least=1)
        _check(self, "threshold", self.threshold, least=0)
        _check_limits(self)

    def bounds(self) -> tuple[float, float]:
        """Return the range from the initial value to the limit that `factor` moves it toward."""
        if self.factor <= 1:
            return min(float(self.minimum), float(self.initial)), float(self.initial)
        return float(self.initial), float(self.maximum)

    def init(self) -> PlateauState:
        """Return the initial coefficient and a best metric of minus infinity."""
        return PlateauState(jnp.asarray(self.initial, jnp.float32), jnp.float32(-jnp.inf), jnp.int32(0))

    def update(self, state: PlateauState, metrics: Mapping[str, Any]) -> PlateauState:
        """Count updates without improvement; after `patience` of them, apply the factor."""
        metric = self._observed(metrics)
        better = metric > state.best + self.threshold
        waited = jnp.where(better, 0, state.waited + 1)
        stalled = waited >= self.patience
        moved = jnp.clip(state.value * self.factor, self.minimum, self.maximum)
        after = PlateauState(
            jnp.where(stalled, moved, state.value),
            jnp.where(better, metric, state.best),
            jnp.where(stalled, 0, waited).astype(jnp.int32),
        )
        return jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(metric), new, old), after, state)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptiveKL(Remembered):
    r"""A learning rate that keeps the KL divergence of each policy update near a target.

    With the measured divergence $D$: $\eta \leftarrow \eta / factor$ when $D > band \cdot target$,
    $\eta \cdot factor$ when $0 < D < target / band$, unchanged in between, always within the limits.

    >>> controller = AdaptiveKL(initial=3e-4, target=0.01)
    >>> state = controller.update(controller.init(), {"policy/approximate_kl": 0.05})
    >>> round(float(controller.value(state, 0)), 7)
    0.0002
    """

    initial: Any
    target: Any = 0.01
    factor: Any = 1.5
    band: Any = 2.0
    minimum: Any = 1e-5
    maximum: Any = 1e-2
    metric: str = _name("policy/approximate_kl")

    def __post_init__(self) -> None:
        """Check the arguments, unless they are tracers."""
        _check(self, "target", self.target, above=0)
        _check(self, "factor", self.factor, above=1)
        _check(self, "band", self.band, least=1)
        _check_limits(self)

    def _moved(self, value: jax.Array, observed: jax.Array) -> jax.Array:
        """Lower the rate if the policy moved too far, raise it if it moved too little."""
        small = (observed > 0) & (observed < self.target / self.band)
        after_large, after_small = self._moves(value)
        return jnp.where(observed > self.target * self.band, after_large, jnp.where(small, after_small, value))

    def _moves(self, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the values to use after a divergence that was too large and one that was too small."""
        return jnp.maximum(value / self.factor, self.minimum), jnp.minimum(value * self.factor, self.maximum)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KLPenalty(AdaptiveKL):
    r"""The weight of a KL penalty that keeps policy updates near a target KL divergence (Schulman et al., 2017).

    With the measured divergence $D$: $\beta \cdot factor$ when $D > band \cdot target$, $\beta / factor$ when
    $0 < D < target / band$, unchanged in between, always within the limits.

    >>> controller = KLPenalty(initial=1.0, target=0.01)
    >>> float(controller.value(controller.update(controller.init(), {"policy/kl": 0.05}), 0))
    2.0
    """

    factor: Any = 2.0
    band: Any = 1.5
    minimum: Any = 1e-4
    maximum: Any = 1e4
    metric: str = _name("policy/kl")

    def _moves(self, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return a larger weight for updates that were too large, a smaller one for those that were too small."""
        return jnp.minimum(value * self.factor, self.maximum), jnp.maximum(value / self.factor, self.minimum)


def target_entropy(target: float, rate: float = 0.01, **more: Any) -> TargetEntropy:
    """Build a `TargetEntropy`; as a string, `auto(target_entropy=...)`."""
    return TargetEntropy(target, rate, **more)


def plateau(value: float, factor: float = 0.5, patience: int = 10, **more: Any) -> Plateau:
    """Build a `Plateau`; as a string, `plateau(...)`."""
    return Plateau(value, factor, patience, **more)


def adaptive_kl(value: float, target: float = 0.01, **more: Any) -> AdaptiveKL:
    """Build an `AdaptiveKL`; as a string, `adaptive_kl(...)`."""
    return AdaptiveKL(value, target, **more)


def kl_penalty(value: float, target: float = 0.01, **more: Any) -> KLPenalty:
    """Build a `KLPenalty`; as a string, `kl_penalty(...)`."""
    return KLPenalty(value, target, **more)


# Checks ----------------------------------------------------------------------------------------------------------


def _check_protocol(controller: Controller) -> None:
    """Refuse a controller of the user's own that training could not use."""
    name = type(controller).__name__
    if missing := [method for method in ("init", "update") if not callable(getattr(controller, method, None))]:
        raise InputError(f"The controller {name} has no {' and no '.join(missing)}; see lehr.schedules.controllers.")
    if not is_dataclass(controller) or jax.tree_util.all_leaves([controller]):
        raise InputError(
            f"The controller {name} is not a pytree; decorate its class with @jax.tree_util.register_dataclass and "
            "@dataclass(frozen=True)."
        )


def _check(controller: Controller, name: str, value: Any, above: float = -math.inf, least: float = -math.inf) -> None:
    if not isinstance(value, bool | int | float | np.number):
        return  # a tracer, an array from a stack, or a placeholder of a JAX transformation
    if isinstance(value, bool) or math.isnan(value) or not (value > above and value >= least) or math.isinf(value):
        limit = f"above {above:g}" if above > -math.inf else f"{least:g} or more" if least > -math.inf else "finite"
        raise InputError(f"{type(controller).__name__} got {name}={quoted(value)}; it must be {limit}.")


def _check_limits(controller: Any) -> None:
    low, start, high = controller.minimum, controller.initial, controller.maximum
    if not all(isinstance(number, int | float | np.number) for number in (low, start, high)):
        return
    if not low <= start <= high or math.isinf(start):
        raise InputError(
            f"{type(controller).__name__} starts at {start:g}; it must start at a finite value within its limits, "
            f"{low:g} to {high:g}."
        )


# String form -------------------------------------------------------------------------------------------------------

_TEXTS: dict[str, tuple[type[Any], dict[str, str], tuple[str, ...]]] = {
    # name: (class, argument names that differ from the field names, arguments that may be positional)
    "auto": (TargetEntropy, {"target_entropy": "target", "value": "initial"}, ()),
    "plateau": (Plateau, {"value": "initial"}, ("value", "factor", "patience")),
    "adaptive_kl": (AdaptiveKL, {"value": "initial"}, ("value", "target")),
    "kl_penalty": (KLPenalty, {"value": "initial"}, ("value", "target")),
}
_CALL = re.compile(r"\s*((?:[A-Za-z_][\w.]*:)?[A-Za-z_][\w.]*)\s*\((.*)\)\s*")
_WHOLE_NUMBER = re.compile(r"[-+]?\d+")
_WORDS = {"true": True, "false": False, "none": None, "inf": math.inf, "-inf": -math.inf}
"""What the arguments of a controller of the user's own may be, besides numbers and strings."""


def is_controller_text(text: str) -> bool:
    """Whether the string is a call, `name(...)` or `module:Class(...)`; only controllers are written this way."""
    return _CALL.fullmatch(text) is not None


def parse_controller(text: str) -> Controller:
    """Parse a controller from its string form.

    >>> parse_controller("plateau(0.03, factor=0.5, patience=10)").patience
    10.0
    >>> parse_controller("lehr.schedules.controllers:Plateau(initial=0.03, patience=5)").patience
    5
    """
    match = _CALL.fullmatch(text)
    called = match[1] if match else text
    if match is not None and ":" in called:
        return _parse_own(called, match[2], text)
    if match is None or called not in _TEXTS:
        raise InputError(f"Unknown controller {called!r} in {text!r}; {closest(called, _TEXTS)}")
    kind, spelled, unnamed = _TEXTS[called]
    known = [_spelled_as(entry.name, spelled) for entry in fields(kind)]
    arguments: dict[str, Any] = {}
    for name, value in _arguments(match[2], text, known, unnamed):
        meant = spelled.get(name, name)
        if meant in arguments:
            raise InputError(f"The argument {name!r} appears twice in {text!r}; remove one.")
        arguments[meant] = value if meant == "metric" else parse_number(value) if value != "inf" else math.inf
    try:
        return kind(**arguments)
    except TypeError:
        missing = known[0]
        raise InputError(f"{text!r} is missing {missing}; write {called}({missing}=...).") from None


def _parse_own(reference: str, inside: str, text: str) -> Controller:
    """Parse `module:Class(field=value, ...)`: a controller of the user's own."""
    kind = plugins.import_object(reference, "controller")
    if not (isinstance(kind, type) and issubclass(kind, Controller)):
        raise InputError(
            f"{reference!r} is {shortened(repr(kind))}, which is no controller; name a class that inherits "
            "from lehr.schedules.Controller."
        )
    if not is_dataclass(kind):
        raise InputError(f"The controller {reference!r} is not a dataclass; decorate it with @dataclass(frozen=True).")
    entries = {entry.name: entry for entry in fields(kind) if entry.init}
    arguments: dict[str, Any] = {}
    for name, value in _arguments(inside, text, list(entries), ()):
        if name in arguments:
            raise InputError(f"The argument {name!r} appears twice in {text!r}; remove one.")
        arguments[name] = value if entries[name].type in (str, "str") else _own_value(value)
    required = [entry for entry in entries.values() if entry.default is MISSING and entry.default_factory is MISSING]
    if missing := [entry.name for entry in required if entry.name not in arguments]:
        raise InputError(f"{text!r} is missing {', '.join(missing)}; write {reference}({missing[0]}=...).")
    return kind(**arguments)


def _arguments(inside: str, text: str, known: list[str], unnamed: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Split what stands between the parentheses into names and values."""
    for index, piece in enumerate(inside.split(",") if inside.strip() else []):
        name, equals, value = (part.strip() for part in piece.rpartition("="))
        if not equals:
            if index >= len(unnamed):
                raise InputError(
                    f"The argument {value!r} in {text!r} has no name; write name=value with one of {', '.join(known)}."
                )
            name = unnamed[index]
        if name not in known:
            raise InputError(f"Unknown argument {name!r} in {text!r}; {closest(name, known)}")
        yield name, value


def _own_value(text: str) -> Any:
    """Read an argument of a controller of the user's own: a number, true, false, none, or else a string."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _WHOLE_NUMBER.fullmatch(text):
        return int(text)
    try:
        return parse_number(text)
    except InputError:
        return text


def _spelled_as(name: str, spelled: dict[str, str]) -> str:
    """Return the argument name that the string form uses for a field."""
    return next((written for written, meant in spelled.items() if meant == name), name)


def to_text(controller: Any) -> str:
    """Return the string form of a controller; parsing it gives an equal controller.

    A controller of the user's own that no string can hold, because its class is in a script or inside a function, or
    because a field is an array, is described in angle brackets, as functions are.

    >>> str(adaptive_kl(3e-4, target=0.02))
    'adaptive_kl(value=0.0003, target=0.02)'
    """
    found = [(name, spelled) for name, (kind, spelled, _) in _TEXTS.items() if kind is type(controller)]
    if not found:
        return _own_text(controller)
    name, spelled = found[0]
    words = []
    for entry in fields(controller):
        value = getattr(controller, entry.name)
        if value != entry.default:
            shown = value if entry.name == "metric" else number_text(float(value))
            words.append(f"{_spelled_as(entry.name, spelled)}={shown}")
    return f"{name}({', '.join(words)})"


def _own_text(controller: Any) -> str:
    """The string form of a controller of the user's own, or its description where that would not give it back."""
    reference = plugins.text_of(type(controller))
    described = f"<object {type(controller).__qualname__}>"
    if plugins.is_placeholder(reference) or not is_dataclass(controller):
        return described
    words = []
    for entry in fields(controller):
        value = getattr(controller, entry.name)
        if isinstance(value, np.ndarray | np.generic | jax.Array) and value.ndim == 0:
            value = value.item()
        if not isinstance(value, bool | int | float | str | None):
            return described
        if entry.init and (type(value), value) != (type(entry.default), entry.default):
            plain = value is None or isinstance(value, bool)
            words.append(f"{entry.name}={str(value).lower() if plain else value}")
    text = f"{reference}({', '.join(words)})"
    try:
        same = parse_controller(text) == controller
    except InputError:
        same = False
    return text if same else described
