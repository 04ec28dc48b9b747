"""Schedules for RLlib's PPO on its new API stack: a callback that sets coefficients before every rollout.

    config = PPOConfig().environment("CartPole-v1").callbacks(
        schedules(total_timesteps=400_000, entropy_coeff="0.01 -> 0.001 cosine", lr="3e-4 -> 0")
    )

A coefficient is set where RLlib reads it. Most are read from the learners' config at every update. The learning rate
and the entropy coefficient come from scheduler objects, which are replaced by constant ones. The weight of the KL
divergence is a variable, and the discount and lambda are attributes of the connector that computes advantages.
"""

from collections.abc import Mapping
from typing import Any

from lehr.algorithms.vocabulary import coefficient
from lehr.compat.names import clock_schedule, named_coefficients
from lehr.errors import InputError
from lehr.plugins import require
from lehr.schedules import Coefficient, FunctionSchedule
from lehr.schedules.phases import check_total

_Base: Any = object
_missing: InputError | None = None
try:
    _Base = require("ray.rllib.callbacks.callbacks", "rllib", "schedules").RLlibCallback
    _ppo = require("ray.rllib.algorithms.ppo", "rllib", "schedules")
    _connectors = require("ray.rllib.connectors.learner", "rllib", "schedules")
    _scheduler = require("ray.rllib.utils.schedules.scheduler", "rllib", "schedules")
except InputError as error:
    _missing = error  # raised by `schedules`, so that this module can be imported without the package

NAMES: Mapping[str, str] = {
    "learning_rate": "lr",
    "entropy_coef": "entropy_coeff",
    "value_coef": "vf_loss_coeff",
    "clip_range": "clip_param",
    "discount": "gamma",
    "gae_lambda": "lambda_",
    "max_grad_norm": "grad_clip",
    "kl_coef": "kl_coeff",
}
"""RLlib's names, by Lehr's names."""
VALUE_CLIP = Coefficient(
    name="vf_clip_param", description="maximum squared error of a value in the loss", open_minimum=True
)
"""Only RLlib has it: it caps the error of a value, where other libraries keep a value close to the rollout's."""
KL_TARGET = Coefficient(name="kl_target", description="KL divergence that RLlib adapts kl_coeff to", open_minimum=True)
"""Only RLlib has it: Lehr's target_kl stops an update."""
_UNUSED_WITHOUT = {"use_kl_loss": ("kl_coeff", "kl_target"), "use_critic": ("vf_loss_coeff", "vf_clip_param")}
_STEPS = ("env_runners", "num_env_steps_sampled_lifetime")


class Scheduling(_Base):
    """Sets PPO's coefficients by schedules; `schedules` makes the subclass that an `AlgorithmConfig` takes.

    The clock is the env steps sampled before the update's rollout, also in a restored algorithm. A rollout and the
    gradient steps on it share one value, and the first update uses the start value. The applied values are in the
    results under `schedule`, with RLlib's names.
    """

    schedules: Mapping[str, Any] = {}
    """Schedules bound to the budget, by RLlib's names."""

    def __init__(self) -> None:
        super().__init__()
        if not self.schedules:
            raise InputError("Scheduling has no schedules; use the class that schedules(lr='3e-4 -> 0') returns.")
        self.values: dict[str, float] = {}
        """The current values, by RLlib's names."""

    def on_algorithm_init(self, *, algorithm: Any, **_: Any) -> None:
        """Check that the algorithm uses all of the coefficients, and set them before each of its rollouts."""
        _check_algorithm(algorithm, self)
        self._apply(algorithm)  # some mistakes are only found in the learners
        train = algorithm.training_step

        # RLlib has no callback at this point: none runs between `from_checkpoint`, which restores the step count last,
        # and the next update, or between the updates of one iteration.
        def scheduled() -> Any:
            self._apply(algorithm)
            for name, value in self.values.items():
                algorithm.metrics.log_value(("schedule", name), value, reduce="item")
            return train()

        algorithm.training_step = scheduled

    def _apply(self, algorithm: Any) -> None:
        clock = algorithm.metrics.peek(_STEPS, default=0)
        self.values = {name: float(bound(clock)) for name, bound in self.schedules.items()}
        for answer in algorithm.learner_group.foreach_learner(_set, values=self.values):
            if not answer.ok:
                raise answer.get()
            if answer.get() is not None:
                raise InputError(answer.get())


