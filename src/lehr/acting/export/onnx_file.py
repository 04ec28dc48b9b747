"""Export a policy as an ONNX model; the only file that imports the package onnx."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lehr import plugins
from lehr.acting.export.policy_graph import noise, policy_graph
from lehr.acting.policy import Policy
from lehr.networks.graph import Graph, Operation
from lehr.spaces import Space

OPSET, IR_VERSION = 18, 8
"""Versions of ONNX's operators and of its file format, old enough for runtimes since 2023."""

_SAME = {
    "add": "Add",
    "subtract": "Sub",
    "multiply": "Mul",
    "divide": "Div",
    "maximum": "Max",
    "minimum": "Min",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "exp": "Exp",
    "relu": "Relu",
    "elu": "Elu",
    "matmul": "MatMul",
    "flatten": "Flatten",
}
"""The operations that are one operator of ONNX without attributes."""


def onnx_files(policy: Policy) -> dict[str, bytes]:
    """Return the content of the file, by its suffix.

    The inputs are the arrays of the observation, `[n, ...]`, named `obs` or `obs_<key>`, and those of the carry; the
    outputs are `action`, the parameters of its distribution, and `next_<name>` for each array of the carry.
    """
    onnx = plugins.require("onnx", "onnx", "Exporting to ONNX")
    model = _Model(onnx, policy_graph(policy), policy.program.action_space).proto(str(policy))
    onnx.checker.check_model(model, full_check=True)
    return {".onnx": model.SerializeToString()}


class _Model:
    """Translates a graph operation by operation."""

    def __init__(self, onnx: Any, graph: Graph, action_space: Space) -> None:
        self.onnx, self.graph, self.action_space = onnx, graph, action_space
        self.nodes: list[Any] = []
        self.constants = dict(graph.constants)

    def proto(self, words: str) -> Any:
        """Return the model."""
        helper, graph = self.onnx.helper, self.graph
        for operation in graph.operations:
            self._translate(operation)
        for name, value in graph.outputs.items():
            self.nodes.append(helper.make_node("Identity", [value], [name]))
        inputs = [self._value(given.name, np.dtype(given.dtype), given.shape) for given in graph.inputs]
        inputs += [self._value(name, np.dtype(np.float32), (size,)) for name, size in graph.carry.items()]
        outputs = [self._output(name) for name in graph.outputs]
        constants = [self.onnx.numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        made = helper.make_graph(self.nodes, "policy", inputs, outputs, constants, doc_string=words)
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(made, producer_name="lehr", opset_imports=[opset], ir_version=IR_VERSION)

    def _output(self, name: str) -> Any:
        if name == "action":
            integer = "logits" in self.graph.outputs
            return self._value(name, np.dtype(np.int64 if integer else np.float32), self.action_space.shape)
        sizes = {f"next_{part}": size for part, size in self.graph.carry.items()}
        return self._value(name, np.dtype(np.float32), (sizes.get(name, noise(self.action_space)[1]),))

    def _value(self, name: str, dtype: np.dtype, shape: Any) -> Any:
        kind = self.onnx.helper.np_dtype_to_tensor_dtype(dtype)
        return self.onnx.helper.make_tensor_value_info(name, kind, ["n", *shape])

    def _translate(self, operation: Operation) -> None:
        if operation.kind in _SAME:
            self._node(_SAME[operation.kind], operation.inputs, operation.output)
        else:
            translate: Callable[..., None] = getattr(self, f"_{operation.kind}")
            translate(operation.output, *operation.inputs, **operation.options)

    def _node(self, kind: str, inputs: tuple[str, ...], output: str, **attributes: Any) -> str:
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def _constant(self, values: Any, dtype: Any = np.int64) -> str:
        name = f"i{len(self.constants)}"
        self.constants[name] = np.array(values, dtype)
        return name

    def _to_float(self, output: str, x: str) -> None:
        self._node("Cast", (x,), output, to=self.onnx.TensorProto.FLOAT)

    def _round_to_half(self, output: str, x: str) -> None:
        half = self._node("Cast", (x,), f"{output}_half", to=self.onnx.TensorProto.FLOAT16)
        self._to_float(output, half)

    def _one_hot(self, output: str, x: str, size: int) -> None:
        column = self._node("Unsqueeze", (x, self._constant([-1])), f"{output}_column")
        whole = self._node("Cast", (column,), f"{output}_whole", to=self.onnx.TensorProto.INT64)
        equal = self._node("Equal", (whole, self._constant(np.arange(size))), f"{output}_equal")
        self._to_float(output, equal)

    def _offset(self, output: str, x: str, by: int) -> None:
        whole = self._node("Cast", (x,), f"{output}_whole", to=self.onnx.TensorProto.INT64)
        self._node("Add", (whole, self._constant(by)), output)

    def _slice(self, output: str, x: str, begin: int, end: int) -> None:
        self._node("Slice", (x, *(self._constant([value]) for value in (begin, end, -1))), output)

    def _concatenate(self, output: str, *parts: str) -> None:
        self._node("Concat", parts, output, axis=-1)

    def _broadcast(self, output: str, x: str, like: str) -> None:
        self._node("Expand", (x, self._node("Shape", (like,), f"{output}_shape")), output)

    def _forbid(self, output: str, x: str, mask: str) -> None:
        zero = self._constant(0.0, np.float32)
        most = self._node("ReduceMax", (mask, self._constant([-1])), f"{output}_most", keepdims=1)
        some = self._node("Greater", (most, zero), f"{output}_some")
        none = self._node("Not", (some,), f"{output}_none")
        allowed = self._node("Greater", (mask, zero), f"{output}_allowed")
        kept = self._node("Or", (allowed, none), f"{output}_kept")
        self._node("Where", (kept, x, self._constant(-np.inf, np.float32)), output)

    def _argmax(self, output: str, x: str) -> None:
        self._node("ArgMax", (x,), output, axis=-1, keepdims=1)

    def _squeeze(self, output: str, x: str) -> None:
        self._node("Squeeze", (x, self._constant([-1])), output)

    def _layer_norm(self, output: str, x: str, scale: str, bias: str, epsilon: float) -> None:
        self._node("LayerNormalization", (x, scale, bias), output, axis=-1, epsilon=epsilon)

    def _silu(self, output: str, x: str) -> None:
        self._node("Mul", (x, self._node("Sigmoid", (x,), f"{output}_gate")), output)

    def _gelu(self, output: str, x: str) -> None:
        """`x σ(2u)` with `u = √(2/π) (x + 0.044715 x³)`, which is `x (1 + tanh u) / 2`."""
        cube = self._node("Pow", (x, self._constant(3.0, np.float32)), f"{output}_cube")
        part = self._node("Mul", (cube, self._constant(0.044715, np.float32)), f"{output}_part")
        inner = self._node("Add", (x, part), f"{output}_inner")
        scaled = self._node("Mul", (inner, self._constant(2 * (2 / np.pi) ** 0.5, np.float32)), f"{output}_scaled")
        self._node("Mul", (x, self._node("Sigmoid", (scaled,), f"{output}_gate")), output)

    def _convolve(self, output: str, x: str, kernel: str, bias: str, stride: int) -> None:
        """ONNX has images as `[N, C, H, W]` and kernels as `[F, C, h, w]`."""
        self.constants[kernel] = np.transpose(self.constants[kernel], (3, 2, 0, 1)).copy()
        image = self._node("Transpose", (x,), f"{output}_image", perm=[0, 3, 1, 2])
        found = self._node("Conv", (image, kernel, bias), f"{output}_found", strides=[stride, stride])
        self._node("Transpose", (found,), output, perm=[0, 2, 3, 1])
