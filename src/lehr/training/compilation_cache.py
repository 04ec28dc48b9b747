"""The cache of compiled programs on disk."""

import os
from pathlib import Path

import jax

_FRAMES = 100
"""JAX's own number of frames in the locations of a program."""


def use_compilation_cache() -> None:
    """Cache compiled programs on disk, unless JAX's own cache is set; `LEHR_CACHE=off` turns this off.

    Programs then say nothing of the lines of Python that they come from. In kernels those lines would be a part of what
    a program is found by, and they depend on which of several threads traces a function first.
    """
    place = os.environ.get("LEHR_CACHE") or str(Path.home() / ".cache" / "lehr" / "compiled")
    is_set = getattr(jax.config, "jax_compilation_cache_dir", None) is not None
    if place == "off" and not is_set:
        return
    if getattr(jax.config, "jax_traceback_in_locations_limit", None) == _FRAMES:
        jax.config.update("jax_traceback_in_locations_limit", 0)
    if place == "off" or is_set:
        return
    jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
