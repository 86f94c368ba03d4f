"""What a search says of others in the same ledger."""

from __future__ import annotations

import pytest

from evoengine.ledger.store import open_ledger
from evoengine.tuning.search import others_at_work
from tests.support.ledger_examples import GPU, PROBLEM, start_run


@pytest.fixture
def ledger(tmp_path):
    with open_ledger(str(tmp_path / "ledger.db"), create=True) as ledger:
        yield ledger


def test_one_that_was_killed_a_moment_ago_is_not_taken_over_without_a_word(ledger):
    killed = start_run(ledger)
    ledger.add_candidate(killed, PROBLEM, GPU, {"tile_m": 64}, (), None)
    run = start_run(ledger)
    assert ledger.unfinished(GPU, PROBLEM) == []
    said = others_at_work(ledger, run)
    assert said is not None
    assert said.startswith(
        "run 1 is at the same problem, or killed less than 60 s ago: the trials that a killed run left"
    )


def test_nothing_is_said_of_those_that_have_ended_or_search_for_something_else(ledger):
    ended, other = start_run(ledger), start_run(ledger, gpu="a100")
    ledger.finish_run(ended, "all trials done")
    assert other != ended
    assert others_at_work(ledger, start_run(ledger)) is None
