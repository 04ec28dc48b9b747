"""Schedules for Stable-Baselines3 and sb3-contrib: a callback that sets coefficients before every rollout.

    model = PPO("MlpPolicy", "CartPole-v1")
    model.learn(100_000, callback=ScheduleCallback(ent_coef="0.01 -> 0.001 cosine", learning_rate="3e-4 -> 0"))

A coefficient is set where SB3 reads it. Most are plain attributes of the model. The discount and lambda are also in its
rollout buffer, and the discount in `VecNormalize`. The learning rate and the clip ranges are functions of the remaining
progress, called by `train()`: they are replaced by SB3's own constant function, so a saved model loads without Lehr.
"""

from collections.abc import Mapping
from typing import Any

from lehr.compat.names import clock_schedule, named_coefficients
from lehr.errors import InputError, closest
from lehr.plugins import require
from lehr.schedules import FunctionSchedule
from lehr.schedules.phases import check_total

_Base: Any = object
_missing: InputError | None = None
try:
    _utils = require("stable_baselines3.common.utils", "sb3", "ScheduleCallback")
    _on_policy = require("stable_baselines3.common.on_policy_algorithm", "sb3", "ScheduleCallback")
    _Base = require("stable_baselines3.common.callbacks", "sb3", "ScheduleCallback").BaseCallback
except InputError as error:
    _missing = error  # raised by ScheduleCallback, so that this module can be imported without the package

ATTRIBUTES: Mapping[str, str] = {
    "learning_rate": "learning_rate",
    "entropy_coef": "ent_coef",
    "value_coef": "vf_coef",
    "clip_range": "clip_range",
    "value_clip_range": "clip_range_vf",
    "discount": "gamma",
    "gae_lambda": "gae_lambda",
    "max_grad_norm": "max_grad_norm",
    "target_kl": "target_kl",
    "damping": "cg_damping",
    "line_search_shrink": "line_search_shrinking_factor",
}
"""SB3's names, by Lehr's names."""
_FUNCTIONS = ("clip_range", "clip_range_vf")
_SMALL = ("learning_rate", "clip_range")
"""Coefficients that SB3 takes functions for, and that are never above 1 on purpose."""
_IN_THE_BUFFER = ("gamma", "gae_lambda")
_UNUSED_BY = {"TRPO": ("ent_coef", "vf_coef", "max_grad_norm")}
"""Attributes that an algorithm inherits but never reads."""


class ScheduleCallback(_Base):
    """Set the coefficients of an on-policy algorithm by schedules: PPO, A2C, TRPO, RecurrentPPO, MaskablePPO.

    The clock is the env steps collected before the update's rollout. A rollout and the gradient steps on it share one
    value, and the first update uses the start value. The applied values are logged as `schedule/NAME`, with SB3's
    names. After training, the model keeps the values of the last update.

    Args:
        total_timesteps: the budget that percentages in a schedule refer to; by default, that of `learn`, which is the
            steps so far plus the new ones with `reset_num_timesteps=False`.
        verbose: SB3's verbosity.
        coefficients: under SB3's name or any of Lehr's, anything that `lehr.schedule` takes: a number, a text, a
            mapping, a list of `[step, value]` pairs, a `Schedule`, a function of env steps.
    """

    def __init__(self, *, total_timesteps: float | None = None, verbose: int = 0, **coefficients: Any) -> None:
        if _missing is not None:
            raise _missing
        super().__init__(verbose)
        given = named_coefficients(coefficients, ATTRIBUTES, speaker="ScheduleCallback", example="ent_coef")
        self.total_timesteps = None if total_timesteps is None else check_total(total_timesteps, "total_timesteps")
        self._given = {attribute: (entry, _schedule(entry.name, spec)) for attribute, (entry, spec) in given.items()}
        self.schedules: dict[str, Any] = {}
        """Schedules bound to the budget, by SB3's names; set when training starts."""
        self.values: dict[str, float] = {}
        """The current values, by SB3's names."""
        self._normaliser: Any = None
        self._is_training = False

    def _on_training_start(self) -> None:
        # A callback keeps its parent after the training in which it was nested; it is nested now if both are training.
        if self.parent is not None and self.parent.locals is self.locals:
            raise _nested(self.parent)
        _check_model(self.model, list(self._given))
        # With reset_num_timesteps=False, SB3 has added the steps so far to it.
        budget = self.model._total_timesteps if self.total_timesteps is None else self.total_timesteps
        bound = {attribute: made.bind(budget) for attribute, (_, made) in self._given.items()}
        for attribute, (entry, _) in self._given.items():
            entry.check(bound[attribute])
            if attribute in _SMALL:
                _check_clock(entry.name, bound[attribute])
        self.schedules, self._is_training = bound, True
        found = self.model.get_vec_normalize_env() if "gamma" in bound else None
        self._normaliser = found if found is not None and found.gamma == self.model.gamma else None

    def _on_rollout_start(self) -> None:
        for attribute, bound in self.schedules.items():
            value = float(bound(self.model.num_timesteps))
            _apply(self.model, attribute, value)
            self.values[attribute] = value
        if self._normaliser is not None:
            self._normaliser.gamma = self.values["gamma"]

    def _on_training_end(self) -> None:
        self._is_training = False

    def _on_step(self) -> bool:
        if not self._is_training:  # _on_training_start was never called
            raise _nested(self.parent)
        return True

    def _on_rollout_end(self) -> None:
        # Logged here, so that the values are in the row of their rollout: an evaluation during it writes its own row.
        for attribute, value in self.values.items():
            self.logger.record(f"schedule/{attribute}", value)