def schedules(*, total_timesteps: float | None = None, **coefficients: Any) -> type[Scheduling]:
    """Make a callback class that sets these coefficients, for `AlgorithmConfig.callbacks`, alone or in a list.

    Args:
        total_timesteps: the env steps of the whole training, which percentages in a schedule refer to.
        coefficients: under RLlib's name or any of Lehr's, anything that `lehr.schedule` takes: a number, a text, a
            mapping, a list of `[step, value]` pairs, a `Schedule`, a function of env steps.
    """
    if _missing is not None:
        raise _missing
    for name in coefficients:
        if name in ("value_clip_range", *coefficient("value_clip_range").aliases):
            raise InputError(
                f"RLlib has no {name}, which keeps a value close to the rollout's; its {VALUE_CLIP.name} is the "
                "maximum squared error of a value; give that if you mean it."
            )
    given = named_coefficients(
        coefficients, NAMES, [VALUE_CLIP, KL_TARGET], speaker="schedules", example="entropy_coeff"
    )
    if "kl_coeff" in given and "kl_target" in given:
        raise InputError(
            "kl_coeff and kl_target are both scheduled, but RLlib adapts kl_coeff to kl_target, so one of them would "
            "have no effect; remove one."
        )
    total = None if total_timesteps is None else check_total(total_timesteps, "total_timesteps")
    bound = {name: _bound(entry, spec, total) for name, (entry, spec) in given.items()}

    class Scheduled(Scheduling):
        """Sets the coefficients given to `schedules`."""

        schedules = bound

    return Scheduled


def _bound(entry: Coefficient, spec: Any, total: float | None) -> Any:
    """The schedule of a spec, bound to the budget and checked against its range."""
    made = clock_schedule(entry.name, spec, "a checkpoint of RLlib")
    if total is not None:
        made = made.bind(total)
    elif not made.is_bound or isinstance(made, FunctionSchedule):
        raise InputError(
            f"{entry.name} is '{made}', which cannot be checked without the budget; give total_timesteps, the env "
            "steps of the whole training."
        )
    entry.check(made)
    return made


def _check_algorithm(algorithm: Any, callback: Scheduling) -> None:
    """Raise if the algorithm does not use one of the coefficients, or if something else sets it."""
    config, kind = algorithm.config, type(algorithm).__name__
    if not isinstance(algorithm, _ppo.PPO):
        raise InputError(
            f"schedules was given to {kind}; it sets the coefficients of PPO, where an update follows each rollout."
        )
    if not (config.enable_rl_module_and_learner and config.enable_env_runner_and_connector_v2):
        raise InputError(
            f"schedules was given to {kind} on RLlib's old API stack, which has no learners to set coefficients in; "
            "remove api_stack from the config, or turn both of its settings on."
        )
    for name in callback.schedules:
        for switch, names in _UNUSED_WITHOUT.items():
            if name in names and not getattr(config, switch):
                raise InputError(f"{name} is scheduled, but with {switch}=False {kind} does not use it; remove one.")
        if other := _other(algorithm, name):
            raise InputError(f"{name} is scheduled, and {other} sets it too; remove one.")
    _claimed(algorithm).update(callback.schedules)


def _claimed(algorithm: Any) -> set[str]:
    """The coefficients that all `Scheduling` callbacks of an algorithm have claimed so far."""
    return vars(algorithm).setdefault("_scheduled_coefficients", set())


def _other(algorithm: Any, name: str) -> str | None:
    """What else sets this coefficient, if anything."""
    config = algorithm.config
    if isinstance(getattr(config, name), list | tuple):
        return f"the config's own schedule {getattr(config, name)}"
    if name == "lr" and config._torch_lr_scheduler_classes:
        return "the config's _torch_lr_scheduler_classes"
    for module, overrides in config.algorithm_config_overrides_per_module.items():
        if name in overrides:
            return f"the config's override for the module {module!r}"
    return "another schedules(...) among the callbacks" if name in _claimed(algorithm) else None


def _set(learner: Any, values: Mapping[str, float]) -> str | None:
    """Put values where a learner reads them. A mistake is returned as a text: the learner may be on another machine."""
    modules = list(learner.module.keys())
    for config in (learner.config, *(learner.config.get_config_for_module(module) for module in modules)):
        vars(config).update(values)  # also if the config is frozen
    if "lr" in values:
        for name, optimizer in learner._named_optimizers.items():
            if optimizer not in learner._optimizer_lr_schedules:
                return f"lr is scheduled, but the optimiser {name} was registered without a learning rate; remove lr."
            learner._optimizer_lr_schedules[optimizer] = _constant(learner, values["lr"])
            learner._set_optimizer_lr(optimizer, lr=values["lr"])
    for module in modules:
        if "entropy_coeff" in values:
            learner.entropy_coeff_schedulers_per_module[module] = _constant(learner, values["entropy_coeff"])
        if "kl_coeff" in values:
            learner.curr_kl_coeffs_per_module[module] = learner._get_tensor_variable(values["kl_coeff"])
    for name in {"gamma", "lambda_"} & set(values):
        pipeline = learner._learner_connector
        pieces = [] if pipeline is None else pipeline.connectors
        advantages = [piece for piece in pieces if isinstance(piece, _connectors.GeneralAdvantageEstimation)]
        if not advantages:
            return f"{name} is scheduled, but the learner has no GeneralAdvantageEstimation to set it in; remove it."
        for piece in advantages:
            setattr(piece, name, values[name])
    return None


def _constant(learner: Any, value: float) -> Any:
    """RLlib's scheduler of a constant value."""
    return _scheduler.Scheduler(value, framework=learner.framework, device=learner.device)
