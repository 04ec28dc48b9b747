"""Every coefficient as a function of env steps. Works on its own, in any training loop and any framework."""

from lehr.schedules.coefficient import Coefficient
from lehr.schedules.constructors import (
    constant,
    cosine,
    exponential,
    join,
    linear,
    piecewise,
    polynomial,
    repeat,
    stack,
    warmup,
)
from lehr.schedules.controllers import Controller, adaptive_kl, kl_penalty, plateau, target_entropy
from lehr.schedules.function import FunctionSchedule
from lehr.schedules.keys import coefficient_schedule
from lehr.schedules.phases import Phase, Position
from lehr.schedules.schedule import Schedule
from lehr.schedules.spec import schedule
from lehr.schedules.steps import Steps, env_steps
from lehr.schedules.text import parse

__all__ = [
    "Coefficient",
    "Controller",
    "FunctionSchedule",
    "Phase",
    "Position",
    "Schedule",
    "Steps",
    "adaptive_kl",
    "coefficient_schedule",
    "constant",
    "cosine",
    "env_steps",
    "exponential",
    "join",
    "kl_penalty",
    "linear",
    "parse",
    "piecewise",
    "plateau",
    "polynomial",
    "repeat",
    "schedule",
    "stack",
    "target_entropy",
    "warmup",
]
