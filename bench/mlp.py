"""Time the kernels of the fused MLP for each choice of rows per block and warps, on one GPU.

    python bench/mlp.py [--members 2048] [--rows 128] [--hidden 64]

Prints microseconds of the kernel alone, the fastest first, and the largest error relative to the largest entry, against
products in full precision: acting (4 rows of one network), the forward pass and the backward pass (of an actor and a
critic) of a population's minibatch, and the kernel that is forward pass, PPO's loss and backward pass. The last line of
each is with operands in TF32 instead of float16. The constants in `lehr.kernels.mlp` and `lehr.kernels.mlp_loss` are
chosen from this. With `--members 1 --rows 524288`, it is one agent with a large minibatch.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import gpu_profile
import jax
import jax.numpy as jnp
import numpy as np

from lehr import kernels
from lehr.algorithms import ppo
from lehr.kernels import mlp, mlp_loss
from lehr.maths.minibatches import Minibatch
from lehr.maths.optimise import optimiser
from lehr.networks import NetworkConfig, actor_critic
from lehr.spaces import Box, Discrete
from lehr.types import NOTHING, Packed, Rollout

BLOCKS, WARPS = (16, 32, 64, 128), (1, 2, 4, 8)


def layers(members: int, networks: int, hidden: int) -> list[tuple[jax.Array, jax.Array]]:
    rng = np.random.default_rng(0)
    sizes = (4, hidden, hidden, 2)
    return [
        (
            jnp.asarray(rng.normal(size=(members, networks, i, o)) / i**0.5, jnp.float32),
            jnp.zeros((members, networks, o)),
        )
        for i, o in itertools.pairwise(sizes)
    ]


def microseconds(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the time in kernels of the fused MLP, and the result."""
    compiled = jax.jit(function)
    result = jax.block_until_ready(compiled(*arguments))

    def run(times: int) -> None:
        for _ in range(times):
            found = compiled(*arguments)
        jax.block_until_ready(found)

    found, _ = gpu_profile.kernels(run)
    times = [time for name, (_, time) in found.items() if "mlp" in name]
    return sum(times) / gpu_profile.UPDATES if times else float("nan"), result


def error(found: Any, expected: Any) -> float:
    """The largest, relative to the largest entry of each array."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


def loss_and_gradient(members: int, rows: int, hidden: int) -> tuple[Callable[[], Callable[..., Any]], tuple[Any, ...]]:
    """A function that makes a new function of PPO's loss and gradient, and arguments for it."""
    config = NetworkConfig(hidden_sizes=(hidden, hidden))
    network, params = actor_critic(Box(-1, 1, (4,)), Discrete(2), config, jax.random.key(0))
    packed, unpack = optimiser("adam").pack(params)
    algorithm = ppo.Algorithm(ppo.Config(minibatching="flat"), network)
    coef = {"entropy_coef": jnp.float32(0.01), "value_coef": jnp.float32(0.5), "clip_range": jnp.float32(0.2)}

    def one(packed: jax.Array, obs: jax.Array, action: jax.Array, log_prob: jax.Array, target: jax.Array) -> Any:
        empty = dict.fromkeys(Rollout._fields, NOTHING)
        rollout = Rollout(**empty | {"obs": obs, "action": action, "log_prob": log_prob, "valid": (), "carry": ()})
        minibatch = Minibatch(ppo.Samples(rollout, target, target), (), None, NOTHING)
        return algorithm._gradients(packed, unpack, minibatch, coef, jax.random.key(1))

    def make() -> Callable[..., Any]:
        def call(*given: jax.Array) -> Any:
            with kernels.together(members):
                return jax.vmap(one)(*given)

        return call

    rng = np.random.default_rng(0)
    noise = jnp.asarray(rng.normal(size=(members, rows)), jnp.float32)
    obs = jnp.asarray(rng.normal(size=(members, rows, 4)), jnp.float32)
    vectors = jnp.tile(packed, (members, 1))
    return make, (vectors, obs, (noise > 0).astype(jnp.int32), 0.1 * noise - 0.7, noise)


