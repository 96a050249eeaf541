"""Headless Chromium, driven by the WebDriver protocol, for tests of the pages."""

import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

QUIET = "--no-first-run --disable-quic --disable-background-networking --disable-component-update --disable-sync"


class Browser:
    """One window. `open` a page, look at it with `js`, and `click` or type `keys` as a reader does."""

    def __init__(self, driver: "subprocess.Popen[str]", profile: Path) -> None:
        assert driver.stdout is not None
        started = next(line for line in driver.stdout if "successfully on port" in line)
        port = re.findall(r"port (\d+)", started)[0]
        self.base = f"http://127.0.0.1:{port}/session"
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        flags = [*f"--headless --no-sandbox --disable-gpu --window-size=1280,900 {QUIET}".split(), f"--user-data-dir={profile}"]
        options = {"binary": shutil.which("chromium"), "args": flags}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        self.base += "/" + self("", capabilities={"alwaysMatch": wanted})["sessionId"]
        self("/timeouts", script=300_000)

    def __call__(self, path: str, method: str = "POST", **body: Any) -> Any:
        content = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self.base + path, content, {"Content-Type": "application/json"}, method=method)
        with self.opener.open(request, timeout=400) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        self.log("performance")
        self("/url", url=page.as_uri())

    def js(self, script: str) -> Any:
        return self("/execute/sync", script=f"return {script}", args=[])

    def until(self, script: str) -> None:
        """Wait in the page until an expression is true."""
        waiting = f"const done = arguments[0]; (function look() {{ ({script}) ? done(true) : requestAnimationFrame(look); }})()"
        assert self("/execute/async", script=waiting, args=[])

    def draw(self) -> None:
        """Have every chart drawn, as for printing."""
        self.until("typeof vegaEmbed === 'undefined' || document.documentElement.classList.contains('ready')")
        self.js("dispatchEvent(new Event('beforeprint'))")
        self.until("[...document.querySelectorAll('figure.chart .plot')].every(p => !p.clientWidth || p.classList.contains('drawn'))")

    def click(self, selector: str) -> None:
        """With the mouse, where a reader would."""
        element = self("/element", using="css selector", value=selector)
        self(f"/element/{next(iter(element.values()))}/click")

    def keys(self, text: str) -> None:
        """To what has the focus."""
        actions = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self("/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self("/goog/cdp/execute", cmd=command, params=parameters)

    def emulate(self, width: int = 1280, dark: bool = False, media: str = "") -> None:
        """Set the width of the window, the reader's colours, and the medium."""
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", media=media, features=features)

    def log(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self("/se/log", type=kind)
        return found

    def requests(self) -> list[str]:
        """The addresses that the page requested, its own first. A starting browser requests pages of its own."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        here = self.js("location.href")
        sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        asked = [request["request"]["url"] for request in sent if request["documentURL"] == here]
        return [url for url in asked if not url.startswith("data:")]


@contextmanager
def chromium() -> Iterator[Browser]:
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs chromium and chromedriver")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver,
    ):
        try:
            started = Browser(driver, Path(profile))
            yield started
            started("", method="DELETE")
        finally:
            driver.terminate()
