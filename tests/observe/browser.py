# SPDX-License-Identifier: Apache-2.0
"""Chromium without a window, driven over its DevTools pipe; no library needed. See `get_chromium.py`."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support import get_chromium

CALL_LIMIT_S = 60.0
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)


class BrowserError(Exception):
    """The browser did not start, did not answer in time, or the page's script raised."""


class Browser:
    """One tab. `with Browser(folder) as browser: browser.open(url)`"""

    def __init__(self, folder: Path, width: int = 1280, height: int = 1000) -> None:
        self._folder, self._size = folder, (width, height)
        self._pending = b""
        self._count = 0
        self._session = ""
        self.requests: list[str] = []  # addresses that the page asked for
        self.errors: list[str] = []  # what its script raised

    def __enter__(self) -> Self:
        assert get_chromium.program().exists(), "no browser: make browser"
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        argv = [str(get_chromium.program()), *FLAGS, f"--user-data-dir={self._folder}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec timeout 300 "$@" 3<&{commands} 4>&{answers}', "bash", *argv],
            pass_fds=(commands, answers),
            env={**os.environ, **get_chromium.environment()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network"):
                self.call(f"{domain}.enable")
            self.resize(*self._size)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._write)  # it ends when its pipe does
        os.close(self._read)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(10)

    # ---- the protocol
    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + CALL_LIMIT_S
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self, deadline: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._pending:
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise BrowserError(f"no answer to {waiting_for} within {CALL_LIMIT_S} s")
            more = os.read(self._read, 1 << 20)
            if not more:
                raise BrowserError("the browser ended")
            self._pending += more
        first, self._pending = self._pending.split(b"\0", 1)
        event: dict[str, Any] = json.loads(first)
        return event

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details["text"])))

    # ---- what a person does
    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`, as the system's setting."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, script: str, limit_s: float = 30.0) -> Any:
        """Wait until an expression is true; its value."""
        deadline = time.monotonic() + limit_s
        while True:
            value = self.run(script)
            if value:
                return value
            if time.monotonic() > deadline:
                raise BrowserError(f"not within {limit_s} s: {script}; errors: {self.errors}")
            time.sleep(0.1)

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
