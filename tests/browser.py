"""A headless Chromium for tests, driven by the DevTools protocol over a pipe; it needs no package."""

import json
import os
import select
import shutil
import subprocess
import sys
import time

CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome", "chrome"])), None)
PATIENCE = 60
"""Seconds to wait for the browser: a busy machine must not fail a test."""
# Chromium reads commands from descriptor 3 and writes to 4; a fork with a function of ours between would be unsafe here.
_START = """
import fcntl, os, sys
here, there = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(here, 3)
os.dup2(there, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A Chromium with one page at a time. As a context manager it ends it.

    `errors` are the page's uncaught exceptions, console errors and what its security policy refused; `requests` are the
    addresses it asked for.
    """

    def __init__(self, profile):
        self.errors, self.requests = [], []
        self._count, self._buffer, self._target, self._session = 0, b"", None, None
        read, self._commands = os.pipe()
        self._answers, write = os.pipe()
        options = [
            "--headless=new", "--no-sandbox", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run",
            "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--window-size=1400,1000",
            "--disable-background-networking", "--disable-component-update",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _START, str(read), str(write), CHROMIUM, *options],
            pass_fds=(read, write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read)
        os.close(write)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait(PATIENCE)
        os.close(self._commands)
        os.close(self._answers)

    def open(self, place, theme="light", ready="document.documentElement?.dataset.ready !== undefined"):
        """Open a file or an address in a new page instead of the last one, and wait until it is ready.

        By default that is when a report has drawn its charts.
        """
        if self._target:
            self.call("Target.closeTarget", targetId=self._target)
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        self.errors, self.requests = [], []
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.call("Page.navigate", url=place if isinstance(place, str) else place.resolve().as_uri())
        self.wait_for(ready)

    def resize(self, width, height):
        """Give the page another size, in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def wait_for(self, expression):
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.evaluate(expression):
            if self.errors or time.monotonic() > end:
                raise AssertionError(f"{expression} did not come true; errors: {self.errors}")
            time.sleep(0.05)

    def evaluate(self, expression):
        """The value of a JavaScript expression, as JSON carries it; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def call(self, method, **parameters):
        """Call a method of the protocol and return its answer, keeping the events that come before it."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]
            self._keep(answer)

    def _receive(self):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE)
            more = os.read(self._answers, 1 << 20) if ready else b""
            if not more:
                raise AssertionError(f"Chromium does not answer; its exit status is {self._process.poll()}")
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _keep(self, event):
        given = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(given["exceptionDetails"])
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                self.errors.append(given["args"])
            case "Log.entryAdded" if given["entry"]["level"] == "error":
                self.errors.append(given["entry"])
            case "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])
