"""Threads for work that needs no Python, such as compiling, while the main thread goes on.

Only what is traced and lowered already is compiled here: JAX's scopes, such as `jax.default_device`, belong to the
thread that opened them.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

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
