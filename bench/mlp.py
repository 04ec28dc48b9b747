"""Time the kernels of the fused MLP for each choice of rows per block and warps, on one GPU.

    python bench/mlp.py [--members 2048] [--rows 128] [--hidden 64]

Prints microseconds, the fastest first: acting (4 rows of one network), the forward pass and the backward pass (of an
actor and a critic) of a population's minibatch, and the kernel that is forward pass, PPO's loss and backward pass. The
constants in `lehr.kernels.mlp` and `lehr.kernels.mlp_loss` are chosen from this. With `--members 1 --rows 524288`, it
is one agent with a large minibatch.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

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
from lehr.types import NOTHING, Rollout

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


def microseconds(function: Callable[..., Any], *arguments: Any) -> float:
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*arguments))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(20):
            result = compiled(*arguments)
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - begin) / 20)
    return best * 1e6


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


def tried(names: tuple[str, str], measure: Callable[[], float], module: Any = mlp) -> Iterator[tuple[float, int, int]]:
    """Measure with every choice of the two constants; what does not compile is left out, with its reason."""
    before = [getattr(module, name) for name in names]
    for block, warps in itertools.product(BLOCKS, WARPS):
        for name, value in zip(names, (block, warps), strict=True):
            setattr(module, name, value)
        try:
            yield measure(), block, warps
        except Exception as error:
            print(f"{block} rows, {warps} warps: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
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
                return jax.vmap(lambda x, given: mlp.fused_mlp(x, given, "tanh"))(x, given)

        return call

    def backward() -> Callable[..., Any]:
        call = forward()
        return lambda x, given, gradient: jax.vjp(lambda given: call(x, given), given)[1](gradient)

    one, both = (layers(members, networks, arguments.hidden) for networks in (1, 2))
    few, many = jnp.ones((members, 4, 4)), jnp.ones((members, rows, 4))
    gradient = jnp.ones((members, 2, rows, 2))
    cases = {
        "acting": (("MEMBER_BLOCK_ROWS", "MEMBER_FEW_NUM_WARPS"), lambda: microseconds(forward(), few, one)),
        "forward": (("MEMBER_BLOCK_ROWS", "MEMBER_NUM_WARPS"), lambda: microseconds(forward(), many, both)),
        "backward": (
            ("MEMBER_BACKWARD_BLOCK_ROWS", "MEMBER_BACKWARD_NUM_WARPS"),
            lambda: microseconds(backward(), many, both, gradient),
        ),
    }
    for name, (constants, measure) in cases.items():
        for found, block, warps in sorted(tried(constants, measure)):
            print(f"{name}: {found:.1f} with {block} rows, {warps} warps", flush=True)
    make, given = loss_and_gradient(members, rows, arguments.hidden)
    mlp_loss.LEAST_MEMBERS, mlp_loss.MOST_ROWS = 2, rows
    names = ("MEMBER_BLOCK_ROWS", "MEMBER_NUM_WARPS") if members > 1 else ("BLOCK_ROWS", "NUM_WARPS")
    for found, block, warps in sorted(tried(names, lambda: microseconds(make(), *given), mlp_loss)):
        print(f"loss and gradient: {found:.1f} with {block} rows, {warps} warps", flush=True)


if __name__ == "__main__":
    main()
