"""What ends a search with what there is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evoengine.cli.process import stop_on_signal

ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_each_of_them_asks_the_search_to_stop(number):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stops = []
    stopped = stop_on_signal(lambda: stops.append(number))
    signal.raise_signal(number)
    assert (stops, stopped()) == ([number], True)


def test_an_interrupt_that_is_ignored_in_the_background_stays_ignored_and_sigterm_ends_the_search():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stopped = stop_on_signal(lambda: None)
    signal.raise_signal(signal.SIGINT)
    assert not stopped()
    signal.raise_signal(signal.SIGTERM)
    assert stopped() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN


IGNORING = """
import signal, subprocess, sys
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
sys.exit(subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", *sys.argv[1:]]).returncode)
"""
ASKED = """
import subprocess, sys

def test_children_start_with_default_signals():
    said = "import signal; print([signal.getsignal(n) is signal.SIG_IGN for n in (1, 2, 3, 15)])"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True)
    assert done.stdout == "[False, False, False, False]\\n"
"""


def test_what_tests_start_heeds_signals_though_the_tests_were_started_in_the_background(tmp_path):
    (asked := tmp_path / "test_asked.py").write_text(ASKED)
    command = [sys.executable, "-c", IGNORING, str(asked), f"--rootdir={tmp_path}", "-c", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_terminal_that_goes_away_ends_no_search_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stopped = stop_on_signal(lambda: None)
    signal.raise_signal(signal.SIGHUP)
    assert not stopped()
