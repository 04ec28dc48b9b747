"""Whether TF32 costs learning: an entry of the zoo, with products of matrices rounded as those of a GPU are.

    python bench/tf32.py trpo Pendulum-v1                               twenty seeds, rounded
    python bench/tf32.py trpo Pendulum-v1 --exact                       the same seeds in float32
    python bench/tf32.py trpo Pendulum-v1 --seeds 40 --first-seed 100

On a GPU, JAX multiplies float32 matrices in TF32 by default: of the 23 bits of a fraction, 10 are kept, and sums are
float32. This rounds the factors of every product in the same way on a CPU, without kernels, so that the two commands
differ in nothing else, as two machines would.
"""

import argparse
import os
import time
from typing import Any

import jax
import numpy as np
from jax._src.lax import lax as inside


def round_products() -> None:
    """Let products of float32 matrices be those of TF32 ones, before anything that holds the old ones is imported."""
    exact = inside.dot_general

    def dot_general(lhs: jax.Array, rhs: jax.Array, *options: Any, **more: Any) -> jax.Array:
        if lhs.dtype == rhs.dtype == np.float32:
            lhs, rhs = (jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10) for x in (lhs, rhs))
        return exact(lhs, rhs, *options, **more)

    for module in (jax.lax, inside):
        vars(module)["dot_general"] = dot_general


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm")
    parser.add_argument("env")
    parser.add_argument("--exact", action="store_true", help="leave products as they are")
    parser.add_argument("--seeds", type=int, default=20, help="number of seeds (20)")
    parser.add_argument("--first-seed", type=int, default=100, help="the first of them (100)")
    arguments = parser.parse_args()
    os.environ["LEHR_KERNELS"] = "off"
    if not arguments.exact:
        round_products()
    from lehr import zoo
    from lehr.cli.zoo import retrained

    begin = time.perf_counter()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    found = np.sort(np.asarray(retrained(zoo.find(arguments.algorithm, arguments.env), seeds, False)))
    print(
        f"{'float32' if arguments.exact else 'TF32'}: {found.mean():.1f} ± {found.std():.1f}, median "
        f"{np.median(found):.1f}, each {', '.join(f'{value:.1f}' for value in found)}, "
        f"{time.perf_counter() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
