"""A network as a list of array operations that can be run without JAX.

An operation takes values by name and gives one. `add_actor` appends the operations of an actor; the operations are:

| kind | result |
|---|---|
| `add`, `subtract`, `multiply`, `divide`, `maximum`, `minimum` | elementwise, with broadcasting |
| `tanh`, `sigmoid`, `exp`, `relu`, `gelu`, `silu`, `elu` | elementwise; GELU approximated by tanh, ELU with α = 1 |
| `matmul` | `[N, i]` times `[i, o]` |
| `layer_norm` | `x, scale, bias` normalised over the last axis, with `epsilon` |
| `convolve` | `x, kernel, bias`: `[N, H, W, C]` with a kernel `[h, w, C, F]` and a `stride`, without padding |
| `to_float` | float32 |
| `round_to_half` | float32 with the precision of float16 |
| `one_hot` | integers `[...]` to float32 `[..., size]` |
| `offset` | integers plus the integer `by` |
| `flatten` | `[N, ...]` to `[N, size]` |
| `slice` | entries `begin` to `end` of the last axis |
| `concatenate` | along the last axis |
| `broadcast` | the first value in the shape of the second |
| `forbid` | the first value, but −inf where the second, its mask, is 0; unchanged in rows whose mask is all 0 |
| `argmax` | index of the largest entry of the last axis, int64 `[N, 1]` |
| `squeeze` | `[N, 1]` to `[N]` |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from lehr.errors import InputError
from lehr.masks import MASK
from lehr.networks.actor_critic import ActorCriticNetwork
from lehr.networks.build import Params
from lehr.networks.heads import LOG_STD_RANGE, CategoricalHead
from lehr.networks.memory import GRU, LSTM, MinGRU
from lehr.networks.observations import Leaf, View
from lehr.networks.torsos import ACTIVATIONS, CNN, MLP, Activation
from lehr.networks.trunks import Shared, Torso, Twin
from lehr.spaces import Box, Dict, Discrete, MultiDiscrete


class Operation(NamedTuple):
    """One operation: its kind, the names of its inputs and of its output, and its options."""

    kind: str
    inputs: tuple[str, ...]
    output: str
    options: dict[str, Any]


class Input(NamedTuple):
    """An array of an observation, `[N, *shape]`."""

    name: str
    path: tuple[str, ...]
    """The keys that lead to it, in an observation that is a dict."""
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Graph:
    """Operations in the order in which they are run, from inputs and constants to outputs."""

    inputs: list[Input] = field(default_factory=list)
    carry: dict[str, int] = field(default_factory=dict)
    """The name and size of each array of the recurrent state, `[N, size]`; it is zero before an episode."""
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    """The value of each output, by the output's name."""
    next_carry: list[str] = field(default_factory=list)
    """The value of each array of the next recurrent state."""

    def add(self, kind: str, *inputs: str | np.ndarray, **options: Any) -> str:
        """Append an operation, and return the name of its value; an array becomes a constant."""
        names = tuple(given if isinstance(given, str) else self._constant(given) for given in inputs)
        output = f"v{len(self.operations)}"
        self.operations.append(Operation(kind, names, output, options))
        return output

    def _constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array, np.float32)
        return name

    def dense(self, x: str, params: Params) -> str:
        """`x W + b`, or `x W` without a bias."""
        product = self.add("matmul", x, params["kernel"])
        return self.add("add", product, params["bias"]) if "bias" in params else product

    def remove_unused(self) -> None:
        """Remove the operations and inputs that no output depends on."""
        needed = {*self.outputs.values()}
        for operation in reversed(self.operations):
            if operation.output in needed:
                needed.update(operation.inputs)
        self.operations = [operation for operation in self.operations if operation.output in needed]
        self.constants = {name: array for name, array in self.constants.items() if name in needed}
        self.inputs = [given for given in self.inputs if given.name in needed]

    def split(self, x: str, size: int, count: int) -> list[str]:
        """Cut the last axis into parts of equal size."""
        return [self.add("slice", x, begin=size * part, end=size * (part + 1)) for part in range(count)]


