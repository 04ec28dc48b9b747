"""Settings that several algorithms share, each declared once with its default, range, aliases and help text.

An algorithm's `Config` inherits from the groups it uses and adds its own fields. To change a default, it redeclares the
field, as in `num_envs: int = 16` or `discount: Coef = 0.98`, and inherits its range, aliases and help text.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import numpy as np

from lehr.config import AutoBool, Coef, Conversion, CountOrAuto, HashableDict, Names, Plugin, check_counts, count_of
from lehr.config.fields import TRUTHS
from lehr.errors import InputError, closest
from lehr.maths import sequences
from lehr.schedules.coefficient import Coefficient
from lehr.spaces import Box, Space, Spaces, leaves

Minibatching = Literal["auto", "flat", "segments", "prioritised"]
Advantage = Literal["gae", "vtrace"]


def _horizon_of_batch(name: str) -> Callable[[Any, Callable[[str], Any]], dict[str, Any]]:
    """Convert the env steps of a whole batch, under this name, to steps per environment."""

    def convert(given: Any, value: Callable[[str], Any]) -> dict[str, Any]:
        steps, num_envs = count_of(name, given), value("num_envs")
        if steps % num_envs:
            raise InputError(
                f"{name} is {steps} env steps, which {num_envs} environments cannot share equally; set horizon, the "
                "steps per environment, and num_envs."
            )
        return {"horizon": steps // num_envs}

    return convert


def _minibatches_of_size(name: str) -> Callable[[Any, Callable[[str], Any]], dict[str, Any]]:
    """Convert the env steps of a minibatch, under this name, to a number of minibatches."""

    def convert(given: Any, value: Callable[[str], Any]) -> dict[str, Any]:
        steps, num_envs, horizon = count_of(name, given), value("num_envs"), value("horizon")
        if num_envs * horizon % steps:
            raise InputError(
                f"{name} is {steps}, but a rollout has num_envs · horizon = {num_envs} · {horizon} = "
                f"{num_envs * horizon} env steps, which is not a multiple of that; choose a size that divides it, or "
                "set minibatches, their number."
            )
        return {"minibatches": num_envs * horizon // steps}

    return convert


def _explain_segments(given: Mapping[str, Any]) -> str:
    """Explain Brax's `batch_size`, which is another thing; empty if the settings are not Brax's."""
    if not {"unroll_length", "num_updates_per_batch", "num_timesteps"} & given.keys():
        return ""
    names = ("unroll_length", "batch_size", "num_minibatches", "num_envs")
    same = "horizon = unroll_length · batch_size · num_minibatches / num_envs"
    if all(type(given.get(name)) is int for name in names):
        unroll_length, batch_size, num_minibatches, num_envs = (given[name] for name in names)
        same = f"horizon={unroll_length * batch_size * num_minibatches // num_envs}, minibatches={num_minibatches}"
    return (
        "in Brax it counts segments of unroll_length steps, which several unrolls collect, while in Lehr each "
        f"environment gives one segment of horizon steps; for a batch of the same size write {same}, without "
        "batch_size and unroll_length"
    )


def _both_normalised(given: Any, value: Callable[[str], Any]) -> dict[str, Any]:
    """Convert PureJaxRL's `NORMALIZE_ENV`, which wraps the environment twice."""
    return {"normalise_observations": _truth(given), "normalise_rewards": _truth(given)}


def _observations_normalised(given: Any, value: Callable[[str], Any]) -> dict[str, Any]:
    """Convert one of rsl_rl's two settings, if both are the same."""
    return {"normalise_observations": _truth(given)}


_BY_NETWORK = ("actor_obs_normalization", "critic_obs_normalization")
"""rsl_rl's settings for the observations of each network; both are off by default."""


def _explain_one_network(given: Mapping[str, Any]) -> str:
    """Explain that both networks see the same observations; empty if the two settings are the same."""
    actor, critic = (_truth(given.get(name, False)) for name in _BY_NETWORK)
    if actor == critic:
        return ""
    return (
        "Lehr normalises what actor and critic see alike: write normalise_observations=True for both, or "
        "normalise_observations=False for neither"
    )


