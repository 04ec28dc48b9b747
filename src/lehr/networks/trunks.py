"""Trunks compute the features of actor and critic: with one torso, with one each, or with two evaluated together.

All three implement one protocol. A carry is `{"actor": ..., "critic": ...}`; a feed-forward part is `()`:

- `initial_carry(batch_shape)`: zeros;
- `actor(carry, obs)`: the next carry and the actor's features, without the critic;
- `critic(carry, obs)`: the critic's features only;
- `step(carry, obs)`: the next carry and the features of both;
- `unroll(carry, obs, reset)`: the same for `[T, N]`, see `lehr.networks.memory`;
- `split(params)`: the parameters of the actor and of the critic; `merge(actor, critic)`: the inverse;
- `critic_alone(critic)`: parameters with which `critic` works, of the critic only;
- `is_recurrent`, `critic_is_recurrent`: whether either, or the critic, is recurrent; `out_features`: sizes of both.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx

from lehr import kernels
from lehr.errors import InputError
from lehr.networks.build import Params, Stacked
from lehr.networks.custom import CustomTorso
from lehr.networks.memory import GRU, LSTM, MinGRU
from lehr.networks.observations import View
from lehr.networks.torsos import CNN, MLP
from lehr.types import PyTree

Carry: TypeAlias = dict[str, Any]
"""`{"actor": ..., "critic": ...}`."""

_SHARED = "shared is True, but this algorithm trains actor and critic separately; set shared=False."


class Torso(nnx.Module):
    """Maps the selected observations to features: an encoder, and an optional recurrent layer."""

    def __init__(self, view: View, encoder: MLP | CNN, memory: LSTM | GRU | MinGRU | None = None) -> None:
        self.view = view
        self.encoder = encoder
        self.memory = memory
        self.is_recurrent = memory is not None
        self.out_features = encoder.out_features if memory is None else memory.out_features

    def encode(self, obs: PyTree) -> jax.Array:
        """Return features of single observations, `[..., F]`."""
        return self.encoder(*self.view.inputs(obs))

    def initial_carry(self, batch_shape: tuple[int, ...]) -> PyTree:
        """Return zeros, or `()` if the torso is not recurrent."""
        return () if self.memory is None else self.memory.initial_carry(batch_shape)

    def step(self, carry: PyTree, obs: PyTree) -> tuple[PyTree, jax.Array]:
        """Return the next carry and features `[N, F]` of one step."""
        x = self.encode(obs)
        return (carry, x) if self.memory is None else self.memory.step(carry, x)

    def unroll(self, carry: PyTree, obs: PyTree, reset: jax.Array) -> tuple[PyTree, jax.Array]:
        """Return the last carry and features `[T, N, F]` of `T` steps."""
        x = self.encode(obs)
        return (carry, x) if self.memory is None else self.memory.unroll(carry, x, reset)


AnyTorso: TypeAlias = Torso | CustomTorso
"""A built-in or a custom torso; both have the same methods."""


class Shared(nnx.Module):
    """One torso for both; its recurrent state is the actor's part of the carry."""

    def __init__(self, torso: AnyTorso) -> None:
        self.torso = torso
        self.out_features = torso.out_features, torso.out_features
        self.is_recurrent = self.critic_is_recurrent = torso.is_recurrent

    def initial_carry(self, batch_shape: tuple[int, ...]) -> Carry:
        """Return zeros."""
        return {"actor": self.torso.initial_carry(batch_shape), "critic": ()}

    def actor(self, carry: Carry, obs: PyTree) -> tuple[Carry, jax.Array]:
        """Return the actor's features."""
        memory, features = self.torso.step(carry["actor"], obs)
        return {"actor": memory, "critic": ()}, features

    def critic(self, carry: Carry, obs: PyTree) -> jax.Array:
        """Return the critic's features."""
        return self.torso.step(carry["actor"], obs)[1]

    def step(self, carry: Carry, obs: PyTree) -> tuple[Carry, jax.Array, jax.Array]:
        """Return the features of both, which are the same."""
        carry, features = self.actor(carry, obs)
        return carry, features, features

    def unroll(self, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, jax.Array, jax.Array]:
        """Return the features of both over `T` steps."""
        memory, features = self.torso.unroll(carry["actor"], obs, reset)
        return {"actor": memory, "critic": ()}, features, features

    def split(self, params: Params) -> tuple[Params, Params]:
        """Raise an error: the torso cannot be split."""
        raise InputError(_SHARED)

    def merge(self, actor: Params, critic: Params) -> Params:
        """Raise an error, like `split`."""
        raise InputError(_SHARED)

    def critic_alone(self, critic: Params) -> Params:
        """Raise an error, like `split`."""
        raise InputError(_SHARED)


