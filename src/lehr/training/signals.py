"""Ctrl-C and SIGTERM: the first stops a run in good order, a second Ctrl-C ends it, whatever the process is doing."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

GRACE = 2.0
"""Seconds after the second Ctrl-C until the process is ended, if it has not stopped by itself."""

EXIT_CODE = 130
"""The exit code after Ctrl-C, by shell convention."""

_END = b"\0"
"""Ends the watching thread; no signal has the number 0."""


@contextlib.contextmanager
def handled(stop: Callable[[str], object]) -> Iterator[None]:
    """Call `stop` with a reason on Ctrl-C or SIGTERM, and raise `KeyboardInterrupt` on the second Ctrl-C.

    Python raises in the main thread and between two of its instructions, so an environment that hangs in C code would
    not notice, and one that hangs in a thread or in a process would keep the main thread from leaving. A thread of its
    own therefore counts the signals as they arrive: if the process is still here `GRACE` seconds after the second
    Ctrl-C, or at the third, it is ended, as by SIGKILL. Does nothing outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = []

    def on_signal(number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            interrupts.append(number)
            if len(interrupts) > 1:
                raise KeyboardInterrupt
        stop(f"signal {signal.Signals(number).name}")

    receives, sends = os.pipe()
    os.set_blocking(sends, False)
    watcher = threading.Thread(target=_watch, args=(receives,), name="lehr-signals", daemon=True)
    watcher.start()
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    wakeup = signal.set_wakeup_fd(sends, warn_on_full_buffer=False)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.write(sends, _END)
        watcher.join()
        for end in (receives, sends):
            os.close(end)


def _watch(receives: int) -> None:
    """Count Ctrl-C until the end; end the process some time after the second."""
    timer = threading.Timer(GRACE, _end_process)
    timer.daemon = True
    interrupts = 0
    while (number := os.read(receives, 1)) != _END:
        if number[0] != signal.SIGINT:
            continue
        interrupts += 1
        if interrupts == 2:
            timer.start()
        elif interrupts == 3:
            _end_process()
    timer.cancel()


def _end_process() -> None:
    """End this process and its children at once; the latest checkpoint stays."""
    for child in multiprocessing.active_children():
        child.kill()
    text = b"\nlehr: ended at once, since an environment or the device did not stop; resume from the last checkpoint.\n"
    with contextlib.suppress(OSError):
        os.write(2, text)  # not through sys.stderr, which another thread may have locked
    os._exit(EXIT_CODE)
