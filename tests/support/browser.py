"""Owns a headless Chromium that a test drives: pages, keys and pictures, by the DevTools protocol over two pipes.
Never listens on a port and fetches nothing by itself.
It ends with the block, because Chromium ends when its pipe does."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from loadtest.server import ended

PROGRAM = shutil.which("chromium")
WAIT_S = 60  # only ever reached by a failure
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe"),
)
_KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, "")}


class PageError(Exception):
    """The page threw an exception, or the browser refused."""


class Page:
    """One tab."""

    def __init__(self, commands: int, answers: int) -> None:
        """`commands` and `answers` are the pipes' ends."""
        self._commands, self._answers = commands, answers
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self.complaints: list[str] = []
        """What the page wrote to the console as an error, threw, or was not allowed to do."""
        self.fetched: list[str] = []
        """The address of each request that the page made."""
        (target,) = (one for one in self("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol; return its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (message := self._next()).get("id") != self._number:
            self._note(message)
        if "error" in message:
            raise PageError(f"{method}: {message['error']}")
        return dict(message["result"])

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                raise PageError("the browser ended, or does not answer")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Network.requestWillBeSent":
                self.fetched.append(params["request"]["url"])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        self("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript in the page; the value may be a promise."""
        done = self("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise PageError(json.dumps(done["exceptionDetails"]))
        return done["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true, in JavaScript's sense."""
        until(lambda: self.value(f"!!({expression})"), lambda: f"{expression}: never so; {self.complaints}")

    def click(self, selector: str) -> None:
        """Click at the middle of an element, as a mouse does: whatever covers it gets the click."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{element}.scrollIntoView({{block: 'nearest'}})")
        box = self.value(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({element}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def hover(self, x: float, y: float) -> None:
        self("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def write(self, text: str) -> None:
        """Write into what has the focus, as a keyboard does."""
        self("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        code, text = _KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self("Input.dispatchKeyEvent", type="keyUp", **common)

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False)

    def prefer(self, scheme: str, *, motion: str = "no-preference") -> None:
        """Set the preferred colour scheme, `light` or `dark`, and whether motion is to be reduced (`reduce`)."""
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        self("Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in wanted.items()])

    def picture(self) -> bytes:
        """Return what is seen, as a PNG."""
        return base64.b64decode(self("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browsing() -> Iterator[Page]:
    """Start a browser without history, with one empty tab."""
    assert PROGRAM is not None
    profile = Path(tempfile.mkdtemp(prefix="cb", dir="/tmp"))
    command_out, command_in = os.pipe()
    answer_out, answer_in = os.pipe()
    # The protocol's pipes are descriptors 3 and 4.
    place = f"import os, sys; os.dup2({command_out}, 3); os.dup2({answer_in}, 4); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", place, PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(command_out, answer_in),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},  # it writes there, too
        start_new_session=True,
    )
    os.close(command_out)
    os.close(answer_in)
    try:
        with ended(process):
            try:
                yield Page(command_in, answer_out)
            finally:
                os.close(command_in)
                os.close(answer_out)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
    finally:
        shutil.rmtree(profile, ignore_errors=True)


def until(condition: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """Ask until the answer is true. `otherwise` describes what never happened."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.05)