class Separate(nnx.Module):
    """One torso each, of any kind."""

    def __init__(self, actor: AnyTorso, critic: AnyTorso) -> None:
        self.actor_torso = actor
        self.critic_torso = critic
        self.out_features = actor.out_features, critic.out_features
        self.is_recurrent = actor.is_recurrent or critic.is_recurrent
        self.critic_is_recurrent = critic.is_recurrent

    def initial_carry(self, batch_shape: tuple[int, ...]) -> Carry:
        """Return zeros."""
        return {
            "actor": self.actor_torso.initial_carry(batch_shape),
            "critic": self.critic_torso.initial_carry(batch_shape),
        }

    def actor(self, carry: Carry, obs: PyTree) -> tuple[Carry, jax.Array]:
        """Return the actor's features; the critic's carry does not change."""
        memory, features = self.actor_torso.step(carry["actor"], obs)
        return {"actor": memory, "critic": carry["critic"]}, features

    def critic(self, carry: Carry, obs: PyTree) -> jax.Array:
        """Return the critic's features."""
        return self.critic_torso.step(carry["critic"], obs)[1]

    def step(self, carry: Carry, obs: PyTree) -> tuple[Carry, jax.Array, jax.Array]:
        """Return the features of both."""
        actor_memory, actor = self.actor_torso.step(carry["actor"], obs)
        critic_memory, critic = self.critic_torso.step(carry["critic"], obs)
        return {"actor": actor_memory, "critic": critic_memory}, actor, critic

    def unroll(self, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, jax.Array, jax.Array]:
        """Return the features of both over `T` steps."""
        actor_memory, actor = self.actor_torso.unroll(carry["actor"], obs, reset)
        critic_memory, critic = self.critic_torso.unroll(carry["critic"], obs, reset)
        return {"actor": actor_memory, "critic": critic_memory}, actor, critic

    def split(self, params: Params) -> tuple[Params, Params]:
        """Return the parameters of each torso."""
        return params.get("actor_torso", {}), params.get("critic_torso", {})

    def merge(self, actor: Params, critic: Params) -> Params:
        """Merge both torsos; one without layers has no entry."""
        return {name: torso for name, torso in (("actor_torso", actor), ("critic_torso", critic)) if torso}

    def critic_alone(self, critic: Params) -> Params:
        """Return the critic's torso."""
        return self.merge({}, critic)


class Twin(nnx.Module):
    """Separate MLPs of equal sizes on the same vector, evaluated together; `Stacked` explains why.

    Slice 0 of every parameter is the actor's, slice 1 the critic's.
    """

    def __init__(self, actor: Torso, critic: Torso) -> None:
        self.view = actor.view
        self.mlps = Stacked(actor.encoder, critic.encoder)
        self.out_features = actor.out_features, critic.out_features
        self.is_recurrent = self.critic_is_recurrent = False

    def initial_carry(self, batch_shape: tuple[int, ...]) -> Carry:
        """Return an empty carry."""
        return {"actor": (), "critic": ()}

    def actor(self, carry: Carry, obs: PyTree) -> tuple[Carry, jax.Array]:
        """Return the actor's features."""
        return carry, self.mlps.only(0, *self.view.inputs(obs))

    def critic(self, carry: Carry, obs: PyTree) -> jax.Array:
        """Return the critic's features."""
        return self.mlps.only(1, *self.view.inputs(obs))

    def step(self, carry: Carry, obs: PyTree) -> tuple[Carry, jax.Array, jax.Array]:
        """Return the features of both."""
        actor, critic = self.mlps(*self.view.inputs(obs))
        return carry, actor, critic

    def unroll(self, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, jax.Array, jax.Array]:
        """Return the features of both."""
        return self.step(carry, obs)

    def outputs(self, obs: PyTree, heads: Mapping[int, tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, ...] | None:
        """Return the outputs of heads on top of some slices, computed by one kernel; `None` without a kernel.

        A head is a kernel `[F, O]` and a bias `[O]`.
        """
        (x,), mlp = self.view.inputs(obs), cast(MLP, self.mlps.stack)
        if mlp.norms:
            return None
        layers = [weights(layer) for layer in mlp.layers]
        if len(layers[0][0]) == 1:  # of one of the two, alone
            heads = dict(enumerate(heads.values()))
        return kernels.evaluate_mlps(x, layers, heads, mlp.activation, mlp.layers[0].dtype)

    def split(self, params: Params) -> tuple[Params, Params]:
        """Return the two slices."""
        return jax.tree.map(lambda x: x[0], params), jax.tree.map(lambda x: x[1], params)

    def merge(self, actor: Params, critic: Params) -> Params:
        """Stack the two slices."""
        return jax.tree.map(lambda *slices: jnp.stack(slices), actor, critic)

    def critic_alone(self, critic: Params) -> Params:
        """Return a stack of one, which needs no copies."""
        return jax.tree.map(lambda leaf: leaf[None], critic)


def weights(layer: nnx.Linear) -> tuple[jax.Array, jax.Array]:
    """Return the kernel and the bias of a layer."""
    return layer.kernel[...], cast(nnx.Param, layer.bias)[...]
