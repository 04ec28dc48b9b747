"""Where every random key comes from: the run's seed, a purpose, and the clock."""

import zlib

import jax

from lehr.types import Key


def derive(key: Key, purpose: str, clock: jax.Array | int = 0) -> Key:
    """The key for a purpose at a time: the same for the same seed, wherever a run was stopped and resumed."""
    return jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(purpose.encode())), clock)
