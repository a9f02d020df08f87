"""A headless browser for tests: Chromium, spoken to over a pair of pipes.

Chromium's DevTools protocol is JSON messages, each ended by a zero byte; with
`--remote-debugging-pipe` it reads them from file 3 and writes to file 4. So no port is open, and
nothing but the standard library is needed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--enable-unsafe-swiftshader",
)  # fmt: skip

# Files 3 and 4 must be the pipes, whatever numbers they have here.
_START = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

# All text that a reader sees, inside web components too.
_TEXT = """
(function text(node) {
    if (node.nodeType === Node.TEXT_NODE) return node.textContent;
    if (['STYLE', 'SCRIPT', 'TEMPLATE'].includes(node.nodeName)) return '';
    const inner = [...(node.shadowRoot ? node.shadowRoot.childNodes : []), ...node.childNodes];
    return inner.map(text).join(' ');
})(document.body).replace(/\\s+/g, ' ')
"""

# Every element that a selector names, inside web components too.
_FIND = """
(() => {
    const found = [];
    const walk = (root) => root.querySelectorAll('*').forEach((each) => {
        if (each.matches(%s)) found.push(each);
        if (each.shadowRoot) walk(each.shadowRoot);
    });
    walk(document);
    return found;
})()
"""


def find_browser() -> str:
    """Path of the browser: $POSBENCH_BROWSER, or a Chromium or Chrome that is installed."""
    named = os.environ.get("POSBENCH_BROWSER")
    names = [named] if named else ["chromium", "chromium-browser", "google-chrome"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is installed (see POSBENCH_BROWSER)")
    return found


@dataclass
class Page:
    """One open page, and what it said on its console."""

    process: subprocess.Popen[bytes]
    requests: int  # a pipe to the browser
    answers: int  # a pipe from the browser
    session: str = ""
    console: list[str] = field(default_factory=list)  # `error: ...` and `warning: ...`
    _unread: bytes = b""
    _sent: int = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.requests, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            self._listen(answer)
            if answer.get("id") == self._sent:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, patience: float = 60) -> dict[str, Any]:
        with selectors.DefaultSelector() as ready:
            ready.register(self.answers, selectors.EVENT_READ)
            while b"\0" not in self._unread:
                assert ready.select(patience), f"the browser said nothing for {patience} s"
                found = os.read(self.answers, 1 << 20)
                assert found, f"the browser ended with exit code {self.process.poll()}"
                self._unread += found
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _listen(self, event: dict[str, Any]) -> None:
        params, method = event.get("params", {}), event.get("method")
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", details["text"])
            self.console.append(f"error: {thrown}")
        elif method == "Runtime.consoleAPICalled":
            level = {"error": "error", "assert": "error", "warning": "warning"}.get(params["type"])
            words = [str(each.get("value", each.get("description"))) for each in params["args"]]
            self.console += [f"{level}: {' '.join(words)}"] if level else []
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            entry = params["entry"]
            self.console.append(f"{entry['level']}: {entry['text']} {entry.get('url', '')}".strip())

    @property
    def errors(self) -> list[str]:
        """What went wrong: exceptions, console errors, what could not be loaded."""
        self.run("0")  # reads what has been said since
        return [line for line in self.console if line.startswith("error: ")]

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; of a promise, what it resolves to."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def text(self) -> str:
        """All text of the page, that of web components too, on one line."""
        return str(self.run(_TEXT))

    def find(self, selector: str, then: str = "length") -> Any:
        """`then` of the array of elements that `selector` names, in web components too."""
        return self.run(finding(selector, then))

    def wait(self, script: str, seconds: float = 30) -> Any:
        """Wait until a JavaScript expression is true, and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"not within {seconds} s: {script}\n{self.text()[:2000]}"
            time.sleep(0.1)
        return value

    def wait_for_text(self, words: str, seconds: float = 30) -> None:
        """Wait until the page shows `words`."""
        self.wait(f"({_TEXT}).includes({json.dumps(words)})", seconds)

    def screenshot(self, path: Path) -> None:
        """Save what is seen now, as PNG."""
        found = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))


def finding(selector: str, then: str = "length") -> str:
    """A script for `wait`: `then` of the array of elements that `selector` names."""
    return f"{_FIND % json.dumps(selector)}.{then}"


@contextlib.contextmanager
def open_page(url: str, width: int = 1280, height: int = 900) -> Iterator[Page]:
    """A page at `url`, loaded, in a browser of its own that ends with the block."""
    browser = find_browser()
    with contextlib.ExitStack() as stack:
        profile = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        )
        theirs_in, requests = os.pipe()
        answers, theirs_out = os.pipe()
        stack.callback(os.close, requests)
        stack.callback(os.close, answers)
        ends = [str(theirs_in), str(theirs_out)]
        flags = (*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}")
        process = subprocess.Popen(
            [sys.executable, "-c", _START, *ends, browser, *flags, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        stack.callback(_end, process)
        page = Page(process, requests, answers)
        target = page.call("Target.createTarget", url="about:blank")
        attached = page.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        found = page.call("Page.navigate", url=url)
        assert "errorText" not in found, f"{url}: {found['errorText']}"
        page.wait("document.readyState === 'complete'")
        yield page


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
