"""A real browser, where there is one: what it makes of a page, and what it says on its console."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")


def opened(address: str, profile: Path, seconds: int = 20) -> tuple[str, list[str]]:
    """The page as it is after some seconds of the browser's own clock, and the lines of its console."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--enable-logging=stderr",
        f"--virtual-time-budget={1000 * seconds}", "--window-size=390,800", "--dump-dom", address,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


ANSWER_SECONDS = 240


class Browser:
    """A page that a program looks at and fills in, by the DevTools protocol over two pipes."""

    def __init__(self, profile: Path, width: int = 1000, height: int = 900) -> None:
        ours, theirs = os.pipe(), os.pipe()
        # the browser reads commands from descriptor 3 and writes answers to 4
        command = [
            "bash", "-c", f'exec 3<&{ours[0]} 4>&{theirs[1]}; exec "$@"', "browser", str(BROWSER), "--headless",
            "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--remote-debugging-pipe",
            f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, pass_fds=(ours[0], theirs[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._to, self._from = ours[1], theirs[0]
        self._number, self._session, self._read = 0, None, b""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def _call(self, method: str, **params: object) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            assert select.select([self._from], [], [], ANSWER_SECONDS)[0], "the browser does not answer"
            more = os.read(self._from, 1 << 16)
            assert more, "the browser has ended"
            self._read += more
        text, _, self._read = self._read.partition(b"\0")
        return json.loads(text)

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)
        self._await_load()

    def click(self, selector: str) -> None:
        """Click what leads to another page, and wait for that."""
        self.run(f"document.querySelector({json.dumps(selector)}).click()")
        self._await_load()

    def fill(self, name: str, value: str) -> None:
        self.run(f"document.querySelector('[name={name}]').value = {json.dumps(value)}")

    def run(self, script: str) -> Any:
        """Return what the script comes to in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    @property
    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _await_load(self) -> None:
        while self._next().get("method") != "Page.loadEventFired":
            continue

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