def _truth(given: Any) -> Any:
    """A truth value, also if it is a text."""
    return TRUTHS.get(str(given).lower(), given)


_WHOLE_ROLLOUT = tuple(
    (name, "this algorithm learns from a whole rollout at once, num_envs · horizon env steps; set horizon")
    for name in ("batch_size", "minibatch_size", "sgd_minibatch_size", "num_minibatches", "minibatches")
)
"""Settings of algorithms with minibatches, for those without them."""


def are_continuous(actions: Space) -> bool:
    """Whether some of the actions are real numbers."""
    return any(isinstance(space, Box) for space in leaves(actions))


def _are_unscaled(space: Space) -> bool:
    """Whether observations are vectors of real numbers, some of which may leave [-1, 1]; images are none."""
    real = [part for part in leaves(space) if isinstance(part, Box) and np.issubdtype(part.dtype, np.floating)]
    may_leave = any(np.any(np.abs(bound) > 1) for part in real for bound in (part.low, part.high))
    return may_leave and all(len(part.shape) <= 1 for part in real)


@dataclass(frozen=True)
class Settings:
    """Settings of every algorithm."""

    num_envs: Annotated[
        int,
        Names(
            ("n_envs", "num_environments", "num_parallel_envs"),
            others=tuple(
                (
                    name,
                    "in RLlib it is a factor of the number of environments; in Lehr num_envs is all of them, so set "
                    "num_envs to the product of runners and environments per runner",
                )
                for name in (
                    "num_env_runners",
                    "num_workers",
                    "num_rollout_workers",
                    "num_envs_per_env_runner",
                    "num_envs_per_worker",
                )
            ),
        ),
    ] = 32
    """Number of parallel environments; with actors, per actor."""
    horizon: Annotated[
        int,
        Names(
            ("n_steps", "num_steps", "unroll_length", "num_steps_per_env", "rollout_fragment_length", "rollout_length"),
            conversions=tuple(
                Conversion(name, _horizon_of_batch(name))
                for name in ("train_batch_size", "train_batch_size_per_learner")
            ),
            others=_WHOLE_ROLLOUT,
        ),
    ] = 64
    """Steps per environment in a rollout."""
    normalise_observations: Annotated[
        AutoBool,
        Names(
            ("norm_obs", "normalise_obs", "obs_norm", "obs_normalization", "empirical_normalization"),
            conversions=(
                Conversion("normalize_env", _both_normalised),
                *(Conversion(name, _observations_normalised, _explain_one_network) for name in _BY_NETWORK),
            ),
        ),
    ] = "auto"
    """Normalise observations by their running mean and standard deviation; auto does if actions are continuous and
    observations are vectors with entries outside [-1, 1]."""
    normalise_rewards: Annotated[
        AutoBool, Names(("norm_reward", "norm_rewards", "normalise_reward", "reward_norm"))
    ] = "auto"
    """Divide rewards by the running standard deviation of the discounted return; auto does if actions are
    continuous."""
    noise_steps: int = 1
    """Steps for which the noise of continuous actions is kept; 1 draws it anew at every step."""
    discount: Annotated[Coef, Coefficient(("gamma", "discounting"), maximum=1.0)] = 0.99
    """Discount factor."""
    reward_scale: Annotated[Coef, Coefficient(("reward_scaling",), open_minimum=True)] | None = None
    """Factor on the rewards; none leaves them unchanged."""

    corrects_lag: ClassVar[bool] = False
    """Whether the algorithm corrects for rollouts of an older policy, so that it can use asynchronous actors."""
    allows_overlap: ClassVar[bool] = True
    """Whether it can learn from rollouts of the policy before the last update, as with the ratio of PPO's loss."""
    normalises_choices: ClassVar[bool] = False
    """Whether `auto` normalises observations that are vectors with entries outside [-1, 1], and the rewards with them,
    also if no action is continuous."""
    by_actions: ClassVar[Mapping[str, tuple[Any, Any]]] = {}
    """What none means for settings that depend on the actions: if some are continuous, and if none is. A subclass adds
    to what its parents say."""

    def __post_init__(self) -> None:
        check_counts(self, "num_envs", "horizon", "noise_steps")

    def for_spaces(self, spaces: Spaces) -> Self:
        """Return the settings with what `auto` and none mean for these spaces."""
        is_continuous, is_unscaled = are_continuous(spaces.action), _are_unscaled(spaces.observation)
        chosen: dict[str, Any] = {
            name: continuous if is_continuous else discrete
            for cls in reversed(type(self).__mro__)
            for name, (continuous, discrete) in vars(cls).get("by_actions", {}).items()
            if getattr(self, name) is None
        }
        if self.normalise_observations == "auto":
            chosen["normalise_observations"] = is_unscaled and (is_continuous or self.normalises_choices)
        if self.normalise_rewards == "auto":
            chosen["normalise_rewards"] = is_continuous or (is_unscaled and self.normalises_choices)
        return replace(self, **chosen) if chosen else self

    def for_devices(self, number: int) -> Self:
        """Return the settings with what `auto` means where this many devices share the environments."""
        return self

    def for_network(self, is_recurrent: bool) -> Self:
        """Return the settings with what `auto` means for a network with or without memory."""
        return self

    @property
    def acting_lag(self) -> int:
        """Number of updates that the acting policy is behind the learner, on one device."""
        return 0

    @property
    def unused(self) -> frozenset[str]:
        """Coefficients that these settings do not use; they are neither evaluated nor logged."""
        return frozenset()


