"""Settings for all tests: no silent broadcasting between ranks, a cache of their own, one profile for hypothesis."""

import atexit
import contextlib
import gc
import os
import shutil
import tempfile
from importlib import metadata

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling takes most of the time of all tests: XLA's older way of writing machine code takes half as long. JAX 0.11 and
# newer do not have it, and would not start: there the tests run with what users have.
FLAG, GIVEN = "--xla_cpu_use_fusion_emitters", os.environ.get("XLA_FLAGS", "")
if metadata.version("jaxlib").startswith("0.10.") and FLAG not in GIVEN:
    os.environ["XLA_FLAGS"] = f"{GIVEN} {FLAG}=false".strip()

# Programs that are compiled here are neither taken from the user's cache nor left in it.
os.environ["LEHR_CACHE"] = tempfile.mkdtemp(prefix="lehr-compiled-")
atexit.register(shutil.rmtree, os.environ["LEHR_CACHE"], ignore_errors=True)

# Repeatable everywhere, and patient: a busy machine must not fail a test.
hypothesis.settings.register_profile(
    "lehr",
    deadline=None,
    max_examples=200,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("lehr")


MOST_MAPS = 25_000
"""Pieces of memory that a process may hold before it lets go of its programs; Linux allows 65,530."""


def _forget_programs():
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True, scope="module")
def _programs_are_forgotten():
    """Let go of what a file has compiled: a process may hold so many pieces of memory, and a program takes a hundred."""
    yield
    _forget_programs()


@pytest.fixture(autouse=True)
def _programs_are_forgotten_in_time():
    """The same within a file that compiles very many."""
    yield
    with contextlib.suppress(OSError), open("/proc/self/maps", "rb") as maps:
        if sum(1 for _ in maps) > MOST_MAPS:
            _forget_programs()


@pytest.fixture
def count_traces():
    """Wrap a function so that `.traces` counts how often JAX traces it."""

    def wrap(function):
        def counted(*arguments):
            counted.traces += 1
            return function(*arguments)

        counted.traces = 0
        return counted

    return wrap
