"""Threads for work that needs little Python, such as compiling, while the main thread goes on.

JAX's scopes, such as `jax.default_device`, belong to the thread that opened them: what is compiled here was traced and
lowered before, or is traced here because `shares_scopes` says that nothing differs.
"""

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


def trace_options() -> tuple[Any, ...]:
    """JAX's options and the choice of kernels, with which another program is traced from the same Python."""
    return kernels.switched_off(), repr(_scopes())


class Latest(Generic[T]):
    """What was made for the last two keys that were asked for."""

    def __init__(self) -> None:
        self.made: dict[Any, T] = {}

    def get(self, key: Any, make: Callable[[], T], is_sound: Callable[[T], bool] = lambda value: True) -> T:
        """Return what was made for a hashable key, or make it; what is not sound is made again."""
        try:
            value = self.made.pop(key, None)
        except TypeError:  # it cannot be hashed, as settings of the user's own may be
            return make()
        if value is None or not is_sound(value):
            value = make()
        self.made[key] = value
        for oldest in list(self.made)[:-2]:
            self.made.pop(oldest, None)  # another thread may have removed it
        return value


class remembered(Generic[T]):
    """Decorate a function of hashable arguments that begins to compile something: the last two are remembered.

    What would be compiled otherwise with JAX's present options or choice of kernels is begun again, and so is what has
    failed. Named arguments say how to compile, not what: they do not count.
    """

    def __init__(self, function: "Callable[..., Future[T]]") -> None:
        self.function = function
        self.latest: Latest[Future[T]] = Latest()

    def __call__(self, *arguments: Any, **options: Any) -> "Future[T]":
        """Begin, or return what was begun before."""
        key = trace_options(), *arguments
        return self.latest.get(key, lambda: self.function(*arguments, **options), _has_not_failed)


def _has_not_failed(future: Future) -> bool:
    return not future.done() or not (future.cancelled() or future.exception() is not None)


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
