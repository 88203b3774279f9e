"""Drive a Chromium that is installed on this machine, for tests and screenshots of the page.

The protocol (Chrome DevTools) is spoken over two pipes, so nothing has to be downloaded and no
package is needed.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --enable-unsafe-swiftshader --disable-quic "
    "--no-first-run --disable-background-networking --disable-component-update --disable-sync "
    "--disable-extensions --disable-dev-shm-usage --mute-audio --hide-scrollbars "
    "--force-color-profile=srgb --disable-background-timer-throttling "
    "--disable-backgrounding-occluded-windows --disable-renderer-backgrounding "
    "--remote-debugging-pipe"
).split()
SECONDS = 240
"""The time that a condition may take to become true; a loaded machine is many times slower."""

# Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
START = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"  # noqa: E501


# The middle of an element that is enabled, not covered, and where it was 20 ms ago; otherwise null.
CLICK_POSITION = """(() => {
    const element = ELEMENT;
    if (!element || element.disabled) return null;
    element.scrollIntoView({ block: "center", behavior: "instant" });
    const { left, top, width, height } = element.getBoundingClientRect();
    const [x, y] = [left + width / 2, top + height / 2];
    const last = element.lastPosition;
    element.lastPosition = `${x} ${y}`;
    const isOnTop = element.contains(document.elementFromPoint(x, y));
    return isOnTop && last === element.lastPosition ? [x, y] : null;
})()"""
# Stop the events of a click that hits another element; endClick() returns whether it hit this one.
GUARD_CLICK = """(() => {
    const element = ELEMENT;
    const types = ["pointerdown", "mousedown", "pointerup", "mouseup", "click"];
    let isHit = false;
    const guard = (event) => {
        if (element?.contains(event.target)) isHit ||= event.type === "click";
        else {
            event.stopImmediatePropagation();
            event.preventDefault();
        }
    };
    types.forEach((type) => addEventListener(type, guard, true));
    window.endClick = () => {
        types.forEach((type) => removeEventListener(type, guard, true));
        return isHit;
    };
})()"""
MAX_CLICKS = 100


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    def __init__(self, *flags: str) -> None:
        program = find_chromium()
        assert program is not None, "install Chromium"
        self.folder = tempfile.mkdtemp(prefix="tessera-browser-")
        commands, self._send = os.pipe()
        receive, answers = os.pipe()
        command = [program, *FLAGS, *flags, f"--user-data-dir={self.folder}", "about:blank"]
        start = [sys.executable, "-I", "-S", "-c", START, str(commands), str(answers), *command]
        with open(os.path.join(self.folder, "log"), "wb") as log:
            self.process = subprocess.Popen(
                start,
                pass_fds=(commands, answers),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(commands)
        os.close(answers)
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self.pages: dict[str, Page] = {}
        threading.Thread(target=self._read, args=[receive], daemon=True).start()

    def _read(self, descriptor: int) -> None:
        with open(descriptor, "rb") as file:
            rest = b""
            while data := file.read1(1 << 20):
                *messages, rest = (rest + data).split(b"\0")
                for message in map(json.loads, messages):
                    self._receive(message)
        for waiting in list(self._answers.values()):
            waiting.put({"error": {"message": "the browser ended"}})

    def _receive(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers.pop(message["id"]).put(message)
        elif page := self.pages.get(message.get("sessionId", "")):
            page.receive(message["method"], message["params"])

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        waiting = self._answers[number] = queue.SimpleQueue()
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        answer = waiting.get(timeout=2 * SECONDS)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, url: str = "about:blank") -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "DOM", "Network"):
            page.call(f"{domain}.enable")
        # Pages are never in the background, where Chromium stops animations and the clipboard.
        page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        page.call("Page.bringToFront")
        if url != "about:blank":
            page.go(url)
        return page

    def close(self) -> None:
        try:
            self.call("Browser.close")
        except (RuntimeError, OSError, queue.Empty):
            self.process.kill()
        self.process.wait()
        os.close(self._send)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def open_browser(*flags: str) -> Iterator[Browser]:
    browser = Browser(*flags)
    try:
        yield browser
    finally:
        browser.close()


class Page:
    def __init__(self, browser: Browser, session: str, target: str):
        self.browser, self.session, self.target = browser, session, target
        self.errors: list[str] = []
        """Errors and warnings of the console, and exceptions that nobody caught."""
        self.requests: list[str] = []

    def receive(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            text = details.get("exception", {}).get("description") or details["text"]
            self.errors.append(text)
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            values = [str(one.get("value", one.get("description"))) for one in params["args"]]
            self.errors.append(" ".join(values))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            entry = params["entry"]
            self.errors.append(f"{entry['text']} {entry.get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the JSON value of an expression; promises are awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = SECONDS) -> Any:
        """Wait in the page until an expression is true, and return its value."""
        code = f"""new Promise((resolve, reject) => {{
            const end = performance.now() + {1000 * seconds};
            (function look() {{
                let value = null;
                try {{ value = ({condition}); }} catch {{ }}
                if (value) resolve(value);
                else if (performance.now() > end) reject(new Error("still false"));
                else setTimeout(look, 20);
            }})();
        }})"""
        for attempt in (1, 2, 3):
            try:
                return self.evaluate(code)
            except RuntimeError as error:
                is_navigation = "context was destroyed" in str(error) or "navigated" in str(error)
                if not is_navigation or attempt == 3:
                    raise AssertionError(f"{condition}: {error}; {self.errors}") from None
        return None

    def wait_for(self, selector: str) -> None:
        self.wait(f"document.querySelector({json.dumps(selector)})")

    def click(self, selector: str) -> None:
        """Click into the middle of an element with the mouse, once it can be clicked.

        The element must be enabled, at rest and not covered. The page may still change before the
        click: then the click is kept from whatever is there now, and repeated.
        """
        element = f"document.querySelector({json.dumps(selector)})"
        for _ in range(MAX_CLICKS):
            x, y = self.wait(CLICK_POSITION.replace("ELEMENT", element))
            self.evaluate(GUARD_CLICK.replace("ELEMENT", element))
            self.mouse("mousePressed", x, y)
            self.mouse("mouseReleased", x, y)
            if self.evaluate("window.endClick()"):
                return
        raise AssertionError(f"{selector} was never hit by {MAX_CLICKS} clicks")

    def mouse(self, kind: str, x: float, y: float, buttons: int = 1) -> None:
        self.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            button="left",
            buttons=buttons if kind != "mouseReleased" else 0,
            clickCount=1,
        )

    def fill(self, selector: str, text: str) -> None:
        """Type a text into a field instead of what it has."""
        self.click(selector)
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select?.()")
        self.call("Input.insertText", text=text)

    def choose_file(self, selector: str, path: Path) -> None:
        self.wait_for(selector)
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def text(self, selector: str = "body") -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def set_view(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        value = "dark" if dark else "light"
        features = [
            {"name": "prefers-color-scheme", "value": value},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)
        self.browser.pages.pop(self.session, None)
