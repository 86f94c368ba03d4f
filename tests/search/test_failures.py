"""A search whose candidates all fail says why, and does not go on for ever."""

from __future__ import annotations

import pytest

from evoengine.records import Outcome
from evoengine.search.progress import MAX_ALIKE, Failures

UNDEFINED = 'kernel.cu(7): error: identifier "INFINITY" is undefined'


def failed(count, outcome=Outcome.UNCOMPILABLE, reason=UNDEFINED, start=1):
    failures = Failures()
    for n in range(start, start + count):
        failures.add(n, outcome, reason.replace("(7)", f"({n})"))
    return failures


def test_failures_that_differ_in_numbers_alone_are_alike():
    failures = failed(MAX_ALIKE)
    assert failures.stop_reason() == f"the first {MAX_ALIKE} candidates failed alike (uncompilable)"
    assert failures.commonest() == [
        f'{MAX_ALIKE} of {MAX_ALIKE} uncompilable, as #1: kernel.cu(1): error: identifier "INFINITY" is undefined'
    ]


def test_one_candidate_that_passed_keeps_the_search_going():
    failures = failed(MAX_ALIKE - 1)
    failures.add(99, Outcome.UNFINISHED, None)
    for n in range(50):
        failures.add(100 + n, Outcome.UNCOMPILABLE, UNDEFINED)
    assert failures.stop_reason() is None


def test_so_do_two_reasons_or_too_few_candidates():
    assert failed(MAX_ALIKE - 1).stop_reason() is None
    failures = failed(MAX_ALIKE)
    failures.add(99, Outcome.CRASHED, "one row: misaligned access")
    assert failures.stop_reason() is None


@pytest.mark.parametrize("outcome", [Outcome.INCORRECT, Outcome.CRASHED, Outcome.HUNG])
def test_a_wrong_result_is_the_same_reason_in_whatever_case_it_shows(outcome):
    failures = Failures()
    for n in range(MAX_ALIKE):
        failures.add(n, outcome, f"machine code: case {n}: error {n}.5e-01 where 1.00e-03 is allowed")
    assert failures.stop_reason()


def test_the_commonest_reasons_come_first_with_counts_and_the_rest_is_counted():
    failures = failed(3)
    for n, reason in enumerate(("a", "b", "b", "c", "d", "e")):
        failures.add(10 + n, Outcome.SCREENED, f"reason {reason}")
    said = failures.commonest()
    assert [line.split()[0] for line in said[:2]] == ["3", "2"] and said[-1] == "and 3 other reasons"
    assert said[1] == "2 of 9 screened, as #11: reason b"
