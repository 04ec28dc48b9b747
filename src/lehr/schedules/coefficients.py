"""The coefficients: their names, the names people bring from elsewhere, their ranges; and a config's value for one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from lehr.errors import InputError, closest
from lehr.schedules.constructors import number, position, warmup
from lehr.schedules.controllers import Controller
from lehr.schedules.function import FunctionSchedule
from lehr.schedules.phases import Position, check_total, number_text
from lehr.schedules.shapes import NAMES
from lehr.schedules.spec import AnySchedule, schedule


@dataclass(frozen=True)
class Coefficient:
    """A number of the mathematics, hence schedulable."""

    name: str
    aliases: tuple[str, ...]
    description: str
    least: float = 0.0
    most: float = math.inf
    open_least: bool = False
    """Whether the least value itself is out of range."""

    @property
    def range_text(self) -> str:
        """The range in interval notation."""
        left = "(" if self.open_least else "["
        right = ")" if math.isinf(self.most) else "]"
        return f"{left}{number_text(self.least)}, {'∞' if math.isinf(self.most) else number_text(self.most)}{right}"

    def check(self, value: AnySchedule | Controller) -> None:
        """Raise if the coefficient would leave its range at any step."""
        low, high = value.bounds()
        below = low <= self.least if self.open_least else low < self.least
        if below or high > self.most or math.isnan(low + high):
            worst = low if below else high
            raise InputError(
                f"{self.name} is '{value}', which reaches {number_text(worst)}; it must stay in {self.range_text} at "
                "every step."
            )


_TABLE = (
    Coefficient("learning_rate", ("lr", "alpha_lr"), "step size of the optimiser"),
    Coefficient(
        "entropy_coef",
        ("ent_coef", "entropy_cost", "entropy_coeff"),
        "weight of the entropy bonus in the loss",
    ),
    Coefficient(
        "value_coef",
        ("vf_coef", "vf_loss_coeff", "vf_loss_coefficient", "critic_coef"),
        "weight of the value loss",
    ),
    Coefficient(
        "clip_range",
        ("clip_coef", "clip_param", "clip_eps", "clipping_epsilon"),
        "how far the ratio may leave 1",
        open_least=True,
    ),
    Coefficient(
        "value_clip_range",
        ("clip_range_vf", "vf_clip_coef", "clipping_epsilon_value"),
        "how far a value may leave the one of the rollout",
        open_least=True,
    ),
    Coefficient("discount", ("gamma", "discounting"), "worth of a reward one step later", most=1.0),
    Coefficient("gae_lambda", ("lambda_", "lam", "lambda"), "mix of short and long returns in the advantage", most=1.0),
    Coefficient("rho_clip", ("vtrace_rho_clip", "rho_bar"), "clip of V-trace's ratio in the error", open_least=True),
    Coefficient(
        "policy_rho_clip",
        ("vtrace_pg_rho_clip", "pg_rho_clip", "clip_pg_rho_threshold", "vtrace_clip_pg_rho_threshold"),
        "clip of V-trace's ratio in the policy's gradient",
        open_least=True,
    ),
    Coefficient("c_clip", ("vtrace_c_clip", "c_bar"), "clip of V-trace's ratio in the trace", open_least=True),
    Coefficient(
        "priority_exponent",
        ("prio_alpha", "priority_alpha"),
        "how sharply segments are prioritised; 0 is uniform",
    ),
    Coefficient(
        "importance_exponent",
        ("prio_beta", "prio_beta0", "priority_beta"),
        "how fully importance weights correct for it",
        most=1.0,
    ),
    Coefficient(
        "max_grad_norm",
        ("max_gradient_norm", "grad_clip"),
        "largest global norm of the gradient",
        open_least=True,
    ),
    Coefficient(
        "target_kl",
        ("kl_target", "desired_kl"),
        "divergence at which an update stops, or aims",
        open_least=True,
    ),
    Coefficient(
        "value_learning_rate",
        ("value_lr", "critic_learning_rate", "critic_lr", "vf_lr"),
        "step size of the optimiser of the values",
    ),
    Coefficient("damping", ("cg_damping",), "what is added to the curvature before it is inverted"),
    Coefficient(
        "line_search_shrink",
        ("line_search_shrinking_factor", "backtrack_coeff", "backtrack_ratio"),
        "factor on a step that the line search refused",
        most=1.0,
        open_least=True,
    ),
    Coefficient("kl_coef", ("kl_coeff", "kl_penalty"), "weight of the divergence from the policy before"),
    Coefficient(
        "auxiliary_learning_rate",
        ("auxiliary_lr", "aux_learning_rate", "aux_lr"),
        "step size of the optimiser in an auxiliary phase",
    ),
    Coefficient(
        "clone_coef",
        ("beta_clone", "beta_cl"),
        "weight of the divergence from the policy before an auxiliary phase",
    ),
    Coefficient("weight_decay", (), "pull of the parameters toward 0"),
    Coefficient("reward_scale", ("reward_scaling",), "factor on the reward", open_least=True),
)

COEFFICIENTS: dict[str, Coefficient] = {coefficient.name: coefficient for coefficient in _TABLE}
"""Every coefficient by its canonical name."""

FOREIGN: dict[str, str] = {
    "vf_clip_param": (
        "it is RLlib's largest squared error of a value, which is not here; value_clip_range is how far a value may "
        "leave the one of the rollout"
    ),
}
"""Names that look like one of ours and mean something else, and what that is."""

_BY_ANY_NAME = {name: entry for entry in _TABLE for name in (entry.name, *entry.aliases)}


ENDINGS = ("", "_schedule", "_warmup_steps")
"""What the three keys of a coefficient end in."""


def coefficient(name: str) -> Coefficient:
    """The coefficient of this name, canonical or alias.

    >>> coefficient("ent_coef").name
    'entropy_coef'
    """
    if name not in _BY_ANY_NAME:
        raise InputError(f"There is no coefficient {name!r}; {closest(name, _BY_ANY_NAME)}")
    return _BY_ANY_NAME[name]


def resolve_entropy_coefficient(config: Mapping[str, Any], step: Any, total_steps: float) -> Any:
    """The entropy coefficient of a config at an env step; see `resolve_coefficient`.

    >>> resolve_entropy_coefficient({"ent_coef": 0.02, "ent_coef_schedule": "linear"}, 500_000, 1_000_000)
    0.01
    """
    return resolve_coefficient("entropy_coef", config, step, total_steps)


def resolve_coefficient(name: str, config: Mapping[str, Any], step: Any, total_steps: float) -> Any:
    """The value of a coefficient at an env step, from a config mapping, for people with a training loop of their own.

    Args:
        name: the coefficient, canonical or alias.
        config: the mapping; see `coefficient_schedule` for the keys.
        step: env steps before this update's rollout, a number or traced.
        total_steps: the budget of the whole run.

    >>> config = {"entropy_coef": 0.03, "entropy_coef_schedule": "cosine", "entropy_coef_warmup_steps": 100}
    >>> [resolve_coefficient("entropy_coef", config, step, 1000) for step in (0, 50, 100, 1000)]
    [0.0, 0.015, 0.03, 0.0]
    """
    found = coefficient_schedule(name, config, total_steps)
    if isinstance(found, Controller):
        raise InputError(
            f"{name} is '{found}', which reacts to metrics and not to the step; use its init, value and update."
        )
    return found(step)


def coefficient_schedule(name: str, config: Mapping[str, Any], total_steps: float) -> AnySchedule | Controller:
    """The schedule of a coefficient in a config, bound and checked.

    For the entropy coefficient these keys count, in one of the spellings, canonical or any alias:

    - `entropy_coef`: the fixed value, or a whole schedule;
    - `entropy_coef_schedule`: a schedule, or the name of a shape, which then goes from the fixed value to 0;
    - `entropy_coef_warmup_steps`: the length of a ramp from 0 in front of it.
    """
    entry = coefficient(name)
    total = check_total(total_steps)
    keys, (fixed, shape, ramp) = _read(entry, config)
    if fixed is None and shape is None:
        raise InputError(f"The config has no {entry.name}; give {entry.name} or {entry.name}_schedule.")
    if ramp is not None:
        steps = position(ramp).bound(total)
        if steps >= total:
            raise InputError(f"{keys.warmup} is {ramp!r}, but the whole budget is {total:g} steps; warm up for less.")
        ramp = steps
    made = combine(keys, fixed, shape, ramp)
    try:
        bound = made.bind(total)
    except InputError as error:
        raise InputError(f"{keys.fixed if shape is None else keys.schedule}: {error}") from None
    entry.check(bound)
    return bound


class Keys(NamedTuple):
    """The three keys of a coefficient, in one spelling."""

    fixed: str
    schedule: str
    warmup: str

    @classmethod
    def spelled(cls, name: str) -> "Keys":
        """The keys for a spelling of the coefficient.

        >>> Keys.spelled("ent_coef").warmup
        'ent_coef_warmup_steps'
        """
        return cls(*(name + ending for ending in ENDINGS))


def combine(keys: Keys, fixed: Any, shape: Any, ramp: Any) -> AnySchedule | Controller:
    """One schedule from the values of the three keys, each `None` where it is not given; its budget is still open.

    >>> str(combine(Keys.spelled("ent_coef"), 0.02, "cosine", "10%"))
    '0 -> 0.02 over 10%, 0.02 -> 0 cosine'
    """
    spec = fixed if shape is None else _scheduled(keys, fixed, shape)
    try:
        made = schedule(spec)
    except InputError as error:
        raise InputError(f"{keys.fixed if shape is None else keys.schedule}: {error}") from None
    if shape is not None and fixed is not None:
        _check_start(keys, fixed, made)
    return made if ramp is None else _warmed(keys, made, ramp)


def _read(entry: Coefficient, config: Mapping[str, Any]) -> tuple[Keys, tuple[Any, Any, Any]]:
    """The three keys of a coefficient, in the one spelling that the config uses, and their values."""
    spellings = (entry.name, *entry.aliases)
    known = [spelling + ending for spelling in spellings for ending in ENDINGS]
    for key in config:
        if isinstance(key, str) and key not in known and key not in _BY_ANY_NAME and key not in FOREIGN:
            near = get_close_matches(key, known, n=1, cutoff=0.8)
            if near and not any(key.startswith(other) for other in _BY_ANY_NAME if other not in spellings):
                raise InputError(f"The config has the unknown key {key!r}; did you mean {near[0]!r}?")
    used = [spelling for spelling in spellings if any(config.get(spelling + ending) is not None for ending in ENDINGS)]
    if len(used) > 1:
        given = [[s + ending for ending in ENDINGS if config.get(s + ending) is not None] for s in used]
        raise InputError(
            f"The config spells {entry.name} in two ways, {', '.join(given[0])} and {', '.join(given[1])}; remove one."
        )
    keys = Keys.spelled(used[0] if used else entry.name)
    return keys, (config.get(keys.fixed), config.get(keys.schedule), config.get(keys.warmup))


def _scheduled(keys: Keys, fixed: Any, shape: Any) -> Any:
    """What the schedule's key says, with what it leaves open taken from the fixed value."""
    if fixed is not None and not is_number(fixed):
        raise InputError(
            f"{keys.fixed} is {fixed!r}, a schedule already; give {keys.fixed} as a number, or remove {keys.schedule}."
        )
    if not is_open(shape):
        return shape
    if fixed is None:
        raise InputError(
            f"{keys.schedule} is {shape!r}, which has no start, and {keys.fixed} is not given; give {keys.fixed}."
        )
    opened = dict(shape) if isinstance(shape, Mapping) else {"shape": shape.strip()}
    is_constant = "constant" in (opened.get("shape"), opened.get("type"), opened.get("kind"))
    return {**({} if is_constant else {"end": 0.0}), **opened, "start": fixed}


