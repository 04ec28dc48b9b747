"""Export a policy, to act with it where Lehr is not installed."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr import kernels
from lehr.acting.export.numpy_file import numpy_files
from lehr.acting.export.numpy_policy import NumpyPolicy
from lehr.acting.export.onnx_file import onnx_files
from lehr.acting.export.stablehlo_file import stablehlo_files
from lehr.acting.policy import Policy
from lehr.errors import InputError, closest
from lehr.files import replaced
from lehr.spaces import Discrete, MultiDiscrete, Space

FORMATS: dict[str, tuple[str, Callable[[Policy], dict[str, bytes]]]] = {
    "numpy": (".npz", numpy_files),
    "stablehlo": (".stablehlo", stablehlo_files),
    "onnx": (".onnx", onnx_files),
}
"""The suffix of each format's file, and the function that returns its files."""
TOLERANCE = 1e-4
"""How far an exported action may be from the policy's, relative to the larger of it and 1."""


def export(policy: Policy, to: str = "numpy", out: str | Path | None = None) -> Path:
    """Write a policy to a file that needs neither Lehr nor the run, and return the file's path.

    Every format takes observations as the environment gives them, in any number, and answers with the most likely
    actions as the environment takes them, the parameters of their distribution, and the next recurrent state.

    Args:
        policy: from `lehr.train` or `lehr.load`.
        to: `numpy` (arrays and a module that runs them with NumPy alone, beside the file), `stablehlo` (the result of
            `jax.export`) or `onnx`.
        out: the file to write; by default `policy` with the suffix of the format, in the working directory.
    """
    suffix = suffix_of(to)
    if not isinstance(policy, Policy):
        raise InputError(f"policy is a {type(policy).__name__}, not a policy; give result.policy.")
    path = Path(out) if out is not None else Path(f"policy{suffix}")
    if path.suffix != suffix:
        raise InputError(f"out is '{path}', but the file of {to} ends in {suffix}; name it '{path.stem}{suffix}'.")
    places = [path, path.with_suffix(".py")] if to == "numpy" else [path]
    for place in places:
        if os.path.lexists(place):
            raise InputError(f"'{place}' exists already, and is not overwritten; remove it, or give another out.")
    if to != "stablehlo":
        check(policy)
    contents = FORMATS[to][1](policy)
    try:
        for place in places:
            with replaced(place) as file:
                file.write(contents[place.suffix])
    except OSError as error:
        raise InputError(f"Cannot write '{path}': {error.strerror or error}; give another out.") from error
    return path


def suffix_of(to: str) -> str:
    """Return the suffix of a format's file."""
    if to not in FORMATS:
        raise InputError(f"The format to export to is {to!r}; {closest(str(to), FORMATS)}")
    return FORMATS[to][0]


def check(policy: Policy) -> None:
    """Refuse a policy that acts otherwise than its network's operations say, by a method `act` of its own for example.

    Two steps on random observations are compared.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "policy.npz")
        file.write_bytes(numpy_files(policy)[file.suffix])
        exported = NumpyPolicy(file)
    program, size = policy.program, 16

    def act(carry: Any, obs: Any) -> Any:
        reset, key = jnp.zeros(size, bool), jax.random.key(0)
        return program.act(policy.learned, carry, obs, reset, key, jnp.bool(True))

    carry, memory = policy.initial_carry(size), exported.initial_carry(size)
    with kernels.plain(), jax.default_matmul_precision("highest"):
        step = jax.jit(act)
        for number in range(2):
            obs = jax.vmap(program.observation_space.sample)(jax.random.split(jax.random.key(number), size))
            carry, expected = step(carry, obs)
            found = exported.outputs(jax.device_get(obs), memory)
            memory = [found[f"next_{name}"] for name in exported.about["carry"]]
            if not _agree(program.action_space, found, np.asarray(expected)):
                raise InputError(
                    "This policy acts otherwise than its network alone, so the export would not be the same; export to "
                    "stablehlo, which has everything the policy does."
                )


def _agree(space: Space, found: dict[str, np.ndarray], expected: np.ndarray) -> bool:
    """Whether actions are the same; of choices whose logits are almost equal, any may be the most likely."""
    if not isinstance(space, Discrete | MultiDiscrete):
        return bool(np.all(np.abs(found["action"] - expected) <= TOLERANCE * np.maximum(1, np.abs(expected))))
    counts = (space.n,) if isinstance(space, Discrete) else space.nvec
    expected = expected - space.start if isinstance(space, Discrete) else expected
    parts = np.split(found["logits"], np.cumsum(counts)[:-1], axis=-1)
    for logits, chosen in zip(parts, expected.reshape(len(expected), -1).T, strict=True):
        best, picked = logits.max(-1), np.take_along_axis(logits, chosen[:, None], -1)[:, 0]
        if np.any(best - picked > TOLERANCE * np.maximum(1, np.abs(best))):
            return False
    return True
