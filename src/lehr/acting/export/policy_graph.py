"""A policy as a graph of array operations: from observations as the environment gives them to its actions."""

from typing import Any, cast

import jax
import numpy as np

from lehr.acting.policy import Policy
from lehr.errors import InputError
from lehr.maths.normalise import CLIP, EPSILON, RunningStatistics
from lehr.networks.actor_critic import ActorCriticNetwork
from lehr.networks.graph import Graph, Input, add_actor
from lehr.networks.heads import NormalHead
from lehr.spaces import Box, Discrete, MultiDiscrete, Space

NOISE = "noise"
"""The input, `[N, A]`, that makes actions random; 0 gives the most likely ones."""


def policy_graph(policy: Policy, samples: bool = False) -> Graph:
    """Return the operations of a policy, with the outputs `action`, `logits` or `mean` and `log_std`, and `next_...`.

    Args:
        policy: of an algorithm with an actor-critic network.
        samples: add the input `noise`, drawn as the function `noise` says.
    """
    network = getattr(policy.program.agent, "network", None)
    if not isinstance(network, ActorCriticNetwork):
        raise InputError(
            "This policy is not Lehr's actor-critic (a world model, or a network of your own), and only that can be "
            "exported to NumPy and ONNX; export to stablehlo."
        )
    graph = Graph()
    learned = jax.tree.map(np.asarray, policy.learned)
    observed = _add_observation(graph, policy, learned.observation_statistics)
    parameters = add_actor(graph, network, learned.params, observed)
    if "logits" in parameters:
        action = _add_choice(graph, policy.program.action_space, parameters["logits"], samples)
    else:
        head = cast(NormalHead, network.module.policy_head)
        action = _add_box_action(graph, cast(Box, policy.program.action_space), head, parameters, samples)
    graph.outputs = {"action": action, **parameters}
    graph.outputs |= {f"next_{name}": value for name, value in zip(graph.carry, graph.next_carry, strict=True)}
    graph.remove_unused()
    return graph


def noise(space: Space) -> tuple[str, int]:
    """Return the noise that a sampled action needs: its distribution, by NumPy's name for it, and its size."""
    match space:
        case Discrete():
            return "gumbel", space.n
        case MultiDiscrete():
            return "gumbel", sum(space.nvec)
    return "normal", int(np.prod(cast(Box, space).shape))


def _add_observation(graph: Graph, policy: Policy, statistics: Any) -> dict[tuple[str, ...], str]:
    """Add the arrays of an observation as inputs, normalised if the policy normalises; return their names by path."""
    observed: dict[tuple[str, ...], str] = {}
    normalises = isinstance(statistics, RunningStatistics)
    means, variances = (statistics.mean, statistics.variance) if normalises else ((), ())
    for index, (path, shape, dtype) in enumerate(policy.program.inputs):
        name = "_".join(("obs", *path))
        graph.inputs.append(Input(name, path, shape, str(np.dtype(dtype))))
        if normalises and np.dtype(dtype).kind == "f":
            mean, variance = jax.tree.leaves(means)[index], jax.tree.leaves(variances)[index]
            if dtype != np.float32:
                name = graph.add("to_float", name)
            shifted = graph.add("subtract", name, mean)
            scaled = graph.add("divide", shifted, np.sqrt(variance + np.float32(EPSILON)))
            name = graph.add("minimum", graph.add("maximum", scaled, np.array(-CLIP)), np.array(CLIP))
            if dtype == np.float16:  # normalising keeps the dtype
                name = graph.add("round_to_half", name)
        observed[path] = name
    return observed


def _add_choice(graph: Graph, space: Any, logits: str, samples: bool) -> str:
    """Add the most likely choice, from the space's `start`; the largest of logits with Gumbel noise is a sample."""
    given = graph.add("add", logits, NOISE) if samples else logits
    if isinstance(space, Discrete):
        choice = graph.add("squeeze", graph.add("argmax", given))
        return graph.add("offset", choice, by=space.start) if space.start else choice
    ends = np.cumsum(cast(MultiDiscrete, space).nvec).tolist()
    parts = [graph.add("slice", given, begin=end - n, end=end) for n, end in zip(space.nvec, ends, strict=True)]
    return graph.add("concatenate", *(graph.add("argmax", part) for part in parts))


def _add_box_action(graph: Graph, space: Box, head: NormalHead, parameters: dict[str, str], samples: bool) -> str:
    """Add the mean, or a sample, squashed to the bounds if the distribution is; then clipped to the space."""
    action = parameters["mean"]
    if samples:
        spread = graph.add("multiply", graph.add("exp", parameters["log_std"]), NOISE)
        action = graph.add("add", action, spread)
    if head.bounds is not None:
        low, high = (np.array(bound, np.float32) for bound in head.bounds)
        half = np.array(0.5)
        share = graph.add("add", graph.add("multiply", graph.add("tanh", action), half), half)
        action = graph.add("add", graph.add("multiply", share, high - low), low)
    return graph.add("minimum", graph.add("maximum", action, space.low), space.high)
