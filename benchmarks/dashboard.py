"""How long a browser takes to draw a study: `python benchmarks/dashboard.py --db LEDGER [--study 1] [--times 3]`.

Each time `evoengine dashboard` is started, then Chromium, headless, with an empty profile. Seconds are from going
to the study's page: until it asks for the study, has it whole, and has drawn its history and its timeline. The page is
looked at every 50 ms, through the browser's DevTools on a pipe.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError

from rich.console import Console
from rich.table import Table

from tests.support.browser import BROWSER

MOST_SECONDS = 120.0
LOOK_SECONDS = 0.05
READS, WRITES = 3, 4
"""the descriptors by which a browser with --remote-debugging-pipe takes messages and gives answers"""
SEEN = """(() => {
    const asked = performance.getEntriesByType("resource").find(e => /\\/api\\/studies\\/\\d+\\?/.test(e.name));
    const count = what => document.querySelectorAll(what).length;
    return [asked?.startTime, asked?.responseEnd, count(".scatterlayer .points path"), count(".barlayer .point")];
})()"""


class DevTools:
    """Calls of a browser's DevTools, each a line of JSON that ends with a zero byte."""

    def __init__(self, browser: str, profile: Path) -> None:
        taken, self._requests = os.pipe()
        self._answers, given = os.pipe()
        command = [browser, "--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--window-size=1400,1000"]
        # moved by a shell: a process that Python starts has the numbers it has here
        moved = ["bash", "-c", f'exec {READS}<&{taken} {WRITES}>&{given} "$@"', "bash"]
        self._process = subprocess.Popen(
            [*moved, *command, f"--user-data-dir={profile}", "about:blank"], pass_fds=(taken, given),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(taken)
        os.close(given)
        self._left, self._number = b"", 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            read = os.read(self._answers, 1 << 16)
            if not read:
                raise SystemExit("the browser has ended")
            self._left += read
        answer, _, self._left = self._left.partition(b"\0")
        return json.loads(answer)

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        while os.read(self._answers, 1 << 16):
            pass  # until its last process has ended, which may still write into the profile
        self._process.wait()
        os.close(self._requests)
        os.close(self._answers)


@contextmanager
def served(db: Path) -> Iterator[str]:
    """The address of a dashboard of that ledger."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "evoengine", "dashboard", "--db", str(db), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            if server.poll() is not None:
                raise SystemExit(f"evoengine dashboard --db {db} ended with exit code {server.returncode}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/meta", timeout=30)
                break
            except URLError:
                time.sleep(LOOK_SECONDS)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def drawing(browser: str, page: str) -> tuple[float, float, float, int, int]:
    """Seconds until the study is asked for, there, and drawn; points and bars that were drawn."""
    profile = Path(tempfile.mkdtemp())
    tools = DevTools(browser, profile)
    try:
        begun, drawn, before = time.monotonic(), 0.0, None
        tools.call("Page.navigate", url=page)
        while time.monotonic() - begun < MOST_SECONDS:
            looked = time.monotonic() - begun
            seen = tools.call("Runtime.evaluate", expression=SEEN, returnByValue=True)["result"]["value"]
            if seen == before and seen[2] and seen[3]:
                return seen[0] / 1000, seen[1] / 1000, drawn, seen[2], seen[3]
            if seen != before:
                before, drawn = seen, time.monotonic() - begun
            time.sleep(max(0.0, LOOK_SECONDS - (time.monotonic() - begun - looked)))
        raise SystemExit(f"{page} was not drawn within {MOST_SECONDS:g} s")
    finally:
        tools.close()
        shutil.rmtree(profile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", type=Path, required=True, help="the ledger, an SQLite file")
    parser.add_argument("--study", type=int, default=1)
    parser.add_argument("--times", type=int, default=3)
    asked = parser.parse_args()
    if BROWSER is None:
        parser.error("no Chromium was found: apt-get install chromium")
    if not asked.db.is_file():
        parser.error(f"there is no ledger {asked.db}: evoengine import makes one of a recorded space")
    table = Table("asked for, s", "there, s", "drawn, s", "points", "bars")
    for _ in range(asked.times):
        with served(asked.db) as address:
            *seconds, points, bars = drawing(BROWSER, f"{address}/dashboard/studies/{asked.study}")
        table.add_row(*(f"{each:.2f}" for each in seconds), f"{points:,}", f"{bars:,}")
    Console().print(table)


if __name__ == "__main__":
    main()
