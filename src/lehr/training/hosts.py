"""The processes of a run on several hosts: process 0 leads, the others follow.

    process 0        runs the host loop: it decides, evaluates, logs and writes checkpoints
        │ ▲ orders: begin, advance by so many updates, send your part of the state, end
        ▼ │ parts of the state; "stop", if the user stops another process
    processes 1 …    hand the same program to their devices, in the same order

JAX connects the devices. Orders go over connections of our own, because JAX ends the process without a word to its
caller when another one is gone. A process that died closes its connection at once; one that hangs, or whose machine is
gone, no longer sends the beats that all send while they live. Then this process ends too, since its devices would wait
for ever.
"""

import atexit
import contextlib
import ctypes
import hmac
import json
import os
import queue
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from lehr.errors import InputError
from lehr.training.addresses import Addresses, option
from lehr.training.record import RunFailed

BEAT_SECONDS = 5
"""How often a process shows the others that it lives."""
SILENT_SECONDS = 25
"""A process that sends nothing for this many seconds is hung, or its machine is gone."""
GRACE = 3.0
"""Seconds for a process to end by itself, with a better message, before it is ended."""
ABORT_SECONDS = 1.0
"""Seconds for JAX to print that process 0 is gone, so that our sentence is not in the middle of that."""
FILE_SECONDS = 60.0
"""Seconds to wait until all hosts see a file; network file systems may cache that it is missing."""
_KEY = "lehr/leader"
"""Where process 0 tells the others, through JAX, how to reach it."""


