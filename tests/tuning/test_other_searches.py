"""What a search says of others in the same ledger."""

from __future__ import annotations

from evoengine.tuning.search import concurrent_searches
from tests.support.ledger_examples import start_run


def test_one_at_the_same_problem_is_named(ledger):
    start_run(ledger)
    said = concurrent_searches(ledger, start_run(ledger))
    assert said is not None and said.startswith(
        "run 1 is searching the same problem: each kernel is evaluated by one search"
    )


def test_nothing_is_said_of_those_that_have_ended_or_search_for_something_else(ledger):
    ended, other = start_run(ledger), start_run(ledger, gpu="a100")
    ledger.finish_run(ended, "all trials done")
    assert other != ended
    assert concurrent_searches(ledger, start_run(ledger)) is None
