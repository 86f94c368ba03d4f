"""A real browser, where there is one: what it makes of a page, and what it says on its console."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

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