class Hosts:
    """This process among those of a run.

    Args:
        index: its number, from 0.
        count: how many there are.
    """

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index, self.count = index, count
        self.run: Path | None = None
        """The directory of the run, once it can be resumed."""
        self._links: dict[int, _Link] = {}
        self._number = 0
        """How many runs began. A program may go on after one that failed; what was said of that is then ignored."""
        self._is_over = False
        """Whether others may leave."""
        self._exit_code: int | None = None
        """Set if this process failed."""
        self._stop: Callable[[str], object] | None = None
        self._stop_reason: str | None = None
        """Why the user stopped another process."""

    @property
    def leads(self) -> bool:
        """Whether this process decides and writes."""
        return self.index == 0

    def devices(self) -> list[list[Any]]:
        """The devices of each process; those of this one alone if there are no others."""
        if self.count == 1:
            return [jax.local_devices()]
        return [[one for one in jax.devices() if one.process_index == index] for index in range(self.count)]

    # Process 0 -------------------------------------------------------------------------------------------------------

    def order(self, do: str, **details: Any) -> None:
        """Tell all other processes what to do next."""
        self._is_over = do == "end"
        for link in self._links.values():
            self._send(link, {"do": do, **details})

    def answers(self) -> list[dict[str, Any]]:
        """Wait for the next answer of each other process."""
        return [self._next(link) for link in self._links.values()]

    def when_stopped(self, stop: Callable[[str], object]) -> None:
        """Call this with a reason if the user stops another process, or has stopped it already."""
        if self.count == 1:
            return
        self._stop = stop
        if self._stop_reason is not None:
            stop(self._stop_reason)

    # The others ------------------------------------------------------------------------------------------------------

    def next_order(self) -> dict[str, Any]:
        """Wait for the next order of process 0."""
        order = self._next(self._links[0])
        if order["do"] == "end":
            self._is_over = True
            if failure := order.get("failure"):
                raise (InputError if order["code"] == 2 else RunFailed)(failure)
        return order

    def answer(self, content: bytes | None = None, **details: Any) -> None:
        """Answer process 0."""
        self._send(self._links[0], details, content)

    def ask_to_stop(self, reason: str) -> None:
        """Ask process 0 to stop the run; may be called while this process sends something else."""
        threading.Thread(target=self._send, args=(self._links[0], {"stop": reason}), daemon=True).start()

    # All -------------------------------------------------------------------------------------------------------------

    def connect(self, links: Mapping[int, "_Link"]) -> None:
        """Listen to other processes."""
        self._links = dict(links)
        _postpone_aborts()
        for link in links.values():
            for work in (self._listen, self._beat):
                threading.Thread(target=work, args=(link,), name="lehr-hosts", daemon=True).start()

    def begin(self) -> None:
        """Begin a run: from now on no process may leave."""
        self.run = self._exit_code = self._stop = self._stop_reason = None
        self._is_over = False
        self._number += 1
        for link in self._links.values():
            link.has_failed = False
            if link.is_at_its_end or not link.is_open:
                raise RunFailed(f"{link.name} has ended, and a run needs all its processes; start them again.")

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process cannot go on."""
        if self.count == 1:
            return
        if isinstance(error, jax.errors.JaxRuntimeError):  # most likely another process is gone: wait until we know
            time.sleep(GRACE)
        self._is_over = True
        interrupted = isinstance(error, KeyboardInterrupt)
        text = "was interrupted." if interrupted else " ".join(str(error).split())
        if not isinstance(error, InputError | RunFailed | KeyboardInterrupt):
            text = f"{type(error).__name__}: {text}"
        code = 130 if interrupted else 2 if isinstance(error, InputError) else 1  # as the command line
        if self.leads:
            message = {"do": "end", "failure": f"Process 0 of {self.count} {text}" if interrupted else text}
        else:
            message = {"failed": text if interrupted else f"failed: {text}"}
        for link in self._links.values():
            self._send(link, message | {"code": code})
        self._exit_code = code

    def leave(self) -> None:
        """At the end of this process, wait for the others; skip the end of JAX if it would wait in vain for minutes."""
        code = self._exit_code
        if code is None and self._all_leave():
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self._let_leave()
        os._exit(1 if code is None else code)

    def _all_leave(self) -> bool:
        """Wait until all processes are at their end, process 0 last; return whether none was lost before."""
        links = self._links.values()
        for link in links:
            self._send(link, {"waits" if self.leads else "leaves": True})
        while waiting := [link for link in links if not link.has_left]:
            if lost := [link for link in waiting if not link.is_open]:
                with contextlib.suppress(OSError):
                    os.write(2, f"lehr: {lost[0].name} was lost before its end; the run is complete.\n".encode())
                return False
            time.sleep(0.01)
        if self.leads:
            for link in links:
                self._send(link, {"leaves": True})
        return True

    def _send(self, link: "_Link", message: dict[str, Any], content: bytes | None = None) -> None:
        try:
            link.send(message | {"number": self._number}, content)
        except OSError:
            if not self._is_over:  # the thread that listens to that process ends this one, and says why
                threading.Event().wait()

    def _beat(self, link: "_Link") -> None:
        """Show another process that this one lives."""
        with contextlib.suppress(OSError):
            while True:
                time.sleep(BEAT_SECONDS)
                link.send({"beat": True})

    def _listen(self, link: "_Link") -> None:
        """Receive what another process sends, until it leaves."""
        try:
            while True:
                self._receive(link, link.receive())
        except (EOFError, OSError) as error:
            link.is_open = False
            if link.has_failed:  # it said why
                return
            silent = isinstance(error, BlockingIOError | TimeoutError)
            what = f"has not answered for {SILENT_SECONDS} s" if silent else "is gone"
            if not self.leads:
                time.sleep(ABORT_SECONDS)
            again = "" if self.run is None else f" with 'lehr resume {self.run} {option()}'"
            self._end(f"{link.name} {what}, and a run needs all its processes; start them again{again}.", 1)

    def _receive(self, link: "_Link", message: dict[str, Any]) -> None:
        if "beat" in message:
            return
        if "leaves" in message or "waits" in message:
            link.has_left |= "leaves" in message
            link.is_at_its_end = True
            if not self._is_over:
                self._end(f"{link.name} ended before this run did; start all processes again.", 1)
            return
        if message["number"] < self._number:
            return
        if "stop" in message:
            self._stop_reason = message["stop"]
            if self._stop is not None:
                self._stop(message["stop"])
        elif "failed" in message:  # this process may be about to fail in the same way
            link.has_failed = True
            self._end_soon(f"{link.name} {message['failed']}", message)
        else:
            if message.get("failure"):
                self._end_soon(message["failure"], message)
            link.inbox.put(message)

    def _next(self, link: "_Link") -> dict[str, Any]:
        """Wait for the next message of another process in this run."""
        while (message := link.inbox.get())["number"] < self._number:
            pass
        return message

    def _end_soon(self, text: str, message: dict[str, Any]) -> None:
        """End this process with the exit code of a message, unless it ends its run by itself."""

        def end() -> None:
            if message["number"] >= self._number:
                self._end(text, message["code"])

        timer = threading.Timer(GRACE, end)
        timer.daemon = True
        timer.start()

    def _end(self, text: str, code: int) -> None:
        """End this process at once: its main thread may wait for devices that will never answer."""
        if self._is_over:
            return
        self._is_over = True
        with contextlib.suppress(OSError):
            os.write(2, f"\nlehr: {text}\n".encode())  # not through sys.stderr, which another thread may have locked
        for link in self._links.values() if self.leads else ():
            with contextlib.suppress(OSError):
                link.send({"do": "end", "failure": text, "code": code, "number": self._number})
        self._let_leave()
        os._exit(code)

    def _let_leave(self) -> None:
        """In process 0, wait a moment until the others have left: JAX would abort them if it left first."""
        limit = time.monotonic() + 2 * GRACE
        while self.leads and any(link.is_open for link in self._links.values()) and time.monotonic() < limit:
            time.sleep(0.01)


ALONE = Hosts()
"""The only process of a run."""


class _Link:
    """A connection to another process, with a queue of what it sent."""

    def __init__(self, connected: socket.socket, name: str) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", SILENT_SECONDS, 0))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = Connection(connected.detach())
        self._sending = threading.Lock()
        self.name, self.is_open, self.has_failed, self.has_left = name, True, False, False
        self.is_at_its_end = False
        """Whether it makes no more runs, and waits for the others to end."""
        self.inbox: queue.Queue[dict[str, Any]] = queue.Queue()

    def send(self, message: dict[str, Any], content: bytes | None = None) -> None:
        """Send a message, perhaps followed by bytes."""
        with self._sending:
            self._connection.send_bytes(json.dumps(message | {"follows": content is not None}).encode())
            if content is not None:
                self._connection.send_bytes(content)

    def receive(self, most: int | None = None) -> dict[str, Any]:
        """Wait for a message of at most so many bytes; bytes that follow it are its `content`.

        Raises:
            EOFError: the other process left.
            BlockingIOError: it sent nothing for `SILENT_SECONDS`.
            OSError: the connection was lost.
        """
        message = json.loads(self._connection.recv_bytes(most))
        if not message.pop("follows"):
            return message
        if most is not None:
            raise OSError("more bytes than are allowed")
        return message | {"content": self._connection.recv_bytes()}

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def _postpone_aborts() -> None:
    """Let this process live some seconds after JAX or gloo aborts it because another one is gone, to say so.

    The handler is the C function `sleep`, which gets the number of the signal, 6: for Python it is too late.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


