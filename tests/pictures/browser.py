"""A headless Chromium, spoken to over the DevTools protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.processes import started, until

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
    *("--remote-debugging-port=0", "--no-first-run", "about:blank"),
)
SECONDS = 30.0
PROBLEMS = "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"


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
        file = folder / "DevToolsActivePort"
        until(lambda: process.poll() is not None or (file.exists() and "/" in file.read_text()))
        port, path = file.read_text().split()
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None) as socket:
            yield Page(socket)


class Page:
    """One page; `problems` are errors and warnings of its console, and requests that it made."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._session, self._calls = socket, {}, 0
        self._events: list[str] = []
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer of the browser; what it reports meanwhile is noted."""
        self._calls += 1
        call = {"id": self._calls, "method": method, "params": parameters, **self._session}
        self._socket.send(json.dumps(call))
        while True:
            answer = json.loads(self._socket.recv(SECONDS))
            if answer.get("id") == self._calls:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event["method"], event["params"]
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            if not parameters["request"]["url"].startswith("file:"):
                self.problems.append(f"asks for {parameters['request']['url']}")
        elif method in PROBLEMS:
            self.problems.append(json.dumps(parameters))

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
        value = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in value, value["exceptionDetails"]
        return value["result"].get("value")

    def screenshot(self, file: Path) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(b64decode(shot["data"]))

    def tap(self, x: float, y: float) -> None:
        """A finger, at a place of the window."""
        for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
            self.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    def click(self, x: float, y: float) -> None:
        """The mouse, at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            call = {"type": kind, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", x=x, y=y, **call)