def add_actor(
    graph: Graph, network: ActorCriticNetwork, params: Params, observed: Mapping[tuple[str, ...], str]
) -> dict[str, str]:
    """Append the actor of a network; return the parameters of its distribution: `logits`, or `mean` and `log_std`.

    Args:
        graph: to append to; a recurrent actor also adds its carry.
        network: the static network.
        params: its parameters, as NumPy arrays.
        observed: the value of each array of the observation, by its path, normalised if the policy normalises.
    """
    trunk, given = network.module.trunk, params.get("trunk", {})
    if isinstance(trunk, Twin):
        stacked = jax.tree.map(lambda x: x[0], given["mlps"]["stack"])
        features = _add_mlp(graph, cast(MLP, trunk.mlps.stack), stacked, _add_vector(graph, trunk.view, observed))
    elif isinstance(trunk, Shared):
        features = _add_torso(graph, trunk.torso, given.get("torso", {}), observed)
    else:
        features = _add_torso(graph, trunk.actor_torso, given.get("actor_torso", {}), observed)
    head, weights = network.module.policy_head, params["policy_head"]
    if isinstance(head, CategoricalHead):
        logits = graph.dense(features, weights["logits"])
        if network.module.masked_space is not None:
            logits = _add_mask(graph, network, logits, observed)
        return {"logits": logits}
    if not head.state_dependent_std:
        mean = graph.dense(features, weights["mean"])
        return {"mean": mean, "log_std": graph.add("broadcast", weights["log_std"], mean)}
    both = graph.dense(features, weights["mean_and_log_std"])
    mean, change = graph.split(both, weights["mean_and_log_std"]["bias"].shape[0] // 2, 2)
    low, high = (np.array(bound) for bound in LOG_STD_RANGE)
    log_std = graph.add("add", change, np.array(head.initial_log_std))
    return {"mean": mean, "log_std": graph.add("minimum", graph.add("maximum", log_std, low), high)}


def _add_mask(graph: Graph, network: ActorCriticNetwork, logits: str, observed: Mapping[tuple[str, ...], str]) -> str:
    """Append what `lehr.masks.forbid` does, component by component."""
    actions = network.module.masked_space
    counts = (actions.n,) if isinstance(actions, Discrete) else cast(MultiDiscrete, actions).nvec
    mask, shape = graph.add("to_float", observed[MASK,]), cast(Dict, network.observation_space).spaces[MASK].shape
    by_rows = len(shape) == 2
    if by_rows:
        mask = graph.add("flatten", mask)
    parts, begin = [], 0
    for index, count in enumerate(counts):
        start = index * max(counts) if by_rows else begin
        part = graph.add("slice", logits, begin=begin, end=begin + count)
        parts.append(graph.add("forbid", part, graph.add("slice", mask, begin=start, end=start + count)))
        begin += count
    return parts[0] if len(parts) == 1 else graph.add("concatenate", *parts)


def _add_torso(graph: Graph, torso: Any, params: Params, observed: Mapping[tuple[str, ...], str]) -> str:
    if not isinstance(torso, Torso):
        raise InputError(
            f"The torso {type(torso.module).__name__} is not built in, and only mlp, cnn, lstm, gru and mingru can be "
            "exported to NumPy and ONNX; export to stablehlo."
        )
    encoder, weights = torso.encoder, params.get("encoder", {})
    vector = _add_vector(graph, torso.view, observed) if torso.view.flat else None
    if isinstance(encoder, CNN):
        image = _add_float(graph, cast(Leaf, torso.view.image), observed)
        x = _add_cnn(graph, encoder, weights, image, vector)
    else:
        x = _add_mlp(graph, encoder, weights, cast(str, vector))
    return x if torso.memory is None else _add_memory(graph, torso.memory, params["memory"], x)


def _add_vector(graph: Graph, view: View, observed: Mapping[tuple[str, ...], str]) -> str:
    """Append what `View.inputs` does for the vector."""
    parts = []
    for leaf in view.flat:
        path, space = leaf
        match space:
            case Box():
                x = _add_float(graph, leaf, observed)
                parts.append(x if len(space.shape) == 1 else graph.add("flatten", x))
            case Discrete():
                x = graph.add("offset", observed[path], by=-space.start) if space.start else observed[path]
                parts.append(graph.add("one_hot", x, size=space.n))
            case MultiDiscrete():
                for index, size in enumerate(space.nvec):
                    entry = graph.add("slice", observed[path], begin=index, end=index + 1)
                    parts.append(graph.add("one_hot", graph.add("squeeze", entry), size=size))
    return parts[0] if len(parts) == 1 else graph.add("concatenate", *parts)


def _add_float(graph: Graph, leaf: Leaf, observed: Mapping[tuple[str, ...], str]) -> str:
    """Append the conversion of an array to float32; bytes are divided by 255."""
    path, space = leaf
    if space.dtype == np.float32:
        return observed[path]
    x = graph.add("to_float", observed[path])
    return graph.add("divide", x, np.array(255.0)) if space.dtype == np.uint8 else x


def _add_cnn(graph: Graph, encoder: CNN, params: Params, image: str, vector: str | None) -> str:
    x = image
    _check_dtype(encoder.dtype)
    for index, convolution in enumerate(encoder.convolutions):
        weights = params["convolutions"][str(index)]
        stride = cast(tuple[int, int], convolution.strides)[0]
        x = graph.add("convolve", x, weights["kernel"], weights["bias"], stride=stride)
        x = _add_activation(graph, encoder.activation, x)
    x = graph.add("flatten", x)
    x = x if vector is None else graph.add("concatenate", x, vector)
    return _add_mlp(graph, encoder.dense, params.get("dense", {}), x)


def _add_mlp(graph: Graph, mlp: MLP, params: Params, x: str) -> str:
    for index, layer in enumerate(mlp.layers):
        _check_dtype(layer.dtype)
        x = graph.dense(x, params["layers"][str(index)])
        if mlp.norms:
            norm = params["norms"][str(index)]
            x = graph.add("layer_norm", x, norm["scale"], norm["bias"], epsilon=mlp.norms[index].epsilon)
        x = _add_activation(graph, mlp.activation, x)
    return x


def _add_activation(graph: Graph, activation: str | Activation, x: str) -> str:
    if not isinstance(activation, str):
        raise InputError(
            f"The activation {getattr(activation, '__name__', activation)} is not built in, and only "
            f"{', '.join(ACTIVATIONS)} can be exported to NumPy and ONNX; export to stablehlo."
        )
    return graph.add(activation, x)


def _add_memory(graph: Graph, memory: LSTM | GRU | MinGRU, params: Params, x: str) -> str:
    """Append one step of a recurrent layer; its formulas stand at its class."""
    size = memory.out_features
    _check_dtype(memory.input.dtype)
    from_x = graph.dense(x, params["input"])
    one = np.array(1.0)
    if isinstance(memory, LSTM):
        graph.carry |= {"h": size, "c": size}
        gates = graph.add("add", from_x, graph.dense("h", params["recurrent"]))
        i, f, g, o = graph.split(gates, size, 4)
        kept = graph.add("multiply", graph.add("sigmoid", graph.add("add", f, one)), "c")
        cell = graph.add("add", kept, graph.add("multiply", graph.add("sigmoid", i), graph.add("tanh", g)))
        h = graph.add("multiply", graph.add("sigmoid", o), graph.add("tanh", cell))
        graph.next_carry = [h, cell]
        return h
    graph.carry |= {"h": size}
    if isinstance(memory, GRU):
        x_parts = graph.split(from_x, size, 3)
        h_parts = graph.split(graph.dense("h", params["recurrent"]), size, 3)
        r, z = (graph.add("sigmoid", graph.add("add", x_parts[part], h_parts[part])) for part in (0, 1))
        new = graph.add("tanh", graph.add("add", x_parts[2], graph.add("multiply", r, h_parts[2])))
        old, share = "h", graph.add("subtract", one, z)
    else:
        gate, new = graph.split(from_x, size, 2)
        share = graph.add("sigmoid", gate)
        old, z = "h", graph.add("subtract", one, share)
    h = graph.add("add", graph.add("multiply", share, new), graph.add("multiply", z, old))
    graph.next_carry = [h]
    return h


def _check_dtype(dtype: Any) -> None:
    if np.dtype(dtype) != np.float32:
        raise InputError(
            f"This policy computes in {np.dtype(dtype)}, and only float32 can be exported to NumPy and ONNX; export to "
            "stablehlo."
        )
