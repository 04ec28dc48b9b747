"""The curves a phase can follow: one formula each, shared by NumPy and traced programs.

A curve takes `done`, the completed fraction of the phase, and `left = 1 - done`, and goes monotonically from `start` to
`end`. Both fractions are passed, because computing `1 - done` would lose precision near the end. `xp` is `numpy` or
`jax.numpy`. A schedule stores the index of its shape in `SHAPES`.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

Curve = Callable[[ModuleType, Any, Any, Any, Any, Any], Any]


def constant(xp: ModuleType, done: Any, left: Any, start: Any, end: Any, power: Any) -> Any:
    r"""$v = e$; start and end are equal."""
    return end


def linear(xp: ModuleType, done: Any, left: Any, start: Any, end: Any, power: Any) -> Any:
    r"""$v(f) = e + (s - e)(1 - f)$.

    >>> linear(np, 0.25, 0.75, 1.0, 0.0, 1.0)
    0.75
    """
    return end + (start - end) * left


def cosine(xp: ModuleType, done: Any, left: Any, start: Any, end: Any, power: Any) -> Any:
    r"""$v(f) = e + (s - e)\left(\tfrac{1 + \cos \pi f}{2}\right)^p$, where optax calls $p$ the exponent.

    Computed as $\sin^{2p}(\pi (1 - f) / 2)$, which is equal but avoids cancellation near the end.

    >>> float(round(cosine(np, 0.5, 0.5, 1.0, 0.0, 2.0), 6))
    0.25
    """
    wave = xp.sin(0.5 * np.pi * left)
    return end + (start - end) * _power(xp, wave * wave, power)


def exponential(xp: ModuleType, done: Any, left: Any, start: Any, end: Any, power: Any) -> Any:
    r"""$v(f) = s\,(e/s)^f$: equal ratios over equal intervals. Start and end have the same sign and are not 0.

    The base is the nearer of the two ends, which halves the effect of rounding in $\ln(e/s)$.

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
    # XLA computes powers through exp and log, which would round the common case of power 1.
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
