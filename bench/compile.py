"""Seconds from nothing to a compiled program, for each algorithm with its defaults, beside a bare PPO loop.

    python bench/compile.py             all algorithms that need no files
    python bench/compile.py ppo trpo    some of them

Nothing is read from a cache of compiled programs. `assemble` builds the network and the initial state, `trace` is
JAX's part of the chunk of updates, and `compile` is XLA's. The ratio is the sum of the three, divided by the same for
the bare loop, in this run. The last column is the time of all cores, which depends less on what else they do.
"""

import argparse
import time
from functools import partial

import bare
import jax
import jax.numpy as jnp

from lehr import algorithms
from lehr.config import build
from lehr.training.program import assemble
from lehr.training.runners.device import MOST_UPDATES, chunk

ENV, TOTAL_STEPS = "CartPole-v1", 1_000_000
NEEDS_FILES = {"gail"}


def of_bare_loop() -> tuple[float, float, float]:
    """Return the seconds for the bare loop, in the sizes of PPO's defaults."""
    begin = time.perf_counter()
    init, run = bare.make(32, 64, 8, 4)
    carry = jax.block_until_ready(init(jax.random.key(0)))
    assembled = time.perf_counter()
    lowered = jax.jit(run, static_argnums=1).lower(carry, 8)
    traced = time.perf_counter()
    lowered.compile()
    return assembled - begin, traced - assembled, time.perf_counter() - traced


def of_algorithm(name: str) -> tuple[float, float, float]:
    """Return the seconds for an algorithm with its defaults."""
    begin = time.perf_counter()
    settings, network = build(algorithms.settings_of(name), {})
    program, state = assemble(name, ENV, settings, network, TOTAL_STEPS)
    jax.block_until_ready(state)
    assembled = time.perf_counter()
    lowered = jax.jit(partial(chunk, program, MOST_UPDATES), donate_argnums=0).lower(state, jnp.int32(1))
    traced = time.perf_counter()
    lowered.compile()
    return assembled - begin, traced - assembled, time.perf_counter() - traced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name in algorithms.names() if name not in NEEDS_FILES]
    parser.add_argument("names", nargs="*", metavar="ALGORITHM", help=f"of: {', '.join(known)}")
    names = parser.parse_args().names or known
    jax.config.update("jax_enable_compilation_cache", False)
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    print("| program | assemble | trace | compile | sum | ratio | CPU |")
    print("|---|---|---|---|---|---|---|")
    begin = time.process_time()
    base = sum(of_bare_loop())
    print(f"| bare loop | | | | {base:.1f} s | 1 | {time.process_time() - begin:.1f} s |", flush=True)
    for name in names:
        begin = time.process_time()
        parts = of_algorithm(name)
        total, cpu = sum(parts), time.process_time() - begin
        shown = [*(f"{part:.1f} s" for part in (*parts, total)), f"{total / base:.1f}", f"{cpu:.1f} s"]
        print(f"| {name} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
