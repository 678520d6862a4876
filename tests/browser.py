"""A real Chromium without a window, spoken to in the DevTools protocol through two pipes: no driver, no port, no package."""

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.optional import missing

SECONDS = 60  # generous: a machine may be busy
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
]
# Chromium reads from descriptor 3 and writes to 4; they are set in a process of its own, where nothing else has them.
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for place, end in zip((3, 4), ends):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
# Of every text in sight: contrast, element, and how light the ground is.
CONTRAST = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const over = (...colors) => {  // as the browser paints them, one over the other
    canvas.clearRect(0, 0, 1, 1);
    for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = rgb => rgb.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, n) => sum + v * [.2126, .7152, .0722][n], 0);
  const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const paper = getComputedStyle(document.body).backgroundColor;
  const found = [];
  const texts = 'h1, h2, h3, p, dt, dd, li, th, td, .token, .choice span, legend, label, select, summary, a';
  for (const e of document.querySelectorAll(texts)) {
    if (!e.getClientRects().length) continue;
    const layers = [];
    for (let at = e; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
    const below = over(paper, ...layers);
    found.push([contrast(over(getComputedStyle(e).color), below), e.tagName + '.' + e.className, light(below)]);
  }
  return found;
})()
"""
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, "Tab": 9, " ": 32, "Enter": 13}


def program() -> str:
    """Return where Chromium is."""
    names = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    return found or missing("Chromium", "install it (Debian: apt-get install chromium)")


class Browser:
    """A running browser."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._buffer, self._count = b"", 0
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method and return its result; events that come before are kept."""
        self._count += 1
        number = self._count
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writing, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def wait(self, session: str, method: str) -> dict[str, Any]:
        """Return the next event of a name, also one that came already."""
        while True:
            for place, event in enumerate(self.events):
                if event.get("sessionId") == session and event.get("method") == method:
                    return self.events.pop(place)
            self.events.append(self._read())

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self._reading, 1 << 20) if ready else b""
            if not piece:
                raise RuntimeError("Chromium does not answer" if not ready else "Chromium ended")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    @contextmanager
    def tab(self, path: Path, *, dark: bool = False, width: int = 1000, height: int = 900) -> Iterator[Tab]:
        """Open a file in a tab of its own."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                tab.send(f"{domain}.enable")
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            tab.send("Emulation.setEmulatedMedia", features=scheme)
            tab.send(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=1,
                mobile=width < 500,
            )
            tab.send("Page.navigate", url=path.as_uri())
            self.wait(session, "Page.loadEventFired")
            yield tab
        finally:
            self.send("Target.closeTarget", targetId=target)


class Tab:
    """A page in the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key as a keyboard does."""
        text = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
        code = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": KEYS.get(key, ord(key[0].upper())),
        }
        code["modifiers"] = 8 if shift else 0
        self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **code)
        self.send("Input.dispatchKeyEvent", type="keyUp", **code)

    def click(self, selector: str, number: int = 0) -> None:
        """Click into the middle of an element."""
        box = self.run(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{number}];"
            " e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and exceptions."""
        self.run("0")  # what happened until here was told before the answer
        found = []
        for event in self._own():
            kind, what = event["method"], event["params"]
            if kind == "Runtime.exceptionThrown":
                found.append(str(what["exceptionDetails"]))
            elif kind == "Log.entryAdded":
                found.append(str(what["entry"]))
            elif kind == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
                found.append(str(what["args"]))
        return found

    @property
    def requests(self) -> list[str]:
        """Addresses that were asked for, beside the file itself."""
        self.run("0")
        sent = [one["params"]["request"]["url"] for one in self._own() if one["method"] == "Network.requestWillBeSent"]
        return sent[1:]

    def _own(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]


@contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium with a profile of its own, and end it."""
    path = program()
    their_reading, writing = os.pipe()
    reading, their_writing = os.pipe()
    # Chromium still writes into its profile while it ends
    with tempfile.TemporaryDirectory(prefix="gradreg-chromium-", ignore_cleanup_errors=True) as profile:
        ends = (their_reading, their_writing)
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", START, *map(str, ends), path, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in ends:
            os.close(end)
        started = Browser(reading, writing)
        try:
            started.send("Browser.getVersion")
            yield started
            started.send("Browser.close")
        finally:
            for end in (reading, writing):
                os.close(end)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