def _schedule(name: str, spec: Any) -> Any:
    """The schedule of a spec, which must be neither one of SB3's own nor a controller."""
    if _utils.__name__ in (type(spec).__module__, getattr(spec, "__module__", None)):
        raise InputError(
            f"{name} is {spec!r}, a function of the remaining progress, but a function given here is called with env "
            "steps; give it to the model itself, or write it as a text, '3e-4 -> 0' for example."
        )
    return clock_schedule(name, spec, "a file of SB3")


def _check_clock(name: str, bound: Any) -> None:
    """Raise for a function that seems to expect the remaining progress: called with env steps, its value explodes."""
    if not isinstance(bound, FunctionSchedule):
        return
    _, most = bound.bounds()
    if most > 1 >= bound(1):
        raise InputError(
            f"{name} is '{bound}', which reaches {most:g}: a function given here is called with env steps, not with "
            "the remaining progress; give it to the model itself, or write it as a text, '3e-4 -> 0' for example."
        )


def _nested(parent: Any) -> InputError:
    return InputError(
        f"ScheduleCallback is inside {type(parent).__name__}, which does not call it when a rollout starts; give it to "
        "learn, alone or in a list with the others."
    )


def _check_model(model: Any, attributes: list[str]) -> None:
    """Raise if the model does not use one of the attributes."""
    kind = type(model).__name__
    if not isinstance(model, _on_policy.OnPolicyAlgorithm):
        raise InputError(
            f"ScheduleCallback was given to {kind}, which is not an on-policy algorithm; it sets the coefficients of "
            "PPO, A2C, TRPO, RecurrentPPO and MaskablePPO."
        )
    unused = {name for base in type(model).__mro__ for name in _UNUSED_BY.get(base.__name__, ())}
    usable = [name for name in ATTRIBUTES.values() if hasattr(model, name) and name not in unused]
    for attribute in attributes:
        if attribute not in usable:
            raise InputError(f"{kind} has no {attribute} to schedule; {closest(attribute, usable)}")


def _apply(model: Any, attribute: str, value: float) -> None:
    """Put a value where the model reads it."""
    setattr(model, attribute, _constant(value) if attribute in _FUNCTIONS else value)
    if attribute == "learning_rate":
        model.lr_schedule = _constant(value)
    if attribute in _IN_THE_BUFFER:
        setattr(model.rollout_buffer, attribute, value)


def _constant(value: float) -> Any:
    """SB3's constant function, whose name depends on the version."""
    make = getattr(_utils, "FloatSchedule", None) or _utils.get_schedule_fn
    return make(value)