@dataclass(frozen=True)
class OpenDiscountSettings(Settings):
    """Settings with a discount factor that depends on the actions, unless it is given."""

    discount: Coef | None = None
    """Discount factor; none is 0.95 -> 0.99 if actions are continuous, else 0.98 -> 0.99."""

    by_actions: ClassVar[Mapping[str, tuple[Any, Any]]] = {"discount": ("0.95 -> 0.99", "0.98 -> 0.99")}


@dataclass(frozen=True)
class OnPolicySettings(Settings):
    """Settings of on-policy algorithms."""

    optimiser: Annotated[Plugin, Names(("optim",))] = "adam"
    """Optimiser: the name of any optax optimiser (adam, adamw, rmsprop, muon, ...), or an optax transformation."""
    optimiser_options: Annotated[dict[str, Any], Names(("optimizer_kwargs",))] = field(default_factory=HashableDict)
    """Options of the optimiser, by the names that optax uses, such as b1=0.95,eps=1e-8."""
    standardise_advantages: Annotated[
        bool, Names(("normalise_advantage", "normalise_advantages", "norm_adv", "standardise_advantage"))
    ] = True
    """Standardise advantages to mean 0 and standard deviation 1."""
    entropy_coef: Annotated[Coef, Coefficient(("ent_coef", "entropy_cost", "entropy_coeff"))] = 0.01
    """Weight of the entropy bonus in the loss."""
    gae_lambda: Annotated[Coef, Coefficient(("lambda_", "lam", "lambda"), maximum=1.0)] = 0.95
    """GAE's lambda: the bias-variance trade-off of the advantage."""
    weight_decay: Annotated[Coef, Coefficient(("wd",))] | None = None
    """Decoupled weight decay, as in AdamW; a step also shrinks the parameters by this times the learning rate, and none
    leaves it to the optimiser."""
    beta1: Annotated[Coef, Coefficient(("b1", "adam_beta1"), maximum=1.0, open_maximum=True)] | None = None
    """Decay of the optimiser's mean of gradients, its option b1; none leaves it to the optimiser."""
    beta2: Annotated[Coef, Coefficient(("b2", "adam_beta2"), maximum=1.0, open_maximum=True)] | None = None
    """Decay of the optimiser's mean of squared gradients, its option b2; none leaves it to the optimiser."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "optimiser_options", HashableDict(self.optimiser_options))
        given = [name for name in ("weight_decay", "beta1", "beta2") if getattr(self, name) is not None]
        if given or self.optimiser_options:
            from lehr.maths.optimise import optimiser  # slow to import, and rarely needed here

            optimiser(self.optimiser, self.optimiser_options).check(given)


@dataclass(frozen=True)
class ActorCriticSettings(OnPolicySettings):
    """Settings of algorithms that train policy and value with one loss."""

    learning_rate: Annotated[Coef, Coefficient(("lr", "alpha_lr"))] = "1e-3 -> 0"
    """Learning rate of the optimiser."""
    value_coef: Annotated[
        Coef, Coefficient(("vf_coef", "vf_loss_coeff", "vf_loss_coefficient", "critic_coef", "value_loss_coef"))
    ] = 0.5
    """Weight of the value loss."""
    max_grad_norm: Annotated[Coef, Coefficient(("max_gradient_norm", "grad_clip"), open_minimum=True)] | None = 0.5
    """Maximum global norm of the gradient; none turns clipping off."""


@dataclass(frozen=True)
class ClippedSettings(ActorCriticSettings):
    """Settings of algorithms that make several passes over a rollout with PPO's clipped loss."""

    epochs: Annotated[
        int,
        Names(
            (
                "n_epochs",
                "num_epochs",
                "update_epochs",
                "num_updates_per_batch",
                "num_sgd_iter",
                "num_learning_epochs",
                "ppo_epochs",
            )
        ),
    ] = 4
    """Passes over each rollout."""
    minibatches: Annotated[
        int,
        Names(
            ("num_minibatches", "n_minibatches", "num_mini_batches", "num_mini_batch", "nminibatches"),
            conversions=tuple(
                Conversion(name, _minibatches_of_size(name), _explain_segments)
                for name in ("batch_size", "minibatch_size", "sgd_minibatch_size")
            ),
        ),
    ] = 8
    """Minibatches, and so gradient steps, per pass."""
    clip_range: Annotated[
        Coef, Coefficient(("clip_coef", "clip_param", "clip_eps", "clipping_epsilon"), open_minimum=True)
    ] = 0.2
    """Clip range of the probability ratio in the policy loss."""
    value_clip_range: (
        Annotated[
            Coef,
            Coefficient(
                ("clip_range_vf", "vf_clip_coef", "clipping_epsilon_value"),
                open_minimum=True,
                others=(
                    (
                        "clip_vloss",
                        "in CleanRL it clips the value loss by clip_coef; write value_clip_range=0.2, or none for no "
                        "clipping",
                    ),
                    (
                        "use_clipped_value_loss",
                        "in rsl_rl it clips the value loss by clip_param; write value_clip_range=0.2, or none for no "
                        "clipping",
                    ),
                    (
                        "vf_clip_param",
                        "it is RLlib's maximum squared value error, which Lehr does not have; value_clip_range clips "
                        "the change of the value instead",
                    ),
                ),
            ),
        ]
        | None
    ) = None
    """Clip range of the value loss, around the value before the update; none turns clipping off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "epochs", "minibatches")


@dataclass(frozen=True)
class VTraceSettings(Settings):
    """Settings of algorithms that correct for an older policy with V-trace."""

    rho_clip: Annotated[Coef, Coefficient(("vtrace_rho_clip", "rho_bar"), open_minimum=True)] = 1.0
    """V-trace's clip of the ratio in the TD error; it determines which policy the values are for."""
    c_clip: Annotated[Coef, Coefficient(("vtrace_c_clip", "c_bar"), open_minimum=True)] = 1.0
    """V-trace's clip of the ratio in the trace; it affects how fast the values are learned, not their limit."""


