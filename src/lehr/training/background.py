"""Threads for work that needs little Python, such as compiling, while the main thread goes on.

JAX's scopes, such as `jax.default_device`, belong to the thread that opened them: what is compiled here was traced and
lowered before, or is traced here because `shares_scopes` says that nothing differs.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import jax
import numpy as np

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


@contextlib.contextmanager
def forgotten_on_error(remembered: Any) -> Iterator[None]:
    """Clear the cache of a function that returns futures if what is done in this scope fails.

    `functools.lru_cache` remembers no errors, but it would remember a future that failed, for the whole process.
    """
    try:
        yield
    except BaseException:
        remembered.cache_clear()
        raise


def start_device() -> "Future[Any] | None":
    """Start the device in a thread: a GPU takes seconds, in which the processor can do something else.

    If it fails, the first use of the device will say what is wrong. The device of a scope is left alone.
    """
    if getattr(jax.config, "jax_default_device", None) is not None:
        return None
    return start(lambda: jax.block_until_ready(jax.device_put(np.zeros(1, np.float32))))


def shares_scopes() -> bool:
    """Whether a thread of its own sees JAX's options as this one does, and so traces the same programs."""
    return start(_scopes).result() == _scopes()


def _scopes() -> tuple[Any, ...]:
    """JAX's options as this thread sees them."""
    options = {name: getattr(jax.config, name, None) for name in jax.config.values}
    return options, jax.sharding.get_abstract_mesh()
