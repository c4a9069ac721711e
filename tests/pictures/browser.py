"""A headless Chromium, spoken to over the DevTools protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.processes import started

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
    *("--remote-debugging-port=0", "--no-first-run", "about:blank"),
)
SECONDS = 30.0


def program() -> str | None:
    """The path of Chromium on this machine."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """One page of a new browser, which keeps its files in a folder."""
    from websockets.sync.client import connect

    command = [program() or "", f"--user-data-dir={folder}", *FLAGS]
    # Debian's program is a script, which does not hand a signal on to the browser
    with started(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        port, path = _address(folder / "DevToolsActivePort", process)
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None) as socket:
            yield Page(socket)


def _address(file: Path, process: subprocess.Popen[bytes]) -> list[str]:
    """Port and path at which the browser listens."""
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        lines = file.read_text().split() if file.exists() else []
        if len(lines) == 2:
            return lines
        assert process.poll() is None, f"Chromium ended with status {process.returncode}"
        time.sleep(0.02)
    raise TimeoutError(f"Chromium did not listen within {SECONDS:g} s")


class Page:
    """One page; `problems` are errors and warnings of its console, and requests that it made."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._session, self._calls = socket, None, 0
        self._events: list[str] = []
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer of the browser; what it reports meanwhile is noted."""
        self._calls += 1
        said = {"id": self._calls, "method": method, "params": parameters}
        if self._session:
            said["sessionId"] = self._session
        self._socket.send(json.dumps(said))
        while True:
            heard = json.loads(self._socket.recv(SECONDS))
            if heard.get("id") == self._calls:
                assert "error" not in heard, f"{method}: {heard['error']}"
                return heard["result"]
            self._note(heard)

    def _note(self, heard: dict[str, Any]) -> None:
        about = heard["params"]
        self._events.append(heard["method"])
        match heard["method"]:
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(about["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.problems.append(json.dumps(about["args"]))
            case "Log.entryAdded":
                self.problems.append(about["entry"]["text"])
            case "Network.requestWillBeSent" if not about["request"]["url"].startswith("file:"):
                self.problems.append(f"asks for {about['request']['url']}")

    def open(self, file: Path, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Shows a file in a window of that many pixels."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.call("Page.navigate", url=file.as_uri())
        while "Page.loadEventFired" not in self._events:
            self._note(json.loads(self._socket.recv(SECONDS)))

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """A picture of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(b64decode(shot["data"]))

    def tap(self, x: float, y: float) -> None:
        """A finger, at a place of the window."""
        for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
            self.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """The mouse, with its button held; nowhere else: a click."""
        for kind, at in (("Pressed", (x, y)), ("Moved", (to_x, to_y)), ("Released", (to_x, to_y))):
            about = {"button": "left", "buttons": int(kind != "Released"), "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=at[0], y=at[1], **about)

    def press(self, *keys: str) -> None:
        """Keys, one after another, by their names."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
