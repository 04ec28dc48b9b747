"""Measure the cost of evaluating a schedule: outside a compiled program against optax, inside one against a constant.

    python bench/schedules.py

Both are measured in one run, in alternating turns, and the medians are printed; the ratio is what matters.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import lehr
from lehr.schedules import stack

TOTAL = 1_000_000
ROWS: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("constant", "0.03", optax.constant_schedule(0.03)),
    ("linear", "0.03 -> 0.001", optax.linear_schedule(0.03, 0.001, TOTAL)),
    ("cosine", "0.03 -> 0.001 cosine", optax.cosine_decay_schedule(0.03, TOTAL, 0.001 / 0.03)),
    ("exponential", "0.03 -> 0.001 exponential", optax.exponential_decay(0.03, TOTAL, 0.001 / 0.03, end_value=0.001)),
    ("polynomial", "0.03 -> 0.001 polynomial(2)", optax.polynomial_schedule(0.03, 0.001, 2, TOTAL)),
    (
        "warm-up, cosine",
        "0 -> 0.03 over 5%, 0.03 -> 0.001 cosine",
        optax.warmup_cosine_decay_schedule(0, 0.03, TOTAL // 20, TOTAL, 0.001),
    ),
]


def microseconds(functions: list[Callable[[], Any]], calls: int, turns: int = 7) -> list[float]:
    """Return the median cost of a call of each function, in alternating turns, so that noise affects all alike."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        jax.block_until_ready(function())
    for _ in range(turns):
        for function, found in zip(functions, times, strict=True):
            begin = time.perf_counter()
            for _ in range(calls):
                result = function()
            jax.block_until_ready(result)
            found.append((time.perf_counter() - begin) / calls * 1e6)
    return [statistics.median(found) for found in times]


def outside() -> None:
    print(f"{'outside jit':20}{'lehr µs':>10}{'optax µs':>10}{'ratio':>8}")
    for name, text, theirs in ROWS:
        ours: Any = lehr.schedule(text, TOTAL)
        a, b = microseconds([partial(ours, TOTAL // 3), partial(theirs, TOTAL // 3)], calls=200)
        print(f"{name:20}{a:10.2f}{b:10.2f}{b / a:7.1f}×")


def inside() -> None:
    """Evaluate PPO's thirteen coefficients 1,000 times inside one program: all scheduled, then all constant."""

    @jax.jit
    def evaluate(coefficients: Any) -> jax.Array:
        def body(total: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.vmap(lambda member: member(step))(coefficients), None

        return jax.lax.scan(body, jnp.zeros(13), jnp.arange(0, TOTAL, TOTAL // 1000))[0]

    scheduled = stack([lehr.schedule(ROWS[index % len(ROWS)][1], TOTAL) for index in range(13)])
    constant = stack([lehr.schedule(text, TOTAL) for text in [*["0.03"] * 12, ROWS[-1][1]]])
    a, b = microseconds([lambda: evaluate(scheduled), lambda: evaluate(constant)], calls=20)
    print(f"\ninside jit, 13 coefficients at one step: scheduled {a / 1000:.2f} µs, constant {b / 1000:.2f} µs")


if __name__ == "__main__":
    print(f"jax {jax.__version__}, optax {optax.__version__}, {jax.devices()[0].device_kind}\n")
    outside()
    inside()
