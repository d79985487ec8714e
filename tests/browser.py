"""Headless Chromium over its DevTools pipe: open a file, run JavaScript, and see every error and request of a page."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
# The browser talks on descriptors 3 and 4, which subprocess cannot choose: this moves them there, then becomes it.
LAUNCH = (
    "import fcntl, os, sys; there, back = (fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]); "
    "os.dup2(there, 3); os.dup2(back, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
PATIENCE = 300.0  # seconds for one answer, on a machine that others use too


@functools.cache
def find_browser() -> tuple[str | None, str]:
    """The browser's program, or None and the reason: tests install nothing on the system they run on."""
    actual = next((path for path in map(shutil.which, NAMES) if path), None)
    return actual, f"none of {', '.join(NAMES)} is on the path"


class Browser:
    """A running Chromium with an empty profile. Use it as a context manager."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="headprune-chromium-")
        receive, self._write = os.pipe()
        self._read, send = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                LAUNCH,
                str(receive),
                str(send),
                program,
                *QUIET,
                f"--user-data-dir={self._profile}",
            ],
            pass_fds=(receive, send),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(receive)
        os.close(send)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self.pages: dict[str, Page] = {}

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
        raise TimeoutError(f"no answer to {method}")

    def _messages(self) -> Iterator[dict[str, Any]]:
        """What the browser says, until it is silent for too long; events go to their page on the way."""
        end = time.monotonic() + PATIENCE
        while (left := end - time.monotonic()) > 0:
            while b"\0" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\0")
                message = json.loads(line)
                page = self.pages.get(message.get("sessionId", ""))
                if page and "method" in message:
                    page.heard(message["method"], message["params"])
                yield message
            if not select.select([self._read], [], [], left)[0]:
                return
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser has gone")
            self._buffer += chunk

    @contextmanager
    def page(self) -> Iterator[Page]:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        try:
            yield page
        finally:
            del self.pages[session]
            self.call("Target.closeTarget", targetId=target)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.call("Browser.close")
            self._process.wait(timeout=5)
        except (OSError, RuntimeError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._profile, ignore_errors=True)


class Page:
    """A tab: what went wrong in it is in `errors`, what it asked for in `requests`."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.dialogs: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def heard(self, event: str, about: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            kind = self.errors if about["entry"]["level"] == "error" else self.warnings
            kind.append(about["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert", "warning"):
            kind = self.warnings if about["type"] == "warning" else self.errors
            kind.append(" ".join(str(item.get("value", item.get("description"))) for item in about["args"]))
        elif event == "Page.javascriptDialogOpening":
            self.dialogs.append(about["message"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def emulate(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """A screen, before the page is opened."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.colours("dark" if dark else "light")

    def colours(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, file: Path, ready: str = "document.readyState === 'complete'") -> None:
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.wait_for(ready)

    def wait_for(self, condition: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.evaluate(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {condition}; errors: {self.errors}")
            time.sleep(0.03)

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description"))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A real key press, to whatever has the focus."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEY_CODES[key])

    def pdf(self, file: Path) -> Path:
        file.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))
        return file


KEY_CODES = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Tab": 9}
