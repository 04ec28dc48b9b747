"""The settings of an actor-critic network."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from lehr import plugins
from lehr.config import Conversion, Names, Plugin, check_counts
from lehr.errors import InputError, closest, quoted
from lehr.networks.memory import MEMORIES
from lehr.networks.torsos import ACTIVATIONS

MOST_LAYERS = 64
"""Limit on dense layers: each takes time to compile."""
TORSOS = ("auto", "mlp", "cnn", *MEMORIES)
CHOICES: dict[str, tuple[str | None, ...]] = {
    "torso": TORSOS,
    "critic_torso": (*TORSOS, None),
    "activation": ("auto", *ACTIVATIONS),
    "distribution": ("normal", "tanh_normal"),
    "precision": ("float32", "bfloat16"),
}
"""By setting, the values that Lehr knows; torsos and activations may be the user's own too."""


def _sizes_of_net_arch(given: Any, value: Callable[[str], Any]) -> dict[str, Any]:
    """Convert SB3's `net_arch`: sizes for actor and critic, or a mapping with those of each."""
    if not isinstance(given, Mapping):
        return {"hidden_sizes": given}
    strange = [name for name in given if name not in ("pi", "vf")]
    if strange or "pi" not in given:
        raise InputError(f"net_arch is {quoted(dict(given))}; give sizes, or a mapping with sizes for 'pi' and 'vf'.")
    return {"hidden_sizes": given["pi"], "critic_hidden_sizes": given.get("vf", given["pi"])}


def _activation_of_class(given: Any, value: Callable[[str], Any]) -> dict[str, Any]:
    """Convert SB3's `activation_fn`, a class of PyTorch's such as `nn.Tanh`, to a name."""
    return {"activation": given.__name__.lower() if isinstance(given, type) else given}