_joined: Hosts | None = None


@contextlib.contextmanager
def joined(distributed: bool) -> Iterator[Hosts]:
    """Connect this process to the others of a run, if it is one of several, and tell them if it fails.

    Args:
        distributed: whether there may be others; `lehr.training.addresses` says where.
    """
    global _joined
    if not distributed:
        yield ALONE
        return
    if _joined is None:
        _joined = _connected()
        atexit.register(_joined.leave)
    try:
        _joined.begin()
        yield _joined
    except BaseException as error:
        _joined.fail(error)
        raise


def _connected() -> Hosts:
    """Start JAX on all processes, and connect them to process 0."""
    addresses = Addresses.find()
    with addresses.time_limit():
        addresses.initialise_jax()
        hosts = Hosts(jax.process_index(), jax.process_count())
        if hosts.count > 1:
            hosts.connect(_links_to_others(hosts.count) if hosts.leads else {0: _link_to_leader(hosts)})
    return hosts


def _links_to_others(count: int) -> dict[int, _Link]:
    """In process 0, wait until all others have called."""
    jax_state = _jax_state()
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    links: dict[int, _Link] = {}
    token = secrets.token_hex(16)

    def meet(caller: socket.socket) -> None:
        with contextlib.suppress(Exception):  # a stranger may say anything
            link = _Link(caller, "")
            said = link.receive(most=1000)
            if hmac.compare_digest(str(said["token"]), token):
                link.name = f"Process {said['index']} of {count} on {said['host']}"
                links[int(said["index"])] = link

    with socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as server:
        place = [jax_state.coordinator_address.rsplit(":", 1)[0].strip("[]"), server.getsockname()[1], token]
        jax_state.client.key_value_set(_KEY, json.dumps(place))
        server.settimeout(0.1)
        while len(links) < count - 1:
            with contextlib.suppress(TimeoutError):
                caller = server.accept()[0]
                threading.Thread(target=meet, args=(caller,), daemon=True).start()  # a stranger may say nothing
    return dict(sorted(links.items()))


def _link_to_leader(hosts: Hosts) -> _Link:
    place = _jax_state().client.blocking_key_value_get(_KEY, 3_600_000)  # the time limit ends this process before
    host, port, token = json.loads(place)
    link = _Link(socket.create_connection((host, port)), f"Process 0 of {hosts.count} on {host}")
    link.send({"token": token, "index": hosts.index, "host": socket.gethostname()})
    return link


def _jax_state() -> Any:
    """The address of process 0 and the store of keys and values, for which JAX has no public names."""
    from jax._src.distributed import global_state

    return global_state


def wait_for(path: Path, text: str) -> None:
    """Wait until a file that process 0 wrote is seen here too."""
    limit = time.monotonic() + FILE_SECONDS
    while True:
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # a network file system looks again
            if path.read_text() == text:
                return
        if time.monotonic() > limit:
            raise InputError(
                f"{socket.gethostname()} does not see the run '{path.parent}' that process 0 writes; put it on a file "
                "system that all hosts share, with run_dir."
            )
        time.sleep(0.05)
