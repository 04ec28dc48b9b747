"""Settings for all tests: no silent broadcasting between ranks, a cache of their own, one profile for hypothesis."""

import atexit
import contextlib
import functools
import gc
import itertools
import os
import shutil
import signal
import tempfile
import threading
from importlib import metadata
from pathlib import Path

import hypothesis
import jax
import pytest
from jax._src.interpreters import mlir
from jax._src.lru_cache import LRUCache
from jaxlib.mlir import ir

from lehr.files import replaced
from lehr.report import curves
from lehr.training import api, program, run_record
from lehr.training.runners import device

jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling takes most of the time of all tests: without optimisation of machine code it takes a third as long, and with
# XLA's older way of writing it, half of that. Cutting a program into parts, to compile them on all cores, costs a fifth,
# and the other workers need these cores. JAX 0.11 and newer do not have all of these flags, and would not start.
GIVEN = os.environ.get("XLA_FLAGS", "")
FLAGS = {"--xla_backend_optimization_level": "0"}
if metadata.version("jaxlib").startswith("0.10."):
    FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
    FLAGS["--xla_cpu_parallel_codegen_split_count"] = "1"
    if "--xla_backend_optimization_level" not in GIVEN:
        FLAGS["--xla_cpu_opt_preset"] = "CPU_OPT_PRESET_FAST_COMPILE"
os.environ["XLA_FLAGS"] = " ".join(
    [GIVEN, *(f"{flag}={value}" for flag, value in FLAGS.items() if flag not in GIVEN)]
).strip()

# Threads of linear algebra wait for each other in busy loops, which cost most where each core has a worker already.
# Workers, and processes that tests start, read this when they start.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A job that a script started in the background ignores Ctrl-C, and so would the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test needs what it writes to survive a loss of power; what is made durable, and in which order, is tested by
# replacing this.
os.fsync = lambda file: None

# Programs that are compiled here are neither taken from the user's cache nor left in it. All workers, and all processes
# that tests start, share one cache, which the first of them makes and removes.
if "PYTEST_XDIST_WORKER" not in os.environ:
    place = tempfile.mkdtemp(prefix="lehr-compiled-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    os.environ["LEHR_CACHE"] = os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(place, "programs")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _put(cache, key, value):
    """Write a program as JAX does, but at once: another worker never reads half of it."""
    path = Path(cache.path, f"{key}-cache")
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent.parent, delete=False) as file:
            file.write(value)
        Path(file.name).replace(path)


LRUCache.put = _put

_new_context = mlir.make_ir_context
_shared_context = functools.cache(_new_context)


def _context():
    """The context of a program that is lowered. JAX makes one for each, in 3 ms, which is more than most programs take.

    Those of a file share one, except in other threads, and within the lowering of another program, whose module a new
    one would become a part of.
    """
    is_alone = ir.Context.current is None and threading.current_thread() is threading.main_thread()
    return _shared_context() if is_alone else _new_context()


mlir.make_ir_context = _context

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


def pytest_collection_finish():
    """Let the garbage collector leave alone what was imported, which it would visit again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000)


MOST_MAPS, LOOK_EVERY = 15_000, 10
"""Pieces of memory that a process may hold before it lets go of its programs, each of which takes a hundred: Linux
allows 65,530. To count so many takes 20 ms, so not every test does."""
_tests = itertools.count(1)


def pytest_runtest_teardown():
    """Let go of programs before they are too many."""
    if next(_tests) % LOOK_EVERY == 0:
        with contextlib.suppress(OSError), open("/proc/self/maps", "rb") as maps:
            if sum(1 for _ in maps) > MOST_MAPS:
                _forget_programs()


def _forget_programs():
    for latest in (program._latest, device._compiling.latest, run_record._compiling.latest):
        latest.made.clear()
    jax.clear_caches()
    _shared_context.cache_clear()
    gc.collect()


@pytest.fixture
def nothing_is_compiled():
    """Runs like those of other tests are traced and compiled again."""
    _forget_programs()


@pytest.fixture
def compiled_quickly():
    """Compile what the test trains with little optimisation: for short runs, where compiling takes most of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


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


def _built_only(runs, path, coefficients=None, *, texts=None):
    """Build the learning curve of a run, but save a file without a picture: to draw it takes longer than to train."""
    curves.learning_figure(runs, coefficients, texts=texts)
    with replaced(Path(path)) as file:
        file.write(b"\x89PNG")


api.learning_curve = _built_only


@pytest.fixture
def drawn_curves(monkeypatch):
    """Runs draw their learning curves, as they do for users."""
    monkeypatch.setattr(api, "learning_curve", curves.learning_curve)
