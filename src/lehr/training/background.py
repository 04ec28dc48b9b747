"""Threads for work that needs little Python, such as compiling, while the main thread goes on.

JAX's scopes, such as `jax.default_device`, belong to the thread that opened them: what is compiled here was traced and
lowered before, or is traced here because `shares_scopes` says that nothing differs.
"""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from lehr import kernels

T = TypeVar("T")


def start(function: Callable[[], T], after: Future | None = None) -> "Future[T]":
    """Call a function in a thread of its own, and return at once.

    Args:
        function: what to call.
        after: wait for this future first. The function is not called if it failed, or if the returned future was
            cancelled meanwhile.
    """
    future: Future[T] = Future()

    def run() -> None:
        if after is not None and (not wait([after]) or after.cancelled() or after.exception() is not None):
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="lehr-background").start()
    return future


def finished(future: "Future[T]") -> T:
    """Wait for the result, or raise the error of the function.

    Ctrl-C raises once the function has returned: a thread inside XLA cannot be interrupted.
    """
    try:
        return future.result()
    except KeyboardInterrupt:
        wait([future])
        raise


class remembered(Generic[T]):
    """Decorate a function of hashable arguments that begins to compile something: the last two are remembered.

    What would be compiled otherwise with JAX's present options or choice of kernels is begun again, and so is what has
    failed.
    """

    def __init__(self, function: "Callable[..., Future[T]]") -> None:
        self.begun = functools.lru_cache(maxsize=2)(lambda _, *arguments: function(*arguments))

    def __call__(self, *arguments: Any) -> "Future[T]":
        """Begin, or return what was begun before."""
        given = (kernels.switched_off(), repr(_scopes())), *arguments
        hits = self.begun.cache_info().hits
        future = self.begun(*given)
        is_old = self.begun.cache_info().hits > hits
        if is_old and future.done() and (future.cancelled() or future.exception() is not None):
            self.begun.cache_clear()
            future = self.begun(*given)
        return future


MEMORY_VARIABLES = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)
"""Environment variables by which users decide how JAX takes memory of a GPU."""


def take_memory_as_needed() -> None:
    """Let JAX take memory of a GPU as it is needed, unless an environment variable says how.

    Reserving three quarters of it, as JAX does by itself, takes 1.9 seconds on an H200. A GPU that JAX has started
    already stays as it is.
    """
    if not any(name in os.environ for name in MEMORY_VARIABLES):
        os.environ[MEMORY_VARIABLES[0]] = "false"


def start_device() -> "Future[Any] | None":
    """Start the device in a thread: a GPU takes a second, in which the processor can do something else.

    Meanwhile another thread imports what kernels need. If the device fails, its first use will say what is wrong. The
    device of a scope is left alone.
    """
    if getattr(jax.config, "jax_default_device", None) is not None:
        return None
    take_memory_as_needed()
    start(kernels.load)
    return start(lambda: jax.block_until_ready(jax.device_put(np.zeros(1, np.float32))))


def is_done_within(future: Future, seconds: float) -> bool:
    """Wait at most so long, and return whether the function has returned."""
    return future in wait([future], seconds).done


def shares_scopes() -> bool:
    """Whether a thread of its own sees JAX's options as this one does, and so traces the same programs."""
    return start(_scopes).result() == _scopes()


def _scopes() -> tuple[Any, ...]:
    """JAX's options as this thread sees them."""
    options = {name: getattr(jax.config, name, None) for name in jax.config.values}
    return options, jax.sharding.get_abstract_mesh()
