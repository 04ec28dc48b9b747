"""Act with a policy that Lehr exported, with NumPy alone.

    policy = NumpyPolicy("policy.npz")
    action = policy(obs)                            # the most likely action, for one observation or a batch
    action = policy(obs, np.random.default_rng(0))  # a sampled action

With a memory, begin each episode with `carry = policy.initial_carry(n)`, then `carry, action = policy.step(carry, obs)`
for observations `[n, ...]`. `policy.outputs(obs)` also has the parameters of the distribution.
"""

import functools
import json
import math
import operator

import numpy as np


def _sigmoid(x):
    return 0.5 * np.tanh(0.5 * x) + 0.5


def _layer_norm(x, scale, bias, epsilon):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + np.float32(epsilon)) * scale + bias


def _convolve(x, kernel, bias, stride):
    patches = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[:2], (1, 2))[:, ::stride, ::stride]
    return np.tensordot(patches, kernel, ((4, 5, 3), (0, 1, 2))) + bias


def _forbid(x, mask):
    return np.where((mask > 0) | ~(mask > 0).any(-1, keepdims=True), x, np.float32(-np.inf))


def _converted(name, given, dtype):
    """Return an array in a dtype; an error where a number would become another integer."""
    given = np.asarray(given)
    x = given.astype(dtype, copy=False)
    if x.dtype.kind in "iu" and x.dtype != given.dtype and (x != given).any():
        raise ValueError(f"{name} has {given[x != given].flat[0]}, which does not fit into {dtype}.")
    return x


OPERATIONS = {
    **{name: getattr(np, name) for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum")},
    **{name: getattr(np, name) for name in ("tanh", "exp", "matmul")},
    "sigmoid": _sigmoid,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))),
    "silu": lambda x: x * _sigmoid(x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "layer_norm": _layer_norm,
    "convolve": _convolve,
    "to_float": lambda x: x.astype(np.float32),
    "round_to_half": lambda x: x.astype(np.float16).astype(np.float32),
    "one_hot": lambda x, size: (x[..., None] == np.arange(size)).astype(np.float32),
    "offset": lambda x, by: x.astype(np.int64) + by,
    "flatten": lambda x: x.reshape(len(x), math.prod(x.shape[1:])),
    "slice": lambda x, begin, end: x[..., begin:end],
    "concatenate": lambda *parts: np.concatenate(parts, -1),
    "broadcast": lambda x, like: np.broadcast_to(x, like.shape),
    "forbid": _forbid,
    "argmax": lambda x: x.argmax(-1)[..., None],
    "squeeze": lambda x: x[..., 0],
}


class NumpyPolicy:
    """A policy in a file `.npz`: arrays, and a description of the operations on them as JSON."""

    def __init__(self, path):
        with np.load(path, allow_pickle=False) as file:
            self.arrays = {name: file[name] for name in file.files}
        self.about = json.loads(self.arrays.pop("description").tobytes())

    def __call__(self, obs, rng=None):
        """Return the action for an observation, or the actions for a batch."""
        if self.about["carry"]:
            raise ValueError("This policy is recurrent; use carry, action = policy.step(carry, obs).")
        return self.outputs(obs, (), rng)["action"]

    def step(self, carry, obs, rng=None):
        """Return the next recurrent state, and the actions for observations `[n, ...]`."""
        found = self.outputs(obs, carry, rng)
        return [found[f"next_{name}"] for name in self.about["carry"]], found["action"]

    def initial_carry(self, size):
        """Return the recurrent state before the first step of `size` episodes."""
        return [np.zeros((size, width), np.float32) for width in self.about["carry"].values()]

    def outputs(self, obs, carry=(), rng=None):
        """Return the action, the parameters of its distribution and the next recurrent state, by name."""
        values, single = dict(self.arrays), False
        for name, path, shape, dtype in self.about["inputs"]:
            x = _converted(name, functools.reduce(operator.getitem, path, obs), dtype)
            single = x.ndim == len(shape)
            values[name] = x[None] if single else x
        values.update(zip(self.about["carry"], carry, strict=True))
        if rng is None:
            values["noise"] = np.float32(0)
        else:
            kind, width = self.about["noise"]
            values["noise"] = getattr(rng, kind)(size=(len(values[name]), width)).astype(np.float32)
        for kind, inputs, output, options in self.about["operations"]:
            values[output] = OPERATIONS[kind](*[values[name] for name in inputs], **options)
        found = {name: values[value] for name, value in self.about["outputs"].items()}
        return {name: x[0] for name, x in found.items()} if single else found