@dataclass(frozen=True)
class NetworkConfig:
    """Architecture of an actor and a critic."""

    torso: Plugin = "auto"
    """Torso: mlp, cnn, lstm, gru, mingru, or auto (cnn for an image, else mlp); or your own, as module:Name or, in
    Python, a class or function."""
    critic_torso: Plugin | None = None
    """Torso of the critic, if it differs: mlp with a recurrent actor gives a feed-forward critic."""
    shared: Annotated[bool, Names(("vf_share_layers",))] = False
    """Share one torso between actor and critic."""
    hidden_sizes: (
        Annotated[
            tuple[int, ...],
            Names(
                (
                    "fcnet_hiddens",
                    "policy_hidden_layer_sizes",
                    "actor_hidden_dims",
                    "hidden_dims",
                    "hidden_layers",
                    "hidden_layer_sizes",
                ),
                conversions=(Conversion("net_arch", _sizes_of_net_arch),),
            ),
        ]
        | None
    ) = None
    """Sizes of the dense layers; by default 64,64, after convolutions 128 (small images) or 512, before a recurrent
    layer one of its size; () for no dense layers."""
    critic_hidden_sizes: (
        Annotated[tuple[int, ...], Names(("value_hidden_layer_sizes", "critic_hidden_dims"))] | None
    ) = None
    """Sizes of the critic's dense layers; by default hidden_sizes."""
    recurrent_size: Annotated[
        int, Names(("lstm_hidden_size", "lstm_cell_size", "rnn_hidden_size", "rnn_hidden_dim"))
    ] = 128
    """Size of the recurrent layer of lstm, gru and mingru."""
    activation: Annotated[
        Plugin, Names(("fcnet_activation",), conversions=(Conversion("activation_fn", _activation_of_class),))
    ] = "auto"
    """Activation: tanh, relu, gelu, silu, elu, or auto (relu after convolutions, else tanh); in Python, a function."""
    layer_norm: Annotated[bool, Names(("fcnet_use_layernorm",))] = False
    """Apply layer normalisation before the activation of each dense layer."""
    actor_obs: Annotated[tuple[str, ...], Names(("policy_obs_key",))] | None = None
    """Keys of a Dict observation that the actor sees; by default all."""
    critic_obs: Annotated[tuple[str, ...], Names(("value_obs_key",))] | None = None
    """Keys of a Dict observation that the critic sees; by default all."""
    distribution: Annotated[str, Names(("distribution_type",))] = "normal"
    """Distribution of Box actions: normal (clipped to the Box) or tanh_normal (squashed into the Box)."""
    state_dependent_std: bool = False
    """Make log σ an output of the network instead of a parameter."""
    initial_log_std: (
        Annotated[
            float,
            Names(
                ("log_std_init",),
                others=tuple(
                    (name, "it is σ itself; write initial_log_std, its natural logarithm: 0 for a σ of 1")
                    for name in ("init_noise_std", "init_std")
                ),
            ),
        ]
        | None
    ) = 0.0
    """Initial log σ; none starts σ at half the width of the Box, or at 1 where the Box has no bounds or very wide ones,
    for tanh_normal, and if σ depends on the state."""
    action_mask: bool = True
    """Never take an action that the observation's entry action_mask forbids; off makes it an entry like any other."""
    precision: Annotated[str, Names(("dtype", "compute_dtype"))] = "float32"
    """Precision of the computation, float32 (on a GPU, products in TF32) or bfloat16; parameters, carry, heads and
    outputs stay float32."""

    def __post_init__(self) -> None:
        for name in ("hidden_sizes", "critic_hidden_sizes", "actor_obs", "critic_obs"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, known in CHOICES.items():
            given = getattr(self, name)
            if name in _OWN and callable(given):
                if not isinstance(given, Hashable):
                    raise InputError(f"{name} is {given!r}, which is not hashable: give a function or a class instead.")
            elif given not in known and not (name in _OWN and plugins.is_reference(given)):
                written = given if isinstance(given, str) else quoted(given)
                plugins.refuse_file(name, written)
                raise InputError(f"{name} is {quoted(given)}; {closest(written, filter(None, known))}")
        for name, sizes in (("hidden_sizes", self.hidden_sizes), ("critic_hidden_sizes", self.critic_hidden_sizes)):
            if min((self.recurrent_size, *(sizes or ()))) < 1:
                raise InputError(
                    f"{name} is {sizes} and recurrent_size is {self.recurrent_size}: every size must be at least 1; "
                    f"give {name}=() for no dense layers."
                )
            if len(sizes or ()) > MOST_LAYERS:
                raise InputError(f"{name} has {len(sizes or ())} layers; the maximum is {MOST_LAYERS}.")
        check_counts(self, "recurrent_size", "hidden_sizes", "critic_hidden_sizes")
        same_sizes = self.critic_hidden_sizes in (None, self.hidden_sizes)
        same_torso = self.critic_torso in (None, self.torso) and same_sizes
        if self.shared and not (same_torso and self.actor_obs == self.critic_obs):
            raise InputError(
                "shared is True, but critic_torso, critic_hidden_sizes, actor_obs or critic_obs makes actor and critic "
                "differ: remove these, or set shared=False."
            )
        if all(map(is_own, (self.torso, self.critic_torso or self.torso))):
            unused = ("hidden_sizes", "critic_hidden_sizes", "activation", "layer_norm", "precision")
            for field in fields(self):
                if field.name in unused and getattr(self, field.name) != field.default:
                    raise InputError(
                        f"{field.name} is {getattr(self, field.name)}, but the torso {_name(self.torso)} is not built "
                        f"in and creates its own layers: remove {field.name}."
                    )


_OWN = "torso", "critic_torso", "activation"
"""The fields that accept the user's own objects."""


def is_own(torso: Any) -> bool:
    """Whether a torso is the user's own, given as an object or as `module:Name`."""
    return torso not in TORSOS


def _name(given: Any) -> str:
    return given if isinstance(given, str) else getattr(given, "__name__", repr(given))
