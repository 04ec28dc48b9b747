"""Settings for all tests: no silent broadcasting between ranks, and one profile for hypothesis."""

import gc

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

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


@pytest.fixture(autouse=True, scope="module")
def _programs_are_forgotten():
    """Let go of what a file has compiled: a process may hold so many pieces of memory, and a program takes a hundred."""
    yield
    jax.clear_caches()
    gc.collect()


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
