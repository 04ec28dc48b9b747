"""The seven coefficients of Brax's PPO that can be schedules, under Brax's names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lehr.algorithms.vocabulary import coefficient
from lehr.errors import InputError, closest
from lehr.schedules import Controller, constant, schedule
from lehr.schedules.bundle import Coefficients, bundle

NAMES = (
    "learning_rate",
    "entropy_cost",
    "discounting",
    "reward_scaling",
    "clipping_epsilon",
    "gae_lambda",
    "vf_loss_coefficient",
)
ENTROPY_SHAPES = ("linear", "cosine")


def bound_coefficients(given: Mapping[str, Any], total_steps: float) -> Coefficients:
    """The schedules given for `NAMES`, bound to the budget, as one pytree."""
    return bundle({name: _bound(name, given[name], total_steps) for name in NAMES})


def annealed(entropy_cost: Any, entropy_cost_end: Any, entropy_schedule: str) -> Any:
    """The entropy cost as a schedule to its end value; unchanged without one.

    >>> annealed(0.01, None, "linear")
    0.01
    >>> str(schedule(annealed(0.01, 0.001, "cosine")))
    '0.01 -> 0.001 cosine'
    """
    if entropy_schedule not in ENTROPY_SHAPES:
        raise InputError(f"entropy_schedule is {entropy_schedule!r}; {closest(str(entropy_schedule), ENTROPY_SHAPES)}")
    if entropy_cost_end is None:
        if entropy_schedule != ENTROPY_SHAPES[0]:
            raise InputError(
                f"entropy_schedule is {entropy_schedule!r}, but entropy_cost_end, the value it leads to, is not given; "
                f"set entropy_cost_end, or write entropy_cost='0.01 -> 0.001 {entropy_schedule}'."
            )
        return entropy_cost
    if not is_number(entropy_cost):
        raise InputError(
            f"entropy_cost is already a schedule, {entropy_cost!r}, but entropy_cost_end is {entropy_cost_end!r}; "
            "give entropy_cost as a number, or remove entropy_cost_end."
        )
    end = float(entropy_cost_end) if is_number(entropy_cost_end) else entropy_cost_end
    return {"shape": entropy_schedule, "start": float(entropy_cost), "end": end}


def is_number(given: Any) -> bool:
    """Whether Brax would take this as a number: Python's, NumPy's or JAX's."""
    if isinstance(given, bool | str):
        return False
    return isinstance(given, int | float | np.number) or (hasattr(given, "dtype") and np.ndim(given) == 0)


def _bound(name: str, spec: Any, total_steps: float) -> Any:
    if is_number(spec):
        return constant(float(spec))  # no range check, as in Brax
    try:
        made = schedule(spec).bind(total_steps)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    if isinstance(made, Controller):
        raise InputError(
            f"{name} is '{made}', which adapts to a metric; give a number, a schedule or a function of env steps, or "
            "use learning_rate_schedule='ADAPTIVE_KL'."
        )
    replace(coefficient(name), name=name).check(made)
    return made