@dataclass(frozen=True)
class SegmentSettings(ClippedSettings, VTraceSettings):
    """Settings of algorithms that can learn from whole segments, or from windows of them, as recurrent networks do."""

    minibatching: Minibatching = "auto"
    """Minibatches of shuffled single steps (flat), of shuffled whole segments, or of segments drawn by priority; auto
    chooses segments for recurrent networks, windows and vtrace, and flat otherwise."""
    window: CountOrAuto | None = None
    """Length of the windows that segments are cut into, in steps; none keeps segments whole, and auto takes the largest
    divisor of horizon from 8 to 32, or none with vtrace."""
    burn_in: CountOrAuto = 0
    """Steps before each window that refresh its recurrent state, without a loss; auto takes a quarter of the window, or
    0 if segments are whole or the network is not recurrent."""
    accumulate: int = 1
    """Split each minibatch into this many parts to save memory; the gradient stays that of the whole."""
    advantage: Advantage = "gae"
    """Advantage estimator: GAE once per rollout, or with V-trace's ratios of the current policy in every minibatch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("minibatching", get_args(Minibatching)), ("advantage", get_args(Advantage))):
            if getattr(self, name) not in known:
                raise InputError(f"{name} is {getattr(self, name)!r}; {closest(str(getattr(self, name)), known)}")
        check_counts(self, "accumulate")
        if self.advantage == "vtrace" and self.minibatching == "flat":
            raise InputError(
                "advantage is 'vtrace', which needs whole segments; set minibatching to auto, segments or prioritised."
            )
        window, burn_in = self._windows()
        sequences.check(self.horizon, window, burn_in)
        if window is not None and self.advantage == "vtrace":
            raise InputError(
                f"window is {window}, but advantage is 'vtrace', which needs whole segments; set advantage to "
                "gae, or window to none."
            )
        if window is not None and self.minibatching == "flat":
            raise InputError(
                f"window is {window}, but minibatching is 'flat', which shuffles single steps; set minibatching "
                "to auto, segments or prioritised, or window to none."
            )

    def for_devices(self, number: int) -> Self:
        """Return the settings with a `window` that fills the minibatches of each device, if there is one."""
        return self if self.window != "auto" else replace(self, window=self._windows(number)[0])

    def for_network(self, is_recurrent: bool) -> Self:
        """Return the settings with what `auto` means for `window` and `burn_in`, which is 0 without memory."""
        window, burn_in = self._windows()
        if self.burn_in == "auto" and not is_recurrent:
            burn_in = 0
        return self if "auto" not in (self.window, self.burn_in) else replace(self, window=window, burn_in=burn_in)

    def _windows(self, devices: int = 1) -> tuple[int | None, int]:
        """The length of windows, `None` for whole segments, and of their burn-in if the network has a memory."""
        if self.window != "auto":
            window = self.window
        elif self.advantage == "vtrace" or self.minibatching == "flat":
            window = None
        else:
            segments = max(1, self.num_envs // devices)
            window = sequences.auto_window(self.horizon, segments, self.minibatches * self.accumulate)
        if self.burn_in != "auto":
            return window, self.burn_in
        return window, 0 if window is None or window == self.horizon else window // 4


@dataclass(frozen=True)
class LagSettings(VTraceSettings):
    """Settings of algorithms whose acting policy may lag behind the learner."""

    lag: int = 1
    """Number of updates that the acting policy is behind the learner; ignored with actors, whose lag varies."""
    policy_rho_clip: Annotated[
        Coef,
        Coefficient(
            ("vtrace_pg_rho_clip", "pg_rho_clip", "clip_pg_rho_threshold", "vtrace_clip_pg_rho_threshold"),
            open_minimum=True,
        ),
    ] = 1.0
    """V-trace's clip of the ratio in the policy gradient."""

    corrects_lag: ClassVar[bool] = True

    @property
    def acting_lag(self) -> int:
        """The setting `lag`."""
        return self.lag

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "lag", least=0)


@dataclass(frozen=True)
class DivergenceSettings(Settings):
    """Settings of algorithms with a penalty on the KL divergence from an earlier policy."""

    kl_coef: Annotated[Coef, Coefficient(("kl_coeff", "kl_penalty"))] | None = None
    """Weight of the KL divergence from the policy before the update; none leaves it out of the loss."""


@dataclass(frozen=True)
class TargetKLSettings(Settings):
    """Settings of algorithms that limit the KL divergence of an update."""

    target_kl: (
        Annotated[
            Coef,
            Coefficient(
                open_minimum=True,
                others=(
                    (
                        "kl_target",
                        "in RLlib it is the divergence that the weight of a penalty adapts to, so write "
                        "kl_coef='kl_penalty(0.2, target=0.01)'; target_kl stops an update instead",
                    ),
                    (
                        "desired_kl",
                        "in Brax it is the divergence that the learning rate adapts to, so write "
                        "learning_rate='adaptive_kl(3e-4, target=0.01)'; target_kl stops an update instead",
                    ),
                ),
            ),
        ]
        | None
    ) = None
    """KL divergence above which the rest of an update's gradient steps are skipped; none never skips."""