def _warmed(keys: Keys, made: AnySchedule | Controller, given: Any) -> AnySchedule | Controller:
    """The schedule behind a ramp from 0, in what the ramp leaves of the budget."""
    try:
        length = position(given)
    except InputError as error:
        raise InputError(f"{keys.warmup}: {error}") from None
    if length == Position():
        return made
    if isinstance(made, Controller):
        raise InputError(
            f"{keys.warmup} is {given!r}, but '{made}' reacts to metrics and cannot be warmed up; remove one of them."
        )
    if _starts(made)[0] == 0:
        raise InputError(
            f"{keys.warmup} is {given!r}, but the schedule '{made}' starts at 0 anyway; remove {keys.warmup}."
        )
    return warmup(length, made)


def _check_start(keys: Keys, fixed: Any, found: AnySchedule | Controller) -> None:
    """Raise if the fixed value is not where the schedule starts, or what its own warm-up leads to."""
    if isinstance(found, Controller):
        raise InputError(f"{keys.schedule} is '{found}', which has its own start; remove {keys.fixed}.")
    starts, value = _starts(found), number(fixed, keys.fixed)
    if not any(math.isclose(start, value, rel_tol=1e-9) for start in starts):
        raise InputError(
            f"{keys.fixed} is {value:g} but {keys.schedule} starts at {starts[-1]:g}; remove {keys.fixed}, or start "
            "the schedule there."
        )


def _starts(made: AnySchedule) -> list[float]:
    """Where a schedule starts, and what its own warm-up leads to."""
    if isinstance(made, FunctionSchedule):
        return [made(0)]
    starts = [phase.start for phase in made.phases[:2]]
    return starts if starts[0] == 0 else starts[:1]


def is_open(given: Any) -> bool:
    """Whether it is a shape that lacks its start."""
    if isinstance(given, Mapping):
        return "start" not in given and "value" not in given
    return isinstance(given, str) and given.strip() in NAMES


def is_number(given: Any) -> bool:
    """Whether it is a plain number, also as a text, as YAML leaves `1e-4` one."""
    try:
        number(given, "value")
    except InputError:
        return False
    return True
