"""What ends a search with what there is."""

from __future__ import annotations

import signal

import pytest

from evoengine.cli.signals import stop_on_signal

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


def test_a_terminal_that_goes_away_ends_no_search_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stopped = stop_on_signal(lambda: None)
    signal.raise_signal(signal.SIGHUP)
    assert not stopped()
