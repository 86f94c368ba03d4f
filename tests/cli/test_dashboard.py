"""`evoengine dashboard`, in a real browser where there is one."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from urllib.error import URLError

import pytest

from tests.support.browser import needs_browser, opened
from tests.support.exhaustive import more
from tests.support.recorded import cache
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def ledger(evoengine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dashboard")
    file, db = cache(folder / "test.json"), folder / "evo.db"
    done = evoengine("search", "--device", f"recorded:{file}", "--trials", 12, "--seed", 1, "--db", db)
    assert done.returncode == 0, done.stderr
    return db


@pytest.fixture(scope="module")
def port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def served(ledger, port, tmp_path_factory):
    """The address of a dashboard that runs; at the end it is told Ctrl-C, and must end as one that was asked to."""
    command = [sys.executable, "-m", "evoengine", "dashboard", "--db", ledger, "--port", str(port)]
    said = tmp_path_factory.mktemp("said") / "stderr"  # a line a request: a pipe that nobody reads would fill
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said.open("w"))
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert server.poll() is None, said.read_text()
        try:
            return urllib.request.urlopen(f"{address}/api/meta", timeout=30).status == 200
        except URLError:
            return False

    try:
        wait_for(answers)
        yield address
        server.send_signal(signal.SIGINT)
        wait_for(lambda: server.poll() is not None)
    finally:
        server.kill()
    assert "Traceback" not in said.read_text()


@needs_browser
@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("studies/1", ["recorded runs per second", "Best Trial", "Hyperparameter Importance"]),
        *more(
            [
                ("studies/1/note", ["median gain", "steps", "→"]),
                ("studies/1/trials?numbers=0", ["outcome", "recorded", "median_us", "random", "block"]),
            ]
        ),
    ],
)
def test_a_browser_shows_the_study_what_paid_and_each_trial(served, tmp_path, page, shown):
    seen = ""

    def rendered() -> bool:
        nonlocal seen
        seen, _ = opened(f"{served}/dashboard/{page}", tmp_path, 10)
        return all(text in seen for text in shown)

    wait_for(rendered)


def test_a_port_that_is_taken_is_refused(evoengine, served, ledger, port):
    done = evoengine("dashboard", "--db", ledger, "--port", port)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert f"cannot listen on port {port}: Address already in use; choose another with --port" in done.stderr