def in_full_precision(make: Callable[[], Callable[..., Any]], *arguments: Any) -> Any:
    """The same without kernels, and with products in full precision."""
    with jax.default_matmul_precision("highest"), kernels.plain():
        return jax.jit(make())(*arguments)


def tried(
    names: tuple[str, str], make: Callable[[], Callable[..., Any]], arguments: tuple[Any, ...], module: Any = mlp
) -> Iterator[tuple[float, str]]:
    """Measure with every choice of the two constants; what does not compile is left out, with its reason."""
    expected = in_full_precision(make, *arguments)
    before = [getattr(module, name) for name in names]
    choices = [(True, *choice) for choice in itertools.product(BLOCKS, WARPS)] + [(False, *before)]
    for mlp.HALF, *values in choices:
        for name, value in zip(names, values, strict=True):
            setattr(module, name, value)
        text = f"{values[0]} rows, {values[1]} warps{'' if mlp.HALF else ', TF32'}"
        try:
            time, found = microseconds(make(), *arguments)
            yield time, f"{text}, error {error(found, expected):.1e}"
        except Exception as failure:
            print(f"{text}: {type(failure).__name__}: {str(failure).splitlines()[0][:80]}")
    mlp.HALF = True
    for name, value in zip(names, before, strict=True):
        setattr(module, name, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=64)
    arguments = parser.parse_args()
    members, rows = arguments.members, arguments.rows
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; {members} members")

    def forward() -> Callable[..., Any]:
        """A new function each time: JAX keeps the programs of one that it has seen, with the constants of then."""

        def call(x: jax.Array, given: Any) -> jax.Array:
            with kernels.together(members):
                return jax.vmap(evaluated)(x, given)

        return call

    def evaluated(x: jax.Array, given: Any) -> jax.Array:
        *hidden, (kernels_, biases) = given
        heads = dict(enumerate(zip(kernels_, biases, strict=True)))
        found = kernels.evaluate_mlps(x, hidden, heads, "tanh")
        if found is None:
            return jnp.stack([plain(x, [(kernel[one], bias[one]) for kernel, bias in given]) for one in heads])
        return jnp.stack(found)

    def plain(x: jax.Array, given: Any) -> jax.Array:
        for number, (kernel, bias) in enumerate(given):
            x = (jnp.tanh(x) if number else x) @ kernel + bias
        return x

    def backward() -> Callable[..., Any]:
        call = forward()
        return lambda x, given, gradient: jax.vjp(lambda given: call(x, given), given)[1](gradient)

    def loss() -> Callable[..., Any]:
        call = make()

        def vectors(*given: jax.Array) -> jax.Array:
            gradients = call(*given)[1]
            if isinstance(gradients, Packed):
                return gradients.gradients
            return jax.vmap(lambda gradients: optimiser("adam").pack(gradients)[0])(gradients)

        return vectors

    one, both = (layers(members, networks, arguments.hidden) for networks in (1, 2))
    rng = np.random.default_rng(1)
    few, many = (jnp.asarray(rng.normal(size=(members, count, 4)), jnp.float32) for count in (4, rows))
    gradient = jnp.asarray(rng.normal(size=(members, 2, rows, 2)) / rows, jnp.float32)
    make, given = loss_and_gradient(members, rows, arguments.hidden)
    mlp_loss.MOST_ROWS = rows
    prefix = "MEMBER_" if members > 1 else ""
    cases = {
        "forward": ((f"{prefix}BLOCK_ROWS", f"{prefix}NUM_WARPS"), forward, (many, both), mlp),
        "backward": (
            (f"{prefix}BACKWARD_BLOCK_ROWS", f"{prefix}BACKWARD_NUM_WARPS"),
            backward,
            (many, both, gradient),
            mlp,
        ),
        "loss and gradient": ((f"{prefix}BLOCK_ROWS", f"{prefix}NUM_WARPS"), loss, given, mlp_loss),
    }
    if members > 1:
        cases["acting"] = (("MEMBER_BLOCK_ROWS", "MEMBER_FEW_NUM_WARPS"), forward, (few, one), mlp)
    for name, case in cases.items():
        for found, text in sorted(tried(*case)):
            print(f"{name}: {found:.1f} with {text}", flush=True)


if __name__ == "__main__":
    main()
