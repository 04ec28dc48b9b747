"""The cache of compiled programs on disk."""

import os
from pathlib import Path

import jax


def use_compilation_cache() -> None:
    """Cache compiled programs on disk, unless JAX's own cache is set; `LEHR_CACHE=off` turns this off."""
    place = os.environ.get("LEHR_CACHE") or str(Path.home() / ".cache" / "lehr" / "compiled")
    if place == "off" or getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
