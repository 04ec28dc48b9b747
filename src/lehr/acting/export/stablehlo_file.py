"""Export a policy as a StableHLO program, for JAX and other runtimes that read it."""

from dataclasses import fields
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from lehr import kernels
from lehr.acting.agent import observed
from lehr.acting.policy import Policy
from lehr.networks.protocol import ActorCriticLike
from lehr.types import PyTree

PLATFORMS = "cpu", "cuda", "tpu"


def stablehlo_files(policy: Policy) -> dict[str, bytes]:
    """Return the content of the file, by its suffix: the result of `jax.export`, with any number of observations.

    The program takes observations `[n, ...]`, and if the policy is recurrent also its carry and `reset`, bool `[n]`. It
    returns a dict: `action`, the parameters of its distribution, and `carry` if there is one.
    """
    program, learned = policy.program, jax.device_get(policy.learned)
    (n,) = jax.export.symbolic_shape("n")

    def batch(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((n, *shape), dtype)

    def outputs(obs: PyTree, carry: PyTree, reset: jax.Array) -> dict[str, Any]:
        after, action = program.act(learned, carry, obs, reset, jax.random.key(0), jnp.bool(True))
        found = {"action": action, **_parameters(policy, learned, carry, obs, reset)}
        return found | {"carry": after} if program.is_recurrent else found

    def without_memory(obs: PyTree) -> dict[str, Any]:
        size = jax.tree.leaves(obs)[0].shape[0]
        return outputs(obs, program.agent.initial_carry((size,)), jnp.zeros(size, bool))

    obs = jax.tree.map(lambda x: batch(x.shape, x.dtype), _example(policy))
    arguments: tuple[Any, ...] = (obs,)
    if program.is_recurrent:
        carry = jax.eval_shape(lambda: program.agent.initial_carry((1,)))
        arguments = obs, jax.tree.map(lambda x: batch(x.shape[1:], x.dtype), carry), batch((), jnp.bool_)
    with kernels.plain():
        function = jax.jit(outputs if program.is_recurrent else without_memory)
        exported = jax.export.export(function, platforms=PLATFORMS)(*arguments)
    return {".stablehlo": bytes(exported.serialize())}


def _example(policy: Policy) -> PyTree:
    """The shapes of one observation."""
    return jax.eval_shape(policy.program.observation_space.sample, jax.random.key(0))


def _parameters(policy: Policy, learned: Any, carry: PyTree, obs: PyTree, reset: jax.Array) -> dict[str, jax.Array]:
    """The parameters of the distribution, if the algorithm acts by a network that shows them."""
    network = getattr(policy.program.agent, "network", None)
    if not isinstance(network, ActorCriticLike):
        return {}
    seen = observed(learned.observation_statistics, obs)
    _, distribution = network.act(learned.params, carry, seen, reset)
    found = {field.name: getattr(distribution, field.name) for field in fields(distribution)}
    return {name: value for name, value in found.items() if isinstance(value, jax.Array)}
