"""Headless Chromium over its DevTools protocol: enough to use a page as a person would."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import httpx
from PIL import Image
from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-port=0", "--window-size=1000,760",
]  # fmt: skip


class Browser:
    """One page. `errors` are the page's exceptions, console errors and refused loads."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM
        self._log = (folder / "chromium.log").open("w+")
        argv = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._process = subprocess.Popen(argv, stderr=self._log, stdout=subprocess.DEVNULL)
        self._number = 0
        self._stack = ExitStack()
        self.errors: list[str] = []
        try:
            self._browser = self._wait_for_address(folder)
            self._socket = self._stack.enter_context(connect(self._page_address(), max_size=None))
            for domain in ("Page", "Runtime", "Log"):
                self.send(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; what the page says in the meantime is noted."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=20))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message)

    def go(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str, timeout_s: float = 15) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := self.ask(expression)):
            assert time.monotonic() < deadline, f"it never came: {expression}"
            time.sleep(0.02)
        return value

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.send("Input.insertText", text=text)

    def press_enter(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key="Enter",
                code="Enter",
                windowsVirtualKeyCode=13,
                text="\r",
            )

    def click(self, selector: str) -> None:
        """A real mouse click in the middle of an element."""
        box = self.ask(
            f"(({selector!r}), document.querySelector({selector!r}).getBoundingClientRect().toJSON())"
        )
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def screenshot(self, path: Path) -> bytes:
        data = base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(data)
        return data

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(
                params["exceptionDetails"].get("exception", {}).get("description", "exception")
            )
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def _wait_for_address(self, folder: Path) -> str:
        deadline = time.monotonic() + 30
        while True:
            text = (folder / "chromium.log").read_text(errors="replace")
            if match := re.search(r"DevTools listening on ws://(127\.0\.0\.1:\d+)/", text):
                return match.group(1)
            assert self._process.poll() is None and time.monotonic() < deadline, (
                f"Chromium did not start:\n{text}"
            )
            time.sleep(0.05)

    def _page_address(self) -> str:
        pages = httpx.get(f"http://{self._browser}/json", trust_env=False).json()
        return str(next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page"))


def assert_drawn(path: Path) -> None:
    """A screenshot of the gateway's page: it has its size, more than a few colours, and the green of the send button."""
    with Image.open(path) as picture:
        assert picture.size[0] == 1000 and picture.size[1] > 500
        colours = {colour: count for count, colour in picture.convert("RGB").getcolors(1 << 24) or []}
    assert len(colours) > 20
    assert colours.get((74, 125, 44), 0) > 500
