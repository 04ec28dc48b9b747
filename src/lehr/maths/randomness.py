"""Random keys, derived from the run's seed, a purpose, and the clock."""

import zlib

import jax

from lehr.types import Key


def derive(key: Key, purpose: str, clock: jax.Array | int = 0) -> Key:
    """Derive a key for a purpose and a clock value. Stopping and resuming a run does not change it."""
    return jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(purpose.encode())), clock)
