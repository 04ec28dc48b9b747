"""Settings that several algorithms share, each declared once: its default, its range, its other names, its meaning.

An algorithm's `Config` inherits the groups it has and adds its own fields. To change a default it writes the field
again, as in `num_envs: int = 16` or `discount: Coef = 0.98`; range, names and meaning are inherited.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from lehr.config import Coef, Plugin, check_counts
from lehr.schedules.coefficient import Coefficient


@dataclass(frozen=True)
class Settings:
    """What every algorithm has."""

    num_envs: int = 32
    """Environments that run in parallel; with actors, those of each actor."""
    horizon: int = 64
    """Steps of each environment in one rollout."""
    normalise_observations: bool = False
    """Normalise observations by their running mean and standard deviation."""
    normalise_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    discount: Annotated[Coef, Coefficient(("gamma", "discounting"), maximum=1.0)] = 0.99
    """Discount factor."""
    reward_scale: Annotated[Coef, Coefficient(("reward_scaling",), open_minimum=True)] | None = None
    """Factor on the rewards; none leaves them unchanged."""

    corrects_lag: ClassVar[bool] = False
    """Whether it can learn from rollouts of an older policy, so that actors need not wait for it."""

    def __post_init__(self) -> None:
        check_counts(self, "num_envs", "horizon")

    @property
    def acting_lag(self) -> int:
        """Updates by which the acting policy is behind the learning one, on one device."""
        return 0

    @property
    def unused(self) -> frozenset[str]:
        """Coefficients that these settings do not use: they are neither evaluated nor logged."""
        return frozenset()


@dataclass(frozen=True)
class OnPolicySettings(Settings):
    """What the on-policy algorithms have."""

    optimiser: Plugin = "adam"
    """Optimiser: the name of any optax optimiser (adam, adamw, rmsprop, muon, ...), or an optax transformation."""
    standardise_advantages: bool = True
    """Standardise advantages to mean 0 and standard deviation 1."""
    entropy_coef: Annotated[Coef, Coefficient(("ent_coef", "entropy_cost", "entropy_coeff"))] = 0.01
    """Weight of the entropy bonus in the loss."""
    gae_lambda: Annotated[Coef, Coefficient(("lambda_", "lam", "lambda"), maximum=1.0)] = 0.95
    """GAE's lambda: the bias-variance trade-off of the advantage."""


@dataclass(frozen=True)
class ActorCriticSettings(OnPolicySettings):
    """What algorithms have that train policy and value by one loss."""

    learning_rate: Annotated[Coef, Coefficient(("lr", "alpha_lr"))] = "1e-3 -> 0"
    """Step size of the optimiser."""
    value_coef: Annotated[Coef, Coefficient(("vf_coef", "vf_loss_coeff", "vf_loss_coefficient", "critic_coef"))] = 0.5
    """Weight of the value loss."""
    max_grad_norm: Annotated[Coef, Coefficient(("max_gradient_norm", "grad_clip"), open_minimum=True)] | None = 0.5
    """Maximum global norm of the gradient; none turns clipping off."""


@dataclass(frozen=True)
class ClippedSettings(ActorCriticSettings):
    """What algorithms have that make several passes over a rollout with PPO's clipped loss."""

    epochs: int = 4
    """Passes over a rollout."""
    minibatches: int = 8
    """Gradient steps in one pass."""
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
                        "vf_clip_param",
                        "it is RLlib's largest squared error of a value, which is not here; value_clip_range is how "
                        "far a value may leave the one of the rollout",
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
    """What algorithms have that correct for an older policy with V-trace."""

    rho_clip: Annotated[Coef, Coefficient(("vtrace_rho_clip", "rho_bar"), open_minimum=True)] = 1.0
    """V-trace's clip of the ratio in the temporal difference; it decides which policy the values belong to."""
    c_clip: Annotated[Coef, Coefficient(("vtrace_c_clip", "c_bar"), open_minimum=True)] = 1.0
    """V-trace's clip of the ratio in the trace; it decides how fast the values are learned."""


@dataclass(frozen=True)
class LagSettings(VTraceSettings):
    """What algorithms have whose acting policy may be behind."""

    lag: int = 1
    """Updates by which the acting policy is behind the learning one; actors lag as far as they do."""
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
        """What the user set."""
        return self.lag

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "lag", least=0)


@dataclass(frozen=True)
class DivergenceSettings(Settings):
    """What algorithms have that can keep the policy near an earlier one by a penalty."""

    kl_coef: Annotated[Coef, Coefficient(("kl_coeff", "kl_penalty"))] | None = None
    """Weight of the KL divergence from the policy before the update; none leaves it out of the loss."""


@dataclass(frozen=True)
class TargetKLSettings(Settings):
    """What algorithms have that limit the divergence of one update."""

    target_kl: Annotated[Coef, Coefficient(("kl_target", "desired_kl"), open_minimum=True)] | None = None
    """KL divergence at which the rest of an update's gradient steps is skipped; none skips nothing."""
