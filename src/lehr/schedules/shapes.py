"""The curves a phase can follow: one formula each, the same for NumPy and for a traced program.

A curve takes `done`, the part of the phase that is over, and `left = 1 - done`, and goes from `start` to `end` without
ever turning back. It is given both, since `1 - done` would lose the digits of `left` near the end. `xp` is `numpy` or
`jax.numpy`. The position in `SHAPES` is the number that a schedule stores.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

Curve = Callable[[ModuleType, Any, Any, Any, Any, Any], Any]


def constant(xp: ModuleType, done: Any, left: Any, start: Any, end: Any, power: Any) -> Any:
    r"""$v = e$, where start and end are the same."""
    return end


def linear(xp: ModuleType, done: Any, left: Any, start: Any, end: Any, power: Any) -> Any:
    r"""$v(f) = e + (s - e)(1 - f)$.

    >>> linear(np, 0.25, 0.75, 1.0, 0.0, 1.0)
    0.75
    """
    return end + (start - end) * left


def cosine(xp: ModuleType, done: Any, left: Any, start: Any, end: Any, power: Any) -> Any:
    r"""$v(f) = e + (s - e)\left(\tfrac{1 + \cos \pi f}{2}\right)^p$, $p$ being what optax calls the exponent.

    It is computed as $\sin^{2p}(\pi (1 - f) / 2)$, the same without the cancellation near the end.

    >>> float(round(cosine(np, 0.5, 0.5, 1.0, 0.0, 2.0), 6))
    0.25
    """
    wave = xp.sin(0.5 * np.pi * left)
    return end + (start - end) * _power(xp, wave * wave, power)


def exponential(xp: ModuleType, done: Any, left: Any, start: Any, end: Any, power: Any) -> Any:
    r"""$v(f) = s\,(e/s)^f$: equal ratios in equal times. Start and end have the same sign and are not 0.

    The nearer end is the base, so that the rounding of $\ln(e/s)$ counts half at most.

    >>> float(round(exponential(np, 0.5, 0.5, 1.0, 0.01, 1.0), 6))
    0.1
    """
    from_end = done > left
    base, exponent = xp.where(from_end, end, start), xp.where(from_end, -left, done)
    return base * xp.exp(exponent * xp.log(end / start))


def polynomial(xp: ModuleType, done: Any, left: Any, start: Any, end: Any, power: Any) -> Any:
    r"""$v(f) = e + (s - e)(1 - f)^p$.

    >>> polynomial(np, 0.5, 0.5, 1.0, 0.0, 2.0)
    0.25
    """
    return end + (start - end) * _power(xp, left, power)


def _power(xp: ModuleType, base: Any, power: Any) -> Any:
    # A compiled power goes through exp and log; the common power of 1 must not be rounded there.
    return base**power if xp is np else xp.where(power == 1, base, base**power)


SHAPES: dict[str, Curve] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "exponential": exponential,
    "polynomial": polynomial,
}
CODES = {name: code for code, name in enumerate(SHAPES)}
NAMES = tuple(SHAPES)
CURVES = tuple(SHAPES.values())
